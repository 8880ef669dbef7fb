r"""A trained model that is ready to score: folded, with the preprocessing it was trained with.

Whatever deploys a model scores with a :class:`Scorer`: the command, the detector, the plugins and
the export. :func:`read_model` is the one reader of a trained model's checkpoint, beside whose
weights lies what :func:`~ood_osdre.training.checkpoint.model_metadata` says.
"""

__all__ = [
    "Scorer",
    "TrainedModel",
    "build_classifier",
    "load_scorer",
    "read_model",
    "write_model",
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
from ..data.image_files import LazyImages
from ..data.inputs import read
from ..data.transforms import Preprocess, Standardise, Standardiser, check_statistics
from ..errors import UserError, one_line
from ..evaluation.calibration import SplitConformal
from ..evaluation.decisions import CALIBRATED, read_calibration, write_calibration
from ..evaluation.evaluate import score_images
from ..files import local
from ..models import (
    Classifier,
    RatioModel,
    RepresentationRatio,
    SummedScore,
    WhitenedRatio,
    Whitening,
    timm_network,
)
from ..training.build import build_head, build_ratio
from ..training.checkpoint import (
    CHANNELS,
    MODEL,
    checkpoint_path,
    digest_of,
    input_shape,
    read_checkpoint,
    restore,
    write_checkpoint,
)
from ..training.distributed import find_device
from ..training.surroundings import own_surroundings, same_random_numbers


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
        conformal: The threshold and p-values, if it was calibrated.
    """

    ratio: RatioModel
    preprocess: Standardiser
    metadata: Mapping[str, Any]
    parameters: int
    conformal: SplitConformal | None = None

    def __repr__(self) -> str:
        return f"Scorer({self.parameters} parameters, inputs of shape {self.shape})"

    @classmethod
    @same_random_numbers()
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

    @property
    def class_names(self) -> list[str]:
        r"""The names of the ID classes, those of their folders or else their numbers."""
        return self.metadata.get("class_names") or list(map(str, range(self.metadata["classes"])))

    @property
    def columns(self) -> list[str]:
        r"""The names of a vector's numbers, those of the table's columns; empty if it named none."""
        return list(self.metadata.get("columns", ()))

    def on(self, device: torch.device | str) -> "Scorer":
        r"""Returns the scorer on another device."""
        return replace(self, ratio=self.ratio.to(device), preprocess=self.preprocess.on(device))

    def score(self, images: Any, batch_size: int = 512) -> NDArray[np.float32]:  # noqa: ANN401
        r"""Scores images of the training size, or vectors.

        Arguments:
            images: The uint8 images, with shape :math:`(N, H, W, 3)`; of a model of vectors those,
                finite numbers with shape :math:`(N, d)`.
            batch_size: The number of images scored at once.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`; of a run that sums
            parts the sum, which has no unit.

        Raises:
            UserError: If the images are not uint8, of another shape or size, or vectors not finite.
        """
        if len(self.shape) == 1:
            images = read(images, self.metadata["size"], "vectors", labelled=False).values
        self.check_images(images)
        return score_images(self.ratio, images, self.preprocess, batch_size)[0]

    def check_images(self, images: object, name: str = "images") -> None:
        r"""Raises an error for what are not images like those of training.

        Arguments:
            images: The images: uint8 with shape :math:`(N, H, W, 3)`, of the training size; or
                vectors that have been read.
            name: What the error calls them.
        """
        kind = getattr(images, "dtype", type(images).__name__)
        shape = tuple(getattr(images, "shape", ()))
        wanted = "uint8" if len(self.shape) > 1 else "numbers"
        is_array = isinstance(images, np.ndarray | LazyImages)
        fits = is_array and wanted in (str(kind), "numbers")
        if not fits or shape[1:] != self.shape or shape[0] == 0:
            expected = ", ".join(map(str, ("N", *self.shape)))
            raise UserError(
                f"{name}: got {kind} with shape {shape}, expected {wanted} with shape ({expected}), "
                "N > 0, as in training."
            )


@own_surroundings()
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
    if backbone is None and (name := metadata.get("timm")):
        backbone = timm_network(name, 0)
    if (own is None) != (backbone is None):
        expected = f"the {own} it was trained with, in Python: load_scorer(folder, backbone=...)"
        raise UserError(f"{source}: pass as backbone {'none' if own is None else expected}.")
    try:
        ratio: RatioModel
        if (total := metadata.get("sum")) is None:
            ratio = _build(metadata, source, backbone)
        else:
            networks = [_build(member, source) for member in total["members"]]
            ratio = SummedScore(networks, total["names"], total["kinds"])
        dim, statistics = metadata.get("dim"), (metadata["mean"], metadata["std"])
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise UserError(f"{source}: {problem}, expected a trained model.") from None
    count, kind = (CHANNELS, Preprocess) if dim is None else (dim, Standardise)
    preprocess = kind(*check_statistics(*statistics, count, source), device)
    restore(ratio, tensors, source)
    return TrainedModel(ratio.to(device).eval(), preprocess, metadata, digest)


def write_model(
    folder: Path,
    trained: TrainedModel,
    conformal: SplitConformal | None,
    seen: NDArray[Any] | None,
) -> None:
    r"""Writes a model and its calibration, the model last, as it makes a folder a detector.

    Arguments:
        folder: The folder, created if needed.
        trained: The model.
        conformal: The threshold, if there is one.
        seen: The fingerprints of what the model was fitted to; None if they are not recorded.
    """
    metadata = {**trained.metadata, CALIBRATED: conformal is not None}
    state = trained.ratio.state_dict()
    write_calibration(folder, digest_of(state, metadata), conformal, seen)
    write_checkpoint(folder, MODEL, state, metadata)


def _build(
    metadata: Mapping[str, Any], source: Path, backbone: nn.Module | None = None
) -> RatioModel:
    r"""Builds a model as it was before training, from what is stored with it."""
    config = Config.from_mapping(metadata["config"], str(source))
    if config.head is None:
        size, dim = metadata["size"], metadata.get("dim")
        return build_ratio(config, metadata["classes"], dim, backbone, size)
    part = metadata["representation"]
    classifier = build_classifier(part["network"], metadata["classes"])
    whitening = Whitening.empty(part["features"], part["rank"])
    inner = WhitenedRatio(whitening, build_head(config.head, part["rank"], metadata["classes"]))
    return RepresentationRatio(classifier, inner, config.head.layers)


def load_scorer(
    folder: str | Path, device: torch.device | str = "cpu", backbone: nn.Module | None = None
) -> Scorer:
    r"""Loads the selected model of a run folder or of a detector, folded.

    Arguments:
        folder: The folder.
        device: Where to score.
        backbone: A module of the architecture that was given to a detector's fit, if one was.

    Raises:
        UserError: If the folder holds no model, it is damaged, or there is no such device.
    """
    trained = read_model(local(folder), find_device(device), backbone)
    calibration = read_calibration(local(folder), trained.digest, trained.metadata)
    return replace(Scorer.of(trained), conformal=calibration[0])


@own_surroundings()
def build_classifier(network: Mapping[str, Any], classes: int) -> Classifier:
    r"""Builds an untrained classifier of the network that stored metadata describe."""
    if "timm" in network:
        return Classifier.of_timm(timm_network(network["timm"], classes))
    objective = {"endpoint": 0.0, "class_weight": 1.0}
    config = {"estimator": "classifier", "network": network, "objective": objective}
    model = build_ratio(Config.from_mapping(config), classes)
    assert isinstance(model, Classifier)
    return model
