r"""Whatever a user holds images or vectors in, brought to one form, piece by piece.

======================  =====================================================================
Array or tensor         images in uint8, or in floats within [0, 1]: NumPy arrays with shape
                        :math:`(N, H, W, 3)`, tensors with shape :math:`(N, 3, H, W)`; one
                        channel, or none, for grey ones; vectors: numbers with shape
                        :math:`(N, d)`
Data loader             any iterable of batches of them, or of `(batch, labels, ...)`, or of
                        mappings with one of :data:`IMAGE_KEYS`, and perhaps of `LABEL_KEYS`
Data set                anything with `len` and items, torchvision's for instance: images of
                        Pillow, arrays, tensors or paths of images, alone or as
                        `(image, label, ...)` or mappings; a list of them is one, too
Path                    a folder of images, a list file (`relative/path.png LABEL` a line), a
                        `.npy`, `.npz` or `.csv` array, or one image
One image               of Pillow, an array :math:`(H, W, 3)` or a tensor :math:`(3, H, W)`
Image set               :class:`~ood_osdre.data.ImageSet`
======================  =====================================================================

Items come in the order of the data: of a folder that of its sorted paths, of a data loader the
one that it yields them in, shuffled or not.

Images are *pixels*: not normalised, because the detector applies the statistics of the ID data to
all of them alike. Files and Pillow images go through the one preprocessing of
:mod:`ood_osdre.data.images`; arrays and tensors must already have the size.
"""

__all__ = ["IMAGE_KEYS", "read", "read_pieces", "split_item"]

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from ..errors import UserError, one_line
from ..files import ARRAYS, is_folder, is_regular, local, read_array, read_columns
from . import image_files as lazy
from .image_files import ImageFiles, LazyImages, in_batches
from .images import DAMAGE, as_uint8, decode_all, image_files, is_image, square
from .lists import list_folder, read_list
from .sets import ImageSet, Samples, group_of

# The most items of a data set or a list, and about the bytes of images, that are read together.
PIECE, TOGETHER = 4096, 96 * 2**20
#: Where OpenOOD's, Hugging Face's and other data sets keep images.
IMAGE_KEYS = ("data", "image", "img", "pixel_values")
#: And where they keep classes.
LABEL_KEYS = ("label", "labels")
# The largest label.
LARGEST = np.iinfo(np.int64).max
#: The layouts of a batch of images, in colour and in grey, by what holds it.
LAYOUTS = {
    "array": "(N, H, W, 3) in an array, grey ones (N, H, W, 1) or (N, H, W)",
    "tensor": "(N, 3, H, W) in a tensor, grey ones (N, 1, H, W) or (N, H, W)",
}


@runtime_checkable
class _Items(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def read(data: object, size: int, what: str, labelled: bool = True) -> Samples:
    r"""Reads all of some data.

    Arguments:
        data: The data, in any of the forms above.
        size: The side :math:`S` of images.
        what: What to call the data in errors.
        labelled: Whether labels are wanted. If not, they are not looked at, whatever they are.

    Raises:
        UserError: If there is none of it, or it is not images of that size or vectors.
    """
    pieces = list(_labelled(data, size, what, labelled))
    values = [piece.values for piece in pieces]
    if len(values) != 1:
        values = [_joined([np.asarray(part) for part in values], what)]
    # Half of it, as there are ID data and a reference.
    elif isinstance(values[0], ImageFiles) and values[0].nbytes <= lazy.LIMIT // 2:
        values = [values[0][:]]
    labels = np.concatenate([piece.labels for piece in pieces])
    names = [name for piece in pieces for name in piece.names]
    reasons = [piece.unlabelled for piece in pieces if piece.unlabelled]
    return Samples(values[0], labels, names, reasons[0] if reasons else "", pieces[0].columns)


def read_pieces(data: object, size: int, what: str, labelled: bool = False) -> Iterator[Samples]:
    r"""Reads data piece by piece, so that not all of it has to fit into memory.

    The arguments are those of :func:`read`.

    Yields:
        Pieces that are not empty and in memory, in order.

    Raises:
        UserError: If something is not images of that size or vectors.
    """
    for piece in _labelled(data, size, what, labelled):
        if not isinstance(piece.values, LazyImages):
            yield piece
            continue
        fits = max(1, len(piece.values) * TOGETHER // piece.values.nbytes)
        # In multiples of a batch, so that no small one is left over.
        count = min(PIECE, fits // 512 * 512 or fits)
        for i, batch in enumerate(in_batches(piece.values, count)):
            rows = slice(i * count, (i + 1) * count)
            yield Samples(batch, piece.labels[rows], piece.names[rows], piece.unlabelled)


def _labelled(data: object, size: int, what: str, labelled: bool) -> Iterator[Samples]:
    count = 0
    for values, given, names in _pieces(data, size, what):
        n = len(values)
        if n == 0:
            continue
        labels, reason = np.full(n, -1), ""
        if labelled:
            labels, reason = _classes(given, n, what)
        names = names or [f"{i}" for i in range(count, count + n)]
        columns = read_columns(local(data)) if isinstance(data, str | os.PathLike) else ()
        yield Samples(values, labels, names, reason, columns)
        count += n


def split_item(item: object, what: str) -> tuple[object, object]:
    r"""Returns the data and the labels of a batch or an item, None without labels.

    Raises:
        UserError: If it is a mapping that has none of :data:`IMAGE_KEYS`.
    """
    if isinstance(item, Mapping):
        key, label = (next((k for k in ks if k in item), None) for ks in (IMAGE_KEYS, LABEL_KEYS))
        if key is None:
            raise UserError(
                f"{what}: got a mapping with the keys {', '.join(map(str, item))}, expected "
                f"images or inputs under {' or '.join(IMAGE_KEYS)}."
            )
        return item[key], None if label is None else item[label]
    if isinstance(item, tuple | list) and item:
        return item[0], item[1] if len(item) > 1 else None
    return item, None


READABLE, PATHS = (_Items, Iterable), (str, os.PathLike)
# Values, labels if there are any, and names.
_Piece = tuple[NDArray[Any] | LazyImages, object, list[str] | None]


def _pieces(data: object, size: int, what: str) -> Iterator[_Piece]:
    if isinstance(data, ImageSet):
        images = data.images
        if isinstance(images, LazyImages):
            _values(images[:1], size, what)
        else:
            images = _values(images, size, what)
        yield images, data.labels, data.names
    elif isinstance(data, str | os.PathLike):
        yield from _files(local(data), size, what)
    elif isinstance(data, np.ndarray | Tensor):
        is_one = data.ndim == 3 and data.shape[0 if isinstance(data, Tensor) else 2] == 3
        yield _values(data[None] if is_one else data, size, what), None, None
    elif isinstance(data, Image.Image):
        yield _item(data, size, what), None, None
    elif isinstance(data, tuple | list) and data and all(isinstance(p, PATHS) for p in data):
        names = [str(local(p)) for p in data]
        yield image_files(Path(), names, size, what), None, list(map(str, data))
    # Of tables and their columns, `[i]` is what has the label i, not what stands there.
    elif isinstance(data, Mapping) or not isinstance(data, READABLE) or _is_foreign(data):
        raise UserError(
            f"{what}: got {type(data).__name__}, expected an array, such as a table's to_numpy() or "
            "a sparse one's toarray(), a tensor, a data loader, a data set or a path."
        )
    elif isinstance(data, _Items) and not isinstance(data, IterableDataset):
        yield from _items(data, size, what)
    else:
        for batch in data:
            values, labels = split_item(batch, f"{what}: a batch")
            yield _values(values, size, f"{what}: a batch"), labels, None


def _is_foreign(data: object) -> bool:
    return hasattr(data, "to_numpy") or hasattr(data, "toarray")


def _items(data: _Items, size: int, what: str) -> Iterator[_Piece]:
    r"""Reads the items of a data set one by one. A stream has none, though it may know its length."""
    total = len(data)
    for start in range(0, total, PIECE):
        values, labels = [], []
        for index in range(start, min(start + PIECE, total)):
            where = f"{what}[{index}]"
            try:
                value, label = split_item(data[index], where)
            except LookupError as error:
                raise UserError(f"{what}: has no item {index} of its {total}.") from error
            values.append(_item(value, size, where))
            labels.append(label)
        yield _joined(values, what), labels, None


def _item(value: object, size: int, what: str) -> NDArray[Any]:
    r"""Returns an item as a batch of one."""
    if isinstance(value, np.ndarray | Tensor):
        return _values(value[None], size, what)
    if isinstance(value, PATHS):
        return decode_all([local(value)], size, what, progress=False)
    if not isinstance(value, Image.Image):
        return _values(value, size, what)  # refused by its type
    try:
        return square(value, size)[None].copy()
    except DAMAGE as error:
        raise UserError(f"{what}: not a usable image ({one_line(error)}).") from None


def _files(path: Path, size: int, what: str) -> Iterator[_Piece]:
    if path.suffix.lower() in ARRAYS and not is_folder(path):
        yield _values((found := read_array(path))[0], size, f"{what} {path}"), *found[1:]
        return
    if is_image(path):
        yield image_files(Path(), [str(path)], size, what), None, [str(path)]
        return
    if is_folder(path):
        content, folder = list_folder(path), path
        groups = [group_of(name) for name in content.names]
        classes = sorted(set(groups))
        # Folders are classes, as everywhere, if every image is in one of several.
        are_classes = len(classes) > 1 and "" not in classes
        places = {name: i for i, name in enumerate(classes)}
        labels = tuple(places[g] if are_classes else -1 for g in groups)
    elif is_regular(path):
        content, folder = read_list(path), path.parent
        labels = content.labels
    else:
        raise UserError(f"{what}: {path}: no such folder, list file, .npy array or image.")
    yield image_files(folder, content.names, size, what), labels, list(content.names)


def _joined(parts: Sequence[NDArray[Any]], what: str) -> NDArray[Any]:
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) != 1:
        found = f"items have different shapes: {shapes[:2]}" if parts else "empty"
        raise UserError(f"{what}: {found}, expected images or vectors of one shape.")
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _classes(labels: object, count: int, what: str) -> tuple[NDArray[np.int64], str]:
    r"""Returns the classes of items, -1 for none, and why none have any.

    Raises:
        UserError: If integers stand in their place that are no indices.
    """
    none = np.full(count, -1)
    if labels is None or (isinstance(labels, list) and all(y is None for y in labels)):
        return none, "there are no labels"
    try:
        if isinstance(labels, list):  # those of items
            labels = [-1 if y is None else np.asarray(_plain(y, what)) for y in labels]
        array = np.asarray(_plain(labels, what))
    except ValueError:  # of different lengths
        return none, "labels are of different lengths"
    # As medical sets have it, a column of indices is one for each.
    array = array[:, 0] if array.shape == (count, 1) else array
    if array.ndim > 1 or array.dtype.kind not in "iu":
        return none, f"labels are {array.dtype} of shape {array.shape}, no index of a class each"
    if array.shape != (count,) or array.min() < -1 or array.max() > LARGEST:
        bounds = f" from {array.min()} to {array.max()}" if array.size else ""
        raise UserError(
            f"{what}: got {count} items but labels of shape {array.shape}{bounds}, expected for "
            "each the index of a class, or -1 for none."
        )
    return array.astype(np.int64), "no item has a class" if array.max() < 0 else ""


def _plain(labels: object, what: str) -> object:
    return _to_numpy(labels, what) if isinstance(labels, Tensor) else labels


def _to_numpy(data: object, what: str) -> NDArray[Any]:
    found = type(data).__name__
    if isinstance(data, np.ndarray) and not isinstance(data, np.ma.MaskedArray):
        return data
    if isinstance(data, Tensor):
        try:
            return data.detach().cpu().numpy()
        # Sparse, quantized and nested tensors, those without data, and types that NumPy lacks.
        except (TypeError, RuntimeError, NotImplementedError):
            layout = str(data.layout).removeprefix("torch.")
            found = f"a {layout} tensor of {data.dtype} on {data.device.type}"
    raise UserError(
        f"{what}: got {found}, expected an image of Pillow, an array in which nothing is missing, "
        "or a dense tensor, of uint8, float32 or another type that NumPy has."
    )


def _values(data: object, size: int, what: str) -> NDArray[Any]:
    r"""Returns a batch of uint8 images, with shape :math:`(N, S, S, 3)`, or of vectors."""
    array = _to_numpy(data, what)
    if array.ndim == 2:
        return _vectors(array, what)
    shape, kind, mistake = array.shape, "tensor" if isinstance(data, Tensor) else "array", ""
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4 and kind == "tensor":
        array = array.transpose(0, 2, 3, 1)
    # In a batch it may be several grey images, or one in colour.
    if len(shape) == 3 and 3 in (shape[0], shape[2]):
        mistake = (
            f"shape {shape}, one image or several grey ones, expected a batch {LAYOUTS[kind]}"
        )
    elif array.ndim != 4 or array.shape[3] not in (1, 3):
        mistake = f"shape {shape}, expected images {LAYOUTS[kind]}, or vectors (N, d)"
    elif not len(array):
        return np.zeros((0, size, size, 3), np.uint8)
    elif array.shape[1:3] != (size, size):
        height, width = array.shape[1:3]
        mistake = f"images of {height} x {width} pixels, expected {size} x {size}, the set size"
    elif array.dtype.kind == "f":
        try:
            array = as_uint8(array)
        except ValueError as error:
            mistake = f"{error}, or uint8; leave normalisation to the detector"
    elif array.dtype != np.uint8:
        mistake = f"images of {array.dtype}, expected uint8, or floats in [0, 1]"
    if mistake:
        raise UserError(f"{what}: got {mistake}.")
    return np.repeat(array, 3, axis=3) if array.shape[3] == 1 else array


def _vectors(array: NDArray[Any], what: str) -> NDArray[np.floating[Any]]:
    is_real = array.dtype.kind in "fiu" and array.shape[1] > 0
    with np.errstate(over="ignore"):
        single = array.astype(np.float32) if is_real else np.zeros((0, 1), np.float32)
    bad = np.flatnonzero(~np.isfinite(single).all(axis=1))
    if not is_real or bad.size:
        found = f"got vectors of {array.dtype} with shape {array.shape}"
        if bad.size:
            first = f", the first is row {bad[0]}, from 0" * (len(array) > 1)
            found = f"{bad.size} of {len(array)} vectors hold NaN or infinity{first}"
        raise UserError(f"{what}: {found}, expected real numbers in single precision.")
    # A mean is subtracted before single precision may round: of large numbers it leaves nothing.
    exact = array.dtype.kind == "f" and array.dtype.itemsize <= single.itemsize
    return single if exact else array.astype(np.float64)
