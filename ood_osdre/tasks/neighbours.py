r"""Mutual information from nearest neighbours, and what is left of its bias.

:func:`ksg` is the first estimator of Kraskov et al. (2004): with :math:`\epsilon_i` the distance of
point :math:`i` to its :math:`k`-th neighbour in the maximum norm of both variables, and
:math:`n_{x, i}`, :math:`n_{y, i}` the numbers of other points that are strictly closer than
:math:`\epsilon_i` in one of them,

.. math:: \hat I = \psi(k) + \psi(n) - \frac{1}{n} \sum_i \left[ \psi(n_{x, i} + 1)
    + \psi(n_{y, i} + 1) \right] .

In more than a few dimensions neighbours are far away, and the estimate is too small.
:func:`debiased_ksg` asks what KSG finds in as many rows of a *pilot* whose log-ratio is known, a
mixture of Gaussians fitted to the rows or to their normal scores, and takes off what it finds too much or
too little there. Where the pilot is the truth the bias is gone. Elsewhere KSG sees the share
:math:`b` of a difference in information, which is measured on the pilot, too: what it finds beyond
the pilot, as far as it is more than noise, over :math:`b`, is the size of what it has missed, and is
in the error.

References:
    | Estimating Mutual Information (Kraskov et al., 2004)
    | https://arxiv.org/abs/cond-mat/0305641
"""

__all__ = ["Estimate", "debiased_ksg", "ksg", "ksg_terms"]

import math
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.spatial import KDTree
from scipy.special import digamma, logsumexp, ndtri
from scipy.stats import rankdata
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import mutual_info_regression
from sklearn.mixture import GaussianMixture

Array = NDArray[np.float64]

NEIGHBOURS = 3
# More neighbours, which lose more at edges, and by how much less than these have lost.
WIDE, EDGE = 10, 1.7
# What neighbours add to the variance of a row's term, measured on normal and clustered rows. The
# terms themselves show less of it, as near rows share their neighbours.
NOISE = 0.65
# Noise that tells equal points apart, relative to a column's scale; scikit-learn's own.
JITTER = 1e-10
# The pilots that are tried, by their covariances and components; the least BIC wins. Of two scalars
# one Gaussian does: KSG has next to no bias there, and the bends of a mixture would add their own.
PILOTS = (("full", 1), ("full", 2), ("full", 4), ("full", 8), ("tied", 2), ("tied", 4))
# A pilot may have one parameter to so many rows; its own optimism comes from as many folds.
ROWS_A_PARAMETER, FOLDS = 2, 5
# So many rows are drawn from the pilot in all, but at least two sets.
DRAWN_ROWS, MOST_SETS = 10_000, 12
# KSG may see so small a share of a difference that nothing can be said of the rest.
LEAST_SHARE = 0.2


class Estimate(NamedTuple):
    r"""An estimate and its standard error, in nats."""

    nats: float
    error: float


def ksg(x: Array, y: Array, neighbours: int) -> float:
    r"""Estimates the mutual information of two variables from nearest neighbours.

    Pairs of scalars are left to scikit-learn. The norm weighs coordinates by their scale, so they
    are brought to unit variance first; monotone maps, such as normal scores, are the caller's.

    Arguments:
        x: The first variable, finite, with shape :math:`(n, d_x)`.
        y: The second variable, finite, with shape :math:`(n, d_y)`.
        neighbours: The number :math:`k \geq 1` of neighbours, below :math:`n`.

    Returns:
        The estimate, in nats, never negative.
    """
    x, y = _unit(x), _unit(y)
    if x.shape[1] == y.shape[1] == 1:
        values = mutual_info_regression(x, y.ravel(), n_neighbors=neighbours, random_state=0)
        return float(values[0])
    return max(0.0, float(ksg_terms(x, y, neighbours).mean()))


def ksg_terms(x: Array, y: Array, neighbours: int) -> Array:
    r"""Returns what every row adds to the mean that is KSG's estimate, with shape :math:`(n)`."""
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
    return np.asarray(digamma(neighbours) + digamma(len(x)) - sums)


def debiased_ksg(x: Array, y: Array, seed: int = 0) -> Estimate:
    r"""Estimates the mutual information as KSG does, less the bias that it has on a pilot.

    Arguments:
        x: The first variable, with shape :math:`(n, d_x)`, no two rows of both copies.
        y: The second variable, with shape :math:`(n, d_y)`.
        seed: The seed of the draws from the pilot.
    """
    rng = np.random.default_rng(seed)
    size, n = x.shape[1], len(x)
    z = np.hstack([_normal_scores(x), _normal_scores(y)])
    found = ksg_terms(z[:, :size], z[:, size:], NEIGHBOURS)
    pilot, known, gap = _pilot(z, np.hstack([_unit_variance(x), _unit_variance(y)]), size, rng)
    scalars = z.shape[1] == 2
    biases, slopes, products, squares, noise = [], [], 0.0, 1e-12, 0.0
    for drawn in pilot.draws(n, rng):
        truth = pilot.log_ratio(drawn, size)
        mapped = _normal_scores(drawn)
        own = ksg_terms(mapped[:, :size], mapped[:, size:], NEIGHBOURS)
        centred = truth - truth.mean()
        biases.append(own.mean() - truth.mean())
        if scalars:
            slopes.append(own.mean() - ksg_terms(mapped[:, :1], mapped[:, 1:], WIDE).mean())
        products, squares = products + own @ centred, squares + centred @ centred
        noise = max(noise, float(own.var()))
    # Of a pilot that knows of next to no dependence, the share is that of noise: so far it may be
    # larger, and then nothing is said to be missed.
    share = float(np.clip(products / squares, LEAST_SHARE, 1.0))
    largest = min(1.0, share + 2 * math.sqrt(noise / squares))
    # The pilot is optimistic about its own rows, which matters as far as KSG does not see it.
    optimism = (1 - largest) * gap
    nats = found.mean() - np.mean(biases) - optimism
    spread = max(np.var(found + (1 - share) * known), np.var(known) + NOISE)
    variances = spread / n, np.var(biases, ddof=1) / len(biases)
    beyond = found.mean() - np.mean(biases) - known.mean()
    missed = (1 / largest - 1) ** 2 * max(0.0, beyond**2 - sum(variances))
    if scalars:
        # An edge of the density costs neighbours in proportion to their distance, about; more of
        # them are farther, and find less by about half of what these have lost.
        slope = found.mean() - ksg_terms(z[:, :1], z[:, 1:], WIDE).mean() - np.mean(slopes)
        missed += EDGE**2 * max(0.0, slope**2 - NOISE / n)
    return Estimate(float(nats), math.sqrt(sum(variances) + (optimism / 2) ** 2 + missed))


def _pilot(
    scores: Array, plain: Array, size: int, rng: np.random.Generator
) -> tuple["_Pilot", Array, float]:
    r"""Returns the pilot of normal scores or that of plain coordinates, its log-ratios, optimism.

    The one is taken that tells rows left out from shuffled ones better, by the logistic loss.
    Optimism is by how much the mean log-ratio of the rows fitted to is too large: what rows left
    out lack to it is made of two halves, about, what a fit finds too much in its own and what it
    misses in others, which is more for fits to fewer.
    """
    n = len(scores)
    folds = np.array_split(rng.permutation(n), FOLDS)
    results = []
    for rows in (scores, plain):
        pilot = _Pilot.best(rows)
        known, loss, left_out = pilot.log_ratio(rows, size), 0.0, 0.0
        for test in folds:
            again = _Pilot.of(np.delete(rows, test, axis=0), pilot.kind, pilot.components)
            apart = np.hstack([rows[test, :size], np.roll(rows[test, size:], 1, axis=0)])
            f_1, f_0 = again.log_ratio(rows[test], size), again.log_ratio(apart, size)
            loss += float(np.logaddexp(0, -f_1).sum() + np.logaddexp(0, f_0).sum())
            left_out += f_1.sum() / n
        results.append((loss, pilot, known, (known.mean() - left_out) / (1 + FOLDS / (FOLDS - 1))))
    return min(results, key=lambda result: result[0])[1:]


class _Pilot(NamedTuple):
    r"""A mixture of Gaussians of both variables, whose log-ratio is in closed form."""

    kind: str
    components: int
    model: GaussianMixture

    @classmethod
    def of(cls, z: Array, kind: str, components: int) -> "_Pilot":
        model = GaussianMixture(
            components, covariance_type=kind, reg_covar=1e-4, max_iter=60, random_state=0
        )
        with warnings.catch_warnings():  # the step before the last would do for a pilot, too
            warnings.simplefilter("ignore", ConvergenceWarning)
            return cls(kind, components, model.fit(z))

    @classmethod
    def best(cls, z: Array) -> "_Pilot":
        r"""Returns the pilot with the least Bayesian information criterion."""
        n, dim = z.shape
        tried: dict[tuple[str, int], tuple[float, _Pilot]] = {}
        for kind, k in PILOTS:
            covariances = dim * (dim + 1) // 2 * (k if kind == "full" else 1)
            if k > 1 and (dim == 2 or ROWS_A_PARAMETER * (covariances + k * (dim + 1)) > n):
                continue
            if (kind, k) == ("full", 8) and tried["full", 4][0] > tried["full", 2][0]:
                continue
            pilot = cls.of(z, kind, k)
            tried[kind, k] = pilot.model.bic(z), pilot
        return min(tried.values(), key=lambda pair: pair[0])[1]

    def log_ratio(self, z: Array, size: int) -> Array:
        r"""Returns the log-ratio of the joint density to that of the marginals, :math:`(n)`."""
        columns = np.arange(z.shape[1])
        both, x, y = (self._log_density(z, c) for c in (columns, columns[:size], columns[size:]))
        return both - x - y

    def _log_density(self, z: Array, columns: NDArray[np.intp]) -> Array:
        r"""Returns the log-density of some coordinates, up to a constant that cancels."""
        covariances = self.model.covariances_
        logs = []
        for i, weight in enumerate(self.model.weights_):
            covariance = covariances if self.kind == "tied" else covariances[i]
            root = np.linalg.cholesky(covariance[np.ix_(columns, columns)])
            from_mean = (z[:, columns] - self.model.means_[i, columns]).T
            white = solve_triangular(root, from_mean, lower=True)
            logs.append(
                np.log(weight) - np.log(root.diagonal()).sum() - np.square(white).sum(0) / 2
            )
        return np.asarray(logsumexp(logs, axis=0))

    def draws(self, n: int, rng: np.random.Generator) -> Iterator[Array]:
        for _ in range(min(max(DRAWN_ROWS // n, 2), MOST_SETS)):
            self.model.random_state = int(rng.integers(2**31))  # or all sets would be the same
            yield self.model.sample(n)[0]


def _normal_scores(x: Array) -> Array:
    return np.asarray(ndtri((rankdata(x, axis=0) - 0.5) / len(x)))


def _unit(x: Array) -> Array:
    r"""Returns columns of size one, or the squares of a variance may overflow or vanish."""
    peak = np.abs(x).max(axis=0)
    return x / np.where(peak > 0, peak, 1.0)


def _unit_variance(x: Array) -> Array:
    x = _unit(x)
    scale = x.std(axis=0)
    return (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)


def _scaled(x: Array, rng: np.random.Generator) -> Array:
    return _unit_variance(x) + JITTER * rng.normal(size=x.shape)
