r"""A broader reference, for batches of images that somebody else has preprocessed.

:class:`~ood_osdre.data.batches.PairBatches` broadens the reference as it trains
(:func:`~ood_osdre.data.augment.broaden` says why). A ratio of frozen features sees every image
once and takes its reference from :func:`broadened` instead.
"""

__all__ = ["SHARE", "broadened"]

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .augment import Randomness, broaden
from .batches import BATCH, HOST, step_generator
from .preprocess import Preprocess

#: The share of the reference that the shipped configurations broaden.
SHARE = 0.33


def broadened(
    batches: Iterable[Tensor], preprocess: Preprocess, share: float = SHARE, seed: int = 0
) -> Iterator[Tensor]:
    r"""Yields the batches with a share of the images of each strongly transformed.

    Arguments:
        batches: Preprocessed images, each batch with shape :math:`(B, 3, H, W)`.
        preprocess: The statistics by which they were normalised, and no more than that.
        share: The share of each batch, the first of its images.
        seed: The seed of the transforms.

    Example:
        >>> reference = torch.zeros(4, 3, 8, 8), torch.zeros(2, 3, 8, 8)
        >>> preprocess = Preprocess([0.5] * 3, [0.25] * 3)
        >>> [len(x) for x in broadened(reference, preprocess, share=0.5)]
        [4, 2]
    """
    for index, images in enumerate(batches):
        count = round(share * len(images))
        if count:
            device = images.device
            own = preprocess if preprocess.device == device else preprocess.on(device)
            pixels = images[:count] * own.std[:, None, None] + own.mean[:, None, None]
            random = Randomness(
                step_generator(seed, BATCH, index, device),
                step_generator(seed, HOST, index, "cpu"),
            )
            changed = own.normalise(broaden(pixels.clamp(0, 1), random))
            images = torch.cat([changed.to(images.dtype), images[count:]])
        yield images
