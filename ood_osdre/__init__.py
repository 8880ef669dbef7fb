r"""One-step density-ratio estimation for out-of-distribution detection.

Time runs from the reference :math:`p_0` (t = 0) to in-distribution data :math:`p_1` (t = 1).
Log-ratios :math:`\log p_1(x) / p_0(x)` are in nats; larger means more in-distribution.

The names below are imported on first use, so `import ood_osdre` imports neither torch nor pydantic.
"""

__all__ = [
    "MLP",
    "Batch",
    "BridgeNoise",
    "CoefficientNetwork",
    "Coefficients",
    "Config",
    "DDBINoise",
    "DequantisationNoise",
    "FeatureRatio",
    "FoldedRatio",
    "FollmerSchedule",
    "GaussianPath",
    "KumaraswamySchedule",
    "LinearSchedule",
    "OODMetrics",
    "Objective",
    "OneStepDetector",
    "OneStepOutlierDetector",
    "OneStepRatio",
    "RBFBasis",
    "ResNetBackbone",
    "Schedule",
    "Scorer",
    "TemporalBasis",
    "Term",
    "TrigonometricSchedule",
    "UserError",
    "VariancePreservingSchedule",
    "load_config",
    "load_scorer",
    "ood_metrics",
]

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config, load_config
    from .detectors.feature_ratio import FeatureRatio
    from .detectors.one_step import OneStepDetector
    from .detectors.outliers import OneStepOutlierDetector
    from .detectors.scorer import Scorer, load_scorer
    from .errors import UserError
    from .evaluation.metrics import OODMetrics, ood_metrics
    from .models.bases import RBFBasis, TemporalBasis
    from .models.networks import MLP, CoefficientNetwork, Coefficients, ResNetBackbone
    from .models.ratio import FoldedRatio, OneStepRatio
    from .objectives.base import Batch, Objective, Term
    from .paths.gaussian import GaussianPath
    from .paths.noises import BridgeNoise, DDBINoise, DequantisationNoise
    from .paths.schedules import (
        FollmerSchedule,
        KumaraswamySchedule,
        LinearSchedule,
        Schedule,
        TrigonometricSchedule,
        VariancePreservingSchedule,
    )

__version__ = "0.1.0"

# The same register for the interpreter; a test holds it against the imports above.
_HOMES = {
    "config": ("Config", "load_config"),
    "detectors.feature_ratio": ("FeatureRatio",),
    "detectors.one_step": ("OneStepDetector",),
    "detectors.outliers": ("OneStepOutlierDetector",),
    "errors": ("UserError",),
    "evaluation.metrics": ("OODMetrics", "ood_metrics"),
    "detectors.scorer": ("Scorer", "load_scorer"),
    "models.bases": ("RBFBasis", "TemporalBasis"),
    "models.networks": ("MLP", "CoefficientNetwork", "Coefficients", "ResNetBackbone"),
    "models.ratio": ("FoldedRatio", "OneStepRatio"),
    "objectives.base": ("Batch", "Objective", "Term"),
    "paths.gaussian": ("GaussianPath",),
    "paths.noises": ("BridgeNoise", "DDBINoise", "DequantisationNoise"),
    "paths.schedules": (
        "FollmerSchedule",
        "KumaraswamySchedule",
        "LinearSchedule",
        "Schedule",
        "TrigonometricSchedule",
        "VariancePreservingSchedule",
    ),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f".{home}", __name__), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
