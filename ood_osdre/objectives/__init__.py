r"""Training objectives: terms, their weights and their times.

============================================ ================= ==============================
Term                                         Needs             Minimiser
============================================ ================= ==============================
:class:`ConditionalScoreMatching`            path              time score, hence dequantised
                                                               log-ratio
:class:`TimeScoreMatching`                   path, :math:`p'`  the same
:class:`TimeConditionedConditionalMatching`, time in network   the same
:class:`TimeConditionedScoreMatching`
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
    "ClassLoss",
    "ConditionalJointScoreMatching",
    "ConditionalScoreMatching",
    "EndPointLoss",
    "JointScoreMatching",
    "NormalisedLikelihood",
    "Objective",
    "OutlierExposure",
    "PathDifference",
    "PathVariance",
    "Proposal",
    "Ratio",
    "Shrinkage",
    "Term",
    "TimeConditionedConditionalMatching",
    "TimeConditionedScoreMatching",
    "TimeScoreMatching",
    "evaluate",
    "log_normal",
]

from .base import Batch, Objective, Ratio, Term, evaluate
from .conditional import (
    FORMS,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    TimeConditionedConditionalMatching,
)
from .endpoint import (
    LOSSES,
    EndPointLoss,
    NormalisedLikelihood,
    Proposal,
    log_normal,
)
from .marginal import (
    JointScoreMatching,
    PathDifference,
    TimeConditionedScoreMatching,
    TimeScoreMatching,
)
from .regularisers import ClassLoss, OutlierExposure, PathVariance, Shrinkage
