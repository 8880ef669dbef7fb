r"""Losses on the marginal time score that never touch the conditional one.

All start from :math:`\mathbb{E} \, \lambda (s - \partial_t \log p_t)^2` and get rid of the
unknown score by integrating the cross term over time: exactly, with the closed form of
:math:`\partial_t s` (time score matching), or by a difference along the path (path difference).
The noise of the conditional time score, whose variance grows like :math:`V(t)`, never enters.
"""

__all__ = [
    "JointScoreMatching",
    "PathDifference",
    "TimeConditionedScoreMatching",
    "TimeScoreMatching",
]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..paths import GaussianPath, Times, UniformTimes, Weight
from .base import Batch, DataScore, PathTerm, Ratio


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
        times: The distribution :math:`p` of the batch's times; by default uniform on the path's
            interval.

    References:
        | Density Ratio Estimation via Infinitesimal Classification (Choi et al., 2022)
        | https://arxiv.org/abs/2111.11010
    """

    def __init__(
        self, path: GaussianPath, weight: Weight | None = None, times: Times | None = None
    ) -> None:
        super().__init__(path, weight)
        self.times = times = UniformTimes(*path.t_range) if times is None else times
        low, high = times.low, times.high
        inside = path.t_range[0] <= low and high <= path.t_range[1]
        assert inside, f"times in [{low}, {high}], expected within {path.t_range}"
        self.low_point = "start" if low == 0 else f"path@{low:g}"
        self.high_point = "end" if high == 1 else f"path@{high:g}"

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        low, high = self.bounds(batch)
        return {
            self.low_point: self.at_time(batch, low),
            self.high_point: self.at_time(batch, high),
            "path": self.at_time(batch, batch.t),
        }

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        h = at["path"].total
        low, high = self.bounds(batch)
        return self.loss_of_scores(
            batch.t,
            s=ratio.score(h, batch.t),
            derivative=ratio.score_derivative(h, batch.t),
            s_low=ratio.score(at[self.low_point].total, low),
            s_high=ratio.score(at[self.high_point].total, high),
        )

    def bounds(self, batch: Batch) -> tuple[Tensor, Tensor]:
        r"""Returns the earliest and the latest time, each with shape :math:`(B)`."""
        return torch.full_like(batch.t, self.times.low), torch.full_like(batch.t, self.times.high)

    def loss_of_scores(
        self, t: Tensor, s: Tensor, derivative: Tensor, s_low: Tensor, s_high: Tensor
    ) -> Tensor:
        r"""Returns the loss of the scores at `t` and at both bounds, each with shape :math:`(B)`."""
        weight, times = self.weight, self.times

        def effective(bound: float) -> Tensor:
            at = torch.full_like(t, bound)
            return times.density(at) * weight.value(at)

        value = weight.value(t)
        slope = weight.derivative(t) + value * times.log_derivative(t)
        inner = 2 * value * derivative + 2 * slope * s + value * s**2
        return inner + 2 * effective(times.low) * s_low - 2 * effective(times.high) * s_high


class JointScoreMatching(TimeScoreMatching):
    r"""Time score matching plus sliced score matching of the data score.

    A second network :math:`s^x` learns the data score :math:`\nabla_x \log p_t`. It helps the time
    score only as far as the two share weights; the ratio never uses it. The term adds to
    :class:`TimeScoreMatching`, with the same weight and times and for a standard normal probe
    :math:`v`, the sliced (Hutchinson) form of :math:`\lambda \| s^x - \nabla_x \log p_t \|^2`,

    .. math:: \lambda \| s^x \|^2 + 2 \lambda \, v^\top (\nabla_x s^x) \, v \, .

    Note:
        The loss printed in the one-step paper lacks :math:`\lambda s^2`: it is linear in the time
        score and has no minimum. The norm in its source is over the joint vector of data *and*
        time score, so the square belongs there. For times that are not uniform, the printed
        :math:`2 \dot\lambda s` is wrong as well, see :class:`TimeScoreMatching`.

    Takes the arguments of :class:`TimeScoreMatching`, and:

    Arguments:
        data_score: The network :math:`s^x(x, t)`.
        balance: The factor on the data part.

    References:
        | Sliced Score Matching (Song et al., 2019)
        | https://arxiv.org/abs/1905.07088
    """

    needs_probe = True

    def __init__(
        self,
        path: GaussianPath,
        data_score: DataScore,
        weight: Weight | None = None,
        times: Times | None = None,
        balance: float = 1.0,
    ) -> None:
        super().__init__(path, weight, times)
        self.data_score, self.balance = data_score, balance

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        assert batch.probe is not None, "the batch has no probe"
        with torch.enable_grad():
            x_t = self.at_time(batch, batch.t).detach().requires_grad_()
            score = self.data_score(x_t, batch.t).to(x_t)
            # grad(v . s) = J^T v, and (J^T v) . v = v^T J v: one backward pass for the slice.
            (slope,) = torch.autograd.grad((batch.probe * score).sum(), x_t, create_graph=True)

        data = score.square() + 2 * batch.probe * slope
        weight = self.balance * self.weight.value(batch.t)
        return super().loss(ratio, batch, at) + weight * data.flatten(1).sum(dim=1)


class TimeConditionedScoreMatching(TimeScoreMatching):
    r"""Time score matching, see :class:`TimeScoreMatching`, of a network that takes the time.

    :math:`\partial_t s` is the gradient of the network in its time argument, which doubles the
    backward pass. On a path of interpolation this is the baseline DRE-∞. Arguments and reference are
    those of :class:`TimeScoreMatching`.
    """

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        return {}

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        size, times = len(batch.t), (batch.t, *self.bounds(batch))
        t = torch.cat(times).requires_grad_()
        scores = ratio.time_score(torch.cat([self.at_time(batch, u) for u in times]), t)
        (derivative,) = torch.autograd.grad(scores[:size].sum(), t, create_graph=True)
        s, s_low, s_high = scores.split(size)
        return self.loss_of_scores(batch.t, s, derivative[:size], s_low, s_high)


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
        self, path: GaussianPath, weight: Weight | None = None, delta: float = 0.02
    ) -> None:
        super().__init__(path, weight)
        assert 0 < delta <= 0.5, f"delta is {delta}, expected in (0, 0.5]"
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
