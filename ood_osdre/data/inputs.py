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
from torch import Tensor

from ..errors import UserError
from ..files import is_folder, is_regular, map_array
from .images import SLACK, decode_all
from .lists import list_folder, read_list
from .sets import ImageSet, group_of
from .values import check_side, to_item, to_labels, to_values

CHUNK = 4096
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
        values: Images in uint8, with shape :math:`(N, S, S, 3)`, or vectors, with shape
            :math:`(N, d)`, in float32, or float64 if they came as integers or in more than single
            precision.
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
        check_side(data.images, size, what)
        yield data.images, data.labels, data.names
    elif isinstance(data, str | os.PathLike):
        yield from _files(Path(data), size, what)
    elif isinstance(data, np.ndarray | Tensor):
        yield to_values(data, size, what), None, None
    elif hasattr(data, "to_numpy"):
        # Of tables and their columns, `[i]` is what bears the label i, not what stands there.
        raise UserError(f"{what}: got {type(data).__name__}, expected an array: its to_numpy().")
    elif isinstance(data, Items) and not isinstance(data, Mapping):
        yield from _items(data, size, what)
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        for batch in data:
            values, labels = split_item(batch)
            if not isinstance(values, np.ndarray | Tensor):
                raise _unknown(values, f"{what}: a batch")
            yield to_values(values, size, what), to_labels(labels, what), None
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


def _items(data: Items, size: int, what: str) -> Iterator[_Piece]:
    r"""Reads the items of a data set one by one."""
    total = len(data)
    for start in range(0, total, CHUNK):
        values, labels = [], []
        for index in range(start, min(start + CHUNK, total)):
            try:
                value, label = split_item(data[index])
            except LookupError as error:
                raise UserError(f"{what}: has no item {index} of its {total}.") from error
            values.append(to_item(value, size, f"{what}[{index}]"))
            labels.append(to_labels(-1 if label is None else label, f"{what}[{index}]"))
        shapes = {v.shape for v in values}
        if len(shapes) > 1:
            raise UserError(f"{what}: items have different shapes: {sorted(shapes)[:2]}.")
        has_labels = all(y is not None and y.ndim == 0 for y in labels)
        yield np.stack(values), np.array(labels, np.int64) if has_labels else None, None


def _files(path: Path, size: int, what: str) -> Iterator[_Piece]:
    if is_folder(path):
        content, folder = list_folder(path), path
        groups = [group_of(name) for name in content.names]
        classes = sorted(set(groups))
        # Folders are classes, as everywhere, if every image is in one of several.
        if len(classes) > 1 and "" not in classes:
            labels = np.array([classes.index(g) for g in groups], dtype=np.int64)
        else:
            labels = np.full(len(groups), -1, dtype=np.int64)
    elif path.suffix == ".npy":
        yield to_values(map_array(path), size, f"{what} {path}"), None, None
        return
    elif is_regular(path):
        content, folder = read_list(path), path.parent
        labels = np.asarray(content.labels, dtype=np.int64)
    else:
        raise UserError(f"{what}: {path}: no such folder, list file or .npy array.")
    for start in range(0, len(content), CHUNK):
        chosen = slice(start, start + CHUNK)
        names = list(content.names[chosen])
        yield decode_all([folder / n for n in names], size, what), labels[chosen], names
