r"""Labelled images in memory, mapped from disk, or in files: splits, and what two sets share.

Items that two sets share are found by content, by a hash. A copy that was re-encoded, resized or
augmented is another item. Copies stay on one side of every split, or a model is asked about what it
was fitted to; but what is likely by itself, such as a black frame or a row of zeros, is a draw of its
own each time: it has to be trained on, and it calibrates as often as it is there.

No test image may choose a model. Validation therefore compares ID images with *reference* images
of classes that training never sees: ten held-out class folders where the reference has classes,
else a held-out tenth.
"""

__all__ = [
    "ImageSet",
    "Samples",
    "are_likely",
    "count_shared",
    "cut_apart",
    "draws_of",
    "group_of",
    "hold_out_id",
    "hold_out_reference",
    "key_of",
    "thinned",
]

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .image_files import HELD, ArrayRows, LazyImages, Pixels

# An item is likely by itself if it is so large a share of all, and so many times as frequent as
# items are on average, and no more kinds than a few are: more were drawn again, to balance classes.
LIKELY, TIMES_MEAN, FEW = 0.01, 5, 5

PLAIN_FOLDERS = frozenset({"images", "train", "val", "test", ""})


@dataclass(frozen=True, eq=False)
class ImageSet:
    r"""Images with their labels and names.

    Attributes:
        images: RGB images in uint8, with shape :math:`(N, H, W, 3)`: an array, or what stands for
            one without being held in memory.
        labels: The ID class in int64, or -1, with shape :math:`(N)`.
        names: The path of each image, as its list has it.
        key: What tells the images from others, whatever they are named after; empty if unknown.
    """

    images: Pixels
    labels: NDArray[np.int64]
    names: list[str]
    key: str = ""

    def __post_init__(self) -> None:
        x, n = self.images, len(self.images)
        is_rgb = x.dtype == np.uint8 and x.ndim == 4 and x.shape[3] == 3
        if not is_rgb or self.labels.shape != (n,) or len(self.names) != n:
            raise ValueError(
                f"image set: got {x.dtype} {x.shape}, labels {self.labels.shape} and "
                f"{len(self.names)} names, expected uint8 (N, H, W, 3), labels (N,) and N names."
            )

    @classmethod
    def empty(cls, size: int) -> "ImageSet":
        r"""Returns a set of no images of a given side."""
        return cls(np.zeros((0, size, size, 3), np.uint8), np.zeros(0, np.int64), [])

    def __len__(self) -> int:
        return len(self.images)

    @property
    def groups(self) -> list[str]:
        r"""The class of each image by its folder: `tin/train/n01768244/x.JPEG` is `n01768244`.

        Folders named after a split (`train`, `val`, `test`) or `images` name no class; an image
        below only such folders is of the class of the next folder up, or of `""`.
        """
        return [group_of(name) for name in self.names]

    def subset(self, indices: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> "ImageSet":
        r"""Returns some of the images, in the order given: a view, or a copy of a few.

        Arguments:
            indices: Indices, or a mask with shape :math:`(N)`.
        """
        picked = np.asarray(indices)
        picked = (np.flatnonzero(picked) if picked.dtype == bool else picked).astype(np.intp)
        names = [self.names[i] for i in picked]
        key = self.key and key_of(self.key.encode(), picked.astype("<i8").tobytes())
        images, labels = self.images, self.labels[picked]
        if isinstance(images, LazyImages):
            return ImageSet(images.pick(picked), labels, names, key)
        if len(picked) * images[:1].nbytes > HELD:
            return ImageSet(ArrayRows(images, picked), labels, names, key)
        return ImageSet(images[picked], labels, names, key)

    def held(self) -> "ImageSet":
        r"""Returns the set with its images in memory, if they are few (`HELD` bytes)."""
        if isinstance(self.images, LazyImages) and self.images.nbytes <= HELD:
            return replace(self, images=self.images[:])
        return self


class Samples(NamedTuple):
    r"""Images or vectors, with labels and names.

    Attributes:
        values: Images in uint8, with shape :math:`(N, S, S, 3)`, files that are decoded when asked
            for where they are many; or vectors, with shape :math:`(N, d)`, in float32, or float64
            if they came as integers or in more than single precision.
        labels: The ID class of each, -1 where there is none, with shape :math:`(N)`.
        names: A name for each, its path if it has one.
        unlabelled: Why there are no labels; empty if there are.
        columns: The names of the numbers of a vector, where a table names its columns.
    """

    values: NDArray[Any] | LazyImages
    labels: NDArray[np.int64]
    names: list[str]
    unlabelled: str = ""
    columns: tuple[str, ...] = ()

    @property
    def has_images(self) -> bool:
        r"""Whether the values are images."""
        return self.values.ndim == 4


def key_of(*parts: bytes) -> str:
    r"""Returns the :attr:`ImageSet.key` of images that all of these parts determine."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def thinned(images: ImageSet, limit: int | None) -> ImageSet:
    r"""Takes evenly spaced images, so that every class stays represented."""
    if limit is None or limit >= len(images):
        return images
    return images.subset(np.linspace(0, len(images) - 1, limit).round().astype(np.int64))


def group_of(name: str) -> str:
    r"""Returns the class of an image by the folders of its path."""
    for folder in reversed(name.replace("\\", "/").split("/")[:-1]):
        if folder not in PLAIN_FOLDERS:
            return folder
    return ""


def count_shared(items: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    r"""Counts the items that are among others, by fingerprint.

    Arguments:
        items: The fingerprints of a set, with shape :math:`(N)`.
        others: Those of another, with shape :math:`(M)`.
    """
    return int(np.isin(items, others).sum())


def are_likely(marks: NDArray[np.int64]) -> NDArray[np.bool_]:
    r"""Returns which items are likely by themselves, so that equal ones are no copies of one.

    They are of at most five kinds, each more than 1 % of all items and more than five times as frequent
    as items are on average. Of fewer than :math:`\sqrt N` kinds in all, as in a table of categories,
    all are.

    Arguments:
        marks: What equal items share, and others do not, with shape :math:`(N)`.
    """
    _, which, counts = np.unique(marks, return_inverse=True, return_counts=True)
    return _likely(counts)[which]


def _likely(counts: NDArray[np.int64], categories: bool = True) -> NDArray[np.bool_]:
    r"""Returns which kinds of items are likely by themselves, by how many items there are of each."""
    total = counts.sum()
    if categories and 1 < len(counts) < total**0.5:
        return np.ones(len(counts), bool)
    likely = np.zeros(len(counts), bool)
    while True:
        mean = total / max(counts[likely].sum() + (~likely).sum(), 1)
        found = counts > max(LIKELY * total, TIMES_MEAN * mean)
        if (found == likely).all():
            return likely & (likely.sum() <= FEW)
        likely = found


def draws_of(marks: NDArray[np.int64], categories: bool = True) -> NDArray[np.int64]:
    r"""Numbers the draws that items are, with shape :math:`(N)`: copies are one.

    Arguments:
        marks: As for :func:`are_likely`.
        categories: Whether items of few kinds may be categories; else all are copies.

    Example:
        >>> zeros, copies = [0] * 10, [1] * 2
        >>> len(set(draws_of(np.array([*zeros, *copies, *range(2, 20)])).tolist()))
        29
    """
    _, draws, counts = np.unique(marks, return_inverse=True, return_counts=True)
    likely = _likely(counts, categories)[draws]
    draws[likely] = len(marks) + np.flatnonzero(likely)
    return draws


def cut_apart(
    order: NDArray[np.intp], draws: NDArray[np.int64], cuts: Sequence[int]
) -> list[NDArray[np.intp]]:
    r"""Cuts an order of items into parts none of which has a copy of another's item.

    Copies follow the one that comes first among the items, which falls into a part as any item does,
    and a cut that would part them is moved behind the last. Of items without copies, the parts are
    those of the order itself.

    Arguments:
        order: The indices of the items, with shape :math:`(N)`.
        draws: What copies share, and other items do not (:func:`draws_of`), with shape :math:`(N)`.
        cuts: Where to cut, in ascending order; there is one part more.

    Example:
        >>> [part.tolist() for part in cut_apart(np.arange(4), np.array([7, 8, 7, 9]), [1])]
        [[0, 2], [1, 3]]
    """
    place = np.argsort(order)
    _, first, which = np.unique(draws, return_index=True, return_inverse=True)
    rank = place[first[which]]
    order = np.lexsort((place, rank))
    rank = rank[order]
    ends = [int(np.searchsorted(rank, rank[c - 1], side="right")) if c else 0 for c in cuts]
    return np.split(order, ends)


def hold_out_reference(
    reference: ImageSet,
    classes: int | Sequence[str] = 10,
    fraction: float = 0.1,
    seed: int = 0,
    last: int | None = None,
    marks: NDArray[np.int64] | None = None,
) -> tuple[ImageSet, ImageSet]:
    r"""Splits a reference into a part for training and a part for validation.

    Arguments:
        reference: The reference.
        classes: The names of classes to hold out; or how many, if there are twice as many.
        fraction: Else the fraction of images to hold out.
        seed: The seed of the split.
        last: How many images to hold out, the last ones, in place of classes or a fraction: the
            option `data.hold_out_reference`; None for those.
        marks: What copies share, with shape :math:`(N)`, to keep them together where it is a
            fraction that is held out; None to take images for distinct.

    Returns:
        The images for training and for validation.

    Raises:
        UserError: If a class is unknown, or one part would have no images.
    """
    if last is not None:
        if last >= (size := len(reference)):
            raise UserError(
                f"data.hold_out_reference: got {last}, expected less than {size}, the number of "
                "reference images."
            )
        rows = np.arange(size)
        return reference.subset(rows[:-last]), reference.subset(rows[-last:])
    rng = np.random.default_rng(seed)
    groups = np.asarray(reference.groups)
    names = sorted(set(groups.tolist()) - {""})
    if isinstance(classes, int):
        count = classes if len(names) >= 2 * classes else 0
        held = rng.choice(np.asarray(names, dtype=np.str_), count, replace=False).tolist()
    else:
        held = list(classes)

    mask = np.isin(groups, held)
    if not held:
        size = round(fraction * len(reference))
        drawn = rng.choice(len(reference), size, replace=False)
        if marks is not None:
            rest = np.setdiff1d(np.arange(len(reference)), drawn)
            drawn, _ = cut_apart(np.concatenate([drawn, rest]), draws_of(marks), [size])
        mask[drawn] = True
    if mask.all() or not mask.any() or not set(held) <= set(names):
        raise UserError(
            f"reference: {len(reference)} images with {len(held)} classes held out cannot be split "
            "into a part for training and a part for validation, both with images"
        )
    return reference.subset(~mask), reference.subset(mask)


def hold_out_id(id_train: ImageSet, held: int) -> tuple[ImageSet, ImageSet | None]:
    r"""Holds out the last ID training images of a fixed permutation, the same for every seed.

    Arguments:
        id_train: The ID training images.
        held: The number of images held out, the option `data.hold_out_id`.

    Returns:
        The images for training and those held out, None for none.

    Raises:
        UserError: If none would be left for training.
    """
    if not held:
        return id_train, None
    if held >= len(id_train):
        raise UserError(
            f"data.hold_out_id: got {held}, expected less than {len(id_train)}, the number of ID "
            "training images."
        )
    order = np.random.default_rng(0).permutation(len(id_train))
    rest, last = np.sort(order[:-held]), np.sort(order[-held:])
    return id_train.subset(rest), id_train.subset(last)
