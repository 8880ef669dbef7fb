r"""What OpenOOD's loaders tell: their images as they are at test time, and their normalisation.

The loaders come in two styles. The evaluator gives every split the same test transform. The older
pipelines augment `data` of the ID training split and keep the test transform for `data_aux`. A
comparison of the splits' transforms says which key holds images as they are at test time.

How the host normalises is read off its transform, unless the options say it. Where neither does,
its ID images must look like images normalised by ID statistics. OOD images may have any
statistics, so a single OOD loader that normalises differently is not noticed.
"""

__all__ = [
    "ReferenceImages",
    "Statistics",
    "View",
    "host_statistics",
    "is_close",
    "normalisation_of",
    "per_channel",
    "take",
    "take_plain",
    "view_of",
]

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...data.images import DAMAGE
from ...data.lists import list_folder, read_list
from ...data.transforms import check_statistics, normalisation_within
from ...errors import UserError, one_line
from .host import Foreign

#: The means and the standard deviations of the channels.
Statistics: TypeAlias = tuple[list[float], list[float]]

#: Where data sets of OpenOOD, and of torchvision, keep their transform.
TRANSFORMS = ("transform_image", "preprocessor", "transform")
AUGMENTED, PLAIN = "data", "data_aux"
CHANNELS = 3
# Means and deviations of ID images that were normalised by their own statistics, generously.
MEAN_WITHIN, STD_WITHIN = 0.5, (0.5, 2.0)
# The number of images that are looked at for them.
ENOUGH = 256


def take(batch: object, key: str, *others: str) -> list[Tensor]:
    r"""Returns what a batch of the host's holds under some keys: the one check of batches.

    Arguments:
        batch: The batch.
        key: The key of images, with shape :math:`(B, *)`.
        others: The keys of vectors, such as labels, with shape :math:`(B)`.

    Raises:
        UserError: If the batch is no mapping, or what it holds there are no such tensors.
    """
    fault, found = f"is a {type(batch).__name__}", []
    if isinstance(batch, Mapping):
        found = [batch.get(k) for k in (key, *others)]
        fault = "has " + ", ".join(
            f"{type(v).__name__}{tuple(getattr(v, 'shape', ())) or ''} under {k!r}"
            for k, v in zip((key, *others), found, strict=True)
        )
    tensors = [v for v in found if isinstance(v, Tensor) and v.ndim]
    is_whole = 0 < len(tensors) == len(found)
    if not is_whole or any(v.shape != tensors[0].shape[:1] for v in tensors[1:]):
        raise UserError(
            f"postprocessor: a batch {fault}, expected a mapping with "
            f"{' and '.join(map(repr, (key, *others)))}, tensors with a row for each image."
        )
    return tensors


def take_plain(batch: object, *others: str) -> list[Tensor]:
    r"""Does what :func:`take` does, with images that are not augmented where a batch has them."""
    has_plain = isinstance(batch, Mapping) and PLAIN in batch
    return take(batch, PLAIN if has_plain else AUGMENTED, *others)


class View(NamedTuple):
    r"""A loader's images as they are at test time: under a key of its batches.

    Attributes:
        transform: The transform behind them, from Pillow images; None if it is unknown.
    """

    loader: Foreign
    key: str
    transform: Foreign

    def images(self) -> Iterator[Tensor]:
        r"""Yields the images, batch by batch."""
        for batch in self.loader:
            yield take(batch, self.key)[0]


def view_of(id_loaders: Mapping[str, Any], split: str) -> View:
    r"""Returns a split's images as they are at test time, given OpenOOD's ID loaders by split."""
    if split not in id_loaders:
        raise UserError(f"id_split: no {split!r} among the ID loaders {', '.join(id_loaders)}.")
    loader = id_loaders[split]
    own, plain = _transform(loader), getattr(_data(loader), "transform_aux_image", None)
    others = [_transform(id_loaders[k]) for k in ("test", "val") if k in id_loaders]
    # One object serves all splits of an evaluator; a pipeline builds one a split.
    if plain is not None and others and all(other is not own for other in others):
        return View(loader, PLAIN, plain)
    return View(loader, AUGMENTED, own)


def normalisation_of(transform: object) -> Statistics | None:
    r"""Returns the last normalisation within nested transforms, of each channel; None if none."""
    found = normalisation_within(transform)
    return None if found is None else per_channel(*found, "postprocessor: the host's transform")


def per_channel(mean: Foreign, std: Foreign, source: str) -> Statistics:
    r"""Returns checked statistics; one number is that of all channels, as torchvision has it."""
    values = [np.ravel(v).tolist() for v in (mean, std)]
    mean, std = (v * CHANNELS if len(v) == 1 else v for v in values)
    return check_statistics(mean, std, CHANNELS, source)


def host_statistics(given: Statistics | None, id_loaders: Mapping[str, Any]) -> Statistics | None:
    r"""Returns the statistics that the host normalises its images with; None if nothing says them.

    Arguments:
        given: What the options say, which is believed.
        id_loaders: OpenOOD's ID loaders by split, whose transform is asked otherwise.

    Raises:
        UserError: If nothing says them and the ID images do not look normalised by ID statistics.
    """
    split = next((k for k in ("test", "val", "train") if k in id_loaders), None)
    if given is not None or split is None:
        return given
    view = view_of(id_loaders, split)
    found = normalisation_of(view.transform)
    if found is None:
        _check_normalised(view.images())
    return found


def is_close(a: Statistics, b: Statistics) -> bool:
    r"""Returns whether two statistics are the same but for rounding."""
    return np.allclose(a, b, rtol=1e-9, atol=1e-5)


class ReferenceImages(Dataset):
    r"""The images of a folder or a list file, through the host's own transform.

    Arguments:
        path: A folder of images, or a list file, `relative/path.png LABEL` a line.
        root: The folder that a list's paths are relative to; None for the list's own.
        transform: From Pillow images to tensors.

    Raises:
        UserError: If there is no such folder or file, or images are missing.
    """

    def __init__(self, path: Path, root: Path | None, transform: Foreign) -> None:
        names = (list_folder if path.is_dir() else read_list)(path).names
        folder = path if path.is_dir() else root or path.parent
        self.paths, self.transform = [folder / name for name in names], transform
        absent = [p for p in self.paths if not p.is_file()]
        if absent or not self.paths:
            raise UserError(
                f"reference: {path}: {len(absent)} of {len(names)} images are missing, expected "
                f"all of at least one{f'; {absent[0]} for one' if absent else ''}."
            )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        try:
            with Image.open(self.paths[index]) as image:
                rgb = image.convert("RGB")
        except DAMAGE as error:
            reason = one_line(error)
            raise UserError(f"reference: {self.paths[index]}: not readable ({reason}).") from None
        return self.transform(rgb)

    def loader(self, like: object) -> DataLoader:
        r"""Returns a loader with the batch size and the workers of another."""
        workers = getattr(like, "num_workers", 0)
        return DataLoader(self, getattr(like, "batch_size", None) or 200, num_workers=workers)


def _check_normalised(batches: Iterator[Tensor]) -> None:
    parts: list[Tensor] = []
    while sum(map(len, parts)) < ENOUGH and (batch := next(batches, None)) is not None:
        parts.append(batch)
    found, is_normalised = "the ID loader is empty", False
    if parts:
        std, mean = torch.std_mean(torch.cat(parts), dim=(0, 2, 3))
        # NaN compares as false.
        within = (mean.abs() <= MEAN_WITHIN) & (std >= STD_WITHIN[0]) & (std <= STD_WITHIN[1])
        is_normalised = bool(within.all())
        channels = ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(mean, std, strict=True))
        found = f"the ID images have channels of {channels}, so they are not normalised"
    if not is_normalised:
        raise UserError(
            f"postprocessor: {found}, expected images normalised by ID statistics; say how with "
            "postprocessor_args 'mean' and 'std'."
        )


def _data(loader: object) -> Foreign:
    return getattr(loader, "dataset", None)


def _transform(loader: object) -> Foreign:
    found = (getattr(_data(loader), name, None) for name in TRANSFORMS)
    return next((t for t in found if t is not None), None)
