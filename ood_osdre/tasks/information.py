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

**From nearest neighbours** (:mod:`ood_osdre.tasks.neighbours`), which need no training and find
more in few dimensions, and by default for up to twenty columns.
"""

__all__ = ["LOG_RATIO_METHODS", "Information", "check_variables", "ksg", "mutual_information"]

import logging
import math
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri
from torch import Generator, Tensor
from torch.nn import functional as F

from ..errors import UserError
from ..options import shown
from . import neighbours as nearest
from .draws import firsts, marks_of, warn_of_order
from .features import NormalScores
from .fit import DrawPairs, RatioFit, fit_ratio
from .methods import METHODS, FitOptions, OptionsLike, check_method, fit_options
from .rows import read_paired, refuse_infinite

log = logging.getLogger(__name__)

Array = NDArray[np.float64]

#: The methods whose estimate is a log-ratio. The critic of the others is one up to a constant,
#: and its mean no information. That of NWJ is exact.
LOG_RATIO_METHODS = tuple(name for name, m in METHODS.items() if m.bound in ("mean", "nwj"))
#: The method that is no ratio, and the largest number of columns for which it is the default.
NEAREST, MOST_COLUMNS = "ksg", 20

# With fewer rows the interval would be wider than what there is to find.
LEAST_ROWS = 200
FOLDS = 3
# With fewer rows a column, a network cannot learn what there is.
ROWS_A_COLUMN = 10
# Shuffled pairs that normalise a fold's ratio, and the largest relative error of their mean.
SHUFFLED, KNOWN = 100_000, 0.2
# The share of the rows of a fit that select its step.
HELD_OUT = 0.2
# Normal scores stay within: a value far beyond those fitted to should not go on without end.
LARGEST_SCORE = 10.0
DEFAULTS = FitOptions(
    steps=600, batch_size=256, lr=1e-3, weight_decay=1e-2, features=64, depth=2, eps=1e-3
)


class Information(NamedTuple):
    r"""An estimate of the mutual information.

    Attributes:
        nats: The estimate, in nats. It may be slightly negative where there is next to none.
        low: The lower end of the interval.
        high: The upper end of the interval.
        rows: The number of distinct rows.
        ceiling: The largest value that :math:`n` rows can support, :math:`\log n`.
        method: How it was estimated.
    """

    nats: float
    low: float
    high: float
    rows: int
    ceiling: float
    method: str

    def __repr__(self) -> str:
        interval = f"{self.low:.4g} to {self.high:.4g}"
        rows = f"{self.rows} rows support {self.ceiling:.4g}"
        return f"Information({self.nats:.4g} nats, {interval}, {rows}, {self.method})"


def mutual_information(
    x: ArrayLike,
    y: ArrayLike,
    method: str | None = None,
    options: OptionsLike = None,
    level: float = 0.95,
    progress: bool = False,
) -> Information:
    r"""Estimates the mutual information of paired observations.

    The interval is normal, of the errors that can be seen. Of nearest neighbours: the randomness of
    the rows, and what is not known of their bias (:func:`ood_osdre.tasks.neighbours.debiased_ksg`).
    Of a ratio: the randomness of the rows, of training, as the fits of the folds differ by more
    than their rows do, and the ratio's normalisation. For the expectation of a ratio over the
    product of the marginals is 1; where enough shuffled rows bear its mean, the estimate is that of
    the normalised ratio, and what that changed is in the error, too. Beyond, a model that has not
    learnt the dependence gives a narrow interval around too small a number.

    Copies of rows are dropped, and a warning says so: on both sides of a split they would be
    scored by a model that has seen them. Another says if rows depend on those before them.

    No method can vouch for more than about :math:`\log n` nats from :math:`n` rows; beyond, an
    estimate rests on what the model assumes between the rows, and a warning says so. Another warns
    of fewer than ten rows a column, of which an estimate falls short.

    Where the ratio of a fold is no better than none on held-out pairs, its rows count as 0, which a
    warning says; these pairs have selected its step, too, so this is the lenient side. If all do,
    the interval is [0, 0] and tells that nothing was found, not that there is nothing.

    Arguments:
        x: The first variable, numbers with shape :math:`(n)` or :math:`(n, d_x)`.
        y: The second variable, numbers with shape :math:`(n)` or :math:`(n, d_y)`.
        method: `ksg`, nearest neighbours; or one of :data:`LOG_RATIO_METHODS`: neither InfoNCE nor
            MINE, whose critic is a log-ratio only up to a constant. None for `ksg` if there are
            no options and at most 20 columns, else `os-dre`; the result says which it was.
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
    if method is not None:
        check_method(method, (*LOG_RATIO_METHODS, NEAREST))
    if method == NEAREST and options is not None:
        raise UserError(f"options: got some with the method {NEAREST!r}, which has none.")
    given, options = options not in (None, {}), fit_options(options, DEFAULTS)
    first, second = check_variables(x, y)
    marks = marks_of("mutual information", first, second)
    kept = firsts(marks)
    first, second = first[kept], second[kept]
    n, columns = len(first), first.shape[1] + second.shape[1]
    if n < LEAST_ROWS:
        raise UserError(f"x and y: {n} distinct rows, expected at least {LEAST_ROWS}.")
    warn_of_order("mutual information", np.hstack([first, second]))
    if n < ROWS_A_COLUMN * columns:
        log.warning(
            "mutual information: %d rows are few for %d columns; expect too small an estimate.",
            *(n, columns),
        )
    if method is None:
        method = "os-dre" if given or columns > MOST_COLUMNS else NEAREST
    if method == NEAREST:
        nats, error = nearest.debiased_ksg(first, second)
    else:
        nats, error = _from_ratios(first, second, method, options, progress)
    margin = float(ndtri((1 + level) / 2)) * error
    result = Information(nats, nats - margin, nats + margin, n, math.log(n), method)
    if result.nats > result.ceiling:
        log.warning(
            "mutual information: %.2f nats is more than the log(n) = %.2f that %d rows can "
            "support; it rests on the model, not on the data.",
            *(result.nats, result.ceiling, n),
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
    first, second = read_paired(x, y, LEAST_ROWS)
    refuse_infinite(first, second)
    return first, second


def _from_ratios(
    x: Array, y: Array, method: str, options: FitOptions, progress: bool
) -> nearest.Estimate:
    r"""Estimates from ratios, each of which scores the rows that it has not seen.

    The error has three parts: the randomness of the rows; that of the fits, which is what the
    folds' means differ by beyond it; and half of what normalising changed.
    """
    n = len(x)
    folds = np.array_split(np.random.default_rng(options.seed).permutation(n), FOLDS)
    parts = []
    for k, test in enumerate(folds):
        train = np.concatenate([f for i, f in enumerate(folds) if i != k])
        fold = options.replace(seed=options.seed + k)
        parts.append(_cross_fit(x, y, train, test, method, fold, progress))
    scores, changes = (np.concatenate(values) for values in zip(*parts, strict=True))
    normalised = scores - changes
    rows = normalised.var(ddof=1) / n
    means = [(s - c).mean() for s, c in parts]
    fits = max(0.0, np.var(means, ddof=1) - rows * FOLDS) / FOLDS
    half = changes.mean() / 2
    return nearest.Estimate(float(normalised.mean()), math.sqrt(rows + fits + half**2))


def _cross_fit(
    x: Array,
    y: Array,
    train: NDArray[np.int64],
    test: NDArray[np.int64],
    method: str,
    options: FitOptions,
    progress: bool,
) -> tuple[Array, Array]:
    r"""Fits to the rows `train`; returns the log-ratios of the rows `test`, and their normalisation.

    The latter is what each row adds to the log of the ratio's mean over shuffled rows, as far as
    they are enough to know it.
    """
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
    tested = mapped(test)
    scored = fit.log_ratio(tested).double().cpu().numpy()
    if _tells_apart(fit, apart, held_out):
        return scored, _normalisation(fit, tested, size)
    log.warning(
        "mutual information: of one of %d folds the ratio tells pairs from shuffled ones no better "
        "than a coin; its rows count as 0 nats.",
        FOLDS,
    )
    return np.zeros_like(scored), np.zeros_like(scored)


def _normalisation(fit: RatioFit, rows: Tensor, size: int) -> Array:
    r"""Returns what rows add to the log-mean of a ratio over shuffled rows, with shape :math:`(m)`.

    To first order in the rows, each of which is in a pair with either part; zero where so few of
    the pairs bear the mean that it says nothing, as of a large information.
    """
    m = len(rows)
    turns = np.unique(np.linspace(1, m - 1, max(1, min(m - 1, SHUFFLED // m))).astype(int))
    values = np.stack(
        [
            fit.log_ratio(torch.cat([rows[:, :size], rows[:, size:].roll(-int(k), 0)], dim=1))
            .double()
            .cpu()
            .numpy()
            for k in turns
        ]
    )
    largest = values.max()
    weights = np.exp(values - largest)
    mean = weights.mean()
    lefts = weights.mean(axis=0) / mean
    rights = np.mean([np.roll(w, k) for w, k in zip(weights, turns, strict=True)], axis=0) / mean
    influence = lefts + rights - 2
    if influence.std() / math.sqrt(m) > KNOWN:
        return np.zeros(m)
    return np.asarray(math.log(mean) + largest + influence)


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
    r"""Estimates the mutual information of two variables from nearest neighbours, as it is.

    In more than a few dimensions the estimate is too small: neighbours are far away. The norm
    weighs coordinates by their scale, so they are brought to unit variance first; monotone maps,
    such as normal scores (:class:`ood_osdre.tasks.features.NormalScores`), are the caller's.

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
    return nearest.ksg(*read_paired(x, y, neighbours + 1), neighbours)
