r"""Draws the page of a run, report.html, anew from the files of its folder.

`fit` and `eval` leave it beside each run. `eval` has the benchmark's images at hand and shows those that
the scores get most wrong; here they are named.
"""

__all__ = ["main"]

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import Parser
from .common import finish

EPILOG = """\
example:
  %(prog)s runs/flowers
"""


def main(arguments: Sequence[str] | None = None, prog: str = "ood-osdre report") -> int:
    r"""Runs the verb and returns its exit status."""
    p = Parser(prog=prog, description=__doc__, epilog=EPILOG)
    p.add_argument("run", type=Path, metavar="RUN", help="the folder of a run or of its seeds")
    args = p.parse_args(arguments)
    return finish(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Writes the page and prints where it is."""
    from ..evaluation.report import write_report

    print(write_report(args.run))
    return 0
