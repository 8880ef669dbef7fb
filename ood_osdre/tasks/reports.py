r"""What the task commands share: running many fits, tables with the truth, and their files."""

__all__ = [
    "Row",
    "add_common_arguments",
    "announce",
    "refuse_unknown",
    "run_jobs",
    "summarise",
    "write_report",
]

import argparse
import csv
import io
import math
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

from ..errors import UserError
from ..files import write_text_atomic
from ..records import RunRecord

Row: TypeAlias = dict[str, Any]
Job = TypeVar("Job")


def add_common_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    r"""Adds the options that every task has.

    Arguments:
        parser: The parser of the subcommand.
        task: The name of the task, which is that of its folder.
    """
    add = parser.add_argument
    default = Path("runs") / f"tasks-{task}"
    add("--out", type=Path, default=default, metavar="DIR", help=f"folder (default: {default})")
    add("--seeds", type=_positive, metavar="N", help="consecutive seeds of every fit")
    add("--seed", type=int, default=0, metavar="N", help="the first seed (default: 0)")
    add("--steps", type=_positive, metavar="N", help="steps of every fit, in place of its own")
    add("--lr", type=float, metavar="X", help="the learning rate, in place of each fit's own")
    add("--jobs", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add("--full", action="store_true", help="the paper's scale")
    add("--quiet", action="store_true", help="no progress bars")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected a positive integer")
    return value


def refuse_unknown(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    r"""Raises an error if a name is not among those that are known.

    Arguments:
        option: The option that gave the names.
        given: The names.
        known: Those there are.
    """
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"{option}: got {name!r}, expected some of {', '.join(known)}.")


def run_jobs(
    function: Callable[[Job], list[Row]], jobs: Sequence[Job], processes: int, progress: bool
) -> list[Row]:
    r"""Runs a function of this package on every job, in order or in parallel.

    Arguments:
        function: From a job to rows; with several processes both have to be picklable.
        jobs: The jobs.
        processes: The number of processes.
        progress: Whether to show a progress bar over the jobs.

    Returns:
        The rows of all jobs, in the order of the jobs.
    """
    bar = tqdm(total=len(jobs), disable=not progress, unit="fit")
    if processes == 1:
        results = {}
        with bar:
            for i, job in enumerate(jobs):
                results[i] = function(job)
                bar.update()
    else:
        # Spawned, as a forked child of a process that has used threads may hang.
        context = multiprocessing.get_context("spawn")
        with (
            bar,
            ProcessPoolExecutor(processes, context, initializer=_one_thread) as pool,
        ):
            futures = {pool.submit(function, job): i for i, job in enumerate(jobs)}
            results = {}
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                bar.update()
    return [row for i in range(len(jobs)) for row in results[i]]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def summarise(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    r"""Summarises estimates over seeds, next to their truth.

    Arguments:
        rows: Rows with the keys, a `seed`, a `truth`, an `estimate` and `seconds`.
        keys: What a group of rows has in common.

    Returns:
        For each group, in order of appearance: the keys, the truth, the number of seeds, mean and
        sample standard deviation of the estimate, mean squared and absolute error, the relative
        error of the mean, and the mean of the seconds.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in (*keys, "truth")), []).append(row)

    table = []
    for key, members in groups.items():
        truth, n = key[-1], len(members)
        estimates = [m["estimate"] for m in members]
        mean = sum(estimates) / n
        spread = sum((e - mean) ** 2 for e in estimates)
        table.append(
            {
                **dict(zip((*keys, "truth"), key, strict=True)),
                "seeds": n,
                "mean": mean,
                "std": math.sqrt(spread / (n - 1)) if n > 1 else None,
                "mse": sum((e - truth) ** 2 for e in estimates) / n,
                "mae": sum(abs(e - truth) for e in estimates) / n,
                "relative": (mean - truth) / truth if truth else None,
                "seconds": sum(m["seconds"] for m in members) / n,
            }
        )
    return table


def write_report(
    out: Path,
    name: str,
    title: str,
    table: Sequence[Row],
    rows: Sequence[Row],
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    r"""Writes a table as CSV and Markdown, and the run record with all rows.

    Arguments:
        out: The folder.
        name: The stem of the files.
        title: The title of the Markdown table.
        table: The rows of the table, which have equal keys.
        rows: The rows it was made from.
        config: What was run.
        notes: Lines beneath the table.

    Returns:
        The Markdown text.
    """
    text = f"# {title}\n\n{_markdown(table)}\n"
    text += "".join(f"\n{note}\n" for note in notes)
    write_text_atomic(out / f"{name}.md", text)
    with io.StringIO() as buffer:
        writer = csv.DictWriter(buffer, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        write_text_atomic(out / f"{name}.csv", buffer.getvalue())
    record = RunRecord(
        config=dict(config),
        benchmark=f"tasks/{name}",
        device=str(config.get("device", "cpu")),
        results={"table": list(table), "rows": list(rows)},
    )
    record.write(out / f"{name}.json")
    return text


def announce(text: str, out: Path) -> None:
    r"""Prints a table and where its files are."""
    print(text)
    print(f"Tables, plot and record: {out}")


def _markdown(table: Sequence[Row]) -> str:
    names = list(table[0])
    lines = ["| " + " | ".join(names) + " |"]
    marks = ("--:" if _is_number([row[n] for row in table]) else ":--" for n in names)
    lines.append("| " + " | ".join(marks) + " |")
    lines += ["| " + " | ".join(_cell(row[n]) for n in names) + " |" for row in table]
    return "\n".join(lines)


def _is_number(values: Sequence[object]) -> bool:
    return all(v is None or isinstance(v, int | float) for v in values)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
