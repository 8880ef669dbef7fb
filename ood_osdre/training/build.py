r"""Factories: from a configuration to the path, the model and the objective that it describes.

:func:`build_ratio` builds every model, the one-step ratio and its baselines, on the backbone of
the configuration or on one that the user brings. :func:`prepare_objective` builds what it is
trained with.
"""

__all__ = [
    "NOISES",
    "SCHEDULES",
    "WEIGHTS",
    "build_head",
    "build_objective",
    "build_path",
    "build_ratio",
    "build_times",
    "prepare_objective",
]

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config import MLP_FEATURES, HeadConfig, Trained
from ..errors import UserError, counted
from ..models import (
    CHANNELS,
    MLP,
    Classifier,
    CoefficientNetwork,
    DirectRatio,
    OneStepRatio,
    QuadraticFeatures,
    RatioModel,
    RBFBasis,
    ResNetBackbone,
    SpeedBackbone,
    TimeConditionedMLP,
    TimeConditionedRatio,
    TimeConditionedResNet,
    UNetDecoder,
    UNetEncoder,
    VectorDecoder,
    evaluating,
    explained,
    gaussian_ratio,
    inverse_noise,
    own_copy,
)
from ..objectives import (
    ClassLoss,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    EndPointLoss,
    JointScoreMatching,
    Objective,
    OutlierExposure,
    PathDifference,
    PathVariance,
    Shrinkage,
    Term,
    TimeConditionedConditionalMatching,
    TimeConditionedScoreMatching,
    TimeScoreMatching,
)
from ..paths import (
    BridgeNoise,
    BridgeWeight,
    Constant,
    DDBINoise,
    DequantisationNoise,
    FollmerSchedule,
    GaussianPath,
    InverseVarianceTimes,
    InverseVarianceWeight,
    KumaraswamySchedule,
    LinearSchedule,
    LogitNormalTimes,
    Moments,
    NoiseModel,
    NoiseVarianceWeight,
    Schedule,
    Times,
    TrigonometricSchedule,
    UniformTimes,
    VariancePreservingSchedule,
    Weight,
)
from ..sections import PathConfig

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "vp": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "kumaraswamy_affine": lambda: KumaraswamySchedule(kind="affine"),
    "kumaraswamy_spherical": lambda: KumaraswamySchedule(kind="spherical"),
}
#: Builds a noise model by name, of the path's options and whether its variance is learnt.
NOISES: dict[str, Callable[[PathConfig, bool], NoiseModel]] = {
    "dequantisation": lambda o, learnable: DequantisationNoise(o.eps),
    "bridge": lambda o, learnable: BridgeNoise(o.gamma2, o.eps, learnable),
    "ddbi": lambda o, learnable: DDBINoise(o.gamma2, o.eps, learnable),
}
#: Builds a weight by name, of the path and the second moments of its ends.
WEIGHTS: dict[str, Callable[[GaussianPath, Moments], Weight]] = {
    "constant": lambda path, moments: Constant(),
    "bridge": lambda path, moments: BridgeWeight(),
    "inverse_variance": InverseVarianceWeight,
    "noise_variance": lambda path, moments: NoiseVarianceWeight(path),
}


def build_path(config: Trained) -> GaussianPath:
    r"""Builds the path from the reference to ID data, of images or of features."""
    path = config.path
    # A learnable path gains mostly by the bridge's variance: about fourfold on images.
    learnable = config.objective.path_variance > 0
    noise = NOISES[path.noise](path, learnable)
    return GaussianPath(SCHEDULES[path.schedule](), noise, path.t_min)


def build_times(config: Trained, path: GaussianPath, moments: Moments) -> Times:
    r"""Builds the distribution of training times, on the path's interval.

    Arguments:
        config: The configuration.
        path: The path.
        moments: The second moments of its ends.
    """
    (low, high), stratified = path.t_range, config.times.stratified
    if config.times.kind == "uniform":
        return UniformTimes(low, high, stratified=stratified)
    if config.times.kind == "logit_normal":
        return LogitNormalTimes(low=low, high=high, stratified=stratified)
    return InverseVarianceTimes(path, moments, stratified=stratified)


def build_ratio(
    config: Trained,
    classes: int,
    dim: int | None = None,
    backbone: nn.Module | None = None,
    size: int = 32,
) -> RatioModel:
    r"""Builds an untrained model.

    Arguments:
        config: The configuration. Of a class head it says whether there is one: none is built that
            nothing trains, as the accuracy of such a head means nothing.
        classes: The number of ID classes :math:`C`, 0 without labels.
        dim: The dimension of vectors; None for images.
        backbone: A module from inputs :math:`(B, *)` to features :math:`(B, F)`, which is copied
            with its weights, in the default floats; None for the one that the configuration has.
        size: The side of images, which only a backbone of the user's needs.

    Raises:
        UserError: If the network takes other inputs, the backbone returns no features, or a
            classifier has no classes.
    """
    evaluation, objective = config.evaluation, config.objective
    if config.estimator == "time_conditioned":
        network, t_range = _build_time_network(config, dim), build_path(config).t_range
        options = evaluation.evaluations, t_range, evaluation.solver, evaluation.tolerance
        return TimeConditionedRatio(network, *options)
    if backbone is None:
        backbone, features = build_backbone(config, dim)
    else:
        backbone = own_copy(backbone)
        features = count_features(backbone, (3, size, size) if dim is None else (dim,))
    if not config.network.classes_head or not (
        objective.class_weight or objective.outlier_exposure
    ):
        classes = 0
    if config.estimator == "classifier":
        if classes < 2:
            raise UserError(f"estimator: a classifier needs two ID classes, got {classes}.")
        return Classifier(backbone, features, classes, evaluation.score, evaluation.neighbours)
    if config.estimator == "direct":
        return DirectRatio(backbone, features, classes)
    basis = config.basis
    per_block = objective.conditional > 0 and objective.conditional_form.endswith("per_block")
    return OneStepRatio(
        CoefficientNetwork(backbone, features, basis.size, classes, cells=per_block),
        RBFBasis(basis.kernel, basis.size, basis.sigma, basis.floor, basis.learnable),
    )


def build_head(head: HeadConfig, rank: int, classes: int = 1) -> RatioModel:
    r"""Builds an untrained ratio of :math:`r` whitened features, in single precision.

    Arguments:
        head: The head; its seed draws the weights, and the caller's generator stays as it is.
        rank: The number of features :math:`r`.
        classes: The number of ID classes, of which the head `gaussians` has one each.
    """
    if head.estimator == "gaussians":
        return gaussian_ratio(rank, classes, head.tied).float()
    backbone: nn.Module | None = None
    if head.backbone != "mlp":
        backbone = nn.Identity() if head.backbone == "linear" else QuadraticFeatures(rank)
    with torch.random.fork_rng():
        torch.manual_seed(head.training.seed)
        return build_ratio(head, 0, rank, backbone).float()


def build_backbone(config: Trained, dim: int | None = None) -> tuple[nn.Module, int]:
    r"""Builds an untrained backbone and returns it with the number of its features.

    Arguments:
        config: The configuration.
        dim: The dimension of vectors; None for images.

    Raises:
        UserError: If the network takes the other kind of inputs.
    """
    network, dim = config.network, _checked_dim(config, dim)
    backbone: ResNetBackbone | SpeedBackbone | UNetEncoder | MLP
    if network.kind == "resnet":
        backbone = ResNetBackbone(network.width, network.depths, network.stem_stride, network.norm)
    elif network.kind == "speed":
        backbone = SpeedBackbone(network.width)
    elif network.kind == "unet":
        backbone = UNetEncoder([round(c * network.width) for c in CHANNELS])
    else:
        backbone = MLP(dim, round(MLP_FEATURES * network.width), depth=len(network.depths))
    return backbone, backbone.features


@torch.no_grad()
def count_features(backbone: nn.Module, shape: tuple[int, ...]) -> int:
    r"""Returns the number of features :math:`F` of a backbone, by trying it on zeros.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        shape: The shape :math:`*` of one input.

    Raises:
        UserError: If it returns something else, or fails on such an input.
    """
    first = next(backbone.parameters(), torch.zeros(()))
    zeros = torch.zeros(2, *shape, device=first.device, dtype=first.dtype)
    for x in (zeros, zeros[:1]):  # a `squeeze` takes the batch of one image away
        with evaluating(backbone), explained(backbone, x):
            output = backbone(x)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(x):
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise UserError(
                f"backbone: {type(backbone).__name__} returns {found} for "
                f"{counted(len(x), 'input')}, expected features of shape ({len(x)}, F); create a "
                "timm model with num_classes=0."
            )
    return output.shape[1]


def _build_time_network(config: Trained, dim: int | None) -> nn.Module:
    network, dim = config.network, _checked_dim(config, dim)
    if network.kind == "resnet":
        return TimeConditionedResNet(
            network.width, network.depths, network.stem_stride, network.octaves
        )
    features = round(MLP_FEATURES * network.width)
    return TimeConditionedMLP(dim, features, len(network.depths), network.octaves)


def _checked_dim(config: Trained, dim: int | None) -> int:
    r"""Returns the dimension of vectors, 0 for images; refuses a network for the other kind."""
    kind = config.network.kind
    if (kind == "mlp") != (dim is not None):
        inputs, expected = (
            ("images", "resnet, speed or unet") if dim is None else ("vectors", "mlp")
        )
        raise UserError(f"network.kind: got {kind}, expected {expected} for {inputs}.")
    return dim or 0


def prepare_objective(
    config: Trained, moments: Moments, ratio: RatioModel
) -> tuple[Times, Objective]:
    r"""Builds the distribution of training times and the objective, on one path.

    Arguments:
        config: The configuration.
        moments: The second moments of both ends.
        ratio: The model to train, on the device to train on.
    """
    device = next(ratio.parameters()).device
    path = build_path(config).to(device)
    times = build_times(config, path, moments)
    return times, build_objective(config, path, times, moments, ratio).to(device)


def build_objective(
    config: Trained, path: GaussianPath, times: Times, moments: Moments, ratio: RatioModel
) -> Objective:
    r"""Builds the weighted sum of the terms that the configuration switches on.

    A time-conditioned baseline has one term, with weight 1.

    Arguments:
        config: The configuration.
        path: The path.
        times: The distribution of training times.
        moments: The second moments of both ends.
        ratio: The model, whose backbone the decoder of a data score shares.

    Raises:
        UserError: If `objective.data_score` is on and the backbone has no decoder.
    """
    o, clean = config.objective, config.objective.endpoint_clean
    weight = WEIGHTS[o.weight](path, moments)
    if config.estimator == "time_conditioned":
        if o.conditional:
            return Objective(
                {"conditional": (1.0, TimeConditionedConditionalMatching(path, weight))}
            )
        return Objective({"time_score": (1.0, TimeConditionedScoreMatching(path, weight, times))})
    conditional: Term = ConditionalScoreMatching(path, weight, o.conditional_form)
    time_score: Term = TimeScoreMatching(path, weight, times)
    if o.data_score:
        decoder = _decoder(path, ratio)
        conditional = ConditionalJointScoreMatching(
            path, decoder, weight, o.conditional_form, o.data_score
        )
        time_score = JointScoreMatching(path, decoder, weight, times, o.data_score)
    terms: dict[str, tuple[float, Term]] = {
        "endpoint": (o.endpoint, EndPointLoss(path, o.endpoint_loss, clean, o.endpoint_cap)),
        "class": (o.class_weight, ClassLoss(path, clean, o.label_smoothing)),
        "outlier_exposure": (o.outlier_exposure, OutlierExposure(path, clean)),
        "conditional": (o.conditional, conditional),
        "time_score": (o.time_score, time_score),
        "path_difference": (o.path_difference, PathDifference(path, weight, o.delta)),
        "shrinkage": (o.shrinkage, Shrinkage(path, clean)),
        "path_variance": (o.path_variance, PathVariance(path, moments)),
    }
    chosen = {name: (w, term) for name, (w, term) in terms.items() if w > 0}
    return Objective(chosen, separate=o.separate_forwards)


def _decoder(path: GaussianPath, ratio: RatioModel) -> nn.Module:
    r"""Returns a network of the data score, a decoder on the backbone of a ratio."""
    backbone = ratio.network.backbone if isinstance(ratio, OneStepRatio) else None
    if isinstance(backbone, UNetEncoder):
        return UNetDecoder(backbone, inverse_noise(path))
    if isinstance(backbone, MLP):
        return VectorDecoder(backbone, backbone.stem.in_features, scale=inverse_noise(path))
    raise UserError("objective.data_score: needs a backbone with a decoder, a U-Net or an MLP.")
