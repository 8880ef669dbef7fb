r"""Scores `mutual_information` on samples that `sample_benchmark_mi.py` wrote.

    python benchmarks/score_benchmark_mi.py bmi_samples --out runs/bmi

Every estimate is that of a user with these rows and no more: cross-fitted, with its interval,
next to the truth in nats, and next to KSG's. Both take normal scores of the coordinates, which
`mutual_information` does by itself.
"""

import argparse
import json
import math
import sys
import time
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from ood_osdre.errors import Parser, UserError, exit_status, one_line
from ood_osdre.files import local
from ood_osdre.tasks.features import NormalScores
from ood_osdre.tasks.fit import FitOptions
from ood_osdre.tasks.information import (
    DEFAULTS,
    LEAST_ROWS,
    LOG_RATIO_METHODS,
    check_variables,
    ksg,
    mutual_information,
)
from ood_osdre.tasks.methods import check_method
from ood_osdre.tasks.suites.reports import Row, write_report

# What a file that is damaged, or no sample, is known to raise.
DAMAGE = (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile, zlib.error)


def score(path: Path, method: str, rows: int | None, options: FitOptions) -> Row:
    r"""Returns the row of one task."""
    x, y, truth = read(path, rows)
    started = time.monotonic()
    result = mutual_information(x, y, method, options)
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
    r"""Returns the first rows of both variables of a sample, and the truth, all of them checked."""
    try:
        with path.open("rb") as file:
            archive = np.load(file)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise TypeError("one array, not an archive")
            x, y, truth = archive["x"], archive["y"], archive["truth"]
    except DAMAGE as error:
        raise UserError(f"{path}: no sample of a task: {one_line(error)}.") from None
    if x.ndim != 2 or y.ndim != 2:
        raise UserError(f"{path}: x and y have shapes {x.shape} and {y.shape}, expected (n, d).")
    if truth.shape or truth.dtype.kind not in "fiu" or not math.isfinite(truth):
        raise UserError(f"{path}: truth: got {one_line(ValueError(truth))}, expected one number.")
    if rows is not None and rows > min(len(x), len(y)):
        raise UserError(f"{path}: {len(x)} rows, expected the {rows} that are asked for.")
    x, y = x[:rows], y[:rows]
    try:
        check_variables(x, y)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return x, y, float(truth)


def neighbours(x: NDArray[Any], y: NDArray[Any]) -> float:
    r"""Returns the estimate of KSG on normal scores of every coordinate."""
    first, second = (torch.as_tensor(v, dtype=torch.float64) for v in (x, y))
    return ksg(NormalScores(first)(first).numpy(), NormalScores(second)(second).numpy())


def add_ksg(record: Path, samples: Path) -> tuple[list[Row], dict[str, Any]]:
    r"""Returns the table of a record with KSG's estimates made anew, and its configuration."""
    try:
        old = json.loads(record.read_text())
        table, config, commit = old["results"]["table"], old["config"], old["commit"]
        asked = [(samples / f"{row['task']}.npz", int(row["rows"])) for row in table]
        config = {**config, "estimates_of": commit}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{record}: no record of scores: {one_line(error)}.") from None
    variables = [read(*arguments)[:2] for arguments in asked]
    for row, pair in zip(table, variables, strict=True):
        row["ksg"] = neighbours(*pair)
    return table, config


def main(argv: Sequence[str] | None = None) -> int:
    r"""Scores every sample of a folder, prints the table and writes it with its record."""
    parser = Parser(description=__doc__)
    parser.add_argument("samples", type=local, metavar="DIR")
    parser.add_argument("--out", type=local, required=True, metavar="DIR")
    parser.add_argument("--method", default="os-dre")
    parser.add_argument("--rows", type=int, metavar="N", help="use the first N rows only")
    parser.add_argument("--steps", type=int, default=DEFAULTS.steps)
    parser.add_argument(
        "--add-ksg", type=local, metavar="RECORD", help="keep its estimates, make KSG's anew"
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
        check_method(args.method, LOG_RATIO_METHODS)
        options = DEFAULTS.replace(steps=args.steps)
        if args.rows is not None and args.rows < LEAST_ROWS:
            raise UserError(f"--rows: got {args.rows}, expected at least {LEAST_ROWS}.")
        for path in paths:
            read(path, args.rows)  # what is wrong with the last is said before the first is fitted
        bar = tqdm(paths, disable=args.quiet, unit="task")
        table = [score(path, args.method, args.rows, options) for path in bar]
        config = {"method": args.method, "rows": args.rows, "steps": args.steps}
    title = "The tasks of benchmark-mi (nats)"
    write_report(args.out, "bmi", title, "", table, [], config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
