r"""Checks of what a caller's function draws."""

__all__ = ["checked_pairs"]

import torch
from torch import Tensor

from ..errors import UserError


def checked_pairs(
    name: str,
    pairs: tuple[Tensor, Tensor],
    dim: int,
    size: int | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Returns points of both sources in the default type, or says what is wrong with them.

    Arguments:
        name: What the error calls them.
        pairs: The points of :math:`p_0` and of :math:`p_1`, each with shape :math:`(N, d)`.
        dim: The dimension :math:`d`.
        size: The number :math:`N`; None for any but none.
        device: The device they should be on; None for any.

    Raises:
        ValueError: If they are something else.
        UserError: If some are not finite.
    """
    both = list(pairs) if isinstance(pairs, tuple | list) else [pairs]
    if len(both) != 2 or not all(isinstance(x, Tensor) for x in both):
        found = ", ".join(type(x).__name__ for x in both[:3]) or "none"
        raise ValueError(f"'{name}' should give two tensors, got {len(both)}: {found}.")
    x_0, x_1 = both
    n = len(x_0) if size is None and x_0.ndim else size
    if not n or x_0.shape != (n, dim) or x_1.shape != (n, dim):
        raise ValueError(
            f"'{name}' should give points of both sources with shape ({n or 'N >= 1'}, {dim}), "
            f"got {tuple(x_0.shape)} and {tuple(x_1.shape)}."
        )
    for label, x in (("p_0", x_0), ("p_1", x_1)):
        if not x.is_floating_point():
            raise ValueError(f"'{name}' should give floating-point points, got {x.dtype}.")
        if device is not None and x.device.type != device.type:
            raise ValueError(f"'{name}' should give points on {device}, got {x.device}.")
        bad = int((~torch.isfinite(x)).any(dim=1).sum())
        if bad:
            raise UserError(
                f"{name}: {bad} of {n} points of {label} are not finite, expected numbers only."
            )
    dtype = torch.get_default_dtype()
    return x_0.detach().to(dtype), x_1.detach().to(dtype)
