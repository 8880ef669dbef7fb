r"""Solver-based estimators: a time score that takes the time, integrated numerically.

The network is :math:`s(x, t)`, and the log-ratio is an integral over :math:`t` that costs one
network evaluation for each time a rule visits (the number of function evaluations, NFE). That is
the comparison that a one-step ratio is made for. Quadrature over *our* model would be no rival: as
:math:`h(x)` has no time, it needs one evaluation whatever the rule.

- DRE-∞: :class:`TimeConditionedScoreMatching`, time score matching with :math:`\partial_t s` by
  automatic differentiation, on a path of interpolation.
- D³RE: :class:`TimeConditionedConditionalMatching`, conditional score matching on the dequantised
  diffusion bridge.

References:
    | Density Ratio Estimation via Infinitesimal Classification (Choi et al., 2022)
    | https://arxiv.org/abs/2111.11010

    | Dequantified Diffusion-Schrödinger Bridge for Density Ratio Estimation (Chen et al., 2025)
    | https://arxiv.org/abs/2505.05034
"""

__all__ = [
    "TimeConditionedConditionalMatching",
    "TimeConditionedRatio",
    "TimeConditionedScoreMatching",
]

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..networks import Coefficients
from ..objectives import Constant, Draw, Times, UniformTimes, Weight
from ..objectives.marginal import time_score_loss
from ..paths import GaussianPath
from ..quadrature import Quadrature, check_tolerance, ode, trapezoid
from ..ratio import RatioModel

SOLVERS = ("trapezoid", "ode")


class Spent(NamedTuple):
    r"""What a solver cost: inputs, and network evaluations of all of them together."""

    inputs: int
    evaluations: int


class TimeConditionedRatio(RatioModel):
    r"""The log-ratio of a time score that a network gives for one time at a go.

    Arguments:
        network: A module from inputs :math:`(B, *)` and times :math:`(B)` to scores :math:`(B)`.
        evaluations: The number of network evaluations of the trapezoidal rule, at least 2.
        t_range: The interval that was trained on, which is what is integrated over.
        solver: `"trapezoid"`, or `"ode"` for an adaptive Runge-Kutta method.
        tolerance: The relative and absolute tolerance of the adaptive method, above 0.
    """

    def __init__(
        self,
        network: nn.Module,
        evaluations: int = 10,
        t_range: tuple[float, float] = (0.0, 1.0),
        solver: str = "trapezoid",
        tolerance: float = 1e-3,
    ) -> None:
        super().__init__()
        if evaluations < 2:
            raise ValueError(f"'evaluations' should be at least 2, got {evaluations}.")
        if solver not in SOLVERS:
            raise ValueError(f"'solver' should be one of {SOLVERS}, got {solver!r}.")
        check_tolerance("tolerance", tolerance)
        self.network = network
        self.evaluations, self.t_range = evaluations, t_range
        self.solver, self.tolerance = solver, tolerance
        #: The inputs integrated so far and the network evaluations of all of them together.
        self.spent = Spent(0, 0)

    def time_score(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the time score :math:`s(x, t)`, at least in single precision.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
            t: The times, with shape :math:`(B)`.

        Returns:
            The scores, with shape :math:`(B)`.
        """
        s = self.network(x, t)
        return s.to(torch.promote_types(s.dtype, torch.float32))

    def integrate(self, x: Tensor) -> Quadrature:
        r"""Returns the log-ratio and the number of network evaluations that it took.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
        """
        low, high = self.t_range
        if self.solver == "ode":
            return ode(self.time_score, x, self.tolerance, self.tolerance, low, high)
        return trapezoid(self.time_score, x, self.evaluations - 1, low, high)

    def coefficients(self, x: Tensor) -> Coefficients:
        r"""Returns the log-ratio as the only coefficient, with shape :math:`(B, 1)`."""
        log_ratio, evaluations = self.integrate(x)
        inputs, before = self.spent
        self.spent = Spent(inputs + len(x), before + len(x) * evaluations)
        return Coefficients(log_ratio[:, None])

    def log_ratio_of(self, h: Tensor) -> Tensor:
        r"""Returns the log-ratio in nats (larger = more ID), the only coefficient of `h`."""
        return h.squeeze(-1)


class TimeConditionedConditionalMatching(nn.Module):
    r"""Conditional score matching, :math:`\lambda (s(x_t, t) - \partial_t \log p_t(x_t | x_0, x_1))^2`.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
    """

    def __init__(self, path: GaussianPath, weight: Weight | None = None) -> None:
        super().__init__()
        self.path = path
        self.weight = Constant() if weight is None else weight

    def forward(self, ratio: TimeConditionedRatio, draw: Draw) -> dict[str, Tensor]:
        r"""Returns the unreduced loss, with shape :math:`(B)`, as `conditional` and `total`."""
        x_0, x_1, t, noise = draw.x_0, draw.x_1, draw.t, draw.noise
        target = self.path.time_score(x_0, x_1, t, noise)
        s = ratio.time_score(self.path.sample(x_0, x_1, t, noise), t)
        # The target's deviation is about a thousand on images: weighted before it is squared.
        loss = (self.weight.value(t).sqrt() * (s - target)).square()
        return {"conditional": loss, "total": loss}


class TimeConditionedScoreMatching(nn.Module):
    r"""Time score matching (:class:`ood_osdre.objectives.TimeScoreMatching`) of a network with time.

    :math:`\partial_t s` is the gradient of the network in its time argument, which doubles the
    backward pass.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
        times: The distribution that the draws' times come from; by default uniform on the path's
            interval.
    """

    def __init__(
        self, path: GaussianPath, weight: Weight | None = None, times: Times | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self.weight = Constant() if weight is None else weight
        self.times = UniformTimes(*path.t_range) if times is None else times

    def forward(self, ratio: TimeConditionedRatio, draw: Draw) -> dict[str, Tensor]:
        r"""Returns the unreduced loss, with shape :math:`(B)`, as `time_score` and `total`."""
        t = draw.t
        size = len(t)
        bounds = [torch.full_like(t, bound) for bound in (self.times.low, self.times.high)]
        at = torch.cat([t, *bounds]).requires_grad_()
        x = torch.cat([self.path.sample(draw.x_0, draw.x_1, u, draw.noise) for u in (t, *bounds)])

        scores = ratio.time_score(x, at)
        (derivative,) = torch.autograd.grad(scores[:size].sum(), at, create_graph=True)
        s, s_low, s_high = scores.split(size)
        loss = time_score_loss(
            self.weight,
            self.times,
            t,
            s=s,
            derivative=derivative[:size],
            s_low=s_low,
            s_high=s_high,
        )
        return {"time_score": loss, "total": loss}
