r"""Decoding of image files, and the cache of decoded arrays.

ID, reference and OOD images all go through one preprocessing, OpenOOD's: RGB, the shorter side
resized to :math:`S` pixels (bilinear, with antialiasing), the central :math:`S \times S` crop.
One thing comes before: a photograph that its EXIF tag turns is turned, as every viewer shows it.
OpenOOD's loader leaves it as it is stored; no image of the sets for CIFAR has the tag.

Decoding tens of thousands of small files is slow, so each set is decoded once into one uint8
`.npy` file that is mapped into memory afterwards. Its name holds a key of everything the result
depends on: the version of the preprocessing, the folder, the list, and the size and modification
time of each image. The file is written under a temporary name, flushed to disk and renamed, so
that neither a crash nor a second process that builds the set leaves half a file. A CRC-32 of the
pixels follows them within the file. It is checked once when the file is written and by
`python -m ood_osdre.data check`; whoever maps a file checks its type, shape and length, and the
CRC of one of at most :data:`CHECKED` bytes, as that of others would read every pixel before the
first is wanted. A file found damaged is built again.
"""

__all__ = [
    "SLACK",
    "VERSION",
    "as_rgb",
    "as_uint8",
    "cache_folders",
    "cached_array",
    "check_cache",
    "decode",
    "decode_all",
    "image_files",
    "is_image",
    "square",
]

import contextlib
import hashlib
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import UserError, first, one_line
from ..files import atomic_path, is_regular, map_array, stat, sweep
from ..progress import Bar
from .image_files import ImageFiles, cores
from .lists import image_suffixes

# What Pillow raises for damaged files, depending on their format, and for those of absurd size.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)

#: To be raised whenever the same file would decode to other pixels.
VERSION = 3
#: Rounding of pixels that were resized or cropped in floats.
SLACK = 1e-3
# The most images that a thread decodes before it reports.
TOGETHER = 64
#: The size of a cached array below which its pixels are checked whenever it is mapped.
CHECKED = 16 * 2**20
CRC = 4  # bytes
# How the name of a cached array ends.
NAME = re.compile(r"-[0-9a-f]{20}\.npy$")
# The EXIF tag of how a camera was held, and what undoes each of its values.
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Files of 16-bit grey that Pillow may hold in 32 bits.
WIDE_FORMATS = ("PNG", "PPM")

log = logging.getLogger(__name__)


def as_rgb(image: Image.Image) -> Image.Image:
    r"""Returns an image as RGB of 8 bits.

    Grey of 16 bits keeps its high byte; Pillow clips it at 255, which turns most of such an image
    white. Grey in floats is taken to lie in :math:`[0, 1]`, grey in 32-bit integers from 0 to 255.

    Raises:
        ValueError: If grey in floats or 32-bit integers lies elsewhere.
    """
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    image.load()  # here, where a damaged file raises an error
    grey = np.asarray(image)
    if image.mode == "F":
        grey = as_uint8(grey)
    elif image.mode != "I" or image.format in WIDE_FORMATS:
        grey = (grey.clip(0, 65_535) // 256).astype(np.uint8)
    else:
        grey = as_uint8(grey, top=255)
    return Image.fromarray(grey).convert("RGB")


def as_uint8(pixels: NDArray[Any], top: int = 1) -> NDArray[np.uint8]:
    r"""Maps pixels from 0 to `top`, give or take :data:`SLACK`, to uint8.

    Arguments:
        pixels: The pixels, with shape :math:`(*)`.
        top: What stands for white.

    Raises:
        ValueError: If some lie elsewhere, or are NaN.
    """
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= -SLACK and high <= top + SLACK):  # also false for NaN
        kind = "floats" if top == 1 else "integers"
        raise ValueError(f"pixels from {low:.3g} to {high:.3g}, expected {kind} in [0, {top}]")
    whole = np.empty(pixels.shape, np.uint8)
    for start in range(0, len(pixels), TOGETHER):  # or three copies in floats would lie in memory
        part = slice(start, start + TOGETHER)
        whole[part] = np.rint(255 // top * pixels[part].clip(0, top))
    return whole


def square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    r"""Returns an image as RGB, :math:`(S, S, 3)`: its shorter side resized, its centre cropped.

    It is turned as its EXIF tag says.

    Arguments:
        image: An image of any mode and size.
        size: The side :math:`S`.

    Raises:
        ValueError: As :func:`as_rgb`, or if there are no pixels.
    """
    w, h = image.size
    if not min(w, h):
        raise ValueError(f"an image of {w} x {h} pixels")
    rgb = as_rgb(image)
    with contextlib.suppress(*DAMAGE, LookupError, TypeError, struct.error):  # of the tags alone
        # After the pixels: some formats are turned, and have lost their tag, once they are read.
        if (tag := image.getexif().get(ORIENTATION)) in TURNS:
            rgb = rgb.transpose(TURNS[tag])
    w, h = rgb.size
    if (short := min(w, h)) != size:
        # Integer arithmetic of torchvision's Resize; its CenterCrop rounds the offset.
        w, h = (size, size * h // short) if w == short else (size * w // short, size)
        rgb = rgb.resize((w, h), Image.Resampling.BILINEAR)
    left, top = round((w - size) / 2), round((h - size) / 2)
    return np.asarray(rgb)[top : top + size, left : left + size]


def is_image(path: Path) -> bool:
    r"""Returns whether a file is one image, by its suffix or else by its content."""
    if not is_regular(path):
        return False
    if path.suffix.lower() in image_suffixes():
        return True
    try:
        with Image.open(path):
            return True
    except DAMAGE:
        return False


def decode(path: Path, size: int) -> NDArray[np.uint8]:
    r"""Decodes an image file to pixels with shape :math:`(S, S, 3)`."""
    if not is_regular(path):
        raise OSError("no regular file")
    with Image.open(path) as image:
        return square(image, size)


def decode_all(
    paths: Sequence[Path],
    size: int,
    title: str,
    progress: bool = True,
    threads: int | None = None,
    keep: bool = True,
) -> NDArray[np.uint8]:
    r"""Decodes image files.

    Arguments:
        paths: The files.
        size: The side :math:`S`.
        title: What the progress bar and errors call the set.
        progress: Whether to show a progress bar.
        threads: How many threads decode; None for as many as there are cores.
        keep: Whether to keep the images; else they are only looked at, a few at once.

    Returns:
        The images, with shape :math:`(N, S, S, 3)`; none if they are not kept.

    Raises:
        UserError: If some cannot be decoded; it names them.
    """
    threads = threads or min(16, cores())
    together = max(1, min(TOGETHER, len(paths) // threads))
    images = np.empty((len(paths) if keep else 0, size, size, 3), dtype=np.uint8)
    bad: list[str] = []

    def some(start: int) -> int:
        part = paths[start : start + together]
        for i, path in enumerate(part, start):
            try:
                images[i : i + 1] = decode(path, size)  # where there is room for it
            except DAMAGE as error:
                bad.append(f"{path} ({one_line(error, 60)})")
        return len(part)

    # A hidden bar would take a lock, too, which the processes of a data loader share.
    bar: Bar | contextlib.nullcontext[None] = contextlib.nullcontext()
    if progress:
        bar = Bar(total=len(paths), desc=f"decoding {title}", unit="image")
    # Pillow releases the interpreter's lock while it decodes and resizes.
    with bar as shown, ThreadPoolExecutor(max_workers=threads) as pool:
        for count in pool.map(some, range(0, len(paths), together)):
            if shown is not None:
                shown.update(count)
    if bad:
        raise UserError(f"{title}: cannot decode {first(sorted(bad), 'file')}")
    return images


def image_files(folder: Path, names: Sequence[str], size: int, title: str) -> ImageFiles:
    r"""Returns images that stay files, by their paths below a folder; see :func:`decode_all`."""

    def decode(paths: Sequence[Path], threads: int | None) -> NDArray[np.uint8]:
        return decode_all(paths, size, title, progress=False, threads=threads)

    return ImageFiles(folder, names, size, decode)


def cached_array(
    build: Callable[[], NDArray[Any]],
    shape: tuple[int, ...],
    key: Iterable[bytes],
    stem: str,
    cache_dir: Path,
    dtype: type[np.generic] = np.uint8,
) -> NDArray[Any]:
    r"""Returns an array from the cache, after building it if need be.

    The array is mapped copy-on-write: it may be written to, which changes no file.

    Arguments:
        build: Builds the array.
        shape: The shape it must have.
        key: All that the array depends on, part by part.
        stem: The readable part of the file name.
        cache_dir: The folder of the cache; another is used where it cannot be written.
        dtype: Its type.
    """
    digest = hashlib.sha256(f"v{VERSION} {shape}".encode())
    for part in key:
        digest.update(b"%d:" % len(part) + part)
    # A long name is a valid one, but not with the key at its end.
    name = f"{stem[:40]}-{digest.hexdigest()[:20]}.npy"
    paths = [folder / name for folder in cache_folders(cache_dir)]
    for path in paths:
        if (found := load(path, shape, dtype)) is not None:
            return found

    images = build()
    for path in paths:
        try:
            save(path, images)
        except UserError as error:
            log.warning("decoded images are not kept: %s", error)
        else:
            found = load(path, shape, dtype, whole=True)
            return images if found is None else found
    return images


def cache_folders(cache_dir: Path) -> list[Path]:
    r"""Returns where arrays are kept: a folder, and the one for where that cannot be written."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # In a container the user may have no home: then `~` stays what it is.
    return [cache_dir, *([] if home.startswith("~") else [Path(home, "ood_osdre")])]


def check_cache(folder: Path) -> list[Path]:
    r"""Removes the cached arrays of a folder whose content is not what was kept; returns them.

    Raises:
        UserError: If one cannot be removed.
    """
    paths = [p for p in sorted(folder.glob("*.npy")) if NAME.search(p.name) and is_regular(p)]
    damaged = []
    for path in paths:
        with contextlib.suppress(UserError):
            array = map_array(path)
            if load(path, array.shape, array.dtype.type, whole=True) is not None:
                continue
        damaged.append(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: damaged, and cannot be removed: {error.strerror}") from None
    return damaged


def load(
    path: Path, shape: tuple[int, ...], dtype: type[np.generic] = np.uint8, whole: bool = False
) -> NDArray[Any] | None:
    r"""Maps a cached array; None if the file is absent, damaged or of another shape or type.

    Its content is looked at if it is small, or if the `whole` is asked for.
    """
    if stat(path) is None:
        return None
    try:
        array = map_array(path)
    except UserError as error:
        log.warning("rebuilding the damaged cache %s", error)
        return None
    is_ours = array.shape == shape and array.dtype == dtype
    # In another order the same bytes would be other pixels.
    if is_ours and array.flags.c_contiguous:
        with contextlib.suppress(OSError), path.open("rb") as file:  # removed since it was mapped
            file.seek(array.offset + array.nbytes)
            kept, looks = file.read(8), whole or array.nbytes <= CHECKED
            if kept == _checksum(path, array) if looks else len(kept) == CRC:
                return array
    log.warning("rebuilding the damaged cache %s (it is not what was kept)", path)
    return None


def save(path: Path, images: NDArray[Any]) -> None:
    r"""Writes an array and its checksum so that at no time a part of it has the final name."""
    images = np.ascontiguousarray(images)
    sweep(path.parent)
    with atomic_path(path) as temporary:
        np.save(temporary, images, allow_pickle=False)
        with temporary.open("ab") as file:
            file.write(_checksum(path, images))


def _checksum(path: Path, images: NDArray[Any]) -> bytes:
    r"""Returns the CRC-32 of pixels and of the name, and so the key, that they are kept under."""
    whole = images.reshape(-1).view(np.uint8).data  # of an array without elements, none
    return zlib.crc32(whole, zlib.crc32(os.fsencode(path.name))).to_bytes(CRC, "big")
