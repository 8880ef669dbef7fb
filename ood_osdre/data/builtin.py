r"""Images that need no files: the embedded benchmark, and synthetic OOD images for validation.

The *embedded benchmark* is made of real images that scikit-learn ships. Its ID set is the
handwritten digits 0 to 4. The reference holds the digits 5, 6 and 7 and patches of one
photograph; the near set is the digits 8 and 9, the far sets are patches of the other photograph.
ID, reference, near and far sets thus share no class and no picture. Digits have 8x8 pixels and 17
grey levels; all images are brought to 32x32 RGB. Of each photograph the left half gives patches
in colour and the right half patches that are degraded to the resolution and grey levels of the
digits, so that blur alone separates nothing. Patches of one set overlap by half, so they are not
independent of each other.

*Synthetic validation OOD* chooses a model without a look at any test set. It is of three kinds
that neither the reference nor :func:`ood_osdre.data.transforms.broaden` contains: ID validation
images with their patches shuffled, drawn shapes over gradients, and noise.
"""

__all__ = ["SETS", "load_digits_sets", "noise", "patch_shuffle", "shapes", "synthetic_ood"]

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from .image_files import Pixels as AnyPixels
from .sets import ImageSet

Pixels = NDArray[np.uint8]
# The images drawn in floats together.
TOGETHER = 64
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
    images = np.stack([_enlarge(np.uint8(np.round(i * 255 / 16))) for i in digits.images])
    names = [f"digits/{c}/{i:04d}" for i, c in enumerate(digits.target)]
    labels = digits.target.astype(np.int64)
    known, unknown = (ImageSet(images, y, names) for y in (labels, np.full_like(labels, -1)))
    china = _patches(load_sample_image("china.jpg"), "china")
    flower = _patches(load_sample_image("flower.jpg"), "flower")

    sets = {(role, "digits"): known.subset(part) for role, part in _split(labels, 5).items()}
    reference = [unknown.subset(np.isin(labels, (5, 6, 7))), *china.values()]
    sets["reference", "digits567_china"] = ImageSet(
        np.concatenate([s.images for s in reference]),
        np.concatenate([s.labels for s in reference]),
        [name for s in reference for name in s.names],
    )
    for digit in (8, 9):
        sets["near", f"digit{digit}"] = unknown.subset(labels == digit)
    return {**sets, **{("far", name): patches for name, patches in flower.items()}}


def _split(labels: NDArray[np.int64], classes: int) -> dict[str, NDArray[np.intp]]:
    r"""Splits the images of the first classes, each class in the same proportions."""
    rng = np.random.default_rng(0)
    parts: dict[str, list[NDArray[np.intp]]] = {role: [] for role in SPLITS}
    for c in range(classes):
        indices = rng.permutation(np.flatnonzero(labels == c))
        cuts = np.cumsum([round(f * len(indices)) for f in SPLITS.values()])[:-1]
        for role, part in zip(SPLITS, np.split(indices, cuts), strict=True):
            parts[role].append(part)
    return {role: np.sort(np.concatenate(part)) for role, part in parts.items()}


def _patches(photograph: Pixels, name: str) -> dict[str, ImageSet]:
    r"""Cuts a photograph, with shape :math:`(H, W, 3)`, into patches in colour and in grey."""
    middle = photograph.shape[1] // 2
    halves = {name: photograph[:, :middle], f"{name}_grey": photograph[:, middle:]}
    sets = {}
    for key, half in halves.items():
        rows, cols = (range(0, side - SIZE + 1, STRIDE) for side in half.shape[:2])
        corners = [(i, j) for i in rows for j in cols]
        cut = [half[i : i + SIZE, j : j + SIZE] for i, j in corners]
        sets[key] = ImageSet(
            np.stack([_as_digit(c) for c in cut] if key.endswith("grey") else cut),
            np.full(len(cut), -1, dtype=np.int64),
            [f"{key}/{i:03d}_{j:03d}" for i, j in corners],
        )
    return sets


def _as_digit(patch: Pixels) -> Pixels:
    r"""Degrades a patch to the 8x8 pixels and 17 grey levels of the digits."""
    grey = Image.fromarray(patch).convert("L").resize((8, 8), Image.Resampling.BOX)
    levels = np.round(np.asarray(grey) * (16 / 255))
    return _enlarge(np.uint8(np.round(levels * 255 / 16)))


def _enlarge(grey: Pixels) -> Pixels:
    r"""Enlarges a grey image to shape :math:`(S, S, 3)`."""
    image = Image.fromarray(grey).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return np.asarray(image.convert("RGB"))


def synthetic_ood(id_images: AnyPixels, size: int, seed: int = 0) -> dict[str, Pixels]:
    r"""Returns synthetic validation OOD by kind, each with shape :math:`(N, H, W, 3)`.

    Arguments:
        id_images: ID validation images, uint8 with shape :math:`(M, H, W, 3)`.
        size: The number of images :math:`N` in each set.
        seed: The seed of the generator; equal seeds give equal sets.
    """
    rng = np.random.default_rng(seed)
    height, width = id_images.shape[1:3]
    chosen = id_images[rng.integers(len(id_images), size=size)]
    return {
        "patch_shuffled": patch_shuffle(chosen, rng),
        "shapes": shapes(size, height, width, rng),
        "noise": noise(size, height, width, rng),
    }


def patch_shuffle(images: Pixels, rng: np.random.Generator) -> Pixels:
    r"""Cuts images into a 4x4 grid of patches and shuffles them.

    Arguments:
        images: The images, with shape :math:`(N, H, W, C)`.
        rng: The source of randomness.

    Returns:
        The shuffled images, with shape :math:`(N, H, W, C)`.
    """
    grid = 4
    count, height, width, channels = images.shape
    h, w = height // grid, width // grid
    cut = images[:, : h * grid, : w * grid].reshape(count, grid, h, grid, w, channels)
    patches = cut.transpose(0, 1, 3, 2, 4, 5).reshape(count, grid * grid, h, w, channels)
    order = rng.permuted(np.tile(np.arange(grid * grid), (count, 1)), axis=1)
    patches = np.take_along_axis(patches, order[:, :, None, None, None], axis=1)
    shuffled = patches.reshape(count, grid, grid, h, w, channels).transpose(0, 1, 3, 2, 4, 5)
    result = images.copy()
    result[:, : h * grid, : w * grid] = shuffled.reshape(count, h * grid, w * grid, channels)
    return result


def shapes(size: int, height: int, width: int, rng: np.random.Generator) -> Pixels:
    r"""Draws one to four filled or outlined shapes over a flat colour or a linear gradient.

    Half of the images are grey.

    Arguments:
        size: The number of images :math:`N`.
        height: Their height :math:`H`.
        width: Their width :math:`W`.
        rng: The source of randomness.

    Returns:
        The images, with shape :math:`(N, H, W, 3)`.
    """
    result = np.empty((size, height, width, 3), np.uint8)
    for image in result:
        canvas = Image.fromarray(_gradient(height, width, rng))
        draw = ImageDraw.Draw(canvas)
        for _ in range(rng.integers(1, 5)):
            _draw_shape(draw, height, width, rng)
        grey = rng.random() < 0.5
        image[:] = np.asarray(canvas.convert("L").convert("RGB") if grey else canvas)
    return result


def noise(size: int, height: int, width: int, rng: np.random.Generator) -> Pixels:
    r"""Draws uniform, Gaussian and smooth coloured noise, a third of each.

    Arguments are those of :func:`shapes`.

    Returns:
        The images, with shape :math:`(N, H, W, 3)`.
    """
    result = np.empty((size, height, width, 3), np.uint8)
    kind = np.arange(size) % 3

    def keep(which: int, draw: Callable[[slice], NDArray[Any]]) -> None:
        # All are drawn, as the generator goes on from there, but a third of them is kept.
        for start in range(0, size, TOGETHER):
            part = slice(start, min(start + TOGETHER, size))
            mine = kind[part] == which
            result[part][mine] = draw(part)[mine].clip(0, 255)

    def shape(part: slice) -> tuple[int, int, int, int]:
        return part.stop - part.start, height, width, 3

    keep(0, lambda part: rng.uniform(0, 255, shape(part)))
    deviation = rng.uniform(10, 80, (size, 1, 1, 1))
    keep(1, lambda part: rng.normal(127, deviation[part], shape(part)))
    coarse = rng.uniform(0, 255, (size, 5, 5, 3)).astype(np.uint8)
    side, bicubic = (width, height), Image.Resampling.BICUBIC
    for i in np.flatnonzero(kind == 2):
        result[i] = np.asarray(Image.fromarray(coarse[i]).resize(side, bicubic))
    return result


def _gradient(height: int, width: int, rng: np.random.Generator) -> Pixels:
    first, second = rng.integers(0, 256, (2, 3))
    if rng.random() < 0.5:
        second = first
    angle = rng.uniform(0, 2 * np.pi)
    rows, cols = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    ramp = (np.cos(angle) * rows + np.sin(angle) * cols + np.sqrt(2)) / np.sqrt(8)
    return (first + ramp[..., None] * (second - first)).astype(np.uint8)


def _draw_shape(
    draw: ImageDraw.ImageDraw, height: int, width: int, rng: np.random.Generator
) -> None:
    points = [(float(rng.uniform(0, width)), float(rng.uniform(0, height))) for _ in range(4)]
    colour = tuple(int(c) for c in rng.integers(0, 256, 3))
    stroke = int(rng.integers(1, 4))
    (x_0, y_0), (x_1, y_1) = points[:2]
    box = (min(x_0, x_1), min(y_0, y_1), max(x_0, x_1), max(y_0, y_1))
    match rng.integers(4):
        case 0:
            draw.ellipse(box, fill=colour)
        case 1:
            draw.polygon(points, fill=colour)
        case 2:
            draw.line(points, fill=colour, width=stroke)
        case _:
            draw.ellipse(box, outline=colour, width=stroke)
