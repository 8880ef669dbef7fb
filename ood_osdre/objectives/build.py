r"""From a configuration to the objective that trains a ratio."""

__all__ = [
    "build_decoder",
    "build_objective",
    "prepare_objective",
]

from collections.abc import Callable

from torch import nn

from ..config import Config
from ..errors import UserError
from ..models.networks import MLP
from ..models.ratio import OneStepRatio, RatioModel
from ..models.unet import UNetDecoder, UNetEncoder, VectorDecoder, inverse_noise
from ..paths.build import build_path, build_times, build_weight
from ..paths.gaussian import GaussianPath, Moments
from ..paths.times import Times
from .base import Objective, Term
from .conditional import ConditionalScoreMatching
from .endpoint import ClassLoss, EndPointLoss, OutlierExposure, Shrinkage
from .joint import ConditionalJointScoreMatching, JointScoreMatching
from .marginal import PathDifference, TimeScoreMatching
from .time_conditioned import TimeConditionedConditionalMatching, TimeConditionedScoreMatching
from .variance import PathVariance


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
    weight = build_weight(config, path, moments)
    if config.estimator == "time_conditioned":
        if o.conditional:
            return TimeConditionedConditionalMatching(path, weight)
        return TimeConditionedScoreMatching(path, weight, times)
    clean = o.endpoint_clean
    terms: dict[str, tuple[float, Callable[[], Term]]] = {
        "endpoint": (
            o.endpoint,
            lambda: EndPointLoss(path, o.endpoint_loss, clean, o.endpoint_cap),
        ),
        "class": (o.class_weight, lambda: ClassLoss(path, clean)),
        "outlier_exposure": (o.outlier_exposure, lambda: OutlierExposure(path, clean)),
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
        "shrinkage": (o.shrinkage, lambda: Shrinkage(path, clean)),
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
