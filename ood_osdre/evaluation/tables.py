r"""The table of metrics of an evaluation, over one run or over several seeds.

A :class:`MetricsTable` has one row for each OOD set, near sets before far sets, and three rows of
means. `nearood` and `farood` are plain means of their sets' rows, as OpenOOD's. `all` is the mean
over *all* sets' rows, which is what the paper reports as AUROC. If a set of the benchmark is
absent, the means that lack it say so in their name, as in `nearood (partial: cifar100 absent)`.
The ID accuracy is one number and is given once, not in every row.

Over several runs, means over sets are taken within each run, then the mean and the sample standard
deviation (:math:`n - 1`) over runs. One run has no deviation and shows none.
"""

__all__ = ["MetricsTable", "aggregate"]

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from ..errors import UserError
from ..files import write_text_atomic
from .metrics import OODMetrics

MEANS = {"near": "nearood", "far": "farood"}
RESERVED = ("id", "all", *MEANS.values())
COLUMNS = {
    "fpr95": "FPR@95",
    "auroc": "AUROC",
    "aupr_in": "AUPR_IN",
    "aupr_out": "AUPR_OUT",
    "fpr95_id": "FPR@95_ID",
}
CONVENTION = """\
FPR@95: fraction of ID flagged when 95 % of OOD is caught (OOD positive, OpenOOD v1.5). \
Scores are log-ratios in nats; larger = more ID.
FPR@95_ID: fraction of OOD accepted when 95 % of ID is kept (ID positive).\
"""


@dataclass(frozen=True)
class MetricsTable:
    r"""A table of metrics, over one run or several.

    Use :meth:`of` for one run and :func:`aggregate` for several.

    Attributes:
        title: The title, which names the benchmark.
        rows: For each row, the metrics of each run.
        roles: For each row, `"near"`, `"far"` or `"all"`.
        accuracy: The ID accuracy of each run, as a fraction; empty if there is no class head.
        seconds: The scoring time of each run, in seconds; empty if it is not known.
        parameters: The number of parameters of the scorer.
        counts: The number of images of each set.
        absent: For each role, the sets of the benchmark that were absent.
        reference: The name of the reference :math:`p_0`.
        steps: The number of training steps.
    """

    title: str
    rows: Mapping[str, tuple[OODMetrics, ...]]
    roles: Mapping[str, str]
    accuracy: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    parameters: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    absent: Mapping[str, Sequence[str]] = field(default_factory=dict)
    reference: str | None = None
    steps: int | None = None

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, Mapping[str, OODMetrics]],
        title: str,
        absent: Mapping[str, Sequence[str]] | None = None,
        accuracy: float | None = None,
        seconds: float | None = None,
        **facts: Any,  # noqa: ANN401
    ) -> "MetricsTable":
        r"""Builds the table of one run.

        Arguments:
            metrics: For each role, `"near"` and `"far"`, the metrics of its sets by name.
            title: The title, which names the benchmark.
            absent: For each role, the sets of the benchmark that are absent.
            accuracy: The ID accuracy, as a fraction; None without a class head.
            seconds: The scoring time, in seconds; None if it is not known.
            facts: Other attributes: `parameters`, `counts`, `reference` and `steps`.

        Raises:
            UserError: If there is neither a near nor a far set, or two rows had the same name.
        """
        absent = {role: tuple(names) for role, names in (absent or {}).items() if names}
        every = {name: value for role in MEANS for name, value in metrics.get(role, {}).items()}
        if not every or len(every) < sum(map(len, metrics.values())) or every.keys() & RESERVED:
            found = ", ".join(f"{role}: {list(sets)}" for role, sets in metrics.items())
            raise UserError(
                f"{title}: got scores of the OOD sets {found}; expected near and far sets, at least "
                f"one, with names of their own that are not {', '.join(RESERVED)}"
            )
        rows: dict[str, OODMetrics] = {}
        roles: dict[str, str] = {}
        for role, name in MEANS.items():
            if sets := metrics.get(role):
                mean = _mean_name(name, absent.get(role, ()))
                rows |= {**sets, mean: _mean(list(sets.values()))}
                roles |= dict.fromkeys((*sets, mean), role)
        mean = _mean_name("all", [name for role in MEANS for name in absent.get(role, ())])
        rows[mean], roles[mean] = _mean(list(every.values())), "all"
        return cls(
            title=title,
            rows={name: (value,) for name, value in rows.items()},
            roles=roles,
            accuracy=() if accuracy is None else (accuracy,),
            seconds=() if seconds is None else (seconds,),
            absent=absent,
            **facts,
        )

    @property
    def runs(self) -> int:
        r"""The number of runs."""
        return len(next(iter(self.rows.values())))

    def mean(self, row: str) -> OODMetrics:
        r"""Returns the mean of a row over runs."""
        return _mean(self.rows[row])

    def std(self, row: str) -> OODMetrics | None:
        r"""Returns the sample standard deviation of a row over runs; None for one run."""
        if self.runs < 2:
            return None
        return OODMetrics(*np.std(self.rows[row], axis=0, ddof=1).tolist())

    def notes(self) -> list[str]:
        r"""Returns what has to be said beneath the table, one line each."""
        notes = [] if self.reference is None else [f"Reference: {self.reference}"]
        if self.steps is not None:
            notes.append(f"Training: {self.steps:,} steps")
        if self.accuracy:
            notes.append(f"ID accuracy: {_percent(self.accuracy)} %")
        if self.parameters is not None:
            notes.append(f"Parameters: {self.parameters:,}")
        if self.seconds:
            notes.append(f"Scoring: {_spread(self.seconds, 1)} s")
        if self.runs > 1:
            notes.append(f"Mean ± sample standard deviation over n = {self.runs} runs.")
        notes += [f"Absent {role} sets: {', '.join(sets)}." for role, sets in self.absent.items()]
        return [*notes, "All metrics in percent.", *CONVENTION.splitlines()]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        r"""Writes a CSV file, in percent, with standard deviations as columns of their own.

        The first row, of role `id`, holds the ID accuracy, the number of parameters and the
        scoring seconds. They are empty in every other row, as the metrics are in this one.
        """
        metrics = [c for column in COLUMNS.values() for c in (column, f"{column}_std")]
        of_run = ["ID_ACC", "ID_ACC_std", "parameters", "seconds", "seconds_std"]
        accuracy, seconds = _mean_std(self.accuracy, 100), _mean_std(self.seconds, 1)
        no_metrics = [None] * (1 + len(metrics))
        rows = [["id", "id", *no_metrics, *accuracy, self.parameters, *seconds]]
        for name, values in self.rows.items():
            cells = [c for k in COLUMNS for c in _mean_std([getattr(v, k) for v in values], 100)]
            head = [name, self.roles[name], self.counts.get(name)]
            rows.append([*head, *cells, *[None] * len(of_run)])
        columns = ["set", "role", "images", *metrics, *of_run]
        frame = pd.DataFrame(rows, columns=columns, dtype=object)
        frame.insert(0, "benchmark", self.title)
        frame.insert(3, "runs", self.runs)
        write_text_atomic(path, frame.to_csv(index=False, lineterminator="\n"))

    def to_markdown(self) -> str:
        r"""Returns the table and its notes in Markdown."""
        header, *body = self._cells()
        rule = [":--", *["--:"] * (len(header) - 1)]
        lines = [f"| {' | '.join(row)} |" for row in (header, rule, *body)]
        notes = [f"- {note}" for note in self.notes()]
        return "\n".join([f"# {self.title}", "", *lines, "", *notes, ""])

    def to_terminal(self) -> str:
        r"""Returns the table and its notes in aligned plain text."""
        rows = self._cells()
        first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
        header, *body = [
            "  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in rows
        ]
        rule = "-" * len(header)
        return "\n".join([self.title, rule, header, rule, *body, rule, *self.notes(), ""])

    def _cells(self) -> list[list[str]]:
        r"""Formats the header and the rows."""
        rows = [["Set", "Images", *COLUMNS.values()]]
        for name, values in self.rows.items():
            count = f"{self.counts[name]:,}" if name in self.counts else ""
            metrics = [_percent([getattr(value, key) for value in values]) for key in COLUMNS]
            rows.append([name, count, *metrics])
        return rows if self.counts else [[name, *cells] for name, _, *cells in rows]


def aggregate(tables: Sequence[MetricsTable]) -> MetricsTable:
    r"""Joins the tables of several runs of one benchmark.

    Arguments:
        tables: The tables, at least one, with the same title and rows.

    Returns:
        The table over all their runs.

    Raises:
        UserError: If their benchmark, rows, reference, steps or parameters differ.
    """
    first = tables[0]
    for key in ("title", "roles", "parameters", "counts", "reference", "steps"):
        for table in tables:
            found, expected = getattr(table, key), getattr(first, key)
            if found != expected:
                what = "rows" if key == "roles" else key
                raise UserError(f"cannot join tables whose {what} differ: {found}, {expected}")

    def join(runs: list[tuple[float, ...]]) -> tuple[float, ...]:
        # A mean over some of the runs would be taken for one over all.
        return sum(runs, ()) if all(runs) else ()

    return replace(
        first,
        rows={row: tuple(v for table in tables for v in table.rows[row]) for row in first.rows},
        accuracy=join([table.accuracy for table in tables]),
        seconds=join([table.seconds for table in tables]),
    )


def _mean_name(name: str, absent: Sequence[str]) -> str:
    return f"{name} (partial: {', '.join(absent)} absent)" if absent else name


def _mean(values: Sequence[OODMetrics]) -> OODMetrics:
    return OODMetrics(*np.mean(values, axis=0).tolist())


def _mean_std(values: Sequence[float], scale: float) -> tuple[str, str]:
    mean = f"{scale * np.mean(values):.6f}" if values else ""
    std = f"{scale * np.std(values, ddof=1):.6f}" if len(values) > 1 else ""
    return mean, std


def _spread(values: Sequence[float], digits: int) -> str:
    std = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}"


def _percent(values: Sequence[float]) -> str:
    return _spread([100 * v for v in values], 2)
