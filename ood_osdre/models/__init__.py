r"""Models of a log-ratio: temporal bases, networks, the one-step ratio and its baselines."""

__all__ = [
    "CHANNELS",
    "KERNELS",
    "MLP",
    "Classifier",
    "CoefficientNetwork",
    "Coefficients",
    "DirectRatio",
    "Features",
    "FoldedRatio",
    "NetworkDigest",
    "NetworkEvaluations",
    "OneStepRatio",
    "Prediction",
    "QuadraticFeatures",
    "RBFBasis",
    "RatioModel",
    "ResNetBackbone",
    "SpeedBackbone",
    "TemporalBasis",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
    "UNetDecoder",
    "UNetEncoder",
    "VectorDecoder",
    "check_inputs",
    "collect_features",
    "conditioning",
    "device_of",
    "evaluating",
    "explained",
    "extract_features",
    "gram_matrix",
    "input_batches",
    "inverse_noise",
    "unwrapped",
]

from .baselines import (
    Classifier,
    NetworkEvaluations,
    TimeConditionedMLP,
    TimeConditionedRatio,
    TimeConditionedResNet,
)
from .bases import KERNELS, RBFBasis, TemporalBasis, conditioning, gram_matrix
from .frozen import (
    Features,
    NetworkDigest,
    collect_features,
    device_of,
    evaluating,
    explained,
    extract_features,
    input_batches,
    unwrapped,
)
from .networks import (
    MLP,
    CoefficientNetwork,
    Coefficients,
    QuadraticFeatures,
    ResNetBackbone,
    check_inputs,
)
from .ratio import DirectRatio, FoldedRatio, OneStepRatio, Prediction, RatioModel
from .speed import SpeedBackbone
from .unet import CHANNELS, UNetDecoder, UNetEncoder, VectorDecoder, inverse_noise
