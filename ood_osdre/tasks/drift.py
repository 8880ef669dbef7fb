r"""Watches a stream through a fixed detector: what it estimates, and when to raise an alarm.

**What a fixed detector tells.** With :math:`\log r = \log p_1 / p_0` and inputs from a current
distribution :math:`q`,

.. math:: \mathbb{E}_q[\log r] = \mathrm{KL}(q \| p_0) - \mathrm{KL}(q \| p_1) \, ,

the *divergence difference*: how much closer the stream is to the ID data than to the reference. At
:math:`q = p_1` it is :math:`\mathrm{KL}(p_1 \| p_0)`, and it falls as the stream drifts away from
the ID data. It is not the divergence of the stream from anything; estimating *that* takes a ratio
that is refitted to the stream, see :class:`ood_osdre.tasks.tracking.KLTracker`.

**When to raise an alarm.** As long as stream and calibration scores are exchangeable, the rank of
each new score among all scores so far, with ties broken at random, gives p-values that are
independent and uniform (conformal prediction, online). A change makes them pile up somewhere. For
every density :math:`f` on :math:`[0, 1]` chosen before the p-value is seen, the Shiryaev-Roberts
statistic

.. math:: R_n = (1 + R_{n - 1}) \, f(p_n) \, , \qquad R_0 = 0 \, ,

has :math:`\mathbb{E}[R_n] = n` without a change. An alarm at :math:`R_n \geq c` therefore comes
after at least :math:`c` inputs on average: *at most one false alarm in c inputs*, whatever the
detector and the distribution of its scores. :math:`R` here is the mean of the statistics of
several :math:`f`, the likelihood ratios of shifts of the normal score :math:`\Phi^{-1}(p)`, up and
down.

References:
    | Algorithmic Learning in a Random World (Vovk et al., 2005)
    | Retrain or not retrain: conformal test martingales for change-point detection (Vovk et al.,
      2021)
    | https://arxiv.org/abs/2102.10439
"""

__all__ = ["DriftMonitor", "DriftReport"]

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from ..errors import UserError
from ..evaluation.metrics import check_scores
from .rows import real_values

# The shifts of the normal score, in standard deviations, that the statistic bets on.
SHIFTS = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)
LEAST_CALIBRATION = 50
# Larger numbers are no log-ratios: their squares, and so a standard error, would overflow.
LARGEST = 1e150


class DriftReport(NamedTuple):
    r"""The state of a stream after an update.

    Attributes:
        inputs: The number of inputs so far.
        divergence_difference: The mean log-ratio :math:`\mathbb{E}_q[\log \hat r]` over the
            window, in nats, an estimate of :math:`\mathrm{KL}(q \| p_0) - \mathrm{KL}(q \| p_1)`.
        standard_error: Its standard error over the window, 0 for a single input.
        baseline: The same mean over the calibration inputs.
        statistic: The statistic :math:`R_n`.
        alarm: The number of inputs after which the alarm was raised; None if it has not been.
        start: Where the change most likely began, by the statistic that crossed: the inputs before
            it; None without an alarm.
    """

    inputs: int
    divergence_difference: float
    standard_error: float
    baseline: float
    statistic: float
    alarm: int | None
    start: int | None


class DriftMonitor:
    r"""Tracks the divergence difference of a stream and raises a change alarm.

    Arguments:
        log_ratio: The fixed detector: a function from a batch of inputs to log-ratios in nats
            (larger = more ID), with shape :math:`(B)`; `detector.score` for images, of a
            :class:`ood_osdre.OneStepDetector` or a :class:`ood_osdre.Scorer`.
        calibration: Inputs from before any change that the detector was not trained on.
        run_length: The mean number :math:`c` of inputs to a false alarm, at least.
        window: The number of latest inputs that the divergence difference is taken over; right
            after a change they are a mixture of those before and after it.
        seed: The seed of the random ranks among ties.

    Raises:
        UserError: If there are fewer than 50 calibration inputs, one is masked, or a log-ratio is
            not finite or beyond 1e150 nats.
        TypeError: If the detector is no function, or `run_length` or `window` no number.
        ValueError: If `run_length` is not above 1 and finite, or `window` below 1.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> monitor = DriftMonitor(lambda x: x, rng.normal(size=500), run_length=10_000)
        >>> monitor.update(rng.normal(size=200)).alarm is None
        True
        >>> monitor.update(rng.normal(size=100) - 1).alarm is None
        False
    """

    def __init__(
        self,
        log_ratio: Callable[[Any], ArrayLike],
        calibration: object,
        run_length: float = 10_000,
        window: int = 500,
        seed: int = 0,
    ) -> None:
        if not callable(log_ratio):
            raise TypeError(
                "'log_ratio' should be a function from inputs to log-ratios, such as "
                f"detector.score, got {type(log_ratio).__name__}."
            )
        if not isinstance(run_length, int | float | np.number):
            raise TypeError(f"'run_length' should be a number, got {run_length!r}.")
        if not 1 < run_length < math.inf:
            raise ValueError(f"'run_length' should be more than 1 and finite, got {run_length}.")
        if not isinstance(window, int | np.integer):
            raise TypeError(f"'window' should be a whole number, got {window!r}.")
        if window < 1:
            raise ValueError(f"'window' should be at least 1, got {window}.")
        self._log_ratio = log_ratio
        self.run_length = float(run_length)
        self._latest: deque[float] = deque(maxlen=window)
        self._rng = np.random.default_rng(seed)
        self._logs = np.full(len(SHIFTS), -math.inf)
        self._starts = np.zeros(len(SHIFTS), dtype=np.int64)
        self._cusum = np.zeros(len(SHIFTS))
        self.count = 0
        self.restart(calibration)

    def update(self, inputs: object) -> DriftReport:
        r"""Takes the next inputs of the stream, in order.

        After an alarm the statistic is no longer updated; :meth:`restart` forgets the alarm.

        Arguments:
            inputs: A batch that the detector takes.

        Returns:
            The state after the batch. `alarm` counts inputs, not batches.

        Raises:
            UserError: If the batch is empty or masked, or a log-ratio is not finite or beyond
                1e150 nats.
        """
        for score in self._scores("stream", inputs):
            self.count += 1
            self._latest.append(float(score))
            if self.alarm is None:
                self._step(float(score))
        return self.report()

    def report(self) -> DriftReport:
        r"""Returns the state of the stream.

        Raises:
            UserError: If there has been no input.
        """
        if not self._latest:
            raise UserError("stream: got no inputs, expected at least one before a report.")
        scores = np.array(self._latest)
        error = float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        return DriftReport(
            self.count,
            float(scores.mean()),
            error,
            self.baseline,
            self.statistic,
            self.alarm,
            self.start,
        )

    @property
    def statistic(self) -> float:
        r"""The statistic :math:`R_n`, the mean over the shifts."""
        return float(np.exp(self._logs).mean())

    def restart(self, calibration: object) -> None:
        r"""Starts again after an alarm, from inputs of the new normal.

        Arguments:
            calibration: The new calibration inputs.

        Raises:
            UserError: As the constructor.
        """
        scores = self._scores("calibration", calibration)
        if len(scores) < LEAST_CALIBRATION:
            raise UserError(
                f"calibration: got {len(scores)} inputs, expected at least {LEAST_CALIBRATION}."
            )
        self.baseline = float(scores.mean())
        self._sorted = sorted(scores.tolist())
        self._latest.clear()
        self._logs[:] = -math.inf
        self._cusum[:] = 0.0
        self._starts[:] = self.count
        self.alarm: int | None = None
        self.start: int | None = None

    def _scores(self, name: str, inputs: object) -> NDArray[np.float64]:
        if np.ma.is_masked(inputs):
            raise UserError(f"{name}: got a masked array, expected one without a mask.")
        values = real_values(f"{name} scores", self._log_ratio(inputs))
        if not values.size:
            raise UserError(f"{name}: got no inputs, expected at least one.")
        scores = check_scores(name, values)
        large = int((np.abs(scores) > LARGEST).sum())
        if large:
            raise UserError(
                f"{name} scores: {large} of {len(scores)} are beyond {LARGEST:g} in size, "
                "expected log-ratios in nats."
            )
        return scores

    def _step(self, score: float) -> None:
        insort(self._sorted, score)
        left, right = bisect_left(self._sorted, score), bisect_right(self._sorted, score)
        # The rank among all scores so far, its own included, spread over ties and within a rank.
        p = (left + self._rng.random() * (right - left)) / len(self._sorted)
        z = float(ndtri(min(max(p, 1e-12), 1 - 1e-12)))
        shifts = np.array(SHIFTS)
        bets = shifts * z - shifts**2 / 2
        self._logs = np.logaddexp(0.0, self._logs) + bets
        # For the start of the change, the CUSUM of the same bets: since its last zero.
        self._cusum = np.maximum(self._cusum + bets, 0.0)
        self._starts[self._cusum == 0] = self.count
        if self.statistic >= self.run_length:
            self.alarm = self.count
            self.start = int(self._starts[int(self._logs.argmax())])
