r"""The table of metrics of an evaluation, over one run or over several seeds.

A :class:`MetricsTable` has one row for each OOD set, near sets before far sets, and three rows of
means. `nearood` and `farood` are plain means of their sets' rows, as OpenOOD's. `all` is the mean
over *all* sets' rows, which is what the paper reports as AUROC. If a set of the benchmark is
absent, the means that lack it say so in their name, as in `nearood (partial: cifar100 absent)`.
The ID accuracy is one number and is given once, not in every row.

A reference may hold classes of a near set. That row is marked, as in `tin (in reference)`, and no
mean counts it. The benchmark may name its *companion*, the part of it that the reference does not
hold: then the means count the companion in its place, and else they say what they lack, as in
`nearood (partial: tin in reference)`. A companion is otherwise in no mean, as its images are in the
whole set. A benchmark with companions has a fourth mean, `near_held`, which counts them and never
their whole sets, so that it compares runs with different references.

Over several runs, means over sets are taken within each run, then the mean and the sample standard
deviation (:math:`n - 1`) over runs. One run has no deviation and shows none.
"""

__all__ = ["MetricsTable", "aggregate"]

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from ..errors import UserError
from ..files import write_text_atomic
from .metrics import OODMetrics

MEANS = {"near": "nearood", "far": "farood"}
HELD = "near_held"
RESERVED = ("id", "all", *MEANS.values(), HELD)
COLUMNS = {
    "fpr95": "FPR@95",
    "auroc": "AUROC",
    "aupr_in": "AUPR_IN",
    "aupr_out": "AUPR_OUT",
    "fpr95_id": "FPR@95_ID",
}
CONVENTION = """\
FPR@95: fraction of ID flagged when 95 % of OOD is caught (OOD positive, OpenOOD v1.5). \
Scores are {}; larger = more ID.
FPR@95_ID: fraction of OOD accepted when 95 % of ID is kept (ID positive).\
"""
LOG_RATIO = "log-ratios in nats"
SUM = (
    "sums of parts, each in units of its deviation on ID validation images: no log-ratios, no unit"
)


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
        overlaps: The near sets of whose classes the reference holds some, each with its companion;
            None without one.
        parts: The near sets that are companions, each with its whole set.
        remark: What a reader has to know of the benchmark.
        addends: The tables of the parts that a summed score has, by their names.
        seeds: The seed of each run; empty if they are not known.
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
    overlaps: Mapping[str, str | None] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    addends: Mapping[str, "MetricsTable"] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, Mapping[str, OODMetrics]],
        title: str,
        absent: Mapping[str, Sequence[str]] | None = None,
        accuracy: float | None = None,
        seconds: float | None = None,
        counts: Mapping[str, int] | None = None,
        overlaps: Mapping[str, str | None] | None = None,
        parts: Mapping[str, str] | None = None,
        **facts: Any,  # noqa: ANN401
    ) -> "MetricsTable":
        r"""Builds the table of one run.

        Arguments:
            metrics: For each role, `"near"` and `"far"`, the metrics of its sets by name.
            title: The title, which names the benchmark.
            absent: For each role, the sets of the benchmark that are absent.
            accuracy: The ID accuracy, as a fraction; None without a class head.
            seconds: The scoring time, in seconds; None if it is not known.
            counts: The number of images of each set.
            overlaps: The near sets of whose classes the reference holds some, each with its
                companion; None without one.
            parts: The near sets that are companions, each with its whole set.
            facts: Other attributes: `parameters`, `reference`, `steps`, `remark`, ...

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
        overlaps, parts = overlaps or {}, parts or {}
        # Of a set and its companion one counts: the set, unless the reference holds classes of it.
        alone = {name for name, companion in overlaps.items() if companion is None}
        out = (overlaps.keys() - alone) | (parts.keys() - set(overlaps.values()))

        rows: dict[str, OODMetrics] = {}
        roles: dict[str, str] = {}

        def add_mean(name: str, role: str, of: Sequence[str], out: Container[str]) -> None:
            present = [n for r in of for n in metrics.get(r, {}) if n not in out]
            lacking = [n for r in of for n in absent.get(r, ()) if n not in out]
            if counted := [every[n] for n in present if n not in alone]:
                name = _mean_name(name, lacking, [n for n in present if n in alone])
                rows[name], roles[name] = _mean(counted), role

        for role, name in MEANS.items():
            sets = metrics.get(role, {})
            rows |= {_marked(n, overlaps): value for n, value in sets.items()}
            roles |= {_marked(n, overlaps): role for n in sets}
            add_mean(name, role, [role], out)
            if role == "near" and parts:
                add_mean(HELD, role, [role], set(parts.values()))
        add_mean("all", "all", list(MEANS), out)
        return cls(
            title=title,
            rows={name: (value,) for name, value in rows.items()},
            roles=roles,
            accuracy=() if accuracy is None else (accuracy,),
            seconds=() if seconds is None else (seconds,),
            counts={_marked(n, overlaps): count for n, count in (counts or {}).items()},
            absent=absent,
            overlaps=overlaps,
            parts=parts,
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
        return None if self.runs < 2 else OODMetrics(*np.std(self.rows[row], 0, ddof=1).tolist())

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
        notes += self._notes_on_parts()
        if self.remark:
            notes.append(self.remark)
        convention = CONVENTION.format(SUM if self.addends else LOG_RATIO)
        return [*notes, "All metrics in percent.", *convention.splitlines()]

    def _notes_on_parts(self) -> Iterator[str]:
        r"""Yields what the means count of near sets that the reference holds classes of."""
        for name, companion in self.overlaps.items():
            if (row := _marked(name, self.overlaps)) in self.rows:
                instead = "no mean counts it"
                if companion is not None:
                    instead = f"the means count {companion}, its part without them"
                yield f"{row}: the reference holds classes of this set; {instead}."
        for name, whole in self.parts.items():
            if name in self.rows and name not in self.overlaps.values():
                yield f"{name}: a part of {whole}; only {HELD} counts it, in place of {whole}."

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        r"""Writes a CSV file, in percent; of several runs with their deviations and `seeds`.

        The first row, of role `id`, holds the ID accuracy, the number of parameters and the
        scoring seconds. They are empty in every other row, as the metrics are in this one. The last
        columns are those of a summed score's parts, such as `AUROC of pixels energy`.
        """
        metrics = [c for column in COLUMNS.values() for c in (column, f"{column}_std")]
        of_parts = [f"{column} of {name}" for name in self.addends for column in metrics]
        of_run = ["ID_ACC", "ID_ACC_std", "parameters", "seconds", "seconds_std"]
        accuracy, seconds = _mean_std(self.accuracy, 100), _mean_std(self.seconds, 1)
        no_metrics, no_parts = [None] * (1 + len(metrics)), [None] * len(of_parts)
        rows = [["id", "id", *no_metrics, *accuracy, self.parameters, *seconds, *no_parts]]
        for name in self.rows:
            head = [name, self.roles[name], self.counts.get(name)]
            parts = [cell for table in self.addends.values() for cell in _csv(table.rows[name])]
            rows.append([*head, *_csv(self.rows[name]), *[None] * len(of_run), *parts])
        columns = ["set", "role", "images", *metrics, *of_run, *of_parts]
        frame = pd.DataFrame(rows, columns=columns, dtype=object)
        frame.insert(0, "benchmark", self.title)
        frame.insert(3, "runs", self.runs)
        if self.runs > 1:
            frame.insert(4, "seeds", " ".join(map(str, self.seeds)))
        write_text_atomic(path, frame.to_csv(index=False, lineterminator="\n"))

    def to_markdown(self) -> str:
        r"""Returns the table and its notes in Markdown."""
        tables = ["\n".join(_markdown(rows)) for rows in self._grids()]
        notes = [f"- {note}" for note in self.notes()]
        return "\n".join([f"# {self.title}", "", "\n\n".join(tables), "", *notes, ""])

    def to_terminal(self) -> str:
        r"""Returns the table and its notes in aligned plain text."""
        lines = [self.title]
        for rows in self._grids():
            first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
            header, *body = [
                "  ".join([name.ljust(first), *map(str.rjust, cells, others)])
                for name, *cells in rows
            ]
            rule = "-" * len(header)
            lines += [rule, header, rule, *body, rule]
        return "\n".join([*lines, *self.notes(), ""])

    def _grids(self) -> list[list[list[str]]]:
        r"""Formats the table, and that of the AUROC of each part of a summed score."""
        rows = [["AUROC of the parts", *self.addends]]
        for row in self.rows:
            values = [[v.auroc for v in table.rows[row]] for table in self.addends.values()]
            rows.append([row, *map(_percent, values)])
        return [self._cells(), *([rows] if self.addends else [])]

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
    for key in ("title", "roles", "parameters", "counts", "reference", "steps", "addends"):
        for table in tables:
            found, expected = getattr(table, key), getattr(first, key)
            if key == "addends":
                found, expected = list(found), list(expected)
            if found != expected:
                what = "rows" if key == "roles" else key
                raise UserError(f"cannot join tables whose {what} differ: {found}, {expected}")

    def join(runs: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        # A mean over some of the runs would be taken for one over all.
        return sum(runs, ()) if all(runs) else ()

    return replace(
        first,
        rows={row: tuple(v for table in tables for v in table.rows[row]) for row in first.rows},
        accuracy=join([table.accuracy for table in tables]),
        seconds=join([table.seconds for table in tables]),
        seeds=join([table.seeds for table in tables]),
        addends={name: aggregate([t.addends[name] for t in tables]) for name in first.addends},
    )


def _marked(name: str, overlaps: Container[str]) -> str:
    r"""Returns the row of a set, which says so if the reference holds classes of it."""
    return f"{name} (in reference)" if name in overlaps else name


def _mean_name(name: str, absent: Sequence[str], held: Sequence[str]) -> str:
    reasons = {"absent": absent, "in reference": held}
    lacks = [f"{', '.join(sets)} {reason}" for reason, sets in reasons.items() if sets]
    return f"{name} (partial: {'; '.join(lacks)})" if lacks else name


def _mean(values: Sequence[OODMetrics]) -> OODMetrics:
    return OODMetrics(*np.mean(values, axis=0).tolist())


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    rule = [":--", *["--:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]


def _csv(values: Sequence[OODMetrics]) -> list[str]:
    return [c for k in COLUMNS for c in _mean_std([getattr(v, k) for v in values], 100)]


def _mean_std(values: Sequence[float], scale: float) -> tuple[str, str]:
    mean = f"{scale * np.mean(values):.6f}" if values else ""
    std = f"{scale * np.std(values, ddof=1):.6f}" if len(values) > 1 else ""
    return mean, std


def _spread(values: Sequence[float], digits: int) -> str:
    std = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}"


def _percent(values: Sequence[float]) -> str:
    return _spread([100 * v for v in values], 2)
