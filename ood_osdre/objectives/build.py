r"""Builds the objective of a configuration."""

__all__ = ["build_objective", "prepare_objective"]

from torch import nn

from ..config import Config
from ..errors import UserError
from ..models import (
    MLP,
    OneStepRatio,
    RatioModel,
    UNetDecoder,
    UNetEncoder,
    VectorDecoder,
    inverse_noise,
)
from ..paths import GaussianPath, Moments, Times
from ..paths.build import build_path, build_times, build_weight
from .base import Objective, Term
from .conditional import (
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    TimeConditionedConditionalMatching,
)
from .endpoint import EndPointLoss
from .marginal import (
    JointScoreMatching,
    PathDifference,
    TimeConditionedScoreMatching,
    TimeScoreMatching,
)
from .regularisers import ClassLoss, OutlierExposure, PathVariance, Shrinkage


def prepare_objective(
    config: Config, moments: Moments, ratio: RatioModel
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
    config: Config, path: GaussianPath, times: Times, moments: Moments, ratio: RatioModel
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
    weight = build_weight(config, path, moments)
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
        "class": (o.class_weight, ClassLoss(path, clean)),
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
