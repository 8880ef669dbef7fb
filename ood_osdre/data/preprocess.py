r"""From stored images to network inputs, the same way for ID, reference and OOD images."""

__all__ = ["Preprocess"]

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Preprocess:
    r"""From stored images to network inputs, with the statistics of the ID data.

    ID, reference and OOD images all pass through the same statistics.

    Arguments:
        mean: The mean of each channel, for pixels in :math:`[0, 1]`.
        std: The standard deviation of each channel.
        device: The device of the inputs.
    """

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

    def sample(self, images: NDArray[Any], limit: int = 5000) -> Tensor:
        r"""Returns the inputs of evenly spaced images, enough to estimate second moments.

        Arguments:
            images: The images, with shape :math:`(N, H, W, C)`; may be memory-mapped.
            limit: The number of images, of which fewer than twice as many are returned.
        """
        step = max(1, len(images) // limit)
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
