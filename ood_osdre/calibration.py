r"""How far estimated log-ratios are log-ratios, and not merely in the right order.

For :math:`\log r = \log p_1 / p_0` two expectations are known whatever the distributions,

.. math:: \mathbb{E}_{p_0}[r] = 1 \, , \qquad \mathbb{E}_{p_1}[1 / r] = 1 \, ,

where the supports agree, and :math:`\sigma(\log r)` is the probability that an input drawn from
either with equal odds came from :math:`p_1`. AUROC sees nothing of either.
"""

__all__ = ["Calibration", "ratio_calibration"]

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logsumexp

from .metrics import check_scores

BINS = 15


class Calibration(NamedTuple):
    r"""The calibration of a log-ratio; all are 0 at the truth, but for sampling error, on draws of
    :math:`p_0` and :math:`p_1` themselves.

    Attributes:
        log_mass_0: :math:`\log \hat{\mathbb{E}}_{p_0}[\hat r]`, in nats. One large ratio among the
            reference inputs is enough to make it large.
        log_mass_1: :math:`\log \hat{\mathbb{E}}_{p_1}[1 / \hat r]`, in nats.
        posterior_error: The expected calibration error of :math:`\sigma(\log \hat r)` at equal
            odds, over 15 bins of equal width, as a fraction.
    """

    log_mass_0: float
    log_mass_1: float
    posterior_error: float


def ratio_calibration(id_scores: ArrayLike, reference_scores: ArrayLike) -> Calibration:
    r"""Returns the calibration of log-ratios on inputs that were not trained on.

    Arguments:
        id_scores: The log-ratios of ID inputs in nats, with shape :math:`(N)`.
        reference_scores: The log-ratios of reference inputs in nats, with shape :math:`(M)`.

    Returns:
        The calibration.

    Raises:
        UserError: If there are no scores of one kind, or one is not finite.

    Example:
        >>> exact = ratio_calibration([0.0] * 4, [0.0] * 4)  # of two equal distributions
        >>> [round(x, 6) for x in exact]
        [0.0, 0.0, 0.0]
    """
    positive = check_scores("ID", id_scores)
    negative = check_scores("reference", reference_scores)
    return Calibration(
        float(logsumexp(negative) - np.log(negative.size)),
        float(logsumexp(-positive) - np.log(positive.size)),
        _posterior_error(positive, negative),
    )


def _posterior_error(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    probability = expit(np.concatenate([positive, negative]))
    is_id = np.repeat([1.0, 0.0], [positive.size, negative.size])
    # Equal odds, whatever the sizes of the sets.
    weight = np.where(is_id > 0, 0.5 / positive.size, 0.5 / negative.size)
    bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weight * (is_id - probability), BINS)
    return float(np.abs(gaps).sum())
