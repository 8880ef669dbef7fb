r"""Which images, or vectors, two sets share, by their content.

A fingerprint is a hash of 64 bits: among a million items two different ones agree with a
probability of 3e-8. A copy that was re-encoded, resized or augmented is another item.
"""

__all__ = ["count_shared", "fingerprints", "shared_images"]

import hashlib
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .sets import ImageSet

# Sets of these roles must not meet one another, nor those of any other role. OOD sets may.
EXCLUSIVE = ("id_train", "id_val", "id_test", "reference")


def fingerprints(items: NDArray[Any]) -> NDArray[np.int64]:
    r"""Returns a hash of each item.

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
        for item in np.asarray(items)  # a plain array: rows of a memory map cost more
    )
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


def _single(item: NDArray[Any]) -> NDArray[Any]:
    if item.dtype != np.float64:
        return item
    with np.errstate(over="ignore"):
        single = item.astype(np.float32)
    return single if (single == item).all() else item


def count_shared(items: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    r"""Counts the items that are among others, by fingerprint.

    Arguments:
        items: The fingerprints of a set, with shape :math:`(N)`.
        others: Those of another, with shape :math:`(M)`.
    """
    return int(np.isin(items, others).sum())


def shared_images(
    sets: Mapping[tuple[str, str], ImageSet],
) -> Iterator[tuple[tuple[str, str], tuple[str, str], int]]:
    r"""Yields the sets of a benchmark that share images which they should not.

    Arguments:
        sets: The sets, by role and name.

    Yields:
        The role and name of a set, those of another, and how many images of the latter are in the
        former too.
    """
    marks = {key: fingerprints(images.images) for key, images in sets.items()}
    for one, other in combinations(marks, 2):
        exclusive = one[0] in EXCLUSIVE or other[0] in EXCLUSIVE
        if exclusive and (count := count_shared(marks[other], marks[one])):
            yield one, other, count
