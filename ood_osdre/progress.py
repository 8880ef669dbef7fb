r"""Progress: a bar on a terminal, a line every ten seconds in a log file or a pipe."""

__all__ = ["Bar"]

import sys
import time
from typing import Any

from tqdm import tqdm

EVERY = 10.0  # seconds
# What has to be done, beside the first part, before the time to go is told: the first part waits for
# whatever is built or measured once.
LEAST = 5
UNTIMED = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
# What a unit is called of several.
PLURALS = {"img": "images"}


class Bar(tqdm):
    r"""A progress bar of tqdm, which writes lines where its file, standard error, is no terminal."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401
        file = options.get("file") or sys.stderr
        self.is_live = bool(getattr(file, "isatty", lambda: False)())
        self.written = -EVERY
        self.begun: tuple[float, float] | None = None  # what the first part did, and when
        if not self.is_live:
            options |= {"mininterval": EVERY, "maxinterval": EVERY, "delay": EVERY}
        super().__init__(*args, **options)

    def update(self, n: float | None = 1) -> bool | None:
        r"""Advances the bar."""
        displayed = super().update(n)
        if self.begun is None:
            self.begun = self.n, time.monotonic()
        return displayed

    @property
    def format_dict(self) -> Any:  # noqa: ANN401
        r"""What tqdm formats; the rate is that of what followed the first part."""
        now = super().format_dict
        if self.disable or self.total is None:
            return now
        first, at = self.begun or (self.n, 0.0)
        if self.n - first < LEAST:
            return now | {"rate": None, "bar_format": UNTIMED}
        return now | {"rate": (self.n - first) / max(time.monotonic() - at, 1e-9)}

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
        is_one = (self.n if self.total is None else self.total) == 1
        unit = self.unit if is_one else PLURALS.get(self.unit, f"{self.unit}s")
        line = f"{now['prefix']} {self.n:,}{of} {unit}, {self.format_interval(now['elapsed'])}"
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
