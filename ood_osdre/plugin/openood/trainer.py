r"""OpenOOD's trainer contract around our own loop: :class:`OSDRETrainer`.

The host gives a loader of ID images and one of reference images, as it does for outlier exposure,
and calls `train_epoch` once an epoch. Every step is one of :class:`ood_osdre.training.trainer.Trainer`.

The host augments the images of its ID loader but not those of the reference, which would let a
network tell them by their borders. Both are therefore taken as they are at test time (`data_aux`),
and flipped and cropped here, alike, on the batch.
"""

__all__ = ["LoaderBatches", "OSDRETrainer"]

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from tqdm import tqdm

from ...config import Config
from ...data.augment import Randomness, flip_crop
from ...data.standardise import Preprocess
from ...errors import UserError
from ...models.frozen import device_of
from ...objectives.build import prepare_objective
from ...paths.gaussian import Moments
from ...sections import DataConfig
from ...training import checkpoint
from ...training.batches import Batches, Pairs, Stream, step_generator, vary_reference
from ...training.fit import assemble
from .host import Foreign
from .loaders import AUGMENTED, PLAIN, normalisation_of
from .network import OSDRENet

# Images of each side from which second moments are computed.
MOMENT_BATCHES = 8


class OSDRETrainer:
    r"""Trains an OS-DRE network inside OpenOOD.

    The host's `optimizer.num_epochs` sets the number of steps; learning rate, decay, averaging
    and everything else are those of the network's own configuration, on which `trainer.options`,
    a mapping of sections, has the last word. The host's SGD settings are not used.

    After every epoch the averaged weights are returned, for the host to validate and save, and
    also written to its `output_dir` as a run folder that :meth:`OSDRENet.load` reads.

    Arguments:
        net: The network, built with its configuration.
        train_loader: The ID loader.
        train_unlabeled_loader: The reference loader.
        config: The host's configuration.

    Raises:
        UserError: If the network is another one, is spread over devices, or the loaders do not
            show how they normalise.
    """

    def __init__(
        self,
        net: nn.Module,
        train_loader: Foreign,
        train_unlabeled_loader: Foreign,
        config: Mapping[str, Any],
    ) -> None:
        if not isinstance(net, OSDRENet) or net.config is None:
            raise UserError(
                f"trainer: got {type(net).__name__}, expected the network 'osdre' on one device."
            )
        self.train_loader, self.train_unlabeled_loader = train_loader, train_unlabeled_loader
        self.epochs = int(config["optimizer"]["num_epochs"])
        own = _configured(net.config, config, self.epochs * len(train_loader))
        preprocess = _preprocess(train_loader, device_of(net))
        self.batches = LoaderBatches(
            train_loader, train_unlabeled_loader, own.data, preprocess, own.training.seed
        )
        size = self.batches.size
        output = config.get("output_dir")
        self.folder = None if output is None else Path(output)
        self.trainer = assemble(
            net.ratio,
            partial(prepare_objective, own),
            self.batches,
            own.training,
            metadata={
                "config": own.to_dict(),
                "classes": net.num_classes,
                "mean": preprocess.mean.tolist(),
                "std": preprocess.std.tolist(),
                "size": size,
                "reference": "train_unlabeled_loader",
            },
        )
        statistics = preprocess.mean.tolist(), preprocess.std.tolist()
        self.net = OSDRENet(self.trainer.averaged, own, statistics, size)

    def train_epoch(self, epoch_idx: int) -> tuple[OSDRENet, dict[str, float]]:
        r"""Trains for one epoch of the ID loader.

        Arguments:
            epoch_idx: The number of the epoch, from 1.

        Returns:
            The network with averaged weights, and the numbers `epoch_idx` and `loss`.

        Raises:
            UserError: If the loss is not finite, or there are more epochs than configured.
        """
        trainer, steps = self.trainer, len(self.train_loader)
        if trainer.outcome.step + steps > trainer.options.steps:
            raise UserError(f"trainer: epoch {epoch_idx} of {self.epochs} (optimizer.num_epochs).")
        total = torch.zeros((), device=trainer.device)
        for _ in tqdm(range(steps), desc=f"Epoch {epoch_idx:03d}", leave=True):
            total += trainer.step(trainer.batches(trainer.outcome.step))["total"]
        loss = float(total) / steps
        if not math.isfinite(loss):
            raise UserError(
                f"trainer: the loss is not finite in epoch {epoch_idx}; lower the rate."
            )
        if self.folder is not None:
            state = trainer.averaged.state_dict()
            checkpoint.write_checkpoint(self.folder, checkpoint.MODEL, state, trainer.metadata)
        return self.net, {"epoch_idx": epoch_idx, "loss": loss}


class LoaderBatches(Batches):
    r"""Batches from two loaders, each started over when it ends.

    Arguments:
        id_loader: Batches with keys `label` and `data_aux`, or `data` without it.
        reference_loader: Batches with one of the same keys.
        options: Augmentation, broadening and mixture.
        preprocess: The host's normalisation.
        seed: The seed of augmentation, times and noise.

    Attributes:
        size: The side of the images.
    """

    def __init__(
        self,
        id_loader: Iterable[Mapping[str, Any]],
        reference_loader: Iterable[Mapping[str, Any]],
        options: DataConfig,
        preprocess: Preprocess,
        seed: int,
    ) -> None:
        super().__init__(0, seed, preprocess.device)
        self.options, self.preprocess = options, preprocess
        ends = [_first(loader) for loader in (reference_loader, id_loader)]
        self._moments = Moments.of(*(images.to(self.device) for images in ends))
        self.size: int = ends[0].shape[-1]
        self._id, self._reference = _endless(id_loader), _endless(reference_loader)
        self._left: Tensor | None = None

    def moments(self) -> Moments:
        r"""Returns the second moments of the first images of both loaders."""
        return self._moments

    def pairs(self, step: int, generator: Generator) -> Pairs:
        r"""Returns the images of a step, with shape :math:`(B, C, H, W)`."""
        batch = next(self._id)
        x_1 = self._augmented(_plain(batch), generator)
        x_0 = self._augmented(self._take(len(x_1)), generator)
        random = Randomness(generator, step_generator(self.seed, Stream.HOST, step, "cpu"))
        x_0 = vary_reference(x_0, x_1, self.options, random)
        normalise = self.preprocess.normalise
        return Pairs(normalise(x_0), normalise(x_1), batch["label"].to(self.device))

    def _take(self, count: int) -> Tensor:
        r"""Returns as many reference images as there are ID images, leaving none out."""
        parts = [] if self._left is None else [self._left]
        while sum(map(len, parts)) < count:
            parts.append(_plain(next(self._reference)))
        images = torch.cat(parts)
        self._left = images[count:]
        return images[:count]

    def _augmented(self, images: Tensor, generator: torch.Generator) -> Tensor:
        r"""Returns pixels in :math:`[0, 1]` of the host's images, flipped and cropped."""
        own, o = self.preprocess, self.options
        pixels = images.to(own.device) * own.std[:, None, None] + own.mean[:, None, None]
        every = torch.arange(len(images), device=own.device)
        rows_first = pixels.clamp(0, 1).permute(0, 2, 3, 1)
        return flip_crop(rows_first, every, o.flip, o.crop, generator).permute(0, 3, 1, 2)


def _configured(own: Config, config: Mapping[str, Any], steps: int) -> Config:
    options = config["trainer"].get("options") or {}
    if options:
        merged = {**own.to_dict()}
        for section, values in options.items():
            is_section = isinstance(values, Mapping)
            merged[section] = {**merged.get(section, {}), **values} if is_section else values
        own = Config.from_mapping(merged, "trainer.options")
    training = own.training
    warmup = min(training.warmup, steps // 10)
    return own.replace(training=training.replace(steps=steps, warmup=warmup))


def _preprocess(loader: Foreign, device: torch.device) -> Preprocess:
    data = getattr(loader, "dataset", None)
    transforms = (getattr(data, name, None) for name in ("transform_aux_image", "transform"))
    found = next((n for t in transforms if (n := normalisation_of(t)) is not None), None)
    if found is None:
        raise UserError("trainer: the ID loader's transform shows no normalisation.")
    return Preprocess(*found, device)


def _endless(loader: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise UserError("trainer: a loader is empty, expected at least one batch.")


def _first(loader: Iterable[Mapping[str, Any]]) -> Tensor:
    parts = []
    for batch in loader:
        parts.append(_plain(batch))
        if len(parts) == MOMENT_BATCHES:
            break
    if not parts:
        raise UserError("trainer: a loader is empty, expected at least one batch.")
    return torch.cat(parts)


def _plain(batch: Mapping[str, Any]) -> Tensor:
    return batch[PLAIN] if PLAIN in batch else batch[AUGMENTED]
