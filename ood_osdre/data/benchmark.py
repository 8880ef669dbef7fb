r"""Loads a benchmark: those of its sets that are whole on disk.

A set is decoded once and kept in the cache; of a large one (`LIMIT`) files are decoded, and arrays
resized, as they are read. Every ID set must have the classes of training. Sets that share images,
and a reference that holds classes of a near set without a companion, are warned of.
"""

__all__ = ["BenchmarkData", "choose_benchmark", "load_benchmark", "load_digits_benchmark"]

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import UserError, first
from ..files import local, map_array, stat
from .builtin import load_digits_sets, synthetic_ood
from .image_files import ImageFiles, ResizedRows, checksum_of, fingerprints, is_large
from .images import cached_array, decode_all, image_files, square
from .manifests import BENCHMARKS, Manifest, SetSpec, load_manifest
from .sets import ImageSet, count_shared, hold_out_reference, key_of
from .status import (
    REQUIRED,
    SetStatus,
    advice,
    explain,
    find_reference,
    inspect,
    lacking,
    shared_files,
)

CACHE = ".ood_osdre_cache"
# Sets of these roles must share no image with any other set. OOD sets may.
EXCLUSIVE = {"id_train", "id_val", "id_test", "reference"}
# The seed of the synthetic sets of a table; those of validation have 0.
SYNTHETIC_SEED = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BenchmarkData:
    r"""The images of a benchmark.

    Attributes:
        manifest: What the benchmark should be.
        id_train: ID images for training.
        id_val: ID images for validation.
        id_test: ID images of the table.
        reference: Reference images.
        near: The near sets that are present, by name.
        far: The far sets that are present, by name.
        ood_val: OOD images for validation, to be used on explicit request only.
        checksums: The sha256 of each set's list, or of its pixels where it has none.
        reference_name: The name of the reference.
        missing: What is wrong with each near or far set that is not (wholly) present, by name.
        cache: The folder of what is kept of the sets; None if they are embedded.
    """

    manifest: Manifest
    id_train: ImageSet
    id_val: ImageSet
    id_test: ImageSet
    reference: ImageSet
    near: dict[str, ImageSet]
    far: dict[str, ImageSet]
    ood_val: ImageSet | None = None
    checksums: dict[str, str] = field(default_factory=dict)
    reference_name: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    cache: Path | None = None

    @property
    def classes(self) -> int:
        r"""The number of ID classes :math:`C`."""
        return int(self.id_train.labels.max()) + 1

    @property
    def absent(self) -> list[str]:
        r"""The near and far sets that are not (wholly) present."""
        return list(self.missing)

    def absent_by_role(self) -> dict[str, list[str]]:
        r"""Returns the names in `absent`, those of the near and of the far sets."""
        return {
            role: [s.name for s in self.manifest.role(role) if s.name in self.missing]
            for role in ("near", "far")
        }

    def split_reference(self, last: int | None = None) -> tuple[ImageSet, ImageSet]:
        r"""Holds out the last images, or the manifest's classes, see :func:`hold_out_reference`."""
        groups = set(self.reference.groups)
        held = [c for c in self.manifest.hold_out if c in groups]
        return hold_out_reference(self.reference, held or 10, last=last)


def choose_benchmark(
    id_name: str, data_root: str | Path, reference: str | Path | None = None
) -> tuple[Manifest, str]:
    r"""Chooses the benchmark of an ID data set: the first of its own that is whole on disk.

    Arguments:
        id_name: The ID data set.
        data_root: The folder that holds lists and images.
        reference: As in :func:`load_benchmark`.

    Returns:
        The benchmark, and why it was chosen, in a line.

    Raises:
        UserError: If none is whole.
    """
    root, passed = local(data_root), list[str]()
    manifests = [load_manifest(name, id_name) for name in BENCHMARKS.get(id_name, ())]
    for manifest in manifests:
        if not (lacks := lacking(manifest, root, reference)):
            reason = f"benchmark {manifest.name}: whole in {data_root}"
            return manifest, ", unlike ".join([reason, *passed])
        more = f" and {len(lacks) - 1} more" if lacks[1:] else ""
        passed.append(f"{manifest.name}, which lacks {lacks[0]}{more}")
    if not manifests:
        raise UserError(f"benchmark: got none, expected the name of one with ID {id_name!r}.")
    what = f"no benchmark of --id {id_name} is whole in {root.resolve()} (--data-root):"
    raise UserError("\n".join([what, *(f"  {p}" for p in passed), *advice(manifests, root)]))


def load_benchmark(
    manifest: Manifest,
    data_root: str | Path,
    cache_dir: str | Path | None = None,
    reference: str | Path | None = None,
    training: bool = True,
    progress: bool = True,
) -> BenchmarkData:
    r"""Loads the sets of a benchmark that are present.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        cache_dir: Where to keep decoded images; by default a folder in the data root.
        reference: The name of a reference, or the path of a folder, list or array; None for
            the first of the manifest that is present.
        training: Whether to load what training needs: without it, the reference and the ID
            training and validation sets are empty.
        progress: Whether to show progress bars where images are decoded.

    Raises:
        UserError: If a required set, or every set of the table, is not whole; if an image cannot
            be decoded; or if the ID sets have classes that training has not.
    """
    if manifest.is_embedded:
        if reference is not None:
            raise UserError(f"benchmark {manifest.name} is embedded; it takes no reference")
        return load_digits_benchmark(manifest)

    root = local(data_root)
    cache = root / CACHE if cache_dir is None else local(cache_dir)
    required, optional = _inspect_all(manifest, root, reference, training)
    present = [s for s in (*required, *optional) if s.present]
    tables = [s for s in optional if s.spec.role != "ood_val"]
    missing = {s.spec.name: str(s) for s in tables if not s.present}
    for status in missing.values():
        log.warning("not in the table: %s", status)
    loaded: dict[tuple[str, str], ImageSet] = {
        (s.spec.role, s.spec.name): _load_set(s, manifest.size, cache, progress)
        for s in present
        if s.spec.synthetic is None
    }
    (id_test,) = (images for (role, _), images in loaded.items() if role == "id_test")
    loaded |= _synthetic([s.spec for s in present if s.spec.synthetic is not None], id_test)
    if training:
        _check_classes(loaded)
        spec, rows = required[-1].spec, [s.spec.name for s in tables if s.present]
        message = "the reference %s holds classes of %s: no mean counts its row"
        for name in [row for row in rows if spec.overlaps.get(row, "") is None]:
            log.warning(message, spec.name, name)
    _warn_of_copies(present, loaded, cache)
    checksums = {
        f"{s.spec.role}/{s.spec.name}": s.list.checksum for s in present if s.list is not None
    }
    return replace(_assemble(manifest, loaded, checksums, missing), cache=cache)


def load_digits_benchmark(manifest: Manifest | None = None) -> BenchmarkData:
    r"""Loads the embedded benchmark, which needs no data on disk.

    Arguments:
        manifest: The manifest of the digits; None to read it.
    """
    return _assemble(manifest or load_manifest("digits", "digits"), load_digits_sets(), {}, {})


def _inspect_all(
    manifest: Manifest, root: Path, reference: str | Path | None, training: bool
) -> tuple[list[SetStatus], list[SetStatus]]:
    r"""Returns the states of the sets that are required, the reference last, and of the others."""

    def of(*roles: str) -> list[SetStatus]:
        return [inspect(manifest, s, root) for role in roles for s in manifest.role(role)]

    roles = REQUIRED if training else ("id_test",)
    required = of(*roles)
    if training:
        required.append(find_reference(manifest, root, reference))
    optional = of("near", "far", "ood_val") if training else of("near", "far")
    tables = [s for s in optional if s.spec.role != "ood_val"]

    lacking = [f"no set of role {role}" for role in roles if not manifest.role(role)]
    lacking += [str(s) for s in required if not s.present]
    if not lacking and not any(s.present for s in tables):
        lacking = [str(s) for s in tables] or ["no set of role near or far"]
    if lacking:
        needs_reference = any(s.spec.role == "reference" and not s.present for s in required)
        raise UserError("\n".join(explain(manifest, root, lacking, needs_reference)))
    return required, optional


def _assemble(
    manifest: Manifest,
    loaded: dict[tuple[str, str], ImageSet],
    checksums: dict[str, str],
    missing: dict[str, str],
) -> BenchmarkData:
    r"""Sorts loaded sets, by role and name, into the fields of the result."""

    def of(role: str) -> dict[str, ImageSet]:
        return {name: s for (r, name), s in loaded.items() if r == role}

    def one(role: str) -> ImageSet:
        return next(iter(of(role).values()), ImageSet.empty(manifest.size))

    for (role, name), images in loaded.items():
        if f"{role}/{name}" not in checksums:
            checksums[f"{role}/{name}"] = checksum_of(images.images)
    return BenchmarkData(
        manifest=manifest,
        id_train=one("id_train"),
        id_val=one("id_val"),
        id_test=one("id_test"),
        reference=one("reference"),
        near=of("near"),
        far=of("far"),
        ood_val=next(iter(of("ood_val").values()), None),
        checksums=checksums,
        reference_name=next(iter(of("reference")), ""),
        missing=missing,
    )


def _load_set(status: SetStatus, size: int, cache_dir: Path, progress: bool) -> ImageSet:
    r"""Loads a present set, through the cache unless it is large, or an array as it should be."""
    content, images, path = status.list, status.images, status.path
    if content is None:
        array: NDArray[np.uint8] = map_array(path)
        names, labels = [f"{path.name}[{i}]" for i in range(len(array))], np.full(len(array), -1)
        parts: tuple[bytes, ...] = os.fsencode(os.path.realpath(path)), repr(stat(path)).encode()
        key = key_of(*parts, b"%d" % size)
        if array.shape[1:] == (size, size, 3):
            return ImageSet(array, labels, names, key)
        grey = array[..., 0] if array.ndim == 4 and array.shape[3] == 1 else array
        resized = ResizedRows(grey, size, lambda image: square(Image.fromarray(image), size))
        if is_large(len(array), size):
            return ImageSet(resized, labels, names, key)

        def build() -> NDArray[np.uint8]:
            return resized[:]
    else:
        names, labels = list(content.names), np.asarray(content.labels, dtype=np.int64)
        if not status.spec.role.startswith("id_"):
            labels = np.full_like(labels, -1)
        # Other roots may hold other pixels under the same names, sizes and times.
        root = os.fsencode(os.path.realpath(images))
        parts = root, "\n".join(names).encode(), repr(status.stats).encode()
        key, title = key_of(*parts, b"%d" % size), str(status.spec)
        if is_large(len(names), size):
            return ImageSet(image_files(images, content.names, size, title), labels, names, key)

        def build() -> NDArray[np.uint8]:
            return decode_all([images / name for name in names], size, title, progress)

    shape = len(names), size, size, 3
    return ImageSet(cached_array(build, shape, parts, path.stem, cache_dir), labels, names, key)


def _synthetic(specs: Sequence[SetSpec], id_test: ImageSet) -> dict[tuple[str, str], ImageSet]:
    r"""Makes the images of the synthetic sets."""
    counts = {s.count or 0 for s in specs}
    made = {n: synthetic_ood(id_test.images, n, SYNTHETIC_SEED) for n in counts}
    sets: dict[tuple[str, str], ImageSet] = {}
    for spec in specs:
        images = made[spec.count or 0][spec.synthetic or ""]
        names = [f"{spec.synthetic}/{i:05d}" for i in range(len(images))]
        sets[spec.role, spec.name] = ImageSet(images, np.full(len(images), -1), names)
    return sets


def _check_classes(loaded: Mapping[tuple[str, str], ImageSet]) -> None:
    r"""Refuses ID images of a class that training never sees."""
    (largest,) = (s.labels.max() for (role, _), s in loaded.items() if role == "id_train")
    for (role, _), images in loaded.items():
        if count := int((images.labels > largest).sum()):
            raise UserError(
                f"{role}: {count} of {len(images)} labels are beyond {largest}, the largest of "
                f"id_train; found {images.labels.max()}"
            )


def _warn_of_copies(
    statuses: Sequence[SetStatus], loaded: Mapping[tuple[str, str], ImageSet], cache_dir: Path
) -> None:
    r"""Warns of copies in lists and sets: of pixels, or of the files of a set that is streamed."""
    files = {(str(s.spec.role), s.spec.name): s for s in statuses}
    streamed = {key for key, s in loaded.items() if isinstance(s.images, ImageFiles)}
    marks = {key: _marks(s, key, cache_dir) for key, s in loaded.items() if key not in streamed}
    for key, status in files.items():
        items: Sequence[object] = () if status.list is None else status.list.names
        if key in marks and key[0] in ("id_train", "reference"):
            items = marks[key].tolist()  # what is held out of them may have copies in training
        if copies := len(items) - len(set(items)):
            log.warning("%s: %d of its entries repeat others", status.path, copies)
    skipped = list[str]()
    for one, other in (p for p in combinations(loaded, 2) if EXCLUSIVE & {p[0][0], p[1][0]}):
        if not streamed & {one, other}:
            count: int | None = count_shared(marks[other], marks[one])
        elif None in (files[one].list, files[other].list):
            count = 0  # an array, or made by the program: no files to compare
        elif (count := shared_files(files[one], files[other])) is None:
            skipped.append(" and ".join(map(" ".join, (one, other))))
        if count:
            message = "%s %s and %s %s share images: %d of the %d of the latter"
            log.warning(message, *one, *other, count, len(loaded[other]))
    if skipped:
        log.warning("not compared, as their files are too many: %s", first(skipped, "pair"))


def _marks(images: ImageSet, key: tuple[str, str], cache_dir: Path) -> NDArray[np.int64]:
    r"""Returns the fingerprints of a set that is not streamed, from the cache if it is of files."""
    build, shape = partial(fingerprints, images.images), (len(images),)
    if not images.key:
        return build()
    parts, stem = (images.key.encode(), b"fingerprints"), "-".join(("marks", *key))
    return cached_array(build, shape, parts, stem, cache_dir, np.int64)
