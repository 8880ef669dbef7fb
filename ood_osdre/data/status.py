r"""What of a benchmark is on disk: each set is present, partial, corrupt or absent.

======== ==================================================================================
present  the list is as expected and each of its files exists and is not empty
partial  the list has fewer entries than expected, or some of its files are missing
corrupt  the list cannot be read or is another version, or some files are empty, or no files
absent   there is no list, or none of its files
======== ==================================================================================

Only a present set may stand in a table: a row computed on part of a set, or on another list,
would bear the name of a number it is not.

The reference distribution: which images stand for :math:`p_0`, and its validation split.

A manifest names the references it knows, in order of preference. A user may name one of them,
or give a folder of images, a list file, or a `.npy` array of images in uint8.

No test image may choose a model. Validation therefore compares ID images with *reference*
images of classes that training never sees: ten held-out class folders where the reference has
classes, else a held-out tenth.
"""

__all__ = [
    "REQUIRED",
    "STATES",
    "SetStatus",
    "can_run",
    "find_reference",
    "hold_out_reference",
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
from numpy.typing import NDArray

from ..errors import UserError, did_you_mean
from ..files import is_folder, is_regular, map_array, stat
from .lists import ImageList, first, list_folder, read_list
from .manifests import Manifest, SetSpec, benchmark_names, load_manifest
from .sets import ImageSet

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


def find_reference(
    manifest: Manifest, data_root: Path, reference: str | Path | None = None
) -> SetStatus:
    r"""Finds the reference of a benchmark.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        reference: The name of a reference of the manifest, or the path of a folder, list or
            array; None for the first of the manifest that is present. One that contains classes
            of an OOD set is never chosen unless named.

    Returns:
        The state of the reference, which need not be present if the manifest names it.
    """
    known = manifest.role("reference")

    if reference is None:
        states = [inspect(manifest, spec, data_root) for spec in known if not spec.overlaps]
        if not states:
            raise UserError(f"benchmark {manifest.name} has no default reference; name one")
        return next((s for s in states if s.present), states[0])

    for spec in known:
        if str(reference) == spec.name:
            return inspect(manifest, spec, data_root)

    path = Path(reference)
    spec = SetSpec(path.stem, "reference", str(path))

    if is_folder(path):
        return inspect_list(spec, path, path, list_folder(path))
    if is_regular(path) and path.suffix == ".npy":
        return inspect_array(spec, path)
    if is_regular(path):
        content = read_list(path)
        # OpenOOD's lists are relative to the images of the data root, other lists to themselves.
        base = data_root / manifest.images
        is_local = bool(content.names) and not is_regular(base / content.names[0])
        return inspect_list(spec, path, path.parent if is_local else base, content)

    names = [s.name for s in known]
    raise UserError(
        f"no reference {str(reference)!r}{did_you_mean(str(reference), names)}: not a folder, "
        f"list or array, and not one of {', '.join(names) or '(none)'}"
    )


def hold_out_reference(
    reference: ImageSet,
    classes: int | Sequence[str] = 10,
    fraction: float = 0.1,
    seed: int = 0,
) -> tuple[ImageSet, ImageSet]:
    r"""Splits a reference into a part for training and a part for validation.

    Classes are held out if there are at least twice as many, else a fraction of the images.

    Arguments:
        reference: The reference.
        classes: How many classes to hold out, or their names.
        fraction: The fraction of images to hold out from a reference without classes.
        seed: The seed of the draw.

    Returns:
        The images for training and for validation, which share no class in the former case.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie in (0, 1), found {fraction}")

    rng = np.random.default_rng(seed)
    held: NDArray[np.str_]
    groups = np.asarray(reference.groups)
    names = sorted(set(groups.tolist()) - {""})

    if isinstance(classes, int):
        count = classes if len(names) >= 2 * classes else 0
        held = rng.choice(np.asarray(names, dtype=np.str_), count, replace=False)
    else:
        held = np.asarray(classes, dtype=np.str_)
        if unknown := sorted(set(held.tolist()) - set(names)):
            raise ValueError(f"no reference class {', '.join(unknown)}")

    if len(held):
        mask = np.isin(groups, held)
    else:
        mask = np.zeros(len(reference), dtype=bool)
        size = round(fraction * len(reference))
        mask[rng.choice(len(reference), size, replace=False)] = True

    if mask.all() or not mask.any():
        raise UserError(
            f"reference: {len(reference)} images with {len(held)} classes held out cannot be split "
            "into a part for training and a part for validation, both with images"
        )

    return reference.subset(~mask), reference.subset(mask)
