r"""Lays out data sets that torchvision can download as OpenOOD has them.

Each split is downloaded with its checksum verified, its images are written under the names that
the manifest's pattern gives, and the list is written unless there is one already. An official
list is thus never replaced, and its images are found if they have the official names.

OpenOOD v1.5 holds 1,000 of the 10,000 test images of CIFAR out for ID validation, and takes 9,000
of those of CIFAR-100 as the near set of CIFAR-10. The choice is random; its list files record it,
and so do the files in `data_manifests/openood/`, so that lists written from scratch agree with
OpenOOD's up to their order.

References:
    | OpenOOD v1.5: Enhanced Benchmark for Out-of-Distribution Detection (Zhang et al., 2023)
    | https://arxiv.org/abs/2306.09301
"""

__all__ = ["download", "subset_mask"]

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import UserError, one_line
from ..files import atomic_path
from ..progress import Bar
from ..resources import folders
from .lists import write_list
from .manifests import Download, Manifest, SetSpec

if TYPE_CHECKING:
    from torchvision.datasets import VisionDataset

ARCHIVES = ".ood_osdre_downloads"
# The names of torchvision's classes.
CLASSES = {
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "fashion_mnist": "FashionMNIST",
    "mnist": "MNIST",
    "svhn": "SVHN",
}
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}
# Subsets that are all images but those of a file.
COMPLEMENTS = {
    "cifar10_test": "cifar10_val",
    "cifar100_test": "cifar100_val",
    "cifar100_near": "cifar100_not_near",
}

log = logging.getLogger(__name__)


def download(
    manifest: Manifest, spec: SetSpec, data_root: Path, mirror: str | None = None
) -> None:
    r"""Downloads a set, writes its images and, where there is none, its list.

    Arguments:
        manifest: The benchmark.
        spec: One of its sets, with a recipe to download it.
        data_root: The folder that holds lists and images.
        mirror: The URL of a folder that holds the archives, instead of the usual one.

    Raises:
        UserError: If a split cannot be downloaded, or a file not written.
    """
    recipe = spec.download
    assert recipe is not None, f"{spec} has no recipe"
    names, labels = [], []
    images = _images(recipe, data_root / ARCHIVES, mirror)
    for name, image, label in Bar(images, desc=f"writing {spec.name}", unit="image"):
        path = data_root / (spec.images or manifest.images) / name
        if not (path.is_file() and path.stat().st_size):
            with atomic_path(path, flush=False) as temporary:
                kind = FORMATS[path.suffix.lower()]
                image.save(temporary, format=kind, quality=recipe.quality)
        names.append(name)
        labels.append(label if spec.role.startswith("id_") else -1)

    path = manifest.path(spec, data_root)
    if path.exists():
        log.info("kept the list %s", path)
    else:
        write_list(path, names, labels)


def _images(
    recipe: Download, archives: Path, mirror: str | None
) -> Iterator[tuple[str, Image.Image, int]]:
    r"""Yields the name, image and label of each image of a recipe."""
    mask = None if recipe.subset is None else subset_mask(recipe.subset)
    for split in recipe.splits:
        dataset = _split(recipe.dataset, split, archives, mirror)
        classes = getattr(dataset, "classes", [str(c) for c in range(10)])
        numbers = [0] * len(classes)
        for index in range(len(dataset)):
            image, label = dataset[index]
            number = numbers[label]
            numbers[label] += 1
            if mask is None or mask[label, number]:
                name = recipe.path.format(
                    split=split,
                    index=index + recipe.first,
                    number=number + recipe.first,
                    label=label,
                    class_name=classes[label],
                )
                yield name, image, int(label)


def _split(name: str, split: str, archives: Path, mirror: str | None) -> "VisionDataset":
    r"""Returns one split of a torchvision data set, after downloading it if need be."""
    from torchvision import datasets

    kind = getattr(datasets, CLASSES[name])
    if mirror is not None:
        # The class name must stay: torchvision names a folder after it.
        kind = type(kind.__name__, (kind,), at_mirror(kind, mirror.rstrip("/") + "/"))
    which = {"split": split} if name == "svhn" else {"train": split == "train"}
    try:
        return kind(str(archives), download=True, **which)
    except (URLError, OSError, RuntimeError) as error:
        reason = one_line(error, 200)
        raise UserError(f"cannot download {name} ({split}) to {archives}: {reason}") from error


def at_mirror(kind: type, mirror: str) -> dict[str, object]:
    r"""Returns the attributes that make a torchvision class download from elsewhere."""
    if hasattr(kind, "split_list"):
        splits = {s: [mirror + file, file, md5] for s, (_, file, md5) in kind.split_list.items()}
        return {"split_list": splits}
    if hasattr(kind, "mirrors"):
        return {"mirrors": [mirror]}
    return {"url": mirror + vars(kind)["filename"]}


def subset_mask(name: str) -> NDArray[np.bool_]:
    r"""Returns which of 10,000 test images OpenOOD uses, with shape :math:`(C, 10000 / C)`.

    Classes are in alphabetical order, the images of each in the order of the data set.

    Arguments:
        name: A `subset` of :class:`~ood_osdre.data.manifests.Download`.
    """
    paths = [
        f / "openood" / f"{COMPLEMENTS.get(name, name)}.txt" for f in folders("data_manifests")
    ]
    lines = next(p for p in paths if p.is_file()).read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    mask = np.zeros((len(rows), 10_000 // len(rows)), dtype=bool)
    for row, numbers in zip(mask, rows, strict=True):
        row[[int(n) for n in numbers]] = True
    return ~mask if name in COMPLEMENTS else mask
