r"""A trained model that is ready to score: folded, with the preprocessing it was trained with.

Whatever deploys a model scores with a :class:`Scorer`: the command, the detector, the plugins and
the export. :func:`read_model` is the one reader of a trained model's checkpoint, beside whose
weights lies what :func:`~ood_osdre.training.checkpoint.model_metadata` says;
:func:`read_classifier` reads the classifiers, ours or others', that a head is put on.
"""

__all__ = [
    "GivenClassifier",
    "Scorer",
    "TrainedModel",
    "load_scorer",
    "read_classifier",
    "read_model",
]

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config import Config
from ..data.image_files import LazyImages, Pixels
from ..data.transforms import Preprocess, Standardise, Standardiser, check_statistics
from ..errors import UserError, one_line
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
from ..sections import NetworkConfig
from ..training.build import build_head, build_ratio, count_features
from ..training.checkpoint import (
    CHANNELS,
    MODEL,
    checkpoint_path,
    input_shape,
    read_checkpoint,
    restore,
)
from ..training.distributed import find_device
from ..training.surroundings import own_surroundings, same_random_numbers

# What pickles of weights raise if they are damaged, or hold more than tensors.
DAMAGE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError)


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

    def on(self, device: torch.device | str) -> "Scorer":
        r"""Returns the scorer on another device."""
        return replace(self, ratio=self.ratio.to(device), preprocess=self.preprocess.on(device))

    def score(self, images: Pixels, batch_size: int = 512) -> NDArray[np.float32]:
        r"""Scores images of the training size.

        Arguments:
            images: The uint8 images, with shape :math:`(N, H, W, 3)`.
            batch_size: The number of images scored at once.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`; of a run that sums
            parts the sum, which has no unit.

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
        is_uint8 = isinstance(images, np.ndarray | LazyImages) and kind == np.uint8
        if not is_uint8 or shape[1:] != self.shape or shape[0] == 0:
            expected = ", ".join(map(str, ("N", *self.shape)))
            raise UserError(
                f"{name}: got {kind} with shape {shape}, expected uint8 with shape ({expected}), "
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
    except KeyError as error:
        raise UserError(f"{source}: {error} is missing, expected a trained model.") from None
    count, kind = (CHANNELS, Preprocess) if dim is None else (dim, Standardise)
    preprocess = kind(*check_statistics(*statistics, count, source), device)
    restore(ratio, tensors, source)
    return TrainedModel(ratio.to(device).eval(), preprocess, metadata, digest)


def _build(
    metadata: Mapping[str, Any], source: Path, backbone: nn.Module | None = None
) -> RatioModel:
    r"""Builds a model as it was before training, from what is stored with it."""
    config = Config.from_mapping(metadata["config"], str(source))
    if config.head is None:
        size, dim = metadata["size"], metadata.get("dim")
        return build_ratio(config, metadata["classes"], dim, backbone, size)
    part = metadata["representation"]
    classifier = _build_classifier(part["network"], metadata["classes"])
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
    return Scorer.of(read_model(local(folder), find_device(device), backbone))


class GivenClassifier(NamedTuple):
    r"""A classifier that was trained elsewhere.

    Attributes:
        model: The classifier.
        network: How to build it again: the options of a network of ours, or timm's name under
            `timm`.
        statistics: The means and the standard deviations of the channels that it was trained with;
            None if they are not known.
    """

    model: Classifier
    network: Mapping[str, Any]
    statistics: tuple[list[float], list[float]] | None = None


def read_classifier(source: str, config: Config, classes: int, size: int) -> GivenClassifier:
    r"""Reads the classifier that a head is to be put on.

    Arguments:
        source: A run folder, whose model has a class head; a file of weights, of OpenOOD's
            ResNet18_32x32 or of our network as OpenOOD saves it; or `timm:NAME@FILE`.
        config: The configuration: the network of a file of our own, and the ID data set.
        classes: The number of ID classes.
        size: The side of the images.

    Raises:
        UserError: If there is none, it is damaged, or of other classes or images.
    """
    if source.startswith("timm:"):
        given = _from_timm(source, classes)
    elif os.path.isdir(local(source)):
        given = _from_run(local(source), config, size)
    else:
        given = _from_file(local(source), config.network, classes)
    if (found := given.model.class_head.out_features) != classes:
        raise UserError(f"classifier {source}: has {found} classes, expected {classes}.")
    count_features(given.model.backbone, (CHANNELS, size, size))
    return given._replace(model=given.model.eval())


def _from_run(folder: Path, config: Config, size: int) -> GivenClassifier:
    trained = read_model(folder)
    model, metadata = trained.ratio, trained.metadata
    if isinstance(model, SummedScore):
        model = model.networks[0]
    then = Config.from_mapping(metadata["config"])
    holder: Any = getattr(model, "network", model)
    head: Any = getattr(holder, "class_head", None)
    found = {"id": then.id, "size": metadata["size"], "class head": isinstance(head, nn.Linear)}
    expected = {"id": config.id, "size": size, "class head": True}
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(
                f"classifier {folder}: got a model with {name} {found[name]}, expected {value}."
            )
    network = then.network.to_dict()
    if isinstance(model, RepresentationRatio):
        network = metadata["representation"]["network"]
    mean, std = trained.preprocess.statistics
    classifier = Classifier.of(holder.backbone, head)
    return GivenClassifier(classifier, network, (mean.tolist(), std.tolist()))


def _from_file(path: Path, network: NetworkConfig, classes: int) -> GivenClassifier:
    tensors = _read_weights(path)
    if any(key.startswith("ratio.") for key in tensors):
        own = {k.removeprefix("ratio.").removeprefix("network."): v for k, v in tensors.items()}
        own = {k: v for k, v in own.items() if k.startswith(("backbone.", "class_head."))}
    elif {"conv1.weight", "layer1.0.conv1.weight", "fc.weight"} <= tensors.keys():
        # OpenOOD's names of the parts of the ResNet-18 that our default network is.
        network, own = NetworkConfig(), {}
        for key, value in tensors.items():
            name = f"backbone.net.{key.replace('shortcut', 'downsample')}"
            own[f"class_head.{key[3:]}" if key.startswith("fc.") else name] = value
    else:
        raise UserError(
            f"classifier {path}: got tensors {', '.join(sorted(tensors)[:3])}, ..., expected those "
            "of OpenOOD's ResNet18_32x32, or of our network in OpenOOD (ratio.*)."
        )
    found = own["class_head.weight"].shape[0] if "class_head.weight" in own else classes
    classifier = _build_classifier(network.to_dict(), found)
    restore(classifier, own, path)
    return GivenClassifier(classifier, network.to_dict())


def _from_timm(source: str, classes: int) -> GivenClassifier:
    name, _, file = source.removeprefix("timm:").partition("@")
    if not name or not file:
        raise UserError(
            f"classifier: got {source}, expected timm:NAME@FILE, a file of its weights."
        )
    net = timm_network(name, classes)
    restore(net, _read_weights(local(file)), local(file))
    return GivenClassifier(Classifier.of_timm(net), {"timm": name})


@own_surroundings()
def _build_classifier(network: Mapping[str, Any], classes: int) -> Classifier:
    r"""Builds an untrained classifier of the network that :class:`GivenClassifier` describes."""
    if "timm" in network:
        return Classifier.of_timm(timm_network(network["timm"], classes))
    objective = {"endpoint": 0.0, "class_weight": 1.0}
    config = {"estimator": "classifier", "network": network, "objective": objective}
    model = build_ratio(Config.from_mapping(config), classes)
    assert isinstance(model, Classifier)
    return model


def _read_weights(path: Path) -> dict[str, Tensor]:
    r"""Returns the tensors of a file of weights; nothing in it is executed."""
    content: Any
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except DAMAGE as error:
        raise UserError(f"classifier {path}: no weights ({one_line(error, 80)}).") from None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(
            f"classifier {path}: got {type(content).__name__}, expected tensors by name."
        )
    # As DataParallel names them.
    return {str(key).removeprefix("module."): value for key, value in content.items()}
