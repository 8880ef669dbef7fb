r"""What the task commands share: options, tables with the truth, and their files.

Many fits, in order or in several processes that end together.
"""

__all__ = [
    "Row",
    "add_common_arguments",
    "announce",
    "check_common_arguments",
    "describe_methods",
    "refuse_other_results",
    "refuse_unknown",
    "run_jobs",
    "summarise",
    "write_report",
]

import argparse
import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import UserError, count, number
from ...evaluation.records import RunRecord
from ...files import as_json, atomic_path

if TYPE_CHECKING:
    from ..methods import Method
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from types import FrameType
from typing import TypeVar

from tqdm import tqdm

Row: TypeAlias = dict[str, Any]

# Seeds are multiplied and added to; those of every library still hold the result.
LARGEST_SEED = 2**31 - 1
# Options that are lists of names or numbers, each of which makes rows of its own.
LISTS = ("sets", "scenarios", "dims", "methods", "backbones", "kernels")
# What changes no number of a table.
IRRELEVANT = {"jobs", "quiet"}


def add_common_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    r"""Adds the options that every task has.

    Arguments:
        parser: The parser of the subcommand.
        task: The name of the task, which is that of its folder.
    """
    add = parser.add_argument
    default = Path("runs") / f"tasks-{task}"
    add("--out", type=Path, default=default, metavar="DIR", help=f"folder (default: {default})")
    one = count(1)
    add("--seeds", type=one, metavar="N", help="consecutive seeds of every fit")
    seed = count(0, LARGEST_SEED)
    add("--seed", type=seed, default=0, metavar="N", help="the first seed (default: 0)")
    add("--steps", type=one, metavar="N", help="updates of every fit, in place of its own")
    add(
        "--lr",
        type=number(positive=True),
        metavar="X",
        help="the learning rate, in place of each fit's own",
    )
    add("--jobs", type=one, default=1, metavar="N", help="processes (default: 1)")
    add("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    add("--full", action="store_true", help="the paper's scale")
    add("--quiet", action="store_true", help="no progress bars")


def describe_methods(methods: Mapping[str, "Method"]) -> str:
    r"""Returns the names of methods by what they are, for a help text.

    Arguments:
        methods: The methods by name.
    """
    solvers = [name for name, method in methods.items() if method.solver]
    ours = [name for name, method in methods.items() if method.kernel]
    direct = [name for name in methods if name not in (*solvers, *ours)]
    kinds = {"one step": ours, "solvers": solvers, "direct": direct}
    return "; ".join(f"{kind}: {' '.join(names)}" for kind, names in kinds.items() if names)


def check_common_arguments(args: argparse.Namespace) -> None:
    r"""Refuses what a parser cannot, before the first fit.

    Arguments:
        args: The arguments of a task.

    Raises:
        UserError: If something is listed twice, which would count as another seed, or there is no
            such device.
    """
    for option in LISTS:
        given = getattr(args, option, None) or []
        for value in given:
            if given.count(value) > 1:
                raise UserError(f"--{option}: got {value} twice, expected it once.")
    from ...training.distributed import find_device

    find_device(args.device, "--device")


def refuse_unknown(option: str, given: Iterable[str], known: Iterable[str]) -> None:
    r"""Raises an error if a name is not among those that are known.

    Arguments:
        option: The option that gave the names.
        given: The names.
        known: Those there are.
    """
    known = list(dict.fromkeys(known))
    for name in given:
        if name not in known:
            raise UserError(f"{option}: got {name!r}, expected some of {', '.join(known)}.")


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


def refuse_other_results(out: Path, name: str, config: Mapping[str, Any]) -> None:
    r"""Raises an error if the files that a run is going to write hold results of other settings.

    Arguments:
        out: The folder.
        name: The stem of the files.
        config: What is going to be run; results of the same may be replaced.
    """
    path = out / f"{name}.json"
    try:
        record = json.loads(path.read_bytes())
        old = dict(record["config"])
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: no record of this task; choose another --out.") from None
    new = as_json(dict(config))
    assert isinstance(new, dict)
    differing = [k for k in sorted({*old, *new} - IRRELEVANT) if old.get(k) != new.get(k)]
    if differing:
        raise UserError(
            f"{path}: holds results of other settings ({', '.join(differing)}); "
            "choose another --out."
        )


def write_report(
    out: Path,
    name: str,
    title: str,
    table: Sequence[Row],
    rows: Sequence[Row],
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    r"""Writes a table as CSV and Markdown, and the run record with all rows, or nothing of it.

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

    Raises:
        UserError: If a number is not finite, or the files cannot be written.
    """
    record = RunRecord(
        config=dict(config),
        seed=config.get("seed"),
        benchmark=f"tasks/{name}",
        device=str(config.get("device", "cpu")),
        results={"table": list(table), "rows": list(rows)},
    )
    try:
        plain = as_json(record)
    except ValueError as error:
        raise UserError(f"{out / name}.json: {error}") from None
    text = f"# {title}\n\n{_markdown(table)}\n"
    text += "".join(f"\n{note}\n" for note in notes)
    with io.StringIO() as buffer:
        writer = csv.DictWriter(buffer, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        columns = buffer.getvalue()
    contents = {"json": json.dumps(plain, indent=2) + "\n", "csv": columns, "md": text}
    # None gets its name before all are on the disk.
    with ExitStack() as stack:
        for suffix, content in contents.items():
            path = stack.enter_context(atomic_path(out / f"{name}.{suffix}"))
            path.write_bytes(content.encode())
    return text


def announce(text: str, out: Path, plot: bool = False) -> None:
    r"""Prints a table and where its files are.

    Arguments:
        text: The table.
        out: The folder of the files.
        plot: Whether there is a plot among them.
    """
    print(text)
    print(f"{'Tables, plot' if plot else 'Tables'} and record: {out}")


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
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)


Job = TypeVar("Job")


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
    results: dict[int, list[Row]] = {}
    with tqdm(total=len(jobs), disable=not progress, unit="fit") as bar:
        if processes == 1:
            for i, job in enumerate(jobs):
                results[i] = function(job)
                bar.update()
        else:
            with closing(_in_parallel(function, jobs, processes)) as ended:
                for i, rows in ended:
                    results[i] = rows
                    bar.update()
    return [row for i in range(len(jobs)) for row in results[i]]


def _in_parallel(
    function: Callable[[Job], list[Row]], jobs: Sequence[Job], processes: int
) -> Generator[tuple[int, list[Row]], None, None]:
    r"""Yields the number and the rows of each job as it ends; if one fails, all are stopped."""
    # Spawned, as a forked child of a process that has used threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, initializer=_prepare_worker)
    with _interrupted_by_sigterm():
        try:
            with _interrupts_held():
                futures = {pool.submit(function, job): i for i, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            # Nobody waits for the rest, which may take hours.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    f"--jobs {processes}: a process was killed, as when memory is short; try fewer."
                ) from None
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    r"""Lets SIGTERM do what Ctrl-C does, in the main thread, so that no worker is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    r"""Holds Ctrl-C back; processes that are started meanwhile never get it.

    A terminal sends it to all of them, but it is the parent that ends them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _prepare_worker() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    r"""Ends this process when its parent does: one that was killed cannot."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
