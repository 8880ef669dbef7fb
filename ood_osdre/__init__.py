r"""One-step density-ratio estimation for out-of-distribution detection.

Time runs from the reference :math:`p_0` (t = 0) to in-distribution data :math:`p_1` (t = 1).
Log-ratios :math:`\log p_1(x) / p_0(x)` are in nats; larger means more in-distribution.

The names below are looked up on first use, so that `import ood_osdre`, a `--help` and a mistyped
configuration key do not wait for torch.
"""

__all__ = [
    "MLP",
    "BridgeNoise",
    "CoefficientNetwork",
    "Coefficients",
    "Config",
    "DDBINoise",
    "DequantisationNoise",
    "Draw",
    "FeatureRatio",
    "FoldedRatio",
    "FollmerSchedule",
    "GaussianPath",
    "KumaraswamySchedule",
    "LinearSchedule",
    "OODMetrics",
    "Objective",
    "OneStepDetector",
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
    from .bases import RBFBasis, TemporalBasis
    from .config import Config, load_config
    from .detector import OneStepDetector
    from .errors import UserError
    from .experiment import Scorer, load_scorer
    from .feature_ratio import FeatureRatio
    from .metrics import OODMetrics, ood_metrics
    from .networks import MLP, CoefficientNetwork, Coefficients, ResNetBackbone
    from .noises import BridgeNoise, DDBINoise, DequantisationNoise
    from .objectives import Draw, Objective, Term
    from .paths import GaussianPath
    from .ratio import FoldedRatio, OneStepRatio
    from .schedules import (
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
    "bases": ("RBFBasis", "TemporalBasis"),
    "config": ("Config", "load_config"),
    "detector": ("OneStepDetector",),
    "errors": ("UserError",),
    "experiment": ("Scorer", "load_scorer"),
    "feature_ratio": ("FeatureRatio",),
    "metrics": ("OODMetrics", "ood_metrics"),
    "networks": ("MLP", "CoefficientNetwork", "Coefficients", "ResNetBackbone"),
    "noises": ("BridgeNoise", "DDBINoise", "DequantisationNoise"),
    "objectives": ("Draw", "Objective", "Term"),
    "paths": ("GaussianPath",),
    "ratio": ("FoldedRatio", "OneStepRatio"),
    "schedules": (
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
