r"""The density figure: where the scores of ID and OOD images lie.

Two panels, near and far, show the same ID density against each OOD set, over one range of
log-ratios. Densities are Gaussian kernel estimates with Scott's bandwidth, made robust, and a
histogram where there is nothing to smooth: few images, or scores that are mostly equal.

Outside both supports a log-ratio is unbounded, and a far set thousands of nats away would squeeze
everything else into one line. So the range ends two widths of the ID scores beyond them, or
earlier, where it holds the central 99 % of what each set has there; what lies outside is counted
in the legend. Nothing is renormalised: a curve's area is the fraction of its set that is inside.

Of a set of more than 10 000 images the curve shows 10 000 evenly spaced order statistics, which are
deterministic and closer to the whole than a random subset. The AUROC in the legend is that of all
images.

Matplotlib is imported here alone, whatever backend the environment names.
"""

__all__ = ["STROKES", "STYLE", "Figure", "MaxNLocator", "draw_scores"]

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

try:
    import matplotlib
except ValueError:
    # A notebook's MPLBACKEND may name a backend that is not installed here. Files need none.
    backend = os.environ.pop("MPLBACKEND")
    for half_imported in [name for name in sys.modules if name.startswith("matplotlib.")]:
        del sys.modules[half_imported]
    import matplotlib

    os.environ["MPLBACKEND"] = backend
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from ..files import atomic_path
from .metrics import ood_metrics
from .scores import OOD_ROLES, Scores

POINTS = 512
BINS = 128
SUBSAMPLE = 10_000
REACH = 2.0

Array = NDArray[np.float64]
Dashes = str | tuple[int, tuple[float, ...]]

ID_COLOR = "#4d4d4d"
# Okabe and Ito's colour-blind-safe palette; the dashes tell sets apart in grey, too.
STROKES: tuple[tuple[str, Dashes], ...] = (
    ("#0072B2", "-"),
    ("#D55E00", (0, (5, 1.5))),
    ("#009E73", (0, (1, 1))),
    ("#CC79A7", (0, (4, 1.5, 1, 1.5))),
    ("#E69F00", (0, (8, 2))),
    ("#56B4E9", (0, (2, 1))),
)
# Any, as the names of the parameters differ between versions of Matplotlib.
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


def draw_scores(path: str | os.PathLike[str], scores: Scores, title: str) -> None:
    r"""Draws the density of the ID scores against each near and each far set, a panel each.

    Arguments:
        path: The image to write, atomically; its suffix is the format.
        scores: The scores of one ID set and at least one OOD set; a role without sets has no panel.
        title: The title, which names the benchmark.
    """
    roles = [role for role in OOD_ROLES if scores.of(role)]
    rows = 1 + max(len(scores.of(role)) for role in roles)
    size = 0.6 + 3.6 * len(roles), 2.9 + 0.18 * rows  # in inches
    with matplotlib.rc_context(STYLE), atomic_path(path) as temporary:
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=11)
        axes = figure.subplots(1, len(roles), squeeze=False, sharex=True)[0]
        _draw_panels(axes, scores, roles)
        for ax, role in zip(axes, roles, strict=True):
            ax.set_title(f"{role.capitalize()} OOD")
        axes[0].set_ylabel("density" if scores.parts else "density (1/nat)")
        figure.savefig(temporary, dpi=200)


def _draw_panels(axes: Iterable[Axes], scores: Scores, roles: Sequence[str]) -> None:
    r"""Draws, for each role, the ID density against its sets, over one range."""
    (id_set,) = scores.of("id").values()
    what = "sum of standardised parts" if scores.parts else "log-ratio (nats)"
    low, high = _range(id_set.score, [s.score for r in roles for s in scores.of(r).values()])
    id_label = f"ID{_outside(id_set.score, low, high)}"
    x, y = _density(id_set.score, low, high)
    for ax, role in zip(axes, roles, strict=True):
        _draw(ax, x, y, id_label, ID_COLOR, "-", fill=0.25)
        top = y.max()
        for i, (name, s) in enumerate(scores.of(role).items()):
            auroc = 100 * ood_metrics(id_set.score, s.score).auroc
            label = f"{name}: AUROC {auroc:.2f}{_outside(s.score, low, high)}"
            curve = _density(s.score, low, high)
            top = max(top, curve[1].max())
            _draw(ax, *curve, label, *STROKES[i % len(STROKES)], fill=0.08)
        # A set of nearly equal scores may tower over a smooth ID density, which has to stay visible.
        is_smooth = x.size == y.size
        ax.set_xlim(low, high)
        ax.set_ylim(0, 1.05 * (min(top, 4 * y.max()) if is_smooth else top))
        ax.set_xlabel(f"{what}, larger = more ID")
        ax.locator_params(axis="y", nbins=5)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), handlelength=2.5)


def _draw(
    ax: Axes, x: Array, y: Array, label: str, color: str, dashes: Dashes, fill: float
) -> None:
    r"""Draws a density that :func:`_density` estimated."""
    style: dict[str, Any] = {"color": color, "linestyle": dashes, "linewidth": 1.5, "label": label}
    if x.size == y.size:
        ax.plot(x, y, **style)
        ax.fill_between(x, y, color=color, alpha=fill, linewidth=0)
    else:
        ax.stairs(y, x, **style)
        ax.stairs(y, x, color=color, alpha=fill, fill=True, linewidth=0)


def _outside(scores: Array, low: float, high: float) -> str:
    r"""Says how much of a set lies beyond either end, where it is 1 % or more."""
    left, right = 100 * np.mean(scores < low), 100 * np.mean(scores > high)
    parts = [f"{left:.0f} % further left"] if left >= 1 else []
    parts += [f"{right:.0f} % further right"] if right >= 1 else []
    return f" ({', '.join(parts)})" if parts else ""


def _range(id_scores: Array, others: list[Array]) -> tuple[float, float]:
    r"""Finds the range to draw, a little beyond the scores that are within reach of the ID's."""
    start, stop = np.quantile(id_scores, (0.005, 0.995))
    # ID scores that are all equal have no width to measure by.
    reach = REACH * (stop - start) or np.inf
    ends = [(start, stop)]
    for scores in others:
        within = scores[(scores >= start - reach) & (scores <= stop + reach)]
        if within.size >= 0.01 * scores.size:
            ends.append(np.quantile(within, (0.005, 0.995)))
    low, high = float(np.min(ends)), float(np.max(ends))
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _density(scores: Array, low: float, high: float) -> tuple[Array, Array]:
    r"""Estimates the density of a set between two scores, per nat.

    Returns:
        Grid points and a smooth density there, both with shape :math:`(G)`, or the edges of bins
        :math:`(G + 1)` and a histogram :math:`(G)`.
    """
    if scores.size > SUBSAMPLE:
        ranks = (np.arange(SUBSAMPLE) + 0.5) / SUBSAMPLE * scores.size
        scores = np.sort(scores)[ranks.astype(np.int64)]
    inside = scores[(scores >= low) & (scores <= high)]
    spread = np.subtract(*np.quantile(inside, (0.75, 0.25))) if inside.size > 9 else 0.0
    if spread <= 1e-9 * (high - low):
        heights, edges = np.histogram(inside, bins=BINS, range=(low, high))
        return edges, heights / (scores.size * np.diff(edges))
    grid = np.linspace(low, high, POINTS)
    scale = min(inside.std(), spread / 1.34)
    # Narrower than the grid, a kernel would fall between its points.
    bandwidth = max(1.06 * scale * inside.size**-0.2, grid[1] - grid[0])
    # Images just outside carry part of the density inside.
    used = scores[(scores >= low - 5 * bandwidth) & (scores <= high + 5 * bandwidth)]
    kernel = gaussian_kde(used, bw_method=bandwidth / used.std(ddof=1))
    return grid, kernel(grid) * used.size / scores.size
