r"""How long `ood-osdre` and its verbs take to say how they are used.

    python benchmarks/speed/startup.py [--runs 20]

Each command runs in an interpreter of its own, in turn with one that does nothing, whose time is shown
beside it: what is left is ours. Printed are the median and the largest of the wall-clock seconds; the exit
status is 1 if a median is above half a second, which only an idle machine can be held to.
"""

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import above  # noqa: F401
import numpy as np
from timing import seconds

from ood_osdre.__main__ import VERBS
from ood_osdre.errors import Parser, count

LIMIT = 0.5


def call(*arguments: str) -> None:
    r"""Runs the interpreter to its end, without its output."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Times every command and returns 1 if one takes too long."""
    parser = Parser(description=__doc__)
    parser.add_argument("--runs", type=count(1), default=20, metavar="N")
    args = parser.parse_args(argv)
    slow = []
    print(f"{'command':24} {'median':>7} {'largest':>7} {'python':>7}  seconds")
    for command in ("--help", *(f"{verb} --help" for verb in VERBS)):
        words, (own, bare) = command.split(), np.empty((2, args.runs))
        for i in range(args.runs):
            own[i] = seconds(partial(call, "-m", "ood_osdre", *words))
            bare[i] = seconds(partial(call, "-c", ""))
        print(f"{command:24} {np.median(own):7.3f} {own.max():7.3f} {np.median(bare):7.3f}")
        if np.median(own) > LIMIT:
            slow.append(command)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
