r"""The five tables of the field, from their files: POWER, GAS, HEPMASS, MINIBOONE and BSDS300.

The preprocessing of the paper that introduced it is followed step by step, draws of noise included.

References:
    | Masked autoregressive flow for density estimation (Papamakarios et al., 2017)
    | https://arxiv.org/abs/1705.07057

Files of numbers, `.csv` with a line of names or `.npy`, with one row an observation.
"""

__all__ = [
    "ARRAYS",
    "RAW_FILES",
    "READERS",
    "Array",
    "ArrayParts",
    "check_frame",
    "is_file_name",
    "read_array",
    "read_numbers",
    "standardised",
]

import importlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError, one_line
from ..rows import check_rows

if TYPE_CHECKING:
    import pandas as pd


Array = NDArray[np.float64]
ArrayParts = tuple[Array, Array, Array]


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


def _tenths(x: Array) -> ArrayParts:
    r"""Cuts off the last tenth for testing, and the last tenth of the rest for validation."""
    test = int(0.1 * len(x))
    rest = x[: len(x) - test]
    val = int(0.1 * len(rest))
    return rest[: len(rest) - val], rest[len(rest) - val :], x[len(x) - test :]


def _power(paths: list[Path], entry: Mapping[str, Any]) -> ArrayParts:
    rng = np.random.RandomState(42)
    x = read_array(paths[0], entry["raw_columns"])
    rng.shuffle(x)
    # Without global reactive power and intensity, which the others determine.
    x = np.delete(x, [1, 3], axis=1)
    n = len(x)
    voltage, gap = 0.01 * rng.rand(n, 1), 0.001 * rng.rand(n, 1)
    meters, time = rng.rand(n, 3), np.zeros((n, 1))
    parts = _tenths(x + np.hstack([gap, voltage, meters, time]))
    return standardised(parts, np.vstack(parts[:2]))


def _gas(paths: list[Path], entry: Mapping[str, Any]) -> ArrayParts:
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
    check_frame(paths[0], frame)
    while True:
        crowded = np.flatnonzero((frame.corr() > 0.98).sum(axis=1).to_numpy() > 1)
        if not len(crowded):
            break
        frame = frame.drop(columns=frame.columns[crowded[0]])
    x = frame.to_numpy(np.float64)
    # The original standardises all rows by all rows.
    train, val, test = _tenths(standardised((x, x, x), x, ddof=1)[0])
    return train, val, test


def _hepmass(paths: list[Path], entry: Mapping[str, Any]) -> ArrayParts:
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
        check_frame(path, frame)
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


def _miniboone(paths: list[Path], entry: Mapping[str, Any]) -> ArrayParts:
    parts = _tenths(read_array(paths[0], entry["raw_columns"]))
    return standardised(parts, np.vstack(parts[:2]))


def _bsds300(paths: list[Path], entry: Mapping[str, Any]) -> ArrayParts:
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


def is_file_name(name: str) -> bool:
    r"""Returns whether a table's name is that of a file of numbers."""
    return Path(name).suffix.lower() in (".csv", ".npy")


def read_numbers(path: Path) -> Array:
    r"""Returns the rows of a file of numbers, a table with names of columns or an array.

    Arguments:
        path: The file, `.csv` or `.npy`.

    Raises:
        UserError: If it is absent, no table of finite numbers, has fewer than
            :data:`ood_osdre.tasks.suites.tables.LEAST_ROWS` rows, or a column is constant.
    """
    if not path.is_file():
        raise UserError(f"{path}: is absent, expected a table of numbers.")
    if path.suffix.lower() == ".npy":
        x = read_array(path)
    else:
        import pandas as pd

        try:
            frame = pd.read_csv(path)
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: not a table of numbers: {one_line(error)}.") from None
        check_frame(path, frame)
        x = frame.to_numpy(np.float64)
    check_rows(str(path), x)
    return x


def read_array(path: Path, columns: int | None = None) -> Array:
    r"""Returns the array of a file, with shape :math:`(N, d)`.

    Arguments:
        path: The file.
        columns: The number of columns :math:`d`; None for any.

    Raises:
        UserError: If it is no such array of numbers.
    """
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


def check_frame(path: Path, frame: "pd.DataFrame") -> None:
    r"""Refuses a frame that holds anything but finite numbers.

    Arguments:
        path: The file that it is from.
        frame: The frame.

    Raises:
        UserError: If it is empty, or something else is in it.
    """
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


def standardised(parts: ArrayParts, by: Array, ddof: int = 0) -> ArrayParts:
    r"""Returns the parts less a mean and over a deviation.

    Arguments:
        parts: The parts, each with shape :math:`(N, d)`.
        by: The rows whose mean and deviation are meant, with shape :math:`(M, d)`.
        ddof: What the deviation's divisor is less than :math:`M`.
    """
    mean, std = by.mean(axis=0), by.std(axis=0, ddof=ddof)
    train, val, test = ((part - mean) / std for part in parts)
    return train, val, test
