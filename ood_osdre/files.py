r"""Writing files so that they can be trusted later: whole, and without NaN.

Every result goes through :func:`atomic_path`: it is written next to its final place under a
temporary name, flushed to the disk and renamed. A reader, or a run that was killed, sees the old
file or the new one, never half of one.

JSON has no NaN and no infinity, so neither is ever written: :func:`write_json_atomic` refuses
them by their key.

What may be read from disk: regular files, folders, and arrays mapped from files.

Whoever opens a FIFO waits for its writer, and a device never ends, so neither is ever opened.
"""

__all__ = [
    "as_json",
    "atomic_path",
    "is_folder",
    "is_regular",
    "map_array",
    "stat",
    "sweep",
    "write_json_atomic",
    "write_text_atomic",
]

import dataclasses
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from tokenize import TokenError
from typing import Any

import numpy as np

from .errors import UserError, one_line


@contextmanager
def atomic_path(path: str | os.PathLike[str], flush: bool = True) -> Iterator[Path]:
    r"""Gives a temporary path that becomes `path` if the block succeeds and vanishes if not.

    The temporary file lies in the folder of `path`, which is created if needed, and has its
    suffix. Symbolic links are followed.

    Arguments:
        path: The file to create or replace.
        flush: Whether the content reaches the disk before it gets its name. Without, a file may
            be lost with the machine's power, which thousands of small ones are not worth.

    Raises:
        UserError: If the file cannot be written.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with atomic_path(f"{folder}/run/log.txt") as temporary:
        ...         size = temporary.write_text("done")
        ...     [path.name for path in Path(folder, "run").iterdir()]
        ['log.txt']
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp{target.suffix}")

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Unlike tempfile, respects the umask
        temporary.touch(exist_ok=False)

        try:
            yield temporary
            if flush:
                _flush(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

        if flush:
            _flush(target.parent)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    r"""Writes a text file, in UTF-8, atomically.

    Arguments:
        path: The file to create or replace.
        text: Its content; line ends stay as they are.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json_atomic(path: str | os.PathLike[str], obj: object) -> None:
    r"""Writes a JSON file atomically.

    Mappings, sequences, dataclasses, paths (as they were given) and NumPy scalars and arrays are
    accepted.

    Arguments:
        path: The file to create or replace.
        obj: What to write.

    Raises:
        UserError: If a number is NaN or infinite, or if a value has no JSON form; the message
            holds its key. Nothing is written.
    """
    try:
        plain = as_json(obj)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None

    write_text_atomic(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def as_json(obj: object) -> object:
    r"""Returns an object in the types of JSON, as reading its file would give it.

    Raises:
        ValueError: If a number is NaN or infinite, or if a value has no JSON form; the message
            holds its key.
    """
    return json.loads(json.dumps(_plain(obj, ""), allow_nan=False))


def sweep(folder: Path, age: float = 86_400.0) -> None:
    r"""Removes temporary files that killed processes left.

    Arguments:
        folder: The folder.
        age: The age in seconds from which a file is taken for abandoned.
    """
    for path in folder.glob(".*.tmp*"):
        if not re.fullmatch(r"\.[0-9a-f]{32}\.tmp.*", path.name):  # somebody else's
            continue
        try:
            if time.time() - path.stat().st_mtime >= age:
                path.unlink()
        except OSError:  # another process was faster
            continue


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return

    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)

    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _plain(obj: object, key: str) -> object:
    r"""Converts to what JSON has, or names the key that it cannot hold."""
    if obj is None or isinstance(obj, str | bool | int):
        return obj
    if isinstance(obj, float):
        if not math.isfinite(obj):
            raise ValueError(f"'{key}' is {obj}, expected a finite number")
        return float(obj)
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, np.generic | np.ndarray):
        return _plain(obj.tolist(), key)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        names = [f.name for f in dataclasses.fields(obj)]
        return _plain({name: getattr(obj, name) for name in names}, key)
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return _plain(obj._asdict(), key)
    if isinstance(obj, Mapping):
        return {_name(k, key): _plain(v, f"{key}.{k}" if key else str(k)) for k, v in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, bytes | bytearray):
        return [_plain(v, f"{key}[{i}]") for i, v in enumerate(obj)]

    raise ValueError(f"'{key}' is a {type(obj).__name__}, which JSON cannot hold")


def _name(name: object, key: str) -> str:
    if isinstance(name, str | int) and not isinstance(name, bool):
        return str(name)

    raise ValueError(f"'{key}' has the key {name!r}, expected a string")


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
