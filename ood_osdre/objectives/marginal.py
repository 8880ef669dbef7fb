r"""Losses on the marginal time score that never touch the conditional one.

Both start from :math:`\mathbb{E} \, \lambda (s - \partial_t \log p_t)^2` and get rid of the
unknown score by integrating the cross term over time: exactly, with the closed form of
:math:`\partial_t s` (time score matching), or by a difference along the path (path difference).
The noise of the conditional time score, whose variance grows like :math:`V(t)`, never enters.
"""

__all__ = ["PathDifference", "TimeScoreMatching"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..paths.gaussian import GaussianPath
from ..paths.times import Times, UniformTimes
from ..paths.weights import Constant, Weight
from .base import Batch, PathTerm, Ratio


class TimeScoreMatching(PathTerm):
    r"""Time score matching with a closed-form time derivative.

    Let :math:`t \sim p` on :math:`[a, b]`. The effective weight of the squared error is
    :math:`w = p \lambda`, and its cross term, integrated by parts, is

    .. math:: \int_a^b w \, \mathbb{E}_{p_t}[s \, \partial_t \log p_t] \, dt
        = \int_a^b w \int s \, \partial_t p_t \, dx \, dt
        = \Big[ w \, \mathbb{E}_{p_t}[s] \Big]_a^b
        - \int_a^b \mathbb{E}_{p_t}[w \, \partial_t s + \dot{w} \, s] \, dt \, .

    As :math:`\dot{w} / p = \dot\lambda + \lambda \, (\log p)^\cdot`, the squared error equals, up
    to a constant, the expectation over :math:`t \sim p` of

    .. math:: 2 \, p(a) \lambda(a) \, s(x_a, a) - 2 \, p(b) \lambda(b) \, s(x_b, b)
        + 2 \lambda \, \partial_t s + 2 \, (\dot\lambda + \lambda \, (\log p)^\cdot) \, s
        + \lambda s^2 \, ,

    the last three at :math:`(x_t, t)`. :math:`x_a` and :math:`x_b` lie on the same path: on
    :math:`[0, 1]` they are its dequantised ends. The boundary terms vanish where
    :math:`p \lambda` does, and the loss may be negative.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
        times: The distribution :math:`p` that the draws' times come from; by default uniform on
            the path's interval.

    References:
        | Density Ratio Estimation via Infinitesimal Classification (Choi et al., 2022)
        | https://arxiv.org/abs/2111.11010
    """

    def __init__(
        self,
        path: GaussianPath,
        weight: Weight | None = None,
        times: Times | None = None,
    ) -> None:
        super().__init__(path)

        low, high = path.t_range
        times = UniformTimes(low, high) if times is None else times
        if times.low < low or times.high > high:
            raise ValueError(
                f"'times' should stay within the path's interval [{low}, {high}], got {times}."
            )
        self.weight = Constant() if weight is None else weight
        self.times = times
        self.low_point = "start" if times.low == 0 else f"path@{times.low:g}"
        self.high_point = "end" if times.high == 1 else f"path@{times.high:g}"

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        low, high = self._ends(batch)
        return {
            self.low_point: self.at_time(batch, low),
            self.high_point: self.at_time(batch, high),
            "path": self.at_time(batch, batch.t),
        }

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        h = at["path"].total
        low, high = self._ends(batch)
        return time_score_loss(
            self.weight,
            self.times,
            batch.t,
            s=ratio.score(h, batch.t),
            derivative=ratio.score_derivative(h, batch.t),
            s_low=ratio.score(at[self.low_point].total, low),
            s_high=ratio.score(at[self.high_point].total, high),
        )

    def _ends(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.full_like(batch.t, self.times.low), torch.full_like(batch.t, self.times.high)


def time_score_loss(
    weight: Weight,
    times: Times,
    t: Tensor,
    *,
    s: Tensor,
    derivative: Tensor,
    s_low: Tensor,
    s_high: Tensor,
) -> Tensor:
    r"""Returns the loss of :class:`TimeScoreMatching` of the values that it needs.

    Arguments:
        weight: The weight :math:`\lambda`.
        times: The distribution :math:`p` of the times on :math:`[a, b]`.
        t: The times, with shape :math:`(B)`.
        s: The score :math:`s(x_t, t)`, with shape :math:`(B)`.
        derivative: Its derivative :math:`\partial_t s(x_t, t)`, with shape :math:`(B)`.
        s_low: The score :math:`s(x_a, a)`, with shape :math:`(B)`.
        s_high: The score :math:`s(x_b, b)`, with shape :math:`(B)`.

    Returns:
        The unreduced loss, with shape :math:`(B)`.
    """

    def effective(bound: float) -> Tensor:
        at = torch.full_like(t, bound)
        return times.density(at) * weight.value(at)

    value = weight.value(t)
    slope = weight.derivative(t) + value * times.log_derivative(t)
    inner = 2 * value * derivative + 2 * slope * s + value * s**2
    return inner + 2 * effective(times.low) * s_low - 2 * effective(times.high) * s_high


class PathDifference(PathTerm):
    r"""Time score matching by differences along the path.

    For any function :math:`f` of the point alone,
    :math:`\mathbb{E}[f(x_t) \, \partial_t \log p_t(x_t)] = \frac{d}{dt} \mathbb{E}[f(x_t)]`. With
    :math:`f = s(\cdot, t)` and a central difference for the derivative, the squared error is, up
    to a constant and an error of :math:`O(\delta^2)`, the expectation of

    .. math:: \lambda \, s(x_t, t)^2
        - \frac{\lambda}{\delta} \left[ s(x_{t + \delta}, t) - s(x_{t - \delta}, t) \right] ,

    where the three points share :math:`x_0, x_1` and :math:`z`, and the time argument of the
    score stays at :math:`t`. As the points move together, the noise cancels in the difference:
    of all losses here this has the largest gradient signal-to-noise ratio. Near the ends of the
    path's interval the later and earlier times are clipped to it and :math:`\delta` becomes half
    of the actual gap. There the difference is one-sided, with an error of :math:`O(\delta)` on a
    share :math:`O(\delta)` of the times. The loss may be negative.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
        delta: The half gap :math:`\delta`.
    """

    def __init__(
        self,
        path: GaussianPath,
        weight: Weight | None = None,
        delta: float = 0.02,
    ) -> None:
        super().__init__(path)

        if not 0 < delta <= 0.5:
            raise ValueError(f"'delta' should be in (0, 0.5], got {delta}.")
        self.weight = Constant() if weight is None else weight
        self.delta = delta
        self.later, self.earlier = f"path+{delta:g}", f"path-{delta:g}"

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        later, earlier = self._times(batch)
        return {
            "path": self.at_time(batch, batch.t),
            self.later: self.at_time(batch, later),
            self.earlier: self.at_time(batch, earlier),
        }

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        later, earlier = self._times(batch)
        weight = self.weight.value(batch.t)
        # The score is affine in h, so the difference is taken before the inner product.
        change = ratio.score(at[self.later].total - at[self.earlier].total, batch.t)
        s = ratio.score(at["path"].total, batch.t)
        return weight * s**2 - 2 * weight * change / (later - earlier)

    def _times(self, batch: Batch) -> tuple[Tensor, Tensor]:
        low, high = self.path.t_range
        later, earlier = batch.t + self.delta, batch.t - self.delta
        return later.clamp(max=high), earlier.clamp(min=low)
