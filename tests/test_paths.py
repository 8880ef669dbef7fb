r"""Laws of the schedules and the Gaussian paths: rates, conditional time scores, their variance."""

import itertools
import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from ood_osdre.paths.gaussian import GaussianPath, Moments, Rates
from ood_osdre.paths.noises import BridgeNoise, DDBINoise, DequantisationNoise, NoiseModel
from ood_osdre.paths.schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    LinearSchedule,
    Schedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)


def scrambled(schedule: KumaraswamySchedule, scale: float = 1.0) -> KumaraswamySchedule:
    for p in schedule.parameters():
        nn.init.normal_(p, std=scale)
    return schedule


KINDS = ["affine", "spherical"]
SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "variance_preserving": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "affine": lambda: scrambled(KumaraswamySchedule(3, "affine")),
    "spherical": lambda: scrambled(KumaraswamySchedule(3, "spherical")),
}
NOISES: dict[str, Callable[[], NoiseModel]] = {
    "dequantisation": lambda: DequantisationNoise(0.2),
    "bridge": lambda: BridgeNoise(0.5, 0.1),
    "ddbi": lambda: DDBINoise(0.5, 0.1),
    "learnable_ddbi": lambda: DDBINoise(0.5, 0.1, learnable=True),
}


@pytest.fixture(params=itertools.product(SCHEDULES, NOISES), ids="-".join)
def path(request: pytest.FixtureRequest) -> GaussianPath:
    schedule, noise = request.param
    return GaussianPath(SCHEDULES[schedule](), NOISES[noise]())


def expanded_rates(path: GaussianPath, t: Tensor, x: Tensor) -> Rates:
    return Rates(*(c.reshape(-1, *(1 for _ in x.shape[1:])) for c in path.rates(t)))


def test_rates_are_their_own_derivatives(path: GaussianPath) -> None:
    t = torch.linspace(*path.t_range, 65, requires_grad=True)
    rates = path.rates(t)
    for value, derivative in zip(rates[:3], rates[3:], strict=True):
        slope = torch.zeros_like(t)
        if value.requires_grad:
            (slope,) = torch.autograd.grad(value.sum(), t, retain_graph=True)
        torch.testing.assert_close(derivative, slope)
        assert value.shape == derivative.shape == t.shape
        assert value.isfinite().all()
        assert derivative.isfinite().all()


def test_noise_models_match_their_formulas() -> None:
    t = torch.linspace(0, 1, 9)
    floor, bridge = t**2 + (1 - t) ** 2, t * (1 - t)
    expected = {
        "dequantisation": 0.2 * floor,
        "bridge": 0.5 * bridge + 0.1,
        "ddbi": 0.5 * bridge + 0.1 * floor,
        "learnable_ddbi": 0.5 * bridge + 0.1 * floor,
    }
    for name, make in NOISES.items():
        v = GaussianPath(LinearSchedule(), make()).rates(t).v
        torch.testing.assert_close(v, expected[name])


@pytest.mark.parametrize("event", [(4,), (2, 4, 4)])
def test_time_scores_match_autograd(path: GaussianPath, event: tuple[int, ...]) -> None:
    x_0, x_1, noise = torch.randn(3, 9, *event)
    t = torch.linspace(*path.t_range, 9, requires_grad=True)
    x_t = path.sample(x_0, x_1, t, noise)
    shares = path.time_score_per_dimension(x_0, x_1, t, noise)

    r = expanded_rates(path, t, x_0)
    log_p = Normal(r.alpha * x_0 + r.beta * x_1, r.v.sqrt()).log_prob(x_t.detach()).flatten(1)
    for i in range(4):
        (expected,) = torch.autograd.grad(log_p[:, i].sum(), t, retain_graph=True)
        torch.testing.assert_close(shares.flatten(1)[:, i], expected)
    (expected,) = torch.autograd.grad(log_p.sum(), t)
    torch.testing.assert_close(path.time_score(x_0, x_1, t, noise), expected)
    torch.testing.assert_close(shares.flatten(1).sum(dim=1), expected)


@pytest.mark.parametrize("grid", [(4, 4), (2, 3), (1, 1), (8, 12)])
def test_blocks_follow_the_feature_map(grid: tuple[int, int]) -> None:
    path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.1, 0.05))
    x_0, x_1, noise = torch.randn(3, 5, 3, 8, 12)
    t = torch.rand(5)
    shares = path.time_score_per_dimension(x_0, x_1, t, noise)
    blocks = path.time_score_per_block(x_0, x_1, t, noise, grid=grid)

    rows, columns = grid
    expected = torch.zeros(5, rows, columns)
    for i, j in itertools.product(range(8), range(12)):
        expected[:, i * rows // 8, j * columns // 12] += shares[:, :, i, j].sum(dim=1)
    torch.testing.assert_close(blocks, expected.flatten(1))


def test_score_has_zero_mean_and_the_stated_variance(path: GaussianPath) -> None:
    x_0, x_1 = torch.randn(2, 1, 6)
    n = 50_000
    for t in (path.t_range[0], 0.3, path.t_range[1]):
        noise, times = torch.randn(n, 6), torch.full((n,), t)
        score = path.time_score(x_0.expand(n, 6), x_1.expand(n, 6), times, noise)
        # Of one pair the moments are its own.
        variance = path.moment_variance(times[:1], Moments.of(x_0, x_1)).item()

        # Monte Carlo errors are 1 in these units, and about 1 %.
        assert abs(score.mean().item()) * math.sqrt(n / variance) < 4.5
        assert score.var().item() == pytest.approx(variance, rel=0.05)


def test_moment_variance_is_the_average_over_independent_pairs(path: GaussianPath) -> None:
    x_0, x_1 = torch.randn(7, 2, 3) + 1.5, torch.randn(5, 2, 3) + 1.0
    moments = Moments.of(x_0, x_1)
    t = torch.linspace(*path.t_range, 6)
    pairs = [path.moment_variance(t, Moments.of(a[None], b[None])) for a in x_0 for b in x_1]

    # With the absolute value of the product of the slopes, the sign of `cross` would be lost.
    assert moments.cross > 0
    torch.testing.assert_close(path.moment_variance(t, moments), torch.stack(pairs).mean(dim=0))


def test_moments_match_naive_sums() -> None:
    x_0, x_1 = torch.randn(11, 2, 3), torch.randn(4, 2, 3)
    cross = sum((a * b).sum().item() for a in x_0 for b in x_1) / 44
    squares = [sum((a**2).sum().item() for a in x) / len(x) for x in (x_0, x_1)]

    moments = Moments.of(x_0.float(), x_1.float())
    assert moments == pytest.approx((6, squares[0], cross, squares[1]), rel=1e-5)


def test_ends_are_the_dequantised_ends(path: GaussianPath) -> None:
    x_0, x_1, noise = torch.randn(3, 5, 2, 3)
    spread = math.sqrt(path.noise.eps) * noise
    torch.testing.assert_close(path.start(x_0, noise), x_0 + spread)
    torch.testing.assert_close(path.end(x_1, noise), x_1 + spread)
    if path.schedule.closed:
        torch.testing.assert_close(path.sample(x_0, x_1, torch.zeros(5), noise), x_0 + spread)
        torch.testing.assert_close(path.sample(x_0, x_1, torch.ones(5), noise), x_1 + spread)


def test_sample_has_the_conditional_mean_and_variance(path: GaussianPath) -> None:
    x_0, x_1, z = torch.randn(3, 5, 3)
    t = torch.linspace(*path.t_range, 5)
    plus, minus = path.sample(x_0, x_1, t, z), path.sample(x_0, x_1, t, -z)
    r = expanded_rates(path, t, x_0)

    torch.testing.assert_close((plus + minus) / 2, r.alpha * x_0 + r.beta * x_1)
    torch.testing.assert_close(((plus - minus) / 2) ** 2, r.v * z**2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_variance_gradients_are_finite_on_the_closed_interval(
    kind: str, dtype: torch.dtype, scale: float
) -> None:
    t = torch.linspace(0, 1, 33, dtype=dtype)
    moments = Moments(3072, 3000.0, 100.0, 3100.0)
    for noise in (DDBINoise(0.01, 0.005, learnable=True), BridgeNoise(1.0, 0.005, learnable=True)):
        path = GaussianPath(scrambled(KumaraswamySchedule(4, kind), scale), noise).to(dtype)
        variance = path.moment_variance(t, moments)
        grads = torch.autograd.grad(variance.mean(), list(path.parameters()))

        assert variance.dtype == dtype
        assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_reaches_the_path_through_its_samples(kind: str) -> None:
    path = GaussianPath(KumaraswamySchedule(2, kind), DDBINoise(0.1, 0.05, learnable=True))
    x_0, x_1, noise = torch.randn(3, 4, 3, 4, 4)
    x_0.requires_grad_()
    t = torch.rand(4, requires_grad=True)

    for method in (path.sample, path.time_score, path.time_score_per_block):
        grads = torch.autograd.grad(
            method(x_0, x_1, t, noise).sum(), [x_0, t, *path.parameters()], allow_unused=True
        )
        assert grads[0] is not None
        assert all(g is None for g in grads[1:])


def mean_variance(path: GaussianPath, moments: Moments) -> Tensor:
    return path.moment_variance((torch.arange(100) + 0.5) / 100, moments).mean()


def minimise_variance(path: GaussianPath, moments: Moments, steps: int) -> None:
    optimiser = torch.optim.Adam(path.parameters(), lr=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        mean_variance(path, moments).backward()
        optimiser.step()


@pytest.mark.parametrize(
    ("kind", "fixed", "moments"),
    [
        ("affine", LinearSchedule(), Moments(8, 30.0, 4.0, 80.0)),
        ("spherical", TrigonometricSchedule(), Moments(8, 40.0, 0.0, 40.0)),
    ],
)
def test_learning_approaches_the_minimum_variance_path(
    kind: str, fixed: Schedule, moments: Moments
) -> None:
    # The bridge's v(t) does not depend on the schedule. By Cauchy-Schwarz, a path that covers a
    # length L at speed s has ∫ s²/v ≥ L² / ∫ v: here the straight line, or the quarter circle.
    gamma2, eps = 1.0, 0.05
    length2 = {
        "affine": moments.square_0 - 2 * moments.cross + moments.square_1,
        "spherical": (math.pi / 2) ** 2 * moments.square_0,
    }[kind]
    bound = length2 / (gamma2 / 6 + eps)
    path = GaussianPath(KumaraswamySchedule(4, kind), BridgeNoise(gamma2, eps))
    still = Moments(moments.dim, 0.0, 0.0, 0.0)

    def drift_term(path: GaussianPath) -> float:
        return (mean_variance(path, moments) - mean_variance(path, still)).item()

    start = drift_term(path)
    minimise_variance(path, moments, steps=100)
    end = drift_term(path)

    assert bound * 0.999 < end < start
    assert end < drift_term(GaussianPath(fixed, path.noise))
    assert end < 1.03 * bound


def test_a_learnable_noise_stays_finite_and_keeps_its_floor() -> None:
    noise = DDBINoise(0.01, 0.05, learnable=True)
    path, moments = GaussianPath(TrigonometricSchedule(), noise), Moments(8, 80.0, 0.0, 80.0)
    before = mean_variance(path, moments).item()
    minimise_variance(path, moments, steps=60)

    assert mean_variance(path, moments).item() < before
    assert 0.01 < float(torch.as_tensor(noise.gamma2).detach()) < 100
    assert noise.eps == 0.05


def test_default_times() -> None:
    noise = DequantisationNoise(0.1)
    assert GaussianPath(LinearSchedule(), noise).t_range == (0, 1)
    assert GaussianPath(FollmerSchedule(), noise).t_range == (1e-3, 1 - 1e-3)
    assert GaussianPath(LinearSchedule(), noise, t_min=0.1).t_range == (0.1, 0.9)


# Schedules by themselves.


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_from_one_end_to_the_other(name: str) -> None:
    schedule = SCHEDULES[name]()
    ends = schedule(torch.tensor([0.0, 1.0]))
    left = math.exp(-20.1 / 4) if name == "variance_preserving" else 0.0
    torch.testing.assert_close(ends.alpha, torch.tensor([1.0, left]))
    torch.testing.assert_close(ends.beta, torch.tensor([0.0, math.sqrt(1 - left**2)]))

    low = 0 if schedule.closed else 1e-3
    rates = schedule(torch.linspace(low, 1 - low, 1025))
    assert (rates.alpha.diff() < 0).all()
    assert (rates.beta.diff() > 0).all()
    order = 1 if name in ("linear", "affine") else 2
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


def gradient_is_finite(schedule: Schedule, values: Tensor) -> bool:
    grads = torch.autograd.grad(values.sum(), list(schedule.parameters()), retain_graph=True)
    return all(bool(torch.isfinite(g).all()) for g in grads)


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
        schedule = (scrambled(schedule, scale) if scale else schedule).to(dtype)

        for rate in schedule(t):
            assert rate.dtype == dtype
            assert torch.isfinite(rate).all()
            assert gradient_is_finite(schedule, rate)
            # A sum may hide opposite infinities; the squares do not.
            assert gradient_is_finite(schedule, rate**2)


@pytest.mark.parametrize("kind", KINDS)
def test_kumaraswamy_matches_the_textbook_mixture(kind: str) -> None:
    schedule = scrambled(KumaraswamySchedule(3, kind))
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
def test_the_numbers_of_a_path_are_those_it_is_made_of(kind: str) -> None:
    path = GaussianPath(scrambled(KumaraswamySchedule(3, kind)), DDBINoise(0.3, 0.05, True))
    with torch.no_grad():
        path.noise.log_gamma2.add_(1.0)
    n, t = path.numbers(), np.linspace(0, 1, 9)
    order = 1 if kind == "affine" else 2

    first, *rest = n["weights"]
    alpha = first * (1 - t**order)
    alpha += sum(w * (1 - t**a) ** b for w, a, b in zip(rest, n["a"], n["b"], strict=True))
    rates = path.rates(torch.as_tensor(t))
    assert np.allclose(rates.alpha.detach(), alpha)
    floor = (rates.alpha**2 + rates.beta**2).detach().numpy() * n["eps"]
    assert np.allclose(rates.v.detach(), n["gamma2"] * t * (1 - t) + floor)
    assert json.loads(json.dumps(n)) == n
    fixed = GaussianPath(LinearSchedule(), DequantisationNoise(0.1))
    assert fixed.numbers() == {"eps": 0.1}


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: DequantisationNoise(0.0),
        lambda: BridgeNoise(0.1, math.nan),
        lambda: DDBINoise(-0.1, 0.1),
        lambda: BridgeNoise(0.0, 0.1, learnable=True),
        lambda: GaussianPath(FollmerSchedule(), DequantisationNoise(0.1), t_min=0.0),
        lambda: GaussianPath(LinearSchedule(), DequantisationNoise(0.1), t_min=0.5),
        lambda: KumaraswamySchedule(5, "cubic"),
        lambda: VariancePreservingSchedule(20.0, 0.1),
        # Numbers that would come out wrong and not fail: other moments, NaN.
        lambda: Moments.of(torch.zeros(2, 2, 3), torch.zeros(2, 3, 2)),
        lambda: Moments.of(torch.zeros(0, 3), torch.zeros(2, 3)),
    ],
)
def test_constructors_assert_what_makes_no_path(make: Callable[[], object]) -> None:
    with pytest.raises(AssertionError):
        make()


@pytest.mark.parametrize("wrong", range(4))
def test_tensors_that_would_broadcast_are_refused(wrong: int) -> None:
    path = GaussianPath(LinearSchedule(), DequantisationNoise(0.1))
    arguments = [torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4), torch.zeros(4, 3)]
    arguments[wrong] = arguments[wrong][:1]
    with pytest.raises(AssertionError, match="shapes"):
        path.sample(*arguments)
