r"""Mistakes of a user: one exception, one line on standard error, and what may have been meant.

:func:`exit_status` runs a command and prints its :class:`UserError`. A :class:`Parser` reads its
arguments, :func:`count`, :func:`number` and :func:`rate` are types of options, :func:`nearest` guesses
at a misspelt name.
"""

__all__ = [
    "RATE",
    "Parser",
    "UserError",
    "count",
    "counted",
    "did_you_mean",
    "exit_status",
    "first",
    "nearest",
    "number",
    "one_line",
    "rate",
]

import argparse
import difflib
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

SHOWN = 10
FAILED, INTERRUPTED, CLOSED = 2, 130, 141
# Half of a word's letters agree with too many other words by chance.
CUTOFF = 0.6
#: What messages call a share of inputs that may be flagged.
RATE = "a rate above 0 and below 1"

T = TypeVar("T", int, float)


class UserError(ValueError):
    r"""A mistake the user can correct: which file or key, what was found, what was expected.

    Commands print the message as one line and exit with status 2, see :func:`exit_status`.
    """


class Parser(argparse.ArgumentParser):
    r"""Parses arguments: texts of the help keep their lines, and a mistake is told in one."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of argparse
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        r"""Ends the process with the status of a user's error."""
        self.exit(FAILED, f"{self.prog}: error: {' '.join(message.split())} (see --help)\n")


def exit_status(command: Callable[[], int]) -> int:
    r"""Runs a command and returns its exit status, 2 for a user's error, 130 if interrupted.

    SIGTERM does what Ctrl-C does, so that what is half-written goes. A training catches both, to save.
    Where the reader of its output has gone, as `head` goes, it ends without a word and with 141, which
    is what a shell says of `cat` then. Where standard error is closed, messages go nowhere: `print`
    would write them to standard output, among the results.

    Arguments:
        command: What to run once the arguments are parsed. Returns an exit status.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process
    try:
        status = _told(command)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - Python writes what is left at its end
        return CLOSED
    return status


def _told(command: Callable[[], int]) -> int:
    is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, previous)


def one_line(error: BaseException, limit: int | None = 100) -> str:
    r"""Returns the message of another library's error on one line, to quote in ours.

    Arguments:
        error: The error.
        limit: The number of characters to cut it to; None leaves it whole.
    """
    return " ".join(str(error).split())[:limit]


def count(low: int, high: int | None = None) -> Callable[[str], int]:
    r"""Returns the type of a command-line option that takes whole numbers of an interval.

    Arguments:
        low: The least of them.
        high: The largest; None for no bound.
    """
    limit = math.inf if high is None else high
    bounds = f"at least {low}" if high is None else f"{low} to {high}"
    return _checked(int, lambda n: low <= n <= limit, f"a whole number, {bounds}")


def counted(number: int, noun: str, verb: str = "") -> str:
    r"""Returns a number of things in words.

    Arguments:
        number: The number.
        noun: What they are, of one of them.
        verb: What follows, `is|are` for instance, of one and of several.

    Example:
        >>> counted(1, "file", "is|are"), counted(1200, "file", "is|are")
        ('1 file is', '1,200 files are')
    """
    verbs = f"{verb}|{verb}".split("|")
    text = f"{number:,} {noun}{'' if number == 1 else 's'} {verbs[number != 1]}"
    return text.rstrip()


def first(items: Sequence[str], noun: str) -> str:
    r"""Joins the first ten items, after their number: `"12 files: a, b, ... and 2 more"`."""
    # A line break within a name would break the message.
    shown = [item if item.isprintable() else ascii(item) for item in items[:SHOWN]]
    more = f" ... and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    plural = noun if len(items) == 1 else f"{noun}s"
    return f"{len(items)} {plural}: {', '.join(shown)}{more}"


def number(positive: bool = False) -> Callable[[str], float]:
    r"""Returns the type of a command-line option that takes finite numbers from 0.

    Arguments:
        positive: Whether 0 is refused.
    """
    bounds = "above 0" if positive else "at least 0"
    return _checked(
        float, lambda x: 0 <= x < math.inf and (x > 0 or not positive), f"a finite number {bounds}"
    )


def rate(text: str) -> float:
    r"""Returns the rate, above 0 and below 1, that a command-line option gives."""
    return _checked(float, lambda x: 0 < x < 1, RATE)(text)


def _checked(
    kind: Callable[[str], T], holds: Callable[[T], bool], expected: str
) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            if holds(value := kind(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")

    return read


def nearest(word: str, choices: Iterable[str]) -> str | None:
    r"""Returns the choice closest in spelling to `word`, None if none is close.

    A choice with dots also matches by its last part alone: `steps` finds `training.steps`.

    Arguments:
        word: What was written.
        choices: What could have been meant.
    """
    choices = list(choices)
    whole = [c.lower() for c in choices]
    tails = [c.rpartition(".")[2] for c in whole]
    word = word.lower()
    if word in tails:
        return choices[tails.index(word)]
    if word and sum(c.startswith(word) for c in whole) == 1:
        return next(c for c in choices if c.lower().startswith(word))
    for names in (whole, tails):
        for match in difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF):
            return choices[names.index(match)]
    return None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    r"""Returns `" (did you mean 'x'?)"` with the nearest choice, or an empty string.

    Arguments:
        word: What was written.
        choices: What could have been meant.

    Example:
        >>> did_you_mean("cifar_10", ["cifar10", "cifar100", "digits"])
        " (did you mean 'cifar10'?)"
        >>> did_you_mean("imagenet", ["cifar10", "digits"])
        ''
    """
    near = nearest(word, choices)
    return f" (did you mean {near!r}?)" if near else ""
