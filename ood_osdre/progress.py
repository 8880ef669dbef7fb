r"""Progress: a bar on a terminal, a line every ten seconds in a log file or a pipe."""

__all__ = ["Bar"]

import sys
import time
from typing import Any

from tqdm import tqdm

EVERY = 10.0  # seconds


class Bar(tqdm):
    r"""A progress bar of tqdm, which writes lines where its file, standard error, is no terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        file = options.get("file") or sys.stderr
        self.is_live = bool(getattr(file, "isatty", lambda: False)())
        self.written = -EVERY
        if not self.is_live:
            options |= {"mininterval": EVERY, "maxinterval": EVERY, "delay": EVERY}
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> object:
        r"""Shows how far it is."""
        if self.is_live:
            return super().display(msg, pos)
        # tqdm's own thread, which helps slow loops, knows no interval.
        if time.monotonic() < self.written + EVERY:
            return False
        self.written = time.monotonic()
        now = self.format_dict
        of = "" if self.total is None else f" of {self.total:,}"
        line = (
            f"{now['prefix']} {self.n:,}{of} {self.unit}, {self.format_interval(now['elapsed'])}"
        )
        if self.total and now["rate"]:
            line += f", {self.format_interval((self.total - self.n) / now['rate'])} to go"
        self.fp.write(f"{line}{', ' if now['postfix'] else ''}{now['postfix'] or ''}\n".lstrip())
        return True

    def set_postfix(self, *args: Any, refresh: bool = True, **numbers: object) -> None:  # noqa: ANN401
        r"""Sets the numbers that follow."""
        super().set_postfix(*args, refresh=refresh and self.is_live, **numbers)

    def close(self) -> None:
        r"""Ends the bar; lines end by themselves."""
        if not self.is_live:
            self.leave, self.delay = False, float("inf")
        super().close()
