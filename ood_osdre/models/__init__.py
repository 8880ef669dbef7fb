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
    "RepresentationRatio",
    "ResNetBackbone",
    "SpeedBackbone",
    "TemporalBasis",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
    "UNetDecoder",
    "UNetEncoder",
    "VectorDecoder",
    "WhitenedRatio",
    "Whitening",
    "check_inputs",
    "classifier_features",
    "collect_features",
    "conditioning",
    "device_of",
    "evaluating",
    "explained",
    "extract_features",
    "gram_matrix",
    "input_batches",
    "inverse_noise",
    "named_layers",
    "timm_network",
    "unwrapped",
    "whitening_of",
]

from .baselines import (
    Classifier,
    NetworkEvaluations,
    TimeConditionedMLP,
    TimeConditionedRatio,
    TimeConditionedResNet,
    timm_network,
)
from .bases import KERNELS, RBFBasis, TemporalBasis, conditioning, gram_matrix
from .frozen import (
    Features,
    collect_features,
    device_of,
    evaluating,
    explained,
    extract_features,
    input_batches,
    named_layers,
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
from .representation import (
    NetworkDigest,
    RepresentationRatio,
    WhitenedRatio,
    Whitening,
    classifier_features,
    whitening_of,
)
from .speed import SpeedBackbone
from .unet import CHANNELS, UNetDecoder, UNetEncoder, VectorDecoder, inverse_noise
