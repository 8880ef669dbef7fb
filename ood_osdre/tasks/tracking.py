r"""Watches a stream: how far it has come from a reference, and when to raise an alarm.

A ratio that is refitted, :class:`KLTracker`, estimates the divergence of the stream. **A fixed
detector** :math:`\log r = \log p_1 / p_0`, :class:`DriftMonitor`, tells less: of inputs from a
current distribution :math:`q` it gives

.. math:: \mathbb{E}_q[\log r] = \mathrm{KL}(q \| p_0) - \mathrm{KL}(q \| p_1) \, ,

the *divergence difference*: how much closer the stream is to the ID data than to the reference. It
is :math:`\mathrm{KL}(p_1 \| p_0)` at first and falls as the stream drifts away from the ID data,
but is not the divergence of the stream from anything.

**The alarm** rests on ranks. As long as stream and calibration scores are exchangeable, the rank of
each new score among all scores so far, with ties broken at random, gives p-values that are
independent and uniform (conformal prediction, online). A change makes them pile up somewhere. For
every density :math:`f` on :math:`[0, 1]` chosen before, the Shiryaev-Roberts statistic

.. math:: R_n = (1 + R_{n - 1}) \, f(p_n) \, , \qquad R_0 = 0 \, ,

has :math:`\mathbb{E}[R_n] = n` without a change. An alarm at :math:`R_n \geq c` therefore comes
after at least :math:`c` inputs on average: *at most one false alarm in c inputs*, whatever the
detector and the distribution of its scores. :math:`R` here is the mean of the statistics of
several :math:`f`, likelihood ratios of shifts of the normal score :math:`\Phi^{-1}(p)`, up or down.

References:
    | Algorithmic Learning in a Random World (Vovk et al., 2005)
    | Retrain or not retrain: conformal test martingales for change-point detection
    | (Vovk et al., 2021) https://arxiv.org/abs/2102.10439
"""

__all__ = ["QUADRATIC", "DriftMonitor", "DriftReport", "KLTracker", "Tracked"]

import logging
import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from torch import Generator, Tensor

from ..errors import UserError
from ..options import shown
from ..training.batches import Stream, step_generator
from . import draws
from .fit import DrawPairs, RatioFit, divergence, fit_ratio
from .methods import METHODS, FitOptions, OptionsLike, check_method, fit_options
from .rows import check_signature, read_log_ratios

log = logging.getLogger(__name__)

QUADRATIC = FitOptions(backbone="block_quadratic", block=1, lr=0.3, steps=400)

# The points of a function that estimate a step's divergence, and its history.
HELD_OUT, WATCHED = 50_000, 1_000
# With fewer points a step's estimate would be all noise; the share of them that is held out for it.
LEAST_WINDOW, SHARE = 200, 0.25

# The shifts of the normal score, in standard deviations, that the statistic bets on.
SHIFTS = np.array([-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0])
LEAST_CALIBRATION = 50


class Tracked(NamedTuple):
    r"""A divergence at a step of a stream.

    Attributes:
        estimate: The divergence, in nats.
        history: The share of the updates and the estimate, on the way.
        seconds: The training time of the step.
        standard_error: That of the mean over the held-out points, in nats; it knows nothing of
            what the features cannot represent. None for the variational methods, whose bounds
            are no means.
    """

    estimate: float
    history: list[tuple[float, float]]
    seconds: float
    standard_error: float | None = None

    def __repr__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"Tracked({self.estimate:.4g}{error} nats, {len(self.history)} updates watched)"

    def plot(self, ax: Any = None) -> Any:  # noqa: ANN401
        r"""Draws the history, on axes of matplotlib's, or new ones, and returns them."""
        import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        ax.plot(*zip(*self.history, strict=True))
        ax.axhline(self.estimate, color="0.5", linewidth=1)
        ax.set(xlabel="share of the updates", ylabel="divergence (nats)")
        return ax


class KLTracker:
    r"""Tracks :math:`\mathrm{KL}(p_t \| p_0)` by refitting a ratio from step to step.

    A ratio starts from the last step's weights. What is estimated is
    :math:`\mathbb{E}_{p_t}[\log p_t / p_0]`, in nats, on points that training did not draw.

    Arguments:
        dim: The dimension :math:`d`.
        method: One of the keys of :data:`ood_osdre.tasks.methods.METHODS`.
        options: How the ratio is fitted at every step: options by name that differ from the
            defaults, such as `{"backbone": "quadratic"}`, or
            :class:`ood_osdre.tasks.methods.FitOptions`; seeds count up from theirs. By default
            features are squares of single coordinates, which see means and variances.
        reference: What windows of a stream are compared to: points of :math:`p_0`, at least 200,
            no column constant, with shape :math:`(N, d)`; or a function `reference(n, generator)`
            that draws :math:`n` of them, a tensor with shape :math:`(n, d)`, with a
            `torch.Generator` and on its device.

    Raises:
        UserError: If the method, an option or the reference is not as described.

    Example:
        >>> import torch
        >>> tracker = KLTracker(2, options={"steps": 20, "backbone": "quadratic"})
        >>> def draw_pairs(n, generator):
        ...     x_0, x_1 = torch.randn(2, n, 2, generator=generator)
        ...     return x_0, x_1 + 1
        >>> len(tracker.update(draw_pairs).history)
        20
    """

    def __init__(
        self,
        dim: int,
        method: str = "os-dre",
        options: OptionsLike = None,
        reference: ArrayLike | draws.Sampler | None = None,
    ) -> None:
        check_method(method, METHODS)
        self.dim, self.method = dim, method
        self.options = fit_options(options, QUADRATIC)
        self.fit: RatioFit | None = None
        self.steps = 0
        self._reference = None if reference is None else self._source("reference", reference)

    def __repr__(self) -> str:
        return f"KLTracker({self.method}, {self.dim} columns, {self.steps} updates)"

    def update(self, current: DrawPairs | ArrayLike) -> Tracked:
        r"""Refits to the current distribution and estimates its divergence on held-out points.

        Of a window a random quarter is held out for the estimate, and so is of a reference that is
        an array; training draws from the rest with replacement. Windows should not overlap: the
        weights that a step starts from have seen the last one's points. Copies of a point are held
        out together, and points taken for independent: warnings say if they seem otherwise.

        Arguments:
            current: Points of :math:`p_t`, a window with shape :math:`(N, d)`, at least 200, no
                column constant, for a tracker with a reference; or a function that draws points of
                :math:`p_0` and of :math:`p_t`, see :func:`ood_osdre.tasks.fit.fit_ratio`.

        Raises:
            UserError: If the window is masked, not finite or not as described.
        """
        options = self.options.replace(seed=self.options.seed + self.steps)
        generator = step_generator(options.seed, Stream.TEST, 0, options.device)
        if callable(current):
            check_signature("current", current)
            draw_pairs, few, many, marks = current, current(WATCHED, generator), None, None
            draws.check_drawn("current", few, 2, self.dim, WATCHED, generator.device)
        else:
            if self._reference is None:
                raise UserError("window: got points, but the tracker has no 'reference'.")
            reference, window = self._reference, self._source("window", current)

            def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
                return reference.draw(n, generator), window.draw(n, generator)

            held = [p.held_out(HELD_OUT, generator) for p in (reference, window)]
            if reference.kept is None:
                draws.check_drawn("reference", held[0], 1, self.dim, HELD_OUT, generator.device)
            few = many = held[0], held[1]
            marks = window.marks

        self.fit = fit_ratio(
            self.method, draw_pairs, self.dim, options, self.fit,
            watch=lambda fit: {"estimate": divergence(fit, *few)},
        )  # fmt: skip
        self.steps += 1
        many = draw_pairs(HELD_OUT, generator) if many is None else many
        value = divergence(self.fit, *many)
        error = None
        if self.fit.method.bound == "mean":
            error = draws.error_of_mean(self.fit.log_ratio(many[1]).double().cpu().numpy(), marks)
        if abs(value) > math.log(len(many[1])):
            log.warning(
                "divergence: %.4g nats is beyond the log of the %d held-out points; it rests on what "
                "the features can represent, not on the points.",
                *(value, len(many[1])),
            )
        history = [(h["step"] / options.steps, h["estimate"]) for h in self.fit.history]
        return Tracked(value, history, self.fit.seconds, error)

    def _source(self, name: str, values: ArrayLike | draws.Sampler) -> draws.Source:
        seed, device = self.options.seed + self.steps, self.options.device
        generator = step_generator(seed, Stream.TEST, 1, device)
        return draws.source_of(name, values, SHARE, generator, self.dim, LEAST_WINDOW)


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
        start: The number of inputs before the most likely start of the change; None likewise.
    """

    inputs: int
    divergence_difference: float
    standard_error: float
    baseline: float
    statistic: float
    alarm: int | None
    start: int | None

    def __repr__(self) -> str:
        found = f"{self.divergence_difference:.4g} ± {self.standard_error:.2g} nats"
        alarm = f"alarm at {self.alarm}, change after {self.start}" if self.alarm else "no alarm"
        state = f"calibrated at {self.baseline:.4g}, statistic {self.statistic:.4g}, {alarm}"
        return f"DriftReport({self.inputs} inputs, {found}, {state})"


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
        UserError: If `log_ratio` is no such function, there are fewer than 50 calibration inputs, one
            is masked, a log-ratio is not finite or beyond 1e150 nats, or a number is out of range.

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
        numbers = isinstance(run_length, Real) and isinstance(window, Integral)
        if not numbers or not (1 < run_length < math.inf and 1 <= window < 2**63):
            raise UserError(
                f"run_length and window: got {shown(run_length)} and {shown(window)}, expected a "
                "finite number above 1 and a whole number from 1 to 2**63 - 1."
            )
        check_signature("log_ratio", log_ratio, ("inputs",))
        self._log_ratio = log_ratio
        self.run_length, self.window = float(run_length), int(window)
        self._rng = np.random.default_rng(seed)
        self.count = 0
        self.restart(calibration)

    def __repr__(self) -> str:
        found = f"{self.count} inputs, calibrated at {self.baseline:.4g} nats"
        return f"DriftMonitor({found}, {f'alarm at {self.alarm}' if self.alarm else 'no alarm'})"

    def update(self, inputs: object) -> DriftReport:
        r"""Takes the next inputs of the stream, in order, and returns the state after them.

        After an alarm the statistic is no longer updated; :meth:`restart` forgets the alarm.

        Arguments:
            inputs: A batch that the detector takes.

        Raises:
            UserError: If the batch is empty or masked, or a log-ratio is not finite.
        """
        for score in read_log_ratios("stream", self._log_ratio, inputs):
            self.count += 1
            self._latest.append(float(score))
            if self.alarm is None:
                self._step(float(score))
        return self.report()

    def report(self) -> DriftReport:
        r"""Returns the state of the stream, of which there has to be some input."""
        if not self._latest:
            raise UserError("stream: got no inputs, expected at least one before a report.")
        scores = np.array(self._latest)
        error = float(scores.std(ddof=1)) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        state = self.baseline, self.statistic, self.alarm, self.start
        return DriftReport(self.count, float(scores.mean()), error, *state)

    @property
    def statistic(self) -> float:
        r"""The statistic :math:`R_n`, the mean over the shifts."""
        return float(np.exp(self._logs).mean())

    def restart(self, calibration: object) -> None:
        r"""Starts again after an alarm, from inputs of the new normal, checked as the first.

        Copies count once, and the guarantee is for inputs in any order: warnings tell of both.
        """
        scores = read_log_ratios("calibration", self._log_ratio, calibration, LEAST_CALIBRATION)
        scores = draws.calibration_scores(scores, calibration)
        self.baseline = float(scores.mean())
        self._sorted: list[float] = scores.tolist()
        self._latest: deque[float] = deque(maxlen=self.window)
        self._logs, self._cusum = np.full(len(SHIFTS), -math.inf), np.zeros(len(SHIFTS))
        self._starts = np.full(len(SHIFTS), self.count)
        self.alarm: int | None = None
        self.start: int | None = None

    def _step(self, score: float) -> None:
        insort(self._sorted, score)
        left, right = bisect_left(self._sorted, score), bisect_right(self._sorted, score)
        # The rank among all scores so far, its own included, spread over ties and within a rank.
        p = (left + self._rng.random() * (right - left)) / len(self._sorted)
        z = float(ndtri(min(max(p, 1e-12), 1 - 1e-12)))
        bets = SHIFTS * z - SHIFTS**2 / 2
        self._logs = np.logaddexp(0.0, self._logs) + bets
        # For the start of the change, the CUSUM of the same bets: since its last zero.
        self._cusum = np.maximum(self._cusum + bets, 0.0)
        self._starts[self._cusum == 0] = self.count
        if self.statistic >= self.run_length:
            self.alarm, self.start = self.count, int(self._starts[int(self._logs.argmax())])
