r"""The one exception that a command turns into a one-line message, and how it does."""

__all__ = ["UserError", "exit_status", "one_line"]

import sys
from collections.abc import Callable

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
