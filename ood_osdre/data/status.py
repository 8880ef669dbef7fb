r"""What of a benchmark is on disk: each set is present, partial, corrupt or absent.

======== ==================================================================================
present  the list is as expected and each of its files exists and is not empty
partial  the list has fewer entries than expected, or some of its files are missing
corrupt  the list cannot be read or is another version, or some files are empty, or no files
absent   there is no list, or none of its files
======== ==================================================================================

Only a present set may stand in a table: a row computed on part of a set, or on another list,
would bear the name of a number it is not.
"""

__all__ = [
    "REQUIRED",
    "STATES",
    "SetStatus",
    "can_run",
    "inspect",
    "inspect_array",
    "inspect_list",
    "runnable",
]

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError
from .lists import ImageList, first, read_list
from .manifests import Manifest, SetSpec, benchmark_names, load_manifest
from .sources import is_regular, map_array, stat

STATES = ("present", "partial", "corrupt", "absent")
# What training and scoring need besides a reference and a set to tell apart.
REQUIRED = ("id_train", "id_val", "id_test")
CHUNK = 2048


@dataclass(frozen=True)
class SetStatus:
    r"""The state of one set on disk.

    Attributes:
        spec: What the manifest says.
        state: One of :data:`STATES`.
        found: The number of images found.
        expected: The number of images expected; None if unknown.
        path: The list file, or the array.
        images: The folder that the paths of the list are relative to.
        detail: What is wrong; empty if present.
        list: The content of the list; None for arrays and unreadable lists.
        stats: The size and modification time of each file, as the list orders them.
    """

    spec: SetSpec
    state: str
    found: int
    expected: int | None
    path: Path
    images: Path
    detail: str = ""
    list: ImageList | None = None
    stats: tuple[tuple[int, int], ...] = ()

    @property
    def present(self) -> bool:
        r"""Whether the set is complete."""
        return self.state == "present"

    def __str__(self) -> str:
        expected = "?" if self.expected is None else f"{self.expected:,}"
        text = f"{self.spec.role} {self.spec.name}: {self.state}, {self.found:,} of {expected}"
        return f"{text} images, {self.path}" + (f" ({self.detail})" if self.detail else "")


def inspect(manifest: Manifest, spec: SetSpec, data_root: Path) -> SetStatus:
    r"""Returns the state of a set.

    Arguments:
        manifest: The benchmark.
        spec: One of its sets, not an embedded one.
        data_root: The folder that holds lists and images.
    """
    path = manifest.path(spec, data_root)
    if path.suffix == ".npy":
        return inspect_array(spec, path)
    return inspect_list(spec, path, data_root / manifest.images)


def inspect_list(
    spec: SetSpec, path: Path, images: Path, content: ImageList | None = None
) -> SetStatus:
    r"""Returns the state of a set given by a list.

    Arguments:
        spec: What the set should be.
        path: The list file.
        images: The folder that the paths of the list are relative to.
        content: The content of the list, if it has been read.
    """
    if content is None:
        if not is_regular(path):
            detail = "no such list"
            return SetStatus(spec, "absent", 0, spec.count, path, images, detail)
        try:
            content = read_list(path)
        except UserError as error:
            return SetStatus(spec, "corrupt", 0, spec.count, path, images, str(error))

    stats = tuple(stat_all(images, content.names))
    missing = [n for n, s in zip(content.names, stats, strict=True) if s is None]
    empty = [n for n, s in zip(content.names, stats, strict=True) if s is not None and not s[0]]
    found = len(content) - len(missing)
    expected = len(content) if spec.count is None else spec.count

    state, detail = "present", ""
    if not found:
        state, detail = "absent", f"none of its files is in {images}"
    elif missing:
        state, detail = "partial", f"missing in {images}: {first(missing, 'file')}"
    elif empty:
        state, detail = (
            "corrupt",
            f"empty in {images}, or no regular files: {first(empty, 'file')}",
        )
    elif spec.checksum is not None and spec.checksum != content.checksum:
        state, detail = (
            "corrupt",
            (
                f"another version of the list: its sha256 is {content.checksum}, "
                f"expected {spec.checksum}"
            ),
        )
    elif len(content) < expected:
        state, detail = "partial", "the list is shorter than expected"
    elif len(content) > expected:
        state, detail = (
            "corrupt",
            (f"another version of the list: it has {len(content):,} entries"),
        )
    elif spec.role.startswith("id_") and min(content.labels) < 0:
        state, detail = "corrupt", f"ID images need labels >= 0; found {min(content.labels)}"
    elif spec.role == "id_train" and max(content.labels) >= len(content):
        # One stray label would build a class head of its size.
        state, detail = "corrupt", f"a label is {max(content.labels)}, of {len(content)} images"

    known = tuple(s for s in stats if s is not None)
    return SetStatus(spec, state, found, expected, path, images, detail, content, known)


def inspect_array(spec: SetSpec, path: Path) -> SetStatus:
    r"""Returns the state of a set given by a `.npy` array of images in uint8."""
    if not is_regular(path):
        return SetStatus(spec, "absent", 0, spec.count, path, path.parent, "no such file")

    try:
        array = map_array(path)
    except UserError as error:
        detail = str(error).removeprefix(f"{path}: ")
        return SetStatus(spec, "corrupt", 0, spec.count, path, path.parent, detail)

    is_grey = array.ndim == 3 and 3 not in (array.shape[0], array.shape[2])  # one image, else
    is_images = is_grey or (array.ndim == 4 and array.shape[3] in (1, 3))
    expected = len(array) if spec.count is None and is_images else spec.count
    state, detail, found = "present", "", len(array) if array.ndim else 0

    if array.dtype != np.uint8 or not is_images or not array.size:
        state, found = "corrupt", 0
        detail = f"expected uint8 (N, H, W[, 3]), found {array.dtype} {array.shape}"
    elif expected is not None and found != expected:
        state = "partial" if found < expected else "corrupt"
        detail = f"it has {found:,} images"

    return SetStatus(spec, state, found, expected, path, path.parent, detail)


def stat_all(folder: Path, names: tuple[str, ...]) -> Iterator[tuple[int, int] | None]:
    r"""Yields the size and modification time of each file; None for a missing one."""
    base = os.fspath(folder)

    def some(start: int) -> list[tuple[int, int] | None]:
        return [stat(os.path.join(base, name)) for name in names[start : start + CHUNK]]

    with ThreadPoolExecutor(max_workers=8) as pool:
        for chunk in pool.map(some, range(0, len(names), CHUNK)):
            yield from chunk


def can_run(statuses: Sequence[SetStatus]) -> bool:
    r"""Returns whether what is present suffices to train and to make a table."""
    have = {s.spec.role for s in statuses if s.present}
    return have >= {*REQUIRED, "reference"} and bool(have & {"near", "far"})


def runnable(id_name: str, data_root: Path) -> list[str]:
    r"""Returns the benchmarks of an ID data set that what is on disk suffices for.

    Arguments:
        id_name: The ID data set.
        data_root: The folder that holds lists and images.
    """
    manifests = [load_manifest(name, id_name) for name in benchmark_names(id_name)]
    return [
        manifest.name
        for manifest in manifests
        if can_run([inspect(manifest, s, data_root) for s in manifest.sets if s.list is not None])
    ]
