r"""The log of a training run, one JSON object a line, in the run's folder."""

__all__ = ["RunLog"]

import json
import math
from collections.abc import Mapping
from pathlib import Path

from .errors import UserError
from .files import write_text_atomic

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
