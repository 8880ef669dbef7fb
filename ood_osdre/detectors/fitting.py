r"""From ID data and a reference of a user's own to what the training loop needs.

What :func:`ood_osdre.evaluation.scorer.train_run` takes from a benchmark, a :class:`Problem` makes out
of the data: the statistics of the ID data, and a part of both sets that is held out to select
the model. Images are augmented and validated as those of a benchmark are; vectors are neither
augmented nor compared with sets made by a program, so their validation is the held-out reference
alone.
"""

__all__ = ["Problem"]

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..config import Config
from ..data import ImageSet, hold_out_reference
from ..data.inputs import Samples
from ..data.sets import count_shared, fingerprints
from ..data.standardise import Preprocess, Standardise
from ..errors import UserError
from ..evaluation.evaluate import Validation, score_images
from ..evaluation.metrics import ood_metrics
from ..models.build import build_untrained
from ..models.ratio import RatioModel
from ..objectives.build import prepare_objective
from ..training.batches import Batches, ImageBatches, VectorBatches
from ..training.fit import Fit, fit
from ..training.trainer import Validate

# The share of ID data, and of a reference without classes, that selects the model.
HELD_OUT = 0.1
# A channel or coordinate that never varies is only centred.
LEAST_STD = 1e-3
# Options that transform images.
IMAGE_OPTIONS = ("broaden", "mixture")

log = logging.getLogger(__name__)


class Problem:
    r"""A ratio to be learnt: ID data against a reference.

    Arguments:
        config: The configuration.
        id_data: The ID data, with labels of all or of none.
        reference: The reference, of the same shape.
        device: Where to train.

    Raises:
        UserError: If the sets are too small, of different shapes, or labelled in part.
    """

    def __init__(
        self, config: Config, id_data: Samples, reference: Samples, device: torch.device
    ) -> None:
        if id_data.values.shape[1:] != reference.values.shape[1:]:
            raise UserError(
                f"reference: items of shape {reference.values.shape[1:]}, expected "
                f"{id_data.values.shape[1:]} as in the ID data."
            )
        if len(id_data.values) < 2 or len(reference.values) < 2:
            raise UserError(
                f"fit: got {len(id_data.values)} ID and {len(reference.values)} reference items, "
                "expected at least 2 of each: some train, some select."
            )
        self.classes = _classes(id_data)
        if not self.classes:
            # Nothing could train a class head.
            options = config.objective.replace(class_weight=0.0, outlier_exposure=0.0)
            config = config.replace(objective=options)
        self.config, self.device = config, device
        self.dim = None if id_data.has_images else id_data.values.shape[1]
        self.seen, checksums = _inspect(id_data, reference)

        seed = config.training.seed
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(id_data.values))
        held = max(1, round(HELD_OUT * len(order)))
        self._id_val, self._id_train = (
            _pick(id_data, part) for part in (order[:held], order[held:])
        )
        images = id_data.has_images
        self._reference, self._near = _split(reference, seed) if images else _halve(reference, rng)
        axes = (0, 1, 2) if images else (0,)
        scale = 255.0 if images else 1.0
        self.mean = self._id_train.values.mean(axes, dtype=np.float64) / scale
        std = self._id_train.values.std(axes, dtype=np.float64) / scale
        self.std = std.clip(min=LEAST_STD)
        kind = Preprocess if images else Standardise
        self.preprocess = kind(self.mean.tolist(), self.std.tolist(), device)
        self.metadata: dict[str, Any] = {
            "config": config.to_dict(),
            "classes": self.classes,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "dim": self.dim,
            "reference": None,
            "checksums": checksums,
        }

    def batches(self) -> Batches:
        r"""Returns the training batches."""
        config, size = self.config, self.config.training.batch_size
        if not isinstance(self.preprocess, Standardise):
            return ImageBatches(
                _images(self._id_train),
                _images(self._reference),
                config.data,
                self.preprocess,
                size,
                config.training.seed,
            )
        for name in IMAGE_OPTIONS:
            if getattr(config.data, name):
                raise UserError(f"data.{name}: transforms images, expected 0 for vectors.")
        return VectorBatches(
            torch.as_tensor(self._id_train.values),
            torch.as_tensor(self._id_train.labels),
            torch.as_tensor(self._reference.values),
            self.preprocess,
            size,
            config.training.seed,
        )

    def fit(
        self,
        backbone: nn.Module | None,
        size: int,
        folder: Path | None,
        resume: bool = False,
        progress: bool = True,
    ) -> tuple[Fit, dict[str, Any]]:
        r"""Trains a new ratio.

        Arguments:
            backbone: As for :func:`~ood_osdre.models.build.build_untrained`.
            size: The side of images.
            folder: A folder for checkpoints and the log; None writes nothing.
            resume: Whether to go on from the folder's checkpoint, if there is one.
            progress: Whether to show a progress bar.

        Returns:
            The fitted model, and what is stored with it.
        """
        config = self.config
        torch.manual_seed(config.training.seed)
        ratio = build_untrained(config, self.classes, self.dim, backbone, size).to(self.device)
        own = None if backbone is None else type(backbone).__qualname__
        metadata = self.metadata | {"size": size, "backbone": own}
        fitted = fit(
            ratio,
            partial(prepare_objective, config),
            self.batches(),
            config.training,
            self.validation(),
            select=config.evaluation.select,
            folder=folder,
            metadata=metadata,
            resume=resume,
            progress=progress,
        )
        return fitted, metadata

    def validation(self) -> Validate:
        r"""Returns what selects the model: ID data held out against reference held out."""
        options = self.config.evaluation
        if self.dim is None:
            return Validation(
                _images(self._id_val),
                _images(self._near),
                self.preprocess,
                options.batch_size,
                self.config.data.val_limit,
            )

        def validate(ratio: RatioModel) -> Mapping[str, float]:
            id_scores, near = (
                score_images(ratio, chunk.values, self.preprocess, options.batch_size)[0]
                for chunk in (self._id_val, self._near)
            )
            auroc = ood_metrics(id_scores, near).auroc
            return {"val_near": auroc, "val_auroc": auroc}

        return validate


def _classes(id_data: Samples) -> int:
    r"""Returns the number of ID classes, 0 without labels."""
    labels, count = id_data.labels, len(id_data.values)
    if labels.shape != (count,):
        raise UserError(f"ID data: {count} items but labels of shape {labels.shape}.")
    unlabelled = int((labels < 0).sum())
    if unlabelled == count:
        return 0
    if unlabelled:
        raise UserError(
            f"ID data: {unlabelled} of {count} labels are negative, expected class indices from 0 "
            "for all, or none."
        )
    if labels.max() >= count:
        raise UserError(
            f"ID data: a label is {labels.max()} among {count} items, expected class indices "
            "from 0."
        )
    return int(labels.max()) + 1


def _inspect(id_data: Samples, reference: Samples) -> tuple[NDArray[np.int64], dict[str, str]]:
    r"""Returns the fingerprints and checksums of both sets; warns if they share items."""
    marks = [fingerprints(chunk.values) for chunk in (id_data, reference)]
    if shared := count_shared(marks[1], marks[0]):
        log.warning(
            "%d of %d reference items are ID items too: the ratio is pulled to 1 there",
            shared,
            len(marks[1]),
        )
    sums = [hashlib.sha256(np.sort(m).astype("<i8").tobytes()).hexdigest() for m in marks]
    # Copies in single precision are the same items.
    marks += [
        fingerprints(chunk.values.astype(np.float32))
        for chunk in (id_data, reference)
        if chunk.values.dtype == np.float64
    ]
    return np.unique(np.concatenate(marks)), dict(zip(("id", "reference"), sums, strict=True))


def _pick(chunk: Samples, indices: NDArray[np.intp]) -> Samples:
    indices = np.sort(indices)
    return Samples(
        chunk.values[indices], chunk.labels[indices], [chunk.names[int(i)] for i in indices]
    )


def _images(chunk: Samples) -> ImageSet:
    return ImageSet(chunk.values, chunk.labels, chunk.names)


def _split(reference: Samples, seed: int) -> tuple[Samples, Samples]:
    r"""Holds classes of reference images out, or a part of them."""
    count = len(reference.values)
    fraction = max(HELD_OUT, 1 / count)
    parts = hold_out_reference(_images(reference), fraction=fraction, seed=seed)
    train, near = (Samples(part.images, part.labels, part.names) for part in parts)
    return train, near


def _halve(reference: Samples, rng: np.random.Generator) -> tuple[Samples, Samples]:
    order = rng.permutation(len(reference.values))
    held = max(1, round(HELD_OUT * len(order)))
    return _pick(reference, order[held:]), _pick(reference, order[:held])
