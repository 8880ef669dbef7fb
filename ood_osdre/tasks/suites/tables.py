r"""Tables of numbers in three parts: those of the field, those of scikit-learn, and your own.

**The field's five**, POWER, GAS, HEPMASS, MINIBOONE and BSDS300, are read from their files and
preprocessed step by step as in the paper that introduced them, draws of noise included. The
manifest `tabular` says where the files are and what has to come out. Nothing is downloaded.

**Of scikit-learn** are `iris`, `wine`, `breast_cancer` and `colours`, the colours of 40,000 pairs
of neighbouring pixels of a photograph, in six dimensions. Their values are rounded, so uniform
noise as wide as the rounding is added: a density of rounded values may be as large as one likes.
Parts are 80, 10 and 10 per cent; those of `colours` share no vertical stripe of the photograph.

**Any other table** is a file of numbers with one row an observation, `.csv` with a line of names
or without, or `.npy`, in parts of 80, 10 and 10 per cent. Parts of both kinds are standardised by
the mean and deviation of the training part.

References:
    | Masked autoregressive flow for density estimation (Papamakarios et al., 2017)
    | https://arxiv.org/abs/1705.07057
"""

__all__ = ["SHIPPED", "Table", "is_file_name", "load_table", "table_names"]

import importlib
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import Field

from ...errors import UserError, one_line
from ...files import local, map_array, read_array
from ...options import Count, Options
from ...resources import find, read_yaml
from ..rows import check_rows, read_rows
from .reports import check_names

Array: TypeAlias = NDArray[np.float64]
Arrays: TypeAlias = tuple[Array, Array, Array]
T = TypeVar("T")

#: The tables that come with scikit-learn.
SHIPPED = ("colours", "iris", "wine", "breast_cancer")
# The rows of `colours`, and the width of the stripes of which each belongs to one part.
COLOUR_ROWS, STRIPE = 40_000, 16
GAS_LABELS = ["Meth", "Eth", "Time"]
# What reading a damaged file, unpickling included, is known to raise.
DAMAGE = (
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


class Table(NamedTuple):
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


class Entry(Options):
    r"""A table of the field: its file, and the columns and rows of its parts after preprocessing."""

    files: Annotated[list[str], Field(min_length=1, max_length=1)]
    dim: Count
    rows: Annotated[list[Count], Field(min_length=3, max_length=3)]
    raw_columns: Count | None = None
    source: str = ""
    licence: str = ""
    note: str = ""


class ArrayEntry(Entry):
    r"""A table that is one array, with its columns before preprocessing."""

    raw_columns: Count


class PairEntry(Entry):
    r"""A table in two files, of which the second holds the test part."""

    files: Annotated[list[str], Field(min_length=2, max_length=2)]


class Tables(Options):
    r"""The tables of the field by name."""

    power: ArrayEntry | None = None
    gas: Entry | None = None
    hepmass: PairEntry | None = None
    miniboone: ArrayEntry | None = None
    bsds300: Entry | None = None


class Manifest(Options):
    r"""The manifest `tabular`; there are no sets of images in it."""

    title: str = ""
    note: str = ""
    get: str = ""
    ids: dict[str, Any] = Field(default_factory=dict)
    tables: Tables


def _entries(source: Path) -> dict[str, Entry]:
    tables = Manifest.of(read_yaml(source), str(source)).tables
    return {name: entry for name, entry in tables if entry is not None}


def table_names() -> tuple[str, ...]:
    r"""Returns the names of all tables, those that need no file first."""
    return (*SHIPPED, *_entries(find("data_manifests", "tabular")))


def is_file_name(name: str) -> bool:
    r"""Returns whether a table's name is that of a file of numbers."""
    return Path(name).suffix.lower() in (".csv", ".npy")


def load_table(
    name: str, root: str | Path | None = None, manifest: str | Path = "tabular"
) -> Table:
    r"""Loads a table.

    Arguments:
        name: One of :func:`table_names`, or the path of a file of numbers.
        root: The folder of the files; None for the current one.
        manifest: The manifest, by name or path.

    Raises:
        UserError: If there is no such table, its files are absent, damaged or not what the
            manifest says, or rows of an own file are too few or do not span their dimensions.

    Example:
        >>> load_table("wine").train.shape
        (142, 13)
    """
    if name in SHIPPED:
        return Table(name, *_shipped(name))
    entry, hint, paths = None, "", [local(name)]
    if not is_file_name(name):
        source = find("data_manifests", str(manifest))
        entries = _entries(source)
        check_names("table", [name], (*SHIPPED, *entries))
        entry, hint = entries[name], f"; see 'get' in {source}"
        paths = [local(root or "") / file for file in entry.files]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: is absent{hint}.")
    if entry is None:
        return Table(paths[0].name, *_own(paths[0]))
    parts = READERS[name](paths, entry)
    found, expected = [x.shape for x in parts], [(n, entry.dim) for n in entry.rows]
    if found != expected:
        raise UserError(f"table {name}: got parts of shapes {found}, expected {expected}.")
    for part in parts:
        read_rows(f"table {name}", part)
    return Table(name, *parts)


def _own(path: Path) -> Arrays:
    r"""Returns the parts of a user's file of numbers."""
    x = read_rows(str(path), read_array(path)[0])
    check_rows(str(path), x)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = _shuffled_parts(x, np.random.default_rng(0))
    check_rows(f"{path}, its training part", parts[0], least=0)
    return parts


def _numbers(path: Path, columns: int | None = None) -> Array:
    r"""Returns the rows of a `.csv` or `.npy` file, with shape :math:`(N, d)`."""
    is_csv = path.suffix.lower() == ".csv"
    x = _read(path, pd.read_csv, "a table of numbers") if is_csv else map_array(path)
    return read_rows(str(path), x, columns)


def _read(path: Path, reader: Callable[[Path], T], expected: str) -> T:
    r"""Returns what a library reads from a file, or says in one line why it cannot."""
    try:
        return reader(path)
    except DAMAGE as error:
        raise UserError(f"{path}: not {expected}: {one_line(error)}.") from None


def _standardised(parts: Arrays, by: Array, ddof: int = 0) -> Arrays:
    r"""Returns the parts less the mean and over the deviation of some rows."""
    mean, std = by.mean(axis=0), by.std(axis=0, ddof=ddof)
    train, val, test = ((part - mean) / std for part in parts)
    return train, val, test


def _tenths(x: Array) -> Arrays:
    r"""Cuts off the last tenth for testing, and the last tenth of the rest for validation."""
    test = int(0.1 * len(x))
    rest = x[: len(x) - test]
    val = int(0.1 * len(rest))
    return rest[: len(rest) - val], rest[len(rest) - val :], x[len(x) - test :]


def _power(paths: list[Path], entry: Entry) -> Arrays:
    rng = np.random.RandomState(42)
    x = _numbers(paths[0], entry.raw_columns)
    rng.shuffle(x)
    # Without global reactive power and intensity, which the others determine.
    x = np.delete(x, [1, 3], axis=1)
    n = len(x)
    voltage, gap = 0.01 * rng.rand(n, 1), 0.001 * rng.rand(n, 1)
    meters, time = rng.rand(n, 3), np.zeros((n, 1))
    parts = _tenths(x + np.hstack([gap, voltage, meters, time]))
    return _standardised(parts, np.vstack(parts[:2]))


def _gas(paths: list[Path], entry: Entry) -> Arrays:
    # The field's own file is a pickle, which may run code: see 'get' in the manifest. As an index
    # the labels have to be there, and are no columns any more.
    frame = _read(
        paths[0],
        lambda path: pd.read_pickle(path).set_index(GAS_LABELS),
        f"a pickled frame with columns {', '.join(GAS_LABELS)}",
    )
    read_rows(str(paths[0]), frame)
    while True:
        crowded = np.flatnonzero((frame.corr() > 0.98).sum(axis=1).to_numpy() > 1)
        if not len(crowded):
            break
        frame = frame.drop(columns=frame.columns[crowded[0]])
    x = frame.to_numpy(np.float64)
    # The original standardises all rows by all rows.
    return _tenths(_standardised((x, x, x), x, ddof=1)[0])


def _hepmass(paths: list[Path], entry: Entry) -> Arrays:
    samples, width = [], None
    for path in paths:
        frame = _read(path, partial(pd.read_csv, index_col=False), "a table of numbers")
        # The test file has a stray column at its end.
        rows = read_rows(str(path), frame.iloc[:, :width])
        width = width or max(rows.shape[1], 2)
        collisions = f"{path}: rows with a 1 in the first column"
        samples.append(read_rows(collisions, rows[rows[:, 0] == 1, 1:], width - 1))
    x, y = samples
    x, _, y = _standardised((x, x, y), x, ddof=1)
    # As in the original: a column is discrete if its least value occurs more than five times.
    discrete = (x == x.min(axis=0)).sum(axis=0) > 5
    x, y = x[:, ~discrete], y[:, ~discrete]
    val = int(0.1 * len(x))
    return x[: len(x) - val], x[len(x) - val :], y


def _miniboone(paths: list[Path], entry: Entry) -> Arrays:
    parts = _tenths(_numbers(paths[0], entry.raw_columns))
    return _standardised(parts, np.vstack(parts[:2]))


def _bsds300(paths: list[Path], entry: Entry) -> Arrays:
    def read(path: Path) -> list[Array]:
        h5py = importlib.import_module("h5py")
        with h5py.File(path) as sets:
            return [np.asarray(sets[k], np.float64) for k in ("train", "validation", "test")]

    train, val, test = _read(paths[0], read, "a file that h5py, if it is installed, reads")
    return train, val, test


#: From the files and the manifest's entry of a table to its parts.
READERS: dict[str, Callable[[list[Path], Entry], Arrays]] = {
    "power": _power,
    "gas": _gas,
    "hepmass": _hepmass,
    "miniboone": _miniboone,
    "bsds300": _bsds300,
}


def _shipped(name: str) -> Arrays:
    r"""Returns the parts of a table of scikit-learn."""
    from sklearn import datasets

    rng = np.random.default_rng(0)
    if name == "colours":
        parts = _colours(datasets.load_sample_image("china.jpg"), rng)
        return _standardised(parts, parts[0])
    x = getattr(datasets, f"load_{name}")().data.astype(np.float64)
    # The least gap between values is what they are rounded to.
    gaps = [np.diff(np.unique(column)).min() for column in x.T]
    return _shuffled_parts(x + np.asarray(gaps) * (rng.random(x.shape) - 0.5), rng)


def _shuffled_parts(x: Array, rng: np.random.Generator) -> Arrays:
    r"""Returns 80, 10 and 10 per cent of rows in random order, standardised by the first."""
    x = rng.permutation(x)
    first, second = round(0.8 * len(x)), round(0.9 * len(x))
    parts = x[:first], x[first:second], x[second:]
    return _standardised(parts, parts[0])


def _colours(photograph: NDArray[np.uint8], rng: np.random.Generator) -> Arrays:
    stripes = np.arange(0, photograph.shape[1] - STRIPE + 1, STRIPE)
    cuts = (0, round(0.8 * len(stripes)), round(0.9 * len(stripes)), len(stripes))
    stripes = rng.permutation(stripes)
    parts = []
    for share, low, high in zip((0.8, 0.1, 0.1), cuts, cuts[1:], strict=False):
        cut = [photograph[:, c : c + STRIPE].astype(np.float64) for c in stripes[low:high]]
        pairs = [np.concatenate([c[:, :-1], c[:, 1:]], axis=2).reshape(-1, 6) for c in cut]
        rows = rng.permutation(np.concatenate(pairs))[: round(share * COLOUR_ROWS)]
        parts.append(rows + rng.random(rows.shape))
    return parts[0], parts[1], parts[2]
