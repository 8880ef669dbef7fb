r"""From stored images or vectors to network inputs: standardisation and augmentations.

ID, reference and OOD items are all standardised by the same means and deviations, those of the ID
data. Augmentations work on the batch, on the device, on uint8 images with shape
:math:`(N, H, W, C)`. ID and reference images pass through the same flips and crops, so the
augmentation cannot tell them apart. :func:`broaden` is different: it turns a share of the
*reference* batch into strongly transformed images. Far-OOD inputs lie outside the supports of both
:math:`p_0` and :math:`p_1`, where the data leave the log-ratio undetermined; a broader :math:`p_0`
determines it there.
"""

__all__ = [
    "BROADENINGS",
    "Preprocess",
    "Randomness",
    "Standardise",
    "Standardiser",
    "broaden",
    "check_statistics",
    "flip_crop",
    "normalisation_within",
]

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from ..errors import UserError
from .image_files import Pixels

# The bytes of inputs that are sampled at once, and of a piece of more; and a factor of its length.
WHOLE, PIECE, MULTIPLE = 128 * 2**20, 32 * 2**20, 64
EXACT = torch.float64


class Standardiser(abc.ABC):
    r"""Abstract map from stored items to network inputs in float32.

    Arguments:
        mean: The mean of each channel or coordinate.
        std: The standard deviation of each.
        device: The device of the inputs.
    """

    #: The number of items that :meth:`sample` takes; fewer than twice as many are returned.
    sample_size = 5000

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        # Not on the device, some of which have no float64.
        self.statistics = torch.tensor(mean, dtype=EXACT), torch.tensor(std, dtype=EXACT)
        self.mean, self.std = (s.to(torch.float32).to(self.device) for s in self.statistics)

    @abc.abstractmethod
    def normalise(self, x: Tensor) -> Tensor:
        r"""Standardises pixels in :math:`[0, 1]`, :math:`(B, C, H, W)`, or vectors :math:`(B, d)`."""

    def __call__(self, items: Tensor) -> Tensor:
        r"""Maps stored items, images :math:`(B, H, W, C)` or vectors :math:`(B, d)`, to inputs."""
        return self.normalise(items)

    def sample(self, items: Pixels) -> Iterator[Tensor]:
        r"""Yields the inputs of evenly spaced items, enough to estimate second moments.

        Arguments:
            items: The items, with shape :math:`(N, *)`; may be memory-mapped, or files.

        Yields:
            All of them, or if they are large pieces of them, in order.
        """
        step = max(1, len(items) // self.sample_size)
        chosen = range(0, len(items), step)
        numbers = items.nbytes // items.dtype.itemsize // max(1, len(items))
        whole = 4 * numbers * len(chosen) <= WHOLE
        # In multiples of what takes pieces apart again: the same sums, whatever the pieces.
        count = max(1, PIECE // (4 * numbers) // MULTIPLE) * MULTIPLE
        count = len(chosen) if whole else count
        for start in range(0, len(chosen), max(1, count)):
            part = chosen[start : start + count]
            yield self(torch.as_tensor(items[part.start : part.stop : step].copy()))

    def on(self, device: torch.device | str) -> Self:
        r"""Returns the same map on another device."""
        mean, std = (value.tolist() for value in self.statistics)
        return type(self)(mean, std, device)


class Preprocess(Standardiser):
    r"""Standardises images by channel, for pixels in :math:`[0, 1]`."""

    def pixels(self, images: Tensor) -> Tensor:
        r"""Maps uint8 images :math:`(B, H, W, C)` to pixels in :math:`[0, 1]`, :math:`(B, C, H, W)`."""
        return images.to(self.device).permute(0, 3, 1, 2).float() / 255

    def normalise(self, x: Tensor) -> Tensor:  # noqa: D102
        return (x - self.mean[:, None, None]) / self.std[:, None, None]

    def denormalise(self, x: Tensor) -> Tensor:
        r"""Maps inputs :math:`(B, C, H, W)` back to the pixels that they are of."""
        return x * self.std[:, None, None] + self.mean[:, None, None]

    def __call__(self, items: Tensor) -> Tensor:  # noqa: D102
        batch, height, width, channels = items.shape
        # Whole rows at once: a broadcast over the channels, which lie innermost, is no vector
        # operation, and took eight times as long.
        x = items.to(self.device).contiguous().float() / 255
        rows = x.view(batch, height, width * channels)
        rows.sub_(self.mean.repeat(width)).div_(self.std.repeat(width))
        return x.permute(0, 3, 1, 2)


class Standardise(Standardiser):
    r"""Standardises vectors by coordinate.

    Vectors in float64 are standardised in it: of coordinates such as times in seconds, single
    precision holds nothing but their mean.
    """

    def normalise(self, x: Tensor) -> Tensor:  # noqa: D102
        if x.dtype != EXACT:
            return (x.to(self.device, torch.float32) - self.mean) / self.std
        mean, std = (value.to(x.device) for value in self.statistics)
        return ((x - mean) / std).to(torch.float32).to(self.device)


def check_statistics(
    mean: Tensor | Sequence[float], std: Tensor | Sequence[float], count: int, source: object
) -> tuple[list[float], list[float]]:
    r"""Returns means and standard deviations that can standardise in single precision.

    Arguments:
        mean: The means.
        std: The standard deviations.
        count: The number of each.
        source: The file or set to name in errors.

    Raises:
        UserError: If one is not finite, a deviation is not positive, or their number is another.
    """
    values = []
    for name, given in (("mean", mean), ("std", std)):
        try:
            value = torch.as_tensor(given, dtype=EXACT)
            found = f"got shape {tuple(value.shape)}, "
        except (TypeError, ValueError, RuntimeError):  # text, lists of different lengths
            value, found = torch.empty(()), ""
        single = value.float()  # what standardises
        bad = int((~torch.isfinite(single) | (single <= 0 if name == "std" else False)).sum())
        mistake = ""
        if value.shape != (count,):
            mistake = f"{found}expected {count} numbers"
        elif bad:
            kind = "finite" if name == "mean" else "positive and finite"
            mistake = f"{bad} of {count} are not {kind}"
        if mistake:
            raise UserError(f"{source}: {name}: {mistake}.")
        values.append(value.tolist())
    return values[0], values[1]


def normalisation_within(transform: object) -> tuple[Any, Any] | None:
    r"""Returns mean and std of the last normalisation within nested transforms; None if none.

    A normalisation is whatever has attributes `mean` and `std`, as torchvision's have. Their values
    are as it holds them, unchecked.
    """
    own: tuple[Any, Any] = getattr(transform, "mean", None), getattr(transform, "std", None)
    if own[0] is not None and own[1] is not None:
        return own
    inner = getattr(transform, "transforms", None) or [getattr(transform, "transform", None)]
    found = [normalisation_within(t) for t in inner if t is not None]
    return next((f for f in reversed(found) if f is not None), None)


def flip_crop(
    images: Tensor, indices: Tensor, flip: bool | Tensor, pad: int, generator: torch.Generator
) -> Tensor:
    r"""Gathers images with a horizontal flip and a random reflect-padded crop.

    Arguments:
        images: The images, with shape :math:`(N, H, W, C)`.
        indices: Which images to take, with shape :math:`(B)`.
        flip: Whether to flip each of them with probability 1/2; or which of them to flip, with
            shape :math:`(B)`.
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
    if flip is True:
        flip = torch.rand(size, generator=generator, device=device) < 0.5
    if isinstance(flip, Tensor):
        cols = torch.where(flip[:, None], width - 1 - cols, cols)
    # Pixel by pixel from one long list, which takes an eighth of the time of three indices.
    pixels = ((indices[:, None] * height + rows) * width)[:, :, None] + cols[:, None, :]
    chosen = images.reshape(-1, images.shape[3]).index_select(0, pixels.flatten())
    return chosen.view(size, height, width, -1)


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
