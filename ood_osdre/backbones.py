r"""Ratios on a backbone that the user brings, instead of one that a configuration describes."""

__all__ = ["build_ratio_on", "count_features"]

import copy

import torch
from torch import Tensor, nn

from .building import build_one_step
from .config import Config
from .errors import UserError
from .extraction import evaluating, explained
from .ratio import OneStepRatio


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
