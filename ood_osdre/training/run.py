r"""One run a folder: a claim that a second process is refused, and that ends with its holder.

The log of a training run, one JSON object a line, in the run's folder.

Signals as a request to stop, so that a run can save before it ends.
"""

__all__ = ["RunLog", "caught_signals", "claimed"]

import json
import logging
import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ..errors import UserError
from ..files import write_text_atomic

LOCK = ".lock"


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
    import fcntl

    where = f"{option} {folder}".strip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / LOCK).open("a")
    except OSError as error:
        raise UserError(f"{where}: cannot be written: {error.strerror}") from None
    except ValueError as error:  # a null character
        raise UserError(f"{where!r}: cannot be written: {error}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{where}: another run is writing here.") from None
        yield


LOG = "log.jsonl"


class RunLog:
    r"""The log of a run, `log.jsonl`.

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


def _step_of(line: str) -> float:
    r"""Returns the step of a line; infinity for a line that was cut short."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf


log = logging.getLogger(__name__)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    r"""Collects SIGINT and SIGTERM instead of dying of them, in the main thread.

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
