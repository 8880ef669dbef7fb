r"""The one exception that a command turns into a one-line message."""

__all__ = ["UserError"]


class UserError(ValueError):
    r"""Something the user can mend: which file or key, what was found, what was expected.

    Commands print the message as one line on standard error and exit with status 2.
    """
