r"""Far-OOD sets made by a program, for choosing a model without looking at any test set.

Three families that neither the reference nor :func:`ood_osdre.data.augment.broaden` contains:
ID validation images with their patches shuffled, drawn shapes over gradients, and noise.
"""

__all__ = ["development_sets", "noise", "patch_shuffle", "shapes"]

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Pixels = NDArray[np.uint8]


def development_sets(id_images: Pixels, size: int, seed: int = 0) -> dict[str, Pixels]:
    r"""Returns the development far sets by name, each with shape :math:`(N, H, W, 3)`.

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


def patch_shuffle(images: Pixels, rng: np.random.Generator, grid: int = 4) -> Pixels:
    r"""Cuts images into a grid of patches and shuffles them.

    Arguments:
        images: The images, with shape :math:`(N, H, W, C)`.
        rng: The source of randomness.
        grid: The number of patches along each side.

    Returns:
        The shuffled images, with shape :math:`(N, H, W, C)`.
    """
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
    uniform = rng.uniform(0, 255, (size, height, width, 3))
    gaussian = rng.normal(127, rng.uniform(10, 80, (size, 1, 1, 1)), uniform.shape)
    coarse = rng.uniform(0, 255, (size, 5, 5, 3)).astype(np.uint8)
    side, bicubic = (width, height), Image.Resampling.BICUBIC
    smooth = np.stack([np.asarray(Image.fromarray(c).resize(side, bicubic)) for c in coarse])
    kind = np.arange(size)[:, None, None, None] % 3
    return (
        np.select([kind == 0, kind == 1], [uniform, gaussian], smooth)
        .clip(0, 255)
        .astype(np.uint8)
    )


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
