r"""From a configuration to the parts it describes: ratio, path, times and objective."""

__all__ = ["build_objective", "build_path", "build_ratio", "build_times"]

from collections.abc import Callable

from torch import nn

from ood_osdre.bases import RBFBasis
from ood_osdre.config import Config
from ood_osdre.networks import MLP, CoefficientNetwork, ResNetBackbone
from ood_osdre.objectives import (
    BridgeWeight,
    ClassLoss,
    ConditionalScoreMatching,
    Constant,
    EndPointLoss,
    InverseVarianceTimes,
    InverseVarianceWeight,
    LogitNormalTimes,
    Objective,
    PathDifference,
    PathVariance,
    PathVarianceWeight,
    Shrinkage,
    Term,
    Times,
    TimeScoreMatching,
    UniformTimes,
    Weight,
)
from ood_osdre.paths import (
    BridgeNoise,
    DDBINoise,
    DequantisationNoise,
    GaussianPath,
    Moments,
    NoiseModel,
)
from ood_osdre.ratio import OneStepRatio
from ood_osdre.schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)
from ood_osdre.sections import ObjectiveConfig

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "vp": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "kumaraswamy_affine": lambda: KumaraswamySchedule(kind="affine"),
    "kumaraswamy_spherical": lambda: KumaraswamySchedule(kind="spherical"),
}


def build_ratio(config: Config, classes: int, features: int | None = None) -> OneStepRatio:
    r"""Builds an untrained ratio.

    Arguments:
        config: The configuration.
        classes: The number of ID classes :math:`C`, 0 without labels.
        features: The dimension of the inputs, for an MLP.
    """
    network, basis = config.network, config.basis
    backbone: nn.Module
    if network.kind == "resnet":
        backbone = ResNetBackbone(network.width, network.depths, network.stem_stride, network.norm)
        width = backbone.features
    else:
        if features is None:
            raise ValueError("An MLP needs the dimension of its inputs, 'features'.")
        width = round(256 * network.width)
        backbone = MLP(features, width, depth=len(network.depths))
    per_block = (
        config.objective.conditional > 0 and config.objective.conditional_form == "per_block"
    )
    return OneStepRatio(
        CoefficientNetwork(
            backbone,
            width,
            basis.size,
            classes=classes if network.classes_head else 0,
            cells=per_block,
        ),
        RBFBasis(basis.kernel, basis.size, basis.sigma, basis.floor, basis.learnable),
    )


def build_path(config: Config) -> GaussianPath:
    r"""Builds the path from the reference to ID data."""
    path = config.path
    # A learnable path pays mostly through the bridge's variance: about fourfold on images.
    learnable = config.objective.path_variance > 0
    noise: NoiseModel
    if path.noise == "dequantisation":
        noise = DequantisationNoise(path.eps)
    elif path.noise == "bridge":
        noise = BridgeNoise(path.gamma2, path.eps, learnable)
    else:
        noise = DDBINoise(path.gamma2, path.eps, learnable)
    return GaussianPath(SCHEDULES[path.schedule](), noise, path.t_min)


def build_times(config: Config, path: GaussianPath, moments: Moments) -> Times:
    r"""Builds the distribution of training times, on the path's interval."""
    if config.times.kind == "uniform":
        return UniformTimes(*path.t_range)
    if config.times.kind == "logit_normal":
        low, high = path.t_range
        return LogitNormalTimes(low=low, high=high)
    return InverseVarianceTimes(path, moments)


def build_objective(
    config: Config, path: GaussianPath, times: Times, moments: Moments
) -> Objective:
    r"""Builds the weighted sum of the terms that the configuration switches on."""
    o = config.objective
    weight = _weight(o, path, moments)
    terms: dict[str, tuple[float, Callable[[], Term]]] = {
        "endpoint": (
            o.endpoint,
            lambda: EndPointLoss(path, loss=o.endpoint_loss, clean=o.endpoint_clean),
        ),
        "class": (o.class_weight, lambda: ClassLoss(path, clean=o.endpoint_clean)),
        "conditional": (
            o.conditional,
            lambda: ConditionalScoreMatching(path, weight, form=o.conditional_form),
        ),
        "time_score": (o.time_score, lambda: TimeScoreMatching(path, weight, times)),
        "path_difference": (o.path_difference, lambda: PathDifference(path, weight, o.delta)),
        "shrinkage": (o.shrinkage, lambda: Shrinkage(path, clean=o.endpoint_clean)),
        "path_variance": (o.path_variance, lambda: PathVariance(path, moments)),
    }
    return Objective({name: (w, make()) for name, (w, make) in terms.items() if w > 0})


def _weight(options: ObjectiveConfig, path: GaussianPath, moments: Moments) -> Weight:
    match options.weight:
        case "constant":
            return Constant()
        case "bridge":
            return BridgeWeight()
        case "inverse_variance":
            return InverseVarianceWeight(path, moments)
        case _:
            return PathVarianceWeight(path)
