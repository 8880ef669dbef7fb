r"""Decoding of image files, and the cache of decoded arrays.

ID, reference and OOD images all go through one preprocessing, OpenOOD's: RGB, the shorter side
resized to :math:`S` pixels (bilinear, with antialiasing), the central :math:`S \times S` crop.

Decoding tens of thousands of small files is slow, so each set is decoded once into one uint8
`.npy` file that is mapped into memory afterwards. Its name holds a key of everything the result
depends on: the version of the preprocessing, the folder, the list, and the size and modification
time of each image. The file is written under a temporary name, flushed to disk and renamed, so
that a crash leaves no half-written cache and two processes that build one set each leave a whole
file. A CRC-32 of the pixels follows them within the file; whoever maps it checks that, at 2 GB/s,
and a file that was damaged, or has none, is built again.
"""

__all__ = [
    "SLACK",
    "VERSION",
    "as_rgb",
    "cached_array",
    "decode",
    "decode_all",
    "default_cache_dir",
    "from_unit",
    "square",
]

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..errors import UserError
from ..files import atomic_path, is_regular, map_array, stat, sweep
from .lists import first

# What Pillow raises for damaged files, depending on their format, and for those of absurd size.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

#: To be raised whenever the same file would decode to other pixels.
VERSION = 2
#: Rounding of pixels that were resized or cropped in floats.
SLACK = 1e-3
CHUNK = 64
# Files of 16-bit grey that Pillow may hold in 32 bits.
WIDE_FORMATS = ("PNG", "PPM")

log = logging.getLogger(__name__)


def as_rgb(image: Image.Image) -> Image.Image:
    r"""Returns an image as RGB of 8 bits.

    Grey of 16 bits keeps its high byte; Pillow clips it at 255, which turns most of such an image
    white. Grey in floats is taken to lie in :math:`[0, 1]`, grey in 32-bit integers from 0 to 255.

    Arguments:
        image: An image of any mode and size.

    Raises:
        ValueError: If grey in floats or 32-bit integers lies elsewhere.
    """
    if image.mode == "F":
        return Image.fromarray(from_unit(_loaded(image))).convert("RGB")
    if image.mode.startswith("I"):
        grey = _loaded(image)
        if image.mode != "I" or image.format in WIDE_FORMATS:
            grey = grey.clip(0, 65_535) // 256
        elif grey.min() < 0 or grey.max() > 255:
            raise ValueError(f"integers from {grey.min()} to {grey.max()}, expected 0 to 255")
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    return image.convert("RGB")


def _loaded(image: Image.Image) -> NDArray[Any]:
    image.load()  # here, where a damaged file raises an error
    return np.asarray(image)


def from_unit(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    r"""Maps pixels from floats in :math:`[0, 1]`, give or take :data:`SLACK`, to uint8.

    Arguments:
        pixels: The pixels, with shape :math:`(*)`.

    Raises:
        ValueError: If some lie elsewhere, or are NaN.
    """
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -SLACK and high <= 1 + SLACK):  # also false for NaN
        raise ValueError(f"pixels from {low:.3g} to {high:.3g}, expected floats in [0, 1]")
    return np.rint(255 * pixels.clip(0, 1)).astype(np.uint8)


def square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    r"""Returns an image as RGB with its shorter side resized and its centre cropped.

    Arguments:
        image: An image of any mode and size.
        size: The side :math:`S`.

    Returns:
        The pixels, with shape :math:`(S, S, 3)`.

    Raises:
        ValueError: As :func:`as_rgb`, or if there are no pixels.
    """
    w, h = image.size
    short = min(w, h)
    if not short:
        raise ValueError(f"an image of {w} x {h} pixels")
    rgb = as_rgb(image)
    if short != size:
        # Integer arithmetic of torchvision's Resize; its CenterCrop rounds the offset.
        w, h = (size, size * h // short) if w == short else (size * w // short, size)
        rgb = rgb.resize((w, h), Image.Resampling.BILINEAR)
    left, top = round((w - size) / 2), round((h - size) / 2)

    return np.asarray(rgb)[top : top + size, left : left + size]


def decode(path: Path, size: int) -> NDArray[np.uint8]:
    r"""Decodes an image file.

    Arguments:
        path: The file.
        size: The side :math:`S`.

    Returns:
        The pixels, with shape :math:`(S, S, 3)`.
    """
    if not is_regular(path):
        raise OSError("no regular file")
    with Image.open(path) as image:
        return square(image, size)


def decode_all(
    paths: Sequence[Path], size: int, title: str, progress: bool = True
) -> NDArray[np.uint8]:
    r"""Decodes image files.

    Arguments:
        paths: The files.
        size: The side :math:`S`.
        title: What the progress bar and errors call the set.
        progress: Whether to show a progress bar.

    Returns:
        The images, with shape :math:`(N, S, S, 3)`.
    """
    images = np.empty((len(paths), size, size, 3), dtype=np.uint8)
    bad: list[str] = []

    def some(start: int) -> int:
        stop = min(start + CHUNK, len(paths))
        for i in range(start, stop):
            try:
                images[i] = decode(paths[i], size)
            except DAMAGE as error:
                bad.append(f"{paths[i]} ({' '.join(str(error).split())[:60]})")
        return stop - start

    # Pillow releases the interpreter's lock while it decodes and resizes.
    with (
        ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool,
        tqdm(
            total=len(paths), desc=f"decoding {title}", unit="image", disable=not progress
        ) as bar,
    ):
        for count in pool.map(some, range(0, len(paths), CHUNK)):
            bar.update(count)

    if bad:
        raise UserError(f"{title}: cannot decode {first(sorted(bad), 'file')}")

    return images


def cached_array(
    build: Callable[[], NDArray[np.uint8]],
    shape: tuple[int, ...],
    key: Iterable[bytes],
    stem: str,
    cache_dir: Path,
) -> NDArray[np.uint8]:
    r"""Returns an array from the cache, after building it if need be.

    The array is mapped copy-on-write: it may be written to, which changes no file.

    Arguments:
        build: Builds the array.
        shape: The shape it must have.
        key: All that the array depends on, part by part.
        stem: The readable part of the file name.
        cache_dir: The folder of the cache; another is used where it cannot be written.
    """
    digest = hashlib.sha256(f"v{VERSION} {shape}".encode())
    for part in key:
        digest.update(b"%d:" % len(part) + part)
    # A long name is a valid one, but not with the key at its end.
    name = f"{stem[:40]}-{digest.hexdigest()[:20]}.npy"

    for folder in (cache_dir, default_cache_dir()):
        found = load(folder / name, shape)
        if found is not None:
            return found

    images = build()
    for folder in (cache_dir, default_cache_dir()):
        try:
            save(folder / name, images)
        except UserError as error:
            log.warning("decoded images are not kept: %s", error)
            continue
        return images if (found := load(folder / name, shape)) is None else found

    return images


def load(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8] | None:
    r"""Maps a cached array; None if the file is absent, damaged or of another shape."""
    if stat(path) is None:
        return None
    try:
        array = map_array(path)
    except UserError as error:
        log.warning("rebuilding the damaged cache %s", error)
        return None

    if array.shape != shape or array.dtype != np.uint8:
        log.warning("rebuilding the cache %s (found %s %s)", path, array.dtype, array.shape)
        return None
    # In another order the same bytes would be other pixels.
    if not array.flags.c_contiguous or _seal_of(path, array) != _seal(path, array):
        log.warning("rebuilding the damaged cache %s (its pixels are not what was kept)", path)
        return None

    return array


def save(path: Path, images: NDArray[np.uint8]) -> None:
    r"""Writes an array so that at no time a part of it bears the final name."""
    images = np.ascontiguousarray(images)
    sweep(path.parent)
    with atomic_path(path) as temporary:
        np.save(temporary, images, allow_pickle=False)
        with temporary.open("ab") as file:
            file.write(_seal(path, images))


def _seal(path: Path, images: NDArray[np.uint8]) -> bytes:
    r"""Returns the checksum of pixels and of the name, and so the key, they are kept under."""
    return zlib.crc32(images.data, zlib.crc32(os.fsencode(path.name))).to_bytes(4, "big")


def _seal_of(path: Path, array: np.memmap[Any, Any]) -> bytes:
    r"""Returns what follows the pixels in their file."""
    try:
        with path.open("rb") as file:
            file.seek(array.offset + array.nbytes)
            return file.read(8)
    except OSError:  # removed since it was mapped
        return b""


def default_cache_dir() -> Path:
    r"""Returns the user's cache folder, for data roots that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    return Path(base) / "ood_osdre"
