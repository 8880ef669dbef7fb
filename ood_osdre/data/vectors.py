r"""Batches and standardisation of vectors, as :mod:`ood_osdre.data.batches` has them of images."""

__all__ = ["Standardise", "VectorBatches"]

from collections.abc import Sequence

import torch
from torch import Tensor

from ..objectives import Draw, Times
from .batches import BATCH, step_generator
from .preprocess import Preprocess

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


class VectorBatches:
    r"""Draws of the objective from two sets of vectors, a pure function of seed and step.

    Vectors are drawn with replacement, and not augmented.

    Arguments:
        id_train: The ID training set :math:`p_1`, with shape :math:`(N, d)`.
        labels: Its labels, with shape :math:`(N)`.
        reference: The reference set :math:`p_0`, with shape :math:`(M, d)`.
        standardise: The standardisation, which also says the device.
        times: The distribution of training times.
        batch_size: The number of pairs in a batch.
        seed: The seed.
    """

    def __init__(
        self,
        id_train: Tensor,
        labels: Tensor,
        reference: Tensor,
        standardise: Standardise,
        times: Times,
        batch_size: int,
        seed: int,
    ) -> None:
        self.id_train, self.reference = standardise(id_train), standardise(reference)
        self.labels = labels.to(standardise.device)
        self.times, self.batch_size, self.seed = times, batch_size, seed

    def __call__(self, step: int) -> Draw:
        r"""Returns the draw of a step: :math:`x_0, x_1` with shape :math:`(B, d)`."""
        device, size = self.id_train.device, self.batch_size
        generator = step_generator(self.seed, BATCH, step, device)
        chosen, other = (
            torch.randint(len(x), (size,), generator=generator, device=device)
            for x in (self.id_train, self.reference)
        )
        x_1 = self.id_train[chosen]
        return Draw(
            x_0=self.reference[other],
            x_1=x_1,
            t=self.times.sample(size, generator),
            noise=torch.randn(x_1.shape, generator=generator, device=device, dtype=x_1.dtype),
            label=self.labels[chosen],
        )
