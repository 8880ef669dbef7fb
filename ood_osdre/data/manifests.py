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
from typing import Any, TypeVar

from ..errors import UserError
from ..options import read_yaml
from ..resources import find, names
from ..spelling import did_you_mean

T = TypeVar("T")
D = TypeVar("D")

#: The manifest that each ID data set is evaluated by unless another is named.
BENCHMARKS = {"digits": "digits", "cifar10": "openood", "cifar100": "openood"}
ROLES = ("id_train", "id_val", "id_test", "reference", "ood_val", "near", "far", "csid")
TOP_KEYS = ("title", "note", "get", "size", "images", "lists", "hold_out", "datasets", "ids")
DATASET_KEYS = ("source", "licence")
ID_KEYS = ("mean", "std", "sets")
DOWNLOAD_KEYS = ("dataset", "splits", "path", "first", "subset", "quality")
SET_KEYS = ("name", "role", "dataset", "list", "count", "sha256", "note", "download", "overlaps")


@dataclass(frozen=True)
class Download:
    r"""How to lay out a data set that torchvision can download.

    Attributes:
        dataset: The name of the data set.
        splits: Its splits.
        path: A pattern of image paths, with the fields `split`, `index` (in the split, from 0),
            `label`, `class_name` and `number` (in the class, from 0).
        first: What to add to `index` and `number`.
        subset: Which images of the split, see :mod:`ood_osdre.data.openood`; None for all.
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

    top = _section(read_yaml(path), TOP_KEYS, f"{path}", required=("title", "ids"))
    ids = _mapping(top["ids"], f"{path}: ids")
    if id_name not in ids:
        raise UserError(
            f"{path}: no ID data set {id_name!r}{did_you_mean(id_name, map(str, ids))}; "
            f"known: {', '.join(map(str, ids))}"
        )

    where = f"{path}: ids.{id_name}"
    entry = _section(ids[id_name], ID_KEYS, where, required=ID_KEYS)
    datasets = {
        key: _section(value, DATASET_KEYS, f"{path}: datasets.{key}")
        for key, value in _mapping(top.get("datasets", {}), f"{path}: datasets").items()
    }
    sets = tuple(
        _set(s, datasets, f"{where}.sets[{i}]")
        for i, s in enumerate(_typed(entry, "sets", list, where, []))
    )
    _check_unique(sets, where)

    return Manifest(
        name=path.stem,
        title=_typed(top, "title", str, f"{path}", ""),
        note=_typed(top, "note", str, f"{path}", "").strip(),
        id_name=id_name,
        size=_typed(top, "size", int, f"{path}", 32),
        mean=_channels(entry, "mean", where),
        std=_channels(entry, "std", where),
        sets=sets,
        get=_typed(top, "get", str, f"{path}", "").strip(),
        images=_typed(top, "images", str, f"{path}", "images_classic"),
        lists=_typed(top, "lists", str, f"{path}", "benchmark_imglist/{id}").format(id=id_name),
        hold_out=tuple(map(str, _typed(top, "hold_out", list, f"{path}", []))),
    )


def _set(content: object, datasets: Mapping[str, Mapping[str, Any]], where: str) -> SetSpec:
    entry = _section(content, SET_KEYS, where, required=("name", "role"))

    role = _typed(entry, "role", str, where, "")
    if role not in ROLES:
        raise UserError(f"{where}: role {role!r}{did_you_mean(role, ROLES)}; one of {ROLES}")

    dataset = _typed(entry, "dataset", str, where, None)
    if dataset is not None and dataset not in datasets:
        raise UserError(f"{where}: no dataset {dataset!r}{did_you_mean(dataset, datasets)}")

    about = datasets[dataset] if dataset is not None else {}

    return SetSpec(
        name=_typed(entry, "name", str, where, ""),
        role=role,
        list=_typed(entry, "list", str, where, None),
        count=_typed(entry, "count", int, where, None),
        checksum=_typed(entry, "sha256", str, where, None),
        source=_typed(about, "source", str, where, ""),
        licence=_typed(about, "licence", str, where, ""),
        note=_typed(entry, "note", str, where, ""),
        download=_download(entry["download"], f"{where}.download")
        if "download" in entry
        else None,
        overlaps=tuple(map(str, _typed(entry, "overlaps", list, where, []))),
    )


def _download(content: object, where: str) -> Download:
    entry = _section(content, DOWNLOAD_KEYS, where, required=("dataset", "splits", "path"))

    return Download(
        dataset=_typed(entry, "dataset", str, where, ""),
        splits=tuple(map(str, _typed(entry, "splits", list, where, []))),
        path=_typed(entry, "path", str, where, ""),
        first=_typed(entry, "first", int, where, 0),
        subset=_typed(entry, "subset", str, where, None),
        quality=_typed(entry, "quality", int, where, 95),
    )


def _check_unique(sets: Collection[SetSpec], where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for spec in sets:
        # A table's rows go by their name, so near and far names may not meet either.
        key = ("ood" if spec.role in ("near", "far", "csid") else spec.role, spec.name)
        if key in seen:
            raise UserError(f"{where}: two sets are named {spec.name!r} ({spec.role})")
        seen.add(key)


def _mapping(content: object, where: str) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise UserError(f"{where}: expected a mapping, found {type(content).__name__}")
    return content


def _section(
    content: object, keys: Collection[str], where: str, required: Collection[str] = ()
) -> Mapping[str, Any]:
    section = _mapping(content, where)

    for key in section:
        if key not in keys:
            raise UserError(
                f"{where}: unknown key {key!r}{did_you_mean(str(key), keys)}; "
                f"known: {', '.join(keys)}"
            )
    for key in required:
        if key not in section:
            raise UserError(f"{where}: the key {key!r} is missing")

    return section


def _typed(section: Mapping[str, Any], key: str, kind: type[T], where: str, default: D) -> T | D:
    value = section.get(key)
    if value is None:
        return default
    # YAML's true is an int to Python.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(
            f"{where}: {key} is {value!r} ({type(value).__name__}), expected {kind.__name__}"
        )
    return value


def _channels(section: Mapping[str, Any], key: str, where: str) -> tuple[float, ...]:
    value = section[key]
    is_list = isinstance(value, list) and len(value) == 3
    if not is_list or not all(isinstance(v, int | float) for v in value):
        raise UserError(f"{where}: {key} is {value!r}, expected three numbers")
    return tuple(map(float, value))
