r"""A user's rows of numbers: checked where they come in, and the linear maps of rows.

Every array of a user passes :func:`read_rows` once. What more a density needs of its rows is in
:func:`check_rows`; what a function draws for a fit is checked in :mod:`ood_osdre.tasks.draws`.
"""

__all__ = [
    "Affine",
    "Parts",
    "Whitening",
    "check_rows",
    "check_signature",
    "read_log_ratios",
    "read_paired",
    "read_rows",
    "refuse_constant",
    "refuse_infinite",
    "refuse_mask",
    "repetition",
]

import inspect
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from sklearn.utils import check_array
from torch import Tensor

from ..errors import UserError, one_line

Array = NDArray[np.float64]

# Of fewer rows a validation and a test part say nothing.
LEAST_ROWS = 100
# Of standardised columns, the least variance in any direction that a covariance still resolves.
LEAST_VARIANCE = 1e-10
# A column that repeats one value in a larger share of rows, or has a smaller share of distinct
# values, is discrete.
MOST_REPEATED, LEAST_DISTINCT = 0.05, 0.1
# Larger numbers are no log-ratios: their squares, and so a standard error, would overflow.
LARGEST = 1e150
# The characters of a signature that a message shows.
WIDTH = 80


def read_rows(name: str, values: object, columns: int | None = None, least: int = 1) -> Array:
    r"""Returns a user's rows in double precision, or says why they are none.

    Arguments:
        name: What to call them in errors.
        values: Finite real numbers with shape :math:`(n)` or :math:`(n, d)`: an array or what
            makes one, a data frame, or a tensor of any real type on any device.
        columns: The number :math:`d` of columns; None for any.
        least: The least number of rows.

    Returns:
        The rows, with shape :math:`(n, d)`.

    Raises:
        UserError: If they are something else, or one is masked.
    """
    refuse_mask(name, values)
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            values = (values if values.is_complex() else values.double()).numpy()
        with np.errstate(over="ignore", invalid="ignore"):  # it sums numbers of any size
            rows = check_array(
                values, dtype="numeric", ensure_2d=False, ensure_min_samples=least, input_name=name
            )
        rows = rows.astype(np.float64, casting="same_kind")  # dates are no numbers
        rows = rows[:, None] if rows.ndim == 1 else rows
        problem = "" if columns in (None, rows.shape[1]) else f"got shape {rows.shape}"
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        problem = one_line(error).rstrip(".")
    if problem:
        shape = {None: "(n,) or (n, d)", 1: "(n,) or (n, 1)"}.get(columns, f"(n, {columns})")
        raise UserError(
            f"{name}: {problem}; expected finite numbers with shape {shape}, n at least {least}."
        )
    return rows


def refuse_mask(name: str, values: object) -> None:
    r"""Refuses masked values, which other libraries would take for numbers."""
    if np.ma.is_masked(values):
        count = int(np.ma.count_masked(values))
        raise UserError(f"{name}: {count} values are masked, expected an array without a mask.")


def refuse_constant(name: str, x: Array) -> None:
    r"""Refuses rows, :math:`(N, d)`, of which a column is constant, with a :class:`UserError`."""
    if problem := _constant(x):
        raise UserError(f"{name}: {problem}.")


def _constant(x: Array) -> str | None:
    constant = x.min(axis=0) == x.max(axis=0)
    found = f"column {constant.argmax()} is constant, expected one that varies"
    return found if constant.any() else None


def repetition(column: Array) -> str | None:
    r"""Returns how a column, :math:`(n)`, repeats its values if it is discrete, else None."""
    n, counts = len(column), np.unique(column, return_counts=True)[1]
    if len(counts) < LEAST_DISTINCT * n:
        return f"has {len(counts)} distinct values among {n} rows"
    if counts.max() > MOST_REPEATED * n:
        return f"repeats one value in {counts.max()} of {n} rows"
    return None


def read_log_ratios(
    name: str, log_ratio: Callable[[Any], object], inputs: object, least: int = 1
) -> Array:
    r"""Returns the log-ratios of inputs, with shape :math:`(n)`, or refuses them."""
    refuse_mask(name, inputs)
    scores = read_rows(f"{name} scores", log_ratio(inputs), 1, least)[:, 0]
    if isinstance(inputs, Sized) and len(inputs) != len(scores):
        raise UserError(f"{name}: got {len(scores)} scores of {len(inputs)} inputs.")
    if (largest := np.abs(scores).max()) > LARGEST:
        raise UserError(f"{name} scores: got {largest:.3g}, expected log-ratios in nats.")
    return scores


def read_paired(x: object, y: object, least: int) -> tuple[Array, Array]:
    r"""Returns the rows of two variables, as many of each; errors are those of :func:`read_rows`."""
    first, second = read_rows("x", x, least=least), read_rows("y", y, least=least)
    if len(first) != len(second):
        raise UserError(
            f"x and y: got {len(first)} and {len(second)} rows, expected as many of each."
        )
    return first, second


def refuse_infinite(x: Array, y: Array) -> None:
    r"""Refuses variables, :math:`(n, d)`, whose information is infinite or is no ratio's to find."""
    if problem := _discrete("x", x) or _discrete("y", y) or _function(x, y):
        raise UserError(problem)


def _discrete(name: str, array: Array) -> str | None:
    r"""Returns which column is constant or discrete."""
    for i, column in enumerate(array.T):
        if found := repetition(column):
            return (
                f"{name}: column {i} {found}, expected continuous numbers; leave out a constant, "
                "add noise to discrete data or use a plug-in estimator for it."
            )
    return None


def _function(x: Array, y: Array) -> str | None:
    r"""Returns which column of `x` is a monotone function of one of `y`."""
    ranks = rankdata(y, axis=0)
    for i, column in enumerate(rankdata(x, axis=0).T):
        for kind, order in (("an increasing", column), ("a decreasing", len(x) + 1 - column)):
            same = np.flatnonzero((order[:, None] == ranks).all(axis=0))
            if len(same):
                return (
                    f"x and y: column {i} of x is {kind} function of column {same[0]} of y, "
                    "expected others; the information is infinite."
                )
    return None


def check_rows(name: str, x: Array, least: int = LEAST_ROWS) -> None:
    r"""Refuses rows, :math:`(N, d)`, that no density can be fitted to.

    Raises:
        UserError: If there are fewer than `least` or twice the columns, or a column is constant, a
            linear function of others, or of a size that has no variance in double precision.
    """
    if problem := _obstacle(x, max(least, 2 * x.shape[1])):
        raise UserError(f"{name}: {problem}.")


def _obstacle(x: Array, least: int) -> str | None:
    r"""Returns why no density can be fitted to rows, None if one can."""
    if len(x) < least:
        return f"{len(x)} rows, expected at least {least}"
    if constant := _constant(x):
        return constant
    with np.errstate(over="ignore", under="ignore"):
        deviation = x.std(axis=0)
    wild = ~((deviation > 0) & np.isfinite(deviation))
    if wild.any():
        i = wild.argmax()
        return (
            f"column {i} goes up to {np.abs(x[:, i]).max():.1g}, too large or too small to be "
            "squared; expected other units"
        )
    scaled = (x - x.mean(axis=0)) / deviation
    if np.linalg.eigvalsh(scaled.T @ scaled / len(x))[0] < LEAST_VARIANCE:
        return "a column is a linear function of others; leave it out"
    return None


def check_signature(
    name: str, function: object, arguments: Sequence[str] = ("n", "generator")
) -> None:
    r"""Refuses what cannot be called with as many arguments, with a :class:`UserError`.

    Arguments:
        name: What the error calls it.
        function: The function; a built-in one may have no signature to look at.
        arguments: What the error calls its arguments.
    """
    found = type(function).__name__
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]  # a TypeError of any other
        found = f"a function of {' '.join(str(signature).split())[:WIDTH]}"
        signature.bind(*arguments)
    except TypeError:
        expected = ", ".join(arguments)
        raise UserError(f"{name}: got {found}, expected a function of ({expected}).") from None
    except ValueError:
        pass


class Affine(NamedTuple):
    r"""A map that standardises points of two sources together, :math:`A (x - m)`.

    Attributes:
        mean: The vector :math:`m`, with shape :math:`(d)`.
        matrix: The matrix :math:`A`, with shape :math:`(d, d)`, or its diagonal, :math:`(d)`.
        dtype: The type of what it returns; None for its own.
    """

    mean: Tensor
    matrix: Tensor
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, x: Tensor, kind: str = "scale", block: int | None = None) -> "Affine":
        r"""Returns the map of some points.

        Arguments:
            x: The points of both sources, with shape :math:`(N, d)`.
            kind: `"no"` for the identity, `"scale"` for coordinates of unit variance, `"whiten"`
                for coordinates without correlations.
            block: The size of the blocks within which correlations are removed; None for one.
        """
        dtype = torch.get_default_dtype()
        if kind == "no":
            return cls(torch.zeros_like(x[0]), torch.ones_like(x[0]), dtype)
        scale = x.std(dim=0)
        # A coordinate that does not vary says nothing about the ratio.
        scale = torch.where(scale > 0, scale, 1.0)
        if kind == "scale":
            return cls(x.mean(dim=0), 1 / scale, dtype)
        dim = x.shape[1]
        correlation = torch.cov((x / scale).T.double()).reshape(dim, dim)
        if block is not None:
            blocks = torch.arange(dim, device=x.device) // block
            correlation = torch.where(blocks == blocks[:, None], correlation, 0.0)
        values, vectors = torch.linalg.eigh(correlation)
        root = vectors / values.clamp(min=1e-6).sqrt() @ vectors.T
        return cls(x.mean(dim=0), (root / scale).to(x), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps points, with shape :math:`(B, d)`, in the precision of the map."""
        x = x.to(self.mean) - self.mean
        x = x * self.matrix if self.matrix.ndim == 1 else x @ self.matrix.T
        return x if self.dtype is None else x.to(self.dtype)


class Whitening(NamedTuple):
    r"""The map to coordinates without correlations, :math:`L^{-1} (x - m)`, of known volume.

    Attributes:
        mean: The mean :math:`m`, with shape :math:`(d)`, in double precision.
        root: The Cholesky factor :math:`L` of the covariance, with shape :math:`(d, d)`.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "Whitening":
        r"""Returns the map of some rows, with shape :math:`(N, d)`."""
        mean = x.double().mean(dim=0)
        covariance = (x.double() - mean).T.cov().reshape(mean.shape * 2)
        return cls(mean, torch.linalg.cholesky(covariance))

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps rows, with shape :math:`(N, d)`, and keeps their type."""
        z = torch.linalg.solve_triangular(self.root, (x.double() - self.mean).T, upper=False)
        return z.T.to(x)

    @property
    def log_volume(self) -> float:
        r"""What the map adds to a log-density, :math:`-\log |L|`."""
        return -self.root.diagonal().log().sum().item()


class Parts(NamedTuple):
    r"""The parts of a table.

    Attributes:
        train: The training rows, with shape :math:`(N, d)`.
        val: The validation rows.
        test: The test rows.
        log_volume: What the map to their coordinates adds to a log-density.
    """

    train: Tensor
    val: Tensor
    test: Tensor
    log_volume: float = 0.0

    def whitened(self) -> "Parts":
        r"""Returns the parts in coordinates in which the training part has no correlations."""
        forward = Whitening.of(self.train)
        train, val, test = (forward(x) for x in (self.train, self.val, self.test))
        return Parts(train, val, test, self.log_volume + forward.log_volume)
