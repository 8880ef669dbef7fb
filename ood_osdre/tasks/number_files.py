r"""Files of numbers, `.csv` with a line of names or `.npy`, with one row an observation."""

__all__ = ["check_frame", "is_file_name", "read_array", "read_numbers"]

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError, one_line
from .shipped_tables import Array, check_rows

if TYPE_CHECKING:
    import pandas as pd


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
