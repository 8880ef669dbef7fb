r"""The log-ratio of a time-conditioned score, integrated numerically.

The network is :math:`s(x, t)`, and the log-ratio is an integral over :math:`t` that costs one
network evaluation for each time a rule visits (the number of function evaluations, NFE). That is
the comparison that a one-step ratio is made for. Quadrature over *our* model would be no baseline: as
:math:`h(x)` has no time, it needs one evaluation whatever the rule.
"""

__all__ = ["Spent", "TimeConditionedRatio"]

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..networks import Coefficients
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
