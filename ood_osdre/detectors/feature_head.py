r"""Training of the head on a classifier's features: a fit to two sets of them.

:func:`fit_head` whitens features (:mod:`ood_osdre.models.representation`), holds a part of both sets
out, and trains what :class:`~ood_osdre.config.HeadConfig` describes on the rest: any frame, path,
schedule, objective and estimator. What the features of a benchmark's images are,
:mod:`ood_osdre.detectors.head_data` says.
"""

__all__ = ["HeadFit", "check_features", "fit_head"]

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..config import HeadConfig
from ..data.sets import cut_apart, draws_of
from ..data.transforms import Standardise
from ..errors import UserError
from ..evaluation.calibration import ratio_calibration
from ..evaluation.metrics import ood_metrics
from ..models import (
    FoldedRatio,
    GaussianLogRatio,
    RatioModel,
    WhitenedRatio,
    Whitening,
    check_inputs,
    whitening_of,
)
from ..training import checkpoint, distributed
from ..training.batches import Stream, VectorBatches, step_generator
from ..training.build import build_head, build_path, prepare_objective
from ..training.fit import fit
from ..training.surroundings import own_surroundings
from ..training.trainer import Outcome
from .feature_store import Stored, Whitened

# With fewer vectors than this on a side, none are held out.
SMALLEST = 50
# Features of one image in two batches differ by less than this share of their deviation.
ROUNDING = 1e-5
# The stored features that are looked at together, and about how many held out ones are watched.
TOGETHER, WATCHED = 8192, 16_384
WHITENING = "whitening"
RULES = {
    "last": "the last step",
    "held_out": "least end-point loss on held-out features of ID and reference images",
    "held_out_auroc": "largest AUROC of held-out features of ID and of reference images",
}


class HeadFit(NamedTuple):
    r"""A fitted head.

    Attributes:
        model: The ratio of features.
        outcome: How far the training came.
        rule: How the step was selected.
    """

    model: WhitenedRatio
    outcome: Outcome
    rule: str

    def __repr__(self) -> str:
        features, rank = self.model.whitening.shape
        return f"HeadFit({rank} components of {features} features, {self.rule})"


def check_features(features: object, count: int | None, what: str = "features") -> Tensor:
    r"""Refuses features that no head can be trained or evaluated on.

    Arguments:
        features: The features, real numbers with shape :math:`(N, F)`.
        count: The number of features :math:`F`; None for any.
        what: What to call the features in errors.

    Returns:
        The features, with shape :math:`(N, F)`, in single precision, or in double if they came in
        it: of numbers far from zero, single precision holds no differences.

    Raises:
        TypeError: If they are no tensor.
        UserError: If they are empty, of another shape, complex, or not finite in single precision.
    """
    if isinstance(features, Tensor):
        count = count or max(features.shape[-1:].numel(), 1)
        if not features.is_complex():
            given, features = features.detach(), features.detach().float()
            single = check_inputs(features, (count or 1,), what)
            return given if given.dtype == torch.float64 else single
    return check_inputs(features, (count or 1,), what)


@own_surroundings()
def fit_head(
    head: HeadConfig,
    id_features: Tensor | Stored,
    reference_features: Tensor | Stored,
    device: torch.device | str = "cpu",
    labels: Tensor | None = None,
    classes: int = 1,
    *,
    mixed: int = 0,
    folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = False,
) -> HeadFit:
    r"""Trains a head to the last step, or until the time budget or a signal stops it.

    Its validations have numbers of the parts held out, `held_out_*`: the calibration is that on images
    of the same two sets. Where the objective sees the path's dequantised ends, `best` has those with
    that noise beside them, `held_out_noisy_*`.

    Arguments:
        head: The head.
        id_features: The features of ID data, with shape :math:`(N, F)`. Those that are
            :class:`Stored` are read in pieces and batches, and never all in memory, but for
            `gaussians`.
        reference_features: The features of reference data, with shape :math:`(M, F)`.
        device: Where to train.
        labels: The classes of ID data, with shape :math:`(N)`, which the estimator `gaussians` looks
            at; None for one class.
        classes: The number of classes.
        mixed: The number of ID features that join the reference, drawn after both sets are split, so
            that none stands on both sides.
        folder: The folder of checkpoints, the whitening among them, and log; None writes nothing.
        metadata: What tells this run from others.
        time_budget: The number of seconds after which to save and stop.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show a progress bar.

    Raises:
        TypeError: If the features are no tensors.
        UserError: If there are none, they are not finite in single precision or of different
            sizes, vary in fewer directions than the rank, or the loss is not finite.
    """
    x_1 = _checked(id_features, None, "ID features")
    x_0 = _checked(reference_features, x_1.shape[1], "reference features")
    seed, training = head.training.seed, head.training
    id_rows, rows = (_split(x, head.held_out, seed, i) for i, x in enumerate((x_1, x_0)))
    if mixed:
        x_0, rows = _mixed(x_1, x_0, id_rows, rows, mixed, seed)
    whitening = _whitening(head, x_1, x_0, folder, metadata, resume).to(device)
    with torch.no_grad():
        id_train, id_held, own = _taken(x_1, whitening, device, id_rows)
        train, held, others = _taken(x_0, whitening, device, rows)
    validate = _HeldOut(id_held, held, (own, others)) if len(id_held) and len(held) else None
    rank = id_train.shape[1]
    labels = (torch.zeros(len(x_1)).long() if labels is None else labels)[id_rows[0]]
    if head.estimator == "gaussians":
        model = build_head(head, rank, classes).to(device)
        outcome = _fit_gaussians(model, id_train[:], labels, train[:], validate)
        if folder is not None and distributed.is_first():
            # It says that the folder holds a run; a head of a moment is fitted again, not resumed.
            state = model.state_dict(), metadata or {}
            checkpoint.write_checkpoint(folder, checkpoint.STATE, *state)
        return HeadFit(WhitenedRatio(whitening, model), outcome, "in closed form")
    whitened = Standardise([0.0] * rank, [1.0] * rank, device)
    batches = VectorBatches(id_train, labels, train, whitened, training.batch_size, seed)
    select = "last" if validate is None else head.select
    fitted = fit(
        build_head(head, rank).to(device),
        partial(prepare_objective, head),
        batches,
        training,
        validate,
        select=None if select == "last" else select,
        folder=folder,
        metadata=metadata,
        time_budget=time_budget,
        resume=resume,
        progress=progress,
    )
    if validate is not None and fitted.outcome.finished and _adds_noise(head):
        noisy = _HeldOut(*_dequantised(head, id_held, held), (own, others), "held_out_noisy")
        fitted.outcome.best = fitted.outcome.best | noisy(fitted.model)
    return HeadFit(WhitenedRatio(whitening, fitted.model), fitted.outcome, RULES[select])


def _fit_gaussians(
    model: RatioModel, x_1: Tensor, labels: Tensor, x_0: Tensor, validate: "_HeldOut | None"
) -> Outcome:
    started = time.monotonic()
    assert isinstance(model, FoldedRatio)
    assert isinstance(model.backbone, GaussianLogRatio)
    model.backbone.fit(x_1, labels.to(x_1.device), x_0)
    outcome = Outcome(finished=True, reason="finished", seconds=time.monotonic() - started)
    if validate is not None:
        outcome.best, outcome.scores = validate(model), validate.scores
    return outcome


def _whitening(
    head: HeadConfig,
    x_1: Tensor | Stored,
    x_0: Tensor | Stored,
    folder: Path | None,
    metadata: Mapping[str, Any] | None,
    resume: bool,
) -> Whitening:
    r"""Returns the whitening, that of the run that is resumed if there is one.

    Its axes depend on the last bits of the features, which another number of threads changes; a
    head that has begun must keep its own.
    """
    if folder is None:
        return whitening_of(x_1, x_0, head.rank)
    path = checkpoint.checkpoint_path(folder, WHITENING)
    if resume and path.is_file():
        tensors, written, _ = checkpoint.read_checkpoint(folder, WHITENING)
        checkpoint.refuse_other_run(path, written, metadata or {})
        return Whitening(tensors["mean"], tensors["matrix"], tensors.get("rest"))
    whitening = whitening_of(x_1, x_0, head.rank)
    if distributed.is_first():
        checkpoint.write_checkpoint(folder, WHITENING, whitening.state_dict(), metadata or {})
    return whitening


# The rows that are trained on and those that are held out.
Rows: TypeAlias = tuple[Tensor, Tensor]


def _checked(features: Tensor | Stored, count: int | None, what: str) -> Tensor | Stored:
    r"""Returns features that :func:`check_features` does not refuse, on the CPU."""
    if not isinstance(features, Stored):
        return check_features(features, count, what).cpu()
    for part in features.split(TOGETHER):
        check_features(part, count, what)
    return features


def _split(x: Tensor | Stored, share: float, seed: int, which: int) -> Rows:
    r"""Returns the rows that train and those held out, copies of one in one part."""
    count = math.ceil(share * len(x)) if len(x) >= SMALLEST else 0
    order = torch.randperm(len(x), generator=step_generator(seed, Stream.SPLIT, which, "cpu"))
    held, rest = cut_apart(order.numpy(), draws_of(_copies(x)), [count])
    if not len(rest):
        raise UserError(f"features: all {len(x)} of a set are copies of one, expected others.")
    return torch.as_tensor(rest), torch.as_tensor(held)


def _copies(x: Tensor | Stored) -> NDArray[np.int64]:
    r"""Returns a number that items share with those that are equal but for rounding, :math:`(N)`.

    The order is that of a random projection, in which such items are next to each other.
    """
    u = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    size = TOGETHER if isinstance(x, Stored) else len(x)
    order = torch.cat([part.double() @ u for part in x.split(size)]).argsort()
    # Of many, some say what the deviation is as well.
    some = x if isinstance(x, Tensor) else x[:: max(1, len(x) // TOGETHER)]
    spread = some.std(dim=0, correction=0)
    marks, last = torch.zeros(len(x), dtype=torch.long), 0
    for start in range(0, len(x) - 1, size):
        rows = order[start : start + size + 1]
        own = x[rows]
        far = ((own[1:] - own[:-1]).abs() > ROUNDING * spread).any(dim=1)
        marks[rows[1:]] = last + far.cumsum(0)
        last = int(marks[rows[-1]])
    return marks.numpy()


def _taken(
    x: Tensor | Stored, whitening: Whitening, device: torch.device | str, rows: Rows
) -> tuple[Tensor | Whitened, Tensor, Tensor]:
    r"""Returns components that train, of stored features when asked for, those held out, their rows."""
    if isinstance(x, Stored):
        own, held = (Whitened(x, whitening, part, device) for part in rows)
        watched = slice(None, None, max(1, len(held) // WATCHED))
        return own, held[watched], rows[1][watched]
    components = whitening(x.to(device))
    train, other = (components[part.to(components.device)] for part in rows)
    return train, other, rows[1]


def _mixed(
    x_1: Tensor | Stored,
    x_0: Tensor | Stored,
    id_rows: Rows,
    rows: Rows,
    mixed: int,
    seed: int,
) -> tuple[Tensor | Stored, Rows]:
    r"""Returns the reference with ID vectors at its end, each part with those of the same ID part."""
    random = step_generator(seed, Stream.SPLIT, 3, "cpu")
    held = round(mixed * len(rows[1]) / len(x_0)) if len(id_rows[1]) else 0
    counts = mixed - held, held
    drawn = [
        part[torch.randint(len(part), (count,), generator=random)] if count else part[:0]
        for part, count in zip(id_rows, counts, strict=True)
    ]
    own = torch.arange(len(x_0), len(x_0) + mixed).split(counts)
    train, other = (torch.cat(pair) for pair in zip(rows, own, strict=True))
    further = x_1[torch.cat(drawn)]
    if isinstance(x_0, Stored):
        return Stored([*x_0.parts, further]), (train, other)
    return torch.cat([x_0, further]), (train, other)


def _adds_noise(head: HeadConfig) -> bool:
    r"""Returns whether the objective sees the path's dequantised ends, and not the clean ones."""
    objective = head.objective
    terms = objective.conditional, objective.time_score, objective.path_difference
    return any(terms) or not objective.endpoint_clean


def _dequantised(head: HeadConfig, x_1: Tensor, x_0: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns components with the noise of the path's ends; for every head of a seed the same."""
    random, path = step_generator(head.training.seed, Stream.SPLIT, 4, "cpu"), build_path(head)
    z_1, z_0 = (torch.randn(x.shape, generator=random).to(x) for x in (x_1, x_0))
    return path.end(x_1, z_1), path.start(x_0, z_0)


@dataclass
class _HeldOut:
    r"""The validation of a head: its numbers on held-out components, each side with equal weight.

    The number of the name itself is minus the logistic end-point loss; the AUROC is a fraction, the
    calibration that of :mod:`ood_osdre.evaluation.calibration`, at the rank of the objective. The
    names of its `scores` are the numbers of the rows.
    """

    x_1: Tensor
    x_0: Tensor
    rows: Rows
    name: str = "held_out"

    @torch.no_grad()
    def __call__(self, ratio: RatioModel) -> dict[str, float]:
        f_1, f_0 = ratio.log_ratio(self.x_1), ratio.log_ratio(self.x_0)
        loss = F.softplus(-f_1).mean() + F.softplus(f_0).mean()
        found = f_1.float().cpu().numpy(), f_0.float().cpu().numpy()
        sides = zip(("id", "near"), found, self.rows, strict=True)
        self.scores = {k: (f, [-1] * len(f), rows.tolist()) for k, f, rows in sides}
        numbers = {self.name: -loss.item(), f"{self.name}_auroc": ood_metrics(*found).auroc}
        calibration = ratio_calibration(*found)
        return numbers | {f"{self.name}_{k}": v for k, v in calibration._asdict().items()}
