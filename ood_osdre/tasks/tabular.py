r"""Tables of numbers: five of the field's from their files, beside those that scikit-learn ships.

Of POWER, GAS, HEPMASS, MINIBOONE and BSDS300 (:mod:`ood_osdre.tasks.field_tables`) the manifest
`tabular` says what has to come out: the columns and the rows of each part. Nothing is downloaded.
Any other table is a file of numbers.
"""

__all__ = ["SHIPPED", "Table", "load_table", "table_names"]

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..options import read_yaml
from ..resources import find
from ..spelling import did_you_mean
from .field_tables import ARRAYS, RAW_FILES, READERS
from .number_files import is_file_name, read_numbers
from .shipped_tables import SHIPPED, Array, check_rows, shipped_table, shuffled_parts


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
