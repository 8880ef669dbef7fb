r"""Networks that were trained elsewhere: the classifiers that a head is put on, and timm's backbones.

:func:`read_classifier` reads what a user names, ours or others', :func:`read_backbone` a network of
timm without its class head. Nothing in a file of weights is executed. :func:`fit_on_classifier` puts a
head on a classifier of a user's, by images of a user's.
"""

__all__ = ["TIMM", "GivenClassifier", "fit_on_classifier", "read_backbone", "read_classifier"]

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..config import Config
from ..data import BenchmarkData, ImageSet, Manifest
from ..data.inputs import Samples
from ..data.sets import key_of
from ..data.transforms import Preprocess
from ..errors import UserError, one_line
from ..evaluation.decisions import read_calibration
from ..files import local
from ..models import (
    Classifier,
    NetworkDigest,
    RepresentationRatio,
    SummedScore,
    timm_network,
)
from ..sections import NetworkConfig
from ..training.build import count_features
from ..training.checkpoint import CHANNELS, model_metadata, restore
from ..training.run import HEAD, Outcome, held_folder, of_seed
from ..training.surroundings import own_surroundings
from .feature_head import fit_head
from .feature_store import remove_features
from .head_data import HeadData
from .labels import PIECE, check_unseen, fingerprints_of, seen_in
from .scorer import TrainedModel, build_classifier, read_model

# What pickles of weights raise if they are damaged, or hold more than tensors.
DAMAGE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, SafetensorError)
#: What the name of a network of timm begins with.
TIMM = "timm:"
LEAST_STD = 1e-3  # of a channel that never varies


class GivenClassifier(NamedTuple):
    r"""A classifier that was trained elsewhere.

    Attributes:
        model: The classifier.
        network: How to build it again: the options of a network of ours, or timm's name under
            `timm`.
        statistics: The means and the standard deviations of the channels that it was trained with;
            None if they are not known.
        seen: The fingerprints of what trained it, if they are recorded.
        names: The names of its classes, if they have names.
    """

    model: Classifier
    network: Mapping[str, Any]
    statistics: tuple[list[float], list[float]] | None = None
    seen: NDArray[Any] | None = None
    names: Sequence[str] = ()


def read_classifier(
    source: str, config: Config, classes: int | None, size: int
) -> GivenClassifier:
    r"""Reads the classifier that a head is to be put on.

    Arguments:
        source: A run folder, whose model has a class head, of several seeds for that of the run's
            own; a file of weights, of OpenOOD's ResNet18_32x32 or of our network as OpenOOD saves
            it; or `timm:NAME@FILE`.
        config: The configuration: the network of a file of our own, the ID data set and the seed.
        classes: The number of ID classes; None for as many as it has.
        size: The side of the images.

    Raises:
        UserError: If there is none, it is damaged, or of other classes or images.
    """
    if source.startswith("timm:"):
        given = _from_timm(source, classes)
    elif os.path.isdir(folder := local(source)):
        folder = of_seed(folder, config.training.seed)
        given = _from_run(folder, None if classes is None else config.id, size)
    else:
        given = _from_file(local(source), config.network, classes)
    if classes is not None and (found := given.model.class_head.out_features) != classes:
        raise UserError(f"classifier {source}: has {found} classes, expected {classes}.")
    count_features(given.model.backbone, (CHANNELS, size, size))
    return given._replace(model=given.model.eval())


def _from_run(folder: Path, id_name: str | None, size: int) -> GivenClassifier:
    trained = read_model(folder)
    model, metadata = trained.ratio, trained.metadata
    if isinstance(model, SummedScore):
        model = model.networks[0]
    then = Config.from_mapping(metadata["config"])
    holder: Any = getattr(model, "network", model)
    head: Any = getattr(holder, "class_head", None)
    found = {"id": then.id, "size": metadata["size"], "class head": isinstance(head, nn.Linear)}
    expected = {"id": id_name or then.id, "size": size, "class head": True}
    for name, value in expected.items():
        if found[name] != value:
            raise UserError(
                f"classifier {folder}: got a model with {name} {found[name]}, expected {value}."
            )
    network = then.network.to_dict()
    if isinstance(model, RepresentationRatio):
        network = metadata["representation"]["network"]
    elif metadata.get("backbone"):
        raise UserError(
            f"classifier {folder}: is of a backbone of its own ({metadata['backbone']}), which no "
            "run can build again; expected timm:NAME@FILE, or a run without --backbone."
        )
    mean, std = trained.preprocess.statistics
    classifier = Classifier.of(holder.backbone, head)
    return GivenClassifier(
        classifier,
        network,
        (mean.tolist(), std.tolist()),
        read_calibration(folder, trained.digest, trained.metadata)[1],
        metadata.get("class_names", ()),
    )


def _from_file(path: Path, network: NetworkConfig, classes: int | None) -> GivenClassifier:
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
    found = own["class_head.weight"].shape[0] if "class_head.weight" in own else classes or 0
    classifier = build_classifier(network.to_dict(), found)
    restore(classifier, own, path)
    return GivenClassifier(classifier, network.to_dict())


def _from_timm(source: str, classes: int | None) -> GivenClassifier:
    name, _, file = source.removeprefix(TIMM).partition("@")
    if not name or not file:
        raise UserError(
            f"classifier: got {source}, expected timm:NAME@FILE, a file of its weights."
        )
    net, weights = timm_network(name, classes or 1), _read_weights(local(file))
    if classes is None:
        head = (getattr(net, "pretrained_cfg", None) or {}).get("classifier")
        last = weights.get(f"{head}.weight")
        net = timm_network(name, 1 if last is None else len(last))
    restore(net, weights, local(file))
    return GivenClassifier(Classifier.of_timm(net), {"timm": name})


def read_backbone(source: str) -> tuple[nn.Module, str]:
    r"""Returns a network of timm without its class head, and timm's name of it.

    Arguments:
        source: `timm:NAME@FILE` with a file of its weights, whose class head is left out, or
            `timm:NAME` for the weights that timm downloads.

    Raises:
        UserError: If there is no such network, or no such weights of it.
    """
    name, at, file = source.removeprefix(TIMM).partition("@")
    if not source.startswith(TIMM) or not name or (at and not file):
        raise UserError(f"backbone: got {source}, expected timm:NAME, or timm:NAME@FILE.")
    net = timm_network(name, 0)
    if file:
        weights = _read_weights(local(file))
        restore(net, {k: weights[k] for k in net.state_dict() if k in weights}, local(file))
        return net, name
    try:
        return timm.create_model(name, pretrained=True, num_classes=0).float(), name
    except Exception as error:  # of whatever fetches them
        raise UserError(
            f"backbone {source}: its weights cannot be fetched ({one_line(error, 80)}); give a file "
            f"of them, {TIMM}{name}@FILE."
        ) from error


@own_surroundings()
def fit_on_classifier(
    config: Config,
    id_data: Samples,
    reference: Samples,
    device: torch.device,
    size: int,
    folder: Path | None,
    resume: bool,
    progress: bool,
    unseen: NDArray[np.int64] | None = None,
) -> tuple[TrainedModel, Outcome, NDArray[np.int64]]:
    r"""Trains the ratio of a frozen classifier's features on a user's images.

    They are normalised as the classifier's run normalised them, or by the statistics of the ID
    images where that is not known. Their features are kept in the folder until the head is trained.

    Arguments:
        config: The configuration; `classifier` names the classifier, `head` describes the ratio.
        id_data: The ID images. Their classes are not looked at, but by the head `gaussians`.
        reference: The reference images.
        device: Where to train.
        size: The side of images.
        folder: The folder of checkpoints and the log; None writes nothing.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show progress bars.
        unseen: The fingerprints of images that must not train, if there are such.

    Returns:
        The model, how far the training came, and the fingerprints of all images, with those that
        trained the classifier where they are recorded.

    Raises:
        UserError: If the data are no images, or classifier, head and data do not go together.
    """
    assert config.head is not None
    if not (id_data.has_images and reference.has_images):
        raise UserError("classifier: takes images, got vectors.")
    given = read_classifier(config.classifier or "", config, None, size)
    classes = given.model.class_head.out_features
    sets = [ImageSet(*data[:3]) for data in (id_data, reference)]
    mean, std = given.statistics or _moments(sets[0])
    # A benchmark of two sets, of which none is a test set.
    manifest, none = Manifest.model_construct(size=size, hold_out=()), ImageSet.empty(size)
    kept = None if folder is None else folder / HEAD
    data = BenchmarkData(manifest, sets[0], none, none, sets[1], {}, {}, cache=kept)
    # Refused before the fingerprints below look at every image.
    HeadData(config, config.head, data).check(given.model)
    preprocess = Preprocess(mean, std, device)
    classifier = given.model.to(device).eval()
    marks = [fingerprints_of(data.values) for data in (id_data, reference)]
    seen = seen_in(*marks, *([] if given.seen is None else [given.seen]))
    if unseen is not None:
        check_unseen(unseen, seen, "refuse")
    sums = [hashlib.sha256(np.sort(m).astype("<i8").tobytes()).hexdigest() for m in marks]
    facts = {"checksums": dict(zip(("id", "reference"), sums, strict=True))}
    metadata = model_metadata(config, classes, preprocess, size, None, **facts)
    metadata |= {"class_names": list(given.names)} if given.names else {}
    known = {"run": metadata, "classifier": NetworkDigest.of(classifier).digest}
    id_set, reference_set = (
        replace(s, key=key_of(own.tobytes())) for s, own in zip(sets, marks, strict=True)
    )
    images = HeadData(config, config.head, replace(data, id_train=id_set, reference=reference_set))
    with held_folder(folder, resume):
        features, stopped = images.features(classifier, preprocess, progress)
        if stopped:
            steps = config.head.training.steps
            outcome = Outcome(reason=f"{stopped}, computing features", steps=steps)
            return TrainedModel(classifier, preprocess, metadata), outcome, seen
        fitted = fit_head(
            config.head,
            *features,
            device,
            *images.classes,
            mixed=images.mixed,
            folder=kept,
            metadata=known,
            resume=resume,
            progress=progress,
        )
        fitted.outcome.scores = images.named(fitted.outcome.scores)
        whole = RepresentationRatio(classifier, fitted.model, config.head.layers)
        count, rank = fitted.model.whitening.shape
        metadata["representation"] = {"network": given.network, "features": count, "rank": rank}
        if kept is not None and fitted.outcome.finished:
            remove_features(kept)
    return TrainedModel(whole, preprocess, metadata), fitted.outcome, seen


def _moments(images: ImageSet) -> tuple[list[float], list[float]]:
    r"""Returns the mean and the deviation of each channel, of pixels in [0, 1]."""
    parts = (images.images[i : i + PIECE] / 255 for i in range(0, len(images), PIECE))
    sums = np.sum([[x.sum((0, 1, 2)), (x**2).sum((0, 1, 2))] for x in parts], axis=0)
    mean, squares = sums / (len(images) * images.images.shape[1] * images.images.shape[2])
    return mean.tolist(), np.sqrt(squares - mean**2).clip(min=LEAST_STD).tolist()


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
