r"""The rivals of the one-step ratio, behind the same face.

Every rival is a :class:`ood_osdre.ratio.RatioModel`: it has `log_ratio(x)`, is trained by the same
loop on the same batches and scored by the same code.

- **Direct ratio estimators**, :class:`DirectRatio` under an
  :class:`ood_osdre.objectives.EndPointLoss`: logistic, NCE, InfoNCE, least squares (χ²), PW, KLIEP
  and LSIF.
- **Solver-based estimators**, :class:`TimeConditionedRatio`: DRE-∞ under
  :class:`TimeConditionedScoreMatching`, D³RE under :class:`TimeConditionedConditionalMatching`.
- **Yardsticks**, :class:`Classifier` under :class:`ood_osdre.objectives.ClassLoss`: softmax,
  energy and nearest neighbours; with :class:`ood_osdre.objectives.OutlierExposure` added, the
  classifier that sees the same reference data as a ratio does.

The *paper-style* forms of the direct estimators are options of the common parts: separate
forward passes (`objective.separate_forwards`), a reference of which four fifths are ID images
(`data.mixture`), no crops.
"""

__all__ = [
    "SCORES",
    "Classifier",
    "DirectRatio",
    "TimeConditionedConditionalMatching",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
    "TimeConditionedScoreMatching",
]

from .direct import DirectRatio
from .time_conditioned import TimeConditionedConditionalMatching, TimeConditionedScoreMatching
from .time_networks import TimeConditionedMLP, TimeConditionedResNet
from .time_ratio import TimeConditionedRatio
from .yardsticks import SCORES, Classifier
