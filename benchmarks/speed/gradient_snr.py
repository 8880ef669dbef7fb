r"""Measures how much of a training gradient is signal, for each objective, at d = 3072.

    python benchmarks/speed/gradient_snr.py [--samples 4096] [--seeds 5]

For the gradient g of one sample's loss, the signal-to-noise ratio is

    SNR = |E g|² / tr Cov(g),

so that a batch of about 1 / SNR samples has a mean gradient with as much signal as noise. What the
gradient is of and on what data is said in `gradients.py`.

The noise is measured from each form's own samples, through the losses of the package. The signal
of the noisy forms cannot be measured that way (it would take some 1e8 samples); but forms with
the same minimiser have the same expected gradient, up to O(δ²), as the path
difference, and that has little noise. The block forms have an expected gradient of their own: its
path difference moves one block at a time. Squared means come without bias from pairs of
independent groups. "direct" is the signal from the form's own samples, a check where it is far
above what noise alone gives, about 1 / samples.

Stratified times make the samples of a batch dependent. Their noise is that of a batch's mean, times
the size of the batch.

Each seed draws clusters, backbone and samples anew. Backbones and clusters differ more than
samples do, so the spread is that over seeds.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import above  # noqa: F401
import bench_tables
import torch
from gradients import EPS, GAMMA2, GROUPS, Bench, Measurement, RandomConvolutions, RandomFeatures
from outputs import require_writable
from torch import nn
from tqdm import tqdm

from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.objectives import (
    ConditionalScoreMatching,
    EndPointLoss,
    PathDifference,
    Term,
    TimeScoreMatching,
)
from ood_osdre.paths.times import UniformTimes
from ood_osdre.training.distributed import device_name

OUT = Path("runs") / "gradient_snr"
# The half gaps of the path difference as a loss, and where it stands for an expectation.
DELTA, SMALL_DELTA = 0.02, 0.005

STRATIFIED = "time score matching, stratified times"

MODELS: dict[str, Callable[[], nn.Module]] = {
    "vectors": RandomFeatures,
    "images": RandomConvolutions,
}
Row = dict[str, Any]


def measure(bench: Bench, model: str) -> list[Row]:
    r"""Returns one row a loss."""
    path, weight = bench.path, bench.weight
    forms = ["scalar", "antithetic"]
    if model == "images":
        forms += ["per_block", "antithetic_per_block"]
    terms: dict[str, Term] = {f: ConditionalScoreMatching(path, weight, f) for f in forms}
    terms["time score matching"] = TimeScoreMatching(path, weight)
    terms[STRATIFIED] = terms["time score matching"]
    terms["path difference"] = PathDifference(path, weight, DELTA)
    terms["end-point logistic"] = EndPointLoss(path)

    shared = Measurement.of(bench.gradients(PathDifference(path, weight, SMALL_DELTA)))
    rows = []
    for name, term in terms.items():
        stratified = name == STRATIFIED
        own = Measurement.of(bench.gradients(term, UniformTimes(stratified=stratified)))
        source = shared
        if name == "end-point logistic":
            source = own
        elif "per_block" in name:
            source = Measurement.of(bench.block_gradients(SMALL_DELTA))
        noise = own.batch_noise if stratified else own.second_moment - source.signal()
        rows.append(
            {
                "model": model,
                "loss": name,
                "points": len(term.points(next(bench.draws()))),
                "noise": math.sqrt(noise),
                "snr": source.signal() / noise,
                "direct_snr": own.signal() / noise,
            }
        )
    return rows


def gather(rows: Sequence[Row], samples: int) -> dict[str, Row]:
    r"""Returns a row a model and loss, in which what changes with the seed is a list."""
    table: dict[str, Row] = {}
    for row in rows:
        fixed = {k: row[k] for k in ("model", "loss", "points")}
        merged = table.setdefault(f"{row['model']}, {row['loss']}", fixed | {"samples": samples})
        for key in row.keys() - fixed:
            merged.setdefault(key, []).append(row[key])
    return table


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    add = p.add_argument
    add("--samples", type=count(1), default=4096, help="samples a measurement")
    add("--batch", type=count(1), default=256, help="samples a batch")
    add("--seeds", type=count(1), default=5, help="consecutive seeds")
    add("--seed", type=count(0), default=0, help="the first of them")
    add("--out", type=Path, default=OUT)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs both models and keeps the table."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures every seed, prints the table and writes it with its record."""
    least = 2 * GROUPS * args.batch
    if args.samples < least:
        raise UserError(f"--samples {args.samples}: expected {2 * GROUPS} batches, {least}.")
    require_writable(args.out)

    started = time.process_time()
    rows = []
    for seed in tqdm(range(args.seed, args.seed + args.seeds), unit="seed", disable=None):
        for model, backbone in MODELS.items():
            torch.manual_seed(seed)
            rows += measure(Bench(backbone(), args.samples, args.batch, seed), model)
    results = gather(rows, args.samples)
    print(bench_tables.gradient_snr(results))
    RunRecord(
        config={
            "path": f"trigonometric; DDBI gamma2={GAMMA2} eps={EPS}",
            "weight": f"1 / V(t); times uniform; path-difference delta {DELTA}",
            "basis": "16 rational quadratics; sigma 0.5",
            "samples": args.samples,
            "batch": args.batch,
            "seed": args.seed,
            "seeds": args.seeds,
            "CPU seconds": round(time.process_time() - started),
        },
        seed=args.seed,
        device=device_name(torch.device("cpu")),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
