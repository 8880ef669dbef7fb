r"""Checks what a run leaves behind: every file, finite numbers, and a validation AUROC.

    python .ci/check_run.py RUN_FOLDER [--min-val-auroc 0.6]

Exits with status 1 and one line for each problem. Validation, not test, holds the threshold.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FILES = ("metrics.csv", "metrics.md", "scores.npz", "score_density.png", "run.json", "report.html")


def problems(folder: Path, min_val_auroc: float | None) -> Iterator[str]:
    """Yields one line for each thing that is wrong with the run in `folder`."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        yield f"{folder}: missing {', '.join(missing)}"
        return

    yield from bad_table(folder / "metrics.csv")
    yield from bad_scores(folder / "scores.npz")
    if (folder / "score_density.png").read_bytes()[:8] != b"\x89PNG\r\n\x1a\n":
        yield f"{folder / 'score_density.png'}: not a PNG"

    run = json.loads((folder / "run.json").read_text())
    auroc = run["validation"]["best"]["val_auroc"]
    if not math.isfinite(auroc):
        yield f"{folder / 'run.json'}: validation AUROC is {auroc}"
    elif min_val_auroc is not None and not auroc > min_val_auroc:
        yield f"{folder / 'run.json'}: validation AUROC {auroc:.4f}, expected > {min_val_auroc}"


def bad_table(path: Path) -> Iterator[str]:
    """Yields what is wrong with a table: no rows, no numbers, or infinite ones."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        yield f"{path}: no rows"
    numbers = 0
    for line, row in enumerate(rows, start=2):
        for column, text in row.items():
            try:
                value = float(text)
            except (TypeError, ValueError):
                continue
            numbers += 1
            if not math.isfinite(value):
                yield f"{path}:{line}: {column} is {text}"
    if rows and not numbers:
        yield f"{path}: no numbers"


def bad_scores(path: Path) -> Iterator[str]:
    """Yields which arrays of an archive hold numbers that are not finite."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    if not arrays:
        yield f"{path}: empty"
    for name, array in arrays.items():
        if array.size == 0:
            yield f"{path}: {name} is empty"
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            yield f"{path}: {name} has values that are not finite"


def main() -> int:
    """Runs the checks from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--min-val-auroc", type=float)
    args = parser.parse_args()

    found = list(problems(args.folder, args.min_val_auroc))
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
