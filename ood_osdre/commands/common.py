r"""What the verbs share: how they end, where they find a detector, and what comes on standard input."""

__all__ = [
    "STDIN",
    "add_scoring",
    "find_scorer",
    "finish",
    "input_lines",
    "output",
]

import argparse
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..errors import UserError, exit_status

if TYPE_CHECKING:
    from ..detectors import Scorer

#: What stands for standard input.
STDIN = "-"


def add_scoring(parser: argparse.ArgumentParser) -> None:
    r"""Adds what every verb takes that scores with a run: the run, a device and `--quiet`."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of ood-osdre fit")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--quiet", action="store_true", help="no progress, no summary")


def finish(command: Callable[[], int]) -> int:
    r"""Runs a verb and returns its exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    # Names of files are bytes, and a terminal may lack a character.
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    return exit_status(command)


def find_scorer(args: argparse.Namespace) -> "Scorer":
    r"""Returns the scorer of a run."""
    from ..detectors import load_scorer
    from ..training.distributed import find_device

    device = find_device(None if args.device == "auto" else args.device, "--device")
    return load_scorer(args.run, device)


def output() -> IO[str]:
    r"""Returns standard output, which a shell closes with `>&-`."""
    if sys.stdout is None:
        raise UserError("standard output: is closed, expected somewhere to write to.")
    return sys.stdout


def input_lines() -> Iterator[str]:
    r"""Yields the lines of standard input as they come, empty ones left out, as bytes have them."""
    if sys.stdin is None:
        raise UserError("standard input: is closed, expected paths or rows, one a line.")
    if sys.stdin.isatty():
        raise UserError("standard input: is a terminal, expected paths or rows, one a line.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")
