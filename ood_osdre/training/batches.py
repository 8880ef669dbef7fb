r"""Batches of (reference, ID) pairs, as a pure function of the seed and the step.

Nothing is carried from one step to the next: the shuffles, augmentations, times and noise of step
:math:`n` come from generators seeded by the seed and :math:`n` alone. A resumed run therefore
sees exactly the batches of an uninterrupted one, whatever happened in between.

The training sets stay on the device as uint8 arrays; gathering, flips, crops and normalisation
happen there, on the batch.

Batches and standardisation of vectors, as :mod:`ood_osdre.training.batches` has them of images.

A broader reference, for batches of images that somebody else has preprocessed.

:class:`~ood_osdre.training.batches.PairBatches` broadens the reference as it trains
(:func:`~ood_osdre.data.augment.broaden` says why). A ratio of frozen features sees every image
once and takes its reference from :func:`broadened` instead.
"""

__all__ = [
    "SHARE",
    "PairBatches",
    "Standardise",
    "VectorBatches",
    "broadened",
    "step_generator",
    "vary_reference",
]

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.augment import Randomness, broaden, flip_crop
from ..data.preprocess import Preprocess
from ..data.sets import ImageSet
from ..errors import UserError
from ..objectives import Batch
from ..paths.times import Times
from ..sections import DataConfig

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

    def __call__(self, step: int) -> Batch:
        r"""Returns the draw of a step: :math:`x_0, x_1` with shape :math:`(B, C, H, W)`."""
        generator = step_generator(self.seed, BATCH, step, self.preprocess.device)
        chosen = self._indices(step, SHUFFLE_ID, len(self.id_images))
        x_1 = self._augmented(self.id_images, chosen, generator)
        x_0 = self._reference(step, x_1, generator)
        size = self.batch_size
        return Batch(
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

    def __call__(self, step: int) -> Batch:
        r"""Returns the draw of a step: :math:`x_0, x_1` with shape :math:`(B, d)`."""
        device, size = self.id_train.device, self.batch_size
        generator = step_generator(self.seed, BATCH, step, device)
        chosen, other = (
            torch.randint(len(x), (size,), generator=generator, device=device)
            for x in (self.id_train, self.reference)
        )
        x_1 = self.id_train[chosen]
        return Batch(
            x_0=self.reference[other],
            x_1=x_1,
            t=self.times.sample(size, generator),
            noise=torch.randn(x_1.shape, generator=generator, device=device, dtype=x_1.dtype),
            label=self.labels[chosen],
        )


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
