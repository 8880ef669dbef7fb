r"""Scores `mutual_information` on samples that `sample_benchmark_mi.py` wrote.

    python benchmarks/score_benchmark_mi.py bmi_samples --out benchmarks/results/tasks/bmi

Every estimate is that of a user with these rows and no more: cross-fitted, with its interval,
next to the truth in nats, and next to KSG where both variables are scalars.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from ood_osdre.errors import UserError, exit_status
from ood_osdre.tasks.information import DEFAULTS, ksg, mutual_information
from ood_osdre.tasks.reports import Row, announce, write_report


def score(path: Path, method: str, rows: int | None, steps: int) -> Row:
    r"""Returns the row of one task."""
    with np.load(path) as archive:
        x, y, truth = archive["x"][:rows], archive["y"][:rows], float(archive["truth"])
    started = time.monotonic()
    result = mutual_information(x, y, method, replace(DEFAULTS, steps=steps))
    return {
        "task": path.stem,
        "dims": f"{x.shape[1]}+{y.shape[1]}",
        "rows": result.rows,
        "truth": truth,
        "estimate": result.nats,
        "low": result.low,
        "high": result.high,
        "error": result.nats - truth,
        "ksg": ksg(x, y) if x.shape[1] == y.shape[1] == 1 else None,
        "seconds": time.monotonic() - started,
    }


def main(argv: Sequence[str] | None = None) -> int:
    r"""Scores every sample of a folder, prints the table and writes it with its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--method", default="os-dre")
    parser.add_argument("--rows", type=int, metavar="N", help="use the first N rows only")
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Scores every sample."""
    paths = sorted(args.samples.glob("*.npz"))
    if not paths:
        raise UserError(f"{args.samples}: no .npz files, expected those of a sampling run.")
    bar = tqdm(paths, disable=args.quiet, unit="task")
    table = [score(path, args.method, args.rows, args.steps) for path in bar]
    config = {"method": args.method, "rows": args.rows, "steps": args.steps}
    title = "The tasks of benchmark-mi (nats)"
    announce(write_report(args.out, "bmi", title, table, [], config), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
