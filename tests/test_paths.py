r"""Laws of the Gaussian paths: rates, conditional time scores and their variance."""

import itertools
import math
from collections.abc import Callable

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

SCHEDULES: dict[str, Callable[[], Schedule]] = {
    "linear": LinearSchedule,
    "trigonometric": TrigonometricSchedule,
    "variance_preserving": VariancePreservingSchedule,
    "follmer": FollmerSchedule,
    "affine": lambda: KumaraswamySchedule(3, "affine"),
    "spherical": lambda: KumaraswamySchedule(3, "spherical"),
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
    t = torch.linspace(*path.t_range, 65)
    slopes = torch.func.jvp(lambda t: path.rates(t)[:3], (t,), (torch.ones_like(t),))[1]

    torch.testing.assert_close(slopes, path.rates(t)[3:])
    assert all(r.shape == t.shape and torch.isfinite(r).all() for r in path.rates(t))


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


@pytest.mark.parametrize("kind", ["affine", "spherical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_variance_gradients_are_finite_on_the_closed_interval(
    kind: str, dtype: torch.dtype, scale: float
) -> None:
    t = torch.linspace(0, 1, 33, dtype=dtype)
    moments = Moments(3072, 3000.0, 100.0, 3100.0)
    for noise in (DDBINoise(0.01, 0.005, learnable=True), BridgeNoise(1.0, 0.005, learnable=True)):
        path = GaussianPath(KumaraswamySchedule(4, kind), noise)
        for p in path.schedule.parameters():
            nn.init.normal_(p, std=scale)
        path = path.to(dtype)
        variance = path.moment_variance(t, moments)
        grads = torch.autograd.grad(variance.mean(), list(path.parameters()))

        assert variance.dtype == dtype
        assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)


@pytest.mark.parametrize("kind", ["affine", "spherical"])
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
