r"""Arrays and tensors, whatever their layout and type, to uint8 images or vectors of floats."""

__all__ = ["check_side", "to_item", "to_labels", "to_values"]

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..errors import UserError
from .images import DAMAGE, from_unit, square


def to_values(data: NDArray[Any] | Tensor, size: int, what: str) -> NDArray[Any]:
    r"""Returns uint8 images, with shape :math:`(N, S, S, 3)`, or vectors :math:`(N, d)`.

    Arguments:
        data: A batch of images or vectors.
        size: The side :math:`S` of images.
        what: What to call the data in errors.

    Raises:
        UserError: If it is neither, of another size, or not one batch.
    """
    is_tensor = isinstance(data, Tensor)
    array = _to_numpy(data, what) if isinstance(data, Tensor) else data
    if isinstance(array, np.ma.MaskedArray):
        raise UserError(f"{what}: got a masked array, expected one in which nothing is missing.")
    if array.ndim == 2:
        return _vectors(array, what)
    layout = "(N, 3, H, W) in a tensor" if is_tensor else "(N, H, W, 3) in an array"
    if array.ndim == 3 and 3 in (array.shape[0], array.shape[2]):
        one, grey = (
            ("(1, 3, H, W)", "(N, 1, H, W)") if is_tensor else ("(1, H, W, 3)", "(N, H, W, 1)")
        )
        raise UserError(
            f"{what}: got shape {tuple(data.shape)}, one image or several grey ones; expected a "
            f"batch, {one} or {grey}."
        )
    if array.ndim == 4 and is_tensor:
        array = array.transpose(0, 2, 3, 1)
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        raise UserError(
            f"{what}: got shape {tuple(data.shape)}, expected images {layout}, or vectors (N, d)."
        )
    if len(array) == 0:
        return np.zeros((0, size, size, 3), np.uint8)
    check_side(array, size, what)
    pixels = _pixels(array, what)
    return np.repeat(pixels, 3, axis=3) if pixels.shape[3] == 1 else pixels


def to_item(value: object, size: int, what: str) -> NDArray[Any]:
    r"""Returns one image, with shape :math:`(S, S, 3)`, or one vector, with shape :math:`(d)`.

    Arguments:
        value: An image of Pillow, an array or a tensor.
        size: The side :math:`S` of images.
        what: What to call it in errors.
    """
    if isinstance(value, Image.Image):
        try:
            return square(value, size)
        except DAMAGE as error:
            raise UserError(f"{what}: not a usable image ({error}).") from None
    if isinstance(value, np.ndarray | Tensor):
        return to_values(value[None], size, what)[0]
    raise UserError(
        f"{what}: got {type(value).__name__}, expected an image of Pillow, an array or a tensor."
    )


def to_labels(labels: object, what: str) -> NDArray[np.int64] | None:
    r"""Returns class labels, None if what stands in their place is something else.

    Arguments:
        labels: The labels of a batch, or of an item.
        what: What to call the data in errors.

    Raises:
        UserError: If a label is no index of a class, nor -1 for none.
    """
    if labels is None:
        return None
    try:
        array = np.asarray(_to_numpy(labels, what) if isinstance(labels, Tensor) else labels)
    except ValueError:  # nested lists of different lengths
        return None
    if array.dtype.kind not in "iu":
        return None
    if array.size and array.min() < -1:
        raise UserError(f"{what}: a label is {array.min()}, expected at least 0, or -1 for none.")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"{what}: a label is {array.max()}, expected the index of a class.")
    return array.astype(np.int64)


def _to_numpy(data: Tensor, what: str) -> NDArray[Any]:
    try:
        return data.detach().cpu().numpy()
    # Sparse, quantized and nested tensors, those without data, and types that NumPy lacks.
    except (TypeError, RuntimeError, NotImplementedError):
        layout, device = str(data.layout).removeprefix("torch."), data.device.type
        raise UserError(
            f"{what}: got a {layout} tensor of {data.dtype} on {device}, expected a dense one of "
            "uint8, float32 or another type that NumPy has."
        ) from None


def _vectors(array: NDArray[Any], what: str) -> NDArray[np.floating[Any]]:
    if array.dtype.kind not in "fiu":
        raise UserError(f"{what}: got vectors of {array.dtype}, expected real numbers.")
    if array.shape[1] == 0:
        raise UserError(f"{what}: got shape {array.shape}, expected vectors of at least 1 number.")
    with np.errstate(over="ignore"):
        single = array.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(single).all(axis=1))
    if bad.size:
        raise UserError(
            f"{what}: {bad.size} of {len(array)} vectors hold NaN or infinity, the first is {bad[0]}."
        )
    # A mean is subtracted before single precision may round: of large numbers it leaves nothing.
    exact = array.dtype.kind == "f" and array.dtype.itemsize <= single.itemsize
    return single if exact else array.astype(np.float64)


def _pixels(array: NDArray[Any], what: str) -> NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise UserError(
            f"{what}: got images of {array.dtype}, expected uint8, or floats in [0, 1]."
        )
    try:
        return from_unit(array)
    except ValueError as error:
        raise UserError(
            f"{what}: got {error} or uint8; leave normalisation to the detector."
        ) from None


def check_side(images: NDArray[Any], size: int, what: str) -> None:
    r"""Refuses images of another size.

    Arguments:
        images: The images, with shape :math:`(N, H, W, *)`.
        size: The side they should have.
        what: What to call them in errors.
    """
    height, width = images.shape[1:3]
    if (height, width) != (size, size):
        raise UserError(
            f"{what}: images of {height} x {width} pixels, expected {size} x {size}; resize them, or "
            f"set the size of the detector."
        )
