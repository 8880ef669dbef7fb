r"""Decoding of image files, and the cache of decoded arrays.

ID, reference and OOD images all go through one preprocessing, OpenOOD's: RGB, the shorter side
resized to :math:`S` pixels (bilinear, with antialiasing), the central :math:`S \times S` crop.

Decoding tens of thousands of small files is slow, so each set is decoded once into one uint8
`.npy` file that is mapped into memory afterwards. Its name holds a key of everything the result
depends on: the version of the preprocessing, the list, and the size and modification time of
each image. The file is written under a temporary name, flushed to disk and renamed, so that a
crash leaves no half-written cache and two processes that build one set each leave a whole file.
"""

__all__ = ["VERSION", "cached_array", "decode", "decode_all", "default_cache_dir", "square"]

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from ..errors import UserError
from ..files import atomic_path, sweep
from .lists import first

# Pillow's guard against images of absurd size; no ValueError, unlike its other complaints.
BOMB = Image.DecompressionBombError

#: To be raised whenever the same file would decode to other pixels.
VERSION = 1
CHUNK = 64

log = logging.getLogger(__name__)


def square(image: Image.Image, size: int) -> NDArray[np.uint8]:
    r"""Returns an image as RGB with its shorter side resized and its centre cropped.

    Arguments:
        image: An image of any mode and size.
        size: The side :math:`S`.

    Returns:
        The pixels, with shape :math:`(S, S, 3)`.
    """
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255, which turns most of such an image white.
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    rgb = image.convert("RGB")

    w, h = rgb.size
    short = min(w, h)
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
            # A damaged file may surface as any of these, depending on its format.
            except (OSError, SyntaxError, ValueError, EOFError, BOMB) as error:
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
        key: All that the array depends on.
        stem: The readable part of the file name.
        cache_dir: The folder of the cache; another is used where it cannot be written.
    """
    digest = hashlib.sha256(f"v{VERSION} {shape}".encode())
    for part in key:
        digest.update(part)
    name = f"{stem}-{digest.hexdigest()[:20]}.npy"

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
    r"""Maps a cached array; None if the file is absent, truncated or of another shape."""
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.warning("rebuilding the damaged cache %s (%s)", path, error)
        return None

    if array.shape != shape or array.dtype != np.uint8:
        log.warning("rebuilding the cache %s (found %s %s)", path, array.dtype, array.shape)
        return None

    return array


def save(path: Path, images: NDArray[np.uint8]) -> None:
    r"""Writes an array so that at no time a part of it bears the final name."""
    sweep(path.parent)
    with atomic_path(path) as temporary:
        np.save(temporary, images, allow_pickle=False)


def default_cache_dir() -> Path:
    r"""Returns the user's cache folder, for data roots that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or (Path.home() / ".cache")
    return Path(base) / "ood_osdre"
