r"""A trained model with the preprocessing that it was trained with, folded, ready to score.

Everything that deploys a model scores with a :class:`Scorer`: the command, a detector, both plugins,
the export. :func:`read_model` is the one reader of a trained model.
"""

__all__ = ["Scorer", "TrainedModel", "load_scorer", "read_model"]

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..config import Config
from ..data.standardise import Preprocess, Standardise, Standardiser, check_statistics
from ..errors import UserError
from ..models.build import build_untrained
from ..models.ratio import RatioModel
from ..training.checkpoint import MODEL, checkpoint_path, read_checkpoint, restore
from .evaluate import count_parameters, score_images

# The channels of images.
CHANNELS = 3


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
    def of(cls, trained: "TrainedModel") -> "Scorer":
        r"""Returns the scorer of a trained model, which stays as it is."""
        folded = trained.ratio.fold()
        if trained.metadata["config"]["training"]["channels_last"]:
            folded.to(memory_format=torch.channels_last)
        parameters = count_parameters(trained.ratio)
        return cls(folded, trained.preprocess, trained.metadata, parameters)

    @property
    def config(self) -> Config:
        r"""The configuration that the model was trained with."""
        return Config.from_mapping(self.metadata["config"])

    @property
    def shape(self) -> tuple[int, ...]:
        r"""The shape of an input before preprocessing: that of an image, or of a vector."""
        dim = self.metadata.get("dim")
        size = self.metadata["size"]
        return (size, size, CHANNELS) if dim is None else (dim,)

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
        kind = getattr(images, "dtype", type(images).__name__)
        shape = tuple(getattr(images, "shape", ()))
        is_array = isinstance(images, np.ndarray) and kind == np.uint8 and len(shape) == 4
        if not is_array or shape[3] != CHANNELS or not shape[0]:
            raise UserError(
                f"images: got {kind} with shape {shape}, expected uint8 with shape (N, H, W, 3), "
                "not empty; OneStepDetector takes other forms."
            )
        self.refuse_other_size(images, "images")
        return score_images(self.ratio, images, self.preprocess, batch_size)[0]

    def refuse_other_size(self, images: NDArray[np.uint8], name: str) -> None:
        r"""Raises an error if images are of another size than those of training.

        Arguments:
            images: The images, with shape :math:`(N, H, W, 3)`.
            name: What the error calls them.
        """
        height, width = images.shape[1:3]
        size = self.metadata["size"]
        if (height, width) != (size, size):
            raise UserError(
                f"{name}: got {height}x{width} pixels, expected {size}x{size}, the training size."
            )


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


def read_model(
    folder: Path, device: torch.device | str = "cpu", backbone: nn.Module | None = None
) -> TrainedModel:
    r"""Reads the model of a run folder or of a detector, the one reader of a trained model.

    Arguments:
        folder: The folder.
        device: Where to put the model.
        backbone: A module of the architecture that the model was trained on, if it was one of the
            user's own.

    Raises:
        UserError: If the folder holds none, it is damaged, or the backbone is another one.
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
        ratio = build_untrained(config, metadata["classes"], dim, backbone, size)
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

    Returns:
        The scorer.

    Raises:
        UserError: If the folder holds none, or it is damaged.
    """
    return Scorer.of(read_model(Path(folder), device))
