r"""Laying out data sets that torchvision can download as OpenOOD has them.

Each split is downloaded with its checksum verified, its images are written under the names that
the manifest's pattern gives, and the list is written unless there is one already. An official
list is thus never replaced, and its images are found if they bear the official names.
"""

__all__ = ["DATASETS", "download"]

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.error import URLError

import numpy as np
from PIL import Image
from tqdm import tqdm

from ..errors import UserError, one_line
from ..files import atomic_path
from ..spelling import did_you_mean
from .lists import write_list
from .manifests import Download, Manifest, SetSpec
from .openood import SUBSETS, subset_mask

ARCHIVES = ".ood_osdre_downloads"
#: The names of torchvision's classes.
DATASETS = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "fashion_mnist": "FashionMNIST",
    "mnist": "MNIST",
    "svhn": "SVHN",
}
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}


class Split(Protocol):
    r"""What is needed of a torchvision data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Image.Image, int]: ...


log = logging.getLogger(__name__)


def download(
    manifest: Manifest, spec: SetSpec, data_root: Path, mirror: str | None = None
) -> Path:
    r"""Downloads a set, writes its images and, where there is none, its list.

    Arguments:
        manifest: The benchmark.
        spec: One of its sets, with a recipe to download it.
        data_root: The folder that holds lists and images.
        mirror: The URL of a folder that holds the archives, instead of the usual one.

    Returns:
        The path of the list.
    """
    recipe = spec.download
    if recipe is None:
        raise UserError(f"{spec.role} {spec.name}: cannot be downloaded. {manifest.get}")

    names, labels = [], []
    for name, image, label in tqdm(
        items(recipe, data_root / ARCHIVES, mirror), desc=f"writing {spec.name}", unit="image"
    ):
        path = data_root / manifest.images / name
        if not (path.is_file() and path.stat().st_size):
            write_image(path, image, recipe.quality)
        names.append(name)
        labels.append(label if spec.role.startswith("id_") else -1)

    path = manifest.path(spec, data_root)
    if path.exists():
        log.info("kept the list %s", path)
    else:
        write_list(path, names, labels)

    return path


def items(
    recipe: Download, archives: Path, mirror: str | None
) -> Iterator[tuple[str, Image.Image, int]]:
    r"""Yields the name, image and label of each image of a recipe."""
    if recipe.subset is not None and recipe.subset not in SUBSETS:
        raise UserError(f"no subset {recipe.subset!r}{did_you_mean(recipe.subset, SUBSETS)}")
    mask = None if recipe.subset is None else subset_mask(recipe.subset)

    for split in recipe.splits:
        dataset = fetch(recipe.dataset, split, archives, mirror)
        classes = getattr(dataset, "classes", [str(c) for c in range(10)])
        numbers = np.zeros(len(classes), dtype=int)

        for index in range(len(dataset)):
            image, label = dataset[index]
            number = int(numbers[label])
            numbers[label] += 1
            if mask is not None and not mask[label, number]:
                continue

            name = recipe.path.format(
                split=split,
                index=index + recipe.first,
                number=number + recipe.first,
                label=label,
                class_name=classes[label],
            )
            yield name, image, int(label)


def fetch(name: str, split: str, archives: Path, mirror: str | None) -> Split:
    r"""Returns one split of a torchvision data set, after downloading it if need be."""
    from torchvision import datasets

    if name not in DATASETS:
        raise UserError(f"no data set {name!r} to download{did_you_mean(name, DATASETS)}")

    kind = getattr(datasets, DATASETS[name])
    if mirror is not None:
        # The class name must stay: torchvision names a folder after it.
        kind = type(kind.__name__, (kind,), overrides(kind, mirror.rstrip("/") + "/"))
    which = {"split": split} if name == "svhn" else {"train": split == "train"}

    try:
        loaded: Split = kind(str(archives), download=True, **which)
        return loaded
    except (URLError, OSError, RuntimeError) as error:
        reason = one_line(error, 200)
        raise UserError(f"cannot download {name} ({split}) to {archives}: {reason}") from error


def overrides(kind: type, mirror: str) -> dict[str, object]:
    r"""Returns the attributes that make a torchvision class download from elsewhere."""
    if hasattr(kind, "split_list"):
        splits = {s: [mirror + file, file, md5] for s, (_, file, md5) in kind.split_list.items()}
        return {"split_list": splits}
    if hasattr(kind, "mirrors"):
        return {"mirrors": [mirror]}
    return {"url": mirror + vars(kind)["filename"]}


def write_image(path: Path, image: Image.Image, quality: int) -> None:
    r"""Writes an image under its name only once it is whole."""
    with atomic_path(path, flush=False) as temporary:
        image.save(temporary, format=FORMATS[path.suffix.lower()], quality=quality)
