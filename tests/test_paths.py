r"""Tests for the ood_osdre.paths.gaussian module."""

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
NAMES = list(itertools.product(SCHEDULES, NOISES))


@pytest.fixture(params=NAMES, ids="-".join)
def path(request: pytest.FixtureRequest) -> GaussianPath:
    schedule, noise = request.param
    return GaussianPath(SCHEDULES[schedule](), NOISES[noise]())


def expand(c: Tensor, x: Tensor) -> Tensor:
    return c.reshape(-1, *(1 for _ in x.shape[1:]))


def test_rates_are_their_own_derivatives(path: GaussianPath) -> None:
    t = torch.linspace(*path.t_range, 65)
    one = torch.ones_like(t)
    slopes = torch.func.jvp(lambda t: path.rates(t)[:3], (t,), (one,))[1]

    torch.testing.assert_close(slopes, path.rates(t)[3:])
    assert all(r.shape == t.shape and torch.isfinite(r).all() for r in path.rates(t))


@pytest.mark.parametrize("noise", NOISES)
def test_noise_models_match_their_formulas(noise: str) -> None:
    path = GaussianPath(LinearSchedule(), NOISES[noise]())
    t = torch.linspace(0, 1, 9)
    floor, bridge = t**2 + (1 - t) ** 2, t * (1 - t)
    expected = {
        "dequantisation": 0.2 * floor,
        "bridge": 0.5 * bridge + 0.1,
        "ddbi": 0.5 * bridge + 0.1 * floor,
        "learnable_ddbi": 0.5 * bridge + 0.1 * floor,
    }

    torch.testing.assert_close(path.rates(t).v, expected[noise])


@pytest.mark.parametrize("event", [(3,), (2, 4, 4)])
def test_time_score_matches_autograd(path: GaussianPath, event: tuple[int, ...]) -> None:
    x_0, x_1, noise = torch.randn(3, 9, *event)
    t = torch.linspace(*path.t_range, 9, requires_grad=True)
    x_t = path.sample(x_0, x_1, t, noise)

    r = Rates(*(expand(c, x_0) for c in path.rates(t)))
    log_p = Normal(r.alpha * x_0 + r.beta * x_1, r.v.sqrt()).log_prob(x_t.detach())
    (expected,) = torch.autograd.grad(log_p.sum(), t)

    score = path.time_score(x_0, x_1, t, noise)
    assert score.shape == (9,)
    torch.testing.assert_close(score, expected)


def test_time_score_per_dimension_matches_autograd(path: GaussianPath) -> None:
    x_0, x_1, noise = torch.randn(3, 9, 4)
    t = torch.linspace(*path.t_range, 9, requires_grad=True)
    x_t = path.sample(x_0, x_1, t, noise)
    shares = path.time_score_per_dimension(x_0, x_1, t, noise)

    r = Rates(*(expand(c, x_0) for c in path.rates(t)))
    log_p = Normal(r.alpha * x_0 + r.beta * x_1, r.v.sqrt()).log_prob(x_t)
    for i in range(4):
        (expected,) = torch.autograd.grad(log_p[:, i].sum(), t, retain_graph=True)
        torch.testing.assert_close(shares[:, i], expected)

    torch.testing.assert_close(shares.sum(dim=1), path.time_score(x_0, x_1, t, noise))


@pytest.mark.parametrize("grid", [(4, 4), (2, 3), (1, 1), (8, 12)])
def test_blocks_follow_the_feature_map(grid: tuple[int, int]) -> None:
    path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.1, 0.05))
    x_0, x_1, noise = torch.randn(3, 5, 3, 8, 12)
    t = torch.rand(5)
    shares = path.time_score_per_dimension(x_0, x_1, t, noise)
    blocks = path.time_score_per_block(x_0, x_1, t, noise, grid=grid)

    rows, columns = grid
    height, width = 8 // rows, 12 // columns
    expected = torch.zeros(5, rows, columns)
    for b, c, i, j in itertools.product(range(5), range(3), range(8), range(12)):
        expected[b, i // height, j // width] += shares[b, c, i, j]

    assert blocks.shape == (5, rows * columns)
    torch.testing.assert_close(blocks, expected.flatten(1))
    torch.testing.assert_close(blocks.sum(dim=1), path.time_score(x_0, x_1, t, noise))


def test_score_has_zero_mean_and_the_stated_variance(path: GaussianPath) -> None:
    x_0, x_1 = torch.randn(2, 1, 6)
    n = 50_000

    for t in (path.t_range[0], 0.3, path.t_range[1]):
        noise = torch.randn(n, 6)
        times = torch.full((n,), t)
        score = path.time_score(x_0.expand(n, 6), x_1.expand(n, 6), times, noise)
        variance = path.conditional_variance(x_0, x_1, times[:1]).item()

        # Monte Carlo errors are 1 in these units, and about 1 %.
        assert abs(score.mean().item()) * math.sqrt(n / variance) < 4.5
        assert score.var().item() == pytest.approx(variance, rel=0.05)


def test_moment_variance_is_the_average_over_independent_pairs(path: GaussianPath) -> None:
    x_0, x_1 = torch.randn(7, 2, 3) + 1.5, torch.randn(5, 2, 3) + 1.0
    moments = Moments.of(x_0, x_1)
    t = torch.linspace(*path.t_range, 6)
    pairs_0, pairs_1 = x_0.repeat_interleave(5, dim=0), x_1.repeat(7, 1, 1)

    assert moments.dim == 6
    assert moments.cross > 0
    for time, v in zip(t, path.moment_variance(t, moments), strict=True):
        average = path.conditional_variance(pairs_0, pairs_1, time.expand(35)).mean()
        torch.testing.assert_close(v, average)


def test_moments_match_naive_sums() -> None:
    x_0, x_1 = torch.randn(11, 2, 3), torch.randn(4, 2, 3)
    moments = Moments.of(x_0.float(), x_1.float())
    pairs = [(a * b).sum().item() for a in x_0 for b in x_1]

    assert moments == pytest.approx(
        (
            6,
            sum((a**2).sum().item() for a in x_0) / 11,
            sum(pairs) / 44,
            sum((b**2).sum().item() for b in x_1) / 4,
        ),
        rel=1e-5,
    )


def test_a_common_mean_makes_the_path_easier() -> None:
    path = GaussianPath(LinearSchedule(), DDBINoise(0.1, 0.05))
    t = torch.linspace(0, 1, 5)
    together, apart = (
        path.moment_variance(t, Moments(4, 10.0, cross, 10.0)) for cross in (5.0, -5.0)
    )

    # With the absolute value of the product of the slopes this would be reversed.
    assert (together < apart).all()


def test_ends_are_the_dequantised_ends(path: GaussianPath) -> None:
    x_0, x_1, noise = torch.randn(3, 5, 2, 3)
    eps = path.noise.eps
    start, end = path.start(x_0, noise), path.end(x_1, noise)

    torch.testing.assert_close(start, x_0 + math.sqrt(eps) * noise)
    torch.testing.assert_close(end, x_1 + math.sqrt(eps) * noise)
    if path.schedule.closed:
        torch.testing.assert_close(path.sample(x_0, x_1, torch.zeros(5), noise), start)
        torch.testing.assert_close(path.sample(x_0, x_1, torch.ones(5), noise), end)


def test_sample_has_the_conditional_mean_and_variance(path: GaussianPath) -> None:
    x_0, x_1 = torch.randn(2, 5, 3)
    t = torch.linspace(*path.t_range, 5)
    z = torch.randn(5, 3)
    plus, minus = path.sample(x_0, x_1, t, z), path.sample(x_0, x_1, t, -z)
    r = Rates(*(expand(c, x_0) for c in path.rates(t)))

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
    t = (torch.arange(200) + 0.5) / 200

    def drift_term(path: GaussianPath) -> float:
        difference = path.moment_variance(t, moments) - path.moment_variance(t, still)
        return difference.mean().item()

    start = drift_term(path)
    minimise_variance(path, moments, steps=100)
    end = drift_term(path)

    assert bound * 0.999 < end < start
    assert end < drift_term(GaussianPath(fixed, path.noise))
    assert end < 1.03 * bound


def minimise_variance(path: GaussianPath, moments: Moments, steps: int) -> None:
    optimiser = torch.optim.Adam(path.parameters(), lr=0.1)
    t = (torch.arange(100) + 0.5) / 100

    for _ in range(steps):
        optimiser.zero_grad()
        path.moment_variance(t, moments).mean().backward()
        optimiser.step()


def test_learnable_noise_settles_inside() -> None:
    noise = DDBINoise(0.01, 0.05, learnable=True)
    path = GaussianPath(TrigonometricSchedule(), noise)
    t, moments = torch.linspace(0, 1, 101), Moments(8, 80.0, 0.0, 80.0)
    before = path.moment_variance(t, moments).mean().item()
    minimise_variance(path, moments, steps=60)

    assert path.moment_variance(t, moments).mean().item() < before
    assert 0.01 < float(torch.as_tensor(noise.gamma2).detach()) < 100
    assert noise.eps == 0.05


def test_default_times() -> None:
    noise = DequantisationNoise(0.1)

    assert GaussianPath(LinearSchedule(), noise).t_range == (0, 1)
    assert GaussianPath(FollmerSchedule(), noise).t_range == (1e-3, 1 - 1e-3)
    assert GaussianPath(LinearSchedule(), noise, t_min=0.1).t_range == (0.1, 0.9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DequantisationNoise(0.0), "'eps' should be positive and finite, got 0.0"),
        (lambda: DDBINoise(0.1, -1.0), "'eps' should be positive and finite, got -1.0"),
        (lambda: BridgeNoise(0.1, math.nan), "'eps'"),
        (lambda: DDBINoise(-0.1, 0.1), "'gamma2' should be non-negative and finite, got -0.1"),
        (lambda: BridgeNoise(0.0, 0.1, learnable=True), "'gamma2' should be positive"),
        (lambda: make_path(FollmerSchedule(), 0.0), "'t_min'.* FollmerSchedule"),
        (lambda: make_path(LinearSchedule(), 0.5), "'t_min' should be in"),
        (lambda: make_path(LinearSchedule(), -0.1), "'t_min' should be in"),
        (lambda: Moments.of(torch.zeros(2, 3), torch.zeros(2, 4)), r"got \(2, 3\) and \(2, 4\)"),
        (lambda: Moments.of(torch.zeros(0, 3), torch.zeros(2, 3)), "non-empty"),
    ],
)
def test_rejects_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def make_path(schedule: Schedule, t_min: float) -> GaussianPath:
    return GaussianPath(schedule, DequantisationNoise(0.1), t_min=t_min)


@pytest.mark.parametrize("wrong", range(4))
def test_rejects_tensors_that_would_broadcast(wrong: int) -> None:
    path = GaussianPath(LinearSchedule(), DequantisationNoise(0.1))
    arguments = [torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4), torch.zeros(4, 3)]
    arguments[wrong] = arguments[wrong][:1]

    with pytest.raises(ValueError, match="should share a shape"):
        path.sample(*arguments)


def test_rejects_images_that_do_not_divide_into_blocks() -> None:
    path = GaussianPath(LinearSchedule(), DequantisationNoise(0.1))
    t = torch.zeros(2)

    for shape in ((2, 3, 8, 10), (2, 3, 10, 8), (2, 16)):
        x = torch.zeros(shape)
        with pytest.raises(ValueError, match="divide into 4x4 blocks"):
            path.time_score_per_block(x, x, t, x)
