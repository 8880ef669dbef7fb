r"""Laws of the schedules: derivatives, ends, and what keeps the learnable ones finite."""

import math
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from ood_osdre.paths.schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)

S = TypeVar("S", bound=Schedule)

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "variance_preserving": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "affine": lambda: KumaraswamySchedule(5, "affine"),
    "spherical": lambda: KumaraswamySchedule(5, "spherical"),
    "affine_random": lambda: scrambled(KumaraswamySchedule(3, "affine"), 1.0),
    "spherical_random": lambda: scrambled(KumaraswamySchedule(3, "spherical"), 1.0),
}
SPHERICAL = {"trigonometric", "variance_preserving", "follmer", "spherical", "spherical_random"}
KINDS = ["affine", "spherical"]


@pytest.fixture(params=SCHEDULES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def scrambled(schedule: S, scale: float) -> S:
    for p in schedule.parameters():
        nn.init.normal_(p, std=scale)
    return schedule


def allowed_times(schedule: Schedule, n: int = 65) -> Tensor:
    low = 0 if schedule.closed else 1e-3
    return torch.linspace(low, 1 - low, n)


def gradient_is_finite(schedule: Schedule, values: Tensor) -> bool:
    grads = torch.autograd.grad(values.sum(), list(schedule.parameters()), retain_graph=True)
    return all(bool(torch.isfinite(g).all()) for g in grads)


def test_rates_are_their_own_derivatives(name: str) -> None:
    schedule = SCHEDULES[name]()
    t = allowed_times(schedule).requires_grad_()
    alpha, beta, d_alpha, d_beta = schedule(t)

    torch.testing.assert_close(torch.autograd.grad(alpha.sum(), t, retain_graph=True)[0], d_alpha)
    torch.testing.assert_close(torch.autograd.grad(beta.sum(), t)[0], d_beta)


def test_boundary_values_monotonicity_and_type(name: str) -> None:
    schedule = SCHEDULES[name]()
    ends = schedule(torch.tensor([0.0, 1.0]))
    left = math.exp(-20.1 / 4) if name == "variance_preserving" else 0.0

    torch.testing.assert_close(ends.alpha, torch.tensor([1.0, left]))
    torch.testing.assert_close(ends.beta, torch.tensor([0.0, math.sqrt(1 - left**2)]))

    rates = schedule(allowed_times(schedule, 1025))
    assert (rates.alpha.diff() < 0).all()
    assert (rates.beta.diff() > 0).all()
    assert (rates.d_alpha <= 0).all()
    assert (rates.d_beta >= 0).all()

    order = 2 if name in SPHERICAL else 1
    total = rates.alpha**order + rates.beta**order
    torch.testing.assert_close(total, torch.ones_like(total))
    assert all(r.shape == (2, 3) for r in schedule(torch.rand(2, 3)))


def test_open_schedules_diverge_where_their_docstrings_say() -> None:
    zero, one = torch.zeros(()), torch.ones(())

    assert VariancePreservingSchedule()(zero).d_beta == math.inf
    assert VariancePreservingSchedule()(one).alpha == pytest.approx(0.0066, abs=5e-5)
    assert FollmerSchedule()(one).d_alpha == -math.inf
    assert all(torch.isfinite(r) for r in FollmerSchedule()(zero))
    assert all(torch.isfinite(r) for r in VariancePreservingSchedule()(one))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0, 1e3])
def test_kumaraswamy_is_finite_with_its_gradients(
    kind: str, dtype: torch.dtype, scale: float
) -> None:
    inner = torch.linspace(0, 1, 33)
    tiny = 10.0 ** -torch.arange(1, 40)
    t = torch.cat([inner, tiny, 1 - tiny]).to(dtype)

    for _ in range(3):
        schedule = KumaraswamySchedule(4, kind)
        if scale > 0:
            scrambled(schedule, scale)
        schedule = schedule.to(dtype)

        for rate in schedule(t):
            assert rate.dtype == dtype
            assert torch.isfinite(rate).all()
            assert gradient_is_finite(schedule, rate)
            # A sum may hide opposite infinities; the squares do not.
            assert gradient_is_finite(schedule, rate**2)


@pytest.mark.parametrize("kind", KINDS)
def test_kumaraswamy_matches_the_textbook_mixture(kind: str) -> None:
    schedule = scrambled(KumaraswamySchedule(3, kind), 1.0)
    t = torch.linspace(0.02, 0.98, 49)
    (a, b), w = schedule.shapes, schedule.weights
    m = 1 if kind == "affine" else 2
    s = t[:, None]

    cdf = w[0] * t**m + (1 - (1 - s**a) ** b) @ w[1:]
    pdf = w[0] * m * t ** (m - 1) + (a * b * s ** (a - 1) * (1 - s**a) ** (b - 1)) @ w[1:]
    beta = cdf if kind == "affine" else torch.sqrt(1 - (1 - cdf) ** 2)
    d_beta = pdf if kind == "affine" else (1 - cdf) * pdf / beta

    torch.testing.assert_close(schedule(t), type(schedule(t))(1 - cdf, beta, -pdf, d_beta))
    assert (a > m).all()
    assert (b > 2).all()
    torch.testing.assert_close(w.sum(), torch.ones(()))


@pytest.mark.parametrize("kind", KINDS)
def test_kumaraswamy_parameter_gradients_are_continuous_at_the_ends(kind: str) -> None:
    schedule = KumaraswamySchedule(3, kind)
    with torch.no_grad():
        schedule.raw_a.fill_(2.0)

    def gradients(time: float) -> list[Tensor]:
        rates = schedule(torch.tensor([time]))
        return [
            g
            for r in rates
            for g in torch.autograd.grad(r.sum(), list(schedule.parameters()), retain_graph=True)
        ]

    for end, near in [(0.0, 1e-9), (1.0, 1 - 1e-9)]:
        for at_end, nearby in zip(gradients(end), gradients(near), strict=True):
            torch.testing.assert_close(at_end, nearby, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raw_a", [1.0, -10.0])
def test_kumaraswamy_keeps_its_digits_in_single_precision(kind: str, raw_a: float) -> None:
    schedule = KumaraswamySchedule(5, kind)
    nn.init.constant_(schedule.raw_a, raw_a)
    t = torch.logspace(-25, 0, 101)
    exact = schedule(t)
    single = schedule.float()(t.float())

    for rate in ("beta", "d_alpha", "d_beta"):
        torch.testing.assert_close(
            getattr(single, rate).double(), getattr(exact, rate), rtol=1e-5, atol=3e-6
        )
    # Relative digits, down to times whose powers underflow.
    torch.testing.assert_close(single.beta.double(), exact.beta, rtol=2e-5, atol=0)


@pytest.mark.parametrize("components", [1, 8])
@pytest.mark.parametrize(
    ("kind", "reference", "distance"),
    [("affine", LinearSchedule(), 0.04), ("spherical", TrigonometricSchedule(), 0.02)],
    ids=KINDS,
)
def test_kumaraswamy_starts_near_the_fixed_schedule(
    components: int, kind: str, reference: Schedule, distance: float
) -> None:
    t = torch.linspace(0, 1, 257)
    start, target = KumaraswamySchedule(components, kind)(t), reference(t)

    assert (start.alpha - target.alpha).abs().max() < distance
    assert (start.beta - target.beta).abs().max() < distance
    assert start.d_alpha.abs().max() < 2
    assert start.d_beta.abs().max() < 2


@pytest.mark.parametrize("kind", KINDS)
def test_kumaraswamy_components_can_part(kind: str) -> None:
    schedule = KumaraswamySchedule(4, kind)
    schedule(torch.rand(64)).d_alpha.square().sum().backward()

    for p in (schedule.raw_a, schedule.raw_b):
        assert p.grad is not None
        assert len(p.grad.unique()) == len(p)
