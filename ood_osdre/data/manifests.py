r"""Benchmark manifests: the YAML files that say which sets a benchmark is made of.

For each in-distribution (ID) data set that the benchmark knows, a manifest holds the statistics
of its images, and the sets with their roles: the list file that defines each, and how many images
it should have. Where the sha256 of a list is known it is recorded too, so that no table is made
from another version of the list by mistake.

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
    "Download",
    "Manifest",
    "SetSpec",
    "benchmark_names",
    "check_id",
    "load_manifest",
]

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from ..errors import UserError, did_you_mean
from ..options import Natural, Options, Share, shown
from ..resources import find, names, read_yaml
from .builtin import SETS

#: The manifests that each ID data set is evaluated by unless one is named: the first that is whole.
BENCHMARKS = {
    "digits": ("digits",),
    "cifar10": ("openood", "openood_subset"),
    "cifar100": ("openood", "openood_subset"),
    "mirror": ("mirror0", "mirror1"),
    "places100": ("places100",),
    "imagenet200": ("imagenet",),
    "imagenet": ("imagenet",),
}
# Of these roles a benchmark has one set, of the others several.
SINGLE = ("id_train", "id_val", "id_test", "ood_val")
# Of these, no two sets may have the same name, nor that of another row of the table.
TABLES = ("near", "far", "csid")
RESERVED = ("id", "all", "nearood", "near_held", "farood")
UNWRITABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# The longest name of a file that common file systems have, in bytes.
LONGEST = 255


def _text(holds: Callable[[str], bool], expected: str) -> AfterValidator:
    r"""Returns the check that a text is on one line and holds to a rule."""

    def check(text: str) -> str:
        if UNWRITABLE.search(text) or not holds(text):
            raise PydanticCustomError("text", "Input should be {expected}", {"expected": expected})
        return text

    return AfterValidator(check)


def _is_path(text: str) -> bool:
    return 0 < max(len(part.encode()) for part in text.split("/")) <= LONGEST


def _is_pattern(text: str) -> bool:
    try:
        text.format(split="train", index=0, label=0, class_name="a", number=0)
    except (LookupError, ValueError, AttributeError, TypeError):
        return False
    return True


def _as_names(values: object) -> object:
    r"""Turns integers, as which YAML reads names such as `7`, into text."""
    if not isinstance(values, list):
        return values
    return tuple(str(v) if type(v) is int else v for v in values)


def _as_overlaps(value: object) -> object:
    r"""Turns a list of sets into a mapping to no companion."""
    names = _as_names(value)
    if isinstance(names, tuple) and all(isinstance(name, str) for name in names):
        return dict.fromkeys(names)
    return names


# With a bound, pydantic also refuses what UTF-8 cannot hold.
Text = Annotated[str, Field(max_length=10_000)]
Name = Annotated[str, _text(lambda text: bool(text.strip()), "a name on one line")]
Names = Annotated[tuple[Name, ...], BeforeValidator(_as_names)]
FilePath = Annotated[str, _text(_is_path, "the path of a file or folder")]
ListFolder = Annotated[
    FilePath,
    _text(lambda text: not set("{}") & set(text.replace("{id}", "")), "no field but {id}"),
]
ImagePattern = Annotated[
    FilePath, _text(_is_pattern, "a pattern of split, index, label, class_name and number")
]
# Less would be zero once divided by; of pixels in [0, 1] no deviation exceeds 1/2.
Deviation = Annotated[float, Field(ge=1e-6, le=1)]


class Download(Options):
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

    dataset: Literal["cifar10", "cifar100", "fashion_mnist", "mnist", "svhn"]
    splits: Annotated[tuple[Literal["train", "test"], ...], Field(strict=False, min_length=1)]
    path: ImagePattern
    first: Natural = 0
    subset: (
        Literal["cifar10_val", "cifar10_test", "cifar100_val", "cifar100_test", "cifar100_near"]
        | None
    ) = None
    quality: Annotated[int, Field(ge=1, le=100)] = 95


class SetSpec(Options):
    r"""What a manifest says about one set.

    Attributes:
        name: The name of the set, unique among the sets of its role.
        role: One of the roles above.
        list: The list file, or the `.npy` array; None for an embedded or a synthetic set.
        images: The folder of images below the data root; None for the manifest's.
        synthetic: For a near or far set without a list, the kind of
            :func:`~ood_osdre.data.builtin.synthetic_ood` that makes its `count` images, from ID
            test images where it needs some.
        count: The number of images expected; None if unknown.
        sha256: The checksum of the list, see :class:`~ood_osdre.data.lists.ImageList`; None if
            unknown.
        dataset: The data set it is taken from, a key of the manifest's `datasets`.
        note: What else a reader of the table should know.
        download: How to download it; None if only by hand.
        overlaps: For a reference, the near sets of whose classes it holds some, each with its
            companion, the near set that is its part without them; None if there is none.
    """

    name: Name
    role: Literal["id_train", "id_val", "id_test", "reference", "ood_val", "near", "far", "csid"]
    list: FilePath | None = None
    images: FilePath | None = None
    synthetic: Literal["patch_shuffled", "shapes", "noise"] | None = None
    count: Annotated[int, Field(ge=1, le=10**9)] | None = None
    sha256: str | None = None
    dataset: str | None = None
    note: Text = ""
    download: Download | None = None
    overlaps: Annotated[dict[Name, Name | None], BeforeValidator(_as_overlaps)] = Field(
        default_factory=dict
    )

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class DataSet(Options):
    r"""Where images come from, and a short note on their licence."""

    source: Text = ""
    licence: Text = ""


class IdSets(Options):
    r"""What a manifest says of one ID data set.

    Attributes:
        mean: The mean of each ID channel, for pixels in :math:`[0, 1]`.
        std: The standard deviation of each ID channel.
        sets: Every set of the benchmark.
    """

    mean: Annotated[tuple[Share, Share, Share], Field(strict=False)]
    std: Annotated[tuple[Deviation, Deviation, Deviation], Field(strict=False)]
    sets: Annotated[tuple[SetSpec, ...], Field(strict=False, min_length=1)]


class ManifestFile(Options):
    r"""The content of a manifest file.

    Attributes:
        title: The title of its tables.
        ids: The ID data sets, by name.
        datasets: The data sets that images come from, by name.
        note: What a reader of the tables should know.
        get: How to get the data.
        size: The side :math:`S` of the images, in pixels.
        images: The folder of images below the data root.
        lists: The folder of lists below the data root, in which `{id}` is the ID data set.
        hold_out: The reference classes held out for validation; empty to draw them.
    """

    title: Text
    ids: Annotated[dict[str, IdSets], Field(min_length=1)]
    datasets: dict[str, DataSet] = Field(default_factory=dict)
    note: Text = ""
    get: Text = ""
    size: Annotated[int, Field(ge=1, le=4096)] = 32
    images: FilePath = "images_classic"
    lists: ListFolder = "benchmark_imglist/{id}"
    hold_out: Names = ()

    @model_validator(mode="after")
    def _check_sets(self) -> Self:
        for id_name, entry in self.ids.items():
            for i, spec in enumerate(entry.sets):
                if mistake := next(self._mistakes(id_name, entry.sets[:i], spec), None):
                    raise ValueError(f"ids.{id_name}.sets[{i}].{mistake}")
        return self

    def _mistakes(self, id_name: str, before: tuple[SetSpec, ...], spec: SetSpec) -> Iterator[str]:
        r"""Yields what is wrong with a set, given those before it."""
        if spec.dataset is not None and spec.dataset not in self.datasets:
            near = did_you_mean(spec.dataset[:80], self.datasets)
            yield f"dataset: got {shown(spec.dataset)}{near}, expected a key of datasets"
        # The rows of a table have their set's name, so near and far names must differ too.
        in_table = spec.role in TABLES
        taken = {s.name for s in before if s.role in (TABLES if in_table else (spec.role,))}
        is_reserved = spec.name.split(" ")[0] in RESERVED or spec.name == f"{id_name}_test"
        if spec.name in taken or (in_table and is_reserved):
            yield f"name: got {shown(spec.name)}, expected one that no other set or row has"
        if spec.role in SINGLE and any(s.role == spec.role for s in before):
            yield f"role: got a second set of role {spec.role}, expected one"
        sets = self.ids[id_name].sets
        near_sets = {s.name for s in sets if s.role == "near"}
        for name in [n for pair in spec.overlaps.items() for n in pair if n is not None]:
            if spec.role != "reference" or name not in near_sets:
                yield f"overlaps: got {shown(name)} for the {spec}, expected a near set of a reference"
        if spec.synthetic is not None:
            if spec.role not in ("near", "far") or spec.list is not None or spec.count is None:
                yield "synthetic: expected for a near or far set, with a count and no list"
            return
        # Only the embedded benchmark, all of it, does without lists.
        is_embedded = {(s.role, s.name) for s in sets} == set(SETS) and id_name == "digits"
        if spec.list is None and not (is_embedded and all(s.list is None for s in sets)):
            yield f"list: got none for the {spec}, expected a list file or .npy array"


class Manifest(ManifestFile, IdSets):
    r"""A benchmark for one ID data set: a manifest file, and the part of this ID data set.

    Attributes:
        name: The name of the manifest file, without suffix.
        id_name: The name of the ID data set.
    """

    name: str
    id_name: str

    @property
    def is_embedded(self) -> bool:
        r"""Whether the sets come with the package rather than from a data root."""
        return all(s.list is None for s in self.sets)

    def role(self, role: str) -> tuple[SetSpec, ...]:
        r"""Returns the sets of a role, in the order of the file."""
        return tuple(s for s in self.sets if s.role == role)

    def overlaps(self, reference: str | None) -> dict[str, str | None]:
        r"""Returns the near sets of whose classes a reference holds some, with their companions.

        Arguments:
            reference: Its name; of one that the manifest does not know, nothing is known.
        """
        known = {s.name: s.overlaps for s in self.role("reference")}
        return dict(known.get(reference or "", {}))

    @property
    def parts(self) -> dict[str, str]:
        r"""The near sets that are a part of another one, as its companion, and that one."""
        pairs = [pair for s in self.role("reference") for pair in s.overlaps.items()]
        return {companion: whole for whole, companion in pairs if companion is not None}

    def path(self, spec: SetSpec, data_root: Path) -> Path:
        r"""Returns the path of a set's list, or of its array, below a data root."""
        assert spec.list is not None, f"{spec.name} is embedded"
        folder = "" if spec.list.endswith(".npy") else self.lists.replace("{id}", self.id_name)
        return data_root / folder / spec.list


def benchmark_names(id_name: str | None = None) -> list[str]:
    r"""Returns the names of the known benchmarks.

    Arguments:
        id_name: If given, only those that have this ID data set.
    """
    known = names("data_manifests")
    ids = {name: read_yaml(find("data_manifests", name)).get("ids") for name in known}
    return [n for n, has in ids.items() if has and (id_name is None or id_name in has)]


def check_id(name: str) -> None:
    r"""Refuses an ID data set that has to come with a benchmark of its own."""
    if name not in BENCHMARKS:
        expected = f"expected {', '.join(BENCHMARKS)}, or a set of your own in --benchmark FILE"
        raise UserError(f"--id: got {name}{did_you_mean(name, BENCHMARKS)}, {expected}.")


def load_manifest(name: str | Path, id_name: str) -> Manifest:
    r"""Reads a manifest.

    Arguments:
        name: The name of a known manifest, or the path of a file.
        id_name: The ID data set, a key of the manifest's `ids`.

    Raises:
        UserError: If there is no such file or ID data set, or a key is unknown or wrong.
    """
    path = find("data_manifests", str(name))
    file = ManifestFile.of(read_yaml(path), str(path))
    if id_name not in file.ids:
        known = ", ".join(map(shown, list(file.ids)[:20]))
        near = did_you_mean(id_name, file.ids)
        raise UserError(f"{path}: ids: got {id_name!r}{near}, expected one of {known}.")
    return Manifest(**dict(file), **dict(file.ids[id_name]), name=path.stem, id_name=id_name)
