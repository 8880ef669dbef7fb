r"""Types of command-line options: numbers with a range, and an error that names it."""

__all__ = ["count", "number"]

import argparse
import math
from collections.abc import Callable


def count(low: int, high: int | None = None) -> Callable[[str], int]:
    r"""Returns the type of an option that takes whole numbers of an interval.

    Arguments:
        low: The least of them.
        high: The largest; None for no bound.
    """
    expected = f"at least {low}" if high is None else f"{low} to {high}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"got {text}, expected a whole number, {expected}")
        return value

    return read


def number(above: float | None = None) -> Callable[[str], float]:
    r"""Returns the type of an option that takes finite numbers from 0.

    Arguments:
        above: What they have to exceed; None if 0 is one of them.
    """
    expected = "at least 0" if above is None else f"above {above:g}"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 <= value < math.inf and (above is None or value > above)):
            raise argparse.ArgumentTypeError(f"got {text}, expected a number {expected}")
        return value

    return read
