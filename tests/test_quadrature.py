r"""Laws of the rules that integrate a time score."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from ood_osdre.models.bases import KERNELS, RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.paths.quadrature import Quadrature, composite_rule, ode, trapezoid

RULES = {
    "trapezoid": partial(trapezoid, steps=512),
    "ode": partial(ode, rtol=1e-8, atol=1e-10),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


class Counting:
    r"""A score that counts its calls and checks the times it is given."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.score = score
        self.calls = 0
        self.times: list[float] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (len(x),)
        assert (t == t[0]).all()
        self.calls += 1
        self.times.append(t[0].item())
        return self.score(x, t)


def make_ratio(kernel: str = "rq") -> OneStepRatio:
    network = CoefficientNetwork(MLP(3, 16), features=16, size=8)
    torch.nn.init.normal_(network.head.weight)
    return OneStepRatio(network, RBFBasis(kernel, 8))


@rules
@pytest.mark.parametrize("kernel", KERNELS)
def test_rules_converge_to_the_one_step_value(
    rule: Callable[..., Quadrature], kernel: str
) -> None:
    ratio, x = make_ratio(kernel), torch.randn(5, 3)
    score = Counting(ratio.time_score)
    result = rule(score, x)

    assert result.evaluations == score.calls
    torch.testing.assert_close(result.log_ratio, ratio.log_ratio(x), rtol=1e-5, atol=1e-5)


@rules
def test_rules_respect_the_limits(rule: Callable[..., Quadrature]) -> None:
    x = torch.tensor([1.0, -2.0])
    score = Counting(lambda x, t: x * torch.cos(3 * t))
    result = rule(score, x, t_min=0.2, t_max=0.7)
    expected = x * (np.sin(2.1) - np.sin(0.6)) / 3

    assert 0.2 <= min(score.times) <= max(score.times) <= 0.7
    torch.testing.assert_close(result.log_ratio, expected, rtol=1e-6, atol=1e-6)


@rules
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_log_ratios_are_at_least_in_single_precision_and_record_no_gradient(
    rule: Callable[..., Quadrature], dtype: torch.dtype
) -> None:
    slope = torch.ones((), dtype=dtype, requires_grad=True)
    result = rule(lambda x, t: slope * x, torch.ones(2, dtype=dtype)).log_ratio
    assert result.dtype is torch.promote_types(dtype, torch.float32)
    assert not result.requires_grad
    torch.testing.assert_close(result, torch.ones_like(result))


def test_trapezoid_is_second_order() -> None:
    ratio, x = make_ratio(), torch.randn(5, 3)
    truth = ratio.log_ratio(x)
    errors = [
        (trapezoid(ratio.time_score, x, steps).log_ratio - truth).abs() for steps in (8, 16, 32)
    ]

    for coarse, fine in pairwise(errors):
        torch.testing.assert_close(coarse / fine, torch.full((5,), 4.0), rtol=0.05, atol=0)


def test_ode_adapts_to_the_score() -> None:
    def bump(x: Tensor, t: Tensor, width: float) -> Tensor:
        return x * torch.exp(-(((t - 0.5) / width) ** 2))

    x = torch.ones(2)
    wide = ode(partial(bump, width=1.0), x)
    narrow = ode(partial(bump, width=0.2), x)
    tight = ode(partial(bump, width=0.2), x, rtol=1e-10, atol=1e-12)

    assert wide.evaluations < narrow.evaluations < tight.evaluations


def test_ode_reports_failure() -> None:
    with pytest.raises(RuntimeError, match="The ODE solver stopped at t = "):
        ode(lambda x, t: x / (0.5 - t).abs() ** 3, torch.ones(1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_ode_refuses_scores_that_are_not_finite_at_once(bad: float) -> None:
    score = Counting(lambda x, t: x)
    with pytest.raises(RuntimeError, match=r"stopped at t = 0.0: the score of 1 of 3 inputs"):
        ode(score, torch.tensor([1.0, bad, 2.0]))
    assert score.calls == 1


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_the_composite_rule_is_exact_for_polynomials_on_every_panel(nodes: int) -> None:
    edges = np.array([0.0, 0.1, 0.5, 1.0])
    times, weights = composite_rule(edges, nodes)
    assert times.shape == weights.shape == (3 * nodes,)
    assert (np.diff(times) > 0).all()
    np.testing.assert_allclose(weights.reshape(3, nodes).sum(axis=1), np.diff(edges))
    for degree in range(2 * nodes):
        assert weights @ times**degree == pytest.approx(1 / (degree + 1), rel=1e-13)
    assert abs(weights @ times ** (2 * nodes) - 1 / (2 * nodes + 1)) > 1e-10


@pytest.mark.parametrize(
    "call",
    [
        partial(trapezoid, steps=0),
        partial(trapezoid, steps=4, t_min=1.0, t_max=0.5),
        partial(ode, rtol=0.0),
        partial(ode, atol=float("nan")),
    ],
)
def test_what_would_give_no_integral_is_refused(call: Callable[..., Quadrature]) -> None:
    with pytest.raises(AssertionError):
        call(lambda x, t: x, torch.ones(1))
