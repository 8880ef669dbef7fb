r"""Numerical integration of a time score, which a closed-form basis makes needless.

Given a time score :math:`s(x, t)`, the log-ratio is the integral

.. math:: \log \frac{p_1(x)}{p_0(x)} = \int_0^1 s(x, t) \, dt \quad
    \text{(nats; larger = more ID)},

and a time-conditioned network pays one evaluation for each time that a rule visits. These rules
serve the tests and the time-conditioned baselines. A one-step ratio needs none of them: its
coefficients :math:`h(x)` do not depend on the time, so one network evaluation suffices whatever
the rule. `evaluations` therefore counts calls of the function that was passed in. Log-ratios are
at least in single precision, whatever the inputs are.
"""

__all__ = ["Quadrature", "composite_rule", "ode", "trapezoid"]

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Score: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Quadrature(NamedTuple):
    r"""A log-ratio and what it cost.

    Attributes:
        log_ratio: The integrals of the time score, in nats, with shape :math:`(B)`.
        evaluations: The number of calls of the score.
    """

    log_ratio: Tensor
    evaluations: int


@torch.no_grad()
def trapezoid(
    score: Score, x: Tensor, steps: int, t_min: float = 0.0, t_max: float = 1.0
) -> Quadrature:
    r"""Integrates a time score by the trapezoidal rule, with error :math:`O(n^{-2})`.

    Arguments:
        score: A function of `x` and of times with shape :math:`(B)`, to scores with shape
            :math:`(B)`.
        x: The inputs, with shape :math:`(B, *)`.
        steps: The number :math:`n` of equal steps, hence of :math:`n + 1` evaluations.
        t_min: The lower limit.
        t_max: The upper limit, larger than the lower.
    """
    assert steps >= 1, f"{steps} steps, expected at least 1"
    assert t_min < t_max, f"limits {t_min} and {t_max}, expected increasing"
    weights = np.full(steps + 1, (t_max - t_min) / steps)
    weights[[0, -1]] /= 2
    times = np.linspace(t_min, t_max, steps + 1)
    total = x.new_zeros(len(x), dtype=_at_least_single(x))
    for t, weight in zip(times.tolist(), weights.tolist(), strict=True):
        total = total + weight * score(x, x.new_full((len(x),), t))
    return Quadrature(total, len(times))


@torch.no_grad()
def ode(
    score: Score,
    x: Tensor,
    rtol: float = 1e-6,
    atol: float = 1e-6,
    t_min: float = 0.0,
    t_max: float = 1.0,
) -> Quadrature:
    r"""Integrates a time score with an adaptive ODE solver (SciPy's).

    The solver advances the whole batch with common steps and controls the root mean square of
    the scaled errors over the batch, so the number of evaluations depends on the batch. As any
    adaptive rule it may step over a bump that is narrower than its steps without noticing.

    Note:
        The error is common to a batch and differs between batches: where inputs of several
        batches are ranked against each other, the tolerance has to be well below the spread of
        their log-ratios.

    Takes the arguments of :func:`trapezoid`, but for the steps, and:

    Arguments:
        rtol: The relative tolerance, above 0.
        atol: The absolute tolerance in nats, above 0.

    Raises:
        RuntimeError: If the solver gives up, or a score is not finite.
    """
    # Imported here: training needs the rules, and no solver.
    from scipy.integrate import solve_ivp

    assert t_min < t_max, f"limits {t_min} and {t_max}, expected increasing"
    # With any other no solver would end.
    for tolerance in (rtol, atol):
        assert 0 < tolerance < math.inf, f"tolerance {tolerance}, expected a positive number"

    def slope(t: float, _: np.ndarray) -> np.ndarray:
        s = score(x, x.new_full((len(x),), t)).cpu().double().numpy()
        # The solver would shorten its step thousands of times before it gives up.
        if bad := int((~np.isfinite(s)).sum()):
            raise RuntimeError(
                f"The ODE solver stopped at t = {t}: the score of {bad} of {len(s)} inputs is "
                "not finite."
            )
        return s

    solution = solve_ivp(slope, (t_min, t_max), np.zeros(len(x)), rtol=rtol, atol=atol)
    if not solution.success:
        raise RuntimeError(f"The ODE solver stopped at t = {solution.t[-1]}: {solution.message}")
    log_ratio = torch.as_tensor(solution.y[:, -1]).to(_at_least_single(x)).to(x.device)
    return Quadrature(log_ratio, int(solution.nfev))


def composite_rule(edges: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the times and weights of Gauss-Legendre quadrature on each of several panels.

    Arguments:
        edges: The increasing limits of the :math:`P` panels, with shape :math:`(P + 1)`.
        nodes: The number of nodes :math:`n` in each panel.

    Returns:
        The times and the weights, each with shape :math:`(P n)`.
    """
    roots, weights = np.polynomial.legendre.leggauss(nodes)
    half = np.diff(edges)[:, None] / 2
    times = edges[:-1, None] + half * (roots + 1)
    return times.ravel(), (half * weights).ravel()


def _at_least_single(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
