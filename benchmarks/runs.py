r"""Kept runs of the main command: their numbers, and what several seeds say together.

A kept run is a folder of `run.json` and `metrics.csv`. Everything here is in percent, but for
calibration, which is in nats.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ood_osdre.errors import UserError, one_line


@dataclass(frozen=True)
class Run:
    r"""A kept run.

    Attributes:
        record: Its record.
        metrics: Its table, a row a set, in percent.
    """

    record: dict[str, Any]
    metrics: pd.DataFrame

    @property
    def seed(self) -> int:
        r"""The seed."""
        return int(self.record["seed"])

    def validation(self, key: str) -> float:
        r"""Returns a number of the selected checkpoint's validation; NaN where there was none."""
        value = float(self.record["validation"].get("best", {}).get(key) or np.nan)
        return value if key.startswith("val_log_mass") else 100 * value

    def metric(self, row: str, name: str = "AUROC") -> float:
        r"""Returns a metric of a set or of a group's mean."""
        return float(self.metrics.loc[row, name])


def read_run(folder: Path) -> Run:
    r"""Reads a kept run.

    Raises:
        UserError: If a file of it is absent or damaged.
    """
    record = record_of(folder)
    path = folder / "metrics.csv"
    try:
        metrics = pd.read_csv(path).set_index("set")
        metrics.loc[["nearood", "farood"], "AUROC"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a run's table ({one_line(error, 80)}).") from None
    return Run(record, metrics)


def record_of(folder: Path, name: str = "run.json") -> dict[str, Any]:
    r"""Returns the record in a folder, of a run or of a benchmark.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    path = folder / name
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a run record ({one_line(error, 80)}).") from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UserError(f"{path}: not a run record, expected a mapping with 'config'.")
    return record


def runs_of(folder: Path) -> list[Run]:
    r"""Reads the kept runs of a method, by seed."""
    return [read_run(file.parent) for file in sorted(folder.glob("seed-*/run.json"))]


def mean_deviation(values: Sequence[float], digits: int = 1) -> str:
    r"""Returns a mean, with the standard deviation over seeds where there are several."""
    if np.isnan(mean := float(np.mean(values))):
        return "-"
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Returns a table in Markdown, its first column to the left and the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))
