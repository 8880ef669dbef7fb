r"""Tables of numbers: five of the field's from their files, beside those that scikit-learn ships.

POWER, GAS, HEPMASS, MINIBOONE and BSDS300 are read from the files of the paper that introduced
their preprocessing, which is followed step by step, and the manifest `tabular` says what has to
come out: the columns and the rows of each part. Nothing is downloaded.

Any other table is a file of numbers, `.csv` or `.npy`, with one row an observation.

References:
    | Masked autoregressive flow for density estimation (Papamakarios et al., 2017)
    | https://arxiv.org/abs/1705.07057
"""

__all__ = ["SHIPPED", "Table", "is_file_name", "load_table", "read_numbers", "table_names"]

import importlib
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, one_line
from ..options import read_yaml
from ..resources import find
from ..spelling import did_you_mean
from .shipped_tables import (
    SHIPPED,
    Array,
    Parts,
    check_rows,
    shipped_table,
    shuffled_parts,
    standardised,
)

if TYPE_CHECKING:
    import pandas as pd

# The tables that are one array in a file, and those of more files than one.
ARRAYS, RAW_FILES = ("power", "miniboone"), {"hepmass": 2}
GAS_LABELS = ("Meth", "Eth", "Time")
# What unpickling a damaged file, or one of absent modules, is known to raise.
DAMAGED_PICKLE = (
    pickle.UnpicklingError,
    OSError,
    EOFError,
    ImportError,
    AttributeError,
    LookupError,
    ValueError,
    TypeError,
    MemoryError,
)


@dataclass(frozen=True)
class Table:
    r"""The three parts of a table.

    Attributes:
        name: The name of the table.
        train: The training rows, with shape :math:`(N, d)`.
        val: The validation rows.
        test: The test rows.
    """

    name: str
    train: Array
    val: Array
    test: Array

    @property
    def dim(self) -> int:
        r"""The number of columns."""
        return self.train.shape[1]


def table_names(manifest: str | Path = "tabular") -> tuple[str, ...]:
    r"""Returns the names of all tables, those that need no file first."""
    return (*SHIPPED, *_entries(find("data_manifests", str(manifest))))


def load_table(
    name: str, root: str | Path | None = None, manifest: str | Path = "tabular"
) -> Table:
    r"""Loads a table.

    Arguments:
        name: One of :func:`table_names`, or the path of a file of numbers.
        root: The folder of the files; those that scikit-learn ships need none.
        manifest: The manifest, by name or path.

    Raises:
        UserError: If there is no such table, or its files are absent or not what the manifest
            says.

    Example:
        >>> load_table("wine").train.shape
        (142, 13)
    """
    if is_file_name(name):
        with np.errstate(invalid="ignore", divide="ignore"):
            parts = shuffled_parts(read_numbers(Path(name)))
        check_rows(f"{name}, its training part", parts[0], least=0)
        return Table(Path(name).name, *parts)
    if name in SHIPPED:
        return Table(name, *shipped_table(name))
    source = find("data_manifests", str(manifest))
    entries = _entries(source)
    if name not in entries:
        known = (*SHIPPED, *entries)
        raise UserError(
            f"table: got {name!r}{did_you_mean(name, known)}, expected one of {', '.join(known)}."
        )
    entry = entries[name]
    if root is None:
        raise UserError(
            f"table {name}: no data root, expected the folder that holds {entry['files'][0]}."
        )
    paths = [Path(root) / file for file in entry["files"]]
    for path in paths:
        if not path.is_file():
            raise UserError(f"table {name}: {path} is absent; see 'get' in {source}.")
    parts = READERS[name](paths, entry)
    for part in parts:
        if part.ndim != 2:
            raise UserError(f"table {name}: a part of shape {part.shape}, expected (N, d).")
    found = [len(part) for part in parts]
    if found != list(entry["rows"]):
        raise UserError(f"table {name}: {found} rows, expected {list(entry['rows'])}.")
    for part in parts:
        if part.shape[1] != entry["dim"]:
            raise UserError(f"table {name}: {part.shape[1]} columns, expected {entry['dim']}.")
    if not all(np.isfinite(part).all() for part in parts):
        raise UserError(f"table {name}: a value is not finite, expected numbers only.")
    return Table(name, *parts)


def is_file_name(name: str) -> bool:
    r"""Returns whether a table's name is that of a file of numbers."""
    return Path(name).suffix.lower() in (".csv", ".npy")


def read_numbers(path: Path) -> Array:
    r"""Returns the rows of a file of numbers, a table with names of columns or an array.

    Arguments:
        path: The file, `.csv` or `.npy`.

    Raises:
        UserError: If it is absent, no table of finite numbers, has fewer than
            :data:`ood_osdre.tasks.shipped_tables.LEAST_ROWS` rows, or a column is constant.
    """
    if not path.is_file():
        raise UserError(f"{path}: is absent, expected a table of numbers.")
    if path.suffix.lower() == ".npy":
        x = _array(path)
    else:
        import pandas as pd

        try:
            frame = pd.read_csv(path)
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: not a table of numbers: {one_line(error)}.") from None
        _check_numbers(path, frame)
        x = frame.to_numpy(np.float64)
    check_rows(str(path), x)
    return x


def _entries(path: Path) -> Mapping[str, Any]:
    content = read_yaml(path)
    tables = content.get("tables") if isinstance(content, dict) else None
    if not isinstance(tables, dict):
        raise UserError(f"{path}: no 'tables', expected a mapping of names.")
    for name, entry in tables.items():
        missing = {"files", "dim", "rows"} - set(entry if isinstance(entry, dict) else ())
        if missing:
            raise UserError(f"{path}: tables.{name}: the key {min(missing)!r} is missing.")
        if name not in READERS:
            raise UserError(f"{path}: tables.{name}: expected one of {', '.join(READERS)}.")
        _check_entry(f"{path}: tables.{name}", entry, RAW_FILES.get(name, 1), name in ARRAYS)
    return tables


def _check_entry(where: str, entry: Mapping[str, Any], files: int, array: bool) -> None:
    def are(values: object, kind: type, length: int) -> bool:
        found = values if isinstance(values, list) else ()
        return len(found) == length and all(type(v) is kind for v in found)

    if not are(entry["files"], str, files):
        raise UserError(
            f"{where}.files: got {entry['files']!r}, expected {files} names of files in a list."
        )
    if not are(entry["rows"], int, 3):
        raise UserError(f"{where}.rows: got {entry['rows']!r}, expected three whole numbers.")
    if array and "raw_columns" not in entry:
        raise UserError(f"{where}: the key 'raw_columns' is missing.")
    for key in ("dim", "raw_columns") if array else ("dim",):
        if type(entry[key]) is not int or entry[key] < 1:
            raise UserError(f"{where}.{key}: got {entry[key]!r}, expected a number of columns.")


def _tenths(x: Array) -> Parts:
    r"""Cuts off the last tenth for testing, and the last tenth of the rest for validation."""
    test = int(0.1 * len(x))
    rest = x[: len(x) - test]
    val = int(0.1 * len(rest))
    return rest[: len(rest) - val], rest[len(rest) - val :], x[len(x) - test :]


def _array(path: Path, columns: int | None = None) -> Array:
    try:
        with path.open("rb") as file:
            x = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: not an array of numbers: {one_line(error)}.") from None
    if not isinstance(x, np.ndarray):
        raise UserError(f"{path}: an archive of arrays, expected one array of numbers.")
    if x.dtype.kind not in "fiu":
        raise UserError(f"{path}: not an array of numbers: its dtype is {x.dtype}.")
    if x.ndim != 2 or columns not in (None, x.shape[1]):
        raise UserError(
            f"{path}: an array of shape {x.shape}, expected {columns or 'rows and'} columns."
        )
    if not len(x):
        raise UserError(f"{path}: an array without rows.")
    return x.astype(np.float64)


def _power(paths: list[Path], entry: Mapping[str, Any]) -> Parts:
    rng = np.random.RandomState(42)
    x = _array(paths[0], entry["raw_columns"])
    rng.shuffle(x)
    # Without global reactive power and intensity, which the others determine.
    x = np.delete(x, [1, 3], axis=1)
    n = len(x)
    voltage, gap = 0.01 * rng.rand(n, 1), 0.001 * rng.rand(n, 1)
    meters, time = rng.rand(n, 3), np.zeros((n, 1))
    parts = _tenths(x + np.hstack([gap, voltage, meters, time]))
    return standardised(parts, np.vstack(parts[:2]))


def _gas(paths: list[Path], entry: Mapping[str, Any]) -> Parts:
    import pandas as pd

    try:
        frame = pd.read_pickle(paths[0])
    except DAMAGED_PICKLE as error:
        raise UserError(f"{paths[0]}: cannot be unpickled: {one_line(error)}.") from None
    if not isinstance(frame, pd.DataFrame):
        raise UserError(
            f"{paths[0]}: holds an object of type {type(frame).__name__}, expected a DataFrame."
        )
    absent = [c for c in GAS_LABELS if c not in frame.columns]
    if absent:
        raise UserError(f"{paths[0]}: no column {absent[0]!r}, expected a frame that has it.")
    frame = frame.drop(columns=list(GAS_LABELS))
    _check_numbers(paths[0], frame)
    while True:
        crowded = np.flatnonzero((frame.corr() > 0.98).sum(axis=1).to_numpy() > 1)
        if not len(crowded):
            break
        frame = frame.drop(columns=frame.columns[crowded[0]])
    x = frame.to_numpy(np.float64)
    # The original standardises all rows by all rows.
    train, val, test = _tenths(standardised((x, x, x), x, ddof=1)[0])
    return train, val, test


def _hepmass(paths: list[Path], entry: Mapping[str, Any]) -> Parts:
    import pandas as pd

    samples: list[Array] = []
    width = None
    for path in paths:
        try:
            frame = pd.read_csv(path, index_col=False)
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: not a table of numbers: {one_line(error)}.") from None
        # The test file has a stray column at its end.
        frame = frame.iloc[:, :width]
        width = width or frame.shape[1]
        if not 1 < frame.shape[1] == width:
            raise UserError(f"{path}: {frame.shape[1]} columns, expected {max(width, 2)} or more.")
        _check_numbers(path, frame)
        chosen = frame[frame.iloc[:, 0] == 1].iloc[:, 1:].to_numpy(np.float64)
        if not len(chosen):
            raise UserError(
                f"{path}: no row has a 1 in its first column, the label of collisions."
            )
        samples.append(chosen)
    x, y = samples
    x, _, y = standardised((x, x, y), x, ddof=1)
    # As in the original: a column is discrete if its least value occurs more than five times.
    discrete = (x == x.min(axis=0)).sum(axis=0) > 5
    x, y = x[:, ~discrete], y[:, ~discrete]
    val = int(0.1 * len(x))
    return x[: len(x) - val], x[len(x) - val :], y


def _check_numbers(path: Path, frame: "pd.DataFrame") -> None:
    if not frame.size:
        raise UserError(f"{path}: no rows of numbers.")
    for column, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if dtype.kind not in "fiu":
            raise UserError(
                f"{path}: column {str(column)[:40]!r} holds {dtype}, expected numbers."
            )
    bad = int((~np.isfinite(frame.to_numpy(np.float64))).any(axis=1).sum())
    if bad:
        raise UserError(
            f"{path}: {bad} of {len(frame)} rows are short or not finite, expected numbers only."
        )


def _miniboone(paths: list[Path], entry: Mapping[str, Any]) -> Parts:
    parts = _tenths(_array(paths[0], entry["raw_columns"]))
    return standardised(parts, np.vstack(parts[:2]))


def _bsds300(paths: list[Path], entry: Mapping[str, Any]) -> Parts:
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise UserError(f"{paths[0]}: needs h5py, which is not installed.") from None

    try:
        with h5py.File(paths[0]) as file:
            parts = [np.asarray(file[k], np.float64) for k in ("train", "validation", "test")]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{paths[0]}: cannot be read: {one_line(error)}.") from None
    return parts[0], parts[1], parts[2]


#: From the files and the manifest's entry of a table to its parts.
READERS = {
    "power": _power,
    "gas": _gas,
    "hepmass": _hepmass,
    "miniboone": _miniboone,
    "bsds300": _bsds300,
}
