r"""What is drawn of scores: where those of ID and OOD images lie, and how well they are told apart.

Two panels, near and far, show the same ID density against each OOD set, on one scale. A thin line
in a set's colour is the threshold of FPR@95, at or below which 95 % of the set lies; that of the ID
set is where 95 % of it is kept. Densities are Gaussian kernel estimates with Scott's bandwidth, made
robust, and a histogram where there is nothing to smooth: few images, or scores that are mostly
equal.

Outside both supports a log-ratio is unbounded, and a far set thousands of nats away would squeeze
everything else into one line. So the range ends two widths of the ID scores beyond them, or
earlier, where it holds the central 99 % of what each set has there; what lies outside is counted
in the legend. Nothing is renormalised: a curve's area is the fraction of its set that is inside.

Of a set of more than 10 000 images the curve shows 10 000 evenly spaced order statistics, which are
deterministic and closer to the whole than a random subset. The AUROC in the legend is that of all
images.
"""

__all__ = ["LOG_RATIO", "densities", "draw_scores", "held_out", "rankings", "score_label"]

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import gaussian_kde

from .metrics import curves, ood_metrics, threshold95
from .plots import ID_STROKE, Array, Line, Panel, Stroke, draw_panels, stroke
from .scores import OOD_ROLES, Scores

POINTS = 512
BINS = 128
SUBSAMPLE = 10_000
REACH = 2.0
LOG_RATIO = "log-ratio (nats)"


def score_label(config: Mapping[str, Any], scores: Scores) -> str:
    r"""Returns what the scores of a run are, with their unit.

    Arguments:
        config: The configuration of the run, as its record holds it.
        scores: The scores.
    """
    if scores.parts:
        return "sum of standardised parts"
    if config.get("estimator") == "classifier" and not config.get("head"):
        return f"score of a classifier ({config['evaluation']['score']})"
    return LOG_RATIO


def draw_scores(
    path: str | os.PathLike[str], scores: Scores, title: str, what: str = LOG_RATIO
) -> None:
    r"""Draws the density of the ID scores against each near and each far set, a panel each.

    Arguments:
        path: The PNG file to write, atomically.
        scores: The scores of one ID set and at least one OOD set; a role without sets has no panel.
        title: The title, which names the benchmark.
        what: What the scores are, see :func:`score_label`.
    """
    draw_panels(path, densities(scores, what), title)


def densities(scores: Scores, what: str = LOG_RATIO) -> list[Panel]:
    r"""Returns a panel for each role, the ID density against its sets; all have one scale.

    Arguments:
        scores: The scores of one ID set and at least one OOD set.
        what: What the scores are, see :func:`score_label`.
    """
    ((id_name, id_set),) = scores.of("id").items()
    groups = {role: scores.of(role) for role in OOD_ROLES if scores.of(role)}
    low, high = _range(id_set.score, [s.score for g in groups.values() for s in g.values()])

    def line(name: str, score: Array, style: Stroke, note: str, mark: float) -> Line:
        note = f"n = {score.size:,}; {note} {mark:.4g}{_outside(score, low, high)}"
        return Line(name, *_density(score, low, high), style, note, mark)

    kept = -threshold95(-id_set.score)
    of_id = line(f"{id_name} (ID)", id_set.score, ID_STROKE, "95 % kept at ≥", kept)
    panels, order = [], [name for group in groups.values() for name in group]
    for role, group in groups.items():
        lines = [of_id]
        for name, s in group.items():
            auroc = 100 * ood_metrics(id_set.score, s.score).auroc
            note = f"AUROC {auroc:.2f}; 95 % caught at ≤"
            lines.append(
                line(name, s.score, stroke(order.index(name)), note, threshold95(s.score))
            )
        labels = f"{what}, larger = more ID", "density (1/nat)" if what == LOG_RATIO else "density"
        title = f"{role.capitalize()} OOD"
        panels.append(Panel(title, *labels, lines, (low, high), fill=True))
    top, id_top = max(x.y.max() for p in panels for x in p.lines), of_id.y.max()
    # A set of nearly equal scores may tower over a smooth ID density, which has to stay visible.
    top = min(top, 4 * id_top) if of_id.x.size == of_id.y.size else top
    return [panel._replace(ylim=(0, 1.05 * top)) for panel in panels]


def held_out(scores: Scores, threshold: float | None) -> Panel:
    r"""Returns the densities of the held-out ID data and of the held-out reference of a fit.

    Arguments:
        scores: Their log-ratios, of the roles `id` and `near`.
        threshold: The log-ratio below which inputs are decided OOD, None for no decision.
    """
    (panel,) = densities(scores)
    lines = []
    for line in panel.lines:
        of_id, count = line.stroke == ID_STROKE, line.note.partition(";")[0]
        outside = line.note[line.note.find(" (") :] if line.note.endswith(")") else ""
        note = f"; decided OOD below {threshold:.4g}" if of_id and threshold is not None else ""
        mark = threshold if of_id else None
        lines.append(line._replace(note=count + note + outside, mark=mark))
    return panel._replace(title="Held-out data", lines=lines)


def rankings(scores: Scores) -> list[Panel]:
    r"""Returns the ROC curves of all sets, and those of precision and recall, a panel each.

    A curve has up to 400 of its vertices, evenly spaced along it.

    Arguments:
        scores: The scores of one ID set and at least one OOD set.
    """
    (id_set,) = scores.of("id").values()
    metrics = {name: m for sets in scores.metrics().values() for name, m in sets.items()}
    lines: tuple[list[Line], ...] = ([], [], [])
    for i, (name, m) in enumerate(metrics.items()):
        (other,) = (g[name] for role in OOD_ROLES if name in (g := scores.of(role)))
        notes = (
            f"AUROC {100 * m.auroc:.2f}; FPR@95 {100 * m.fpr95:.2f}",
            f"AUPR_IN {100 * m.aupr_in:.2f}",
            f"AUPR_OUT {100 * m.aupr_out:.2f}",
        )
        for own, curve, note in zip(lines, curves(id_set.score, other.score), notes, strict=True):
            x, y = _thinned(curve)
            own.append(Line(name, x, y, stroke(i), note))
    roc, of_in, of_out = lines
    ends = -0.01, 1.01
    return [
        Panel("ROC", "ID flagged (fraction)", "OOD caught (fraction)", roc, ends, ends, 0.95),
        Panel("Precision and recall, OOD positive", "recall", "precision", of_out, ends, ends),
        Panel("Precision and recall, ID positive", "recall", "precision", of_in, ends, ends),
    ]


def _thinned(curve: Array, points: int = 400) -> Array:
    r"""Takes points of a curve that are evenly spaced along it, both ends among them.

    Arguments:
        curve: The points, with shape :math:`(2, V)`.
        points: The largest number of points.
    """
    along = np.concatenate([[0.0], np.abs(np.diff(curve)).sum(axis=0).cumsum()])
    wanted = np.searchsorted(along, np.linspace(0, along[-1], points))
    return curve[:, np.unique([0, *wanted, along.size - 1])]


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
