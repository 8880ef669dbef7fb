r"""Scores `mutual_information` on samples that `sample_benchmark_mi.py` wrote.

    python benchmarks/score_benchmark_mi.py bmi_samples --out benchmarks/results/tasks/bmi

Every estimate is that of a user with these rows and no more: cross-fitted, with its interval,
next to the truth in nats, and next to KSG's. Both take normal scores of the coordinates, which
`mutual_information` does by itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ood_osdre.errors import UserError, exit_status, one_line
from ood_osdre.tasks.dependence import NormalScores
from ood_osdre.tasks.information import DEFAULTS, mutual_information
from ood_osdre.tasks.neighbours import ksg
from ood_osdre.tasks.reports import Row, announce, write_report


def score(path: Path, method: str, rows: int | None, steps: int) -> Row:
    r"""Returns the row of one task."""
    x, y, truth = read(path, rows)
    started = time.monotonic()
    result = mutual_information(x, y, method, replace(DEFAULTS, steps=steps))
    seconds = time.monotonic() - started
    return {
        "task": path.stem,
        "dims": f"{x.shape[1]}+{y.shape[1]}",
        "rows": result.rows,
        "truth": truth,
        "estimate": result.nats,
        "low": result.low,
        "high": result.high,
        "error": result.nats - truth,
        "ksg": neighbours(x, y),
        "seconds": seconds,
    }


def read(path: Path, rows: int | None) -> tuple[NDArray[Any], NDArray[Any], float]:
    r"""Returns the first rows of both variables of a sample, and the truth."""
    try:
        with np.load(path) as archive:
            return archive["x"][:rows], archive["y"][:rows], float(archive["truth"])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path}: no sample of a task: {one_line(error)}.") from None


def neighbours(x: NDArray[Any], y: NDArray[Any]) -> float:
    r"""Returns the estimate of KSG on normal scores of every coordinate."""
    first, second = (torch.as_tensor(v, dtype=torch.float64) for v in (x, y))
    return ksg(NormalScores(first)(first).numpy(), NormalScores(second)(second).numpy())


def add_ksg(record: Path, samples: Path) -> tuple[list[Row], dict[str, Any]]:
    r"""Returns the table of a record with KSG's estimates made anew, and its configuration."""
    try:
        old = json.loads(record.read_text())
        table, config, commit = old["results"]["table"], old["config"], old["commit"]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{record}: no record of scores: {one_line(error)}.") from None
    for row in table:
        row["ksg"] = neighbours(*read(samples / f"{row['task']}.npz", row["rows"])[:2])
    return table, {**config, "estimates_of": commit}


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
    parser.add_argument(
        "--add-ksg", type=Path, metavar="RECORD", help="keep its estimates, make KSG's anew"
    )
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Scores every sample."""
    paths = sorted(args.samples.glob("*.npz"))
    if not paths:
        raise UserError(f"{args.samples}: no .npz files, expected those of a sampling run.")
    if args.add_ksg is not None:
        table, config = add_ksg(args.add_ksg, args.samples)
    else:
        bar = tqdm(paths, disable=args.quiet, unit="task")
        table = [score(path, args.method, args.rows, args.steps) for path in bar]
        config = {"method": args.method, "rows": args.rows, "steps": args.steps}
    title = "The tasks of benchmark-mi (nats)"
    announce(write_report(args.out, "bmi", title, table, [], config), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
