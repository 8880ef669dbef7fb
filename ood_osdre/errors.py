r"""The one exception that a command turns into a one-line message, and how it does.

What a mistyped word may have meant.
"""

__all__ = ["UserError", "did_you_mean", "exit_status", "nearest", "one_line"]

import difflib
import sys
from collections.abc import Callable, Iterable

FAILED, INTERRUPTED = 2, 130


class UserError(ValueError):
    r"""Something the user can mend: which file or key, what was found, what was expected.

    Commands print the message as one line on standard error and exit with status 2, see
    :func:`exit_status`.
    """


def one_line(error: BaseException, limit: int | None = 100) -> str:
    r"""Returns the message of another library's error on one line, to be part of ours.

    Arguments:
        error: The error.
        limit: The number of characters to cut it to; None leaves it whole.
    """
    return " ".join(str(error).split())[:limit]


def exit_status(command: Callable[[], int]) -> int:
    r"""Runs a command and returns its exit status; what the user can mend is told in one line.

    Arguments:
        command: What to run, given that arguments are parsed. Returns an exit status.

    Returns:
        Its status, 2 for a :class:`UserError`, 130 for an interruption.
    """
    try:
        return command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED


# Half of a word's letters agree with too many others by chance.
CUTOFF = 0.6


def nearest(word: str, choices: Iterable[str]) -> str | None:
    r"""Returns the choice closest in spelling to `word`, None if none is close.

    A choice with dots may also be met by its last part alone: `steps` for `training.steps`.

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
