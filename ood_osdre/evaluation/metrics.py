r"""Out-of-distribution detection metrics, as OpenOOD v1.5 defines them.

A detector gives every image one score, larger = more ID; here, a log-ratio in nats. Against one
OOD set, with :math:`N` ID and :math:`M` OOD scores and the decision "ID where score
:math:`\geq \tau`":

* AUROC is the probability that an ID image outscores an OOD image, ties counting one half. It
  does not depend on which side is called positive.
* FPR@95 takes **OOD as positive**: the fraction of ID flagged at the first threshold that catches
  at least 95 % of OOD. It is a vertex of the ROC curve, nothing is interpolated.
* AUPR-IN and AUPR-OUT are trapezoids under the precision-recall curve with ID and with OOD as
  positive. They are not average precisions, and they depend on the sizes of the two sets.
* FPR@95 **with ID positive**, the fraction of OOD accepted when at least 95 % of ID is kept, is
  what much of the literature (and OpenOOD v1) prints as "FPR95". It has its own name here.

All five are exact with ties, as every distinct score is a vertex. OpenOOD calls scikit-learn's
`roc_curve` with `drop_intermediate=True`, which discards vertices that are collinear with their
neighbours. The area is unchanged, but where tied groups line up, the first *remaining* vertex can
lie far beyond 95 %: with one ID and one OOD image at each of 20 scores, OpenOOD finds FPR@95 =
1.00 where the curve passes through 0.95. Without ties no such vertex is an FPR@95 vertex and the
numbers agree.

References:
    | OpenOOD v1.5: Enhanced Benchmark for Out-of-Distribution Detection (Zhang et al., 2023)
    | https://arxiv.org/abs/2306.09301
"""

__all__ = ["Curves", "OODMetrics", "check_scores", "curves", "ood_metrics", "threshold95"]

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError


class OODMetrics(NamedTuple):
    r"""Metrics of ID scores against one OOD set, as fractions in :math:`[0, 1]`.

    Attributes:
        auroc: The area under the ROC curve. Higher is better.
        fpr95: The fraction of ID flagged when 95 % of OOD is caught. Lower is better.
        aupr_in: The area under the precision-recall curve, ID positive. Higher is better.
        aupr_out: The area under the precision-recall curve, OOD positive. Higher is better.
        fpr95_id: The fraction of OOD accepted when 95 % of ID is kept. Lower is better.
    """

    auroc: float
    fpr95: float
    aupr_in: float
    aupr_out: float
    fpr95_id: float


def ood_metrics(id_scores: ArrayLike, ood_scores: ArrayLike) -> OODMetrics:
    r"""Compares the scores of ID images with those of one OOD set.

    Arguments:
        id_scores: The ID scores, larger = more ID, with shape :math:`(N)` or :math:`(N, 1)`.
        ood_scores: The OOD scores, with shape :math:`(M)` or :math:`(M, 1)`.

    Returns:
        The metrics, as fractions.

    Raises:
        UserError: If there are no scores of one kind, one is not finite, or not of that shape.

    Example:
        >>> ood_metrics([3.0, 2.0, 1.0], [0.0, 1.5]).fpr95  # 1 of 3 ID lies at or below 1.5
        0.3333333333333333
    """
    id_scores = check_scores("ID", id_scores)
    ood_scores = check_scores("OOD", ood_scores)
    id_first = _vertices(id_scores, ood_scores)
    ood_first = _vertices(-ood_scores, -id_scores)
    return OODMetrics(
        auroc=_area_under_roc(*ood_first),
        fpr95=_false_positive_rate(*ood_first),
        aupr_in=_area_under_precision_recall(*id_first),
        aupr_out=_area_under_precision_recall(*ood_first),
        fpr95_id=_false_positive_rate(*id_first),
    )


class Curves(NamedTuple):
    r"""The curves whose areas :func:`ood_metrics` returns, each with shape :math:`(2, V + 1)`.

    They hold every vertex, one for each of the :math:`V` distinct scores, as fractions.

    Attributes:
        roc: The fraction of ID flagged, and that of OOD caught.
        precision_in: Recall and precision with ID as positive.
        precision_out: Recall and precision with OOD as positive.
    """

    roc: NDArray[np.float64]
    precision_in: NDArray[np.float64]
    precision_out: NDArray[np.float64]


def curves(id_scores: ArrayLike, ood_scores: ArrayLike) -> Curves:
    r"""Returns the curves of ID scores against one OOD set; for arguments see :func:`ood_metrics`."""
    id_scores = check_scores("ID", id_scores)
    ood_scores = check_scores("OOD", ood_scores)
    true, false = _vertices(-ood_scores, -id_scores)
    return Curves(
        roc=np.stack([false / false[-1], true / true[-1]]),
        precision_in=_precision_recall(*_vertices(id_scores, ood_scores)),
        precision_out=_precision_recall(true, false),
    )


def threshold95(scores: ArrayLike) -> float:
    r"""Returns the least score at or below which at least 95 % of the scores lie.

    Of an OOD set it is the threshold of FPR@95: what scores no more is flagged. The threshold that
    keeps at least 95 % of ID is that of the negative ID scores, negated.

    Arguments:
        scores: The scores, with shape :math:`(N)`.

    Example:
        >>> threshold95(range(100))
        94.0
    """
    scores = np.sort(check_scores("OOD", scores))
    return float(scores[-(-19 * scores.size // 20) - 1])


def check_scores(
    name: str, scores: ArrayLike, names: Sequence[str] | None = None
) -> NDArray[np.float64]:
    r"""Refuses scores that no metric is defined for.

    Arguments:
        name: The name of the set, for the message.
        scores: The scores, of any real dtype, with shape :math:`(N)` or :math:`(N, 1)`.
        names: The file names of the :math:`N` images, if there are any.

    Returns:
        The scores, in double precision, with shape :math:`(N)`.

    Raises:
        UserError: If these are not :math:`N > 0` real numbers, or one is NaN or infinite; the
            message holds the set, the count and the first file names.
    """
    scores = np.asarray(scores)
    count = scores.size if names is None else len(names)
    has_shape = scores.shape in ((count,), (count, 1))
    if not has_shape or not count or scores.dtype.kind not in "fiu":
        raise UserError(
            f"{name} scores: got {scores.dtype} of shape {scores.shape}, expected real numbers, "
            f"at least one, of shape {'(N,) or (N, 1)' if names is None else (count,)}"
        )
    scores = scores.reshape(-1)
    bad = np.flatnonzero(~np.isfinite(scores))
    if bad.size > 0:
        message = f"{name} scores: {bad.size} of {scores.size} are NaN or infinite"
        first = [str(names[i]) if names is not None else f"index {i}" for i in bad[:3]]
        raise UserError(f"{message}, first at {', '.join(first)}; expected finite log-ratios")
    return scores.astype(np.float64)


Counts = NDArray[np.int64]


def _vertices(
    positive: NDArray[np.float64], negative: NDArray[np.float64]
) -> tuple[Counts, Counts]:
    r"""Counts true and false positives at nothing, then at each distinct score, descending.

    They are integers, so that no vertex is gained or lost to rounding, with shape :math:`(V + 1)`.
    """
    thresholds = np.unique(np.concatenate((positive, negative)))[::-1]

    def at_least(scores: NDArray[np.float64]) -> Counts:
        counts = scores.size - np.searchsorted(np.sort(scores), thresholds, side="left")
        return np.concatenate(([0], counts)).astype(np.int64)

    return at_least(positive), at_least(negative)


def _area_under_roc(true: Counts, false: Counts) -> float:
    twice = np.sum(np.diff(false) * (true[1:] + true[:-1]))
    return float(twice / (2 * true[-1] * false[-1]))


def _false_positive_rate(true: Counts, false: Counts) -> float:
    first = np.argmax(20 * true >= 19 * true[-1])
    return float(false[first] / false[-1])


def _precision_recall(true: Counts, false: Counts) -> NDArray[np.float64]:
    # With nothing retrieved, precision is 1 by convention.
    precision = np.concatenate(([1.0], true[1:] / (true[1:] + false[1:])))
    return np.stack([true / true[-1], precision])


def _area_under_precision_recall(true: Counts, false: Counts) -> float:
    recall, precision = _precision_recall(true, false)
    return float(np.sum(np.diff(recall) * (precision[1:] + precision[:-1]) / 2))
