r"""What is refused before a network sees it, or before a score leaves, in one line each.

Broadcasting and global pooling let a network score nearly anything: images of another size, one
channel for three, one coordinate for many. Such scores are numbers, but not log-ratios of what
the model was trained on. NaN and infinity are refused with their count, so that none is compared,
calibrated on or reported.
"""

__all__ = ["check_features", "check_inputs", "check_log_ratios"]

import torch
from torch import Tensor

from ..errors import UserError


def check_inputs(x: object, shape: tuple[int, ...] | None, what: str = "x") -> Tensor:
    r"""Refuses network inputs that are not what the network was trained on.

    Arguments:
        x: The inputs, floats with shape :math:`(B, *)`.
        shape: The shape :math:`*` of one input in training; None if it is not known.
        what: What to call the inputs in errors.

    Returns:
        The inputs.

    Raises:
        TypeError: If they are no tensor.
        UserError: If there are none, or they are of another shape, not floats or not finite.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: got {type(x).__name__}, expected a tensor.")
    if (shape is not None and x.shape[1:] != shape) or x.ndim < 2 or len(x) == 0:
        one = "..." if shape is None else ", ".join(map(str, shape))
        raise UserError(
            f"{what}: got shape {tuple(x.shape)}, expected (B, {one}) as in training, not empty."
        )
    if not x.is_floating_point():
        raise UserError(f"{what}: got {_name(x.dtype)}, expected floats.")
    _refuse_infinite(x, what, "inputs")
    return x


def check_features(features: object, count: int | None, what: str = "features") -> Tensor:
    r"""Refuses what are no features that a head can be trained or evaluated on.

    Arguments:
        features: The features, with shape :math:`(N, F)`.
        count: The number of features :math:`F`; None for any.
        what: What to call the features in errors.

    Returns:
        The features in single precision, with shape :math:`(N, F)`.

    Raises:
        TypeError: If they are no tensor.
        UserError: If they are of another shape, not real or not finite.
    """
    if not isinstance(features, Tensor):
        raise TypeError(f"{what}: got {type(features).__name__}, expected a tensor.")
    if features.ndim != 2 or features.shape[1] != (count or max(features.shape[1], 1)):
        raise UserError(
            f"{what}: got shape {tuple(features.shape)}, expected (N, {count or 'F'})."
        )
    if features.is_complex():
        raise UserError(f"{what}: got {_name(features.dtype)}, expected real numbers.")
    single = features.detach().float()
    _refuse_infinite(single, what, "vectors")
    return single


def check_log_ratios(scores: Tensor, what: str) -> Tensor:
    r"""Refuses log-ratios that are not finite, with their count.

    Arguments:
        scores: The log-ratios, with shape :math:`(N)`.
        what: What to call them in errors.

    Returns:
        The log-ratios.

    Raises:
        UserError: If one is NaN or infinite.
    """
    bad = int((~torch.isfinite(scores)).sum())
    if bad:
        raise UserError(
            f"{what}: {bad} of {len(scores)} log-ratios are NaN or infinite, expected finite ones."
        )
    return scores


def _refuse_infinite(x: Tensor, what: str, items: str) -> None:
    bad = int((~torch.isfinite(x.flatten(1)).all(dim=1)).sum())
    if bad:
        raise UserError(f"{what}: {bad} of {len(x)} {items} hold NaN or infinity.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
