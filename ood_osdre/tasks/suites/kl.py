r"""The divergence of a drifting stream from where it started, with the truth beside it.

The stream is p_t, the reference p_0 = N(0, I) stays, and what is tracked over the steps t = 0, 1, ...
is KL(p_t || p_0), the mean of log p_t / p_0 over p_t, in nats, by a ratio that is refitted at every step from the last step's weights. All
methods get the same number of updates a step. The lag of a method at a step is the share of
those updates that it takes to come within tolerance of the new truth and stay there: 5 % or 0.3
nats, whichever is more. On the way, for the curves of the figure and the lag, estimates are means
over 1,000 points of a step that are the same throughout; those of the table, which also decide
whether a lag ends at all, are means over 50,000 new points.

The scenarios are those of ood_osdre.tasks.gaussians. A last table is about a detector that is not
refitted, ood_osdre.tasks.DriftMonitor: how long its alarm takes after a
change, and how often it comes without one.
"""

__all__ = ["SUITE", "add_arguments", "lag", "monitor_table", "plot", "run", "track"]

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ...errors import count
from ...evaluation.plots import Figure, MaxNLocator, save_png
from ...training.batches import Stream, step_generator
from ..fit import FitOptions, fit_ratio
from ..gaussians import SCENARIOS, scenario
from ..methods import METHODS
from ..tracking import QUADRATIC, DriftMonitor, KLTracker, Tracked
from .jobs import Row
from .reports import (
    Suite,
    add_common_arguments,
    check_arguments,
    refuse_other_results,
    run_suites,
    summarise,
    write_report,
)

# An estimate is within tolerance by either of the two.
RELATIVE, ABSOLUTE = 0.05, 0.3

# Of more dimensions even the drawn points would not fit into memory.
LARGEST_DIM, LARGEST_HORIZON = 10_000, 19

PERCEPTRON = FitOptions(features=128, depth=2, lr=1e-3, steps=400)
# Peak learning rates on quadratic features, each the best of a grid on a seed of its own.
RATES = {"dre-inf": 1e-2, "d3re": 1e-2, "logistic": 0.03, "nwj": 0.01}
METHOD_NAMES = ["os-dre", "dre-inf", "d3re", "logistic", "nwj"]

# The monitor: mean run length, inputs that it is calibrated with, before the change and after it,
# shifts, and how the detector is fitted, whatever the options for the tracked streams are.
RUN_LENGTH, CALIBRATION, BEFORE, AFTER = 10_000, 1000, 1000, 3000
MONITORED = QUADRATIC.replace(steps=300)
MONITORED_DIM = 20
DRIFTS = (0.0, 0.1, 0.25, 0.5, 1.0)
DRIFT_NOTE = (
    f"Streams of {MONITORED_DIM} dimensions, N(0, I) and from input {BEFORE:,} on of the variance "
    "given; the detector's reference is N(0, 2 I). `truth` is E_q[log r] = KL(q || p0) - KL(q || p1) "
    f"in closed form, in nats. Guarantee: at most one alarm in {RUN_LENGTH:,} inputs without a "
    "change, on average."
)


class Job(NamedTuple):
    r"""One stream under one method."""

    scenario: str
    dim: int
    steps: int
    method: str
    options: FitOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    r"""Adds the options of the subcommand `kl`."""
    add_common_arguments(parser, "kl")
    add = parser.add_argument
    add(
        "--scenarios",
        nargs="+",
        choices=tuple(SCENARIOS),
        default=list(SCENARIOS),
        help="streams: of mean and variance, of the variance, by a nat a step (default: all)",
    )
    add(
        "--dims",
        nargs="+",
        type=count(1, LARGEST_DIM),
        default=[80],
        metavar="D",
        help="dimensions of the streams (default: 80)",
    )
    add(
        "--horizon",
        type=count(1, LARGEST_HORIZON),
        metavar="T",
        help="steps of the stream after step 0 (default: 5)",
    )
    add(
        "--methods",
        nargs="+",
        choices=tuple(METHODS),
        default=METHOD_NAMES,
        help=f"how the ratio is fitted (default: {' '.join(METHOD_NAMES)})",
    )
    add(
        "--backbone",
        choices=("block_quadratic", "quadratic", "mlp"),
        default="block_quadratic",
        help="features: squares of single coordinates, all products, or those of a perceptron "
        "(default: block_quadratic)",
    )
    add(
        "--streams",
        type=count(0),
        default=40,
        metavar="N",
        help="streams of the monitor's table (default: 40)",
    )


def run(args: argparse.Namespace) -> int:
    r"""Runs the scenarios and the monitor, prints their tables and writes them.

    Raises:
        UserError: If something is listed twice, or other results are in the way.
    """
    check_arguments(args)
    options = MONITORED.replace(seed=args.seed)
    sizes = {"run_length": RUN_LENGTH, "before": BEFORE, "after": AFTER, "streams": args.streams}
    monitored = {**options.to_dict(), "dim": MONITORED_DIM, **sizes}
    # The record of the tracked streams knows nothing of the monitor's.
    tracked = argparse.Namespace(**{k: v for k, v in vars(args).items() if k != "streams"})
    if args.streams:
        refuse_other_results(args.out, "drift", monitored)
    run_suites(tracked, [(SUITE, {})])
    if args.streams:
        table = monitor_table(args.streams, options)
        title = "Alarms of the drift monitor"
        write_report(args.out, "drift", title, DRIFT_NOTE, table, [], monitored)
    return 0


def _jobs(args: argparse.Namespace) -> list[Job]:
    seeds = args.seeds or (3 if args.full else 1)
    return [
        Job(name, dim, args.horizon or 5, method, _options(args, method, seed))
        for name in args.scenarios
        for dim in args.dims
        for method in args.methods
        for seed in range(args.seed, args.seed + seeds)
    ]


def _options(args: argparse.Namespace, method: str, seed: int) -> FitOptions:
    if args.backbone == "mlp":
        base = PERCEPTRON
    else:
        own = RATES.get(method, QUADRATIC.lr)
        base = QUADRATIC.replace(backbone=args.backbone, lr=own)
    base = base.replace(seed=1000 * seed, steps=3000 if args.full else base.steps)
    return base.given(args.device, args.steps, args.lr)


def track(job: Job) -> list[Row]:
    r"""Tracks one stream and returns a row for each of its steps."""
    tracker = KLTracker(job.dim, job.method, job.options)
    rows = []
    for step in range(job.steps + 1):
        pair = scenario(job.scenario, job.dim, step)
        truth = pair.divergence
        tracked = tracker.update(pair.draw_pairs)
        rows.append(
            {
                "task": f"{job.scenario.replace('_', '-')}-d{job.dim}",
                "step": step,
                "method": METHODS[job.method].label,
                "evaluations": job.options.evaluations if METHODS[job.method].solver else 1,
                "seed": job.options.seed // 1000,
                "truth": truth,
                "estimate": tracked.estimate,
                "lag": lag(tracked, truth),
                "history": [[step - 1 + share, value] for share, value in tracked.history],
                "seconds": tracked.seconds,
            }
        )
    return rows


def lag(tracked: Tracked, truth: float) -> float:
    r"""Returns the share of the updates until the estimate is within tolerance for good.

    Arguments:
        tracked: The estimates.
        truth: The divergence, in nats.

    Returns:
        The share, in :math:`(0, 1]`; infinity would be no number of a table, so 2 says never.
    """
    path = [*tracked.history, (1.0, tracked.estimate)]
    late = [i for i, (_, value) in enumerate(path) if not _within(value, truth)]
    if not late:
        return path[0][0]
    return path[late[-1] + 1][0] if late[-1] + 1 < len(path) else 2.0


def _within(estimate: float, truth: float) -> bool:
    return abs(estimate - truth) <= max(RELATIVE * truth, ABSOLUTE)


def _table(rows: Sequence[Row]) -> list[Row]:
    keys = ["task", "step", "method"]
    table = summarise(rows, [*keys, "evaluations"])
    for entry in table:
        own = [r for r in rows if all(r[k] == entry[k] for k in keys)]
        entry["within"] = sum(_within(r["estimate"], r["truth"]) for r in own)
        entry["lag"] = max(r["lag"] for r in own)
    return table


# Where the figure draws what came too late, and the error in nats beyond which it is logarithmic.
LATE, LINEAR = 1.2, 3.0


def plot(path: Path, rows: Sequence[Row], table: Sequence[Row] = ()) -> None:
    r"""Draws the divergences over the steps, their errors and lags, one column a scenario.

    Arguments:
        path: The image.
        rows: The rows of :func:`track`; the first seed of each stream is drawn.
        table: Not drawn.
    """
    first = min(r["seed"] for r in rows)
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    figure = Figure(figsize=(0.6 + 4 * len(tasks), 7.5), layout="constrained")
    axes = figure.subplots(3, len(tasks), squeeze=False, sharex="col", height_ratios=(2, 2, 1))
    for (top, middle, bottom), task in zip(axes.T, tasks, strict=True):
        own = [r for r in rows if r["task"] == task and r["seed"] == first]
        truths = {r["step"]: r["truth"] for r in own}
        # The truth jumps when the updates of a step begin.
        steps = sorted(truths)
        edges = [*steps, steps[-1] + 1]
        top.stairs([truths[s] for s in steps], edges, color="black", baseline=None, label="truth")
        for method in dict.fromkeys(r["method"] for r in own):
            # In the record, the updates of a step end at its number.
            points = [(x + 1, y) for r in own if r["method"] == method for x, y in r["history"]]
            (line,) = top.plot(*zip(*points, strict=True), linewidth=1.2, label=method)
            style = {"color": line.get_color(), "marker": "o", "markersize": 3}
            ends = [(r["step"], r["estimate"] - r["truth"]) for r in own if r["method"] == method]
            middle.plot(*zip(*ends, strict=True), **style)
            lags = [(r["step"], min(r["lag"], LATE)) for r in own if r["method"] == method]
            bottom.plot(*zip(*lags, strict=True), **style)
        tolerance = [max(RELATIVE * truths[s], ABSOLUTE) for s in steps]
        band = {"color": "0.85", "label": "5 % or 0.3 nats"}
        middle.fill_between(steps, [-v for v in tolerance], tolerance, **band)
        if max(abs(r["estimate"] - r["truth"]) for r in own) > LINEAR:
            middle.set_yscale("symlog", linthresh=1)
            middle.yaxis.set_major_formatter("{x:g}")
        # A divergence is at least 0; an estimate below that runs along the border.
        top.set_ylim(bottom=0)
        top.set_title(task)
        bottom.set_yticks([0, 0.5, 1, LATE], ["0", "0.5", "1", "late"])
        bottom.set_xlabel("step; refitting to t is drawn from t to t + 1")
        bottom.set_xlim(left=0)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0, 0].set_ylabel("KL (nats), while refitting")
    axes[1, 0].set_ylabel("error at the end (nats)")
    axes[2, 0].set_ylabel("lag (steps)")
    for ax in axes[:2, 0]:
        ax.legend(frameon=False, fontsize=8)
    save_png(figure, path, dpi=120)


SUITE = Suite(
    "kl",
    "Divergence of a drifting stream (nats)",
    "Means over 50,000 points. `within` counts the seeds within 5 % or 0.3 nats of the truth. "
    "`lag` is the largest share of a step's updates until an estimate is, and stays, within; on "
    "the way, as in the figure's curves, over 1,000 points. 2: never.",
    _jobs,
    track,
    _table,
    plot,
)


def monitor_table(streams: int, options: FitOptions) -> list[Row]:
    r"""Measures alarms of a fixed detector on streams that drift from the ID data.

    The ID data are :math:`\mathcal{N}(0, I)` in 20 dimensions, the reference
    :math:`\mathcal{N}(0, 2 I)`; from input 1000 on, the stream is :math:`\mathcal{N}(0, (1 + a)
    I)`. The detector is fitted once.

    Arguments:
        streams: The number of streams a row.
        options: How the detector is fitted; its seed is that of the streams, too.
    """
    dim = MONITORED_DIM

    def draw_pairs(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(2, n, dim, generator=generator)
        return 2**0.5 * x[0], x[1]

    fit = fit_ratio("os-dre", draw_pairs, dim, options)
    table = []
    for drift in DRIFTS:
        early, delays, differences = 0, [], []
        for stream in range(streams):
            generator = step_generator(options.seed, Stream.TEST, stream, "cpu")
            calibration = torch.randn(CALIBRATION, dim, generator=generator)
            monitor = DriftMonitor(fit.log_ratio, calibration, RUN_LENGTH, seed=stream)
            monitor.update(torch.randn(BEFORE, dim, generator=generator))
            early += monitor.alarm is not None
            x = (1 + drift) ** 0.5 * torch.randn(AFTER, dim, generator=generator)
            report = monitor.update(x)
            differences.append(report.divergence_difference)
            if report.alarm is not None and report.alarm > BEFORE:
                delays.append(report.alarm - BEFORE)
        table.append(
            {
                "variance": 1 + drift,
                "streams": streams,
                "alarms before": early,
                "alarms after": len(delays),
                "median delay": float(np.median(delays)) if delays else None,
                "largest delay": max(delays) if delays else None,
                "E_q[log r]": float(np.mean(differences)),
                "truth": dim / 2 * (float(np.log(2)) - (1 + drift) / 2),
            }
        )
    return table
