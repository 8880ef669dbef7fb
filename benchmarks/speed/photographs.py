r"""Generated JPEG files that take as long to decode as photographs of their size."""

from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

CELLS, QUALITY = 12, 90


def write_photographs(folder: Path, count: int, size: tuple[int, int], seed: int) -> list[str]:
    r"""Writes smooth coloured clouds with some grain, no two alike, and returns their names.

    Arguments:
        folder: The folder, which is created.
        count: The number of files.
        size: Their width and height in pixels.
        seed: The seed of the images.
    """
    folder.mkdir(parents=True)
    rng, names = np.random.default_rng(seed), [f"{i:06d}.jpg" for i in range(count)]
    for name in tqdm(names, desc="writing photographs", leave=False, disable=None):
        cloud = Image.fromarray(rng.integers(0, 256, (CELLS, CELLS, 3), dtype=np.uint8))
        pixels = np.asarray(cloud.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        grain = rng.integers(-12, 13, (*pixels.shape[:2], 1), dtype=np.int16)
        image = Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))
        image.save(folder / name, quality=QUALITY)
    return names
