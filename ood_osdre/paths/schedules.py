r"""Schedules: how a path mixes its reference end with its data end.

A schedule is a pair of functions of time, :math:`\alpha_t` for the reference point :math:`x_0`
and :math:`\beta_t` for the data point :math:`x_1`, with

.. math:: \alpha_0 = 1, \quad \beta_0 = 0, \quad \alpha_1 = 0, \quad \beta_1 = 1 \, .

Time runs from the reference (:math:`t = 0`) to the data (:math:`t = 1`). *Affine* schedules keep
:math:`\alpha + \beta = 1`; *spherical* ones keep :math:`\alpha^2 + \beta^2 = 1`, and with it the
norm of the mixture of two independent points of equal norm.

Values and time derivatives are closed forms and come together. A *closed* schedule is finite on
the whole of :math:`[0, 1]`, derivatives and parameter gradients included; the two that are not
closed say in their docstrings what happens at their ends, and are to be used on
:math:`[t_{\min}, 1 - t_{\min}]`.
"""

__all__ = [
    "FollmerSchedule",
    "KumaraswamySchedule",
    "LinearSchedule",
    "Schedule",
    "ScheduleRates",
    "TrigonometricSchedule",
    "VariancePreservingSchedule",
]

import abc
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("affine", "spherical")


class ScheduleRates(NamedTuple):
    r"""Mixing coefficients and their time derivatives, each with shape :math:`(*)`."""

    alpha: Tensor
    beta: Tensor
    d_alpha: Tensor
    d_beta: Tensor


class Schedule(nn.Module, abc.ABC):
    r"""Abstract schedule.

    Attributes:
        closed: Whether everything is finite on the closed interval :math:`[0, 1]`.
    """

    closed: bool = True

    @abc.abstractmethod
    def forward(self, t: Tensor) -> ScheduleRates:
        r"""Returns the coefficients and their derivatives, each with shape :math:`(*)`.

        Arguments:
            t: The time :math:`t \in [0, 1]`, with shape :math:`(*)`.
        """

    def numbers(self) -> dict[str, Any]:
        r"""Returns what can be learnt, by name, for records; empty for a fixed schedule."""
        return {}


class LinearSchedule(Schedule):
    r"""Straight lines, affine: :math:`\alpha_t = 1 - t`, :math:`\beta_t = t`."""

    def forward(self, t: Tensor) -> ScheduleRates:  # noqa: D102
        one = torch.ones_like(t)
        return ScheduleRates(1 - t, t, -one, one)


class TrigonometricSchedule(Schedule):
    r"""A great circle at constant speed, spherical.

    .. math:: \alpha_t = \cos \tfrac{\pi}{2} t, \qquad \beta_t = \sin \tfrac{\pi}{2} t
    """

    def forward(self, t: Tensor) -> ScheduleRates:  # noqa: D102
        rate = math.pi / 2
        # cos(πt/2) evaluated as a sine, which is an exact zero at t = 1.
        alpha, beta = torch.sin(rate * (1 - t)), torch.sin(rate * t)
        return ScheduleRates(alpha, beta, -rate * beta, rate * alpha)


class VariancePreservingSchedule(Schedule):
    r"""The variance-preserving diffusion, spherical; the *reference* is what decays.

    .. math::
        \alpha_t = \exp \left( -\tfrac{1}{4} (b_1 - b_0) t^2 - \tfrac{1}{2} b_0 t \right), \qquad
        \beta_t = \sqrt{1 - \alpha_t^2}

    Not closed. At :math:`t = 0`, :math:`\beta_t \sim \sqrt{b_0 t}` and :math:`\dot\beta_0 =
    \infty`. At :math:`t = 1` everything is finite but the reference has not left:
    :math:`\alpha_1 = e^{-(b_0 + b_1) / 4}`, 0.0066 with the usual rates, so that the path ends
    in a mixture with that much of :math:`x_0` in it and not in :math:`x_1`.

    Arguments:
        rate_0: The noise rate :math:`b_0 > 0` at :math:`t = 0`.
        rate_1: The noise rate :math:`b_1 \geq b_0` at :math:`t = 1`.

    References:
        | Score-based generative modeling through SDEs (Song et al., 2021)
        | https://arxiv.org/abs/2011.13456
    """

    closed = False

    def __init__(self, rate_0: float = 0.1, rate_1: float = 20.0) -> None:
        super().__init__()
        assert 0 < rate_0 <= rate_1 < math.inf, f"rates {rate_0}, {rate_1}, expected increasing"
        self.rate_0, self.rate_1 = float(rate_0), float(rate_1)

    def forward(self, t: Tensor) -> ScheduleRates:  # noqa: D102
        slope = self.rate_1 - self.rate_0
        log_alpha = -t * (slope * t / 4 + self.rate_0 / 2)
        rate = (self.rate_0 + slope * t) / 2
        alpha, beta = torch.exp(log_alpha), torch.sqrt(-torch.expm1(2 * log_alpha))
        return ScheduleRates(alpha, beta, -rate * alpha, rate * alpha**2 / beta)


class FollmerSchedule(Schedule):
    r"""The Föllmer schedule, spherical: :math:`\alpha_t = \sqrt{1 - t^2}`, :math:`\beta_t = t`.

    Not closed. At :math:`t = 1` the reference leaves at infinite speed, :math:`\dot\alpha_1 =
    -\infty`; everything is finite at :math:`t = 0`.
    """

    closed = False

    def forward(self, t: Tensor) -> ScheduleRates:  # noqa: D102
        # (1 - t)(1 + t) keeps its digits near t = 1, where 1 - t² loses them.
        alpha = torch.sqrt((1 - t) * (1 + t))
        return ScheduleRates(alpha, t, -t / alpha, torch.ones_like(t))


class KumaraswamySchedule(Schedule):
    r"""A learnable monotone schedule, :math:`\alpha_t = 1 - F(t)` for a distribution :math:`F`.

    :math:`F` is a mixture of a power law and :math:`K` Kumaraswamy distributions on [0, 1],

    .. math:: F(t) = w_0 \, t^m + \sum_{k=1}^K w_k \left[ 1 - (1 - t^{a_k})^{b_k} \right], \qquad
        \beta_t = \begin{cases}
            F(t) & \text{affine, } m = 1 \\
            \sqrt{1 - \alpha_t^2} = \sqrt{F(t) (2 - F(t))} & \text{spherical, } m = 2
        \end{cases}

    so that the boundary values hold and :math:`\alpha` falls whatever the parameters are. The
    constraints that keep every derivative finite on the closed interval, in time and in the
    parameters, are built in:

    - :math:`a_k = m + \mathrm{softplus}`. With :math:`a < 1` the density :math:`F'` explodes at
      :math:`t = 0`, and on a spherical schedule :math:`\dot\beta \sim t^{a/2 - 1}` already
      does with :math:`a < 2`.
    - :math:`b_k = 2 + \mathrm{softplus}`. With :math:`b < 1` the density explodes at
      :math:`t = 1`, and with :math:`1 < b < 2` its derivative in :math:`a` does. The power law
      is the admissible case :math:`b = 1`, and gives the ends of the path a speed: every other
      component leaves and arrives at rest.
    - :math:`w_k` has a small floor, so that no step of an optimiser can remove the power law. It
      factors out, :math:`F = t^m G` with :math:`G \geq w_0 > 0`, and the spherical
      :math:`\beta_t = t \sqrt{G (1 + \alpha)}` never meets its limit 0/0 at :math:`t = 0`.

    The parameters start close to the linear schedule (affine, :math:`|\Delta\alpha| < 0.04`) or
    to the trigonometric one (spherical, :math:`|\Delta\alpha| < 0.02`).

    Arguments:
        components: The number of Kumaraswamy components :math:`K`, besides the power law.
        kind: `"affine"` or `"spherical"`.

    References:
        | A Minimum Variance Path Principle for Score-Based Density Ratio Estimation
        | (Chen et al., 2026)
        | https://arxiv.org/abs/2602.00834

        | A generalized probability density function (Kumaraswamy, 1980)
        | https://doi.org/10.1016/0022-1694(80)90036-0
    """

    floor = 1e-3

    def __init__(self, components: int = 5, kind: str = "affine") -> None:
        super().__init__()
        assert components >= 1, f"{components} components, expected at least 1"
        assert kind in KINDS, f"kind is {kind!r}, expected one of {KINDS}"
        self.kind, self.components = kind, components
        self.order = 1 if kind == "affine" else 2

        # Shapes must differ from the start: equal components would receive equal gradients.
        spread = (torch.arange(components) + 0.5) / components
        if kind == "affine":
            weight, a, b = 0.8, 0.05 + 1.2 * spread, 0.2 + 0.8 * spread
        else:
            weight, a, b = 0.75, 0.1 + 0.6 * spread, 0.1 + 0.9 * spread

        logits = torch.zeros(components + 1)
        logits[0] = math.log(weight / (1 - weight) * components)
        self.logits = nn.Parameter(logits)
        self.raw_a = nn.Parameter(torch.log(torch.expm1(a)))
        self.raw_b = nn.Parameter(torch.log(torch.expm1(b)))

    @property
    def weights(self) -> Tensor:
        r"""The mixture weights :math:`w_0, \dots, w_K`, with shape :math:`(K + 1)`."""
        uniform = self.floor / (self.components + 1)
        return uniform + (1 - self.floor) * torch.softmax(self.logits, dim=0)

    @property
    def shapes(self) -> tuple[Tensor, Tensor]:
        r"""The shapes :math:`a` and :math:`b` of the components, each with shape :math:`(K)`."""
        return self.order + F.softplus(self.raw_a), 2 + F.softplus(self.raw_b)

    def numbers(self) -> dict[str, Any]:  # noqa: D102
        values = zip(("weights", "a", "b"), (self.weights, *self.shapes), strict=True)
        return {name: value.tolist() for name, value in values}

    def forward(self, t: Tensor) -> ScheduleRates:  # noqa: D102
        weights, (a, b) = self.weights, self.shapes
        power, rest = weights[0], weights[1:]

        s = t[..., None]
        p = s**a
        u = 1 - p
        lift = _vanishing_power(s, F.softplus(self.raw_a))  # t^(a - m)
        cdf = _relative_cdf(p, u, b)

        alpha = power * (1 - t**self.order) + (rest * u**b).sum(dim=-1)
        # F' = t^(m - 1) g
        g = power * self.order + (rest * a * b * lift * u ** (b - 1)).sum(dim=-1)
        d_alpha = -(t ** (self.order - 1)) * g

        if self.kind == "affine":
            return ScheduleRates(alpha, power * t + (rest * p * cdf).sum(dim=-1), d_alpha, g)

        # F = t^m G
        root = torch.sqrt((power + (rest * lift * cdf).sum(dim=-1)) * (1 + alpha))
        return ScheduleRates(alpha, t * root, d_alpha, alpha * g / root)


def _vanishing_power(s: Tensor, exponent: Tensor) -> Tensor:
    r"""Returns `s ** exponent` for a non-negative exponent, with zero derivatives at `s = 0`.

    Below an exponent of one the slope at zero is infinite. The callers multiply by a power of
    `s`, so the slope does not matter there, but infinity times zero would.
    """
    zero = s == 0
    at_zero = torch.zeros_like(s) ** exponent.detach()
    return torch.where(zero, at_zero, torch.where(zero, 1, s) ** exponent)


def _relative_cdf(p: Tensor, u: Tensor, b: Tensor) -> Tensor:
    r"""Returns :math:`(1 - u^b) / p` with :math:`u = 1 - p`, which tends to `b` at `p = 0`.

    The two branches are exact where they are used; each receives an argument at which it and
    its derivatives are finite where the other is used.
    """
    small = p < 0.5
    zero = p < math.sqrt(torch.finfo(p.dtype).tiny)  # the quotient's slope would overflow
    p_small = torch.where(small & ~zero, p, 0.25)
    p_large = torch.where(small, 0.75, p)
    u_large = torch.where(small, 0.25, u)

    near = -torch.expm1(b * torch.log1p(-p_small)) / p_small
    far = (1 - u_large**b) / p_large
    # Two terms of the series, to give the limit its derivatives as well.
    limit = b - b * (b - 1) / 2 * torch.where(zero, p, 0)
    return torch.where(zero, limit, torch.where(small, near, far))
