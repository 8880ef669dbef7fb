r"""Factories: from a configuration to the untrained model that it describes.

:func:`build_ratio` builds every model, the one-step ratio and its baselines, on the backbone of
the configuration or on one that the user brings.
"""

__all__ = ["build_backbone", "build_ratio", "count_features"]

import copy

import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import UserError
from ..paths.build import build_path
from .bases import RBFBasis
from .classifier import Classifier
from .frozen import evaluating, explained
from .networks import MLP, CoefficientNetwork, ResNetBackbone
from .ratio import DirectRatio, OneStepRatio, RatioModel
from .time_conditioned import TimeConditionedMLP, TimeConditionedRatio, TimeConditionedResNet
from .unet import CHANNELS, UNetEncoder

# The features of an MLP of width 1.
MLP_FEATURES = 256


def build_ratio(
    config: Config,
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
            with the weights it has; None for the one that the configuration describes.
        size: The side of images, which only a backbone of the user's needs.

    Raises:
        UserError: If the network takes other inputs, the backbone returns no features, or a
            classifier has no classes.
    """
    evaluation, objective = config.evaluation, config.objective
    if config.estimator == "time_conditioned":
        return TimeConditionedRatio(
            _build_time_network(config, dim),
            evaluation.evaluations,
            build_path(config).t_range,
            evaluation.solver,
            evaluation.tolerance,
        )
    if backbone is None:
        backbone, features = build_backbone(config, dim)
    else:
        backbone = copy.deepcopy(backbone)
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


def build_backbone(config: Config, dim: int | None = None) -> tuple[nn.Module, int]:
    r"""Builds an untrained backbone and returns it with the number of its features.

    Arguments:
        config: The configuration.
        dim: The dimension of vectors; None for images.

    Raises:
        UserError: If the network takes the other kind of inputs.
    """
    network, dim = config.network, _checked_dim(config, dim)
    backbone: ResNetBackbone | UNetEncoder | MLP
    if network.kind == "resnet":
        backbone = ResNetBackbone(network.width, network.depths, network.stem_stride, network.norm)
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
    with evaluating(backbone), explained(backbone, zeros):
        output = backbone(zeros)
    if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != 2:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise UserError(
            f"backbone: {type(backbone).__name__} returns {found} for 2 inputs, expected features "
            "of shape (2, F); create a timm model with num_classes=0."
        )
    return output.shape[1]


def _build_time_network(config: Config, dim: int | None) -> nn.Module:
    network, dim = config.network, _checked_dim(config, dim)
    if network.kind == "resnet":
        return TimeConditionedResNet(
            network.width, network.depths, network.stem_stride, network.octaves
        )
    features = round(MLP_FEATURES * network.width)
    return TimeConditionedMLP(dim, features, len(network.depths), network.octaves)


def _checked_dim(config: Config, dim: int | None) -> int:
    r"""Returns the dimension of vectors, 0 for images; refuses a network for the other kind."""
    kind = config.network.kind
    if (kind == "mlp") != (dim is not None):
        inputs, expected = ("images", "resnet or unet") if dim is None else ("vectors", "mlp")
        raise UserError(f"network.kind: got {kind}, expected {expected} for {inputs}.")
    return dim or 0
