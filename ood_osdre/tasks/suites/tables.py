r"""Tables of numbers: five of the field's from their files, beside those that scikit-learn ships.

Of POWER, GAS, HEPMASS, MINIBOONE and BSDS300 (:mod:`ood_osdre.tasks.suites.table_files`) the manifest
`tabular` says what has to come out: the columns and the rows of each part. Nothing is downloaded.
Any other table is a file of numbers.

Tables of numbers that scikit-learn ships, which need no file.

They are small (`iris`, `wine`, `breast_cancer`), but for `colours`: the
colours of 40,000 pairs of neighbouring pixels of a photograph, in six dimensions. Their values are
rounded, so uniform noise as wide as the rounding is added: a density of rounded values may be as
large as one likes. Parts are 80, 10 and 10 per cent; those of `colours` share no vertical stripe
of the photograph. They are standardised by the mean and deviation of the training part.
"""

__all__ = [
    "SHIPPED",
    "Table",
    "load_table",
    "shipped_table",
    "shuffled_parts",
    "table_names",
]

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import UserError, did_you_mean
from ...resources import find, read_yaml
from ..rows import check_rows
from .table_files import (
    ARRAYS,
    RAW_FILES,
    READERS,
    Array,
    ArrayParts,
    is_file_name,
    read_numbers,
    standardised,
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


#: The tables that come with scikit-learn.
SHIPPED = ("colours", "iris", "wine", "breast_cancer")

# The rows of `colours`, and the width of the stripes of which each belongs to one part.
COLOUR_ROWS, STRIPE = 40_000, 16


def shipped_table(name: str) -> ArrayParts:
    r"""Returns the three parts of a table.

    Arguments:
        name: One of :data:`SHIPPED`.
    """
    from sklearn import datasets

    rng = np.random.default_rng(0)
    if name == "colours":
        parts = _colours(datasets.load_sample_image("china.jpg"), rng)
    else:
        x = getattr(datasets, f"load_{name}")().data.astype(np.float64)
        # The least gap between values is what they are rounded to.
        gaps = [np.diff(np.unique(column)).min() for column in x.T]
        x = x + np.asarray(gaps) * (rng.random(x.shape) - 0.5)
        return shuffled_parts(x, rng)
    return standardised(parts, parts[0])


def shuffled_parts(x: Array, rng: np.random.Generator | None = None) -> ArrayParts:
    r"""Returns 80, 10 and 10 per cent of rows in random order, standardised by the first.

    Arguments:
        x: The rows, with shape :math:`(N, d)`.
        rng: The source of randomness; None for one that is always the same.
    """
    x = (np.random.default_rng(0) if rng is None else rng).permutation(x)
    first, second = round(0.8 * len(x)), round(0.9 * len(x))
    parts = x[:first], x[first:second], x[second:]
    return standardised(parts, parts[0])


def _colours(photograph: NDArray[np.uint8], rng: np.random.Generator) -> ArrayParts:
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
