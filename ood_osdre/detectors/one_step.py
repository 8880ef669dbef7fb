r"""A detector in plain Python: fit, score, calibrate, predict, save.

:class:`OneStepDetector` puts the parts of this package together for data that belong to no
benchmark: it takes ID data and a reference in whatever form they come
(:mod:`ood_osdre.data.inputs`), computes the statistics of the ID data, holds a part of both
sets out to select the model, and trains with the one training loop. Nothing it reads in
:meth:`~OneStepDetector.fit` is test data; calibration refuses inputs that it has read there.

What a user passes to a detector beside the data: a configuration, options and labels.
"""

__all__ = ["OneStepDetector", "class_labels", "configured"]

import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from ..config import Config, load_config
from ..data.inputs import Samples, read, read_pieces
from ..data.sets import count_shared, fingerprints
from ..errors import UserError
from ..evaluation.calibration import SplitConformal
from ..evaluation.evaluate import score_images
from ..evaluation.metrics import check_scores
from ..evaluation.scorer import Scorer, TrainedModel, read_model
from ..training.distributed import find_device
from ..training.trainer import Outcome
from .files import held_folder, read_calibration, write_detector
from .fitting import Problem

ESTIMATORS = ("one_step", "direct")

log = logging.getLogger(__name__)


class OneStepDetector:
    r"""An OOD detector on your own data.

    Scores are log-ratios of ID data to the reference in nats; **larger = more ID**. Decisions
    follow scikit-learn: **+1 is an inlier (ID), -1 an outlier (flagged as OOD)**.

    Data may be arrays, tensors, data loaders, torchvision data sets, folders of images, list
    files (:mod:`ood_osdre.data.inputs` has the table), or vectors; images are pixels that are
    not normalised.

    Arguments:
        config: The name of a configuration that the package ships, a YAML file, a mapping or a
            :class:`Config`; None for the one of 32x32 images that suits the device. Vectors take
            `{"network": {"kind": "mlp"}}`.
        backbone: A module from network inputs :math:`(B, *)` to features :math:`(B, F)` to be
            used instead of the configured one, with the weights it has: a timm model without
            its classifier, for instance. It is copied, so yours stays as it is.
        size: The side of the images in pixels. Files and Pillow images are brought to it; arrays
            and tensors must have it.
        device: Where to train and score; None for a GPU if there is one.
        progress: Whether to show progress bars in training.
        options: Options of the configuration, with two underscores for the dot:
            `training__steps=2000`.

    Raises:
        TypeError: If the backbone is no module.
        UserError: If an option is unknown or out of range, or the device is not there.

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
        backbone: nn.Module | None = None,
        size: int = 32,
        device: torch.device | str | None = None,
        progress: bool = True,
        **options: object,
    ) -> None:
        if backbone is not None and not isinstance(backbone, nn.Module):
            found = backbone.__name__ if isinstance(backbone, type) else type(backbone).__name__
            raise TypeError(f"'backbone' should be a torch.nn.Module, got {found}.")
        if type(size) is not int or size < 1:
            raise UserError(f"size: got {size!r}, expected a number of pixels, an integer >= 1.")
        self.device = find_device(device)
        self.config = configured(config, options, gpu=self.device.type == "cuda")
        if self.config.estimator not in ESTIMATORS:
            raise UserError(
                f"estimator: got {self.config.estimator}, a detector needs one of "
                f"{' and '.join(ESTIMATORS)}."
            )
        if backbone is not None and self.config.estimator != "one_step":
            raise UserError("estimator: a backbone of your own needs one_step.")
        self.backbone, self.size, self.progress = backbone, size, progress
        self.outcome = Outcome()
        self.conformal: SplitConformal | None = None
        self._trained: TrainedModel | None = None
        self._scorer: Scorer | None = None
        self._seen: NDArray[Any] | None = None

    def __repr__(self) -> str:
        state = "fitted" if self.is_fitted else "not fitted"
        if self.conformal is not None:
            state = f"calibrated at alpha={self.conformal.alpha:g}"
        return f"{type(self).__name__}({self.config.estimator}, size={self.size}, {state})"

    def fit(
        self,
        id_data: object,
        reference: object,
        labels: ArrayLike | Tensor | None = None,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> "OneStepDetector":
        r"""Trains on ID data against a reference.

        A tenth of each, or ten class folders of a reference that has twenty, is held out to
        select the model.

        Arguments:
            id_data: ID images or vectors :math:`p_1`. With labels, which data sets, loaders of
                `(image, label)` and folders of class folders have, a class head is trained too
                if the configuration wants one.
            reference: The images or vectors :math:`p_0` that ID data are told apart from.
            labels: The ID classes, whole numbers from 0, with shape :math:`(N)`; None for those of
                `id_data`.
            folder: A folder for checkpoints and the log; None writes nothing.
            resume: Whether to go on from the folder's checkpoint, if there is one.

        Returns:
            The detector itself.

        Raises:
            UserError: If the data cannot be used, the loss is not finite, or a signal stopped
                the training.
        """
        given = read(id_data, self.size, "ID data")
        if labels is not None:
            given = given._replace(labels=class_labels(labels))
        problem = Problem(self.config, given, read(reference, self.size, "reference"), self.device)
        target = None if folder is None else Path(folder)
        with nullcontext() if target is None else held_folder(target, resume):
            fitted, metadata = problem.fit(self.backbone, self.size, target, resume, self.progress)
        self.outcome = fitted.outcome
        if not self.outcome.finished:
            where = "" if folder is None else f"; saved in {folder}, go on with resume=True"
            raise UserError(
                f"fit: stopped ({self.outcome.reason}) at step {self.outcome.step} of "
                f"{self.config.training.steps}{where}."
            )
        self._take(TrainedModel(fitted.model, problem.preprocess, metadata), problem.seen)
        self.conformal = None
        return self

    @property
    def is_fitted(self) -> bool:
        r"""Whether there is a trained model."""
        return self._scorer is not None

    @property
    def scorer(self) -> Scorer:
        r"""The trained model, folded, with its preprocessing."""
        return self._get_scorer("scorer")

    def score(self, x: object) -> NDArray[np.float32]:
        r"""Scores inputs, one forward pass each.

        Arguments:
            x: The images or vectors, :math:`N` of them.

        Returns:
            The log-ratios in nats, larger = more ID, with shape :math:`(N)`.

        Raises:
            UserError: If there are none, they are not what the detector was fitted on, or a
                score is NaN or infinite.
        """
        scorer = self._get_scorer("score")
        parts = [self._score(scorer, chunk) for chunk in read_pieces(x, self.size, "input")]
        if not parts:
            raise UserError("input: empty, expected at least one image or vector.")
        return np.concatenate(parts)

    def calibrate(
        self, id_data: object, alpha: float = 0.05, seen: Literal["refuse", "warn"] = "refuse"
    ) -> "OneStepDetector":
        r"""Sets the threshold at which ID inputs are flagged at a rate of at most `alpha`.

        The rate is an expectation over calibration sets; see :mod:`ood_osdre.evaluation.calibration` for what
        is guaranteed and what is not.

        Arguments:
            id_data: ID data that neither trained nor selected the model, :math:`n` of them.
            alpha: The rate :math:`\alpha`. Below :math:`1 / (n + 1)` nothing is ever flagged,
                which is logged as a warning.
            seen: What to do about inputs that :meth:`fit` has read, found by their content: the
                guarantee is void with them. `"warn"` is for data with natural duplicates.

        Returns:
            The detector itself.

        Raises:
            UserError: If inputs were seen, or as :meth:`score`.
        """
        if seen not in ("refuse", "warn"):
            raise ValueError(f"'seen' should be 'refuse' or 'warn', got {seen!r}.")
        scorer = self._get_scorer("calibrate")
        scores, marks = [], []
        for chunk in read_pieces(id_data, self.size, "calibration data"):
            scores.append(self._score(scorer, chunk))
            marks.append(fingerprints(chunk.values))
        if not scores:
            raise UserError("calibration data: empty, expected at least one image or vector.")
        if self._seen is None:
            log.warning("calibration: what trained this model is not recorded, so not compared.")
        elif shared := count_shared(np.concatenate(marks), self._seen):
            message = (
                f"calibration data: {shared} of {sum(map(len, marks))} items were read in fit, "
                "which voids the guarantee"
            )
            if seen == "refuse":
                raise UserError(f"{message}; hold data out for it (or pass seen='warn').")
            log.warning("%s", message)
        self.conformal = SplitConformal(np.concatenate(scores), alpha)
        return self

    def predict(self, x: object) -> NDArray[np.int64]:
        r"""Decides on inputs: +1 for an inlier (ID), -1 for an outlier (flagged as OOD).

        Arguments:
            x: The images or vectors, :math:`N` of them.

        Returns:
            The decisions, with shape :math:`(N)`.

        Raises:
            UserError: If the detector is not calibrated, or as :meth:`score`.
        """
        flagged = self._get_conformal("predict").flagged(self.score(x))
        return np.where(flagged, -1, 1)

    def pvalue(self, x: object) -> NDArray[np.float64]:
        r"""Returns the conformal p-value of the hypothesis that an input is ID.

        Arguments:
            x: The images or vectors, :math:`N` of them.

        Returns:
            The p-values, with shape :math:`(N)`; :meth:`predict` flags those of at most `alpha`.

        Raises:
            UserError: If the detector is not calibrated, or as :meth:`score`.
        """
        return self._get_conformal("pvalue").pvalue(self.score(x))

    def save(self, folder: str | os.PathLike[str]) -> None:
        r"""Writes the detector into a folder, as safetensors and JSON; nothing is pickled.

        A folder of images' detector without a backbone of your own can be loaded with
        :func:`ood_osdre.load_scorer`, too.

        Arguments:
            folder: The folder, created if needed.

        Raises:
            UserError: If it cannot be written.
        """
        self._get_scorer("save")
        assert self._trained is not None
        write_detector(Path(folder), self._trained, self._seen, self.conformal)

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
            UserError: If the folder holds none, or it is damaged.
        """
        source = Path(folder)
        trained = read_model(source, find_device(device), backbone)
        config = Config.from_mapping(trained.metadata["config"])
        size = trained.metadata["size"]
        detector = cls(config, backbone=backbone, size=size, device=device)
        seen, detector.conformal = read_calibration(source, trained.digest)
        detector._take(trained, seen)
        return detector

    def _take(self, trained: TrainedModel, seen: NDArray[Any] | None) -> None:
        self._trained, self._scorer, self._seen = trained, Scorer.of(trained), seen

    def _get_scorer(self, method: str) -> Scorer:
        if self._scorer is None:
            raise UserError(f"{method}: the detector is not fitted; call fit first.")
        return self._scorer

    def _get_conformal(self, method: str) -> SplitConformal:
        self._get_scorer(method)
        if self.conformal is None:
            raise UserError(
                f"{method}: there is no threshold yet; call calibrate with ID data that fit has "
                "not read."
            )
        return self.conformal

    def _score(self, scorer: Scorer, chunk: Samples) -> NDArray[np.float32]:
        shape = chunk.values.shape[1:]
        if shape != scorer.shape:
            raise UserError(f"input: items of shape {shape}, expected {scorer.shape} as in fit.")
        scores, _ = score_images(
            scorer.ratio, chunk.values, scorer.preprocess, self.config.evaluation.batch_size
        )
        check_scores("input", scores, chunk.names)
        return scores


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
    if isinstance(config, str | Path):
        config = load_config(config)
    if not isinstance(config, Config | Mapping):
        raise UserError(
            f"config: got {type(config).__name__}, expected the name of a configuration, a file, "
            "a mapping or a Config."
        )
    values: dict[str, Any] = dict(config.to_dict() if isinstance(config, Config) else config)
    for key, value in options.items():
        section, _, name = key.rpartition("__")
        held = values.get(section)
        if not section:
            values[name] = value
        elif held is None or isinstance(held, Mapping):
            values[section] = {**(held or {}), name: value}
        # A section that is no mapping is refused below.
    return Config.from_mapping(values, source)


def class_labels(labels: ArrayLike | Tensor) -> NDArray[np.int64]:
    r"""Returns class labels as integers, none of them rounded.

    Arguments:
        labels: The labels, whole numbers from 0, or -1 for none, with shape :math:`(N)`.

    Raises:
        UserError: If they are something else.
    """
    expected = "expected class indices from 0, or -1 for none"
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    except ValueError:
        raise UserError(f"labels: lists of different lengths, {expected}.") from None
    if array.dtype.kind not in "biuf":
        one = array.flat[0] if array.size else labels
        raise UserError(f"labels: got {repr(one)[:40]}, {expected}.")
    # Floats hold whole numbers exactly up to here; NaN is not one.
    is_index = (array >= -1) & (array < 2**53) & (array == np.floor(array))
    if not is_index.all():
        bad = array[~is_index]
        raise UserError(
            f"labels: {bad.size} of {array.size} are no class index, the first is {bad.flat[0]}; "
            f"{expected}."
        )
    return array.astype(np.int64)
