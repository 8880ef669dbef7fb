r"""Images that are not held in memory: files that are decoded when asked for, and rows of arrays.

All behave as an array of images of which rows can be taken: `images[rows]` is a uint8 array,
whatever `images` is. A subset of any is another view of the same files or the same array, so
that splits, limits and shuffles copy no pixel.

Sets that are small enough are better decoded once. :data:`LIMIT` says where that ends: 54,000
images at 64 pixels and 4,400 at 224 are held. A larger set is *streamed*: at no time is more of it
decoded than a few batches.
"""

__all__ = [
    "HELD",
    "LIMIT",
    "SURVEYED",
    "ArrayRows",
    "ImageFiles",
    "LazyImages",
    "Pixels",
    "ResizedRows",
    "Survey",
    "array_of",
    "checksum_of",
    "cores",
    "fingerprints",
    "in_batches",
    "is_large",
    "survey",
]

import abc
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from ..progress import Bar

#: The most bytes of decoded pixels of a set that is kept whole, on a disk, in memory or on a device.
LIMIT = 640 * 2**20
#: The images that are read together where all are looked at.
SURVEYED = 64
#: The most bytes of a set that is decoded again and again, such as one that validates, to be held.
HELD = 64 * 2**20

Rows: TypeAlias = Any  # what numpy takes for an index of rows
Resize: TypeAlias = "Callable[[NDArray[np.uint8]], NDArray[np.uint8]]"
Decode: TypeAlias = "Callable[[Sequence[Path], int | None], NDArray[np.uint8]]"


class LazyImages(abc.ABC):
    r"""Abstract images of which rows are fetched when asked for.

    Arguments:
        rows: Which of the images that there are, and in which order, with shape :math:`(N)`.
        side: The height and width of an image.

    Attributes:
        shape: :math:`(N, H, W, 3)`, as an array has it; so are `dtype`, `ndim` and `nbytes`.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, rows: NDArray[np.intp], side: tuple[int, int]) -> None:
        self.rows = rows
        self.shape = (len(rows), *side, 3)
        self.nbytes = math.prod(self.shape)

    @abc.abstractmethod
    def pick(self, rows: Rows) -> Self:
        r"""Returns some of the images, in the order given, without fetching them."""

    @abc.abstractmethod
    def _fetched(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        r"""Returns images by their place among all that there are."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Rows) -> NDArray[np.uint8]:
        chosen = self.rows[rows]
        return self._fetched(chosen) if np.ndim(chosen) else self._fetched(chosen[None])[0]

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> NDArray[Any]:
        return self[:] if dtype is None else self[:].astype(dtype)


#: Images in uint8, with shape :math:`(N, H, W, 3)`.
Pixels: TypeAlias = "NDArray[np.uint8] | LazyImages"


class ImageFiles(LazyImages):
    r"""Image files that are decoded when asked for (:func:`~ood_osdre.data.images.image_files`).

    Arguments:
        folder: The folder that the names are relative to.
        names: The paths of all files.
        size: The side :math:`S` that images are brought to.
        decode: Decodes files, given their paths and by how many threads.
        rows: Which of the files, with shape :math:`(N)`; None for all.
        threads: How many threads decode; None for as many as there are cores.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        size: int,
        decode: Decode,
        rows: NDArray[np.intp] | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__(np.arange(len(names)) if rows is None else rows, (size, size))
        self.folder, self.names, self.decode, self.threads = folder, names, decode, threads

    def pick(self, rows: Rows, threads: int | None = None) -> "ImageFiles":  # noqa: D102
        size, threads = self.shape[1], threads or self.threads
        return ImageFiles(self.folder, self.names, size, self.decode, self.rows[rows], threads)

    def _fetched(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        return self.decode([self.folder / self.names[i] for i in rows], self.threads)


class ArrayRows(LazyImages):
    r"""Rows of an array of images that stays where it is, in memory or mapped from a file.

    Arguments:
        array: All images, with shape :math:`(M, H, W, 3)`.
        rows: Which of them, with shape :math:`(N)`.
    """

    def __init__(self, array: NDArray[np.uint8], rows: NDArray[np.intp]) -> None:
        super().__init__(rows, (array.shape[1], array.shape[2]))
        self.array = array

    def pick(self, rows: Rows) -> "ArrayRows":  # noqa: D102
        return ArrayRows(self.array, self.rows[rows])

    def _fetched(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        return self.array[rows]


class ResizedRows(LazyImages):
    r"""Rows of an array of images that are brought to another side when asked for.

    Arguments:
        array: All images, as Pillow takes them, with shape :math:`(M, *)`.
        size: The side :math:`S` that images are brought to.
        resize: Brings one to that side, with shape :math:`(S, S, 3)`.
        rows: Which of them, with shape :math:`(N)`; None for all.
    """

    def __init__(
        self, array: NDArray[np.uint8], size: int, resize: Resize, rows: Rows = None
    ) -> None:
        super().__init__(np.arange(len(array)) if rows is None else rows, (size, size))
        self.array, self.resize = array, resize

    def pick(self, rows: Rows) -> "ResizedRows":  # noqa: D102
        return ResizedRows(self.array, self.shape[1], self.resize, self.rows[rows])

    def _fetched(self, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for i, row in enumerate(rows):
            found[i] = self.resize(self.array[row])
        return found


def is_large(count: int, size: int) -> bool:
    r"""Returns whether that many images of that side are to be streamed."""
    return count * size * size * 3 > LIMIT


def array_of(images: Pixels) -> NDArray[np.uint8]:
    r"""Returns images as an array in one piece, decoded or copied only if they are not."""
    return np.ascontiguousarray(images[:])


def checksum_of(images: Pixels) -> str:
    r"""Returns the sha256 of all pixels, a few images at a time."""
    digest = hashlib.sha256()
    for batch in in_batches(images, SURVEYED):
        digest.update(batch.data)
    return digest.hexdigest()


def fingerprints(items: NDArray[Any] | LazyImages) -> NDArray[np.int64]:
    r"""Returns a hash of each item: of a million, two different ones agree with a probability of 3e-8.

    Numbers in double precision are taken for what they are in single if that is exact, so that
    equal vectors have equal hashes.

    Arguments:
        items: The items, with shape :math:`(N, *)`.

    Returns:
        The hashes, with shape :math:`(N)`.

    Example:
        >>> a, b, c = fingerprints(np.array([[1, 2], [3, 4], [1, 2]]))
        >>> bool(a == c), bool(a == b)
        (True, False)
    """
    digests = b"".join(
        hashlib.sha256(np.ascontiguousarray(_single(item)).data).digest()[:8]
        for batch in in_batches(items, SURVEYED)  # plain arrays: rows of a memory map cost more
        for item in batch
    )
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def _single(item: NDArray[Any]) -> NDArray[Any]:
    if item.dtype != np.float64:
        return item
    with np.errstate(over="ignore"):
        single = item.astype(np.float32)
    return single if (single == item).all() else item


class Survey(NamedTuple):
    r"""What has to be known of all images before training, found in one pass over them.

    Attributes:
        marks: Their :func:`fingerprints`, with shape :math:`(N)`.
        sums: The sum of each one's pixels by channel, with shape :math:`(N, 3)`.
        squares: That of the pixels' squares.
        pixels: The number of pixels of an image.
    """

    marks: NDArray[np.int64]
    sums: NDArray[np.int64]
    squares: NDArray[np.int64]
    pixels: int

    def statistics(
        self, rows: NDArray[np.intp]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        r"""Returns the mean and the deviation of each channel over some of the images, unrounded."""
        count = len(rows) * self.pixels
        total, squares = (x[rows].sum(axis=0) for x in (self.sums, self.squares))
        # In Python's integers, as the square of a sum has no room in 64 bits.
        spread = [count * int(q) - int(s) ** 2 for s, q in zip(total, squares, strict=True)]
        return total / count, np.sqrt([float(v) for v in spread]) / count


def survey(images: Pixels, title: str = "", progress: bool = False) -> Survey:
    r"""Looks at every image once, a few at a time; files may have a progress bar with a title."""
    marks, sums, squares = ([np.zeros(s, np.int64)] for s in (0, (0, 3), (0, 3)))
    pixels, shown = images.shape[1] * images.shape[2], progress and isinstance(images, LazyImages)
    with Bar(total=len(images), desc=title, unit="image", disable=not shown) as bar:
        for batch in in_batches(images, SURVEYED):
            marks.append(fingerprints(batch))
            # Row after row, which is fast; 66,000 of them fit into 32 bits.
            rows = batch.reshape(*batch.shape[:2], -1)
            for x, found in ((rows, sums), (np.square(rows, dtype=np.uint16), squares)):
                total = x.sum(axis=1, dtype=np.uint32).reshape(len(batch), -1, 3)
                found.append(total.sum(axis=1, dtype=np.int64))
            bar.update(len(batch))
    return Survey(np.concatenate(marks), np.concatenate(sums), np.concatenate(squares), pixels)


def in_batches(
    images: Pixels, count: int, start: int = 0, stop: int | None = None
) -> Iterator[NDArray[np.uint8]]:
    r"""Yields images in order; of files, the next batch is decoded while one is at work.

    Arguments:
        images: The images, or vectors, with shape :math:`(N, *)`.
        count: The number of them in a batch; the last may have fewer.
        start: The first of them.
        stop: The one behind the last; None for the end.
    """
    end = len(images) if stop is None else stop

    def batch(first: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(images[first : min(first + count, end)])

    starts = range(start, end, count)
    if not isinstance(images, ImageFiles):
        yield from map(batch, starts)
        return
    with ThreadPoolExecutor(max_workers=1) as ahead:
        coming = None
        for first in starts:
            now = batch(first) if coming is None else coming.result()
            following = first + count
            coming = ahead.submit(batch, following) if following < end else None
            yield now


def cores() -> int:
    r"""Returns the number of cores that this process may use."""
    known = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(known(0)) if known is not None else os.cpu_count() or 1
