r"""A trained model that is ready to score: folded, with the preprocessing it was trained with.

Whatever deploys a model scores with a :class:`Scorer`: the command, the detector, the plugins and
the export. :func:`read_model` is the one reader of a trained model's checkpoint, and
:func:`model_metadata` says what it reads beside the weights.
"""

__all__ = [
    "Scorer",
    "TrainedModel",
    "input_shape",
    "load_scorer",
    "model_metadata",
    "read_model",
]

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..config import Config
from ..data.transforms import Preprocess, Standardise, Standardiser, check_statistics
from ..errors import UserError
from ..evaluation.evaluate import score_images
from ..models import RatioModel
from ..training.build import build_ratio
from ..training.checkpoint import MODEL, checkpoint_path, read_checkpoint, restore
from ..training.distributed import find_device

CHANNELS = 3


class TrainedModel(NamedTuple):
    r"""A trained model as its checkpoint holds it, before it is folded.

    Attributes:
        ratio: The model.
        preprocess: The preprocessing, with the statistics of the ID data.
        metadata: Configuration, classes and image statistics.
        digest: The SHA-256 of the checkpoint.
    """

    ratio: RatioModel
    preprocess: Standardiser
    metadata: Mapping[str, Any]
    digest: str = ""


@dataclass(frozen=True)
class Scorer:
    r"""A folded model with its preprocessing.

    Attributes:
        ratio: The folded model, in evaluation mode.
        preprocess: The preprocessing, with the statistics of the ID data.
        metadata: Configuration, classes and image statistics.
        parameters: The number of parameters of the model before it was folded.
    """

    ratio: RatioModel
    preprocess: Standardiser
    metadata: Mapping[str, Any]
    parameters: int

    @classmethod
    def of(cls, trained: TrainedModel) -> "Scorer":
        r"""Returns the scorer of a trained model, which stays as it is."""
        folded = trained.ratio.fold()
        if trained.metadata["config"]["training"]["channels_last"]:
            folded.to(memory_format=torch.channels_last)
        parameters = sum(p.numel() for p in trained.ratio.parameters())
        return cls(folded, trained.preprocess, trained.metadata, parameters)

    @property
    def shape(self) -> tuple[int, ...]:
        r"""The shape of an input before preprocessing: that of an image, or of a vector."""
        first, *sides = input_shape(self.metadata)
        return (*sides, first)

    def on(self, device: torch.device | str) -> "Scorer":
        r"""Returns the scorer on another device."""
        return replace(self, ratio=self.ratio.to(device), preprocess=self.preprocess.on(device))

    def score(self, images: NDArray[np.uint8], batch_size: int = 512) -> NDArray[np.float32]:
        r"""Scores images of the training size.

        Arguments:
            images: The uint8 images, with shape :math:`(N, H, W, 3)`.
            batch_size: The number of images scored at once.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`.

        Raises:
            UserError: If the images are not uint8, of another shape or size.
        """
        self.check_images(images)
        return score_images(self.ratio, images, self.preprocess, batch_size)[0]

    def check_images(self, images: object, name: str = "images") -> None:
        r"""Raises an error for what are not images like those of training.

        Arguments:
            images: The images: uint8 with shape :math:`(N, H, W, 3)`, of the training size.
            name: What the error calls them.
        """
        kind = getattr(images, "dtype", type(images).__name__)
        shape = tuple(getattr(images, "shape", ()))
        is_uint8 = isinstance(images, np.ndarray) and kind == np.uint8
        if not is_uint8 or shape[1:] != self.shape or shape[0] == 0:
            expected = ", ".join(map(str, ("N", *self.shape)))
            raise UserError(
                f"{name}: got {kind} with shape {shape}, expected uint8 with shape ({expected}), "
                "N > 0, as in training."
            )


def input_shape(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    r"""Returns the shape of one input of a network: channels and sides, or a dimension."""
    size, dim = metadata["size"], metadata.get("dim")
    return (CHANNELS, size, size) if dim is None else (dim,)


def model_metadata(
    config: Config,
    classes: int,
    preprocess: Standardiser,
    size: int,
    reference: str | None,
    **facts: object,
) -> dict[str, Any]:
    r"""Returns what is stored with a model: how to build it again, on what it was trained.

    Arguments:
        config: Its configuration.
        classes: The number of ID classes, 0 without labels.
        preprocess: The preprocessing, with the statistics of the ID data.
        size: The side of the images in pixels.
        reference: The name of the reference; None if it has none.
        facts: What else is known: the dimension `dim` of vectors, `backbone`, checksums.
    """
    mean, std = (value.tolist() for value in preprocess.statistics)
    own = {"config": config.to_dict(), "classes": classes, "mean": mean, "std": std}
    return {**own, "size": size, "reference": reference, **facts}


def read_model(
    folder: Path, device: torch.device | str = "cpu", backbone: nn.Module | None = None
) -> TrainedModel:
    r"""Reads the model of a run folder or of a detector.

    Arguments:
        folder: The folder.
        device: Where to put the model.
        backbone: A module of the architecture that the model was trained on, if it was one of the
            user's own.

    Raises:
        UserError: If the folder holds no model, it is damaged, or the backbone is another one.
    """
    tensors, metadata, digest = read_checkpoint(folder, MODEL)
    source = checkpoint_path(folder, MODEL)
    own = metadata.get("backbone")
    if (own is None) != (backbone is None):
        expected = "none" if own is None else f"the {own} it was trained with"
        raise UserError(f"{source}: pass as backbone {expected}.")
    try:
        config = Config.from_mapping(metadata["config"], str(source))
        size, dim = metadata["size"], metadata.get("dim")
        ratio = build_ratio(config, metadata["classes"], dim, backbone, size)
        statistics = metadata["mean"], metadata["std"]
    except KeyError as error:
        raise UserError(f"{source}: {error} is missing, expected a trained model.") from None
    count, kind = (CHANNELS, Preprocess) if dim is None else (dim, Standardise)
    preprocess = kind(*check_statistics(*statistics, count, source), device)
    restore(ratio, tensors, source)
    return TrainedModel(ratio.to(device).eval(), preprocess, metadata, digest)


def load_scorer(folder: str | Path, device: torch.device | str = "cpu") -> Scorer:
    r"""Loads the selected model of a run folder, folded.

    Arguments:
        folder: The run folder.
        device: Where to score.

    Raises:
        UserError: If the folder holds no model, it is damaged, or there is no such device.
    """
    return Scorer.of(read_model(Path(folder), find_device(device)))
