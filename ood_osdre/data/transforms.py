r"""Augmentations on the batch, on the device, on uint8 images with shape :math:`(N, H, W, C)`.

ID and reference images pass through the same flips and crops, so the augmentation cannot tell
them apart. :func:`broaden` is different: it turns a share of the *reference* batch into strongly
transformed images. Far-OOD inputs lie outside the supports of both :math:`p_0` and :math:`p_1`,
where the data leave the log-ratio undetermined; a broader :math:`p_0` determines it there.
"""

__all__ = ["BROADENINGS", "Randomness", "broaden", "flip_crop"]

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def flip_crop(
    images: Tensor, indices: Tensor, flip: bool, pad: int, generator: torch.Generator
) -> Tensor:
    r"""Gathers images with a random horizontal flip and a random reflect-padded crop.

    Arguments:
        images: The images, with shape :math:`(N, H, W, C)`.
        indices: Which images to take, with shape :math:`(B)`.
        flip: Whether to flip half of them.
        pad: The largest shift of the crop, in pixels.
        generator: The source of randomness.

    Returns:
        The augmented images, with shape :math:`(B, H, W, C)`.
    """
    size, (height, width) = len(indices), images.shape[1:3]
    device = images.device
    shift = torch.randint(
        -pad, pad + 1, (2, size, 1), generator=generator, device=device, dtype=torch.long
    )
    rows = _reflect(torch.arange(height, device=device) + shift[0], height)
    cols = _reflect(torch.arange(width, device=device) + shift[1], width)
    if flip:
        mirrored = torch.rand(size, 1, generator=generator, device=device) < 0.5
        cols = torch.where(mirrored, width - 1 - cols, cols)
    return images[indices[:, None, None], rows[:, :, None], cols[:, None, :]]


def _reflect(index: Tensor, size: int) -> Tensor:
    r"""Folds an index that runs over the edge back inside, without repeating the edge."""
    index = index.abs()
    return torch.where(index > size - 1, 2 * (size - 1) - index, index)


class Randomness(NamedTuple):
    r"""Two sources of randomness.

    Attributes:
        device: The generator of tensors, on the images' device.
        host: The generator of sizes and orders. Were they drawn on a GPU, every batch would wait
            for it to say them.
    """

    device: torch.Generator
    host: torch.Generator


def broaden(images: Tensor, random: Randomness) -> Tensor:
    r"""Transforms every image by one of :data:`BROADENINGS`.

    Each family gets its equal share of the batch, whose images should be in random order, and the
    families take turns at random at the shares that are larger by one. No family is one of the
    synthetic validation OOD of :mod:`ood_osdre.data.builtin`, which selects the model.

    Arguments:
        images: Images in :math:`[0, 1]`, with shape :math:`(B, C, H, W)`.
        random: The sources of randomness.

    Returns:
        The transformed images in :math:`[0, 1]`, with shape :math:`(B, C, H, W)`.
    """
    families = list(BROADENINGS.values())
    order = torch.randperm(len(families), generator=random.host).tolist()
    shares = images.tensor_split(len(families))
    parts = [families[k](share, random) for k, share in zip(order, shares, strict=True)]
    result = torch.cat(parts)
    draw = torch.rand(len(images), generator=random.device, device=images.device)
    return torch.where(draw[:, None, None, None] < 0.5, _grey(result), result)


def _uniform(x: Tensor, low: float, high: float, random: Randomness) -> Tensor:
    u = torch.rand(len(x), 1, 1, 1, generator=random.device, device=x.device, dtype=x.dtype)
    return low + (high - low) * u


def _grey(x: Tensor) -> Tensor:
    return x.mean(dim=1, keepdim=True).expand_as(x)


def _contrast(x: Tensor, random: Randomness) -> Tensor:
    gain = torch.exp(_uniform(x, -2.3, 1.6, random))
    return ((x - 0.5) * gain + _uniform(x, 0.1, 0.9, random)).clamp(0, 1)


def _invert(x: Tensor, random: Randomness) -> Tensor:
    return (1 - x) ** torch.exp(_uniform(x, -0.7, 0.7, random))


def _binarise(x: Tensor, random: Randomness) -> Tensor:
    grey = _grey(x)
    low, high = grey.amin(dim=(2, 3), keepdim=True), grey.amax(dim=(2, 3), keepdim=True)
    threshold = low + (high - low) * _uniform(x, 0.2, 0.8, random)
    return torch.sigmoid((grey - threshold) * 30 * torch.sign(_uniform(x, -1, 1, random)))


def _blur(x: Tensor, random: Randomness) -> Tensor:
    size = int(torch.randint(2, 9, (), generator=random.host))
    small = F.interpolate(x, size=(size, size), mode="area")
    return F.interpolate(small, size=x.shape[2:], mode="bilinear", align_corners=False)


def _edges(x: Tensor, random: Randomness) -> Tensor:
    d_row = F.pad(x[:, :, 1:] - x[:, :, :-1], (0, 0, 0, 1))
    d_col = F.pad(x[:, :, :, 1:] - x[:, :, :, :-1], (0, 1, 0, 0))
    edges = (d_row**2 + d_col**2).sqrt() * _uniform(x, 1, 4, random)
    return torch.where(_uniform(x, 0, 1, random) < 0.5, edges, 1 - edges).clamp(0, 1)


def _flatten(x: Tensor, random: Randomness) -> Tensor:
    r"""Keeps one region of the image and floods the rest with a flat colour."""
    colour = torch.rand(len(x), x.shape[1], 1, 1, generator=random.device, device=x.device)
    grey = _grey(x)
    inside = (grey - grey.mean(dim=(2, 3), keepdim=True)) > _uniform(x, -0.2, 0.2, random)
    return torch.where(inside, x, colour.to(x.dtype))


def _permute_channels(x: Tensor, random: Randomness) -> Tensor:
    gain = torch.rand(len(x), x.shape[1], 1, 1, generator=random.device, device=x.device).to(
        x.dtype
    )
    return (x.roll(1, dims=1) * (0.3 + 1.7 * gain)).clamp(0, 1)


def _mix(x: Tensor, random: Randomness) -> Tensor:
    r"""Averages neighbours in the batch: ghosted pictures that no camera took."""
    return 0.5 * (x + x.roll(1, dims=0))


BROADENINGS: dict[str, Callable[[Tensor, Randomness], Tensor]] = {
    "contrast": _contrast,
    "invert": _invert,
    "binarise": _binarise,
    "blur": _blur,
    "edges": _edges,
    "flatten": _flatten,
    "channels": _permute_channels,
    "mix": _mix,
}
