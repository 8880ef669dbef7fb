r"""Labelled images in memory, or mapped from disk."""

__all__ = ["ImageSet"]

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PLAIN_FOLDERS = frozenset({"images", "train", "val", "test", ""})


@dataclass(frozen=True, eq=False)
class ImageSet:
    r"""Images with their labels and names.

    Attributes:
        images: RGB images in uint8, with shape :math:`(N, H, W, 3)`.
        labels: The ID class in int64, or -1, with shape :math:`(N)`.
        names: The path of each image, as its list has it.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    names: list[str]

    def __post_init__(self) -> None:
        n = len(self.images)
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise ValueError(
                f"images must be uint8 with shape (N, H, W, 3); "
                f"found {self.images.dtype} {self.images.shape}"
            )
        if self.labels.shape != (n,) or len(self.names) != n:
            raise ValueError(f"{n} images, {len(self.labels)} labels, {len(self.names)} names")

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
        r"""Returns a copy of some of the images, in the order given.

        Arguments:
            indices: Indices, or a mask with shape :math:`(N)`.
        """
        picked = np.asarray(indices)
        if picked.dtype == bool:
            picked = np.flatnonzero(picked)
        picked = picked.astype(np.intp)

        return ImageSet(
            np.asarray(self.images[picked]),
            self.labels[picked],
            [self.names[i] for i in picked],
        )


def group_of(name: str) -> str:
    r"""Returns the class of an image by the folders of its path."""
    for folder in reversed(name.replace("\\", "/").split("/")[:-1]):
        if folder not in PLAIN_FOLDERS:
            return folder
    return ""
