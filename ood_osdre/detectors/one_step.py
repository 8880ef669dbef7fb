r"""A detector in plain Python: fit, score, calibrate, predict, save.

:class:`OneStepDetector` puts the parts of this package together for data that belong to no
benchmark. It takes ID data and a reference in whatever form they come
(:mod:`ood_osdre.data.inputs`), holds a part of both out for validation, and trains with the
one training loop. Nothing it reads in :meth:`~OneStepDetector.fit` is test data; calibration
refuses inputs that it has read there.

A detector's folder holds its model and its calibration as :func:`ood_osdre.load_scorer` reads them.
"""

__all__ = ["OneStepDetector"]

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.image_files import fingerprints
from ..data.inputs import read, read_pieces
from ..data.sets import Samples
from ..errors import UserError
from ..evaluation.calibration import SplitConformal
from ..evaluation.decisions import read_calibration
from ..evaluation.evaluate import score_images
from ..evaluation.metrics import check_scores
from ..files import local
from ..options import shown
from ..training.distributed import find_device
from ..training.run import Outcome, check_finished
from ..training.surroundings import own_surroundings
from .classifiers import TIMM, fit_on_classifier, read_backbone
from .fitting import HELD_OUT, Supported, configured, prepare, train, warn_of_shuffling
from .labels import (
    as_input,
    check_like,
    check_unseen,
    class_labels,
    for_calibration,
    names_of,
    remarks_on,
)
from .scorer import Scorer, TrainedModel, read_model, write_model

NOT_FITTED = "is not fitted; call fit first"
NO_CLASSES = "has no class head; fit with labels, or on class folders"
NOT_CALIBRATED = "has no threshold; call fit, then calibrate with ID data that fit has not read"

T = TypeVar("T")

log = logging.getLogger(__name__)


class OneStepDetector:
    r"""An OOD detector on your own data.

    Scores are log-ratios of ID data to the reference in nats; **larger = more ID**. Decisions
    follow scikit-learn: **+1 is an inlier (ID), -1 an outlier (flagged as OOD)**. Data may be
    arrays, tensors, data loaders, torchvision data sets, folders or lists of images, or vectors
    (:mod:`ood_osdre.data.inputs` has the table); images are pixels that are not normalised.

    Arguments:
        config: The name of a configuration that the package ships, a YAML file, a mapping or a
            :class:`Config`; None for the one of 32x32 images that suits the device. Vectors take
            `{"network": {"kind": "mlp"}}`.
        backbone: A module from network inputs :math:`(B, *)` to features :math:`(B, F)` to be
            used instead of the configured one, with the weights it has: a timm model without
            its classifier, for instance. It is copied, so yours stays as it is. A network of timm
            may be named: `timm:NAME` with the weights that timm downloads, or `timm:NAME@FILE`.
        size: The side of the images in pixels. Files and Pillow images are brought to it; arrays
            and tensors must have it.
        device: Where to train and score; None for a GPU if there is one.
        progress: Whether to show progress bars in training.
        options: Options of the configuration, with two underscores for the dot:
            `training__steps=2000`. With a `head` and a `classifier`, whose features it is put on.

    Raises:
        UserError: If an option is unknown or out of range, the backbone is no module, or the device
            is not there.

    Example:
        >>> from ood_osdre.data import load_digits_benchmark
        >>> data = load_digits_benchmark()
        >>> quick = {"training__steps": 20, "training__warmup": 2, "data__val_limit": 50}
        >>> detector = OneStepDetector("digits", progress=False, training__batch_size=16, **quick)
        >>> scores = detector.fit(data.id_train, data.reference).score(data.id_test)
        >>> bool(scores.mean() > detector.score(data.far["flower"]).mean())
        True
        >>> decisions = detector.calibrate(data.id_test, alpha=0.1).predict(data.far["flower"])
        >>> decisions.shape
        (475,)
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        backbone: nn.Module | str | None = None,
        size: int = 32,
        device: torch.device | str | None = None,
        progress: bool = True,
        **options: object,
    ) -> None:
        self.timm: dict[str, str] = {}
        if isinstance(backbone, str) and backbone.startswith(TIMM):
            backbone, self.timm["timm"] = read_backbone(backbone)
        if not isinstance(backbone, nn.Module | None):
            raise UserError(
                f"backbone: got {shown(backbone)}, expected an instance of nn.Module, or timm:NAME."
            )
        self.device = find_device(device)
        self.config = configured(config, options, gpu=self.device.type == "cuda")
        head = self.config.head and self.config.classifier  # whose estimator is its own
        given = {"size": size, "estimator": "one_step" if head else self.config.estimator}
        self.size = Supported.of(given, type(self).__name__).size
        self.backbone, self.progress = backbone, progress
        # What is known of the sets of fit: how many items they have, and what was warned of.
        self.outcome, self.counts, self.remarks = Outcome(), dict[str, int](), list[str]()
        self.conformal: SplitConformal | None = None
        self._trained: TrainedModel | None = None
        self._scorer: Scorer | None = None
        self._seen: NDArray[Any] | None = None

    def __repr__(self) -> str:
        state = "fitted" if self.is_fitted else "not fitted"
        if self.conformal is not None:
            state = f"calibrated at alpha={self.conformal.alpha:g}"
        return f"{type(self).__name__}({self.config.estimator}, size={self.size}, {state})"

    @own_surroundings()
    def fit(
        self,
        id_data: object,
        reference: object,
        labels: ArrayLike | Tensor | None = None,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        alpha: float | None = None,
        calibration: object = None,
    ) -> "OneStepDetector":
        r"""Trains on ID data against a reference.

        A tenth of each, or ten class folders of a reference that has twenty, is held out for
        validation, by which `evaluation.select` may choose the step.

        Arguments:
            id_data: ID images or vectors :math:`p_1`. With labels, which data sets, loaders of
                `(image, label)` and folders of class folders have, a class head is trained too
                if the configuration wants one.
            reference: The images or vectors :math:`p_0` that ID data are told apart from.
            labels: The ID classes, whole numbers from 0, with shape :math:`(N)`; None for those of
                `id_data`.
            folder: A folder for checkpoints and the log; None writes nothing.
            resume: Whether to go on from the folder's checkpoint, if there is one.
            alpha: If given, the rate of a :meth:`calibrate` that follows.
            calibration: The ID data for it; None for a tenth of `id_data`, held out first.

        Returns:
            The detector itself.

        Raises:
            UserError: If data cannot be used, the loss is not finite, or a signal stopped it.
        """
        given = read(id_data, self.size, "ID data", labelled=labels is None)
        if labels is not None:
            given = given._replace(labels=class_labels(labels), unlabelled="")
        seed = self.config.training.seed
        given, held, own = for_calibration(given, calibration, alpha, self.size, HELD_OUT, seed)
        against = read(reference, self.size, "reference", labelled=False)
        self.counts = {"ID": len(given.values), "reference": len(against.values)}
        self.counts |= {} if held is None else {"calibration": len(held.values)}
        self.remarks = remarks_on(id_data, reference)
        target = None if folder is None else local(folder)
        if self.config.head is not None:
            shared = self.device, self.size, target, resume, self.progress, own
            trained, self.outcome, seen = fit_on_classifier(self.config, given, against, *shared)
        else:
            shape = self.device, self.size, self.backbone, self.progress
            data = prepare(self.config, given, against, *shape)
            if own is not None:
                check_unseen(own, data.seen, "refuse")
            # The trainer writes the model, which decides nothing before it is calibrated.
            known = {"calibrated": held is not None, **self.timm}
            data.metadata.update(known, **names_of(given, data.metadata["classes"]))
            fitted = train(data, self.backbone, self.device, target, resume, self.progress)
            trained = TrainedModel(fitted.model, data.preprocess, data.metadata)
            self.outcome, seen = fitted.outcome, data.seen
        check_finished(self.outcome, self.outcome.steps, target)
        self._take(trained, seen)
        self.conformal = None
        if held is not None and alpha is not None:
            self.calibrate(as_input(held), alpha, "warn" if own is None else "refuse")
        return self

    @property
    def is_fitted(self) -> bool:
        r"""Whether there is a trained model."""
        return self._scorer is not None

    @property
    def scorer(self) -> Scorer:
        r"""The trained model, folded, with its preprocessing."""
        return _required(self._scorer, NOT_FITTED)

    def score(self, x: object) -> NDArray[np.float32]:
        r"""Returns the log-ratios in nats (larger = more ID), with shape :math:`(N)`, in one pass.

        Arguments:
            x: The images or vectors, :math:`N` of them, or one image. Their labels are not looked
                at, and their order is kept: of a folder that of its sorted paths, of a data loader
                the one that it yields them in.

        Raises:
            UserError: If there are none, they are not what the detector was fitted on, or a
                score is NaN or infinite.
        """
        return self.score_named(x)[1]

    @own_surroundings()
    def score_named(self, x: object) -> tuple[list[str], NDArray[np.float32]]:
        r"""Returns a name for each input, its path, line of a table or number, beside :meth:`score`."""
        warn_of_shuffling(x, "input")
        scored = [(scores, piece.names) for scores, piece in self._scored(x, "input")]
        names = [name for _, some in scored for name in some]
        return names, np.concatenate([scores for scores, _ in scored])

    @own_surroundings()
    def calibrate(
        self, id_data: object, alpha: float = 0.05, seen: Literal["refuse", "warn"] = "refuse"
    ) -> "OneStepDetector":
        r"""Sets the threshold at which ID inputs are flagged at a rate of at most `alpha`.

        The rate is an expectation over calibration sets; :mod:`ood_osdre.evaluation.calibration`
        says what is guaranteed and what is not.

        Arguments:
            id_data: ID data that neither trained nor selected the model, :math:`n` of them distinct.
            alpha: The rate :math:`\alpha`. Below :math:`1 / (n + 1)` nothing is ever flagged,
                which is logged as a warning.
            seen: What to do about inputs that :meth:`fit` has read, found by their content: the
                guarantee is void with them. `"warn"` is for data in which items repeat by nature.

        Returns:
            The detector itself.

        Raises:
            UserError: If inputs were seen, or as :meth:`score`.
        """
        if seen not in ("refuse", "warn"):
            raise UserError(f"seen: got {shown(seen)}, expected 'refuse' or 'warn'.")
        pieces = self._scored(id_data, "calibration data")
        scored = [(scores, fingerprints(np.asarray(piece.values))) for scores, piece in pieces]
        scores, marks = (np.concatenate(parts) for parts in zip(*scored, strict=True))
        check_unseen(marks, self._seen, seen)
        self.conformal = SplitConformal(scores, alpha, marks)
        return self

    def predict(self, x: object) -> NDArray[np.int64]:
        r"""Returns +1 for inliers (ID), -1 for outliers (flagged as OOD), with shape :math:`(N)`.

        Arguments and errors are those of :meth:`score`; :meth:`calibrate` has to come first.
        """
        return np.where(_required(self.conformal, NOT_CALIBRATED).flagged(self.score(x)), -1, 1)

    def pvalue(self, x: object) -> NDArray[np.float64]:
        r"""Returns the conformal p-values of the hypothesis that an input is ID, :math:`(N)`.

        :meth:`predict`, whose arguments and errors these are, flags those of at most `alpha`.
        """
        return _required(self.conformal, NOT_CALIBRATED).pvalue(self.score(x))

    @own_surroundings()
    def classify(self, x: object) -> NDArray[np.int64]:
        r"""Returns the predicted ID classes, with shape :math:`(N)`; `scorer` has their names.

        Arguments and errors are those of :meth:`score`; there has to be a class head.
        """
        found = (classes for _, classes, _ in self._evaluated(x, "input"))
        return np.concatenate([_required(classes, NO_CLASSES) for classes in found])

    def save(self, folder: str | os.PathLike[str]) -> None:
        r"""Writes the detector, as safetensors, into a folder, which is created if needed.

        The folder can be loaded with :func:`ood_osdre.load_scorer`, too.
        """
        trained = _required(self._trained, NOT_FITTED)
        write_model(local(folder), trained, self.conformal, self._seen)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        backbone: nn.Module | None = None,
        device: torch.device | str | None = None,
    ) -> "OneStepDetector":
        r"""Loads a detector, or the model of a run folder, which is then to be calibrated.

        Arguments:
            folder: The folder.
            backbone: A module of the architecture that was given to fit, if one was.
            device: Where to score; None for a GPU if there is one.

        Returns:
            The detector.

        Raises:
            UserError: If the folder holds none, it is damaged, or its calibration belongs to
                another model.
        """
        trained = read_model(source := local(folder), find_device(device), backbone)
        config, size = (trained.metadata[key] for key in ("config", "size"))
        detector = cls(config, backbone=backbone, size=size, device=device)
        detector.conformal, seen = read_calibration(source, trained.digest, trained.metadata)
        detector._take(trained, seen)
        return detector

    def _take(self, trained: TrainedModel, seen: NDArray[Any] | None) -> None:
        self._trained, self._scorer, self._seen = trained, Scorer.of(trained), seen

    def _scored(self, data: object, what: str) -> Iterator[tuple[NDArray[np.float32], Samples]]:
        r"""Yields the scores and the items of data, piece by piece; refuses data without items."""
        yield from ((scores, piece) for scores, _, piece in self._evaluated(data, what))

    def _evaluated(
        self, data: object, what: str
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64] | None, Samples]]:
        scorer, count = self.scorer, 0
        for piece in read_pieces(data, self.size, what):
            check_like(what, piece, scorer.shape, scorer.columns)
            scores, classes = score_images(
                scorer.ratio, piece.values, scorer.preprocess, self.config.evaluation.batch_size
            )
            check_scores(what, scores, piece.names)
            count += len(scores)
            yield scores, classes, piece
        _required(count or None, f"{what}: empty, expected at least one image or vector")


def _required(value: T | None, problem: str) -> T:
    r"""Returns a value that is not None; without it, raises an error of what is missing."""
    if value is None:
        raise UserError(f"OneStepDetector: {problem}.")
    return value
