r"""Reading and writing files that can be trusted.

A result is written under a temporary name beside its final place, flushed to the disk and renamed
(:func:`atomic_path`). A reader, or a run that was killed, sees the old file or the new one, never a
half. JSON has no NaN and no infinity: :func:`as_json` refuses them and names their key. Arrays are
mapped from regular files alone: opening a FIFO waits for its writer, and a device never ends.
"""

__all__ = [
    "ARRAYS",
    "as_json",
    "atomic_path",
    "is_folder",
    "is_regular",
    "local",
    "map_array",
    "parse_rows",
    "read_array",
    "read_columns",
    "stat",
    "sweep",
    "write_json_atomic",
    "write_text_atomic",
]

import csv
import dataclasses
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from stat import S_ISREG
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from .errors import UserError, one_line

# Unlike pathlib's methods, these two never raise an error.
is_regular, is_folder = os.path.isfile, os.path.isdir

# What numpy raises for a damaged array, whose header is a Python literal.
DAMAGE: tuple[type[Exception], ...] = (OSError, ValueError, EOFError, SyntaxError, TokenError)
DAMAGE += (TypeError, OverflowError, MemoryError, RecursionError, BadZipFile)
#: The suffixes of files of numbers that :func:`read_array` reads.
ARRAYS = (".npy", ".npz", ".csv")
#: What the array of classes is called in an archive.
LABELS = ("labels", "label", "y")
# What stands where a value is missing: of such alone there is no line of names.
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "none", "null", "?", "-"}
# The least number of columns of which `0,1,2` are names, as pandas writes them, and no row of numbers.
COUNTED = 3


def local(path: str | os.PathLike[str]) -> Path:
    r"""Returns a path as the user means it, `~` being their home: no shell has expanded it yet."""
    found = Path(os.path.expanduser(path))
    if found.parts[:1] == ("~",):  # a container's user who is in no list of users
        raise UserError(f"{path}: there is no home folder and no HOME, expected a path without ~.")
    return found


@contextmanager
def atomic_path(path: str | os.PathLike[str], flush: bool = True) -> Iterator[Path]:
    r"""Gives a temporary path that becomes `path` if the block succeeds and vanishes if not.

    The temporary file is in the folder of `path`, which is created if needed, and has its suffix.
    Symbolic links are followed. A device or FIFO is given itself, and written in place.

    Arguments:
        path: The file to create or replace.
        flush: Whether the content reaches the disk before it gets its name. Without, a power cut
            may lose the file; flushing thousands of small ones takes too long.

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
    place = local(path)
    try:
        target = Path(os.path.realpath(place))  # fails in a working folder that was removed
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp{target.suffix}")
        # Asked of the place, not the target: a link such as /dev/stdout may have none with a name.
        if os.path.exists(place) and not (is_regular(place) or is_folder(place)):
            yield place
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)  # unlike tempfile, respects the umask
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


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sweep(folder: Path, age: float = 86_400.0) -> None:
    r"""Removes temporary files that killed processes left.

    Arguments:
        folder: The folder.
        age: The age in seconds from which a file counts as abandoned.
    """
    for path in folder.glob(".*.tmp*"):
        if re.fullmatch(r"\.[0-9a-f]{32}\.tmp.*", path.name):  # ours
            with suppress(OSError):  # another process was faster
                if time.time() - path.stat().st_mtime >= age:
                    path.unlink()


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    r"""Writes a text file atomically, in UTF-8, with line ends as they are."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json_atomic(path: str | os.PathLike[str], obj: object) -> None:
    r"""Writes a JSON file atomically; for what it may hold see :func:`as_json`.

    Raises:
        UserError: If JSON cannot hold a value, whose key is named, or the file cannot be written.
    """
    try:
        plain = as_json(obj)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    write_text_atomic(path, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def as_json(obj: object) -> object:
    r"""Returns an object in the types of JSON, as reading its file would give it.

    Arguments:
        obj: Mappings, sequences, dataclasses, named tuples, paths (as they were given), NumPy
            scalars and arrays, and what JSON has.

    Raises:
        ValueError: If a number is NaN or infinite, or JSON has no such type; the message names the
            key.
    """
    return json.loads(json.dumps(_plain(obj, ""), allow_nan=False))


def _plain(obj: object, key: str) -> object:
    if obj is None or isinstance(obj, str | bool | int):
        return obj
    if isinstance(obj, float) and math.isfinite(obj):
        return float(obj)
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    if isinstance(obj, np.generic | np.ndarray):
        return _plain(obj.tolist(), key)
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return _plain({f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}, key)
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return _plain(obj._asdict(), key)
    if isinstance(obj, Mapping) and all(map(_is_name, obj)):
        return {str(k): _plain(v, f"{key}.{k}".lstrip(".")) for k, v in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, bytes | bytearray):
        return [_plain(v, f"{key}[{i}]") for i, v in enumerate(obj)]
    found = obj if isinstance(obj, float | Mapping) else type(obj).__name__
    raise ValueError(f"{key!r} is {found}, expected finite numbers, text, lists or named values")


def _is_name(name: object) -> bool:
    return isinstance(name, str | int) and not isinstance(name, bool)


def stat(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    r"""Returns the size and modification time of a file, None if there is none.

    The size of anything but a regular file is 0.
    """
    try:
        result = os.stat(path)
    except (OSError, ValueError):  # absent, too long a name, no permission
        return None
    return (result.st_size if S_ISREG(result.st_mode) else 0), result.st_mtime_ns


def map_array(path: Path) -> np.memmap[Any, Any]:
    r"""Maps a `.npy` array copy-on-write: it may be written to, and the file does not change.

    Arguments:
        path: The file, whatever its name says it is.

    Raises:
        UserError: If it is no regular file, no whole array, or an array of Python objects.
    """
    try:
        if os.path.isfile(path):
            # Not `np.load`, which also takes archives and pickles, whatever their names.
            return np.lib.format.open_memmap(path, mode="c")
        reason = "no such file"
    except DAMAGE as error:
        reason = f"not a whole .npy array ({one_line(error, 80)})"
    raise UserError(f"{path}: {reason}")


def read_array(path: Path) -> tuple[NDArray[Any], NDArray[Any] | None, list[str] | None]:
    r"""Returns the array of a `.npy`, `.npz` or `.csv` file, its labels and its rows' names if it has any.

    An archive holds one array, or one beside `labels`. A `.csv` file holds rows of numbers, with or
    without a line of names above them, and each is called by its line, `line 2`.

    Arguments:
        path: The file; a `.npy` file is mapped (:func:`map_array`).

    Raises:
        UserError: If it cannot be read, or holds something else.
    """
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return map_array(path), None, None
    try:
        if not os.path.isfile(path):
            raise OSError("no such file")
        if suffix == ".csv":
            with path.open(encoding="utf-8-sig") as lines:
                array, numbers = _joined(parse_rows(lines)[1])
                return array, None, [f"line {number}" for number in numbers]
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except DAMAGE as error:
        raise UserError(f"{path}: cannot be read ({one_line(error, 100)})") from None
    labels = next((found.pop(name) for name in LABELS if name in found), None)
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise UserError(f"{path}: got the arrays {names}, expected one, or one beside labels.")
    return next(iter(found.values())), labels, None


def _joined(
    rows: Iterable[tuple[int, NDArray[np.float64] | str]],
) -> tuple[NDArray[np.float64], list[int]]:
    r"""Returns rows as one array, with shape :math:`(N, d)`, and the lines that they stand in."""
    array: list[NDArray[np.float64]] = []
    numbers, first, bad = [], "", 0
    for number, row in rows:
        if isinstance(row, str) or (array and len(row) != len(array[0])):
            problem = row if isinstance(row, str) else f"{len(row)} numbers, not {len(array[0])}"
            first, bad = first or f"line {number} of the file: {problem}", bad + 1
        else:
            array.append(row)
            numbers.append(number)
    if bad or not array:
        raise ValueError(first + f"; {bad} such lines" * (bad > 1) or "no rows of numbers")
    return np.stack(array), numbers


def parse_rows(
    lines: Iterable[str],
) -> tuple[tuple[str, ...], Iterator[tuple[int, NDArray[np.float64] | str]]]:
    r"""Returns the names of a table's columns, and its rows: the numbers or what is wrong with them.

    Empty lines are left out. Names are in the first line if no number is in it, or if those of pandas
    are, `0,1,2` and so on, of three columns at least. A first column without a name, which pandas
    writes for the index, is left out. Numbers are parted by commas, else semicolons, else white space.

    Arguments:
        lines: The lines, of which the first is read at once.

    Returns:
        The names, none without such a line; and, for each row, the number of its line, from 1, and its
        numbers, with shape :math:`(d)`, or the problem.
    """
    numbered = ((i, line) for i, line in enumerate(lines, start=1) if line.strip())
    first = list(islice(numbered, 1))
    names = _names(first[0][1]) if first else ()
    skipped = int(len(names) > 1 and not names[0])
    rows = numbered if names else chain(first, numbered)
    return names[skipped:], ((i, _row(line, skipped, len(names))) for i, line in rows)


def _fields(line: str) -> list[str]:
    line = line.strip()
    fields = line.split(next((mark for mark in ",;" if mark in line), None))
    return [field.strip(' "') for field in fields]


def _names(line: str) -> tuple[str, ...]:
    r"""Returns the names that a line has; none of a row."""
    fields = _fields(line)
    if any(math.isfinite(_number(field)) for field in fields):
        counted = list(map(str, range(len(fields))))
        is_header = fields == ["", *counted[:-1]] or (fields == counted and len(fields) >= COUNTED)
        return tuple(fields) if is_header else ()
    if '"' in line:  # which may hold what parts the others
        mark = next((mark for mark in ",;\t" if mark in line), " ")
        with suppress(csv.Error):
            fields = next(csv.reader([line.strip()], delimiter=mark, skipinitialspace=True))
    return tuple(fields) if any(field.lower() not in MISSING for field in fields) else ()


def _row(line: str, skipped: int, expected: int) -> NDArray[np.float64] | str:
    fields = _fields(line)
    if expected and len(fields) != expected:
        return f"{len(fields)} values, not {expected} as the line of names"
    row = np.array(list(map(_number, fields[skipped:])))
    bad = np.flatnonzero(~(np.abs(row) <= np.finfo(np.float32).max))
    if bad.size:
        return f"no number in single precision: {fields[skipped + bad[0]]!r:.40}"
    return row


def _number(field: str) -> float:
    r"""Returns the number of a field, NaN if it has none."""
    try:
        return math.nan if "_" in field else float(field)  # Python takes 1_0 for ten
    except ValueError:
        return math.nan


def read_columns(path: Path) -> tuple[str, ...]:
    r"""Returns the names of the columns of a `.csv` file; none where it or another file has none."""
    if path.suffix.lower() != ".csv" or not is_regular(path):
        return ()
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return parse_rows(lines)[0]
