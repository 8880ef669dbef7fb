r"""Benchmark manifests: which sets a benchmark is made of, as data rather than code.

A manifest is one YAML file a benchmark. It holds, for each in-distribution (ID) data set the
benchmark knows, the image statistics and the sets with their roles, the list file that defines
each, and how many images it should have. Where the sha256 of a list is known it is recorded too,
so that a table cannot be made from another version of the list by mistake.

======================= =========================================================
role                    meaning
======================= =========================================================
id_train, id_val        ID images for training and validation (labels 0 to C - 1)
id_test                 ID images of the table
reference               the reference distribution, alternatives by preference
near, far               out-of-distribution (OOD) images of the table
csid                    ID images of a shifted distribution; in no table
ood_val                 OOD images for validation, used on explicit request only
======================= =========================================================
"""

__all__ = [
    "BENCHMARKS",
    "ROLES",
    "Download",
    "Manifest",
    "SetSpec",
    "benchmark_names",
    "load_manifest",
]

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError, did_you_mean
from ..resources import find, names, read_yaml
from .digits import SETS
from .fields import as_mapping, channels, keys_of, name_of, names_of, path_of, shown, typed, whole

#: The manifest that each ID data set is evaluated by unless another is named.
BENCHMARKS = {"digits": "digits", "cifar10": "openood", "cifar100": "openood"}
ROLES = ("id_train", "id_val", "id_test", "reference", "ood_val", "near", "far", "csid")
TOP_KEYS = ("title", "note", "get", "size", "images", "lists", "hold_out", "datasets", "ids")
DATASET_KEYS = ("source", "licence")
ID_KEYS = ("mean", "std", "sets")
DOWNLOAD_KEYS = ("dataset", "splits", "path", "first", "subset", "quality")
SET_KEYS = ("name", "role", "dataset", "list", "count", "sha256", "note", "download", "overlaps")
# Of these roles a benchmark has one set, of the others several.
SINGLE = ("id_train", "id_val", "id_test", "ood_val")
# Of these, no two sets may bear one name, nor that of another row.
TABLES = ("near", "far", "csid")
RESERVED = ("id", "all", "nearood", "farood")
#: The largest side of images, in pixels.
LARGEST = 4096


@dataclass(frozen=True)
class Download:
    r"""How to lay out a data set that torchvision can download.

    Attributes:
        dataset: The name of the data set.
        splits: Its splits.
        path: A pattern of image paths, with the fields `split`, `index` (in the split, from 0),
            `label`, `class_name` and `number` (in the class, from 0).
        first: What to add to `index` and `number`.
        subset: Which images of the split, see :mod:`ood_osdre.data.download`; None for all.
        quality: The quality of JPEG files.
    """

    dataset: str
    splits: tuple[str, ...]
    path: str
    first: int = 0
    subset: str | None = None
    quality: int = 95


@dataclass(frozen=True)
class SetSpec:
    r"""What a manifest says about one set.

    Attributes:
        name: The name of the set, unique among the sets of its role.
        role: One of :data:`ROLES`.
        list: The list file, or the `.npy` array; None for an embedded set.
        count: The number of images expected; None if unknown.
        checksum: The sha256 of the list, see :class:`~ood_osdre.data.lists.ImageList`; None if
            unknown.
        source: Where the images come from.
        licence: A short licence note.
        note: What else a reader of the table should know.
        download: How to download it; None if only by hand.
        overlaps: For a reference, the OOD sets whose classes or images it contains.
    """

    name: str
    role: str
    list: str | None
    count: int | None = None
    checksum: str | None = None
    source: str = ""
    licence: str = ""
    note: str = ""
    download: Download | None = None
    overlaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    r"""A benchmark for one ID data set.

    Attributes:
        name: The name of the manifest file, without suffix.
        title: The title of its tables.
        note: What a reader of the tables should know.
        id_name: The name of the ID data set.
        size: The side :math:`S` of the images, in pixels.
        mean: The mean of each ID channel, for images in :math:`[0, 1]`.
        std: The standard deviation of each ID channel.
        sets: Every set of the benchmark.
        get: How to get the data.
        images: The folder of images below the data root.
        lists: The folder of lists below the data root.
        hold_out: The reference classes held out for validation; empty to draw them.
    """

    name: str
    title: str
    note: str
    id_name: str
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    sets: tuple[SetSpec, ...]
    get: str = ""
    images: str = "images_classic"
    lists: str = "benchmark_imglist"
    hold_out: tuple[str, ...] = ()

    @property
    def is_embedded(self) -> bool:
        r"""Whether the sets come with the package rather than from a data root."""
        return bool(self.sets) and all(s.list is None for s in self.sets)

    def role(self, role: str) -> tuple[SetSpec, ...]:
        r"""Returns the sets of a role, in the order of the file."""
        return tuple(s for s in self.sets if s.role == role)

    def path(self, spec: SetSpec, data_root: Path) -> Path:
        r"""Returns the path of a set's list, or of its array, below a data root."""
        assert spec.list is not None, f"{spec.name} is embedded"
        return data_root / ("" if spec.list.endswith(".npy") else self.lists) / spec.list


def benchmark_names(id_name: str | None = None) -> list[str]:
    r"""Returns the names of the known benchmarks.

    Arguments:
        id_name: If given, only those that have this ID data set.
    """
    known = names("data_manifests")
    ids = {name: read_yaml(find("data_manifests", name)).get("ids") for name in known}
    return [n for n, has in ids.items() if has and (id_name is None or id_name in has)]


def load_manifest(name: str | Path, id_name: str) -> Manifest:
    r"""Reads a manifest.

    Arguments:
        name: The name of a known manifest, or the path of a file.
        id_name: The ID data set, a key of the manifest's `ids`.
    """
    path = find("data_manifests", str(name))

    top = keys_of(_read(path), TOP_KEYS, f"{path}", required=("title", "ids"))
    ids = as_mapping(top["ids"], f"{path}: ids")
    if id_name not in ids:
        known = [str(key)[:80] for key in ids]
        raise UserError(
            f"{path}: no ID data set {id_name!r}{did_you_mean(id_name, known)}; "
            f"known: {', '.join(known[:20])}"
        )

    where = f"{path}: ids.{id_name}"
    entry = keys_of(ids[id_name], ID_KEYS, where, required=ID_KEYS)
    datasets = {
        key: keys_of(value, DATASET_KEYS, f"{path}: datasets.{key}")
        for key, value in as_mapping(top.get("datasets", {}), f"{path}: datasets").items()
    }
    sets = tuple(
        _set(s, datasets, f"{where}.sets[{i}]")
        for i, s in enumerate(typed(entry, "sets", list, where, []))
    )
    _check_sets(sets, id_name, where)

    return Manifest(
        name=path.stem,
        title=typed(top, "title", str, f"{path}", ""),
        note=typed(top, "note", str, f"{path}", "").strip(),
        id_name=id_name,
        size=whole(top, "size", f"{path}", 32, 1, LARGEST),
        mean=channels(entry, "mean", where),
        std=channels(entry, "std", where),
        sets=sets,
        get=typed(top, "get", str, f"{path}", "").strip(),
        images=path_of(top, "images", f"{path}", "images_classic"),
        lists=_lists(top, f"{path}", id_name),
        hold_out=names_of(top, "hold_out", f"{path}"),
    )


def _read(path: Path) -> object:
    try:
        return read_yaml(path)
    except RecursionError:
        raise UserError(f"{path}: nested too deeply, expected a manifest") from None


def _lists(top: Mapping[str, Any], where: str, id_name: str) -> str:
    pattern = path_of(top, "lists", where, "benchmark_imglist/{id}")
    lists = pattern.replace("{id}", id_name)
    if "{" in lists or "}" in lists:
        raise UserError(f"{where}: lists is {shown(pattern)}, expected no field but {{id}}")
    return lists


def _set(content: object, datasets: Mapping[str, Mapping[str, Any]], where: str) -> SetSpec:
    entry = keys_of(content, SET_KEYS, where, required=("name", "role"))

    role = typed(entry, "role", str, where, "")
    if role not in ROLES:
        raise UserError(
            f"{where}: role {shown(role)}{did_you_mean(role[:80], ROLES)}; one of {ROLES}"
        )

    dataset = typed(entry, "dataset", str, where, None)
    if dataset is not None and dataset not in datasets:
        raise UserError(
            f"{where}: no dataset {shown(dataset)}{did_you_mean(dataset[:80], map(str, datasets))}"
        )

    about = datasets[dataset] if dataset is not None else {}

    return SetSpec(
        name=name_of(entry, "name", where),
        role=role,
        list=path_of(entry, "list", where, None),
        count=whole(entry, "count", where, None, 1, 10**9),
        checksum=typed(entry, "sha256", str, where, None),
        source=typed(about, "source", str, where, ""),
        licence=typed(about, "licence", str, where, ""),
        note=typed(entry, "note", str, where, ""),
        download=_download(entry["download"], f"{where}.download")
        if "download" in entry
        else None,
        overlaps=names_of(entry, "overlaps", where),
    )


def _download(content: object, where: str) -> Download:
    entry = keys_of(content, DOWNLOAD_KEYS, where, required=("dataset", "splits", "path"))

    return Download(
        dataset=typed(entry, "dataset", str, where, ""),
        splits=names_of(entry, "splits", where),
        path=_pattern(entry, where),
        first=whole(entry, "first", where, 0, 0, 10**9),
        subset=typed(entry, "subset", str, where, None),
        quality=whole(entry, "quality", where, 95, 1, 100),
    )


def _pattern(entry: Mapping[str, Any], where: str) -> str:
    pattern = path_of(entry, "path", where, "")
    fields = {"split": "train", "index": 0, "label": 0, "class_name": "a", "number": 0}
    try:
        pattern.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError):
        known = ", ".join(fields)
        raise UserError(
            f"{where}: path is {shown(pattern)}, expected a pattern with the fields {known}"
        ) from None
    return pattern


def _check_sets(sets: Collection[SetSpec], id_name: str, where: str) -> None:
    if not sets:
        raise UserError(f"{where}: sets is empty, expected the sets of the benchmark")
    seen: set[tuple[str, str]] = set()
    for spec in sets:
        # A table's rows go by their name, so near and far names may not meet either.
        key = ("ood" if spec.role in TABLES else spec.role, spec.name)
        if key in seen:
            raise UserError(f"{where}: two sets are named {spec.name!r} ({spec.role})")
        if spec.role in SINGLE and any(role == spec.role for role, _ in seen):
            raise UserError(f"{where}: {spec.name!r} is a second set of role {spec.role}")
        is_reserved = spec.name.split(" ")[0] in RESERVED or spec.name == f"{id_name}_test"
        if spec.role in TABLES and is_reserved:
            raise UserError(f"{where}: the {spec.role} set {spec.name!r} has another row's name")
        seen.add(key)

    # Only the embedded benchmark, all of it, does without lists.
    is_embedded = id_name == "digits" and {(s.role, s.name) for s in sets} == set(SETS)
    without = [s for s in sets if s.list is None]
    if without and not (is_embedded and len(without) == len(sets)):
        spec = without[0]
        raise UserError(f"{where}: the {spec.role} set {spec.name!r} has no list, expected one")
