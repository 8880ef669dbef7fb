r"""What the task commands share: their options, and tables that are written with a record.

A command lists its fits and hands them to :func:`run_suites` with a :class:`Suite`, which says how
a fit is run and how its rows become a table. The rest is the same for all: other results are not
replaced, fits run in order or in several processes, and the table is printed and written.
"""

__all__ = [
    "Row",
    "Suite",
    "add_common_arguments",
    "average",
    "check_arguments",
    "check_distinct",
    "check_names",
    "list_fits",
    "refuse_other_results",
    "run_suites",
    "summarise",
    "write_report",
]

import argparse
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from ...errors import UserError, count, number
from ...evaluation.records import RunRecord
from ...files import as_json, atomic_path, local
from ...training.distributed import find_device
from ..methods import FitOptions
from .jobs import Row, run_jobs

Plot: TypeAlias = Callable[[Path, Sequence[Row], Sequence[Row]], None]

# Seeds are multiplied and added to; those of every library still hold the result.
# Fits count up from a seed, up to the largest of training.
LARGEST_SEED = 500_000_000
# What changes no number of a table.
IRRELEVANT = {"jobs", "quiet"}


@dataclass(frozen=True)
class Suite:
    r"""Fits whose rows make one table.

    Attributes:
        name: The stem of the files.
        title: The title of the table.
        note: What stands beneath the table.
        jobs: Lists the fits that the arguments ask for.
        estimate: Runs one fit and returns its rows. An `image` in a row is for the figure alone.
        table: Makes the table from the rows of all fits.
        plot: Draws a figure, given its path, the rows of all fits and the table.
    """

    name: str
    title: str
    note: str
    jobs: Callable[[argparse.Namespace], Sequence[Any]]
    estimate: Callable[[Any], list[Row]]
    table: Callable[[Sequence[Row]], list[Row]]
    plot: Plot | None = None


def add_common_arguments(parser: argparse.ArgumentParser, task: str) -> None:
    r"""Adds the options that every task has; the task names its default folder."""
    add = parser.add_argument
    default = Path("runs") / f"tasks-{task}"
    add("--out", type=local, default=default, metavar="DIR", help=f"folder (default: {default})")
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


def check_arguments(
    args: argparse.Namespace, own: Mapping[str, Collection[str]] | None = None
) -> None:
    r"""Refuses, before the first fit, what no parser can.

    Arguments:
        args: The arguments of a task.
        own: Options that not all suites of the task have, each with those that have it.

    Raises:
        UserError: If something is listed twice, the suite has no such option, or there is no such
            device.
    """
    for option, given in vars(args).items():
        if isinstance(given, list):
            check_distinct(f"--{option}", given)
    for option, suites in (own or {}).items():
        if getattr(args, option) and args.suite not in suites:
            raise UserError(
                f"--{option}: got --suite {args.suite}, expected {' or '.join(suites)}."
            )
    find_device(args.device, "--device")


def check_distinct(option: str, given: Sequence[Any]) -> None:
    r"""Refuses what an option lists twice, which would count as another seed."""
    for value in given:
        if given.count(value) > 1:
            raise UserError(f"{option}: got {value} twice, expected it once.")


def check_names(option: str, given: Iterable[str], known: Iterable[str], where: str = "") -> None:
    r"""Refuses names that are not known.

    Arguments:
        option: The option that gave the names.
        given: The names.
        known: Those there are.
        where: What they are known for, such as `" with --suite planar"`.

    Raises:
        UserError: If there is one.
    """
    known = list(dict.fromkeys(known))
    for name in given:
        if name not in known:
            raise UserError(f"{option}: got {name!r}{where}, expected some of {', '.join(known)}.")


def list_fits(
    args: argparse.Namespace,
    methods: Iterable[str],
    options: FitOptions,
    kernels: Sequence[str],
    with_kernel: Collection[str],
    seeds: int = 1,
) -> list[tuple[str, FitOptions]]:
    r"""Lists methods with the options of their fits, one for every kernel and seed.

    Arguments:
        args: The arguments of a task, which win over the options.
        methods: The names of the methods.
        options: The options of a fit.
        kernels: The kernels; only the first for a method that none matters to.
        with_kernel: The methods that the kernel matters to.
        seeds: The number of seeds if none is given.
    """
    options = options.given(args.device, args.steps, args.lr)
    return [
        (method, options.replace(seed=seed, kernel=kernel))
        for method in methods
        for kernel in (kernels if method in with_kernel else kernels[:1])
        for seed in range(args.seed, args.seed + (args.seeds or seeds))
    ]


def run_suites(
    args: argparse.Namespace, suites: Iterable[tuple[Suite, Mapping[str, object]]]
) -> None:
    r"""Runs suites one after the other, prints their tables and writes them.

    Arguments:
        args: The arguments of the task, which the records keep.
        suites: Suites, those without any fit being left out, and how their record differs.

    Raises:
        UserError: If other results are in the way of any suite, or a fit or its report fails.
    """
    given = {k: v for k, v in vars(args).items() if k != "out"}
    # All are listed before the first one runs: a slip should not surface after minutes.
    plans = [(suite, suite.jobs(args), {**given, **changes}) for suite, changes in suites]
    plans = [plan for plan in plans if plan[1]]
    for suite, _, config in plans:
        refuse_other_results(args.out, suite.name, config)
    try:
        Path(os.path.realpath(args.out)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be a folder ({error.strerror}).") from None
    for suite, jobs, config in plans:
        rows = run_jobs(suite.estimate, jobs, args.jobs, not args.quiet)
        plain = [{k: v for k, v in row.items() if k != "image"} for row in rows]
        table = suite.table(plain)
        write_report(args.out, suite.name, suite.title, suite.note, table, plain, config)
        if suite.plot is not None:
            suite.plot(args.out / f"{suite.name}.png", rows, table)
            print(f"Plot: {args.out / suite.name}.png")


def summarise(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    r"""Summarises estimates over seeds, next to their truth.

    Arguments:
        rows: Rows with the keys, a `seed`, a `truth`, an `estimate` and `seconds`.
        keys: What a group of rows has in common.

    Returns:
        For each group, in order of appearance: the keys, the truth, the number of seeds, mean and
        sample standard deviation of the estimate, mean squared and absolute error, the relative
        error of the mean, and the mean of the seconds. Where all groups have one seed, which has no
        deviation and no mean squared error, these two are left out.
    """
    frame = pd.DataFrame(rows)
    one = frame.groupby([*keys, "truth"]).size().max() == 1
    error = frame["estimate"] - frame["truth"]
    frame = frame.assign(mse=error**2, mae=error.abs())
    table = frame.groupby([*keys, "truth"], sort=False, as_index=False).agg(
        seeds=("estimate", "size"),
        mean=("estimate", "mean"),
        std=("estimate", "std"),
        mse=("mse", "mean"),
        mae=("mae", "mean"),
        seconds=("seconds", "mean"),
    )
    truth = table["truth"]
    relative = (table["mean"] - truth) / truth.where(truth != 0)
    table.insert(table.columns.get_loc("seconds"), "relative", relative)
    return _plain(table.drop(columns=["std", "mse"]) if one else table)


def average(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    r"""Averages rows over seeds.

    Arguments:
        rows: Rows with the keys, a `seed` and numbers; a number may be None throughout.
        keys: What a group of rows has in common.

    Returns:
        For each group, in order of appearance: the keys, the number of seeds, the means.
    """
    frame = pd.DataFrame(rows)
    numbers = [column for column in frame if column not in (*keys, "seed")]
    groups = frame.astype(dict.fromkeys(numbers, float)).groupby(list(keys), sort=False)
    table = groups[numbers].mean()
    table.insert(0, "seeds", groups.size())
    return _plain(table.reset_index())


def _plain(frame: pd.DataFrame) -> list[Row]:
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def refuse_other_results(out: Path, name: str, config: Mapping[str, Any]) -> None:
    r"""Refuses a folder whose files hold results of other settings.

    Arguments:
        out: The folder.
        name: The stem of the files.
        config: What is going to be run; results of the same may be replaced.

    Raises:
        UserError: If there are such results, or something else by their name.
    """
    path = out / f"{name}.json"
    try:
        old = dict(json.loads(path.read_bytes())["config"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no record of this task"
        raise UserError(f"{path}: cannot be read: {reason}; choose another --out.") from None
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
    note: str,
    table: Sequence[Row],
    rows: Sequence[Row],
    config: Mapping[str, Any],
) -> None:
    r"""Writes a table as CSV and Markdown with its run record, or nothing of it, and prints it.

    Arguments:
        out: The folder.
        name: The stem of the files.
        title: The title of the Markdown table.
        note: What stands beneath it.
        table: The rows of the table, which have equal keys.
        rows: The rows it was made from.
        config: What was run.

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
    # Of objects, as a column of numbers would turn whole ones beside a None into fractions.
    frame = pd.DataFrame(table, dtype=object)
    names = [frame[column].map(lambda value: isinstance(value, str)).any() for column in frame]
    columns = frame.map(_cell).to_markdown(
        index=False,
        disable_numparse=True,
        colalign=["left" if name else "right" for name in names],
    )
    text = "\n\n".join([f"# {title}", columns, *filter(None, [note])]) + "\n"
    contents = {
        "json": json.dumps(plain, indent=2) + "\n",
        "csv": frame.to_csv(index=False, lineterminator="\n"),
        "md": text,
    }
    # None gets its name before all are on the disk.
    with ExitStack() as stack:
        for suffix, content in contents.items():
            path = stack.enter_context(atomic_path(out / f"{name}.{suffix}"))
            path.write_bytes(content.encode())
    print(text)
    print(f"Tables and record: {out}")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"
    return str(value)
