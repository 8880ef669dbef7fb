r"""Mutual information as the divergence of a joint distribution from the product of its marginals.

With p_1 the joint distribution of (x, y) and p_0 the product of their marginals, I(x; y) is the mean
of log p_1 / p_0 over p_1, in nats. Every task here has its truth in closed form:

- Gaussians of d = 40, ..., 160 dimensions and 10 to 40 nats, and of 320 and 640 dimensions and 80 and
  160 nats: more than any bound that takes exponentials of the ratio can reach. Features are quadratic,
  which can represent the truth, or those of an MLP.
- Pathological pairs of scalars: heavy tails, sharp curvature, hard edges (ood_osdre.tasks.gaussians).

Estimates are expectations over held-out points, at least 100,000 for the Gaussians. Without
--full the fits take minutes; with it, they are the paper's grid and more.
"""

__all__ = [
    "QUADRATIC",
    "SUITES",
    "Job",
    "add_arguments",
    "estimate",
    "gaussian_jobs",
    "pathological_jobs",
    "plot",
    "run",
]

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ...evaluation.plots import Figure, save_png
from ...models import KERNELS
from ...training.batches import Stream, step_generator
from ..features import NormalScores
from ..fit import DrawPairs, divergence, fit_ratio
from ..gaussians import correlated_pairs, dependence_task
from ..information import ksg
from ..methods import METHODS, FitOptions
from .jobs import Row
from .reports import (
    Suite,
    add_common_arguments,
    check_arguments,
    check_names,
    list_fits,
    run_suites,
    summarise,
)

# The mutual information of the Gaussian tasks by their dimension.
LEVELS_OF_DIM = {40: 10.0, 80: 20.0, 120: 30.0, 160: 40.0, 320: 80.0, 640: 160.0}
# Those of the default, which takes minutes.
FEW = (40, 160)
# A thin floor: both ends are full-dimensional Gaussians, so that nothing diverges without one.
QUADRATIC = FitOptions(
    backbone="block_quadratic", standardise="whiten", lr=1.0, steps=2000, batch_size=512, eps=1e-4
)
# Stochastic gradients on as many coefficients as there are features times atoms: the error falls
# with the number of steps, and needs more of them than in proportion to the dimension.
LARGE_STEPS = {320: 4000, 640: 12_000}
# Peak learning rates on quadratic features, each the best of a grid on a seed of its own.
RATES = {"dre-inf": 3e-3, "d3re": 3e-3, "logistic": 0.03, "nwj": 0.01, "infonce": 0.03}
PERCEPTRON = FitOptions(features=256, depth=3, lr=2e-3, standardise="whiten", steps=2000)

GAUSSIAN_METHODS = ("os-dre", "dre-inf", "d3re", "logistic", "nwj", "infonce")

SCALARS = FitOptions(features=64, depth=3, lr=2e-3, steps=1000, batch_size=512, eps=1e-4)
LEVELS = {
    "gauss": (0.0, 0.5, 0.9),
    "half-cube": (0.5, 0.9),
    "asinh": (0.5, 0.9),
    "additive-noise": (0.2, 0.9),
    "gamma-exp": (0.5, 1.8),
}
FULL_LEVELS = {
    "gauss": (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    "half-cube": (0.2, 0.4, 0.6, 0.8, 0.9),
    "half-cube-both": (0.2, 0.4, 0.6, 0.8, 0.9),
    "asinh": (0.2, 0.4, 0.6, 0.8, 0.9),
    "additive-noise": (0.1, 0.2, 0.4, 0.6, 0.9),
    "gamma-exp": (0.5, 1.0, 1.8, 3.0, 5.0),
}
SCALAR_METHODS = ("os-dre", "os-dre-logistic", "logistic", "nwj", "infonce", "mine", "ksg")


# Points that KSG sees, and what the figure's axis of estimates is limited to, in units of the
# largest truth.
KSG_POINTS = 5000
WINDOW = -0.3, 1.3


class Job(NamedTuple):
    r"""One fit: of `gaussian-pairs` (`dim`, `level` nats) or of a family of scalars at a level."""

    family: str
    dim: int
    level: float
    method: str
    options: FitOptions
    held_out: int


def gaussian_jobs(args: argparse.Namespace) -> list[Job]:
    r"""Lists the fits of the Gaussian suite."""
    with_kernel = [m for m in METHODS if METHODS[m].kernel]
    jobs = []
    for dim in args.dims or (LEVELS_OF_DIM if args.full else FEW):
        for backbone in args.backbones or ("block_quadratic", "mlp"):
            perceptron = backbone == "mlp"
            few = perceptron and not (args.backbones or args.full)
            for method in args.methods or GAUSSIAN_METHODS:
                if method == "ksg" or (few and method != "os-dre"):
                    continue
                if perceptron:
                    options = PERCEPTRON.replace(steps=20_000) if args.full else PERCEPTRON
                else:
                    rate = RATES.get(method, QUADRATIC.lr)
                    steps = LARGE_STEPS.get(dim, QUADRATIC.steps)
                    options = QUADRATIC.replace(backbone=backbone, lr=rate, steps=steps)
                # An MLP says nothing about kernels that the features that can fit do not.
                kernels = args.kernels or (["rq"] if perceptron else list(KERNELS))
                varied = [] if perceptron else with_kernel
                fits = list_fits(args, [method], options, kernels, varied, 3 if args.full else 1)
                nats = LEVELS_OF_DIM[dim]
                jobs += [Job("gaussian-pairs", dim, nats, *fit, 100_000) for fit in fits]
    return jobs


def pathological_jobs(args: argparse.Namespace) -> list[Job]:
    r"""Lists the fits of the pathological suite."""
    methods = args.methods or [*SCALAR_METHODS, *(["dre-inf", "d3re"] if args.full else [])]
    options = SCALARS.replace(steps=4000) if args.full else SCALARS
    kernels = args.kernels or (list(KERNELS) if args.full else ["rq"])
    with_kernel = [m for m in METHODS if METHODS[m].kernel]
    fits = list_fits(args, methods, options, kernels, with_kernel, 5 if args.full else 1)
    return [
        Job(family, 2, level, *fit, 20_000)
        for family, levels in (FULL_LEVELS if args.full else LEVELS).items()
        for level in levels
        for fit in fits
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    r"""Adds the options of the subcommand `mi`."""
    add_common_arguments(parser, "mi")
    add = parser.add_argument
    add(
        "--suite",
        choices=("gaussian", "pathological", "all"),
        default="all",
        help="high-dimensional Gaussians, pathological pairs of scalars, or both, which takes "
        "minutes (default: all)",
    )
    add(
        "--methods",
        nargs="+",
        choices=(*METHODS, "ksg"),
        help="how it is estimated; ksg, nearest neighbours, is for pathological pairs alone "
        f"(default: {' '.join(GAUSSIAN_METHODS)}; of pairs {' '.join(SCALAR_METHODS)}; with "
        "--full more)",
    )
    add(
        "--dims",
        nargs="+",
        type=int,
        choices=tuple(LEVELS_OF_DIM),
        help="dimensions of the Gaussian tasks (default: 40 160; with --full all)",
    )
    add(
        "--backbones",
        nargs="+",
        choices=("mlp", "quadratic", "block_quadratic"),
        help="features for the Gaussian tasks (default: block_quadratic, and mlp for os-dre; "
        "with --full both for all)",
    )
    add(
        "--kernels",
        nargs="+",
        choices=tuple(KERNELS),
        help="temporal kernels (default: all for Gaussian tasks on quadratic features, else rq; "
        "with --full all for pathological ones, too)",
    )


def estimate(job: Job) -> list[Row]:
    r"""Runs one fit and returns its row."""
    generator = step_generator(job.options.seed, Stream.TEST, 0, job.options.device)
    draw_pairs: DrawPairs
    if job.family == "gaussian-pairs":
        pair = correlated_pairs(job.dim, job.level)
        name, truth, draw_pairs = pair.id, pair.divergence, pair.draw_pairs
    else:
        task = dependence_task(job.family, job.level)
        name, truth = task.id, task.truth
        draw_pairs = _normal_scores(task.draw_pairs, generator)
    row: Row = {"task": name, "method": "KSG", "kernel": "-", "features": "-", "evaluations": 1}
    row |= {"seed": job.options.seed, "truth": truth}
    if job.method == "ksg":
        x, y = draw_pairs(KSG_POINTS, generator)[1].T
        started = time.monotonic()
        row["estimate"] = ksg(x, y)
        return [row | {"seconds": time.monotonic() - started, "score_seconds": 0.0}]

    method = METHODS[job.method]
    fit = fit_ratio(method, draw_pairs, job.dim, job.options)
    x_0, x_1 = draw_pairs(job.held_out, generator)
    started = time.monotonic()
    row["estimate"] = divergence(fit, x_0, x_1)
    row |= {"seconds": fit.seconds, "score_seconds": time.monotonic() - started}
    row |= {"method": method.label, "features": job.options.backbone}
    row["kernel"] = job.options.kernel if method.kernel else "-"
    row["evaluations"] = job.options.evaluations if method.solver else 1
    return [row]


def _normal_scores(draw_pairs: DrawPairs, generator: torch.Generator) -> DrawPairs:
    scores = NormalScores(torch.cat(draw_pairs(20_000, generator)))

    def draw(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x_0, x_1 = draw_pairs(n, generator)
        return scores(x_0), scores(x_1)

    return draw


def plot(path: Path, rows: Sequence[Row], table: Sequence[Row], title: str) -> None:
    r"""Draws the estimates against the truth, one panel a kind of features.

    Estimates far outside, as an exponential bound may give, are triangles at the edge.

    Arguments:
        path: The image.
        rows: Not drawn.
        table: The summary.
        title: The title.
    """
    # Nearest neighbours have no features; they are in every panel, or in one of their own.
    kinds = sorted({row["features"] for row in table} - {"-"}) or ["-"]
    figure = Figure(figsize=(0.6 + 4.2 * len(kinds), 3.8), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    for ax, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        shown = [row for row in table if row["features"] in (kind, "-")]
        truths = [r["truth"] for r in shown]
        low, high = (share * (max(truths) or 1.0) for share in WINDOW)
        outside = []
        ax.axline((truths[0],) * 2, slope=1, color="black", linewidth=1, label="truth")
        ax.update_datalim([(truth, truth) for truth in truths])
        for label in dict.fromkeys((r["method"], r["kernel"]) for r in shown):
            own = [r for r in shown if (r["method"], r["kernel"]) == label]
            points = [r for r in own if low <= r["mean"] <= high]
            name = label[0] if label[1] == "-" else " ".join(label)
            bars = ax.errorbar(
                [r["truth"] for r in points],
                [r["mean"] for r in points],
                [r.get("std") or 0.0 for r in points],
                fmt="o",
                markersize=4,
                alpha=0.7,
                label=name,
            )
            colour = bars.lines[0].get_color()
            outside += [(r["truth"], r["mean"], colour) for r in own if r not in points]
        if outside:
            ax.margins(y=0.15)  # for their numbers
        bottom, top = ax.get_ylim()
        bottom, top = max(bottom, low), min(top, high)
        ax.set_ylim(bottom, top)
        for truth, value, colour in outside:
            edge, marker, side = (top, "^", -14) if value > high else (bottom, "v", 8)
            ax.plot(truth, edge, color=colour, marker=marker, clip_on=False, alpha=0.7)
            style = {"textcoords": "offset points", "ha": "center", "fontsize": 7}
            ax.annotate(f"{value:.4g}", (truth, edge), (0, side), **style)
        ax.set_title("" if kind == "-" else f"features: {kind}")
        ax.set_xlabel("truth (nats)")
        ax.set_ylabel("estimate (nats)")
        ax.legend(fontsize=7, frameon=False)
    save_png(figure, path, dpi=120)


GAUSSIAN = "Mutual information of high-dimensional Gaussians (nats)"
PATHOLOGICAL = "Mutual information of pathological pairs (nats)"
KEYS = ["task", "method", "kernel", "features", "evaluations"]
SUITES = {
    "gaussian": Suite(
        "mi-gaussian",
        GAUSSIAN,
        "Means over held-out points; seconds are those of training. Correlation "
        "sqrt(1 - exp(-4 I / d)), which is 0.795 for I = d / 4. KSG is for pathological pairs "
        "alone.",
        gaussian_jobs,
        estimate,
        partial(summarise, keys=KEYS),
        partial(plot, title=GAUSSIAN),
    ),
    "pathological": Suite(
        "mi-pathological",
        PATHOLOGICAL,
        f"All see normal scores of the coordinates. KSG sees {KSG_POINTS} points, once; the "
        "others train on fresh draws.",
        pathological_jobs,
        estimate,
        partial(summarise, keys=KEYS),
        partial(plot, title=PATHOLOGICAL),
    ),
}


def run(args: argparse.Namespace) -> int:
    r"""Runs the suites, prints their tables and writes them.

    Raises:
        UserError: If something is listed twice, the suite has no such method or option, or other
            results are in the way.
    """
    gaussian = ("gaussian", "all")
    check_arguments(args, {"dims": gaussian, "backbones": gaussian})
    if args.suite == "gaussian":
        check_names("--methods", args.methods or (), METHODS, " with --suite gaussian")
    names = SUITES if args.suite == "all" else (args.suite,)
    run_suites(args, [(SUITES[name], {"suite": name}) for name in names])
    return 0
