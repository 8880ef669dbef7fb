r"""Training batches, each a function of the seed and the step alone.

Nothing is carried from one step to the next: the shuffles, augmentations, times and noise of a step
come from generators seeded by the seed and its number. A resumed run sees the same batches.

Every kind of batches is a :class:`Batches`: it gives pairs of reference and ID points, and the base
class adds times and noise. Images are uint8 arrays that lie on the device or come there for their step
(:mod:`ood_osdre.training.streaming`); flips, crops and normalisation happen there, on the batch.
"""

__all__ = [
    "SHARE",
    "Batches",
    "ImageBatches",
    "Pairs",
    "PixelBatches",
    "Stream",
    "VectorBatches",
    "broadened",
    "limited",
    "step_generator",
]

import abc
import enum
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Generator, Tensor

from ..data.sets import ImageSet
from ..data.transforms import Preprocess, Randomness, Standardise, broaden, flip_crop
from ..errors import UserError
from ..objectives import Batch
from ..paths import Moments, Times, UniformTimes
from ..sections import DataConfig
from .streaming import StepImages, own_places


class Stream(enum.Enum):
    r"""What randomness is for: the kind of run that uses it, and its number in the seed.

    Streams of one kind of run have different numbers, also from those of `any` kind.
    """

    BATCH = "any", 0
    SHUFFLE_ID = "images", 1
    SHUFFLE_REFERENCE = "images", 2
    LIMIT = "images", 3
    HOST = "images", 4
    FLIP_ID = "images", 7
    FLIP_REFERENCE = "images", 8
    SPLIT = "features", 5
    PROBE = "any", 6
    MOMENTS = "tasks", 1
    HELD_OUT = "tasks", 2
    TEST = "tasks", 100


def step_generator(seed: int, stream: Stream, step: int, device: torch.device | str) -> Generator:
    r"""Returns a generator on a device that depends on seed, stream and step (or epoch) alone."""
    mixed = np.random.SeedSequence([seed, stream.value[1], step]).generate_state(2, np.uint32)
    # 63 bits of the 64: PyTorch takes seeds for signed integers.
    return Generator(device).manual_seed(int(mixed[0]) << 31 | int(mixed[1]) >> 1)


class Pairs(NamedTuple):
    r"""Points of both ends.

    Attributes:
        x_0: Points of the reference :math:`p_0`, with shape :math:`(B, *)`.
        x_1: ID points, of :math:`p_1`, with shape :math:`(B, *)`.
        label: The classes of `x_1`, with shape :math:`(B)`; None without labels.
    """

    x_0: Tensor
    x_1: Tensor
    label: Tensor | None = None


Points: TypeAlias = "Tensor | Iterable[Tensor]"
Vectors: TypeAlias = Any  # a tensor, or what gives standardised vectors for their rows


class Batches(abc.ABC):
    r"""Abstract training batches.

    Arguments:
        batch_size: The number of pairs in a batch.
        seed: The seed.
        device: The device of the batches.

    Attributes:
        times: The distribution of training times. This and the next are set by
            :func:`ood_osdre.training.fit.assemble`.
        needs_probe: Whether the objective looks at the batch's `probe`.
    """

    def __init__(self, batch_size: int, seed: int, device: torch.device | str) -> None:
        self.batch_size, self.seed, self.device = batch_size, seed, torch.device(device)
        self.times: Times = UniformTimes()
        self.needs_probe = False

    @abc.abstractmethod
    def pairs(self, step: int, generator: Generator) -> Pairs:
        r"""Returns the pairs of a step, given its source of randomness, on the device."""

    @abc.abstractmethod
    def ends(self) -> tuple[Points, Points]:
        r"""Returns points of :math:`p_0` and of :math:`p_1`, not augmented, each :math:`(N, *)`.

        They are enough for second moments, the same at every call, of no batch, maybe in pieces.
        """

    def close(self) -> None:  # noqa: B027
        r"""Ends the processes that decode ahead; the next steps may start them anew."""

    def moments(self) -> Moments:
        r"""Returns the second moments of both ends."""
        return Moments.of(*self.ends())

    def __call__(self, step: int) -> Batch:
        r"""Returns the batch of a step."""
        generator = step_generator(self.seed, Stream.BATCH, step, self.device)
        batch = self.completed(self.pairs(step, generator), generator)
        if self.needs_probe and batch.probe is None:
            own = step_generator(self.seed, Stream.PROBE, step, self.device)
            batch = batch._replace(probe=_normal_like(batch.noise, own))
        return batch

    def completed(self, pairs: Pairs, generator: Generator) -> Batch:
        r"""Returns pairs with times and noise from a source of randomness."""
        x_0, x_1, label = pairs
        t = self.times.sample(len(x_1), generator).to(x_1.dtype)
        return Batch(x_0, x_1, t, _normal_like(x_1, generator), label)


class PixelBatches(Batches):
    r"""Abstract batches of images; a subclass sets how they are varied and preprocessed."""

    options: DataConfig
    preprocess: Preprocess

    def varied(
        self, x_0: Tensor, x_1: Tensor, label: Tensor, step: int, generator: Generator
    ) -> Pairs:
        r"""Returns normalised pairs of a step's pixels, its reference varied.

        The first reference images, a share `broaden`, are broadened, and the last, a share
        `mixture`, replaced by ID images. Pixels are in :math:`[0, 1]`, those of the reference in
        random order, with shape :math:`(B, C, H, W)`.
        """
        random = Randomness(generator, step_generator(self.seed, Stream.HOST, step, "cpu"))
        if broadened := round(self.options.broaden * len(x_0)):
            x_0 = torch.cat([broaden(x_0[:broadened], random), x_0[broadened:]])
        if mixed := round(self.options.mixture * len(x_0)):
            # Rolled, so that no ID image stands in both halves of one pair.
            x_0 = torch.cat([x_0[:-mixed], x_1.roll(1, dims=0)[-mixed:]])
        normalise = self.preprocess.normalise
        return Pairs(normalise(x_0), normalise(x_1), label.to(self.device))


class ImageBatches(PixelBatches):
    r"""Batches of images, augmented on the device.

    Arguments:
        id_train: The ID training set :math:`p_1`, with labels.
        reference: The reference set :math:`p_0`.
        options: Augmentation, broadening and limits.
        preprocess: The preprocessing, which also says the device.
        batch_size: The number of pairs in a batch.
        seed: The seed.

    Raises:
        UserError: If crops are larger than the images.
    """

    def __init__(
        self,
        id_train: ImageSet,
        reference: ImageSet,
        options: DataConfig,
        preprocess: Preprocess,
        batch_size: int,
        seed: int,
    ) -> None:
        super().__init__(batch_size, seed, preprocess.device)
        self.options, self.preprocess = options, preprocess
        side = min(id_train.images.shape[1:3])
        if options.crop >= side:
            raise UserError(
                f"data.crop: got {options.crop}, expected less than the images' side, {side}."
            )
        self._ends = reference, id_train
        id_train = limited(id_train, options.train_limit, seed)
        reference = limited(reference, options.reference_limit or options.train_limit, seed)
        sets = self.id_images, self.reference_images = id_train.images, reference.images
        streams = Stream.SHUFFLE_ID, Stream.SHUFFLE_REFERENCE
        self._sizes = dict(zip(streams, map(len, sets), strict=True))

        def rows(step: int) -> list[Tensor]:
            return [self._chosen(step, stream)[0] for stream in streams]

        self._images = StepImages(sets, rows, self.device, own_places(batch_size, options))
        self.id_labels = torch.as_tensor(id_train.labels, device=self.device)
        self._shuffles: dict[Stream, tuple[int, Tensor]] = {}  # the order of the current epoch
        # Which images are mirrored in the first epoch, and in every other one after it.
        flips = Stream.FLIP_ID, Stream.FLIP_REFERENCE
        coins = (_coins(len(x), seed, s) for x, s in zip(sets, flips, strict=True))
        self._first_flips = dict(zip(self._sizes, coins, strict=True))

    def close(self) -> None:  # noqa: D102
        self._images.close()

    def ends(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:  # noqa: D102
        reference, id_train = (self.preprocess.sample(s.images) for s in self._ends)
        return reference, id_train

    def pairs(self, step: int, generator: Generator) -> Pairs:
        r"""Returns the images of a step, each with shape :math:`(B, C, H, W)`."""
        chosen, flip_1 = self._chosen(step, Stream.SHUFFLE_ID)
        _, flip_0 = self._chosen(step, Stream.SHUFFLE_REFERENCE)
        crop, placed = self.options.crop, self._images.placed
        x_1, x_0 = (
            self.preprocess.pixels(flip_crop(images, rows, self._flipped(flip), crop, generator))
            for (images, rows), flip in zip(self._images(step), (flip_1, flip_0), strict=True)
        )
        return self.varied(x_0, x_1, self.id_labels[placed(chosen)], step, generator)

    def _flipped(self, alternating: Tensor) -> bool | Tensor:
        if self.options.flip == "alternating":
            return self._images.placed(alternating)
        return self.options.flip == "random"

    def _chosen(self, step: int, stream: Stream) -> tuple[Tensor, Tensor]:
        r"""Returns the images of a step, epochs without replacement end to end, and their flips."""
        total = self._sizes[stream]
        first, last = step * self.batch_size, (step + 1) * self.batch_size
        parts, flips = [], []
        for epoch in range(first // total, (last - 1) // total + 1):
            start = epoch * total
            order = self._shuffle(epoch, stream, total)
            parts.append(order[max(first - start, 0) : last - start])
            flips.append(self._first_flips[stream][parts[-1]] ^ bool(epoch % 2))
        return torch.cat(parts), torch.cat(flips)

    def _shuffle(self, epoch: int, stream: Stream, total: int) -> Tensor:
        cached = self._shuffles.get(stream)
        if cached is None or cached[0] != epoch:
            generator = step_generator(self.seed, stream, epoch, "cpu")
            cached = self._shuffles[stream] = epoch, torch.randperm(total, generator=generator)
        return cached[1]


class VectorBatches(Batches):
    r"""Batches of vectors, drawn with replacement and not augmented.

    Arguments:
        id_train: The ID training set :math:`p_1`, with shape :math:`(N, d)`, or what stands for it.
        labels: Its labels, with shape :math:`(N)`.
        reference: The reference set :math:`p_0`, with shape :math:`(M, d)`.
        standardise: The standardisation, which also says the device.
        batch_size: The number of pairs in a batch.
        seed: The seed.
    """

    def __init__(
        self,
        id_train: Vectors,
        labels: Tensor,
        reference: Vectors,
        standardise: Standardise,
        batch_size: int,
        seed: int,
    ) -> None:
        ends = (standardise(x) if isinstance(x, Tensor) else x for x in (id_train, reference))
        self.id_train, self.reference = ends
        super().__init__(batch_size, seed, self.reference[:1].device)
        self.labels = labels.to(self.device)
        self._limit = standardise.sample_size

    def ends(self) -> tuple[Tensor, Tensor]:  # noqa: D102
        x_0, x_1 = (x[:: max(1, len(x) // self._limit)] for x in (self.reference, self.id_train))
        return x_0, x_1

    def pairs(self, step: int, generator: Generator) -> Pairs:
        r"""Returns the vectors of a step, each with shape :math:`(B, d)`."""
        chosen, other = (
            torch.randint(len(x), (self.batch_size,), generator=generator, device=self.device)
            for x in (self.id_train, self.reference)
        )
        return Pairs(self.reference[other], self.id_train[chosen], self.labels[chosen])


def _normal_like(x: Tensor, generator: Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def _coins(count: int, seed: int, stream: Stream) -> Tensor:
    return torch.rand(count, generator=step_generator(seed, stream, 0, "cpu")) < 0.5


def limited(images: ImageSet, limit: int | None, seed: int) -> ImageSet:
    r"""Returns as many images as a limit allows, drawn by the seed; None for all."""
    if limit is None or limit >= len(images):
        return images
    generator = step_generator(seed, Stream.LIMIT, 0, "cpu")
    return images.subset(torch.randperm(len(images), generator=generator)[:limit].numpy())


#: The share of the reference that the shipped configurations broaden.
SHARE = 0.33


def broadened(
    batches: Iterable[Tensor],
    preprocess: Preprocess,
    share: float = SHARE,
    seed: int = 0,
    start: int = 0,
) -> Iterator[Tensor]:
    r"""Yields the batches with a share of the images of each strongly transformed.

    Arguments:
        batches: Preprocessed images, each batch with shape :math:`(B, 3, H, W)`.
        preprocess: The statistics by which they were normalised.
        share: The share of each batch, the first of its images.
        seed: The seed of the transforms.
        start: The number of batches before the first.

    Example:
        >>> reference = torch.zeros(4, 3, 8, 8), torch.zeros(2, 3, 8, 8)
        >>> preprocess = Preprocess([0.5] * 3, [0.25] * 3)
        >>> [len(x) for x in broadened(reference, preprocess, share=0.5)]
        [4, 2]
    """
    for index, images in enumerate(batches, start):
        if count := round(share * len(images)):
            device = images.device
            own = preprocess if preprocess.device == device else preprocess.on(device)
            pixels = own.denormalise(images[:count])
            random = Randomness(
                step_generator(seed, Stream.BATCH, index, device),
                step_generator(seed, Stream.HOST, index, "cpu"),
            )
            changed = own.normalise(broaden(pixels.clamp(0, 1), random))
            images = torch.cat([changed.to(images.dtype), images[count:]])
        yield images
