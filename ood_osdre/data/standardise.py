r"""From stored images or vectors to network inputs, with the statistics of the ID data.

ID, reference and OOD items are all standardised by the same means and deviations.
"""

__all__ = ["Preprocess", "Standardise", "Standardiser", "check_statistics"]

import abc
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from ..errors import UserError

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

    def sample(self, items: NDArray[Any]) -> Tensor:
        r"""Returns the inputs of evenly spaced items, enough to estimate second moments.

        Arguments:
            items: The items, with shape :math:`(N, *)`; may be memory-mapped.
        """
        step = max(1, len(items) // self.sample_size)
        return self(torch.as_tensor(items[::step].copy()))

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
