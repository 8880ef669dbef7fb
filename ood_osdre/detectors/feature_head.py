r"""Training of the head on a classifier's features, from two sets of vectors.

The vectors are whitened (:mod:`ood_osdre.models.representation`), a part of both sets is held out,
and the rest trains whatever :class:`~ood_osdre.config.HeadConfig` describes: any frame, path,
schedule, objective and estimator.
"""

__all__ = ["HeadFit", "check_features", "empty_ratio", "fit_head"]

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import HeadConfig
from ..data.transforms import Standardise
from ..errors import UserError
from ..evaluation.calibration import ratio_calibration
from ..evaluation.metrics import ood_metrics
from ..models import RatioModel, WhitenedRatio, Whitening, check_inputs, whitening_of
from ..training import checkpoint, distributed
from ..training.batches import Stream, VectorBatches, step_generator
from ..training.build import build_head, prepare_objective
from ..training.fit import fit
from ..training.trainer import Outcome

# With fewer vectors than this on a side, none are held out.
SMALLEST = 50
WHITENING = "whitening"


class HeadFit(NamedTuple):
    r"""A fitted head.

    Attributes:
        model: The ratio of features.
        outcome: How far the training came.
    """

    model: WhitenedRatio
    outcome: Outcome


def check_features(features: object, count: int | None, what: str = "features") -> Tensor:
    r"""Refuses features that no head can be trained or evaluated on.

    Arguments:
        features: The features, real numbers with shape :math:`(N, F)`.
        count: The number of features :math:`F`; None for any.
        what: What to call the features in errors.

    Returns:
        The features in single precision, with shape :math:`(N, F)`.

    Raises:
        TypeError: If they are no tensor.
        UserError: If they are empty, of another shape, complex, or not finite in single precision.
    """
    if isinstance(features, Tensor):
        count = count or max(features.shape[-1:].numel(), 1)
        features = features if features.is_complex() else features.detach().float()
    return check_inputs(features, (count or 1,), what)


def fit_head(
    head: HeadConfig,
    id_features: Tensor,
    reference_features: Tensor,
    device: torch.device | str = "cpu",
    *,
    folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = False,
) -> HeadFit:
    r"""Trains a head to the last step, or until the time budget or a signal stops it.

    Arguments:
        head: The head.
        id_features: The features of ID data, with shape :math:`(N, F)`.
        reference_features: The features of reference data, with shape :math:`(M, F)`.
        device: Where to train.
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
    x_1 = check_features(id_features, None, "ID features").cpu()
    x_0 = check_features(reference_features, x_1.shape[1], "reference features").cpu()
    whitening = _whitening(head, x_1, x_0, folder, metadata, resume).to(device)
    seed, training = head.training.seed, head.training
    with torch.no_grad():
        id_train, id_held = _split(whitening(x_1.to(device)), head.held_out, seed, 0)
        train, held = _split(whitening(x_0.to(device)), head.held_out, seed, 1)
    validate = None
    if len(id_held) and len(held):
        validate = _held_out_numbers(id_held, held)
    rank = id_train.shape[1]
    labels = torch.zeros(len(id_train), dtype=torch.long)
    whitened = Standardise([0.0] * rank, [1.0] * rank, device)
    batches = VectorBatches(id_train, labels, train, whitened, training.batch_size, seed)
    fitted = fit(
        build_head(head, rank).to(device),
        partial(prepare_objective, head),
        batches,
        training,
        validate,
        select=None if validate is None or head.select == "last" else head.select,
        folder=folder,
        metadata=metadata,
        time_budget=time_budget,
        resume=resume,
        progress=progress,
    )
    return HeadFit(WhitenedRatio(whitening, fitted.model), fitted.outcome)


def empty_ratio(head: HeadConfig, features: int, rank: int) -> WhitenedRatio:
    r"""Returns a ratio of features to put trained tensors into, in evaluation mode.

    Arguments:
        head: The head.
        features: The number of features :math:`F`.
        rank: The number of their components :math:`r`.
    """
    whitening = Whitening(torch.zeros(features).float(), torch.zeros(features, rank).float())
    return WhitenedRatio(whitening, build_head(head, rank)).eval()


def _whitening(
    head: HeadConfig,
    x_1: Tensor,
    x_0: Tensor,
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
        if written != json.loads(json.dumps(metadata or {})):
            raise UserError(
                f"{path}: written by a run with another configuration or other data, cannot be "
                "resumed by this one."
            )
        return Whitening(tensors["mean"], tensors["matrix"])
    whitening = whitening_of(x_1, x_0, head.rank)
    if distributed.is_first():
        checkpoint.write_checkpoint(folder, WHITENING, whitening.state_dict(), metadata or {})
    return whitening


def _split(x: Tensor, share: float, seed: int, which: int) -> tuple[Tensor, Tensor]:
    count = math.ceil(share * len(x)) if len(x) >= SMALLEST else 0
    order = torch.randperm(len(x), generator=step_generator(seed, Stream.SPLIT, which, "cpu"))
    order = order.to(x.device)
    return x[order[count:]], x[order[:count]]


def _held_out_numbers(x_1: Tensor, x_0: Tensor) -> Callable[[RatioModel], dict[str, float]]:
    r"""Returns what is watched on held-out components, each side with equal weight.

    `held_out` is minus the logistic end-point loss; the AUROC is a fraction, the calibration that of
    :mod:`ood_osdre.evaluation.calibration`, at the path's rank but without its noise.
    """

    @torch.no_grad()
    def validate(ratio: RatioModel) -> dict[str, float]:
        f_1, f_0 = ratio.log_ratio(x_1), ratio.log_ratio(x_0)
        loss = F.softplus(-f_1).mean() + F.softplus(f_0).mean()
        id_scores, scores = f_1.float().cpu().numpy(), f_0.float().cpu().numpy()
        numbers = {"held_out": -loss.item()}
        numbers["held_out_auroc"] = ood_metrics(id_scores, scores).auroc
        calibration = ratio_calibration(id_scores, scores)
        return numbers | {f"held_out_{k}": v for k, v in calibration._asdict().items()}

    return validate
