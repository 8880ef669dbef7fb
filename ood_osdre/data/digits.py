r"""The embedded benchmark: real images that scikit-learn ships, no download.

The ID set is the handwritten digits 0 to 4. The reference holds the digits 5, 6 and 7 and
patches of one photograph; the near set is the digits 8 and 9, the far sets are patches of the
other photograph. ID, reference, near and far sets thus share no class and no picture. Digits
have 8x8 pixels and 17 grey levels; all images are brought to 32x32 RGB.

Of each photograph the left half gives patches in colour and the right half patches that are
degraded to the resolution and grey levels of the digits, so that blur alone separates nothing.
Patches of one set overlap by half, so they are not independent of each other.
"""

__all__ = ["SETS", "load_digits_sets"]

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .sets import ImageSet

SIZE = 32
STRIDE = 16
SPLITS = {"id_train": 0.6, "id_val": 0.1, "id_test": 0.3}
#: The role and name of each set.
SETS = (
    *((role, "digits") for role in SPLITS),
    ("reference", "digits567_china"),
    ("near", "digit8"),
    ("near", "digit9"),
    ("far", "flower"),
    ("far", "flower_grey"),
)


def load_digits_sets() -> dict[tuple[str, str], ImageSet]:
    r"""Loads every set of the embedded benchmark, by role and name."""
    # Imported here for the sake of `--help`, and of users with data of their own.
    from sklearn.datasets import load_digits, load_sample_image

    digits = load_digits()
    pixels = [enlarge(np.uint8(np.round(i * 255 / 16))) for i in digits.images]
    every = ImageSet(
        np.stack(pixels),
        digits.target.astype(np.int64),
        [f"digits/{c}/{i:04d}" for i, c in enumerate(digits.target)],
    )
    sets = {
        (role, "digits"): every.subset(indices)
        for role, indices in split(every.labels, classes=5).items()
    }

    reference = unlabelled(every.subset(np.isin(every.labels, (5, 6, 7))))
    china = patches(load_sample_image("china.jpg"), "china")
    flower = patches(load_sample_image("flower.jpg"), "flower")

    sets["reference", "digits567_china"] = concatenate([reference, *china.values()])
    for digit in (8, 9):
        sets["near", f"digit{digit}"] = unlabelled(every.subset(every.labels == digit))
    for name, images in flower.items():
        sets["far", name] = images

    return sets


def split(labels: NDArray[np.int64], classes: int) -> dict[str, NDArray[np.intp]]:
    r"""Splits the images of the first classes, each class in the same proportions."""
    rng = np.random.default_rng(0)
    parts: dict[str, list[NDArray[np.intp]]] = {role: [] for role in SPLITS}

    for c in range(classes):
        indices = rng.permutation(np.flatnonzero(labels == c))
        cuts = np.cumsum([round(f * len(indices)) for f in SPLITS.values()])[:-1]
        for role, part in zip(SPLITS, np.split(indices, cuts), strict=True):
            parts[role].append(part)

    return {role: np.sort(np.concatenate(part)) for role, part in parts.items()}


def patches(photograph: NDArray[np.uint8], name: str) -> dict[str, ImageSet]:
    r"""Cuts a photograph, with shape :math:`(H, W, 3)`, into patches in colour and in grey."""
    middle = photograph.shape[1] // 2
    halves = {name: photograph[:, :middle], f"{name}_grey": photograph[:, middle:]}
    sets = {}

    for key, half in halves.items():
        corners = [
            (i, j)
            for i in range(0, half.shape[0] - SIZE + 1, STRIDE)
            for j in range(0, half.shape[1] - SIZE + 1, STRIDE)
        ]
        cut = [half[i : i + SIZE, j : j + SIZE] for i, j in corners]
        sets[key] = ImageSet(
            np.stack([as_digit(c) for c in cut] if key.endswith("grey") else cut),
            np.full(len(cut), -1, dtype=np.int64),
            [f"{key}/{i:03d}_{j:03d}" for i, j in corners],
        )

    return sets


def as_digit(patch: NDArray[np.uint8]) -> NDArray[np.uint8]:
    r"""Degrades a patch to the 8x8 pixels and 17 grey levels of the digits."""
    grey = Image.fromarray(patch).convert("L").resize((8, 8), Image.Resampling.BOX)
    levels = np.round(np.asarray(grey) * (16 / 255))
    return enlarge(np.uint8(np.round(levels * 255 / 16)))


def enlarge(grey: NDArray[np.uint8]) -> NDArray[np.uint8]:
    r"""Enlarges a grey image to shape :math:`(S, S, 3)`."""
    image = Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(image.convert("RGB"))


def unlabelled(images: ImageSet) -> ImageSet:
    r"""Returns the images as members of no ID class."""
    return ImageSet(images.images, np.full_like(images.labels, -1), images.names)


def concatenate(sets: list[ImageSet]) -> ImageSet:
    r"""Joins sets."""
    return ImageSet(
        np.concatenate([s.images for s in sets]),
        np.concatenate([s.labels for s in sets]),
        [name for s in sets for name in s.names],
    )
