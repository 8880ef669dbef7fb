r"""Mutual information from nearest neighbours, the rival that is not a ratio.

:func:`ksg` is the first estimator of Kraskov et al. (2004): with :math:`\epsilon_i` the distance
of point :math:`i` to its :math:`k`-th neighbour in the maximum norm of both variables, and
:math:`n_{x, i}`, :math:`n_{y, i}` the numbers of other points that are strictly closer than
:math:`\epsilon_i` in one of them,

.. math:: \hat I = \psi(k) + \psi(n) - \frac{1}{n} \sum_i \left[ \psi(n_{x, i} + 1)
    + \psi(n_{y, i} + 1) \right] .

Pairs of scalars are left to scikit-learn. The norm weighs coordinates by their scale, so both
bring them to unit variance first; monotone maps of coordinates, such as normal scores
(:class:`ood_osdre.tasks.dependence.NormalScores`), are the caller's.

References:
    | Estimating Mutual Information (Kraskov et al., 2004)
    | https://arxiv.org/abs/cond-mat/0305641
"""

__all__ = ["ksg"]

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import KDTree
from scipy.special import digamma
from sklearn.feature_selection import mutual_info_regression

from ..errors import UserError
from .dependence import real_values

# Noise that tells equal points apart, relative to a column's scale; scikit-learn's own.
JITTER = 1e-10


def ksg(x: ArrayLike, y: ArrayLike, neighbours: int = 3) -> float:
    r"""Estimates the mutual information of two variables from nearest neighbours.

    In more than a few dimensions the estimate is too small: neighbours are far away.

    Arguments:
        x: The first variable, with shape :math:`(n)` or :math:`(n, d_x)`.
        y: The second variable, with shape :math:`(n)` or :math:`(n, d_y)`.
        neighbours: The number :math:`k` of neighbours.

    Returns:
        The estimate, in nats, never negative.

    Raises:
        UserError: If a value is no real number, NaN, infinite or masked.
        ValueError: If shapes do not match, or there are not more pairs than neighbours.
        TypeError: If `neighbours` is no whole number.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(500, 2))
        >>> ksg(x, x + 0.1) > 3
        True
    """
    if not isinstance(neighbours, int | np.integer):
        raise TypeError(f"'neighbours' should be a whole number, got {neighbours!r}.")
    first, second = _matrix("x", x), _matrix("y", y)
    n = len(first)
    if len(second) != n or n <= neighbours or neighbours < 1:
        raise ValueError(
            f"Expected more pairs than 'neighbours' of at least 1, got {n} and {len(second)} "
            f"rows and {neighbours}."
        )
    if first.shape[1] == second.shape[1] == 1:
        values = mutual_info_regression(
            first, second.ravel(), n_neighbors=neighbours, random_state=0
        )
        return float(values[0])
    return _several(first, second, neighbours)


def _matrix(name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = real_values(name, values)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name!r} should have shape (n) or (n, d), got {array.shape}.")
    bad = int((~np.isfinite(array)).any(axis=1).sum())
    if bad:
        raise UserError(f"{name}: {bad} of {len(array)} rows hold NaN or infinity, expected none.")
    # To size one, or the squares of a variance may overflow or vanish.
    peak = np.abs(array).max(axis=0)
    return array / np.where(peak > 0, peak, 1.0)


def _several(x: NDArray[np.float64], y: NDArray[np.float64], neighbours: int) -> float:
    rng = np.random.default_rng(0)
    x, y = _scaled(x, rng), _scaled(y, rng)
    both = np.hstack([x, y])
    distances, _ = KDTree(both).query(both, neighbours + 1, p=np.inf)
    # Strictly closer: the largest number below the distance.
    radii = np.nextafter(distances[:, -1], 0)
    # Counts hold the point itself, which is the + 1 of the formula.
    counts = [
        KDTree(part).query_ball_point(part, radii, p=np.inf, return_length=True) for part in (x, y)
    ]
    sums = digamma(counts[0]) + digamma(counts[1])
    return max(0.0, float(digamma(neighbours) + digamma(len(x)) - sums.mean()))


def _scaled(x: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    scale = x.std(axis=0)
    x = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return x + JITTER * rng.normal(size=x.shape)
