r"""From files to scores, a part at a time: memory does not grow with their number.

:func:`list_items` says what is to be scored: image files, one by one, or rows of arrays and tables.
:func:`score_items` decodes and scores them. What cannot be read is no error: it comes with the reason
in the place of a score, and the rest is scored.
"""

__all__ = [
    "Item",
    "ScoredItems",
    "in_parts",
    "list_items",
    "list_lines",
    "list_rows",
    "score_items",
]

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..data.images import DAMAGE, decode
from ..data.inputs import read
from ..data.lists import stream_folder
from ..errors import UserError, one_line
from ..evaluation.evaluate import score_images
from ..files import ARRAYS, is_folder, is_regular, local, parse_rows, read_array
from .labels import check_columns
from .scorer import Scorer

# The most items that are scored together, and the bytes of images that they may be.
MOST, TOGETHER = 512, 64 * 2**20
THREADS = 16

#: What an item is called, and the file to decode, the array that it is, or what is wrong with it.
Item: TypeAlias = tuple[str, Path | NDArray[Any] | str]


class ScoredItems(NamedTuple):
    r"""The scores of a few items.

    Attributes:
        names: What they are called: the path of a file, or `FILE:ROW`.
        scores: The log-ratios in nats, larger = more ID, with shape :math:`(N)`; NaN where there is a
            problem. Of a run that sums parts the sums.
        classes: The predicted classes, with shape :math:`(N)`, -1 where there is a problem; None
            without a class head.
        problems: Why an item has no score, empty where it has one.
    """

    names: list[str]
    scores: NDArray[np.float64]
    classes: NDArray[np.int64] | None
    problems: list[str]


def list_items(
    sources: Iterable[str], vectors: bool, columns: Sequence[str] = ()
) -> Iterator[Item]:
    r"""Yields the items of files, folders, arrays and patterns, in the order of the sources.

    Arguments:
        sources: A folder stands for the images below it, a pattern for the files that it matches,
            and anything else is as in :func:`list_lines`.
        vectors: Whether vectors are wanted, not images.
        columns: The names of a vector's numbers, as in :func:`list_rows`.
    """
    for source in sources:
        path, bad = local(source), list[OSError]()
        if glob.has_magic(source) and not os.path.lexists(path):
            matches = sorted(glob.iglob(os.fspath(path), recursive=True))
            files = [match for match in matches if not is_folder(local(match))]
            items = list_lines(files, vectors, columns)
            yield from items if files else [(source, "no such file")]
        elif is_folder(path) and not vectors:
            for name in stream_folder(path, bad.append):
                yield os.path.join(source, name), path / name
            yield from ((f"{error.filename}", f"{error.strerror}") for error in bad)
        else:
            yield from list_lines([source], vectors, columns)


def list_lines(paths: Iterable[str], vectors: bool, columns: Sequence[str] = ()) -> Iterator[Item]:
    r"""Yields the items of files, in the order of their paths, which are no patterns.

    Arguments:
        paths: An array or table (`.npy`, `.npz`, `.csv`) stands for its rows, any other file for
            itself. A folder is told: what lists files lists folders, too.
        vectors: Whether vectors are wanted, not images.
        columns: The names of a vector's numbers, as in :func:`list_rows`.
    """
    for source in paths:
        path = local(source)
        try:
            if is_folder(path):
                yield source, "is a folder"
            elif os.path.exists(path) and not is_regular(path):
                yield source, "is no regular file"  # nobody may write to a FIFO, ever
            elif path.suffix.lower() == ".csv" and vectors:
                with path.open(encoding="utf-8-sig", errors="replace") as lines:
                    yield from list_rows(lines, source, columns)
            elif path.suffix.lower() in ARRAYS:
                yield from (
                    (f"{source}:{i}", np.asarray(row))  # text, else, is what is wrong with an item
                    for i, row in enumerate(np.atleast_1d(read_array(path)[0]))
                )
            else:
                expected = f"expected a file {', '.join(ARRAYS)}"
                yield source, expected if vectors else path
        except (UserError, OSError) as error:
            text = getattr(error, "strerror", None) or one_line(error, None)
            yield source, text.removeprefix(f"{path}: ").removeprefix(f"{source}: ")


def list_rows(lines: Iterable[str], name: str, columns: Sequence[str] = ()) -> Iterator[Item]:
    r"""Yields the rows of a table of numbers, by the number of their line, see `parse_rows`.

    Arguments:
        lines: Its lines.
        name: What to call it.
        columns: The names of the columns in fit, if they are known.

    Raises:
        UserError: If the table names other columns, or names them in another order.
    """
    found, rows = parse_rows(lines)
    check_columns(name, found, columns)
    yield from ((f"{name}:{number}", row) for number, row in rows)


def in_parts(scorer: Scorer, items: Iterable[Item]) -> Iterator[list[Item]]:
    r"""Yields items in as large parts as a scorer decodes and scores at once."""
    items, count = iter(items), max(1, min(MOST, TOGETHER // int(np.prod(scorer.shape))))
    while part := list(islice(items, count)):
        yield part


def score_items(
    scorer: Scorer, parts: Iterable[Sequence[Item]], ahead: bool = True
) -> Iterator[ScoredItems]:
    r"""Yields the scores of items, part by part.

    Arguments:
        scorer: The trained scorer.
        parts: The items, a few at a time, as :func:`in_parts` gives them.
        ahead: Whether the next part is decoded while one is scored; of a stream it is not, whose
            next part may be long in coming.
    """
    threads, parts = min(THREADS, os.cpu_count() or 1), iter(parts)

    # Pillow releases the interpreter's lock while it decodes and resizes.
    with ThreadPoolExecutor(max_workers=threads) as pool:

        def begin(part: Sequence[Item]) -> tuple[list[str], list[Any]]:
            return [name for name, _ in part], [pool.submit(_load, scorer, x) for _, x in part]

        coming = [begin(part) for part in islice(parts, 1)]
        while coming:
            now = coming.pop()
            coming += [begin(part) for part in islice(parts, int(ahead))]
            yield _scored(scorer, now[0], [found.result() for found in now[1]])
            coming = coming or [begin(part) for part in islice(parts, 1)]


def _load(scorer: Scorer, value: Path | NDArray[Any] | str) -> NDArray[Any] | str:
    r"""Returns an item as the scorer stores it, or why it cannot."""
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, Path):
            if len(scorer.shape) == 1:
                return "expected vectors, got an image"
            found = decode(value, scorer.metadata["size"])
        else:
            found = read(value[None], scorer.metadata["size"], "row").values[0]
    except (*DAMAGE, MemoryError) as error:
        known = isinstance(value, Path) and not os.path.lexists(value)
        return "no such file" if known else one_line(error, 100).removeprefix("row: ")
    if found.shape != scorer.shape:
        return f"got shape {found.shape}, expected {scorer.shape}"
    return found


def _scored(scorer: Scorer, names: list[str], loaded: list[NDArray[Any] | str]) -> ScoredItems:
    scores = np.full(len(names), np.nan)
    problems = [value if isinstance(value, str) else "" for value in loaded]
    rows = [i for i, problem in enumerate(problems) if not problem]
    classes: NDArray[np.int64] | None = None
    if rows:
        values = np.stack([np.asarray(loaded[i]) for i in rows])
        scores[rows], found = score_images(scorer.ratio, values, scorer.preprocess)
        if found is not None:
            classes = np.full(len(names), -1)
            classes[rows] = found
    for i in rows:
        if not np.isfinite(scores[i]):
            scores[i], problems[i] = np.nan, "its score is not finite"
    return ScoredItems(names, scores, classes, problems)
