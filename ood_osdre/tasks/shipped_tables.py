r"""Tables of numbers that scikit-learn ships, which need no file.

They are small (`iris`, `wine`, `breast_cancer`), but for `colours`: the
colours of 40,000 pairs of neighbouring pixels of a photograph, in six dimensions. Their values are
rounded, so uniform noise as wide as the rounding is added: a density of rounded values may be as
large as one likes. Parts are 80, 10 and 10 per cent; those of `colours` share no vertical stripe of
the photograph. They are standardised by the mean and deviation of the training part.
"""

__all__ = ["SHIPPED", "Array", "Parts", "shipped_table", "standardised"]

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Parts = tuple[Array, Array, Array]

#: The tables that come with scikit-learn.
SHIPPED = ("colours", "iris", "wine", "breast_cancer")

# The rows of `colours`, and the width of the stripes of which each belongs to one part.
COLOUR_ROWS, STRIPE = 40_000, 16


def shipped_table(name: str) -> Parts:
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
        x = rng.permutation(x)
        first, second = round(0.8 * len(x)), round(0.9 * len(x))
        parts = x[:first], x[first:second], x[second:]
    return standardised(parts, parts[0])


def _colours(photograph: NDArray[np.uint8], rng: np.random.Generator) -> Parts:
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


def standardised(parts: Parts, by: Array, ddof: int = 0) -> Parts:
    r"""Returns the parts less a mean and over a deviation.

    Arguments:
        parts: The parts, each with shape :math:`(N, d)`.
        by: The rows whose mean and deviation are meant, with shape :math:`(M, d)`.
        ddof: What the deviation's divisor is less than :math:`M`.
    """
    mean, std = by.mean(axis=0), by.std(axis=0, ddof=ddof)
    train, val, test = ((part - mean) / std for part in parts)
    return train, val, test
