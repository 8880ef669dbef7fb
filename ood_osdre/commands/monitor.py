r"""Watches a stream with a detector that `ood-osdre fit` has trained.

Standard input has paths of images, or rows of numbers, one a line. An alarm is a line of JSON on
standard output:

  input, name     which input raised it, counted from 1 without those that could not be read
  start           how many inputs came before the most likely start of the change
  divergence_difference, standard_error, baseline
                  the mean log-ratio of the latest inputs, and of calibration data, in nats
  statistic       what reached --run-length

As long as the stream is like the calibration data, alarms come after that many inputs on average, at
least. After an alarm the monitor lets --window inputs pass and starts again: where the drift goes on, so
do alarms. What cannot be read is told on standard error and left out, and the exit status is then 1.
"""

__all__ = ["main"]

import argparse
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from queue import Queue
from typing import TYPE_CHECKING

from ..errors import Parser, UserError, count, counted, number
from .common import add_scoring, find_scorer, finish, input_lines, output
from .score import INCOMPLETE

if TYPE_CHECKING:
    from ..detectors import Scorer
    from ..detectors.files import Item

# The most inputs that are scored together, where as many have come.
MOST = 256
EPILOG = """\
examples:
  tail -f paths.txt | %(prog)s runs/flowers
  tail -f sensors.csv | %(prog)s runs/sensors --run-length 1e6 >> alarms.jsonl
"""


def parser(prog: str) -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(prog=prog, description=__doc__, epilog=EPILOG)
    add_scoring(p)
    known = "inputs to a false alarm, on average, at least (default: %(default)g)"
    p.add_argument(
        "--run-length", type=number(positive=True), default=1e4, metavar="N", help=known
    )
    known = "an alarm has the mean of the latest N, and the next N are not watched (default: %(default)s)"
    p.add_argument("--window", type=count(1, sys.maxsize), default=500, metavar="N", help=known)
    return p


def main(arguments: Sequence[str] | None = None, prog: str = "ood-osdre monitor") -> int:
    r"""Runs the verb and returns its exit status."""
    args = parser(prog).parse_args(arguments)
    return finish(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Watches standard input to its end."""
    import numpy as np

    from ..detectors.files import score_items
    from ..tasks import DriftMonitor
    from ..tasks.tracking import LEAST_CALIBRATION

    alarms_to = output()
    scorer = find_scorer(args)
    if scorer.conformal is None:
        raise UserError(f"{args.run}: is not calibrated, expected a run of ood-osdre fit.")
    if (size := scorer.conformal.size) < LEAST_CALIBRATION:
        raise UserError(
            f"{args.run}: has {size} calibration scores, expected at least {LEAST_CALIBRATION}; fit "
            "it with more ID data, or with --calibrate."
        )
    # They are kept sorted, and a monitor takes inputs in the order that they came in.
    calibration = np.random.default_rng(0).permutation(scorer.conformal.scores)
    monitor = DriftMonitor(lambda scores: scores, calibration, args.run_length, args.window)
    alarms = failed = 0
    for part in score_items(scorer, as_they_come(scorer), ahead=False):
        for name, score, problem in zip(part.names, part.scores, part.problems, strict=True):
            if problem:
                failed += 1
                print(f"{name}: {problem}", file=sys.stderr)
                continue
            if monitor.alarm is not None and monitor.count >= monitor.alarm + args.window:
                monitor.restart(calibration)
            state = monitor.update([score])
            if state.alarm == state.inputs:
                alarms += 1
                found = {"input": state.alarm, "name": name, **state._asdict()}
                line = json.dumps({k: found[k] for k in found if k not in ("inputs", "alarm")})
                print(line, file=alarms_to, flush=True)
    if not monitor.count and not failed:
        raise UserError("standard input: nothing to watch.")
    if not args.quiet:
        mean = ""
        if monitor.count:
            mean = f", baseline {monitor.baseline:.4g} nats"
        alarmed = counted(alarms, "alarm")
        print(f"{counted(monitor.count, 'input')}, {alarmed}{mean}", file=sys.stderr)
    if failed:
        print(f"{counted(failed, 'input')} could not be read", file=sys.stderr)
    return INCOMPLETE if failed else 0


def as_they_come(scorer: "Scorer") -> Iterator[list["Item"]]:
    r"""Yields the items that have come on standard input since the last of them were scored."""
    from ..detectors.files import list_lines, list_rows

    waiting: Queue[Item | BaseException | None] = Queue(MOST)

    def listen() -> None:
        lines = input_lines()
        try:
            items = list_lines(lines, False)
            if len(scorer.shape) == 1:
                items = list_rows(lines, "stdin", scorer.columns)
            for item in items:
                waiting.put(item)
        except BaseException as error:  # noqa: BLE001 - to be raised where it is told
            waiting.put(error)
        finally:
            waiting.put(None)

    threading.Thread(target=listen, daemon=True).start()
    part: list[Item] = []
    while (item := waiting.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        part.append(item)
        if waiting.empty() or len(part) == MOST:
            yield part
            part = []
    if part:
        yield part
