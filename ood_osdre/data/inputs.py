r"""Whatever a user holds images or vectors in, brought to one form, piece by piece.

======================  =====================================================================
Array or tensor         images in uint8, or in floats within [0, 1]: NumPy arrays with shape
                        :math:`(N, H, W, 3)`, tensors with shape :math:`(N, 3, H, W)`; one
                        channel, or none, for grey ones; vectors: floats with shape
                        :math:`(N, d)`
Data loader             any iterable of batches of them, or of `(batch, labels, ...)`, or of
                        mappings with a key `data` or `image`, and perhaps `label`
Data set                anything with `len` and items, torchvision's for instance: images of
                        Pillow, arrays or tensors, alone or as `(image, label, ...)`
Path                    a folder of images, a list file (`relative/path.png LABEL` a line), or
                        a `.npy` array
Image set               :class:`~ood_osdre.data.ImageSet`
======================  =====================================================================

Images are *pixels*: not normalised, because the detector applies the statistics of the ID data to
all of them alike. Files and Pillow images go through the one preprocessing of
:mod:`ood_osdre.data.images`; arrays and tensors must already have the size.
"""

__all__ = ["IMAGE_KEYS", "SLACK", "Chunk", "read", "read_chunks", "split_item"]

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import UserError
from .images import decode_all, square
from .lists import list_folder, read_list
from .sets import ImageSet, group_of

CHUNK = 4096
#: Rounding of pixels that were resized or cropped in floats.
SLACK = 1e-3
#: Where OpenOOD's and other loaders keep the images of a batch.
IMAGE_KEYS = ("data", "image")


@runtime_checkable
class Items(Protocol):
    r"""A data set: items by their index."""

    def __len__(self) -> int:
        r"""Returns the number of items."""

    def __getitem__(self, index: int, /) -> object:
        r"""Returns an item."""


class Chunk(NamedTuple):
    r"""Some images or vectors.

    Attributes:
        values: Images in uint8, with shape :math:`(N, S, S, 3)`, or vectors in float32, with
            shape :math:`(N, d)`.
        labels: The ID class of each, -1 where there is none, with shape :math:`(N)`.
        names: A name for each, its path if it has one.
    """

    values: NDArray[Any]
    labels: NDArray[np.int64]
    names: list[str]

    @property
    def has_images(self) -> bool:
        r"""Whether the values are images."""
        return self.values.ndim == 4


def read(data: object, size: int, what: str) -> Chunk:
    r"""Reads all of some data.

    Arguments:
        data: The data, in any of the forms above.
        size: The side :math:`S` of images.
        what: What to call the data in errors.

    Returns:
        All of it in one chunk.

    Raises:
        UserError: If there is none of it, or it is not images of that size or vectors.
    """
    chunks = list(read_chunks(data, size, what))
    if not chunks:
        raise UserError(f"{what}: empty, expected at least one image or vector.")
    if len(chunks) == 1:
        return chunks[0]
    shapes = sorted({c.values.shape[1:] for c in chunks})
    if len(shapes) > 1:
        raise UserError(f"{what}: items have different shapes: {shapes[0]} and {shapes[1]}.")
    return Chunk(
        np.concatenate([c.values for c in chunks]),
        np.concatenate([c.labels for c in chunks]),
        [name for c in chunks for name in c.names],
    )


def read_chunks(data: object, size: int, what: str) -> Iterator[Chunk]:
    r"""Reads data piece by piece, so that not all of it has to fit into memory.

    Arguments:
        data: The data, in any of the forms above.
        size: The side :math:`S` of images.
        what: What to call the data in errors.

    Yields:
        Pieces that are not empty, in order.

    Raises:
        UserError: If something is not images of that size or vectors.
    """
    count = 0
    for values, labels, names in _pieces(data, size, what):
        n = len(values)
        if n == 0:
            continue
        if labels is None:
            labels = np.full(n, -1, dtype=np.int64)
        if labels.shape != (n,):
            raise UserError(f"{what}: {n} items but labels of shape {labels.shape}.")
        yield Chunk(values, labels, names or [f"{i}" for i in range(count, count + n)])
        count += n


_Piece = tuple[NDArray[Any], NDArray[np.int64] | None, list[str] | None]


def _pieces(data: object, size: int, what: str) -> Iterator[_Piece]:
    if isinstance(data, ImageSet):
        _check_side(data.images, size, what)
        yield data.images, data.labels, data.names
    elif isinstance(data, str | os.PathLike):
        yield from _files(Path(data), size, what)
    elif isinstance(data, np.ndarray | Tensor):
        yield _values(data, size, what), None, None
    elif isinstance(data, Items) and not isinstance(data, Mapping):
        yield from _items(data, size, what)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        for batch in data:
            values, labels = split_item(batch)
            if not isinstance(values, np.ndarray | Tensor):
                raise _unknown(values, f"{what}: a batch")
            yield _values(values, size, what), _labels(labels, what), None
    else:
        raise _unknown(data, what)


def _unknown(data: object, what: str) -> UserError:
    return UserError(
        f"{what}: got {type(data).__name__}, expected an array, a tensor, a data loader, a data "
        "set or a path."
    )


def split_item(item: object) -> tuple[object, object]:
    r"""Returns the data and the labels of a batch or an item, None without labels."""
    if isinstance(item, Mapping):
        key = next((k for k in IMAGE_KEYS if k in item), None)
        return (None if key is None else item[key]), item.get("label")
    if isinstance(item, tuple | list) and item:
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _labels(labels: object, what: str) -> NDArray[np.int64] | None:
    r"""Returns class labels, None if what stands in their place is something else."""
    if labels is None:
        return None
    array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if array.dtype.kind not in "iu":
        return None
    if array.size and array.min() < -1:
        raise UserError(f"{what}: a label is {array.min()}, expected at least 0, or -1 for none.")
    return array.astype(np.int64)


def _items(data: Items, size: int, what: str) -> Iterator[_Piece]:
    r"""Reads the items of a data set one by one."""
    total = len(data)
    for start in range(0, total, CHUNK):
        values, labels = [], []
        for index in range(start, min(start + CHUNK, total)):
            value, label = split_item(data[index])
            values.append(_item(value, size, f"{what}[{index}]"))
            labels.append(_labels(-1 if label is None else label, f"{what}[{index}]"))
        shapes = {v.shape for v in values}
        if len(shapes) > 1:
            raise UserError(f"{what}: items have different shapes: {sorted(shapes)[:2]}.")
        has_labels = all(y is not None and y.ndim == 0 for y in labels)
        yield np.stack(values), np.array(labels, np.int64) if has_labels else None, None


def _item(value: object, size: int, what: str) -> NDArray[Any]:
    if isinstance(value, Image.Image):
        return square(value, size)
    if isinstance(value, np.ndarray | Tensor):
        return _values(value[None], size, what)[0]
    raise UserError(
        f"{what}: got {type(value).__name__}, expected an image of Pillow, an array or a tensor."
    )


def _files(path: Path, size: int, what: str) -> Iterator[_Piece]:
    if path.is_dir():
        content, folder = list_folder(path), path
        groups = [group_of(name) for name in content.names]
        classes = sorted(set(groups))
        # Folders are classes, as everywhere, if every image is in one of several.
        if len(classes) > 1 and "" not in classes:
            labels = np.array([classes.index(g) for g in groups], dtype=np.int64)
        else:
            labels = np.full(len(groups), -1, dtype=np.int64)
    elif path.suffix == ".npy":
        yield _values(_load(path), size, f"{what} {path}"), None, None
        return
    elif path.is_file():
        content, folder = read_list(path), path.parent
        labels = np.asarray(content.labels, dtype=np.int64)
    else:
        raise UserError(f"{what}: {path}: no such folder, list file or .npy array.")
    for start in range(0, len(content), CHUNK):
        chosen = slice(start, start + CHUNK)
        names = list(content.names[chosen])
        yield decode_all([folder / n for n in names], size, what), labels[chosen], names


def _load(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: not a readable array ({error}).") from None


def _values(data: NDArray[Any] | Tensor, size: int, what: str) -> NDArray[Any]:
    r"""Brings an array or a tensor to uint8 images or float32 vectors."""
    is_tensor = isinstance(data, Tensor)
    array = data.detach().cpu().numpy() if isinstance(data, Tensor) else data
    if array.ndim == 2:
        return _vectors(array, what)
    if array.ndim == 4 and is_tensor:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        layout = "(N, 3, H, W) in a tensor" if is_tensor else "(N, H, W, 3) in an array"
        raise UserError(
            f"{what}: got shape {tuple(data.shape)}, expected images {layout}, or vectors (N, d)."
        )
    if len(array) == 0:
        return np.zeros((0, size, size, 3), np.uint8)
    _check_side(array, size, what)
    pixels = _pixels(array, what)
    return np.repeat(pixels, 3, axis=3) if pixels.shape[3] == 1 else pixels


def _vectors(array: NDArray[Any], what: str) -> NDArray[np.float32]:
    if array.dtype.kind not in "fiu":
        raise UserError(f"{what}: got vectors of {array.dtype}, expected real numbers.")
    values = array.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        raise UserError(
            f"{what}: {bad.size} of {len(array)} vectors hold NaN or infinity, the first is {bad[0]}."
        )
    return values


def _pixels(array: NDArray[Any], what: str) -> NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise UserError(
            f"{what}: got images of {array.dtype}, expected uint8, or floats in [0, 1]."
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= -SLACK and high <= 1 + SLACK):  # also false for NaN
        raise UserError(
            f"{what}: got pixels from {low:.3g} to {high:.3g}, expected floats in [0, 1] or uint8; "
            "leave normalisation to the detector."
        )
    return np.rint(255 * array.clip(0, 1)).astype(np.uint8)


def _check_side(images: NDArray[Any], size: int, what: str) -> None:
    height, width = images.shape[1:3]
    if (height, width) != (size, size):
        raise UserError(
            f"{what}: images of {height} x {width} pixels, expected {size} x {size}; resize them, or "
            f"set the size of the detector."
        )
