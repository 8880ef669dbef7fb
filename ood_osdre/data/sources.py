r"""What may be read from disk: regular files, folders, and arrays mapped from files.

Whoever opens a FIFO waits for its writer, and a device never ends, so neither is ever opened.
"""

__all__ = ["is_folder", "is_regular", "map_array", "stat"]

import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from tokenize import TokenError
from typing import Any

import numpy as np

from ..errors import UserError, one_line

# The header of an array is a Python literal; a damaged one fails in any of these ways.
DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    SyntaxError,
    TokenError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def stat(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    r"""Returns the size and modification time of a file; None if there is none.

    Of what is no regular file the size is 0.
    """
    try:
        result = os.stat(path)
    except (OSError, ValueError):  # absent, too long a name, no permission
        return None
    return (result.st_size if S_ISREG(result.st_mode) else 0), result.st_mtime_ns


def is_regular(path: str | os.PathLike[str]) -> bool:
    r"""Returns whether a path leads to a regular file; unlike pathlib's it never fails."""
    return S_ISREG(_mode(path))


def is_folder(path: str | os.PathLike[str]) -> bool:
    r"""Returns whether a path leads to a folder; unlike pathlib's it never fails."""
    return S_ISDIR(_mode(path))


def _mode(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):
        return 0


def map_array(path: Path) -> np.memmap[Any, Any]:
    r"""Maps a `.npy` array copy-on-write: it may be written to, which changes no file.

    Arguments:
        path: The file, whatever its name says it is.

    Raises:
        UserError: If it is no array, not whole, or an array of Python objects.
    """
    if not is_regular(path):
        raise UserError(f"{path}: no such file")
    try:
        # Not `np.load`, which takes archives and pickles too, whatever they are called.
        return np.lib.format.open_memmap(path, mode="c")
    except DAMAGE as error:
        detail = one_line(error, 80)
        raise UserError(f"{path}: not a whole .npy array ({detail})") from None
