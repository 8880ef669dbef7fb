r"""Signals as a request to stop, so that a run can save before it ends."""

__all__ = ["caught_signals"]

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
