r"""The command `ood-osdre`: from folders, lists or tables to decisions, one verb a job."""

__all__ = ["VERBS", "main"]

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__
from .errors import Parser, did_you_mean

COMMAND = "ood-osdre"
#: The module of each verb, whose `main(arguments, prog)` returns an exit status, and what it does.
VERBS = {
    "fit": ("commands.fit", "train a detector on ID data and a reference, and calibrate it"),
    "score": ("commands.score", "score files: log-ratio, p-value, decision, class, as CSV"),
    "monitor": ("commands.monitor", "watch a stream, with an alarm as soon as it drifts"),
    "report": ("commands.report", "draw the page of a run anew"),
    "export": ("commands.export", "write a detector to a file that needs no Python"),
    "eval": ("cli", "train on a benchmark and evaluate on its OOD sets (ood-osdre-eval)"),
    "data": ("data.__main__", "say what of a benchmark is on disk, and get it"),
    "tasks": ("tasks.__main__", "densities, divergences, mutual information, with their truths"),
}
EPILOG = """\
examples:
  %(prog)s fit flowers/ photographs/ --out runs/flowers
  %(prog)s score runs/flowers inbox/ --out scores.csv
  tail -f paths.txt | %(prog)s monitor runs/flowers
  %(prog)s export runs/flowers flowers.onnx --p-value --threshold

A log-ratio is that of ID data to the reference, in nats; larger = more in-distribution.

exit status:
  0  done
  1  done, but some inputs could not be read (score, monitor), or a benchmark cannot run (data)
  2  a mistake in the command or its input, or no input, told in one line; nothing was written
  3  stopped by a signal or a time budget and saved (fit, eval); go on with --resume
  130  interrupted, or asked to end (SIGTERM)
  141  whoever read the output has gone
"""


def main(arguments: Sequence[str] | None = None) -> int:
    r"""Runs the command and returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    listing = "\n".join(f"  {verb:8} {text}" for verb, (_, text) in VERBS.items())
    parser = Parser(
        prog=COMMAND,
        usage=f"{COMMAND} VERB ...",
        description=f"{__doc__}\n\nverbs ({COMMAND} VERB --help has the options of each):\n{listing}",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {__version__}")
    parser.add_argument("verb", metavar="VERB", help=argparse.SUPPRESS)
    verb = parser.parse_args(arguments[:1]).verb
    if verb not in VERBS:
        known = f"{did_you_mean(verb, VERBS)}, expected one of {', '.join(VERBS)}"
        parser.error(f"no verb {verb!r}{known}")
    # Only now what the verb needs, which may be PyTorch: help and slips do not wait for it.
    module = import_module(f".{VERBS[verb][0]}", __package__)
    return int(module.main(arguments[1:], f"{COMMAND} {verb}"))


if __name__ == "__main__":
    sys.exit(main())
