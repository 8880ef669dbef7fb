r"""Densities from ratios: log p1 = log r + log p0 in one pass, p0 = N(0, I), with their total mass.

Suites:

planar    nine two-dimensional sets with exact densities
tabular   tables of numbers; those that scikit-learn ships need no files
images    bits per dimension of handwritten digits, as an energy model
"""

__all__ = ["add_arguments", "run"]

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from ...errors import UserError
from ...models.bases import KERNELS
from ..methods import METHODS
from .density_methods import PLANAR_METHODS
from .images import NAMES as IMAGE_METHODS
from .images import estimate_image, image_jobs
from .planar import estimate_planar, planar_jobs, plot_planar
from .reports import (
    Row,
    add_common_arguments,
    announce,
    check_common_arguments,
    refuse_other_results,
    run_jobs,
    write_report,
)
from .tabular import NAMES as TABLE_METHODS
from .tabular import estimate_table, table_jobs

Job = TypeVar("Job")

# The methods of each suite, in the order of their rows.
SUITES: dict[str, Collection[str]] = {
    "planar": PLANAR_METHODS,
    "tabular": tuple(dict.fromkeys((*TABLE_METHODS, *METHODS))),
    "images": IMAGE_METHODS,
}
TITLES = {
    "planar": "Densities of planar sets (nats)",
    "tabular": "Densities of tables (nats, standardised coordinates)",
    "images": "Densities of dequantised images (bits per dimension)",
}
NOTES = {
    "planar": "`nll` is that of the density as it comes, `normalised_nll` and `kl` after division "
    "by its total mass, by a grid. `entropy` is the least NLL that any density can have.",
    "tabular": "`nll` is that of the density as it comes and no likelihood unless `log_mass` is "
    "0. `normalised_nll` adds `log_mass`, or `log_mass_ais` where that is clearly larger or "
    "`effective` draws are few; it is a likelihood as far as these can be trusted.",
    "images": "`bits` is that of the density as it comes; `normalised_bits` adds `log_mass`, by "
    "annealing, in nats. With the exact mass it would bound the bits of the discrete images from "
    "above; annealing finds too little mass sooner than too much, so these bits are optimistic.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    r"""Adds the options of the command."""
    add_common_arguments(parser, "density")
    add = parser.add_argument
    add(
        "--suite",
        choices=tuple(SUITES),
        default="planar",
        help="what to run, see above (default: planar, which is 45 fits of 600 updates)",
    )
    add(
        "--sets",
        nargs="+",
        metavar="NAME",
        help="the sets (default: all planar ones, the tables colours and breast_cancer, digits)",
    )
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="os-dre, along the path; os-dre-likelihood; direct-likelihood, without any time; "
        "dre-inf and d3re, solvers, not for images; for tables those of the command kl, too "
        "(default: all but those; for mnist and cifar10 there is os-dre alone)",
    )
    add(
        "--kernels",
        nargs="+",
        choices=tuple(KERNELS),
        help="temporal kernels (default: all for tables, else rq)",
    )
    add("--data-root", type=Path, metavar="DIR", help="folder of the tables' files")
    add("--whiten", action="store_true", help="tables: take p0 = N(0, I) in whitened coordinates")


def run(args: argparse.Namespace) -> int:
    r"""Runs a suite, prints its table and writes it.

    Raises:
        UserError: If a set, a table or a method is unknown or listed twice, the files of a table
            are absent, an option is none of the suite's, or other results are in the way.
    """
    check_common_arguments(args)
    if args.whiten and args.suite != "tabular":
        raise UserError(f"--whiten: got --suite {args.suite}, expected tabular; it is for tables.")
    _refuse_methods_of_other_suites(args)
    config = {k: v for k, v in vars(args).items() if k not in ("out", "run")}
    name = f"density-{args.suite}" + ("-whitened" if args.whiten else "")

    def run_all(function: Callable[[Job], list[Row]], jobs: Sequence[Job]) -> list[Row]:
        refuse_other_results(args.out, name, config)
        return run_jobs(function, jobs, args.jobs, not args.quiet)

    if args.suite == "planar":
        drawn = run_all(estimate_planar, planar_jobs(args))
        rows = [{k: v for k, v in row.items() if k != "image"} for row in drawn]
        table = average(rows, ("set", "method", "kernel", "evaluations"))
    elif args.suite == "images":
        rows = run_all(estimate_image, image_jobs(args))
        table = average(rows, ("images", "dim", "method", "kernel"))
    else:
        rows = run_all(estimate_table, table_jobs(args))
        table = average(rows, ("table", "dim", "p0", "method", "kernel", "evaluations"))
    notes = [NOTES[args.suite]]
    text = write_report(args.out, name, TITLES[args.suite], table, rows, config, notes)
    if args.suite == "planar":
        plot_planar(args.out / f"{name}.png", drawn)
    announce(text, args.out, plot=args.suite == "planar")
    return 0


def _refuse_methods_of_other_suites(args: argparse.Namespace) -> None:
    own = SUITES[args.suite]
    for name in args.methods or ():
        others = [suite for suite, methods in SUITES.items() if name in methods]
        if others and args.suite not in others:
            raise UserError(
                f"--methods: got {name!r}, which is for --suite {' or '.join(others)}, expected "
                f"some of {', '.join(own)}."
            )


def average(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    r"""Averages rows over seeds.

    Arguments:
        rows: Rows with the keys, a `seed` and numbers; a number may be None throughout.
        keys: What a group of rows has in common.

    Returns:
        For each group, in order of appearance: the keys, the number of seeds, the means.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in keys), []).append(row)
    table = []
    for key, members in groups.items():
        line: Row = {**dict(zip(keys, key, strict=True)), "seeds": len(members)}
        for column in members[0]:
            if column not in (*keys, "seed"):
                values = [m[column] for m in members]
                line[column] = None if None in values else sum(values) / len(values)
        table.append(line)
    return table
