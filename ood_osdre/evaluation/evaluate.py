r"""Scoring image sets, validation without test data, and the evaluation of a benchmark.

**Selection never sees test OOD.** A checkpoint is chosen by ID validation images against two
kinds of images that no table reports: *near*, classes of the reference held out of training, and
*far*, synthetic OOD that :mod:`ood_osdre.data.builtin` makes by a program. Their mean
is `val_auroc`. OOD validation lists join only on request, which the run record says.
"""

__all__ = [
    "Evaluation",
    "Validation",
    "check_neighbours",
    "count_parameters",
    "deployed",
    "evaluate_benchmark",
    "score_images",
]

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from ..data import BenchmarkData, ImageSet
from ..data.builtin import synthetic_ood
from ..data.standardise import Standardiser
from ..errors import UserError
from ..models.classifier import Classifier
from ..models.ratio import RatioModel
from ..models.time_conditioned import Spent, TimeConditionedRatio
from ..sections import EvaluationConfig
from ..training import distributed
from .calibration import ratio_calibration
from .metrics import ood_metrics
from .scores import Scores

Images = NDArray[np.uint8]


@torch.inference_mode()
def score_images(
    scorer: RatioModel,
    images: Images,
    preprocess: Standardiser,
    batch_size: int = 512,
    bar: tqdm | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
    r"""Scores images, one forward pass each, in evaluation mode.

    Arguments:
        scorer: The ratio, whole or folded.
        images: The uint8 images, with shape :math:`(N, H, W, C)`; may be memory-mapped.
        preprocess: The preprocessing, with the statistics of the ID data.
        batch_size: The number of images scored at once.
        bar: A progress bar to advance.

    Returns:
        The log-ratios in nats, larger = more ID, with shape :math:`(N)`, and the predicted
        classes, with shape :math:`(N)`, None without a class head.
    """
    scorer.eval()
    scores, classes = [], []
    rows = distributed.share(len(images))
    own = rows.stop - rows.start
    # The others wait for what a process gathers that has no rows, as the set is smaller than their
    # number. It scores another's image, as not every network takes an empty batch, and gives none.
    end = max(rows.stop, rows.start + 1)
    for start in range(rows.start, end, batch_size):
        stop = min(start + batch_size, end)
        batch = torch.as_tensor(np.ascontiguousarray(images[start:stop]))
        prediction = scorer.predict(preprocess(batch))
        scores.append(prediction.score)
        if prediction.logits is not None:
            classes.append(prediction.logits.argmax(dim=1))
        if bar is not None:
            bar.update(len(batch))
    score = torch.cat(scores)[:own].float().cpu().numpy()
    if not classes:
        return distributed.gather_rows(score), None
    predicted = torch.cat(classes)[:own].cpu().numpy()
    return distributed.gather_rows(score), distributed.gather_rows(predicted)


class Validation:
    r"""What a run is watched and selected by; called with a ratio, returns named numbers.

    `val_near`, `val_far` (the mean over the synthetic OOD sets, each also under its own name),
    their mean `val_auroc`, and `val_accuracy` with a class head; AUROCs are fractions. Of a ratio
    also its calibration on ID and held-out reference images (:mod:`ood_osdre.evaluation.calibration`).
    Classes held out are another :math:`p_0` than that of training: compare it between models.

    Arguments:
        id_val: ID validation images, with labels.
        near: Held-out reference images.
        preprocess: The preprocessing.
        batch_size: The number of images scored at once.
        limit: The number of images of each set; None for all, but of the near images no more
            than twice as many as of the ID ones.
        ood_val: OOD validation images, which then join the near images.
        id_train: The ID training set, which the score `knn` of a classifier needs.
    """

    def __init__(
        self,
        id_val: ImageSet,
        near: ImageSet,
        preprocess: Standardiser,
        batch_size: int = 512,
        limit: int | None = None,
        ood_val: ImageSet | None = None,
        id_train: ImageSet | None = None,
    ) -> None:
        self.preprocess, self.batch_size = preprocess, batch_size
        self.id_train = id_train
        self.id_val = _thinned(id_val, limit)
        size = len(self.id_val)
        # Not more images than a validation every few hundred steps can afford.
        self.near = {"near": _thinned(near, limit or 2 * size).images}
        if ood_val is not None:
            self.near["ood_val"] = _thinned(ood_val, limit).images
        self.far = synthetic_ood(self.id_val.images, size)

    def __call__(self, ratio: RatioModel) -> dict[str, float]:
        r"""Returns the validation numbers of a ratio."""
        if isinstance(ratio, Classifier) and ratio.score == "knn" and self.id_train is not None:
            # Anew each time, as the features are those of the weights.
            _fit_neighbours(ratio, self.id_train, self.preprocess, self.batch_size)
        id_scores, predicted = self._score(ratio, self.id_val.images)

        def scores(images: Images) -> NDArray[np.float32]:
            return self._score(ratio, images)[0]

        near_scores = {name: scores(images) for name, images in self.near.items()}
        near = {name: ood_metrics(id_scores, s).auroc for name, s in near_scores.items()}
        far = {name: ood_metrics(id_scores, scores(i)).auroc for name, i in self.far.items()}
        numbers = {f"val_far_{name}": value for name, value in far.items()}
        numbers["val_near"] = float(np.mean(list(near.values())))
        numbers["val_far"] = float(np.mean(list(far.values())))
        numbers["val_auroc"] = (numbers["val_near"] + numbers["val_far"]) / 2
        if not isinstance(ratio, Classifier):  # whose score is no log-ratio
            calibration = ratio_calibration(id_scores, near_scores["near"])
            numbers |= {f"val_{k}": v for k, v in calibration._asdict().items()}
        if predicted is not None:
            numbers["val_accuracy"] = float(np.mean(predicted == self.id_val.labels))
        return numbers

    def describe(self, select: str = "val_auroc") -> str:
        r"""Returns the selection rule, for the run record.

        Arguments:
            select: The number whose largest value selects: `val_auroc`, `val_near` or `val_far`.
        """
        near = "held-out reference images"
        if "ood_val" in self.near:
            near += " and OOD VALIDATION LISTS"
        far = f"the development far sets {', '.join(self.far)}"
        rule = {
            "val_auroc": f"mean of ID validation against {near} and against {far}",
            "val_near": f"ID validation against {near}",
            "val_far": f"mean of ID validation against {far}",
        }[select]
        return f"largest validation AUROC {select}: {rule}; no test OOD set is read before the end"

    def _score(
        self, ratio: RatioModel, images: Images
    ) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        return score_images(ratio, images, self.preprocess, self.batch_size)


@dataclass(frozen=True)
class Evaluation:
    r"""The scores of a benchmark's test sets.

    Attributes:
        scores: The score of every image.
        accuracy: The ID accuracy, None without a class head.
        seconds: The scoring time, decoding excluded.
        evaluations: The network evaluations that an image took, on average.
    """

    scores: Scores
    accuracy: float | None
    seconds: float
    evaluations: float


def evaluate_benchmark(
    scorer: RatioModel,
    data: BenchmarkData,
    preprocess: Standardiser,
    batch_size: int = 512,
    progress: bool = True,
) -> Evaluation:
    r"""Scores the ID test set and every near and far set that is present, in one pass.

    Arguments:
        scorer: The ratio, whole or folded.
        data: The benchmark.
        preprocess: The preprocessing, with the statistics of the ID data.
        batch_size: The number of images scored at once.
        progress: Whether to show a progress bar.

    Returns:
        The scores, the ID accuracy, the time and the network evaluations it took.
    """
    id_name = f"{data.manifest.id_name}_test"
    sets: list[tuple[str, str, ImageSet]] = [("id", id_name, data.id_test)]
    groups: Mapping[str, Mapping[str, ImageSet]] = {"near": data.near, "far": data.far}
    sets += [(role, name, s) for role, group in groups.items() for name, s in group.items()]

    if isinstance(scorer, TimeConditionedRatio):
        scorer.spent = Spent(0, 0)
    scores, accuracy = Scores(), None
    total = sum(len(s) for _, _, s in sets)
    started = time.perf_counter()
    with tqdm(total=total, desc="scoring", unit="img", disable=not progress) as bar:
        for role, name, images in sets:
            score, predicted = score_images(scorer, images.images, preprocess, batch_size, bar)
            if role == "id" and predicted is not None:
                accuracy = float(np.mean(predicted == images.labels))
            scores.add(role, name, score, images.labels, images.names)
    seconds = time.perf_counter() - started
    return Evaluation(scores, accuracy, seconds, _evaluations(scorer))


def _evaluations(scorer: RatioModel) -> float:
    r"""Returns the network evaluations that an input took, on average over all processes."""
    if not isinstance(scorer, TimeConditionedRatio):
        return 1.0
    spent = distributed.gather_rows(np.array([scorer.spent])).sum(axis=0)
    return float(spent[1] / spent[0])


def deployed(
    ratio: RatioModel, options: EvaluationConfig, id_train: ImageSet, preprocess: Standardiser
) -> RatioModel:
    r"""Returns the model that scores: a ratio folded, a rival as the options ask.

    Arguments:
        ratio: The trained model.
        options: The solver of a time-conditioned ratio, the score of a classifier.
        id_train: The ID training set, whose features are the neighbours of the score `knn`.
        preprocess: The preprocessing, with the statistics of the ID data.

    Raises:
        UserError: If there are fewer ID training images than neighbours asked for.
    """
    model = ratio.fold()
    if isinstance(model, TimeConditionedRatio):
        model.solver, model.tolerance = options.solver, options.tolerance
        model.evaluations = options.evaluations
    if isinstance(model, Classifier):
        model.score, model.neighbours = options.score, options.neighbours
        if options.score == "knn":
            check_neighbours(model, id_train)
            _fit_neighbours(model, id_train, preprocess, options.batch_size)
    return model


def check_neighbours(ratio: RatioModel, id_train: ImageSet) -> None:
    r"""Raises an error if a classifier's score `knn` asks for more neighbours than there are.

    Arguments:
        ratio: The model, of any kind.
        id_train: The ID training set.
    """
    if not isinstance(ratio, Classifier) or ratio.score != "knn":
        return
    if ratio.neighbours > len(id_train):
        raise UserError(
            f"evaluation.neighbours: got {ratio.neighbours}, expected at most {len(id_train)}, "
            "the number of ID training images."
        )


def _fit_neighbours(
    model: Classifier, id_train: ImageSet, preprocess: Standardiser, size: int
) -> None:
    starts = range(0, len(id_train), size)
    model.fit(
        preprocess(torch.as_tensor(np.ascontiguousarray(id_train.images[i : i + size])))
        for i in starts
    )


def _thinned(images: ImageSet, limit: int | None) -> ImageSet:
    r"""Takes evenly spaced images, so that every class stays represented."""
    if limit is None or limit >= len(images):
        return images
    return images.subset(np.linspace(0, len(images) - 1, limit).round().astype(np.int64))


def count_parameters(module: nn.Module) -> int:
    r"""Returns the number of parameters."""
    return sum(p.numel() for p in module.parameters())
