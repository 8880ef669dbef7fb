r"""OpenOOD's trainer contract around the one training loop: :class:`OSDRETrainer`.

The host gives a loader of ID images and one of reference images, as it does for outlier exposure,
and calls `train_epoch` once an epoch.

The host augments the images of its ID loader but not those of the reference, so a network could
tell them apart by their borders. Both are therefore taken as they are at test time (`data_aux`),
and flipped and cropped here, alike, on the batch.
"""

__all__ = ["LoaderBatches", "OSDRETrainer"]

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor, nn
from tqdm import tqdm

from ...config import Config
from ...data.transforms import Preprocess, flip_crop
from ...errors import UserError
from ...files import local
from ...models import FoldedRatio, device_of
from ...paths import Moments
from ...sections import DataConfig
from ...training import checkpoint
from ...training.batches import Pairs, PixelBatches
from ...training.build import prepare_objective
from ...training.checkpoint import model_metadata
from ...training.fit import assemble
from .host import Foreign
from .loaders import Statistics, normalisation_of, take_plain
from .network import OSDRENet

# Batches of each side from which second moments are computed.
MOMENT_BATCHES = 8
# Images of each side that are kept, for a network that looks at some before its training.
ENDS = 256


class OSDRETrainer:
    r"""Trains an OS-DRE network inside OpenOOD.

    The host's `optimizer.num_epochs` sets the number of steps; learning rate, decay, averaging
    and everything else are those of the network's own configuration, on which `trainer.options`,
    a mapping of sections, has the last word. The host's SGD settings are not used.

    After every epoch the averaged weights are returned, for the host to validate and save, and
    also written to its `output_dir` as a run folder that :meth:`OSDRENet.load` reads.

    Arguments:
        net: The network, built with its configuration, not folded.
        train_loader: The ID loader.
        train_unlabeled_loader: The reference loader.
        config: The host's configuration.

    Raises:
        UserError: If the network is another one, is folded or spread over devices, or a loader is
            missing, empty or does not show how it normalises.
    """

    def __init__(
        self,
        net: nn.Module,
        train_loader: Foreign,
        train_unlabeled_loader: Foreign,
        config: Mapping[str, Any],
    ) -> None:
        own = net.config if isinstance(net, OSDRENet) else None
        statistics = _statistics(train_loader)
        fault = None
        if own is None:
            fault = f"got {type(net).__name__}, expected the network 'osdre' on one device"
        elif type(net.ratio) is FoldedRatio:
            fault = "a folded network cannot be trained; OSDRENet.load(folder, folded=False) can"
        elif own.evaluation.is_sum:
            fault = "a sum of parts cannot be trained, expected evaluation.parts [log_ratio] alone"
        elif not train_loader or not train_unlabeled_loader:
            fault = "needs an ID and a reference loader, not empty, as the pipeline train_oe has"
        elif statistics is None:
            fault = "the ID loader's transform shows no normalisation"
        if fault is not None:
            raise UserError(f"trainer: {fault}.")
        assert isinstance(net, OSDRENet)
        assert own is not None
        assert statistics is not None
        self.train_loader = train_loader
        epochs = int(config["optimizer"]["num_epochs"])
        own = _configured(own, config, epochs * len(train_loader))
        self.batches = LoaderBatches(
            train_loader,
            train_unlabeled_loader,
            own.data,
            Preprocess(*statistics, device_of(net)),
            own.training.seed,
        )
        size, preprocess = self.batches.size, self.batches.preprocess
        output = config.get("output_dir")
        self.folder = None if output is None else local(output)
        self.trainer = assemble(
            net.ratio,
            partial(prepare_objective, own),
            self.batches,
            own.training,
            metadata=model_metadata(
                own, net.num_classes, preprocess, size, "train_unlabeled_loader"
            ),
        )
        self.net = OSDRENet(self.trainer.averaged, own, statistics, (3, size, size))

    def train_epoch(self, epoch_idx: int) -> tuple[OSDRENet, dict[str, float]]:
        r"""Trains for one epoch of the ID loader, the first of which has the number 1.

        Returns:
            The network with averaged weights, and the numbers `epoch_idx` and `loss`.

        Raises:
            UserError: If the loss is not finite.
        """
        trainer, steps = self.trainer, len(self.train_loader)
        assert trainer.outcome.step + steps <= trainer.options.steps, (
            f"epoch {epoch_idx} is more than optimizer.num_epochs"
        )
        total = torch.zeros((), device=trainer.device)
        for _ in tqdm(range(steps), desc=f"Epoch {epoch_idx:03d}", leave=True):
            total += trainer.step(self.batches(trainer.outcome.step))["total"]
        loss = float(total) / steps
        if not math.isfinite(loss):
            raise UserError(
                f"trainer: the loss is not finite in epoch {epoch_idx}; lower the rate."
            )
        if self.folder is not None:
            state = trainer.averaged.state_dict()
            checkpoint.write_checkpoint(self.folder, checkpoint.MODEL, state, trainer.metadata)
        return self.net, {"epoch_idx": epoch_idx, "loss": loss}


class LoaderBatches(PixelBatches):
    r"""Batches from an ID and a reference loader of the host's, each started over when it ends.

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
        ends = [
            torch.cat([take_plain(batch)[0] for batch in islice(loader, MOMENT_BATCHES)])
            for loader in (reference_loader, id_loader)
        ]
        self._moments = Moments.of(*(images.to(self.device) for images in ends))
        # A copy, or all of them would stay in memory.
        self._ends = [images[:ENDS].clone() for images in ends]
        self.size: int = ends[0].shape[-1]
        self._id, self._reference = _endless(id_loader), _endless(reference_loader)
        self._left = ends[0][:0]

    def ends(self) -> tuple[Tensor, Tensor]:
        r"""Returns the first images of both loaders."""
        reference, id_images = (images.to(self.device) for images in self._ends)
        return reference, id_images

    def moments(self) -> Moments:
        r"""Returns the second moments of the first batches of both loaders."""
        return self._moments

    def pairs(self, step: int, generator: Generator) -> Pairs:
        r"""Returns the images of a step, with shape :math:`(B, C, H, W)`."""
        images, label = take_plain(next(self._id), "label")
        x_1 = self._augmented(images, generator)
        # As many reference images as ID images, none of them left out.
        while len(self._left) < len(images):
            self._left = torch.cat([self._left, take_plain(next(self._reference))[0]])
        reference, self._left = self._left[: len(images)], self._left[len(images) :]
        x_0 = self._augmented(reference, generator)
        return self.varied(x_0, x_1, label, step, generator)

    def _augmented(self, images: Tensor, generator: Generator) -> Tensor:
        r"""Returns pixels in :math:`[0, 1]` of the host's images, flipped and cropped."""
        own, o = self.preprocess, self.options
        pixels = own.denormalise(images.to(own.device))
        every = torch.arange(len(images), device=own.device)
        # The host does not say which image is which, so none can take turns.
        flip = o.flip != "none"
        rows_first = pixels.clamp(0, 1).permute(0, 2, 3, 1)
        return flip_crop(rows_first, every, flip, o.crop, generator).permute(0, 3, 1, 2)


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


def _statistics(loader: Foreign) -> Statistics | None:
    data = getattr(loader, "dataset", None)
    transforms = (getattr(data, name, None) for name in ("transform_aux_image", "transform"))
    return next((n for t in transforms if (n := normalisation_of(t)) is not None), None)


def _endless(loader: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    while True:
        yield from loader
