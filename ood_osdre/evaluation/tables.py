r"""The table of an evaluation: what a run is remembered by.

A :class:`MetricsTable` has one row for each OOD set, in the order near then far, and three rows
of means: `nearood` and `farood`, plain means of the sets' rows as OpenOOD's, and `all`, the mean
over *all* sets' rows, which is what the paper reports as AUROC. A mean that lacks a member set of
the benchmark is not that mean: its row is then called, say, `nearood (partial: cifar100 absent)`,
never `nearood`. The ID accuracy is one number and is given once, not once a row.

Over several runs (seeds), means of sets are taken within each run, then the mean and the sample
standard deviation (:math:`n - 1`) over runs. One run has no deviation and shows none.
"""

__all__ = ["MetricsTable", "aggregate"]

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import UserError
from ..files import write_text_atomic
from .metrics import OODMetrics

MEANS = {"near": "nearood", "far": "farood"}
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
    absent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
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
        parameters: int | None = None,
        counts: Mapping[str, int] | None = None,
        reference: str | None = None,
        steps: int | None = None,
    ) -> "MetricsTable":
        r"""Builds the table of one run.

        Arguments:
            metrics: For each role, `"near"` and `"far"`, the metrics of its sets by name.
            title: The title, which names the benchmark.
            absent: For each role, the sets of the benchmark that are absent.
            accuracy: The ID accuracy, as a fraction.
            seconds: The scoring time, in seconds.
            parameters: The number of parameters of the scorer.
            counts: The number of images of each set, by name.
            reference: The name of the reference :math:`p_0`.
            steps: The number of training steps.
        """
        missing = {role: tuple(sets) for role, sets in (absent or {}).items() if sets}
        _check_sets(metrics, missing)

        rows: dict[str, OODMetrics] = {}
        roles: dict[str, str] = {}

        for role, name in MEANS.items():
            sets = metrics.get(role, {})

            if sets:
                mean = _mean_name(name, missing.get(role, ()))
                rows |= {**sets, mean: _mean(list(sets.values()))}
                roles |= dict.fromkeys((*sets, mean), role)

        every = [value for sets in metrics.values() for value in sets.values()]
        mean = _mean_name("all", [name for role in MEANS for name in missing.get(role, ())])
        rows[mean], roles[mean] = _mean(every), "all"

        return cls(
            title=title,
            rows={name: (value,) for name, value in rows.items()},
            roles=roles,
            accuracy=() if accuracy is None else (accuracy,),
            seconds=() if seconds is None else (seconds,),
            parameters=parameters,
            counts=dict(counts or {}),
            absent=missing,
            reference=reference,
            steps=steps,
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
        columns = [c for name in COLUMNS.values() for c in (name, f"{name}_std")]
        extra = ["ID_ACC", "ID_ACC_std", "parameters", "seconds", "seconds_std"]
        accuracy, seconds = _mean_std(self.accuracy, 100), _mean_std(self.seconds, 1)
        parameters = "" if self.parameters is None else self.parameters

        with io.StringIO() as buffer:
            writer = csv.writer(buffer, lineterminator="\n")
            writer.writerow(["benchmark", "set", "role", "runs", "images", *columns, *extra])
            first = [self.title, "id", "id", self.runs, "", *[""] * len(columns)]
            writer.writerow([*first, *accuracy, parameters, *seconds])

            for row, values in self.rows.items():
                cells = [
                    c for k in COLUMNS for c in _mean_std([getattr(v, k) for v in values], 100)
                ]
                count = self.counts.get(row, "")
                head = [self.title, row, self.roles[row], self.runs, count]
                writer.writerow([*head, *cells, *[""] * len(extra)])

            write_text_atomic(path, buffer.getvalue())

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
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = []

        for name, *cells in rows:
            padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *padded]))

        rule = "-" * len(lines[0])

        return "\n".join([self.title, rule, lines[0], rule, *lines[1:], rule, *self.notes(), ""])

    def _cells(self) -> list[list[str]]:
        r"""Formats the header and the rows."""
        images = ["Images"] if self.counts else []
        cells = [["Set", *images, *COLUMNS.values()]]

        for row, values in self.rows.items():
            count = [f"{self.counts[row]:,}" if row in self.counts else ""] if images else []
            cells.append(
                [row, *count, *(_percent([getattr(v, k) for v in values]) for k in COLUMNS)]
            )

        return cells


def aggregate(tables: Sequence[MetricsTable]) -> MetricsTable:
    r"""Joins the tables of several runs of one benchmark.

    Arguments:
        tables: The tables, with the same title and rows.

    Returns:
        The table over all their runs.
    """
    if not tables:
        raise ValueError("there are no tables to aggregate, expected at least one")

    first = tables[0]

    for table in tables[1:]:
        for key in ("title", "roles", "parameters", "counts", "reference", "steps"):
            found, expected = getattr(table, key), getattr(first, key)

            if found != expected:
                what = "rows" if key == "roles" else key
                raise ValueError(f"cannot join tables whose {what} differ: {found}, {expected}")

    def join(runs: list[tuple[float, ...]]) -> tuple[float, ...]:
        # A mean over some of the runs would be taken for one over all
        return tuple(r for run in runs for r in run) if all(runs) else ()

    return MetricsTable(
        title=first.title,
        rows={row: tuple(v for t in tables for v in t.rows[row]) for row in first.rows},
        roles=first.roles,
        accuracy=join([t.accuracy for t in tables]),
        seconds=join([t.seconds for t in tables]),
        parameters=first.parameters,
        counts=first.counts,
        absent=first.absent,
        reference=first.reference,
        steps=first.steps,
    )


def _check_sets(
    metrics: Mapping[str, Mapping[str, OODMetrics]],
    absent: Mapping[str, Sequence[str]],
) -> None:
    names = [name for sets in (*metrics.values(), *absent.values()) for name in sets]
    reserved = {"id", "all", *MEANS.values()}

    for role in (*metrics, *absent):
        if role not in MEANS:
            raise ValueError(f"unknown role '{role}', expected one of {', '.join(MEANS)}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the set '{name}' appears twice")
        if name.split(" ")[0] in reserved:
            raise ValueError(f"the set '{name}' has the name of another row")
    for role, sets in metrics.items():
        for name, value in sets.items():
            if not np.isfinite(value).all():
                raise ValueError(f"the {role} set '{name}' has metrics that are not finite")
    if not any(metrics.values()):
        raise UserError("there are no OOD scores, expected at least one near or far set")


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
