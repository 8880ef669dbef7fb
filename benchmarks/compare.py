r"""Every estimator that the paper compares, and further baselines, on equal data, network and steps.

    python benchmarks/compare.py --data-root DIR [--config cifar10] [--device cuda] [--steps 3000]

Trains every method of `methods.py`, skipping what is done, and keeps each run under
`--out`/METHOD/seed-N, with tables in Markdown, LaTeX and CSV, quality against network evaluations
and the densities of the scores. On one CPU core a run of `cifar10_cpu` takes 3 to 14 minutes at
1,500 steps, most for the time-conditioned ones, which then take about 10 seconds an evaluation to
score: 35 minutes at 200. The U-Net takes an hour or more. Give it from the top of the clone.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison import write
from grid import add_arguments, run_grid
from methods import METHODS

from ood_osdre.errors import exit_status

RESULTS = Path(__file__).parent / "results" / "compare"


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(METHODS), RESULTS)
    parser.set_defaults(keep=["metrics.csv", "scores.npz"])
    parser.add_argument("--group", choices=["ratio", "paper-style", "class"], help="only these")
    args = parser.parse_args(argv)
    if args.group:
        args.only = [name for name in args.only if METHODS[name].group == args.group]
        if not args.only:
            parser.error(f"no method of --only is of the group {args.group}")
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Runs what is not done yet, and writes tables and figures of what is."""
    status = run_grid(METHODS, args)
    write(args.out)
    print(f"Tables and figures: {args.out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
