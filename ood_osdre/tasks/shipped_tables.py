r"""Tables of numbers that scikit-learn ships, which need no file.

They are small (`iris`, `wine`, `breast_cancer`), but for `colours`: the
colours of 40,000 pairs of neighbouring pixels of a photograph, in six dimensions. Their values are
rounded, so uniform noise as wide as the rounding is added: a density of rounded values may be as
large as one likes. Parts are 80, 10 and 10 per cent; those of `colours` share no vertical stripe
of the photograph. They are standardised by the mean and deviation of the training part.
"""

__all__ = [
    "LEAST_ROWS",
    "SHIPPED",
    "Array",
    "ArrayParts",
    "check_rows",
    "shipped_table",
    "shuffled_parts",
    "standardised",
]

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

Array = NDArray[np.float64]
ArrayParts = tuple[Array, Array, Array]

#: The tables that come with scikit-learn.
SHIPPED = ("colours", "iris", "wine", "breast_cancer")

# Of fewer rows a validation and a test part say nothing.
LEAST_ROWS = 100
# Of standardised columns, the least variance in any direction that a covariance still resolves.
LEAST_VARIANCE = 1e-10

# The rows of `colours`, and the width of the stripes of which each belongs to one part.
COLOUR_ROWS, STRIPE = 40_000, 16


def shipped_table(name: str) -> ArrayParts:
    r"""Returns the three parts of a table.

    Arguments:
        name: One of :data:`SHIPPED`.
    """
    from sklearn import datasets

    rng = np.random.default_rng(0)
    if name == "colours":
        parts = _colours(datasets.load_sample_image("china.jpg"), rng)
    else:
        x = getattr(datasets, f"load_{name}")().data.astype(np.float64)
        # The least gap between values is what they are rounded to.
        gaps = [np.diff(np.unique(column)).min() for column in x.T]
        x = x + np.asarray(gaps) * (rng.random(x.shape) - 0.5)
        return shuffled_parts(x, rng)
    return standardised(parts, parts[0])


def shuffled_parts(x: Array, rng: np.random.Generator | None = None) -> ArrayParts:
    r"""Returns 80, 10 and 10 per cent of rows in random order, standardised by the first.

    Arguments:
        x: The rows, with shape :math:`(N, d)`.
        rng: The source of randomness; None for one that is always the same.
    """
    x = (np.random.default_rng(0) if rng is None else rng).permutation(x)
    first, second = round(0.8 * len(x)), round(0.9 * len(x))
    parts = x[:first], x[first:second], x[second:]
    return standardised(parts, parts[0])


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


def _colours(photograph: NDArray[np.uint8], rng: np.random.Generator) -> ArrayParts:
    stripes = np.arange(0, photograph.shape[1] - STRIPE + 1, STRIPE)
    cuts = (0, round(0.8 * len(stripes)), round(0.9 * len(stripes)), len(stripes))
    stripes = rng.permutation(stripes)
    parts = []
    for share, low, high in zip((0.8, 0.1, 0.1), cuts, cuts[1:], strict=False):
        cut = [photograph[:, c : c + STRIPE].astype(np.float64) for c in stripes[low:high]]
        pairs = [np.concatenate([c[:, :-1], c[:, 1:]], axis=2).reshape(-1, 6) for c in cut]
        rows = rng.permutation(np.concatenate(pairs))[: round(share * COLOUR_ROWS)]
        parts.append(rows + rng.random(rows.shape))
    return parts[0], parts[1], parts[2]


def standardised(parts: ArrayParts, by: Array, ddof: int = 0) -> ArrayParts:
    r"""Returns the parts less a mean and over a deviation.

    Arguments:
        parts: The parts, each with shape :math:`(N, d)`.
        by: The rows whose mean and deviation are meant, with shape :math:`(M, d)`.
        ddof: What the deviation's divisor is less than :math:`M`.
    """
    mean, std = by.mean(axis=0), by.std(axis=0, ddof=ddof)
    train, val, test = ((part - mean) / std for part in parts)
    return train, val, test
