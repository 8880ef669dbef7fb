r"""Batches of (reference, ID) pairs, as a pure function of the seed and the step.

Nothing is carried from one step to the next: the shuffles, augmentations, times and noise of step
:math:`n` come from generators seeded by the seed and :math:`n` alone. A resumed run therefore
sees exactly the batches of an uninterrupted one, whatever happened in between.

The training sets stay on the device as uint8 arrays; gathering, flips, crops and normalisation
happen there, on the batch.
"""

__all__ = ["PairBatches", "step_generator", "vary_reference"]

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..objectives import Draw, Times
from ..sections import DataConfig
from .augment import Randomness, broaden, flip_crop
from .preprocess import Preprocess
from .sets import ImageSet

# Streams of randomness that must not coincide.
BATCH, SHUFFLE_ID, SHUFFLE_REFERENCE, LIMIT, HOST = range(5)


class PairBatches:
    r"""Draws of the objective from two image sets.

    Arguments:
        id_train: The ID training set :math:`p_1`, with labels.
        reference: The reference set :math:`p_0`.
        options: Augmentation, broadening and limits.
        preprocess: The preprocessing, which also says the device.
        times: The distribution of training times.
        batch_size: The number of pairs in a batch.
        seed: The seed.
    """

    def __init__(
        self,
        id_train: ImageSet,
        reference: ImageSet,
        options: DataConfig,
        preprocess: Preprocess,
        times: Times,
        batch_size: int,
        seed: int,
    ) -> None:
        self.options, self.preprocess, self.times = options, preprocess, times
        self.batch_size, self.seed = batch_size, seed
        side = min(id_train.images.shape[1:3])
        if options.crop >= side:
            raise UserError(
                f"data.crop: got {options.crop}, expected less than the images' side, {side}."
            )
        device = preprocess.device
        id_train = _limited(id_train, options.train_limit, seed)
        reference = _limited(reference, options.reference_limit or options.train_limit, seed)
        self.id_images = torch.as_tensor(np.ascontiguousarray(id_train.images), device=device)
        self.id_labels = torch.as_tensor(id_train.labels, device=device)
        self.reference_images = torch.as_tensor(
            np.ascontiguousarray(reference.images), device=device
        )
        self._shuffles: dict[int, tuple[int, Tensor]] = {}

    def __call__(self, step: int) -> Draw:
        r"""Returns the draw of a step: :math:`x_0, x_1` with shape :math:`(B, C, H, W)`."""
        generator = step_generator(self.seed, BATCH, step, self.preprocess.device)
        chosen = self._indices(step, SHUFFLE_ID, len(self.id_images))
        x_1 = self._augmented(self.id_images, chosen, generator)
        x_0 = self._reference(step, x_1, generator)
        size = self.batch_size
        return Draw(
            x_0=self.preprocess.normalise(x_0),
            x_1=self.preprocess.normalise(x_1),
            t=self.times.sample(size, generator),
            noise=torch.randn(x_1.shape, generator=generator, device=x_1.device, dtype=x_1.dtype),
            label=self.id_labels[chosen],
        )

    def _reference(self, step: int, x_1: Tensor, generator: torch.Generator) -> Tensor:
        chosen = self._indices(step, SHUFFLE_REFERENCE, len(self.reference_images))
        x_0 = self._augmented(self.reference_images, chosen, generator)
        random = Randomness(generator, step_generator(self.seed, HOST, step, "cpu"))
        return vary_reference(x_0, x_1, self.options, random)

    def _augmented(self, images: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        options = self.options
        return self.preprocess.pixels(
            flip_crop(images, chosen, options.flip, options.crop, generator)
        )

    def _indices(self, step: int, stream: int, total: int) -> Tensor:
        r"""Returns the images of a step: epochs without replacement, end to end."""
        positions = torch.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs = (positions // total).tolist()
        parts = []
        for epoch in sorted(set(epochs)):
            order = self._shuffle(epoch, stream, total)
            parts.append(order[positions[positions // total == epoch] % total])
        indices = torch.cat(parts)
        if self.preprocess.device.type == "cuda":
            # From pinned memory the copy does not wait for the device.
            indices = indices.pin_memory()
        return indices.to(self.preprocess.device, non_blocking=True)

    def _shuffle(self, epoch: int, stream: int, total: int) -> Tensor:
        cached = self._shuffles.get(stream)
        if cached is None or cached[0] != epoch:
            generator = step_generator(self.seed, stream, epoch, "cpu")
            cached = epoch, torch.randperm(total, generator=generator)
            self._shuffles[stream] = cached
        return cached[1]


def vary_reference(x_0: Tensor, x_1: Tensor, options: DataConfig, random: Randomness) -> Tensor:
    r"""Replaces the first of the reference images by broadened ones, the last by ID images.

    Arguments:
        x_0: Reference images in :math:`[0, 1]`, in random order, with shape :math:`(B, C, H, W)`.
        x_1: The ID images of the batch, with shape :math:`(B, C, H, W)`.
        options: The shares, `broaden` and `mixture`.
        random: The sources of randomness.

    Returns:
        The reference images, with shape :math:`(B, C, H, W)`.
    """
    broadened = round(options.broaden * len(x_0))
    if broadened:
        x_0 = torch.cat([broaden(x_0[:broadened], random), x_0[broadened:]])
    mixed = round(options.mixture * len(x_0))
    if mixed:
        # Rolled, so that no ID image stands in both halves of one pair.
        x_0 = torch.cat([x_0[:-mixed], x_1.roll(1, dims=0)[-mixed:]])
    return x_0


def step_generator(
    seed: int, stream: int, step: int, device: torch.device | str
) -> torch.Generator:
    r"""Returns a generator that depends on the seed, the stream and the step alone.

    Arguments:
        seed: The seed of the run.
        stream: What the randomness is for; streams do not coincide.
        step: The step, or epoch.
        device: The device of the generator.
    """
    mixed = np.random.SeedSequence([seed, stream, step]).generate_state(2, np.uint32)
    # 63 bits of the 64: PyTorch takes seeds for signed integers.
    return torch.Generator(device).manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)


def _limited(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    if limit is None or limit >= len(images):
        return images
    generator = step_generator(seed, LIMIT, 0, "cpu")
    return images.subset(torch.randperm(len(images), generator=generator)[:limit].numpy())
