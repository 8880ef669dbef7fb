r"""Whether log-ratios are log-ratios, and decisions with a guarantee.

**Calibration of a ratio.** For :math:`\log r = \log p_1 / p_0` two expectations are known whatever
the distributions, where their supports agree,

.. math:: \mathbb{E}_{p_0}[r] = 1 \, , \qquad \mathbb{E}_{p_1}[1 / r] = 1 \, ,

and :math:`\sigma(\log r)` is the probability that an input drawn from either with equal odds came
from :math:`p_1`. AUROC, which depends on the order of scores alone, sees nothing of either.

**Split-conformal calibration of a score.** Let :math:`s_1, \dots, s_n` be the scores (larger = more
ID) of ID inputs that neither trained nor selected the model, and :math:`s` the score of a new
input. The p-value

.. math:: p(s) = \frac{1 + \# \{ i : s_i \le s \}}{n + 1}

is small for inputs that look less ID than nearly all of the calibration set. If the new input is
exchangeable with them (drawn from the same distribution, say), then
:math:`\mathbb{P}(p \le \alpha) \le \alpha` for every :math:`\alpha`, whatever the score and the
distribution are. Flagging inputs with :math:`p \le \alpha` therefore flags ID inputs at a rate of
at most :math:`\alpha`, *in expectation over calibration sets*.

- Given one calibration set, the rate is random. Without ties it follows
  :math:`\mathrm{Beta}(k, n + 1 - k)` with :math:`k = \lfloor \alpha (n + 1) \rfloor`, whose
  standard deviation is about :math:`\sqrt{\alpha (1 - \alpha) / n}`, and the number flagged among
  :math:`m` ID inputs follows the beta-binomial law.
- Ties count against flagging, so they can only lower the rate.
- If :math:`\alpha < 1 / (n + 1)`, the smallest p-value exceeds :math:`\alpha` and nothing is ever
  flagged: at :math:`\alpha = 0.05` it takes 19 scores to flag anything at all.
- Nothing is said about OOD inputs, nor about ID inputs whose distribution has drifted.

References:
    | Algorithmic Learning in a Random World (Vovk et al., 2005), chapter 4
    | Testing for outliers with conformal p-values (Bates et al., 2023)
    | https://arxiv.org/abs/2104.08279
"""

__all__ = [
    "Calibration",
    "SplitConformal",
    "check_alpha",
    "ratio_calibration",
    "scores_of_draws",
]

import logging
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, expit, logsumexp

from ..data.sets import draws_of
from ..errors import RATE, UserError
from ..options import shown
from .metrics import check_scores

BINS = 15

log = logging.getLogger(__name__)


class Calibration(NamedTuple):
    r"""The calibration of a log-ratio; at the truth all are 0, up to sampling error.

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

    Raises:
        UserError: If there are no scores of one kind, or one is not finite.

    Example:
        >>> exact = ratio_calibration([0.0] * 4, [0.0] * 4)  # of two equal distributions
        >>> [round(x, 6) for x in exact]
        [0.0, 0.0, 0.0]
    """
    positive = check_scores("ID", id_scores)
    negative = check_scores("reference", reference_scores)
    probability = expit(np.concatenate([positive, negative]))
    is_id = np.repeat([1.0, 0.0], [positive.size, negative.size])
    # Equal odds, whatever the sizes of the sets.
    weight = np.where(is_id > 0, 0.5 / positive.size, 0.5 / negative.size)
    bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(bins, weight * (is_id - probability), BINS)
    return Calibration(
        log_mass_0=float(logsumexp(negative) - np.log(negative.size)),
        log_mass_1=float(logsumexp(-positive) - np.log(positive.size)),
        posterior_error=float(np.abs(gaps).sum()),
    )


def scores_of_draws(scores: NDArray[np.float64], draws: NDArray[np.int64]) -> NDArray[np.float64]:
    r"""Returns as many quantiles of the scores of inputs as the inputs are draws, in ascending order.

    Inputs that repeat by nature count as often as they do, which the first of each would not.

    Arguments:
        scores: The scores, with shape :math:`(n)`.
        draws: The draw of each input (:func:`~ood_osdre.data.sets.draws_of`), with shape :math:`(n)`.
    """
    count = np.unique(draws).size
    return np.sort(scores)[np.arange(count) * len(scores) // count]


class SplitConformal:
    r"""A threshold and p-values from the scores of a calibration set.

    Arguments:
        scores: The scores of ID inputs that the model has not seen, in nats, larger = more ID,
            with shape :math:`(n)`.
        alpha: The largest rate :math:`\alpha` at which ID inputs may be flagged.
        marks: What equal inputs share, with shape :math:`(n)`, None if none are equal. Copies are
            one draw, and a warning says how many draws there are (:func:`scores_of_draws`); p-values
            are no smaller than so many draws allow.

    Raises:
        UserError: If `alpha` is not in (0, 1), or scores are absent, NaN or infinite.

    Example:
        >>> conformal = SplitConformal([3.0, 1.0, 2.0, 5.0], alpha=0.4)
        >>> conformal.threshold, conformal.rate
        (2.0, 0.4)
        >>> conformal.pvalue([0.0, 2.0, 9.0])
        array([0.2, 0.6, 1. ])
        >>> conformal.flagged([1.9, 2.0])
        array([ True, False])
    """

    def __init__(
        self, scores: ArrayLike, alpha: float, marks: NDArray[np.int64] | None = None
    ) -> None:
        check_alpha(alpha)
        scores = np.sort(check_scores("calibration", scores))
        if marks is not None:
            scores, given = scores_of_draws(scores, draws_of(marks)), len(scores)
            if len(scores) < given:
                log.warning("calibration: %d of %d inputs are distinct", len(scores), given)
        self.scores = scores
        self.alpha = float(alpha)
        self.rank = _rank(self.size, self.alpha)
        if self.rank == 0:
            log.warning(
                "calibration: %d scores cannot flag at a rate of %g, so nothing is flagged; it "
                "takes at least %.15g",
                self.size,
                alpha,
                np.ceil(1 / self.alpha) - 1,  # infinite for the smallest rates
            )

    def __repr__(self) -> str:
        return f"SplitConformal({self.size} scores, alpha={self.alpha:g})"

    @property
    def size(self) -> int:
        r"""The number of calibration scores :math:`n`."""
        return self.scores.size

    @property
    def rate(self) -> float:
        r"""The expected rate :math:`k / (n + 1)` at which ID inputs are flagged, without ties."""
        return self.rank / (self.size + 1)

    @property
    def rates(self) -> tuple[float, float]:
        r"""The rates between which, without ties, 95 in 100 calibration sets of this size have theirs."""
        if not self.rank:
            return 0.0, 0.0
        low, high = betaincinv(self.rank, self.size + 1 - self.rank, (0.025, 0.975)).tolist()
        return low, high

    @property
    def threshold(self) -> float:
        r"""The :math:`k`-th smallest calibration score, in nats; inputs below it are flagged.

        It is :math:`-\infty` if :math:`k = 0`.
        """
        return float(self.scores[self.rank - 1]) if self.rank else -math.inf

    def pvalue(self, scores: ArrayLike) -> NDArray[np.float64]:
        r"""Returns the p-values of the hypothesis that an input is ID, multiples of 1 / (n + 1).

        Arguments:
            scores: The scores, larger = more ID, with shape :math:`(N)`.

        Returns:
            The p-values, with shape :math:`(N)`.

        Raises:
            UserError: If a score is NaN or infinite.
        """
        scores = check_scores("input", scores)
        return (1 + np.searchsorted(self.scores, scores, side="right")) / (self.size + 1)

    def flagged(self, scores: ArrayLike) -> NDArray[np.bool_]:
        r"""Returns which inputs are flagged as OOD: those with a p-value of at most `alpha`.

        Arguments, shapes and errors are those of :meth:`pvalue`.
        """
        return check_scores("input", scores) < self.threshold


def check_alpha(alpha: object) -> None:
    r"""Raises a :class:`UserError` for what is no rate at which ID inputs may be flagged."""
    if not isinstance(alpha, float | int | np.floating) or not 0 < alpha < 1:
        raise UserError(f"alpha: got {shown(alpha)}, expected {RATE}.")


def _rank(size: int, alpha: float) -> int:
    r"""Returns the largest :math:`k` with :math:`k / (n + 1) \le \alpha`, as floats compare."""
    k = math.floor(alpha * (size + 1))
    # The product is rounded, and 0.29 * 100 falls short of 29.
    while (k + 1) / (size + 1) <= alpha:
        k += 1
    while k / (size + 1) > alpha:
        k -= 1
    return k
