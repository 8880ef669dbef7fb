r"""What of a benchmark is on disk: each set is present, partial, corrupt or absent.

======== ==================================================================================
present  the list is as expected and each of its files exists and is not empty
partial  the list has fewer entries than expected, or some of its files are missing
corrupt  the list cannot be read or is another version, or some files are empty, or no files
absent   there is no list, or none of its files
======== ==================================================================================

Only a present set may have a row in a table: computed on part of a set, or on another list, it
would be another number under the same name.

:func:`find_reference` says which images stand for :math:`p_0`. A manifest names the references it
knows, in order of preference. A user may name one of them, or give a folder of images, a list
file, or a `.npy` array of images in uint8.
"""

__all__ = [
    "REQUIRED",
    "SetStatus",
    "advice",
    "can_run",
    "explain",
    "find_reference",
    "inspect",
    "lacking",
    "runnable",
    "shared_files",
]

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import UserError, did_you_mean, first
from ..files import is_folder, is_regular, local, map_array, stat
from .lists import ImageList, list_folder, read_list
from .manifests import Manifest, SetSpec, benchmark_names, load_manifest

# What training and scoring need besides a reference and a set to tell apart.
REQUIRED = ("id_train", "id_val", "id_test")
# The files that a thread looks at together.
TOGETHER = 2048
# The most files that are opened to look for copies, and the bytes at each end that are compared.
OPENED, END = 50_000, 16_384


@dataclass(frozen=True)
class SetStatus:
    r"""The state of one set on disk.

    Attributes:
        spec: What the manifest says.
        state: `present`, `partial`, `corrupt` or `absent`.
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
        text = f"{self.spec}: {self.state}, {self.found:,} of {expected}"
        return f"{text} images, {self.path}" + (f" ({self.detail})" if self.detail else "")


def inspect(manifest: Manifest, spec: SetSpec, data_root: Path) -> SetStatus:
    r"""Returns the state of a set.

    Arguments:
        manifest: The benchmark.
        spec: One of its sets, not an embedded one.
        data_root: The folder that holds lists and images.
    """
    if spec.synthetic is not None:  # made by the program whenever it is wanted
        size = spec.count or 0
        return SetStatus(spec, "present", size, size, Path("(synthetic)"), Path())
    images = data_root / (spec.images or manifest.images)
    return _inspect(spec, manifest.path(spec, data_root), images)


def _inspect(
    spec: SetSpec, path: Path, images: Path, content: ImageList | None = None
) -> SetStatus:
    r"""Returns the state of a set.

    Arguments:
        spec: What the set should be.
        path: The list file, or the array.
        images: The folder that the paths of a list are relative to.
        content: The content of the list, if it has been read.
    """
    if content is None and not is_regular(path):
        return SetStatus(spec, "absent", 0, spec.count, path, images, "no such file")
    try:
        if content is None and path.suffix == ".npy":
            return _inspect_array(spec, path)
        content = read_list(path) if content is None else content
    except UserError as error:
        detail = str(error).removeprefix(f"{path}: ")
        return SetStatus(spec, "corrupt", 0, spec.count, path, images, detail)

    stats = _stat_all(images, content.names)
    found = sum(s is not None for s in stats)
    expected = len(content) if spec.count is None else spec.count
    state, detail = _judge(spec, content, stats, images)
    known = tuple(s for s in stats if s is not None)
    return SetStatus(spec, state, found, expected, path, images, detail, content, known)


def _judge(
    spec: SetSpec, content: ImageList, stats: Sequence[tuple[int, int] | None], images: Path
) -> tuple[str, str]:
    r"""Returns the state of a set given by a list, and what is wrong with it."""
    missing = [n for n, s in zip(content.names, stats, strict=True) if s is None]
    empty = [n for n, s in zip(content.names, stats, strict=True) if s is not None and not s[0]]
    size = len(content)
    if len(missing) == size:
        return "absent", f"none of its files is in {images}"
    if missing:
        return "partial", f"missing in {images}: {first(missing, 'file')}"
    if empty:
        return "corrupt", f"empty in {images}, or no regular files: {first(empty, 'file')}"
    if spec.count is not None and size < spec.count:
        return (
            "partial",
            f"the list is a part of what is expected, {size:,} of {spec.count:,} images",
        )
    if spec.sha256 not in (None, content.checksum):
        found = f"its sha256 is {content.checksum}, expected {spec.sha256}"
        return "corrupt", f"another version of the list: {found}"
    if spec.count is not None and size > spec.count:
        return "corrupt", f"another version of the list: it has {size:,} entries"
    low, high = min(content.labels), max(content.labels)
    if spec.role.startswith("id_") and low < 0:
        return "corrupt", f"ID images need labels >= 0; found {low}"
    if spec.role == "id_train" and high >= size:
        # One stray label would build a class head of its size.
        return "corrupt", f"a label is {high}, of {size} images"
    return "present", ""


def _inspect_array(spec: SetSpec, path: Path) -> SetStatus:
    r"""Returns the state of a set given by a `.npy` array of images in uint8."""
    array = map_array(path)
    is_grey = array.ndim == 3 and 3 not in (array.shape[0], array.shape[2])  # one image, else
    is_images = is_grey or (array.ndim == 4 and array.shape[3] in (1, 3))
    if array.dtype != np.uint8 or not is_images or not array.size:
        detail = f"expected uint8 (N, H, W[, 3]), found {array.dtype} {array.shape}"
        return SetStatus(spec, "corrupt", 0, spec.count, path, path.parent, detail)
    found, expected = len(array), spec.count or len(array)
    state = "present" if found == expected else "partial" if found < expected else "corrupt"
    detail = "" if found == expected else f"it has {found:,} images"
    return SetStatus(spec, state, found, expected, path, path.parent, detail)


def _stat_all(folder: Path, names: Sequence[str]) -> list[tuple[int, int] | None]:
    r"""Returns the size and modification time of each file; None for a missing one."""

    def some(start: int) -> list[tuple[int, int] | None]:
        return [stat(os.path.join(folder, n)) for n in names[start : start + TOGETHER]]

    with ThreadPoolExecutor(max_workers=8) as pool:
        return [s for part in pool.map(some, range(0, len(names), TOGETHER)) for s in part]


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


def lacking(manifest: Manifest, data_root: Path, reference: str | Path | None = None) -> list[str]:
    r"""Returns what a benchmark lacks to be whole: all its ID, near and far sets, a reference.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        reference: As in :func:`find_reference`.
    """
    if manifest.is_embedded:
        return []
    sets = [s for role in (*REQUIRED, "near", "far") for s in manifest.role(role)]
    try:
        states = [find_reference(manifest, data_root, reference)]
    except UserError as error:
        return [str(error)]
    states += [inspect(manifest, s, data_root) for s in sets]
    return [str(s) for s in states if not s.present]


def find_reference(
    manifest: Manifest, data_root: Path, reference: str | Path | None = None
) -> SetStatus:
    r"""Finds the reference of a benchmark.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        reference: The name of a reference of the manifest, or the path of a folder, list or
            array; None for the first of the manifest that is present. One that holds classes of a
            near set without a companion is never chosen unless named.

    Returns:
        The state of the reference, which need not be present if the manifest names it.

    Raises:
        UserError: If there is no such reference, or no default one.
    """
    known = {spec.name: spec for spec in manifest.role("reference")}
    if str(reference) in known:
        return inspect(manifest, known[str(reference)], data_root)
    if reference is None:
        # A table would lack the row of a near set that has no companion to stand in for it.
        whole = [s for s in known.values() if None not in s.overlaps.values()]
        states = [inspect(manifest, s, data_root) for s in whole]
        for status in [*(s for s in states if s.present), *states]:
            return status

    path, images = local(reference or ""), data_root / manifest.images
    # Not validated: a file may have a name that no row of a table could.
    spec = SetSpec.model_construct(name=path.stem, role="reference", list=str(path))
    if reference is not None and is_folder(path):
        return _inspect(spec, path, path, list_folder(path))
    if is_regular(path):
        content = None if path.suffix == ".npy" else read_list(path)
        # OpenOOD's lists are relative to the images of the data root, other lists to themselves.
        if content is not None and content.names and not is_regular(images / content.names[0]):
            images = path.parent
        return _inspect(spec, path, images, content)
    found = "default reference" if reference is None else f"reference {str(reference)!r}"
    raise UserError(
        f"benchmark {manifest.name}: no {found}{did_you_mean(str(reference), known)}, expected "
        f"one of {', '.join(known) or '(none)'}, or the path of a folder, list or .npy array"
    )


def explain(
    manifest: Manifest, data_root: Path, lacking: Sequence[str], needs_reference: bool
) -> Iterator[str]:
    r"""Yields a few lines: what is missing, where it was looked for, and how to get it.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        lacking: What is missing, a line each.
        needs_reference: Whether a reference is among it.
    """
    yield (
        f"benchmark {manifest.name} ({manifest.id_name}) needs data that is not whole in "
        f"{data_root.resolve()} (--data-root):"
    )
    yield from (f"  {line}" for line in lacking)
    for spec in manifest.role("reference"):
        # A reference that is there but costs a row has to be asked for.
        others = ", ".join(n for n, companion in spec.overlaps.items() if companion is None)
        if needs_reference and others and inspect(manifest, spec, data_root).present:
            yield f"  --reference {spec.name} is there, but shares classes with {others}"
    yield from advice([manifest], data_root)


def advice(manifests: Sequence[Manifest], data_root: Path) -> Iterator[str]:
    r"""Yields what else can be run, how to get the sets of benchmarks, and how to see them."""
    id_name, first_name = manifests[0].id_name, manifests[0].name
    if other := runnable(id_name, data_root):
        yield f"What is there suffices for --benchmark {' or '.join(other)}."
    for get in dict.fromkeys(m.get for m in manifests if m.get):
        names = [m.name for m in manifests if m.get == get]
        what = " or ".join(names) if len(manifests) > 1 else "it"
        yield f"How to get {what}: {' '.join(get.split())}"
    yield (
        f"To see every set: python -m ood_osdre.data check --id {id_name} "
        f"--benchmark {first_name} --data-root {data_root}"
    )
    yield "No data at hand? --id digits needs none."


def shared_files(one: SetStatus, other: SetStatus) -> int | None:
    r"""Counts the files of one set that are files of another: of one size, with the same ends.

    Arguments:
        one: A set.
        other: The set whose files are counted.

    Returns:
        Their number; None if too many are of one size to be opened.
    """
    sizes = [np.array([size for size, _ in s.stats]) for s in (one, other)]
    alike = [np.flatnonzero(np.isin(a, b)) for a, b in (sizes, sizes[::-1])]
    if sum(map(len, alike)) > OPENED:
        return None

    def ends(path: Path) -> bytes:
        with suppress(OSError), path.open("rb") as file:  # removed since
            size = file.seek(0, os.SEEK_END)
            parts = [(file.seek(place), file.read(END)) for place in (0, max(size - END, 0))]
            return hashlib.sha256(repr((size, parts)).encode()).digest()
        return os.urandom(32)

    marks = []
    with ThreadPoolExecutor(max_workers=8) as pool:
        for status, rows in zip((one, other), alike, strict=True):
            assert status.list is not None
            names = status.list.names
            marks.append(list(pool.map(ends, [status.images / names[i] for i in rows])))
    known = set(marks[0])
    return sum(mark in known for mark in marks[1])
