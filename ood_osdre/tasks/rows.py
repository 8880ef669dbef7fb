r"""A user's rows of numbers, and what a caller's function draws, checked where they come in."""

__all__ = ["check_rows", "checked_pairs", "finite_rows", "real_values", "repetition"]

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError

Array = NDArray[np.float64]

# Of fewer rows a validation and a test part say nothing.
LEAST_ROWS = 100
# Of standardised columns, the least variance in any direction that a covariance still resolves.
LEAST_VARIANCE = 1e-10

# A column that repeats one value in a larger share of rows, or has a smaller share of distinct
# values, is discrete.
MOST_REPEATED, LEAST_DISTINCT = 0.05, 0.1


def real_values(name: str, values: object) -> NDArray[np.float64]:
    r"""Returns a user's numbers in double precision, or says why they are none.

    Arguments:
        name: What to call them in errors.
        values: An array or what makes one, or a tensor on any device, of any real type.

    Raises:
        UserError: If a value is masked, or they are no real numbers, as dates and complex ones.
    """
    if isinstance(values, Tensor) and not values.is_complex():
        values = values.detach().cpu().double().numpy()
    if np.ma.is_masked(values):
        count = int(np.ma.count_masked(values))
        raise UserError(f"{name}: {count} values are masked, expected an array without a mask.")
    try:
        array = np.asarray(values)
        if array.dtype.kind in "fiubO":
            return array.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name}: expected numbers, {_something_else(values)}.") from None
    raise UserError(f"{name}: expected numbers, got dtype {array.dtype}.")


def finite_rows(name: str, values: object) -> NDArray[np.float64]:
    r"""Returns a user's rows, or says why they are none.

    Arguments:
        name: What to call them in errors.
        values: Numbers with shape :math:`(n)` or :math:`(n, d)`, see :func:`real_values`.

    Returns:
        The rows, with shape :math:`(n, d)`.

    Raises:
        UserError: If they are no numbers, masked, none at all, of another shape, or not finite.
    """
    array = real_values(name, values)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not array.size:
        raise UserError(f"{name}: got shape {array.shape}, expected (n,) or (n, d).")
    bad = int((~np.isfinite(array)).any(axis=1).sum())
    if bad:
        raise UserError(f"{name}: {bad} of {len(array)} rows hold NaN or infinity, expected none.")
    return array


def _something_else(values: object) -> str:
    r"""Returns where a user's values hold no numbers, of a data frame the column."""
    columns, dtypes = (getattr(values, name, ()) for name in ("columns", "dtypes"))
    for column, dtype in zip(columns, dtypes, strict=False):
        if getattr(dtype, "kind", "O") not in "fiub":
            return f"column {column!r} holds {dtype}"
    return "got something else"


def repetition(column: NDArray[np.float64]) -> str | None:
    r"""Returns how a column repeats its values, if it does so like a discrete one, else None.

    Arguments:
        column: The values, with shape :math:`(n)`.
    """
    n, counts = len(column), np.unique(column, return_counts=True)[1]
    if len(counts) < LEAST_DISTINCT * n:
        return f"has {len(counts)} distinct values among {n} rows"
    if counts.max() > MOST_REPEATED * n:
        return f"repeats one value in {counts.max()} of {n} rows"
    return None


def check_rows(name: str, x: Array, least: int = LEAST_ROWS) -> None:
    r"""Refuses rows that no density can be fitted to.

    Arguments:
        name: What to call them in errors.
        x: The rows, with shape :math:`(N, d)`.
        least: The least number of rows; twice the columns are needed in any case.

    Raises:
        UserError: If there are too few of them, or a column is constant, a linear function of
            others, or of a size that has no variance in double precision.
    """
    n, d = x.shape
    if n < max(least, 2 * d):
        raise UserError(f"{name}: {n} rows, expected at least {max(least, 2 * d)}.")
    still = np.flatnonzero(x.min(axis=0) == x.max(axis=0))
    if len(still):
        raise UserError(f"{name}: column {still[0]} is constant, expected one that varies.")
    with np.errstate(over="ignore", under="ignore"):
        deviation = x.std(axis=0)
    for i in np.flatnonzero(~((deviation > 0) & np.isfinite(deviation))):
        raise UserError(
            f"{name}: column {i} goes up to {np.abs(x[:, i]).max():.1g}, too large or too small to "
            "be squared; expected other units."
        )
    scaled = (x - x.mean(axis=0)) / deviation
    if np.linalg.eigvalsh(scaled.T @ scaled / n)[0] < LEAST_VARIANCE:
        raise UserError(f"{name}: a column is a linear function of others; leave it out.")


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
