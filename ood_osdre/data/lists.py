r"""Image lists, one image a line: `relative/path.png LABEL`.

The format is OpenOOD's, read more leniently: the label is what follows the *last* run of white
space, so paths may contain spaces; blank lines are skipped. Labels are integers, -1 for an image
that belongs to no ID class.
"""

__all__ = ["ImageList", "list_folder", "parse_list", "read_list", "write_list"]

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UserError
from ..files import is_regular, write_text_atomic

SHOWN = 10
# More digits than any set has classes, and fewer than an int64 has.
LABEL = re.compile(r"-1|\d{1,9}")
EXTENSIONS = frozenset(
    (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
)


@dataclass(frozen=True)
class ImageList:
    r"""The content of a list file.

    Attributes:
        names: The relative paths, as written.
        labels: The labels, as many.
        checksum: The sha256 of the lines `path LABEL` in sorted order, each ended by a newline.
            It depends neither on the order of the list nor on its line endings. For a plain file
            it is what `LC_ALL=C sort FILE | sha256sum` prints.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    checksum: str

    def __len__(self) -> int:
        return len(self.names)


def parse_list(text: str, where: str) -> ImageList:
    r"""Parses the text of a list.

    Arguments:
        text: The text.
        where: What to call the list in errors.
    """
    names, labels, bad = [], [], []

    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line:
            continue

        name, _, label = line.replace("\t", " ").rpartition(" ")
        # The separator may be several blanks; the path itself keeps the characters it has.
        name = line[: len(name)].rstrip()
        if not name or not LABEL.fullmatch(label):
            bad.append(f"line {number}: {line[:80]!r}")
            continue

        names.append(name)
        labels.append(int(label))

    if bad:
        raise UserError(f"{where}: expected 'path LABEL' in {first(bad, 'line')}")

    return image_list(names, labels)


def read_list(path: Path) -> ImageList:
    r"""Reads a list file."""
    try:
        # Windows editors put a byte-order mark in front.
        return parse_list(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file in UTF-8 ({error.reason})") from error


def list_folder(folder: Path) -> ImageList:
    r"""Lists every image file below a folder, in sorted order, with label -1.

    Links to files and folders are followed; one to a folder above itself is left out, as what
    it leads to is listed already.

    Arguments:
        folder: The folder.

    Raises:
        UserError: If there is none, a folder cannot be read, or the name of an image leads to no
            regular file or is not UTF-8.
    """
    found = dict(_walk(folder))
    names = sorted(found)
    if not names:
        raise UserError(f"{folder}: a folder without image files ({' '.join(sorted(EXTENSIONS))})")
    if lost := [name for name in names if not found[name]]:
        raise UserError(f"{folder}: no regular files, or links to none: {first(lost, 'file')}")
    # As in a list file, whose text is UTF-8.
    if odd := [name for name in names if not _is_utf8(name)]:
        raise UserError(f"{folder}: file names that are not UTF-8: {first(odd, 'file')}")

    return image_list(names, [-1] * len(names))


def _walk(folder: Path) -> Iterator[tuple[str, bool]]:
    r"""Yields the relative path of each image, and whether there is a regular file behind it."""
    waiting: list[tuple[str, frozenset[str]]] = [("", frozenset())]
    while waiting:
        below, above = waiting.pop()
        path = os.path.join(folder, below)
        real = os.path.realpath(path)
        if real in above:
            continue
        try:
            with os.scandir(path) as entries:
                here = list(entries)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        for entry in here:
            # Of links that lead in circles, the entry's own methods raise an error.
            is_link = entry.is_symlink()
            if os.path.isdir(entry.path) if is_link else entry.is_dir():
                waiting.append((f"{below}{entry.name}/", above | {real}))
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                yield below + entry.name, is_regular(entry.path) if is_link else entry.is_file()


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def write_list(path: Path, names: Iterable[str], labels: Iterable[int]) -> None:
    r"""Writes a list file, whole or not at all.

    Arguments:
        path: The file to create or replace.
        names: The relative paths.
        labels: The labels, as many.
    """
    lines = (f"{name} {label}\n" for name, label in zip(names, labels, strict=True))
    write_text_atomic(path, "".join(lines))


def image_list(names: Sequence[str], labels: Sequence[int]) -> ImageList:
    r"""Returns a list with its checksum."""
    lines = sorted(f"{name} {label}\n".encode() for name, label in zip(names, labels, strict=True))
    return ImageList(tuple(names), tuple(labels), hashlib.sha256(b"".join(lines)).hexdigest())


def first(items: list[str], noun: str) -> str:
    r"""Joins the first ten items, after their number: `"12 files: a, b, ... and 2 more"`."""
    # A line break within a name would break the message.
    shown = [item if item.isprintable() else ascii(item) for item in items[:SHOWN]]
    more = f" ... and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    plural = noun if len(items) == 1 else f"{noun}s"
    return f"{len(items)} {plural}: {', '.join(shown)}{more}"
