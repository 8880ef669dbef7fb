r"""From a user's configuration, ID data and reference to what the training loop takes.

:func:`prepare` computes the statistics of the ID data, and holds a part of both sets out for
validation. Images are augmented and validated as those of a benchmark are. Vectors are not
augmented, and no synthetic validation OOD is made of them: they have the held-out reference alone.
"""

__all__ = [
    "Supported",
    "TrainingData",
    "configured",
    "prepare",
    "train",
    "warn_of_shuffling",
]

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from ..config import Config, load_config
from ..data import ImageSet, hold_out_reference
from ..data.image_files import Survey, fingerprints, survey
from ..data.sets import Samples, count_shared, cut_apart, draws_of
from ..data.transforms import Preprocess, Standardise, Standardiser
from ..errors import UserError
from ..evaluation.evaluate import FEW, Validation, score_images
from ..evaluation.metrics import ood_metrics
from ..models import RatioModel, describe_backbone, unwrapped
from ..options import Count, Options, as_keywords
from ..training.batches import Batches, ImageBatches, VectorBatches
from ..training.build import build_ratio, prepare_objective
from ..training.checkpoint import model_metadata
from ..training.fit import Fit, fit
from ..training.run import held_folder
from ..training.trainer import Validate
from .labels import check_columns, count_classes, rows_of, seen_in

# The share of ID data, and of a reference without classes, that validates.
HELD_OUT = 0.1
# The deviation of a channel that never varies; below this share of its size, that of a coordinate
# is rounding: that of a mean of millions of doubles is a tenth of it.
LEAST_STD, ROUNDING = 1e-3, 1e-14
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)

log = logging.getLogger(__name__)


class Supported(Options):
    r"""The sizes and estimators that a detector can have."""

    size: Count
    estimator: Literal["one_step", "direct"]


class TrainingData(NamedTuple):
    r"""ID data and a reference, ready to be trained on.

    Attributes:
        config: The configuration, without the terms of a class head if there are no labels.
        batches: The training batches.
        validate: Compares held-out ID data with held-out reference.
        preprocess: The preprocessing, with the statistics of the ID training data.
        metadata: What is stored with the model, to rebuild it.
        seen: The fingerprints of all items of both sets.
    """

    config: Config
    batches: Batches
    validate: Validate
    preprocess: Standardiser
    metadata: dict[str, Any]
    seen: NDArray[np.int64]


def prepare(
    config: Config,
    id_data: Samples,
    reference: Samples,
    device: torch.device,
    size: int,
    backbone: nn.Module | None = None,
    progress: bool = False,
) -> TrainingData:
    r"""Prepares ID data and a reference for training.

    Arguments:
        config: The configuration.
        id_data: The ID data, with labels of all or of none.
        reference: The reference, of the same shape.
        device: Where to train.
        size: The side of images in pixels, to be stored.
        backbone: The user's backbone, if there is one, whose name is stored.
        progress: Whether to show a progress bar where files are looked at.

    Raises:
        UserError: If the sets are too small, of different shapes, or labelled in part.
    """
    check_columns("reference", reference.columns, id_data.columns)
    id_shape, reference_shape = id_data.values.shape, reference.values.shape
    if id_shape[1:] != reference_shape[1:] or min(id_shape[0], reference_shape[0]) < 2:
        raise UserError(
            f"fit: got ID data of shape {id_shape} and a reference of shape {reference_shape}, "
            "expected items of one shape, at least 2 of each: some train, some validate."
        )
    for key, default in (("hold_out_id", "0"), ("hold_out_reference", "null")):
        if value := getattr(config.data, key):
            raise UserError(
                f"data.{key}: got {value}, expected {default}: it is for a benchmark's runs; a fit "
                "holds a tenth out."
            )
    classes = count_classes(id_data)
    if not classes:
        if config.objective.class_weight:
            reason = id_data.unlabelled or "no item has a class"
            log.warning("fit: no class head is trained; ID data: %s", reason)
        objective = config.objective.replace(class_weight=0.0, outlier_exposure=0.0)
        config = config.replace(objective=objective)
    make: Callable[..., Parts]
    if id_data.has_images:
        known = [survey(v, f"{n} images", progress) for n, v in _sides(id_data, reference)]
        own, make = (known[0].marks, known[1].marks), partial(_image_batches, known[0])
    else:
        vectors = [np.asarray(values) for _, values in _sides(id_data, reference)]
        own, make = (fingerprints(vectors[0]), fingerprints(vectors[1])), _vector_batches
    seen, checksums = _compared(id_data, reference, own)
    batches, validate, preprocess = make(config, id_data, reference, device, *own)
    dim = None if id_data.has_images else id_shape[1]
    name = None if backbone is None else describe_backbone(unwrapped(backbone))
    facts = {"dim": dim, "checksums": checksums, "backbone": name}
    metadata = model_metadata(config, classes, preprocess, size, None, **facts)
    return TrainingData(config, batches, validate, preprocess, metadata, seen)


def train(
    data: TrainingData,
    backbone: nn.Module | None,
    device: torch.device,
    folder: Path | None,
    resume: bool,
    progress: bool,
) -> Fit:
    r"""Trains on prepared data; the arguments are those of the detector."""
    config, metadata = data.config, data.metadata
    with held_folder(folder, resume):
        torch.manual_seed(config.training.seed)
        classes, dim, size = (metadata[name] for name in ("classes", "dim", "size"))
        ratio = build_ratio(config, classes, dim, backbone, size)
        return fit(
            ratio.to(device),
            partial(prepare_objective, config),
            data.batches,
            config.training,
            data.validate,
            select=config.evaluation.selected_by,
            folder=folder,
            metadata=metadata,
            resume=resume,
            progress=progress,
        )


Parts = tuple[Batches, Validate, Standardiser]
Marks = NDArray[np.int64]


def _image_batches(
    known: Survey,
    config: Config,
    id_data: Samples,
    reference: Samples,
    device: torch.device,
    marks: Marks,
    others_marks: Marks,
) -> Parts:
    training, images = config.training, ImageSet(*id_data[:3])
    rows, held = _hold_out(marks, np.random.default_rng(training.seed))
    id_train, id_val = images.subset(rows), images.subset(held)
    fraction = max(HELD_OUT, 1 / len(reference.values))
    others, near = hold_out_reference(
        ImageSet(*reference[:3]), fraction=fraction, seed=training.seed, marks=others_marks
    )
    mean, std = (value / 255 for value in known.statistics(rows))
    preprocess = Preprocess(mean.tolist(), std.clip(min=LEAST_STD).tolist(), device)
    size, limit = config.evaluation.batch_size, config.data.val_limit
    return (
        ImageBatches(
            id_train, others, config.data, preprocess, training.batch_size, training.seed
        ),
        Validation(id_val, near, preprocess, size, limit),
        preprocess,
    )


def _vector_batches(
    config: Config,
    id_data: Samples,
    reference: Samples,
    device: torch.device,
    marks: Marks,
    others_marks: Marks,
) -> Parts:
    for name in ("broaden", "mixture"):
        if getattr(config.data, name):
            raise UserError(
                f"data.{name}: transforms images, expected 0 for vectors; they take the "
                "configuration {'network': {'kind': 'mlp'}}."
            )
    training, rng = config.training, np.random.default_rng(config.training.seed)
    x_1, x_0 = (np.asarray(values) for _, values in _sides(id_data, reference))
    train, val = _hold_out(marks, rng)
    reference_train, reference_val = _hold_out(others_marks, rng)
    standardise = Standardise(*_statistics(x_1[train]), device)
    batches = VectorBatches(
        torch.as_tensor(x_1[train]),
        torch.as_tensor(id_data.labels[train]),
        torch.as_tensor(x_0[reference_train]),
        standardise,
        training.batch_size,
        training.seed,
    )
    held = rows_of(id_data, val), rows_of(reference, reference_val)
    validate = _HeldOut(*held, standardise, config.evaluation.batch_size)
    return batches, validate, standardise


@dataclass
class _HeldOut:
    r"""The validation of vectors: held-out ID data, :math:`(N, d)`, against held-out reference."""

    id_data: Samples
    reference: Samples
    standardise: Standardise
    batch_size: int

    def __call__(self, ratio: RatioModel) -> dict[str, float]:
        score = partial(score_images, preprocess=self.standardise, batch_size=self.batch_size)
        sides = {"id": self.id_data, "near": self.reference}
        self.scores = {k: (score(ratio, x.values)[0], x.labels, x.names) for k, x in sides.items()}
        found = self.scores["id"][0], self.scores["near"][0]
        return dict.fromkeys(("val_near", "val_auroc"), ood_metrics(*found).auroc)

    def brief(self, ratio: RatioModel) -> "_HeldOut":
        sides = (self.id_data, self.reference)
        id_data, reference = (rows_of(x, np.arange(len(x.values))[:FEW]) for x in sides)
        return replace(self, id_data=id_data, reference=reference)


def _hold_out(marks: Marks, rng: np.random.Generator) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    r"""Returns the rows that train and the rows that validate, both in order, copies in one part."""
    count = len(marks)
    cut = max(1, round(HELD_OUT * count))
    held, rest = cut_apart(rng.permutation(count), draws_of(marks), [cut])
    if not len(rest):
        raise UserError(f"fit: all {count} items of a set are copies of one, expected at least 2.")
    return np.sort(rest), np.sort(held)


def _statistics(values: NDArray[Any]) -> tuple[list[float], list[float]]:
    r"""Returns means and deviations of vectors, which may be of any unit."""
    mean, std = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
    return mean.tolist(), np.where(std > ROUNDING * np.abs(mean), std, LEAST_STD).tolist()


def _sides(id_data: Samples, reference: Samples) -> Iterator[tuple[str, Any]]:
    yield from (("ID", id_data.values), ("reference", reference.values))


def _compared(
    id_data: Samples, reference: Samples, own: tuple[Marks, Marks]
) -> tuple[Marks, dict[str, str]]:
    r"""Returns the fingerprints of both sets together, and their checksums.

    It warns of items that both share, and of sets with copies.
    """
    for (name, _), found in zip(_sides(id_data, reference), own, strict=True):
        if copies := len(found) - np.unique(draws_of(found)).size:
            log.warning("%d of %d %s items are copies, kept together", copies, len(found), name)
    if shared := count_shared(own[1], own[0]):
        message = "%d of %d reference items are ID items too: the ratio is pulled to 1 there"
        log.warning(message, shared, len(own[1]))
    sums = [hashlib.sha256(np.sort(m).astype("<i8").tobytes()).hexdigest() for m in own]
    # Copies in single precision are the same items.
    doubles = [v for _, v in _sides(id_data, reference) if v.dtype == np.float64]
    marks = [*own, *(fingerprints(v.astype(np.float32)) for v in doubles)]
    return seen_in(*marks), dict(zip(("id", "reference"), sums, strict=True))


def warn_of_shuffling(data: object, what: str) -> None:
    r"""Warns if data are a loader that shuffles: results are in the order that it yields."""
    if isinstance(getattr(data, "sampler", None), SHUFFLING):
        log.warning("%s: the loader shuffles, and results are in the order that it yields", what)


def configured(
    config: str | Path | Mapping[str, Any] | Config | None,
    options: Mapping[str, object],
    gpu: bool,
) -> Config:
    r"""Returns the configuration with options, `__` standing for the dot of a key.

    Arguments:
        config: Its name or file, a mapping, or the configuration itself; None for the one of
            32x32 images that suits the device.
        options: The options by name.
        gpu: Whether there is a GPU.

    Raises:
        UserError: If it is none, or an option is unknown or out of range.
    """
    if config is None:
        config = "cifar10" if gpu else "cifar10_cpu"
    source = str(config) if isinstance(config, str | Path) else "config"
    values: Any = load_config(config) if isinstance(config, str | Path) else config
    values = values.to_dict() if isinstance(values, Config) else values
    if isinstance(values, Mapping):
        values = {**values, **{key.replace("__", "."): value for key, value in options.items()}}
    try:
        found = Config.from_mapping(values, source)
    except UserError as error:
        raise (as_keywords(error) if options else error) from None
    if found.evaluation.is_sum:
        raise UserError(
            f"{source}: evaluation.parts and evaluation.together are for runs of the command; a "
            "detector's score is a log-ratio in nats. load_scorer(folder) reads a run that sums."
        )
    return found
