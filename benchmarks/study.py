r"""The study that chooses the default: which objective, on equal data, network and steps.

    python benchmarks/study.py --data-root DIR [--seeds 3] [--jobs 2] [--only NAME ...]

Trains every method of :data:`METHODS` on CIFAR-10 against the `pack` benchmark's reference with
the configuration `cifar10_cpu`, cut to `--steps`, and keeps each run's record and metrics under
`benchmarks/results/study/METHOD/seed-N`. Runs that are done are skipped, so the command can be
interrupted and given again. Give it from the top of the clone.
Every run uses one thread; `--jobs` run side by side. The choice is
made by *validation* AUROC; `python benchmarks/report.py` writes the tables.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

RESULTS = Path(__file__).parent / "results" / "study"
KEPT = ("run.json", "metrics.csv")

OFF = ["objective.endpoint=0", "objective.class_weight=0", "data.broaden=0"]
# The paper's setting, as nearly as it is known: a learnable DDBI path, logit-normal times.
PAPER = [
    *OFF,
    "basis.size=400",
    "path.schedule=kumaraswamy_spherical",
    "path.noise=ddbi",
    "times.kind=logit_normal",
    "objective.weight=inverse_variance",
    "objective.path_variance=1",
    "objective.conditional=1",
]
PATH = [*OFF, "objective.weight=constant"]
ENDS = ["objective.endpoint=1", "objective.path_difference=0", "objective.time_score=0"]

METHODS: dict[str, list[str]] = {
    "conditional, scalar": [*PAPER, "objective.conditional_form=scalar"],
    "conditional, antithetic": [*PAPER, "objective.conditional_form=antithetic"],
    "conditional, per block": [*PAPER, "objective.conditional_form=per_block"],
    "path difference": [*PATH, "objective.path_difference=1"],
    "time score matching": [*PATH, "objective.time_score=1"],
    "end-point": [*OFF, *ENDS],
    "end-point, clean": [*OFF, *ENDS, "objective.endpoint_clean=true"],
    "end-point + class": [*OFF, *ENDS, "objective.class_weight=0.5"],
    "end-point + broad": [*OFF, *ENDS, "data.broaden=0.33"],
    "end-point + class + broad": [
        *OFF, *ENDS, "objective.class_weight=0.5", "data.broaden=0.33",
    ],
    "end-point + broad + time score matching": [
        *PATH, "objective.endpoint=1", "data.broaden=0.33", "objective.time_score=0.02",
    ],
    "end-point + class + broad + path difference": [
        *PATH, "objective.endpoint=1", "objective.class_weight=0.5", "data.broaden=0.33",
        "objective.path_difference=0.05",
    ],
    "end-point + class + broad + time score matching": [
        *PATH, "objective.endpoint=1", "objective.class_weight=0.5", "data.broaden=0.33",
        "objective.time_score=0.02",
    ],
}  # fmt: skip


def slug(name: str) -> str:
    r"""Returns the folder name of a method."""
    return name.replace(" + ", "-").replace(", ", "-").replace(" ", "_")


def run(name: str, seed: int, args: argparse.Namespace) -> str | None:
    r"""Trains and evaluates one method; returns what went wrong, if anything did."""
    kept = args.out / slug(name) / f"seed-{seed}"
    if (kept / "run.json").is_file():
        return None
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="study-", dir=runs) as scratch:
        command = [
            sys.executable, "benchmarks/eval_ood.py", "--quiet",
            "--id", "cifar10", "--benchmark", "pack", "--config", "cifar10_cpu",
            "--data-root", str(args.data_root), "--out", scratch, "--device", "cpu",
            "--max-steps", str(args.steps), f"training.seed={seed}", f"title={name}",
            *METHODS[name],
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            return f"{name}, seed {seed}: {done.stderr.strip().splitlines()[-1]}"
        kept.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(Path(scratch) / file, kept / file)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the study, seed by seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", type=Path, default=Path("data"))
    add("--seeds", type=int, default=3)
    add("--first-seed", type=int, default=0)
    add("--jobs", type=int, default=2)
    add("--steps", type=int, default=1500, help="the finalists took the configuration's 6500")
    add("--only", nargs="*", choices=list(METHODS), default=list(METHODS), metavar="NAME")
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    seeds = range(args.first_seed, args.first_seed + args.seeds)
    grid = [(name, seed) for seed, name in itertools.product(seeds, args.only)]
    failures = []
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda job: run(job[0], job[1], args), grid)
        for failure in tqdm(results, total=len(grid), unit="run"):
            if failure:
                failures.append(failure)
                tqdm.write(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
