r"""Scoring image sets, validation without test data, and the evaluation of a benchmark.

**Selection never sees test OOD.** The last step's weights are kept, or, where `evaluation.select`
asks for it, those of the best step by ID validation images against two kinds of images that no
table of the run reports. *Near* are classes of the reference that are held out of training. *Far*
is synthetic validation OOD, which :mod:`ood_osdre.data.builtin` makes. The mean of the two AUROCs is
`val_auroc`. OOD validation lists join only on request, and then the run record says so.
"""

__all__ = [
    "Evaluation",
    "Validation",
    "check_neighbours",
    "evaluate_benchmark",
    "score_images",
    "score_parts",
    "scoring_model",
    "set_solver",
]

import copy
import time
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import Config
from ..data import BenchmarkData, ImageSet
from ..data.builtin import synthetic_ood
from ..data.image_files import Pixels, in_batches
from ..data.sets import hold_out_id, thinned
from ..data.transforms import Standardiser
from ..errors import UserError
from ..models import Classifier, NetworkEvaluations, RatioModel, SummedScore, TimeConditionedRatio
from ..progress import Bar
from ..sections import FITTED, EvaluationConfig
from ..training import distributed
from .calibration import ratio_calibration
from .metrics import ood_metrics
from .scores import Scores

FEW, DRAWN = 16, 32 * 2**20  # images of each set, in a rehearsal; bytes of a synthetic set


class Scored(NamedTuple):
    r"""The scores of :math:`N` inputs.

    Attributes:
        score: The scores, larger = more ID, with shape :math:`(N)`: log-ratios in nats, unless the
            model is a classifier or a sum.
        classes: The predicted classes, with shape :math:`(N)`; None without a class head.
        parts: The parts of a summed score, with shape :math:`(N, P)`; None of any other.
    """

    score: NDArray[np.float32]
    classes: NDArray[np.int64] | None
    parts: NDArray[np.float32] | None


def score_images(
    model: RatioModel, images: Pixels, preprocess: Standardiser, batch_size: int = 512
) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
    r"""Returns the scores of images or vectors, and the predicted classes, see :class:`Scored`.

    Arguments are those of :func:`score_parts`.
    """
    return score_parts(model, images, preprocess, batch_size)[:2]


@torch.inference_mode()
def score_parts(
    model: RatioModel,
    images: Pixels,
    preprocess: Standardiser,
    batch_size: int = 512,
    bar: Bar | None = None,
) -> Scored:
    r"""Scores images or vectors, one forward pass each, in evaluation mode.

    Arguments:
        model: The ratio, whole or folded.
        images: uint8 images :math:`(N, H, W, C)`, or vectors :math:`(N, d)`; may be mapped, or files.
        preprocess: The preprocessing, with the statistics of the ID data.
        batch_size: The number of images scored at once.
        bar: A progress bar to advance.
    """
    model.eval()
    columns: tuple[list[torch.Tensor], ...] = ([], [], [])
    rows = distributed.share(len(images))
    own = rows.stop - rows.start
    # Processes without images of their own, if there are fewer images than processes, score one of
    # another's and drop it: not every network takes an empty batch.
    end = max(rows.stop, rows.start + 1)
    for batch in in_batches(images, batch_size, rows.start, end):
        writable = batch if batch.flags.writeable else batch.copy()  # of others PyTorch warns
        prediction = model.predict(preprocess(torch.as_tensor(writable)))
        classes = None if prediction.logits is None else prediction.logits.argmax(dim=1)
        given = prediction.score.float(), classes, prediction.parts
        for column, value in zip(columns, given, strict=True):
            column += [] if value is None else [value]
        if bar is not None:
            bar.update(len(batch))
    score, *others = (
        distributed.gather_rows(torch.cat(column)[:own].cpu().numpy()) if column else None
        for column in columns
    )
    assert score is not None
    return Scored(score, *others)


class Validation:
    r"""The numbers by which a run is watched and its step may be selected; called with a model.

    AUROCs are fractions: `val_near`, `val_far` (the mean over the synthetic sets, each of which has
    its own number, too) and their mean `val_auroc`. With a class head there is `val_accuracy`. A
    ratio's calibration (:mod:`ood_osdre.evaluation.calibration`) is that on ID and held-out
    reference images. Classes held out have another :math:`p_0` than that of training, so it is
    to be compared between models only. The last call leaves `scores`, as `Outcome` has them.

    Arguments:
        id_val: ID validation images, with labels.
        near: Held-out reference images.
        preprocess: The preprocessing.
        batch_size: The number of images scored at once.
        limit: The number of images of each set; None for all, but of the near images no more
            than twice as many as of the ID ones.
        ood_val: OOD validation images, which then join the near images.
        id_train: The ID training set, which some scores of a classifier are fitted to.
        id_held: ID training images left out of training, with labels, whose accuracy is then
            `val_accuracy`; None for that of `id_val`.
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
        id_held: ImageSet | None = None,
    ) -> None:
        self.preprocess, self.batch_size, self.id_train = preprocess, batch_size, id_train
        self.id_val = thinned(id_val, limit).held()
        self.id_held = id_held
        size = len(self.id_val)
        # Not more images than a validation every few hundred steps can afford.
        near = thinned(near, limit or 2 * size).held()
        self.near, self.near_names = {"near": near.images}, near.names
        if ood_val is not None:
            self.near["ood_val"] = thinned(ood_val, limit).held().images
        drawn = min(size, size * DRAWN // max(1, self.id_val.images.nbytes))
        self.far = synthetic_ood(self.id_val.images, drawn)

    @classmethod
    def of(cls, config: Config, data: BenchmarkData, preprocess: Standardiser) -> "Validation":
        r"""Returns the validation of a run on a benchmark.

        Raises:
            UserError: If `evaluation.use_ood_val` is on and there is no such set.
        """
        options, held = config.evaluation, hold_out_id(data.id_train, config.data.hold_out_id)
        if options.use_ood_val and data.ood_val is None:
            raise UserError(
                f"evaluation.use_ood_val: benchmark {data.manifest.name} has no OOD validation "
                "set here."
            )
        return cls(
            data.id_val,
            data.split_reference(config.data.hold_out_reference)[1],
            preprocess,
            options.batch_size,
            config.data.val_limit,
            data.ood_val if options.use_ood_val else None,
            *held,
        )

    def __call__(self, model: RatioModel) -> dict[str, float]:
        r"""Returns the validation numbers of a model."""
        if self.id_train is not None:  # anew each time, as the features are those of the weights
            _fit_score(model, self.id_train, self.preprocess, self.batch_size)
        score = partial(score_images, preprocess=self.preprocess, batch_size=self.batch_size)
        id_scores, predicted = score(model, self.id_val.images)
        scores = {name: score(model, x)[0] for name, x in (self.near | self.far).items()}
        self.scores = {
            "id": (id_scores, self.id_val.labels, self.id_val.names),
            "near": (scores["near"], [-1] * len(scores["near"]), self.near_names),
        }
        auroc = {name: ood_metrics(id_scores, s).auroc for name, s in scores.items()}
        numbers = {f"val_far_{name}": auroc[name] for name in self.far}
        numbers["val_near"] = float(np.mean([auroc[name] for name in self.near]))
        numbers["val_far"] = float(np.mean([auroc[name] for name in self.far]))
        numbers["val_auroc"] = (numbers["val_near"] + numbers["val_far"]) / 2
        if model.in_nats:
            calibration = ratio_calibration(id_scores, scores["near"])
            numbers |= {f"val_{k}": v for k, v in calibration._asdict().items()}
        if predicted is not None:
            labelled = self.id_val
            if self.id_held is not None:
                labelled = self.id_held
                _, predicted = score(model, labelled.images)
            numbers["val_accuracy"] = float(np.mean(predicted == labelled.labels))
        return numbers

    def brief(self, model: RatioModel) -> "Validation":
        r"""Returns the same on a few images of each set, for the rehearsal of a training."""
        twin, train, held = copy.copy(self), self.id_train, self.id_held
        twin.id_val, twin.id_held = thinned(self.id_val, FEW), held and thinned(held, FEW)
        if train is not None:  # a score may be fitted to the images of each class
            least = FEW * (1 + int(train.labels.max()))
            twin.id_train = thinned(train, max(least, getattr(model, "neighbours", 0)))
        twin.near = {k: x[:FEW] for k, x in self.near.items()}
        twin.near_names = self.near_names[:FEW]
        twin.far = {k: x[:FEW] for k, x in self.far.items()}
        return twin

    def describe(self, select: str) -> str:
        r"""Returns the selection rule, for the run record.

        Arguments:
            select: The option `evaluation.select`.
        """
        near = "held-out reference images"
        if "ood_val" in self.near:
            near += " and OOD VALIDATION LISTS"
        end = "no test OOD set is read before the end"
        if select == "last":
            return f"the averaged weights of the last step; validation is against {near}; {end}"
        far = f"the synthetic validation OOD sets {', '.join(self.far)}"
        rule = {
            "val_auroc": f"mean of ID validation against {near} and against {far}",
            "val_near": f"ID validation against {near}",
            "val_far": f"mean of ID validation against {far}",
        }[select]
        return f"largest validation AUROC {select}: {rule}; {end}"


@dataclass(frozen=True)
class Evaluation:
    r"""The scores of a benchmark's test sets.

    Attributes:
        scores: The score of every image.
        accuracy: The ID accuracy, None without a class head.
        seconds: The scoring time, decoding excluded.
        evaluations: The network evaluations that an image took, on average, in all networks; of a
            head on features those of the head.
    """

    scores: Scores
    accuracy: float | None
    seconds: float
    evaluations: float


def evaluate_benchmark(
    model: RatioModel,
    data: BenchmarkData,
    preprocess: Standardiser,
    batch_size: int = 512,
    progress: bool = True,
) -> Evaluation:
    r"""Scores the ID test set and every near and far set that is present, in one pass.

    Arguments are those of :func:`score_images`, but for the benchmark `data` and for `progress`,
    whether to show a progress bar.
    """
    sets = [("id", f"{data.manifest.id_name}_test", data.id_test)]
    for role, group in (("near", data.near), ("far", data.far)):
        sets += [(role, name, images) for name, images in group.items()]
    solvers = solvers_of(model)
    for solver in solvers:
        solver.cost = NetworkEvaluations(0, 0)
    scores, accuracy = Scores(model.parts if isinstance(model, SummedScore) else ()), None
    started = time.perf_counter()
    total = sum(len(images) for _, _, images in sets)
    with Bar(total=total, desc="scoring", unit="img", disable=not progress) as bar:
        for role, name, images in sets:
            found = score_parts(model, images.images, preprocess, batch_size, bar)
            if role == "id" and found.classes is not None:
                accuracy = float(np.mean(found.classes == images.labels))
            scores.add(role, name, found.score, images.labels, images.names, found.parts)
    seconds = time.perf_counter() - started
    networks = len(model.networks) if isinstance(model, SummedScore) else 1
    evaluations = float(networks - len(solvers))
    for solver in solvers:
        inputs, taken = distributed.gather_rows(np.array([solver.cost])).sum(axis=0)
        evaluations += float(taken / inputs)
    return Evaluation(scores, accuracy, seconds, evaluations)


def scoring_model(
    model: RatioModel, options: EvaluationConfig, id_train: ImageSet, preprocess: Standardiser
) -> RatioModel:
    r"""Returns a copy of a model, folded, that scores as the options say.

    Arguments:
        model: The trained model.
        options: The solver of a time-conditioned ratio, the score of a classifier.
        id_train: The ID training set, which some scores of a classifier are fitted to.
        preprocess: The preprocessing, with the statistics of the ID data.

    Raises:
        UserError: If there are fewer ID training images than neighbours asked for.
    """
    model = model.fold()
    set_solver(model, options)
    if isinstance(model, Classifier):
        model.score, model.neighbours = options.score, options.neighbours
        check_neighbours(model, id_train)
        _fit_score(model, id_train, preprocess, options.batch_size)
    return model


def set_solver(model: RatioModel, options: EvaluationConfig) -> None:
    r"""Lets the time-conditioned ratios of a model integrate as the options say."""
    for ratio in solvers_of(model):
        ratio.solver, ratio.tolerance = options.solver, options.tolerance
        ratio.evaluations = options.evaluations


def solvers_of(model: RatioModel) -> list[TimeConditionedRatio]:
    r"""Returns the time-conditioned ratios that a model is, has for a head, or sums."""
    return [module for module in model.modules() if isinstance(module, TimeConditionedRatio)]


def check_neighbours(model: RatioModel, id_train: ImageSet) -> None:
    r"""Raises an error if a classifier's score `knn` asks for more neighbours than there are."""
    if not isinstance(model, Classifier) or model.score != "knn":
        return
    if model.neighbours > len(id_train):
        raise UserError(
            f"evaluation.neighbours: got {model.neighbours}, expected at most {len(id_train)}, "
            "the number of ID training images."
        )


def _fit_score(
    model: RatioModel, id_train: ImageSet, preprocess: Standardiser, batch_size: int
) -> None:
    r"""Fits the score of a classifier to ID training images, if it is one of those that are."""
    if isinstance(model, Classifier) and model.score in FITTED:
        batches = in_batches(id_train.images, batch_size)
        inputs = (preprocess(torch.as_tensor(batch)) for batch in batches)
        model.fit(inputs, torch.as_tensor(id_train.labels))
