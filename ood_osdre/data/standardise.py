r"""From stored images to network inputs, the same way for ID, reference and OOD images."""

__all__ = ["Preprocess", "Standardise", "check_statistics"]

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import UserError


class Preprocess:
    r"""From stored images to network inputs, with the statistics of the ID data.

    ID, reference and OOD images all pass through the same statistics.

    Arguments:
        mean: The mean of each channel, for pixels in :math:`[0, 1]`.
        std: The standard deviation of each channel.
        device: The device of the inputs.
    """

    #: The number of items that :meth:`sample` takes; fewer than twice as many are returned.
    sample_size = 5000

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.mean = torch.tensor(mean, device=self.device, dtype=torch.float32)
        self.std = torch.tensor(std, device=self.device, dtype=torch.float32)

    def pixels(self, images: Tensor) -> Tensor:
        r"""Maps stored images to pixels.

        Arguments:
            images: The uint8 images, with shape :math:`(B, H, W, C)`.

        Returns:
            The pixels in :math:`[0, 1]`, with shape :math:`(B, C, H, W)`.
        """
        return images.to(self.device).permute(0, 3, 1, 2).float() / 255

    def normalise(self, pixels: Tensor) -> Tensor:
        r"""Standardises pixels.

        Arguments:
            pixels: The pixels in :math:`[0, 1]`, with shape :math:`(B, C, H, W)`.

        Returns:
            The inputs, with shape :math:`(B, C, H, W)`.
        """
        return (pixels - self.mean[:, None, None]) / self.std[:, None, None]

    def sample(self, images: NDArray[Any]) -> Tensor:
        r"""Returns the inputs of evenly spaced images, enough to estimate second moments.

        Arguments:
            images: The images, with shape :math:`(N, H, W, C)`; may be memory-mapped.
        """
        step = max(1, len(images) // self.sample_size)
        return self(torch.as_tensor(images[::step].copy()))

    def on(self, device: torch.device | str) -> "Preprocess":
        r"""Returns the same preprocessing on another device."""
        return type(self)(self.mean.tolist(), self.std.tolist(), device)

    def __call__(self, images: Tensor) -> Tensor:
        r"""Maps stored images to inputs.

        Arguments:
            images: The uint8 images, with shape :math:`(B, H, W, C)`.

        Returns:
            The inputs, with shape :math:`(B, C, H, W)`.
        """
        batch, height, width, channels = images.shape
        # Whole rows at once: a broadcast over the channels, which lie innermost, is no vector
        # operation, and took eight times as long.
        x = images.to(self.device).contiguous().float() / 255
        rows = x.view(batch, height, width * channels)
        rows.sub_(self.mean.repeat(width)).div_(self.std.repeat(width))
        return x.permute(0, 3, 1, 2)


EXACT = torch.float64


class Standardise(Preprocess):
    r"""From vectors to network inputs, with the statistics of the ID data.

    Vectors in float64 are standardised in it: of coordinates such as times in seconds, single
    precision holds nothing but their mean.

    Arguments:
        mean: The mean of each coordinate, :math:`d` of them.
        std: The standard deviation of each coordinate.
        device: The device of the inputs.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(mean, std, device)
        # Not on the device, some of which have no float64.
        self.statistics = torch.tensor(mean, dtype=EXACT), torch.tensor(std, dtype=EXACT)

    def pixels(self, images: Tensor) -> Tensor:
        r"""Returns vectors in float32 on the device, float64 as it is, :math:`(B, d)`."""
        return images if images.dtype == EXACT else images.to(self.device, torch.float32)

    def normalise(self, pixels: Tensor) -> Tensor:
        r"""Standardises vectors, with shape :math:`(B, d)`, to float32 on the device."""
        if pixels.dtype != EXACT:
            return (pixels - self.mean) / self.std
        mean, std = (value.to(pixels.device) for value in self.statistics)
        return ((pixels - mean) / std).to(torch.float32).to(self.device)

    def on(self, device: torch.device | str) -> "Standardise":
        r"""Returns the same standardisation on another device."""
        mean, std = (value.tolist() for value in self.statistics)
        return Standardise(mean, std, device)

    def __call__(self, images: Tensor) -> Tensor:
        r"""Maps vectors to inputs, with shape :math:`(B, d)`."""
        return self.normalise(self.pixels(images))


def check_statistics(
    mean: Tensor | Sequence[float], std: Tensor | Sequence[float], count: int, source: object
) -> tuple[list[float], list[float]]:
    r"""Refuses statistics that nothing can be standardised with.

    Arguments:
        mean: The means.
        std: The standard deviations.
        count: The number of each.
        source: The file or set to name in errors.

    Returns:
        The means and the standard deviations.

    Raises:
        UserError: If one is not finite, a deviation is not positive, or their number is another.
    """
    values = []
    for name, given in (("mean", mean), ("std", std)):
        try:
            value = torch.as_tensor(given, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"{source}: {name}: expected {count} numbers.") from None
        if value.shape != (count,):
            raise UserError(
                f"{source}: {name}: got shape {tuple(value.shape)}, expected {count} numbers."
            )
        single = value.float()  # what standardises
        bad = int((~torch.isfinite(single) | (single <= 0 if name == "std" else False)).sum())
        if bad:
            expected = "finite" if name == "mean" else "positive and finite"
            raise UserError(f"{source}: {name}: {bad} of {count} are not {expected}.")
        values.append(value.tolist())
    return values[0], values[1]
