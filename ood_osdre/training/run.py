r"""A run's folder while it is written: one run a folder, its log, and signals that ask it to stop.

Nothing here imports torch: a folder that is taken is refused at once.
"""

__all__ = [
    "RECORD",
    "RESULTS",
    "RunLog",
    "caught_signals",
    "claimed",
    "holds",
    "refuse_existing",
]

import json
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from ..errors import UserError
from ..files import write_text_atomic

LOCK, LOG = ".lock", "log.jsonl"
# What says that a folder holds a run to go on with, a trained model, the results of a run.
STATE, MODEL, RECORD = "state.safetensors", "model.safetensors", "run.json"
RESULTS = (STATE, MODEL, RECORD, "metrics.csv", "scores.npz")

log = logging.getLogger(__name__)


@contextmanager
def claimed(folder: Path, option: str = "") -> Iterator[None]:
    r"""Holds a folder, created if needed, against other runs while the block lasts.

    The system ends the claim with the process, however that ends.

    Arguments:
        folder: The folder.
        option: What to put before the folder in messages, the name of an option.

    Raises:
        UserError: If another run holds the folder, or it cannot be written.
    """
    where = f"{option} {folder}".strip()
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{where}: another run is writing here.") from None
    except (OSError, ValueError) as error:  # the second of a null character
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{where!r}: cannot be written: {reason}") from None
    try:
        yield
    finally:
        lock.release()


def holds(folder: Path, *names: str) -> bool:
    r"""Returns whether a folder has one of some files; false for names no file can have."""
    return any(os.path.exists(folder / name) for name in names)


def refuse_existing(out: Path, folders: Mapping[int, Path], resume: bool) -> None:
    r"""Raises an error if results would be written over others.

    Arguments:
        out: The folder of all seeds.
        folders: The folder of each seed.
        resume: Whether runs are to go on.
    """
    several = len(folders) > 1
    others = [out] if several else sorted(out.glob("seed-*") if os.path.isdir(out) else ())
    if found := [f for f in others if holds(f, STATE)]:
        expected = "one seed's" if several else "several seeds'"
        raise UserError(f"{found[0]}: holds {expected} run; choose another --out.")
    for folder in folders.values():
        if not resume and holds(folder, *RESULTS):
            raise UserError(
                f"{folder}: holds a run already; go on with --resume or choose another --out."
            )
        if resume and holds(folder, RECORD) and not holds(folder, STATE):
            raise UserError(f"{folder}: holds an evaluation, no training; choose another --out.")


class RunLog:
    r"""The log of a run, `log.jsonl`, one JSON object a line.

    Arguments:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG

    def start(self, step: int) -> None:
        r"""Drops what a run that was interrupted logged after its last checkpoint.

        Arguments:
            step: The step of the checkpoint, 0 without one.
        """
        text = self.path.read_text(errors="replace") if self.path.is_file() else ""
        kept = [line for line in text.splitlines() if _step_of(line) <= step]
        write_text_atomic(self.path, "".join(f"{line}\n" for line in kept))

    def write(self, entry: Mapping[str, float]) -> None:
        r"""Appends an entry.

        Arguments:
            entry: Named numbers, the step among them.

        Raises:
            UserError: If the file cannot be written.
        """
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}.") from None


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    r"""Collects SIGINT and SIGTERM in the main thread, so that a run can save before it ends.

    In another thread signals keep their handlers, and none is collected.

    Yields:
        The numbers of the signals received, a list that grows as they come.
    """
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    old = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, handler)
    except ValueError:
        log.debug("Not in the main thread: signals keep their handlers.")
    try:
        yield received
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _step_of(line: str) -> float:
    r"""Returns the step of a line; infinity for a line that was cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
