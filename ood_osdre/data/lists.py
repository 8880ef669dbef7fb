r"""Image lists, one image a line: `relative/path.png LABEL`.

The format is OpenOOD's, read more leniently: the label is what follows the *last* run of white
space, so paths may contain spaces; blank lines are skipped. Labels are integers, -1 for an image
that belongs to no ID class.
"""

__all__ = [
    "ImageList",
    "image_suffixes",
    "list_folder",
    "parse_list",
    "read_list",
    "stream_folder",
    "write_list",
]

import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import UserError, counted, first, one_line
from ..files import is_regular, write_text_atomic

# More digits than any set has classes, and fewer than an int64 has.
LABEL = re.compile(r"-1|\d{1,9}")
# Formats that Pillow recognises, but leaves to other programs to read.
STUBS = frozenset(("BUFR", "GRIB", "HDF5", "MPEG", "WMF"))
# What a message names of some 65 suffixes, to be read in one line.
COMMON = (".jpg", ".png", ".tif", ".webp", ".gif", ".bmp")

log = logging.getLogger(__name__)


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
        if name and LABEL.fullmatch(label):
            names.append(name)
            labels.append(int(label))
        else:
            bad.append(f"line {number}: {line[:80]!r}")
    if bad:
        raise UserError(f"{where}: expected 'path LABEL' in {first(bad, 'line')}")
    return image_list(names, labels)


def read_list(path: Path) -> ImageList:
    r"""Reads a list file.

    Raises:
        UserError: If it cannot be read, is no text in UTF-8, or has other lines.
    """
    try:
        # Windows editors put a byte-order mark in front.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise UserError(f"{path}: cannot be read as text in UTF-8 ({reason})") from None
    return parse_list(text, str(path))


def image_suffixes() -> frozenset[str]:
    r"""Returns the suffixes of images that Pillow reads, those of its plug-ins among them."""
    known = Image.registered_extensions()
    return frozenset(s for s, kind in known.items() if kind in Image.OPEN and kind not in STUBS)


def list_folder(folder: Path) -> ImageList:
    r"""Lists every image file below a folder, in the order of sorted paths, with label -1.

    An image is what has one of :func:`image_suffixes`. What begins with a dot is hidden and left
    out, as are other files; what is left out is counted in one warning. Links to files and folders
    are followed; one to a folder above itself is left out, as what it leads to is listed already.

    Arguments:
        folder: The folder.

    Raises:
        UserError: If there is none, a folder cannot be read, or the name of an image leads to no
            regular file or is not UTF-8, as list files are.
    """
    names = list(stream_folder(folder))
    # As `sorted(folder.rglob("*"))` has them: folder by folder.
    names.sort(key=lambda name: name.split("/"))
    bad = [
        name
        for name in names
        if not is_regular(os.path.join(folder, name))
        or name.encode(errors="ignore").decode() != name
    ]
    if bad:
        found = first(bad, "other file")
        raise UserError(f"{folder}: got {found}, expected regular files with names in UTF-8")
    if not names:
        others = len(image_suffixes() - set(COMMON))
        kinds = f"{' '.join(COMMON)} and {others} more that Pillow reads"
        raise UserError(f"{folder}: holds no image; expected files named {kinds}")
    return image_list(names, [-1] * len(names))


def stream_folder(
    folder: Path, bad: Callable[[OSError], object] | None = None, told: bool = True
) -> Iterator[str]:
    r"""Yields the relative paths of the images below a folder as they are found.

    It has those of :func:`list_folder` in another order, each folder's files before its folders, and
    holds the names of one folder at a time.

    Arguments:
        folder: The folder.
        bad: Is told of a folder that cannot be read, and the others are; None for an error.
        told: Whether a warning counts what is left out.

    Raises:
        UserError: If a folder cannot be read and nobody is told.
    """
    suffixes, left_out = image_suffixes(), Counter[str]()
    for name in _walk(folder, bad or _refuse):
        suffix = os.path.splitext(name)[1].lower()
        if os.path.basename(name.rstrip("/")).startswith("."):
            # Of hidden files nobody misses those that are no images.
            left_out["hidden"] += name.endswith("/") or suffix in suffixes
        elif suffix in suffixes:
            yield name
        else:
            left_out[suffix or "without suffix"] += 1
    if told and (count := left_out.total()):
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(left_out.items()) if n)
        are = counted(count, "file", "is no image|are no images")
        log.warning("%s: %s and left out (%s)", folder, are, kinds)


def _refuse(error: OSError) -> None:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror})")


def _walk(folder: Path, bad: Callable[[OSError], object]) -> Iterator[str]:
    r"""Yields the relative paths of files, and with a slash at their end of hidden folders."""
    above = {os.fspath(folder): frozenset[str]()}
    for here, folders, files in os.walk(folder, onerror=bad, followlinks=True):
        known = above.pop(here) | {os.path.realpath(here)}
        below = here.removeprefix(os.fspath(folder)).lstrip("/")
        yield from (os.path.join(below, name, "") for name in folders if name.startswith("."))
        paths = {n: os.path.join(here, n) for n in folders if not n.startswith(".")}
        # In order, as the system's own may be another tomorrow.
        folders[:] = sorted(n for n, path in paths.items() if os.path.realpath(path) not in known)
        above |= {paths[name]: known for name in folders}
        yield from (os.path.join(below, name) for name in sorted(files))


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
