r"""A run while it goes on: how far it came, its folder and log, signals that ask it to stop.

Nothing here imports torch, so a folder that is taken is refused at once.
"""

__all__ = [
    "CLASSIFIER",
    "HEAD",
    "MODEL",
    "MODEL_FILE",
    "RECORD",
    "RESULTS",
    "STATE",
    "STATES",
    "STATE_FILE",
    "Outcome",
    "RunLog",
    "caught_signals",
    "check_finished",
    "held_folder",
    "holds",
    "locked",
    "of_seed",
    "refuse_existing",
    "refuse_other_level",
]

import json
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from ..errors import UserError
from ..files import sweep, write_text_atomic

LOCK, LOG = ".lock", "log.jsonl"
# The names of the two checkpoints of a run.
STATE, MODEL = "state", "model"
# What says that a folder holds a run to go on with, a trained model, the results of a run.
STATE_FILE, MODEL_FILE, RECORD = f"{STATE}.safetensors", f"{MODEL}.safetensors", "run.json"
# The folders of the stages of a run with a head.
CLASSIFIER, HEAD = "classifier", "head"
STAGES = tuple(f"{stage}/{STATE_FILE}" for stage in (CLASSIFIER, HEAD))
STATES = (STATE_FILE, *STAGES)
RESULTS = (*STATES, MODEL_FILE, RECORD, "metrics.csv", "scores.npz")

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    r"""How far a run came.

    Attributes:
        step: The number of steps done.
        finished: Whether that is all of them.
        reason: Why the run stopped.
        seconds: The training time so far, resumed parts included.
        best: The validation of the selected step, empty if there was none.
        history: Every validation.
        learnt: What was trained beside networks, after the last step: `path`, the numbers of a
            learnable path. Empty before that.
        amp: The precision of the training: `none`, `bf16` or `fp16`; empty while it is not decided.
        steps: The number of all steps.
        scores: The scores of the validation of the selected step, of held-out ID data (`id`) and
            reference (`near`): of each the log-ratios, larger = more ID, with shape :math:`(N)`, the
            labels and the names, as :meth:`~ood_osdre.evaluation.scores.Scores.add` takes them.
            Empty where a validation keeps none, or an earlier run made it: no checkpoint has them.
    """

    step: int = 0
    finished: bool = False
    reason: str = ""
    seconds: float = 0.0
    best: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    learnt: dict[str, Any] = field(default_factory=dict)
    amp: str = ""
    steps: int = 0
    scores: dict[str, Any] = field(default_factory=dict)


@contextmanager
def locked(folder: Path, option: str = "") -> Iterator[None]:
    r"""Locks a folder, created if needed, against other runs while the block lasts.

    The system ends the lock with the process, however that ends.

    Arguments:
        folder: The folder.
        option: What to put before the folder in messages, the name of an option.

    Raises:
        UserError: If another run has locked the folder, or it cannot be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        os.fspath(folder).encode()  # safetensors opens no other names
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except (OSError, ValueError) as error:  # the second of a null character, or no UTF-8
        reason = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, Timeout):
            reason = "another run is writing here"
        raise UserError(f"{f'{option} {folder}'.strip()!r}: {reason}.") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def held_folder(folder: Path | None, resume: bool) -> Iterator[None]:
    r"""Holds a folder, if there is one, against other runs; only `resume` goes on with a run."""
    if folder is None:
        yield
        return
    with locked(folder):
        if not resume and holds(folder, STATE_FILE, MODEL_FILE):
            raise UserError(
                f"{folder}: holds a run already; go on with resume=True or choose another folder."
            )
        sweep(folder, age=0)
        yield


def holds(folder: Path, *names: str) -> bool:
    r"""Returns whether a folder has one of some files; false for names no file can have."""
    return any(os.path.exists(folder / name) for name in names)


def of_seed(folder: Path, seed: int) -> Path:
    r"""Returns the folder of a seed in a run of several, else the folder itself."""
    seeded = folder / f"seed-{seed}"
    return seeded if seeded.is_dir() else folder


def refuse_existing(out: Path, folders: Mapping[int, Path], resume: bool) -> None:
    r"""Raises a :class:`UserError` if results would be written over others.

    Arguments:
        out: The folder of all seeds.
        folders: The folder of each seed.
        resume: Whether runs are to go on.
    """
    several = len(folders) > 1
    others = [out] if several else sorted(out.glob("seed-*") if os.path.isdir(out) else ())
    expected = "one seed's" if several else "several seeds'"
    found = [f"{f}: holds {expected} run" for f in others if holds(f, *STATES)]
    for folder in folders.values():
        if not resume and holds(folder, *RESULTS):
            found.append(f"{folder}: holds a run already; go on with --resume")
        if resume and holds(folder, RECORD) and not holds(folder, *STATES):
            found.append(f"{folder}: holds an evaluation, no training")
    if found:
        raise UserError(f"{found[0]}, or choose another --out.")


def refuse_other_level(folder: Path, head: bool) -> None:
    r"""Raises a :class:`UserError` if a folder holds a run with a head, or one without.

    Arguments:
        folder: The folder.
        head: Whether the run that is to go on there has a head.
    """
    if holds(folder, *((STATE_FILE,) if head else STAGES)):
        kind = "without" if head else "with"
        raise UserError(f"{folder}: holds a run {kind} a head; choose another --out.")


def check_finished(outcome: Outcome, steps: int, folder: Path | None = None) -> None:
    r"""Raises a :class:`UserError` if something stopped a training, saved in a folder or not."""
    if not outcome.finished:
        where = "" if folder is None else f"; saved in {folder}, go on with resume=True"
        raise UserError(
            f"fit: stopped ({outcome.reason}) at step {outcome.step} of {steps}{where}."
        )


class RunLog:
    r"""The log of a run, `log.jsonl`, one JSON object a line, each time written whole.

    Arguments:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG
        self.lines: list[str] = []

    def start(self, step: int) -> None:
        r"""Drops what a run that was interrupted logged after its last checkpoint.

        Arguments:
            step: The step of the checkpoint, 0 without one.
        """
        text = self.path.read_text(errors="replace") if self.path.is_file() else ""
        self.lines = [line for line in text.splitlines() if _step_of(line) <= step]
        self._save()

    def write(self, entry: Mapping[str, Any]) -> None:
        r"""Appends an entry: named numbers, the step among them, and what the objective learns."""
        self.lines.append(json.dumps(entry))
        self._save()

    def _save(self) -> None:
        write_text_atomic(self.path, "".join(f"{line}\n" for line in self.lines))


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
    r"""Returns the step of a line; infinity for a line that was damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
