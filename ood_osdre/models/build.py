r"""From a configuration to the ratio that it describes, or a rival.

Ratios on a backbone that the user brings, instead of one that a configuration describes.
"""

__all__ = [
    "build_backbone",
    "build_one_step",
    "build_ratio",
    "build_ratio_on",
    "build_untrained",
    "count_features",
]

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
        return TimeConditionedResNet(
            network.width, network.depths, network.stem_stride, network.octaves
        )
    return TimeConditionedMLP(
        _vectors(features),
        round(256 * network.width),
        depth=len(network.depths),
        octaves=network.octaves,
    )


def _vectors(features: int | None) -> int:
    if features is None:
        raise UserError("network.kind: got mlp, which takes vectors; expected resnet for images.")
    return features


def build_ratio_on(
    backbone: nn.Module, shape: tuple[int, ...], config: Config, classes: int
) -> OneStepRatio:
    r"""Builds an untrained ratio on a copy of a backbone, with the weights it has.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        shape: The shape :math:`*` of one input.
        config: The configuration, of whose `network` only `classes_head` is read.
        classes: The number of ID classes, 0 without labels.

    Raises:
        UserError: If the backbone does not return features.
    """
    backbone = copy.deepcopy(backbone)
    return build_one_step(config, backbone, count_features(backbone, shape), classes)


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


def build_untrained(
    config: Config,
    classes: int,
    dim: int | None = None,
    backbone: nn.Module | None = None,
    size: int = 32,
) -> RatioModel:
    r"""Builds an untrained ratio, on the user's backbone if there is one.

    Arguments:
        config: The configuration.
        classes: The number of ID classes, 0 without labels.
        dim: The dimension of vectors; None for images.
        backbone: A module from inputs :math:`(B, *)` to features :math:`(B, F)`, which is copied;
            None for the one that the configuration describes.
        size: The side of images, which only a backbone of the user's needs.

    Raises:
        UserError: If the network takes something else.
    """
    if backbone is not None:
        shape = (3, size, size) if dim is None else (dim,)
        return build_ratio_on(backbone, shape, config, classes)
    if dim is not None and config.network.kind != "mlp":
        raise UserError(
            f"network.kind: got {config.network.kind}, which takes images; expected mlp for "
            "vectors."
        )
    return build_ratio(config, classes, dim)
