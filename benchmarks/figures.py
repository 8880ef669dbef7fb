r"""The figures of the pages, drawn anew from the committed records.

Two versions of a drawing library need not agree to the last pixel, so an image matches if few of
its pixels differ visibly. What is drawn from a trained model instead of a record, densities over
the plane and a field of scores, is not here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from bench_tables import GUIDES, TEST, with_interval
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from records import RECORDS, Run, read_runs, record_of
from studies import load_study
from study_tables import rows_of

from ood_osdre.evaluation.plots import STROKES, STYLE, save_png
from ood_osdre.evaluation.score_plots import draw_scores
from ood_osdre.evaluation.scores import read_scores

RESULTS = Path(__file__).parent / "results"

# How much of a channel's range is visible, and the share of pixels that may differ so.
VISIBLE, SHARE = 0.1, 0.005


def score_densities(path: Path, name: str) -> None:
    r"""Draws the densities of a run's scores.

    Arguments:
        path: The image to write.
        name: The run's folder.
    """
    folder = RESULTS / name
    benchmark = pd.read_csv(folder / "metrics.csv")["benchmark"].iloc[0]
    title = record_of(folder / "run.json")["config"]["title"]
    scores = read_scores(folder / "scores.npz")
    draw_scores(path, scores, f"{benchmark}: {title}" if title else benchmark)


def tracking(path: Path) -> None:
    r"""Draws the divergences of a stream."""
    # Imported here, as it imports torch, which the tables do without.
    from ood_osdre.tasks.suites import kl

    kl.plot(path, record_of(RECORDS / "kl.json")["results"]["rows"])


def quality(path: Path, name: str, group: str | None = None) -> None:
    r"""Draws quality against network evaluations and seconds, of a study's density ratios.

    Arguments:
        path: The image to write.
        name: The study.
        group: The group of its methods that are ratios; None for all.
    """
    study = load_study(name)
    solvers = [method for method, how in study.methods.items() if how.variants]
    nfe_plot(path, rows_of(study, read_runs(RECORDS / f"{name}.jsonl"), group), solvers)


def nfe_plot(path: Path, rows: Mapping[str, Sequence[Run]], solvers: Sequence[str]) -> None:
    r"""Draws near and far AUROC against network evaluations and against seconds.

    Fixed rules of solver-based methods are curves, their adaptive solver a diamond, the one-step and
    direct ratios points at one evaluation.

    Arguments:
        path: The image to write.
        rows: The runs of each method and variant.
        solvers: The methods that have several numbers of evaluations.
    """
    marks = []  # rows, marker, dashes, colour, label
    for i, name in enumerate(name for name in solvers if _of(rows, name)):
        color, dashes = STROKES[i]
        own = _of(rows, name)
        fixed = [runs for runs in own if runs[0].variant.startswith("NFE")]
        adaptive = [runs for runs in own if runs not in fixed]
        marks.append((fixed, "o", dashes, color, name))
        if adaptive:
            marks.append((adaptive, "D", "none", color, f"{name}, adaptive"))
    others = dict.fromkeys(runs[0].method for runs in rows.values())
    for i, name in enumerate(name for name in others if name not in solvers):
        marker = "*" if name.startswith("OS-DRE") else "x"
        marks.append((_of(rows, name), marker, "none", STROKES[i % len(STROKES)][0], name))
    across = {
        "network evaluations an image": lambda run: run.evaluations,
        "least seconds to score the test sets": lambda run: run.score_seconds,
    }
    means = {"near": lambda run: run.metric(run.near), "far": lambda run: run.metric("farood")}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 6.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2, sharex="col")
        for row, (mean, y_of) in zip(axes, means.items(), strict=True):
            for ax, (label, x_of) in zip(row, across.items(), strict=True):
                for points, marker, dashes, color, title in marks:
                    x = [min(x_of(run) for run in runs) for runs in points]
                    y = [np.mean([y_of(run) for run in runs]) for runs in points]
                    ax.plot(x, y, marker=marker, ls=dashes, color=color, label=title)
                ax.set_xscale("log")
                ax.xaxis.set_minor_formatter(NullFormatter())
                ax.xaxis.set_major_formatter("{x:g}")
                ax.set_ylabel(f"{mean} AUROC (%)")
                if mean == "far":
                    ax.set_xlabel(label)
        handles, titles = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, titles, loc="outside lower center", ncols=3)
        save_png(figure, path, dpi=120)


def transfer(path: Path) -> None:
    r"""Draws the test against either guide, a row of panels for each ID data set and reference."""
    results = record_of(RECORDS / "transfer.json")["results"]
    names = list(dict.fromkeys(name for panel in results.values() for name in panel["families"]))
    marks = {
        n: (STROKES[i % len(STROKES)][0], "osD^v"[i // len(STROKES)]) for i, n in enumerate(names)
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4 * len(results) + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(results), len(GUIDES), squeeze=False, sharey="row")
        for axes, (title, panel) in zip(grid, results.items(), strict=True):
            for ax, guide in zip(axes, GUIDES, strict=True):
                for name, own in panel["families"].items():
                    color, marker = marks[name]
                    if own[guide][0] is not None:
                        (x, *ends), (y, *others) = own[guide], own[TEST]
                        bars = {"xerr": _bars(x, ends), "yerr": _bars(y, others)}
                        ax.errorbar(x, y, **bars, fmt=marker, color=color, label=name, lw=0.8)
                ax.set_title(f"{title}: rho {with_interval(panel['rho'][guide], 2)}")
                ax.set_xlabel(f"{guide} AUROC (%)")
            axes[0].set_ylabel("test AUROC (%)")
        labelled = [ax.get_legend_handles_labels() for ax in grid.flat]
        handles = {n: h for hs, ns in labelled for h, n in zip(hs, ns, strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)
        save_png(figure, path, dpi=120)


def _bars(value: float, ends: Sequence[float]) -> list[list[float]]:
    r"""Returns the lengths of an interval's sides; of a skewed bootstrap the value may lie outside."""
    low, high = ends
    return [[max(value - low, 0)], [max(high - value, 0)]]


def _of(rows: Mapping[str, Sequence[Run]], name: str) -> list[Sequence[Run]]:
    r"""Returns the rows of a method."""
    return [runs for runs in rows.values() if runs[0].method == name]


#: How each is drawn.
FIGURES: dict[str, Callable[[Path], None]] = {
    **{
        f"{name}/score_density.png": partial(score_densities, name=name)
        for name in ("cifar10_pack_cpu", "digits", "places100")
    },
    "pack_methods_nfe.png": partial(quality, name="pack_methods", group="ratio"),
    "paths_heads_nfe.png": partial(quality, name="paths_heads"),
    "kl.png": tracking,
    "transfer.png": transfer,
}


def draw(name: str, path: Path) -> None:
    r"""Draws a figure.

    Arguments:
        name: Its name in :data:`FIGURES`.
        path: The image to write.
    """
    FIGURES[name](path)


def alike(one: Path, other: Path) -> bool:
    r"""Returns whether two images show the same.

    Arguments:
        one: An image.
        other: Another image; false if there is none.
    """
    if not other.is_file():
        return False
    a, b = image.imread(one), image.imread(other)
    if a.shape != b.shape:
        return False
    return bool((np.abs(a - b).max(axis=-1) > VISIBLE).mean() <= SHARE)
