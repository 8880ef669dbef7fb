r"""From a configuration to the parts it describes: ratio, path, times and objective."""

__all__ = [
    "build_backbone",
    "build_decoder",
    "build_objective",
    "build_one_step",
    "build_path",
    "build_ratio",
    "build_times",
    "prepare_objective",
]

from collections.abc import Callable

from torch import nn

from .baselines import (
    Classifier,
    DirectRatio,
    TimeConditionedConditionalMatching,
    TimeConditionedMLP,
    TimeConditionedRatio,
    TimeConditionedResNet,
    TimeConditionedScoreMatching,
)
from .bases import RBFBasis
from .config import Config
from .errors import UserError
from .networks import MLP, CoefficientNetwork, ResNetBackbone
from .noises import BridgeNoise, DDBINoise, DequantisationNoise, NoiseModel
from .objectives import (
    BridgeWeight,
    ClassLoss,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    Constant,
    EndPointLoss,
    InverseVarianceTimes,
    InverseVarianceWeight,
    JointScoreMatching,
    LogitNormalTimes,
    NoiseVarianceWeight,
    Objective,
    OutlierExposure,
    PathDifference,
    PathVariance,
    Shrinkage,
    Term,
    Times,
    TimeScoreMatching,
    UniformTimes,
    Weight,
)
from .paths import GaussianPath, Moments
from .ratio import OneStepRatio, RatioModel
from .schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)
from .score_networks import CHANNELS, UNetDecoder, UNetEncoder, VectorDecoder, inverse_noise
from .sections import PathConfig

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "vp": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "kumaraswamy_affine": lambda: KumaraswamySchedule(kind="affine"),
    "kumaraswamy_spherical": lambda: KumaraswamySchedule(kind="spherical"),
}
#: The noise models by name, of a path's options and whether its variance is learnt.
NOISES: dict[str, Callable[[PathConfig, bool], NoiseModel]] = {
    "dequantisation": lambda o, learnable: DequantisationNoise(o.eps),
    "bridge": lambda o, learnable: BridgeNoise(o.gamma2, o.eps, learnable),
    "ddbi": lambda o, learnable: DDBINoise(o.gamma2, o.eps, learnable),
}
#: The weights of score-matching terms by name, of the path and the moments of its ends.
WEIGHTS: dict[str, Callable[[GaussianPath, Moments], Weight]] = {
    "constant": lambda path, moments: Constant(),
    "bridge": lambda path, moments: BridgeWeight(),
    "inverse_variance": InverseVarianceWeight,
    "noise_variance": lambda path, moments: NoiseVarianceWeight(path),
}


def build_ratio(config: Config, classes: int, features: int | None = None) -> RatioModel:
    r"""Builds an untrained ratio, or a rival.

    Arguments:
        config: The configuration.
        classes: The number of ID classes :math:`C`, 0 without labels.
        features: The dimension of the inputs, for an MLP; None for images.

    Raises:
        UserError: If the network is one for other inputs, or a classifier has no classes.
    """
    evaluation = config.evaluation
    if config.estimator == "time_conditioned":
        return TimeConditionedRatio(
            _time_network(config, features),
            evaluation.evaluations,
            build_path(config).t_range,
            evaluation.solver,
            evaluation.tolerance,
        )
    backbone, width = build_backbone(config, features)
    classes = _head_size(config, classes)
    if config.estimator == "classifier":
        if classes < 2:
            raise UserError(f"estimator: a classifier needs two ID classes, got {classes}.")
        return Classifier(backbone, width, classes, evaluation.score, evaluation.neighbours)
    if config.estimator == "direct":
        return DirectRatio(backbone, width, classes)

    return build_one_step(config, backbone, width, classes)


def build_one_step(
    config: Config, backbone: nn.Module, features: int, classes: int
) -> OneStepRatio:
    r"""Builds an untrained one-step ratio on a backbone.

    Arguments:
        config: The configuration, of which `network` says whether there is a class head.
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
        classes: The number of ID classes :math:`C`, 0 without labels.
    """
    basis, objective = config.basis, config.objective
    per_block = objective.conditional > 0 and objective.conditional_form.endswith("per_block")
    return OneStepRatio(
        CoefficientNetwork(
            backbone, features, basis.size, _head_size(config, classes), cells=per_block
        ),
        RBFBasis(basis.kernel, basis.size, basis.sigma, basis.floor, basis.learnable),
    )


def build_backbone(config: Config, features: int | None = None) -> tuple[nn.Module, int]:
    r"""Builds an untrained backbone and returns it with the number of its features.

    Arguments:
        config: The configuration.
        features: The dimension of the inputs, for an MLP; None for images.

    Raises:
        UserError: If the network is one for other inputs.
    """
    network = config.network
    if network.kind == "resnet":
        resnet = ResNetBackbone(network.width, network.depths, network.stem_stride, network.norm)
        return resnet, resnet.features
    if network.kind == "unet":
        unet = UNetEncoder([round(c * network.width) for c in CHANNELS])
        return unet, unet.features
    mlp = MLP(_vectors(features), round(256 * network.width), depth=len(network.depths))
    return mlp, mlp.features


def _head_size(config: Config, classes: int) -> int:
    # A head that nothing trains would report an accuracy that means nothing.
    trained = config.objective.class_weight or config.objective.outlier_exposure
    return classes if config.network.classes_head and trained else 0


def _time_network(config: Config, features: int | None) -> nn.Module:
    network = config.network
    if network.kind == "resnet":
        return TimeConditionedResNet(network.width, network.depths, network.stem_stride)
    return TimeConditionedMLP(
        _vectors(features), round(256 * network.width), depth=len(network.depths)
    )


def _vectors(features: int | None) -> int:
    if features is None:
        raise UserError("network.kind: got mlp, which takes vectors; expected resnet for images.")
    return features


def build_path(config: Config) -> GaussianPath:
    r"""Builds the path from the reference to ID data."""
    path = config.path
    # A learnable path pays mostly through the bridge's variance: about fourfold on images.
    learnable = config.objective.path_variance > 0
    noise = NOISES[path.noise](path, learnable)
    return GaussianPath(SCHEDULES[path.schedule](), noise, path.t_min)


def build_times(config: Config, path: GaussianPath, moments: Moments) -> Times:
    r"""Builds the distribution of training times, on the path's interval.

    Arguments:
        config: The configuration.
        path: The path.
        moments: The second moments of both ends.
    """
    if config.times.kind == "uniform":
        return UniformTimes(*path.t_range)
    if config.times.kind == "logit_normal":
        low, high = path.t_range
        return LogitNormalTimes(low=low, high=high)
    return InverseVarianceTimes(path, moments)


def prepare_objective(
    config: Config, moments: Moments, ratio: RatioModel
) -> tuple[Times, nn.Module]:
    r"""Builds the distribution of training times and the objective, on one path.

    Arguments:
        config: The configuration.
        moments: The second moments of both ends.
        ratio: What is to be trained, where it is to be trained.
    """
    device = next(ratio.parameters()).device
    path = build_path(config).to(device)
    times = build_times(config, path, moments)
    return times, build_objective(config, path, times, moments, ratio).to(device)


def build_objective(
    config: Config,
    path: GaussianPath,
    times: Times,
    moments: Moments,
    ratio: RatioModel | None = None,
) -> nn.Module:
    r"""Builds the weighted sum of the terms that the configuration switches on.

    A time-conditioned rival has the objective of its one term.

    Arguments:
        config: The configuration.
        path: The path.
        times: The distribution of training times.
        moments: The second moments of both ends.
        ratio: The ratio whose backbone the data score's decoder shares; only that wants one.
    """
    o = config.objective
    weight = WEIGHTS[o.weight](path, moments)
    if config.estimator == "time_conditioned":
        if o.conditional:
            return TimeConditionedConditionalMatching(path, weight)
        return TimeConditionedScoreMatching(path, weight, times)
    terms: dict[str, tuple[float, Callable[[], Term]]] = {
        "endpoint": (
            o.endpoint,
            lambda: EndPointLoss(path, o.endpoint_loss, o.endpoint_clean, o.endpoint_cap),
        ),
        "class": (o.class_weight, lambda: ClassLoss(path, clean=o.endpoint_clean)),
        "outlier_exposure": (
            o.outlier_exposure,
            lambda: OutlierExposure(path, clean=o.endpoint_clean),
        ),
        "conditional": (
            o.conditional,
            lambda: (
                ConditionalJointScoreMatching(
                    path, build_decoder(path, ratio), weight, o.conditional_form, o.data_score
                )
                if o.data_score
                else ConditionalScoreMatching(path, weight, form=o.conditional_form)
            ),
        ),
        "time_score": (
            o.time_score,
            lambda: (
                JointScoreMatching(path, build_decoder(path, ratio), weight, times, o.data_score)
                if o.data_score
                else TimeScoreMatching(path, weight, times)
            ),
        ),
        "path_difference": (o.path_difference, lambda: PathDifference(path, weight, o.delta)),
        "shrinkage": (o.shrinkage, lambda: Shrinkage(path, clean=o.endpoint_clean)),
        "path_variance": (o.path_variance, lambda: PathVariance(path, moments)),
    }
    chosen = {name: (w, make()) for name, (w, make) in terms.items() if w > 0}
    return Objective(chosen, separate=o.separate_forwards)


def build_decoder(path: GaussianPath, ratio: RatioModel | None) -> nn.Module:
    r"""Builds the network of the data score, a decoder on the backbone of a ratio.

    Arguments:
        path: The path, whose noise scales the decoder's output.
        ratio: The ratio, whose backbone has to be a U-Net's encoder or an MLP.
    """
    backbone = ratio.network.backbone if isinstance(ratio, OneStepRatio) else None
    if isinstance(backbone, UNetEncoder):
        return UNetDecoder(backbone, inverse_noise(path))
    if isinstance(backbone, MLP):
        return VectorDecoder(backbone, backbone.stem.in_features, scale=inverse_noise(path))
    raise UserError("objective.data_score: needs a backbone with a decoder, a U-Net or an MLP.")
