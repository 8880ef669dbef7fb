r"""Where points come from, and whether rows are independent draws.

Splits, errors and intervals take rows for independent. Two things break that without a sign in
any single row: copies (of rows drawn with replacement, or oversampled) lie on both sides of a
split, and the rows of a time series follow each other. Copies are kept together; of the order no
more than a warning can be made.
"""

__all__ = [
    "DrawPairs",
    "DrawnBatches",
    "Sampler",
    "Source",
    "calibration_scores",
    "check_drawn",
    "error_of_mean",
    "firsts",
    "marks_of",
    "source_of",
    "warn_of_order",
    "whitened_parts",
]

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import rankdata
from torch import Generator, Tensor

from ..data.image_files import fingerprints
from ..data.sets import cut_apart, draws_of
from ..errors import UserError
from ..evaluation.calibration import scores_of_draws
from ..objectives import Batch
from ..training.batches import Batches, Pairs, Stream, step_generator
from .methods import FitOptions
from .rows import (
    Affine,
    Whitening,
    check_rows,
    check_signature,
    read_rows,
    refuse_constant,
    repetition,
)

Array = NDArray[np.float64]
Sampler: TypeAlias = Callable[[int, Generator], Tensor]
DrawPairs: TypeAlias = Callable[[int, Generator], tuple[Tensor, Tensor]]

log = logging.getLogger(__name__)

HELD_OUT = 0.1  # of the rows, to select the step, and as many to measure the likelihood
FIRST = 8192  # pairs fix the standardisation

# Rows are compared with those up to so many places before them; a warning without cause is as rare
# as FALSE_ALARMS, and correlations below the last number widen no error worth a word.
LAGS, FALSE_ALARMS, LEAST_DEPENDENCE = 10, 0.005, 0.1
# Of fewer rows the normal law of a rank correlation is left for shuffled rows.
ENOUGH_FOR_NORMAL = 2000


def marks_of(name: str, *arrays: NDArray[Any]) -> NDArray[np.int64]:
    r"""Returns a number that a row shares with its copies alone, with shape :math:`(n)`.

    A warning says how many rows are distinct if not all of them are: what splits rows has to keep
    copies together, or a fit is asked about rows that it was fitted to. Equal rows of rounded
    numbers, and of values that are likely by themselves, such as zeros, are draws of their own.

    Arguments:
        name: What the warning calls the rows.
        arrays: Columns of the same rows, each an array of numbers with shape :math:`(n, d)`.
    """
    rows = np.concatenate(arrays, axis=1)
    n = len(rows)
    rows = rows + 0.0 if rows.dtype.kind == "f" else rows  # -0.0 is 0.0
    marks = fingerprints(rows)
    # Of up to n² possible rows, some may well be equal.
    if np.unique(marks).size == n or (cells := _log_cells(rows)) <= 2 * np.log(n):
        return np.arange(n)
    marks = draws_of(marks, categories=cells < np.inf)
    if (distinct := np.unique(marks).size) < n:
        log.warning(
            "%s: %d of %d rows are distinct; copies stay on one side of every split, and errors "
            "count distinct rows.",
            *(name, distinct, n),
        )
    return marks


def _log_cells(rows: NDArray[Any]) -> float:
    r"""Returns the log of how many rows rounded columns can make, infinite if one is not rounded."""
    cells = 0.0
    for column in rows.T:
        values = np.unique(column).astype(np.float64)  # of bytes, differences wrap around
        # Of m values of a continuum the closest two are about 1 / m^2 of their range apart.
        if np.ptp(values) > 10 * len(values) * np.diff(values).min(initial=np.inf):
            return np.inf
        cells += np.log(len(values))
    return cells


def firsts(marks: NDArray[np.int64]) -> NDArray[np.intp]:
    r"""Returns the first row of each set of copies, in order."""
    return np.sort(np.unique(marks, return_index=True)[1])


def calibration_scores(scores: Array, inputs: object) -> Array:
    r"""Returns a calibration score for each draw of inputs, :math:`(n)`, in ascending order.

    Only arrays and tensors are searched for copies. Warns of copies, and of an order in time.
    """
    inputs = inputs.detach().float().cpu().numpy() if isinstance(inputs, Tensor) else inputs
    marks = np.arange(len(scores))
    if isinstance(inputs, np.ndarray):
        marks = marks_of("calibration", inputs.reshape(len(scores), -1))
    warn_of_order("calibration scores", scores[firsts(marks), None])
    return scores_of_draws(scores, marks)


def error_of_mean(values: Array, marks: NDArray[np.int64] | None) -> float:
    r"""Returns the standard error of a mean over rows, :math:`(n)`, of which copies are one draw."""
    marks = np.arange(len(values)) if marks is None else marks
    _, which = np.unique(marks, return_inverse=True)
    sums = np.bincount(which, values - values.mean())
    return float(np.sqrt((sums**2).sum() * len(sums) / max(len(sums) - 1, 1)) / len(values))


def warn_of_order(name: str, rows: Array) -> None:
    r"""Warns of rows, :math:`(n, d)`, that depend on those shortly before them.

    The statistic is the largest rank correlation of a column, or of its distance to its median
    (which sees bursts), at the lags 1 to 10. Its threshold is normal with Bonferroni's correction;
    of few rows, the largest among shuffled rows, too, has to be smaller. Of independent rows in
    an order that is none of their values', at most one set in 200 is warned of; measured on seven
    laws, of one to ten columns, at 200 to 5,000 rows: 15 of 3,430 sets.
    """
    both = np.concatenate([rows, np.abs(rows - np.median(rows, axis=0))], axis=1)
    ranks = rankdata(both, axis=0)
    ranks -= ranks.mean(axis=0)
    ranks /= np.maximum(np.sqrt((ranks**2).sum(axis=0)), 1.0)  # a constant stays zero
    n, lags = len(rows), np.arange(1, min(LAGS, len(rows) // 10) + 1)
    found = _dependence(ranks, lags)
    worst = np.unravel_index(np.abs(found).argmax(), found.shape)
    largest = np.abs(found[worst])
    bound = -ndtri(FALSE_ALARMS / 2 / found.size) / np.sqrt(n)
    if largest <= max(bound, LEAST_DEPENDENCE):
        return
    if n < ENOUGH_FOR_NORMAL:
        rng = np.random.default_rng(0)
        for _ in range(round(1 / FALSE_ALARMS) - 1):
            if np.abs(_dependence(rng.permutation(ranks), lags)).max() >= largest:
                return
    log.warning(
        "%s: rows depend on their neighbours, as a time series does or rows that are sorted: column "
        "%d has a rank correlation of %.2f at lag %d, where independent rows have at most %.2f. "
        "Errors and intervals take rows for independent draws and are too small, and series that "
        "have nothing to do with each other seem to. Keep every k-th row, k so large that this is "
        "gone; shuffle rows whose order means nothing. A series that drifts has no such k.",
        *(name, worst[1] % rows.shape[1], found[worst], lags[worst[0]], bound),
    )


def _dependence(ranks: Array, lags: NDArray[np.intp]) -> Array:
    r"""Returns the correlations of columns of norm one at some lags, (lags, columns)."""
    n = len(ranks)
    return np.stack([np.einsum("ij,ij->j", ranks[k:], ranks[:-k]) * n / (n - k) for k in lags])


def whitened_parts(
    rows: NDArray[np.float64], options: FitOptions
) -> tuple[Whitening, NDArray[np.int64], list[Tensor]]:
    r"""Returns the map that whitens rows, which test rows are copies, and the parts of the rows.

    The parts are test, validation and training rows, whitened.
    """
    marks = marks_of("density", rows)
    distinct = rows[firsts(marks)]
    check_rows("x", distinct)
    warn_of_order("density", distinct)
    for i, column in enumerate(rows.T):
        if found := repetition(column):
            log.warning(
                "density: column %d %s; the density of rounded values has no bound. Add uniform "
                "noise as wide as the rounding.",
                *(i, found),
            )
    order = np.random.default_rng(options.seed).permutation(len(rows))
    cut = max(round(HELD_OUT * len(rows)), 10)
    picked = cut_apart(order, marks, [cut, 2 * cut])
    check_rows("x, its training part", rows[picked[2]][firsts(marks[picked[2]])], least=0)
    parts = [torch.as_tensor(rows[part], device=options.device) for part in picked]
    whitening = Whitening.of(parts[-1])
    dtype = torch.get_default_dtype()
    return whitening, marks[picked[0]], [whitening(part).to(dtype) for part in parts]


def check_drawn(
    name: str,
    drawn: object,
    sources: int,
    dim: int,
    size: int | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, ...]:
    r"""Returns the points of one or both sources, or says what is wrong with them.

    They have the default type, or double precision if they came in it.

    Arguments:
        name: What the error calls them.
        drawn: The points of :math:`p_0`, of two sources a pair with those of :math:`p_1`, each
            with shape :math:`(N, d)`.
        sources: The number of sources, 1 or 2.
        dim: The dimension :math:`d`.
        size: The number :math:`N`; None for any but none.
        device: The device they should be on; None for any.

    Raises:
        UserError: If they are something else, or some are not finite.
    """
    both: list[Any] = list(drawn) if isinstance(drawn, tuple | list) else [drawn]
    fits = len(both) == sources and all(
        isinstance(x, Tensor)
        and x.is_floating_point()
        and x.shape == (size or max(len(both[0]), 1), dim)
        and (device is None or x.device.type == device.type)
        for x in both
    )
    if fits:
        bad = [int((~torch.isfinite(x)).any(dim=1).sum()) for x in both]
        problem = " and ".join(
            f"{n} of {len(x)} points of p_{i} not finite"
            for i, (n, x) in enumerate(zip(bad, both, strict=True))
            if n
        )
    else:
        problem = ", ".join(
            f"{tuple(x.shape)} {x.dtype} on {x.device}"
            if isinstance(x, Tensor)
            else type(x).__name__
            for x in both
        )
    if problem:
        where = "" if device is None else f" on {device}"
        tensors = f"{('a', 'two')[sources - 1]} finite floating-point tensor{'s' * (sources - 1)}"
        raise UserError(
            f"{name}: got {problem}; expected {tensors} with shape ({size or 'N'}, {dim}){where}."
        )
    dtype = torch.get_default_dtype()
    # A mean is subtracted before single precision may round: of large numbers it leaves nothing.
    return tuple(x.detach().to(torch.promote_types(x.dtype, dtype)) for x in both)


class DrawnBatches(Batches):
    r"""Batches that a function draws, standardised, with a probe beside the noise.

    The first draw is checked, and fixes the standardisation unless there is one already.
    """

    def __init__(
        self, draw_pairs: DrawPairs, dim: int, options: FitOptions, affine: Affine | None
    ) -> None:
        super().__init__(options.batch_size, options.seed, options.device)
        generator = step_generator(options.seed, Stream.MOMENTS, 0, options.device)
        check_signature("draw_pairs", draw_pairs)
        drawn = draw_pairs(FIRST, generator)
        first = check_drawn("draw_pairs", drawn, 2, dim, FIRST, generator.device)
        if affine is None:
            block = options.block if options.backbone == "block_quadratic" else None
            affine = Affine.of(torch.cat(first), options.standardise, block)
        self.draw_pairs, self.affine = draw_pairs, affine
        self._ends = affine(first[0]), affine(first[1])

    def ends(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        return self._ends

    def pairs(self, step: int, generator: Generator) -> Pairs:  # noqa: D102
        return self._standardised(self.draw_pairs(self.batch_size, generator))

    def held_out(self, pairs: tuple[Tensor, Tensor], dim: int) -> Batch:
        r"""Returns the batch of some pairs of dimension `dim`, always with the same noise."""
        generator = step_generator(self.seed, Stream.HELD_OUT, 0, self.device)
        checked = check_drawn("held_out", pairs, 2, dim)
        return self.completed(self._standardised(checked), generator)

    def completed(self, pairs: Pairs, generator: Generator) -> Batch:  # noqa: D102
        x_0, x_1, _ = pairs
        t = self.times.sample(len(x_0), generator)
        noise, probe = torch.randn(
            (2, *x_0.shape), generator=generator, device=x_0.device, dtype=x_0.dtype
        )
        return Batch(x_0, x_1, t.to(x_0), noise, probe=probe)

    def _standardised(self, pairs: tuple[Tensor, ...]) -> Pairs:
        return Pairs(*(self.affine(x.detach()) for x in pairs))


class Source(NamedTuple):
    r"""Where points of a distribution come from.

    Attributes:
        draw: Draws points, given their number and a generator.
        kept: Points that it does not draw, None if all that it draws are fresh.
        marks: Which of those are copies of each other, see :func:`marks_of`.
    """

    draw: Sampler
    kept: Tensor | None = None
    marks: NDArray[np.int64] | None = None

    def held_out(self, count: int, generator: Generator) -> Tensor:
        r"""Returns the points that are kept, else `count` fresh ones."""
        return self.draw(count, generator) if self.kept is None else self.kept


def source_of(
    name: str, values: object, share: float, generator: Generator, dim: int, least: int = 1
) -> Source:
    r"""Returns what draws rows with replacement, but for a share that is kept with its copies.

    Arguments:
        name: What warnings and errors call the rows.
        values: The rows, with shape :math:`(n, d)`, or a function that draws fresh ones.
        share: The share.
        generator: Chooses the rows that are kept, on the device of the points.
        dim: The dimension :math:`d`.
        least: The least number of rows.
    """
    if callable(values):
        check_signature(name, values)
        return Source(values)
    rows = read_rows(name, values, dim, least)
    refuse_constant(name, rows)  # its divergence is infinite
    marks = marks_of(name, rows)
    warn_of_order(name, rows[firsts(marks)])
    points = torch.as_tensor(rows).to(generator.device)
    order = torch.randperm(len(points), generator=generator, device=points.device)
    held, others = cut_apart(order.cpu().numpy(), marks, [round(share * len(points))])
    rest = points[others]

    def draw(n: int, generator: Generator) -> Tensor:
        return rest[torch.randint(len(rest), (n,), generator=generator, device=rest.device)]

    return Source(draw, points[held], marks[held])
