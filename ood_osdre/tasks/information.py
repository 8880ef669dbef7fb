r"""The mutual information of a user's own arrays, with an interval and with its limits said.

.. math:: I(x; y) = \mathbb{E}_{p(x, y)} \left[ \log \frac{p(x, y)}{p(x) \, p(y)} \right]

**From a ratio.** In :func:`mutual_information` a ratio learns the joint distribution against the
product of the marginals, made by drawing :math:`x` and :math:`y` from different rows. Coordinates
are mapped to normal scores first, which changes nothing and takes heavy tails away. The ratio is
cross-fitted: every row is scored by a model that has not seen it. A ratio that tells pairs from
shuffled pairs no better than a coin, on rows that did not train it, is replaced by none at all,
:math:`\log r = 0`: of a few hundred rows without any dependence a network finds some of its own.

Variables have to be continuous. Of values that repeat, an interpolating ratio finds more than
there is, without a sign of it, so a column is refused if more than a twentieth of the rows share
one value, or there are fewer distinct values than a tenth of the rows.

**From nearest neighbours.** :func:`ksg`, the baseline that is not a ratio, is the first estimator
of Kraskov et al. (2004): with :math:`\epsilon_i` the distance of point :math:`i` to its
:math:`k`-th neighbour in the maximum norm of both variables, and :math:`n_{x, i}`,
:math:`n_{y, i}` the numbers of other points that are strictly closer than :math:`\epsilon_i` in one
of them,

.. math:: \hat I = \psi(k) + \psi(n) - \frac{1}{n} \sum_i \left[ \psi(n_{x, i} + 1)
    + \psi(n_{y, i} + 1) \right] .

References:
    | Estimating Mutual Information (Kraskov et al., 2004)
    | https://arxiv.org/abs/cond-mat/0305641
"""

__all__ = ["LOG_RATIO_METHODS", "Information", "check_variables", "ksg", "mutual_information"]

import logging
import math
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.spatial import KDTree
from scipy.special import digamma
from scipy.stats import rankdata
from sklearn.feature_selection import mutual_info_regression
from torch import Generator, Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..options import shown
from .features import NormalScores
from .fit import DrawPairs, RatioFit, fit_ratio
from .methods import METHODS, FitOptions, OptionsLike, check_method, fit_options
from .rows import read_rows, repetition

log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: The methods whose estimate is a log-ratio. The critic of the others is one up to a constant,
#: and its mean no information. That of NWJ is exact.
LOG_RATIO_METHODS = tuple(name for name, m in METHODS.items() if m.bound in ("mean", "nwj"))

# With fewer rows the interval would be wider than what there is to find.
LEAST_ROWS = 200
FOLDS = 3
# With fewer rows a column, a network cannot learn what there is.
ROWS_A_COLUMN = 10
RESAMPLES = 2000
# The share of the rows of a fit that select its step.
HELD_OUT = 0.2
# Normal scores stay within: a value far beyond those fitted to should not go on without end.
LARGEST_SCORE = 10.0
# Noise that tells equal points apart, relative to a column's scale; scikit-learn's own.
JITTER = 1e-10
DEFAULTS = FitOptions(
    steps=600, batch_size=256, lr=1e-3, weight_decay=1e-2, features=64, depth=2, eps=1e-3
)


class Information(NamedTuple):
    r"""An estimate of the mutual information.

    Attributes:
        nats: The estimate, in nats. It may be slightly negative where there is next to none.
        low: The lower end of the interval.
        high: The upper end of the interval.
        rows: The number of rows.
        supported: The largest value that :math:`n` rows can support, :math:`\log n`.
    """

    nats: float
    low: float
    high: float
    rows: int
    supported: float


def mutual_information(
    x: ArrayLike,
    y: ArrayLike,
    method: str = "os-dre",
    options: OptionsLike = None,
    level: float = 0.95,
    progress: bool = False,
) -> Information:
    r"""Estimates the mutual information of paired observations.

    The interval is a bootstrap over rows of the cross-fitted log-ratios. It holds the randomness
    of the rows that are averaged over, not that of training: a model that has not learnt the
    dependence gives a narrow interval around too small a number.

    No method can vouch for more than about :math:`\log n` nats from :math:`n` rows; beyond, an
    estimate rests on what the model assumes between the rows, and a warning says so. Another warns
    of fewer than ten rows a column, of which an estimate falls short.

    Where the ratio of a fold is no better than none on held-out pairs, its rows count as 0, which a
    warning says; these pairs have selected its step, too, so this is the lenient side. If all do,
    the interval is [0, 0] and tells that nothing was found, not that there is nothing.

    Arguments:
        x: The first variable, numbers with shape :math:`(n)` or :math:`(n, d_x)`.
        y: The second variable, numbers with shape :math:`(n)` or :math:`(n, d_y)`.
        method: One of :data:`LOG_RATIO_METHODS`: neither InfoNCE nor MINE, whose critic is a
            log-ratio only up to a constant.
        options: How the ratio is fitted: options by name that differ from the defaults of this
            module, such as `{"steps": 2000}`, or :class:`ood_osdre.tasks.methods.FitOptions`.
        level: The level of the interval.
        progress: Whether to show progress bars.

    Returns:
        The estimate and its interval.

    Raises:
        UserError: If the method is unknown or estimates no log-ratio, an option is unknown,
            `level` is outside (0, 1), there are fewer than 200 rows, `x` and `y` do not match, a
            value is NaN, infinite or masked, a column is discrete or constant, or a column of `x`
            is an increasing or decreasing function of one of `y`.

    References:
        | Formal Limitations on the Measurement of Mutual Information
        | (McAllester and Stratos, 2020)
        | https://arxiv.org/abs/1811.04251
    """
    if not isinstance(level, Real) or not 0 < level < 1:
        raise UserError(f"level: got {shown(level)}, expected a number in (0, 1).")
    check_method(method, LOG_RATIO_METHODS)
    options = fit_options(options, DEFAULTS)
    first, second = check_variables(x, y)
    n, columns = len(first), first.shape[1] + second.shape[1]
    if n < ROWS_A_COLUMN * columns:
        log.warning(
            "mutual information: %d rows are few for %d columns; expect too small an estimate.",
            *(n, columns),
        )

    rng = np.random.default_rng(options.seed)
    folds = np.array_split(rng.permutation(n), FOLDS)
    scores = np.empty(n)
    for k, test in enumerate(folds):
        train = np.concatenate([f for i, f in enumerate(folds) if i != k])
        fold = options.replace(seed=options.seed + k)
        scores[test] = _cross_fit(first, second, train, test, method, fold, progress)

    means = np.array([scores[rng.integers(n, size=n)].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    result = Information(float(scores.mean()), float(low), float(high), n, math.log(n))
    if result.nats > result.supported:
        log.warning(
            "mutual information: %.2f nats is more than the log(n) = %.2f that %d rows can "
            "support; it rests on the model, not on the data.",
            *(result.nats, result.supported, n),
        )
    if result.high < 0:
        log.warning(
            "mutual information: all of the interval is below 0, which no information is; the fit "
            "followed the noise of %d rows. Read it as none, or bring more rows.",
            n,
        )
    return result


def check_variables(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    r"""Returns both variables with shapes :math:`(n, d)`, or refuses them.

    Arguments and errors are those of :func:`mutual_information`.
    """
    first, second = _paired(x, y, LEAST_ROWS)
    problem = _repetition("x", first) or _repetition("y", second) or _function(first, second)
    if problem:
        raise UserError(problem)
    return first, second


def _paired(x: ArrayLike, y: ArrayLike, least: int) -> tuple[Array, Array]:
    first, second = read_rows("x", x, least=least), read_rows("y", y, least=least)
    if len(first) != len(second):
        raise UserError(
            f"x and y: got {len(first)} and {len(second)} rows, expected as many of each."
        )
    return first, second


def _repetition(name: str, array: Array) -> str | None:
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


def _cross_fit(
    x: Array,
    y: Array,
    train: NDArray[np.int64],
    test: NDArray[np.int64],
    method: str,
    options: FitOptions,
    progress: bool,
) -> Array:
    r"""Fits to the rows `train` and returns the log-ratios of the rows `test`."""
    size = x.shape[1]
    both = torch.as_tensor(np.concatenate([x, y], axis=1))
    dtype = torch.get_default_dtype()
    scores = NormalScores(both[train])

    def mapped(which: NDArray[np.int64]) -> Tensor:
        values = scores(both[which]).clamp(-LARGEST_SCORE, LARGEST_SCORE)
        return values.to(device=options.device, dtype=dtype)

    rows = mapped(train)
    cut = round(HELD_OUT * len(rows))
    held_out, rows = rows[:cut], rows[cut:]
    draw = _shuffled(rows, size)
    # The held-out product of marginals: each x with the y of another row.
    apart = torch.cat([held_out[:, :size], held_out[:, size:].roll(1, dims=0)], dim=1)
    fit = fit_ratio(
        method, draw, rows.shape[1], options, held_out=(apart, held_out), progress=progress
    )
    scored = fit.log_ratio(mapped(test)).double().cpu().numpy()
    if _tells_apart(fit, apart, held_out):
        return scored
    log.warning(
        "mutual information: of one of %d folds the ratio tells pairs from shuffled ones no better "
        "than a coin; its rows count as 0 nats.",
        FOLDS,
    )
    return np.zeros_like(scored)


def _tells_apart(fit: RatioFit, apart: Tensor, together: Tensor) -> bool:
    r"""Returns whether a ratio predicts which pairs were shuffled better than a coin does.

    The logistic loss is a proper score of any log-ratio, whatever objective trained it.
    """
    f_0, f_1 = fit.log_ratio(apart), fit.log_ratio(together)
    loss = (F.softplus(f_0).mean() + F.softplus(-f_1).mean()).item()
    return loss < 2 * math.log(2)


def _shuffled(rows: Tensor, size: int) -> DrawPairs:
    m = len(rows)

    def draw(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        i, k = torch.randint(m, (2, n), generator=generator, device=rows.device)
        # Another row than i: of m rows, true pairs would else be an m-th of the product.
        j = (i + torch.randint(1, m, (n,), generator=generator, device=rows.device)) % m
        return torch.cat([rows[i, :size], rows[j, size:]], dim=1), rows[k]

    return draw


def ksg(x: ArrayLike, y: ArrayLike, neighbours: int = 3) -> float:
    r"""Estimates the mutual information of two variables from nearest neighbours.

    In more than a few dimensions the estimate is too small: neighbours are far away. Pairs of
    scalars are left to scikit-learn. The norm weighs coordinates by their scale, so they are
    brought to unit variance first; monotone maps, such as normal scores
    (:class:`ood_osdre.tasks.features.NormalScores`), are the caller's.

    Arguments:
        x: The first variable, with shape :math:`(n)` or :math:`(n, d_x)`.
        y: The second variable, with shape :math:`(n)` or :math:`(n, d_y)`.
        neighbours: The number :math:`k \geq 1` of neighbours.

    Returns:
        The estimate, in nats, never negative.

    Raises:
        UserError: If a value is no real number, NaN, infinite or masked, shapes do not match, or
            there are not more pairs than neighbours.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(500, 2))
        >>> ksg(x, x + 0.1) > 3
        True
    """
    assert neighbours >= 1, "'neighbours' should be at least 1"
    first, second = map(_unit, _paired(x, y, neighbours + 1))
    if first.shape[1] == second.shape[1] == 1:
        values = mutual_info_regression(
            first, second.ravel(), n_neighbors=neighbours, random_state=0
        )
        return float(values[0])
    return _neighbours(first, second, neighbours)


def _unit(x: Array) -> Array:
    r"""Returns columns of size one, or the squares of a variance may overflow or vanish."""
    peak = np.abs(x).max(axis=0)
    return x / np.where(peak > 0, peak, 1.0)


def _neighbours(x: Array, y: Array, neighbours: int) -> float:
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


def _scaled(x: Array, rng: np.random.Generator) -> Array:
    scale = x.std(axis=0)
    x = (x - x.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return x + JITTER * rng.normal(size=x.shape)
