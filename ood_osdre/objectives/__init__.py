r"""Training objectives: terms, their weights and their times.

============================================ ================= ==============================
Term                                         Needs             Minimiser
============================================ ================= ==============================
:class:`ConditionalScoreMatching`            path              time score, hence dequantised
                                                               log-ratio
:class:`TimeScoreMatching`                   path, :math:`p'`  the same
:class:`PathDifference`                      path              the same, up to
                                                               :math:`O(\delta^2)`
:class:`JointScoreMatching`,                 data score        the same, and the data score
:class:`ConditionalJointScoreMatching`
:class:`EndPointLoss`                        path, or clean    dequantised, or clean, log-ratio
:class:`ClassLoss`                           labels            class posterior
:class:`OutlierExposure`                     --                uniform classes at the reference
:class:`Shrinkage`                           --                zero log-ratio
:class:`PathVariance`                        learnable path    minimum-variance path
============================================ ================= ==============================

Combine them in an :class:`Objective`. Losses are per sample, with shape :math:`(B)`; time and
noise are arguments.
"""

__all__ = [
    "FORMS",
    "LOSSES",
    "Batch",
    "BridgeWeight",
    "ClassLoss",
    "ConditionalJointScoreMatching",
    "ConditionalScoreMatching",
    "Constant",
    "DataScore",
    "EndPointLoss",
    "InverseVarianceTimes",
    "InverseVarianceWeight",
    "JointScoreMatching",
    "LogitNormalTimes",
    "NoiseVarianceWeight",
    "Objective",
    "OutlierExposure",
    "PathDifference",
    "PathTerm",
    "PathVariance",
    "Ratio",
    "Shrinkage",
    "Term",
    "TimeScoreMatching",
    "Times",
    "UniformTimes",
    "Weight",
    "evaluate",
]

from ..paths.times import InverseVarianceTimes, LogitNormalTimes, Times, UniformTimes
from ..paths.weights import (
    BridgeWeight,
    Constant,
    InverseVarianceWeight,
    NoiseVarianceWeight,
    Weight,
)
from .base import Batch, Objective, PathTerm, Ratio, Term, evaluate
from .conditional import FORMS, ConditionalScoreMatching
from .endpoint import LOSSES, ClassLoss, EndPointLoss, OutlierExposure, Shrinkage
from .joint import ConditionalJointScoreMatching, DataScore, JointScoreMatching
from .marginal import PathDifference, TimeScoreMatching
from .variance import PathVariance
