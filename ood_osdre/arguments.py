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


def number(positive: bool = False) -> Callable[[str], float]:
    r"""Returns the type of an option that takes finite numbers from 0.

    Arguments:
        positive: Whether 0 is none of them.
    """
    expected = "above 0" if positive else "at least 0"

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf or (positive and value == 0):
            raise argparse.ArgumentTypeError(f"got {text}, expected a finite number {expected}")
        return value

    return read
