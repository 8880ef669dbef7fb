r"""The density figure: where the scores of ID and OOD images lie.

Two panels, near and far, show the same ID density against each OOD set, over one range of
log-ratios. Densities are Gaussian kernel estimates with Scott's bandwidth, made robust, and a
histogram where there is nothing to smooth: few images, or scores that are mostly equal.

Outside both supports a log-ratio is unbounded, and a far set thousands of nats away would squeeze
everything else into one line. So the range ends two widths of the ID scores beyond them, or
earlier, where it holds the central 99 % of what each set has there; what lies outside is counted
in the legend. Nothing is renormalised: a curve's area is the fraction of its set that is inside.

Sets of more than 10 000 images are drawn from 10 000 evenly spaced order statistics, which is
deterministic and closer to the whole than a random subset. The AUROC in the legend is that of all
images.
"""

__all__ = ["density_grid", "draw_scores", "score_density"]

import os
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from scipy.stats import gaussian_kde

from ..files import atomic_path
from .metrics import check_scores, ood_metrics
from .scores import OOD_ROLES, Scores

POINTS = 512
BINS = 128
SUBSAMPLE = 10_000
REACH = 2.0

Array = NDArray[np.float64]
Dashes = str | tuple[int, tuple[float, ...]]

ID_COLOR = "#4d4d4d"
# Okabe and Ito's colour-blind-safe palette; the dashes tell sets apart in grey, too
STROKES: tuple[tuple[str, Dashes], ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (1, 1))),
    ("#CC79A7", (0, (4, 1.5, 1, 1.5))),
    ("#E69F00", (0, (8, 2))),
    ("#56B4E9", (0, (2, 1))),
)
# Any, as the names of the parameters differ between versions of Matplotlib
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#333333",
    "axes.labelsize": 9,
    "axes.linewidth": 0.7,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.direction": "out",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


class Density(NamedTuple):
    r"""A density, piecewise linear or constant.

    Attributes:
        x: Grid points, with shape :math:`(G)`, or bin edges, with shape :math:`(G + 1)`.
        y: The density, per nat, with shape :math:`(G)`.
    """

    x: Array
    y: Array

    @property
    def smooth(self) -> bool:
        r"""Whether this is a kernel estimate rather than a histogram."""
        return self.x.size == self.y.size


def score_density(
    path: str | os.PathLike[str],
    id_scores: ArrayLike,
    near: Mapping[str, ArrayLike],
    far: Mapping[str, ArrayLike],
    title: str,
) -> None:
    r"""Draws the density of ID scores against each near and far set.

    A panel without sets is left out.

    Arguments:
        path: The image to write, atomically; its suffix is the format.
        id_scores: The log-ratios of ID images in nats, larger = more ID, with shape :math:`(N)`.
        near: The log-ratios of each near set, with shape :math:`(M)`, by name.
        far: The log-ratios of each far set, with shape :math:`(M)`, by name.
        title: The title, which names the benchmark.

    Raises:
        UserError: If a set is empty or a score is NaN or infinite.
    """
    id_scores = check_scores("ID", id_scores)
    panels = {
        name: {k: check_scores(k, v) for k, v in sets.items()}
        for name, sets in (("Near OOD", near), ("Far OOD", far))
    }
    low, high = _range(id_scores, [s for sets in panels.values() for s in sets.values()])
    panels = {name: sets for name, sets in panels.items() if sets} or {"ID": {}}
    rows = 1 + max(len(sets) for sets in panels.values())

    with matplotlib.rc_context(STYLE):
        size = (0.6 + 3.6 * len(panels), 2.9 + 0.18 * rows)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=11)
        axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]

        for ax, (name, sets) in zip(axes, panels.items(), strict=True):
            _panel(ax, id_scores, sets, low, high)
            ax.set_title(name)

        axes[0].set_ylabel("density (1/nat)")

        with atomic_path(path) as temporary:
            figure.savefig(temporary)


def draw_scores(path: str | os.PathLike[str], scores: Scores, title: str) -> None:
    r"""Draws the densities of an evaluation's scores, see :func:`score_density`.

    Arguments:
        path: The image to write.
        scores: The scores, of one ID set.
        title: The title.
    """
    (id_scores,) = (s.score for s in scores.of("id").values())
    near, far = ({n: s.score for n, s in scores.of(role).items()} for role in OOD_ROLES)
    score_density(path, id_scores, near, far, title)


def density_grid(path: str | os.PathLike[str], methods: Mapping[str, Scores]) -> None:
    r"""Draws a pair of panels a method, two methods a row: ID against the near and the far sets.

    Every method has a range of its own, as scores of different methods have no common scale.

    Arguments:
        path: The image to write, atomically; its suffix is the format.
        methods: The scores of each method, by its title.

    Raises:
        UserError: If a score is NaN or infinite.
    """
    with matplotlib.rc_context(STYLE):
        rows = -(-len(methods) // 2)
        figure = Figure(figsize=(14.0, 1.9 * rows + 0.5), layout="constrained")
        FigureCanvasAgg(figure)
        pairs = figure.subplots(rows, 4, squeeze=False).reshape(-1, 2)
        for row in pairs[len(methods) :]:
            for ax in row:
                ax.set_axis_off()
        for row, (title, scores) in zip(pairs, methods.items(), strict=False):
            (id_scores,) = (check_scores("ID", s.score) for s in scores.of("id").values())
            sets = [
                {name: check_scores(name, s.score) for name, s in scores.of(role).items()}
                for role in ("near", "far")
            ]
            low, high = _range(id_scores, [s for group in sets for s in group.values()])
            for ax, group, role in zip(row, sets, ("near", "far"), strict=True):
                _panel(ax, id_scores, group, low, high)
                ax.set_title(f"{textwrap.fill(title, 40)}\n{role} OOD", loc="left", fontsize=8)
                ax.set_xlabel("")
                ax.legend(loc="best", fontsize=6, framealpha=0.6, handlelength=1.5)
        figure.supxlabel("score, larger = more ID")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=80)


def _panel(ax: Axes, id_scores: Array, sets: Mapping[str, Array], low: float, high: float) -> None:
    density = _density(id_scores, low, high)
    top = peak = density.y.max()
    _draw(ax, density, f"ID{_outside(id_scores, low, high)}", ID_COLOR, "-", fill=0.25)

    for i, (name, scores) in enumerate(sets.items()):
        auroc = 100 * ood_metrics(id_scores, scores).auroc
        label = f"{name}: AUROC {auroc:.2f}{_outside(scores, low, high)}"
        curve = _density(scores, low, high)
        top = max(top, curve.y.max())
        color, dashes = STROKES[i % len(STROKES)]
        _draw(ax, curve, label, color, dashes, fill=0.08)

    # A set of nearly equal scores may tower over the ID density, which has to stay visible
    top = min(top, 4 * peak) if density.smooth else top
    ax.set_xlim(low, high)
    ax.set_ylim(0, 1.05 * top)
    ax.set_xlabel("log-ratio (nats), larger = more ID")
    ax.locator_params(axis="y", nbins=5)
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=2.5)


def _draw(
    ax: Axes,
    density: Density,
    label: str,
    color: str,
    dashes: Dashes,
    fill: float,
) -> None:
    if density.smooth:
        ax.plot(*density, color=color, linestyle=dashes, linewidth=1.5, label=label)
        ax.fill_between(*density, color=color, alpha=fill, linewidth=0)
    else:
        edges, heights = density
        ax.stairs(heights, edges, color=color, linestyle=dashes, linewidth=1.5, label=label)
        ax.stairs(heights, edges, color=color, alpha=fill, fill=True, linewidth=0)


def _outside(scores: Array, low: float, high: float) -> str:
    r"""Says how much of a set lies beyond either end, where it is 1 % or more."""
    left, right = 100 * np.mean(scores < low), 100 * np.mean(scores > high)
    parts = [f"{left:.0f} % further left"] if left >= 1 else []
    parts += [f"{right:.0f} % further right"] if right >= 1 else []

    return f" ({', '.join(parts)})" if parts else ""


def _range(id_scores: Array, others: list[Array]) -> tuple[float, float]:
    r"""Finds the range to draw, a little beyond the scores that are within reach of the ID's."""
    start, stop = np.quantile(id_scores, (0.005, 0.995))
    # ID scores that are all equal have no width to measure by
    reach = REACH * (stop - start) or np.inf
    ends = [(start, stop)]

    for scores in others:
        within = scores[(scores >= start - reach) & (scores <= stop + reach)]

        if within.size >= 0.01 * scores.size:
            ends.append(np.quantile(within, (0.005, 0.995)))

    low, high = float(np.min(ends)), float(np.max(ends))
    margin = 0.05 * (high - low) or 1.0

    return low - margin, high + margin


def _density(scores: Array, low: float, high: float) -> Density:
    r"""Estimates the density of a set between two scores."""
    if scores.size > SUBSAMPLE:
        ranks = (np.arange(SUBSAMPLE) + 0.5) / SUBSAMPLE * scores.size
        scores = np.sort(scores)[ranks.astype(np.int64)]

    inside = scores[(scores >= low) & (scores <= high)]
    spread = np.subtract(*np.quantile(inside, (0.75, 0.25))) if inside.size > 9 else 0.0

    if spread <= 1e-9 * (high - low):
        heights, edges = np.histogram(inside, bins=BINS, range=(low, high))
        return Density(edges, heights / (scores.size * np.diff(edges)))

    grid = np.linspace(low, high, POINTS)
    scale = min(inside.std(), spread / 1.34)
    # Narrower than the grid, a kernel would fall between its points
    bandwidth = max(1.06 * scale * inside.size**-0.2, grid[1] - grid[0])

    # Images just outside carry part of the density inside
    used = scores[(scores >= low - 5 * bandwidth) & (scores <= high + 5 * bandwidth)]
    kernel = gaussian_kde(used, bw_method=bandwidth / used.std(ddof=1))

    return Density(grid, kernel(grid) * used.size / scores.size)
