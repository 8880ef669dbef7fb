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
    "GaussianLogRatio",
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
    "SummedScore",
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
    "copied",
    "describe_backbone",
    "device_of",
    "evaluating",
    "explained",
    "extract_features",
    "gaussian_ratio",
    "gram_matrix",
    "input_batches",
    "inverse_noise",
    "named_layers",
    "own_copy",
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
)
from .bases import KERNELS, RBFBasis, TemporalBasis, conditioning, gram_matrix
from .copies import copied, own_copy, unwrapped
from .frozen import (
    Features,
    collect_features,
    device_of,
    evaluating,
    explained,
    extract_features,
    input_batches,
    named_layers,
)
from .gaussians import GaussianLogRatio, gaussian_ratio
from .networks import (
    MLP,
    CoefficientNetwork,
    Coefficients,
    Prediction,
    QuadraticFeatures,
    ResNetBackbone,
    check_inputs,
    describe_backbone,
    timm_network,
)
from .ratio import (
    DirectRatio,
    FoldedRatio,
    OneStepRatio,
    RatioModel,
    SummedScore,
)
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
