r"""Whether the intervals of `mutual_information(x, y)` hold the truth, on a grid that is fixed here.

    python benchmarks/information.py --out runs/information.jsonl            # all that is missing
    python benchmarks/information.py --out runs/information.jsonl --report   # the table alone

Every run is a call with the defaults on new rows, and a line of the file; runs that it has are not
repeated, so the command goes on where it was stopped. `--shard 0/2` takes every second run, for
two processes with a file each; `--report` reads several files.

The grid: twelve tasks whose truth is a closed form or a quadrature, with d coordinates a side
where that applies, at n = 500 rows with 40 seeds and at n = 5,000 with 10.

| task | d | rows |
| :-- | :-- | :-- |
| independent | 1, 3, 10 | normal, the truth is 0 |
| weak | 1, 3, 10 | d pairs of correlation 0.3 |
| strong | 1, 3 | d pairs of correlation 0.9 |
| dense | 3, 10 | all 2 d coordinates have correlation 0.5 with each other |
| sparse | 3, 10 | two pairs of correlation 0.8, the rest independent |
| cubic | 1, 3 | d pairs of correlation 0.75, x cubed and y through asinh |
| additive | 1 | x uniform on (0, 1), y = x + uniform noise on (-0.25, 0.25) |
| circle | 1 | x and y of a point on the unit circle, with normal noise 0.1 on both |
| student | 1, 3 | all coordinates share one scale: Student's t of 3 degrees of freedom |
| labels | 1, 3, 10 | two clusters, at 2 and -2 in the first x and the first y, their label shared |
| roll | 1 | a pair of correlation 0.75 through its distribution function, x rolled up in a plane |
| scale | 1 | y normal with the deviation exp(x / 2), x normal |

What is asked of them: pooled coverage of nominal 95 % intervals of at least 90 %, no task and size
below 75 %; the median width at most 2.5 times that of an oracle, which knows the log-ratio, has
the same rows and takes its mean (where its width is not 0, as it is for `independent`); a mean
error of at most 5 % of the truth or 0.03 nats; and at most 30 s a call on one core.

Two exceptions were named before the grid was run: `additive`, whose hard edges neighbours blur by 9 %
at 500 rows, and `labels`, most at d = 10, where no neighbours tell a label as well as
the one coordinate does that has it.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from records import commit_text
from scipy.special import gammaln, i0e, ndtr, psi
from study_tables import markdown_rows
from tqdm import tqdm

from ood_osdre.errors import Parser, UserError, exit_status
from ood_osdre.evaluation.records import git_commit
from ood_osdre.files import local
from ood_osdre.tasks import mutual_information
from ood_osdre.training.distributed import device_name

Array: TypeAlias = NDArray[np.float64]
Rng: TypeAlias = np.random.Generator

#: Rows and seeds. Seeds from 0; whoever tunes the estimator takes others.
SIZES = {500: 40, 5000: 10}
DIMS = {
    "independent": (1, 3, 10),
    "weak": (1, 3, 10),
    "strong": (1, 3),
    "dense": (3, 10),
    "sparse": (3, 10),
    "cubic": (1, 3),
    "additive": (1,),
    "circle": (1,),
    "student": (1, 3),
    "labels": (1, 3, 10),
    "roll": (1,),
    "scale": (1,),
}
EXCEPTIONS = ("additive", "labels")
COVERAGE, LEAST_COVERAGE, WIDTH, BIAS, NATS, SECONDS = 0.9, 0.75, 2.5, 0.05, 0.03, 30.0
NORMAL = 1.959963984540054  # of a nominal 95 %


class Drawn(NamedTuple):
    r"""Rows of both variables, :math:`(n, d)`, and the log-ratio of each in nats, :math:`(n)`."""

    x: Array
    y: Array
    log_ratio: Array


def gaussian(n: int, covariance: Array, rng: Rng) -> Drawn:
    r"""Draws normal rows whose first half of coordinates is x."""
    z = rng.normal(size=(n, len(covariance))) @ np.linalg.cholesky(covariance).T
    d = len(covariance) // 2
    parts = [(z, covariance), (z[:, :d], covariance[:d, :d]), (z[:, d:], covariance[d:, d:])]
    logs = [
        -0.5 * (np.einsum("ni,ij,nj->n", v, np.linalg.inv(c), v) + np.linalg.slogdet(c)[1])
        for v, c in parts
    ]
    return Drawn(z[:, :d], z[:, d:], logs[0] - logs[1] - logs[2])


def pairs(*rho: float) -> Array:
    r"""Returns the covariance of pairs of coordinates with correlations of their own."""
    one = np.eye(len(rho))
    return np.block([[one, np.diag(rho)], [np.diag(rho), one]])


def information(covariance: Array) -> float:
    r"""Returns the mutual information of the halves of normal coordinates, in nats."""
    d = len(covariance) // 2
    parts = covariance[:d, :d], covariance[d:, d:], covariance
    x, y, both = (np.linalg.slogdet(c)[1] for c in parts)
    return float(x + y - both) / 2


def covariance_of(task: str, d: int) -> Array | None:
    r"""Returns the covariance that a task's rows are maps of, None if they are not of normal ones."""
    if task == "dense":
        return np.full((2 * d, 2 * d), 0.5) + 0.5 * np.eye(2 * d)
    rho = {"independent": 0.0, "weak": 0.3, "strong": 0.9, "cubic": 0.75, "roll": 0.75}
    if task == "sparse":
        return pairs(0.8, 0.8, *[0.0] * (d - 2))
    return pairs(*[rho[task]] * d) if task in rho else None


def draw(task: str, d: int, n: int, rng: Rng) -> Drawn:
    r"""Draws rows of a task with their log-ratios."""
    covariance = covariance_of(task, d)
    if covariance is not None:
        rows = gaussian(n, covariance, rng)
        if task == "cubic":
            return rows._replace(x=rows.x**3, y=np.arcsinh(rows.y))
        if task == "roll":
            turn = 1.5 * math.pi * (1 + 2 * ndtr(rows.x))
            return rows._replace(x=turn * np.c_[np.cos(turn), np.sin(turn)] / 21)
        return rows
    return {
        "additive": _additive,
        "circle": _circle,
        "student": _student,
        "labels": _labels,
        "scale": _scale,
    }[task](d, n, rng)


def _additive(d: int, n: int, rng: Rng) -> Drawn:
    x = rng.random((n, d))
    y = x + 0.25 * (2 * rng.random((n, d)) - 1)
    # Given x, y has the density 2; its own is the length of x that is within a quarter of it.
    own = 2 * (np.minimum(1, y + 0.25) - np.maximum(0, y - 0.25))
    return Drawn(x, y, np.log(2 / own)[:, 0])


NOISE = 0.1


@cache
def _circle_margin() -> tuple[Array, Array]:
    r"""Returns points and the log-density there of a coordinate of the noisy circle."""
    angles = np.linspace(0, 2 * math.pi, 4001)[:-1]
    points = np.linspace(-2.2, 2.2, 4001)
    density = np.zeros_like(points)
    for part in np.array_split(np.cos(angles), 40):
        density += np.exp(-0.5 * ((points[:, None] - part) / NOISE) ** 2).sum(axis=1)
    return points, np.log(density / len(angles) / NOISE / math.sqrt(2 * math.pi))


def _circle_joint(radius: Array) -> Array:
    r"""Returns the log-density of the noisy circle at a radius."""
    bessel = np.log(i0e(radius / NOISE**2)) - (radius - 1) ** 2 / (2 * NOISE**2)
    return np.asarray(bessel - math.log(2 * math.pi * NOISE**2))


def _circle(d: int, n: int, rng: Rng) -> Drawn:
    angle = 2 * math.pi * rng.random((n, d))
    x, y = np.cos(angle) + NOISE * rng.normal(size=(n, d)), np.sin(angle)
    y = y + NOISE * rng.normal(size=(n, d))
    margins = [np.interp(v[:, 0], *_circle_margin()) for v in (x, y)]
    return Drawn(x, y, _circle_joint(np.hypot(x, y)[:, 0]) - margins[0] - margins[1])


FREEDOM = 3


def _student_log(x: Array) -> Array:
    d = x.shape[1]
    constant = gammaln((FREEDOM + d) / 2) - gammaln(FREEDOM / 2)
    constant -= d / 2 * math.log(FREEDOM * math.pi)
    return np.asarray(constant - (FREEDOM + d) / 2 * np.log1p((x**2).sum(axis=1) / FREEDOM))


def _student(d: int, n: int, rng: Rng) -> Drawn:
    scale = np.sqrt(FREEDOM / rng.chisquare(FREEDOM, (n, 1)))
    x, y = scale * rng.normal(size=(2, n, d))
    return Drawn(x, y, _student_log(np.hstack([x, y])) - _student_log(x) - _student_log(y))


CENTRE = 2.0


def _labels(d: int, n: int, rng: Rng) -> Drawn:
    label = np.where(rng.random((n, 1)) < 0.5, -1.0, 1.0)
    x, y = rng.normal(size=(2, n, d))
    x[:, :1] += CENTRE * label
    y[:, :1] += CENTRE * label
    return Drawn(x, y, _labels_log(x[:, 0], y[:, 0]))


def _labels_log(u: Array, v: Array) -> Array:
    # The density over that of noise is cosh(2 u) for one coordinate, up to a constant.
    def cosh(w: Array) -> Array:
        return np.logaddexp(CENTRE * w, -CENTRE * w) - math.log(2)

    return np.asarray(cosh(u + v) - cosh(u) - cosh(v))


@cache
def _scale_margin() -> tuple[Array, Array]:
    r"""Returns points and the log-density there of y in the task `scale`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    deviation = np.exp(nodes / 2)
    points = np.concatenate([-np.geomspace(200, 1e-3, 3000), np.geomspace(1e-3, 200, 3000)])
    density = np.exp(-0.5 * (points[:, None] / deviation) ** 2) / deviation @ weights
    return points, np.log(density / weights.sum() / math.sqrt(2 * math.pi) + 1e-300)


def _scale(d: int, n: int, rng: Rng) -> Drawn:
    x, noise = rng.normal(size=(2, n, d))
    y = np.exp(x / 2) * noise
    given = -0.5 * noise**2 - x / 2 - 0.5 * math.log(2 * math.pi)
    return Drawn(x, y, given[:, 0] - np.interp(y[:, 0], *_scale_margin()))


@cache
def truth(task: str, d: int) -> float:
    r"""Returns the mutual information of a task in nats, in closed form or by quadrature."""
    covariance = covariance_of(task, d)
    if covariance is not None:
        return information(covariance)
    if task == "additive":
        return 0.25 - math.log(0.5)
    if task == "circle":
        radius = np.linspace(0, 2.2, 20_001)
        joint = _circle_joint(radius)
        both = np.trapezoid(np.exp(joint) * joint * 2 * math.pi * radius, radius)
        points, own = _circle_margin()
        return float(both - 2 * np.trapezoid(np.exp(own) * own, points))
    if task == "student":
        half = [(FREEDOM + k * d) / 2 for k in (1, 2)]
        free = FREEDOM / 2
        value = gammaln(free) + gammaln(half[1]) - 2 * gammaln(half[0])
        value += 2 * half[0] * (psi(half[0]) - psi(free)) - half[1] * (psi(half[1]) - psi(free))
        return float(value)
    if task == "labels":
        u = np.linspace(-12, 12, 2401)
        high, low = (np.exp(-0.5 * (u - c) ** 2) / math.sqrt(2 * math.pi) for c in (2.0, -2.0))
        joint = (np.outer(high, high) + np.outer(low, low)) / 2
        return float((joint * _labels_log(u[:, None], u[None])).sum() * (u[1] - u[0]) ** 2)
    assert task == "scale"
    points, own = _scale_margin()
    entropy = -np.trapezoid(np.exp(own) * own, points)
    return float(entropy - 0.5 * math.log(2 * math.pi * math.e))


Run: TypeAlias = tuple[str, int, int, int]


def grid() -> Iterator[Run]:
    r"""Yields task, d, rows and seed of every run, all tasks of a seed before the next seed."""
    for n, seeds in SIZES.items():
        for seed in range(seeds):
            yield from ((task, d, n, seed) for task, dims in DIMS.items() for d in dims)


def run(task: str, d: int, n: int, seed: int) -> dict[str, Any]:
    r"""Runs one call and returns its line."""
    rng = np.random.default_rng([seed, n, d, list(DIMS).index(task)])
    x, y, log_ratio = draw(task, d, n, rng)
    started = time.process_time()
    result = mutual_information(x, y)
    seconds = time.process_time() - started
    line = {"task": task, "d": d, "n": n, "seed": seed, "truth": truth(task, d)}
    line |= result._asdict() | {"seconds": seconds}
    line["oracle"] = 2 * NORMAL * float(log_ratio.std(ddof=1)) / math.sqrt(n)
    return line | _surroundings()


@cache
def _surroundings() -> dict[str, str | None]:
    return {"commit": commit_text(git_commit()), "device": device_name(torch.device("cpu"))}


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    r"""Returns the lines of files; one that was cut off by an interruption is left out."""
    lines = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return lines


def coverage(lines: Sequence[dict[str, Any]]) -> float:
    r"""Returns the share of intervals that hold the truth."""
    return float(np.mean([r["low"] <= r["truth"] <= r["high"] for r in lines]))


def width(lines: Sequence[dict[str, Any]]) -> float:
    r"""Returns the median width in units of the oracle's; where all of that are 0, so is this."""
    ratios = [(r["high"] - r["low"]) / r["oracle"] for r in lines if r["oracle"] > 1e-6]
    return float(np.median(ratios or [0.0]))


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    r"""Returns a row for every task, d and size, and what it falls short of."""
    groups = defaultdict(list)
    for line in lines:
        groups[line["task"], line["d"], line["n"]].append(line)
    rows = []
    for (task, d, n), own in sorted(groups.items(), key=lambda item: (item[0][2], item[0][:2])):
        known = own[0]["truth"]
        covered = coverage(own)
        error = float(np.mean([r["nats"] for r in own])) - known
        slowest = max(r["seconds"] for r in own)
        faults = [
            name
            for name, bad in (
                ("coverage", covered < LEAST_COVERAGE),
                ("bias", abs(error) > max(NATS, BIAS * abs(known))),
                ("seconds", slowest > SECONDS),
            )
            if bad
        ]
        row = {"task": task, "d": d, "n": n, "runs": len(own), "truth": known, "error": error}
        row |= {"coverage": covered, "width": width(own), "seconds": slowest}
        row["method"] = "/".join(sorted({r["method"] for r in own}))
        rows.append(row | {"short of": ", ".join(faults)})
    return rows


def report(lines: Sequence[dict[str, Any]]) -> str:
    r"""Returns the table, and the pooled numbers below it."""
    rows = summary(lines)
    shown = [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
    ]
    bad = sorted({row["task"] for row in rows if row["short of"]} - set(EXCEPTIONS))
    return (
        f"{markdown_rows(list(rows[0]), shown)}\n{len(lines):,} runs: pooled coverage "
        f"{coverage(lines):.3f} (asked {COVERAGE}), median width {width(lines):.2f} oracles (asked "
        f"{WIDTH}); short of something and no named exception: {', '.join(bad) or 'none'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs what is missing of the grid and prints the table."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--out", type=local, nargs="+", required=True, metavar="FILE", help="the first is written")
    add("--shard", default="0/1", metavar="I/K", help="every K-th run, from the I-th on")
    add("--rows", type=int, choices=tuple(SIZES), help="one size of the grid (default: both)")
    add("--report", action="store_true", help="run nothing, print the table")
    add("--quiet", action="store_true")
    args = parser.parse_args(argv)
    return exit_status(lambda: _command(args))


def _command(args: argparse.Namespace) -> int:
    lines = read(args.out)
    if not args.report:
        first, _, count = args.shard.partition("/")
        if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
            raise UserError(f"--shard: got {args.shard!r}, expected I/K with I below K, as 0/2.")
        done = {(r["task"], r["d"], r["n"], r["seed"]) for r in lines}
        runs = [r for r in list(grid())[int(first) :: int(count)] if r not in done]
        runs = [r for r in runs if args.rows in (None, r[2])]
        args.out[0].parent.mkdir(parents=True, exist_ok=True)
        for job in tqdm(runs, disable=args.quiet, unit="run"):
            lines.append(run(*job))
            with args.out[0].open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    if not lines:
        raise UserError(f"{args.out[0]}: holds no runs yet.")
    sys.stdout.write(report(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
