r"""Tests for the distributions of times and the weights of the objectives."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from ood_osdre.objectives import TimeScoreMatching
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import BridgeNoise, DDBINoise
from ood_osdre.paths.schedules import FollmerSchedule, KumaraswamySchedule, TrigonometricSchedule
from ood_osdre.paths.times import (
    BridgeWeight,
    Constant,
    InverseVarianceTimes,
    InverseVarianceWeight,
    LogitNormalTimes,
    NoiseVarianceWeight,
    Times,
    UniformTimes,
    Weight,
)

MOMENTS = Moments(dim=3, square_0=3.0, cross=0.5, square_1=4.0)


def make_path(name: str = "trigonometric") -> GaussianPath:
    # Built inside of a test, where float64 is the default.
    schedule = {
        "trigonometric": TrigonometricSchedule,
        "follmer": FollmerSchedule,
        "kumaraswamy": KumaraswamySchedule,
    }[name]()
    noise = BridgeNoise(0.3, 0.05) if name == "trigonometric" else DDBINoise(0.3, 0.05)
    return GaussianPath(schedule, noise)


TIMES = {
    "uniform": UniformTimes,
    "uniform-part": lambda: UniformTimes(0.2, 0.7),
    "logit-normal": LogitNormalTimes,
    "logit-normal-wide": lambda: LogitNormalTimes(1.0, 3.0),
    "logit-normal-part": lambda: LogitNormalTimes(0.5, 2.0, low=0.1, high=0.95),
    "uniform-stratified": lambda: UniformTimes(0.2, 0.7, stratified=True),
    "logit-normal-stratified": lambda: LogitNormalTimes(low=0.1, stratified=True),
    "inverse-variance-stratified": lambda: InverseVarianceTimes(
        make_path(), MOMENTS, stratified=True
    ),
    "inverse-variance": lambda: InverseVarianceTimes(make_path(), MOMENTS),
    "inverse-variance-follmer": lambda: InverseVarianceTimes(make_path("follmer"), MOMENTS),
    "inverse-variance-learnable": lambda: InverseVarianceTimes(make_path("kumaraswamy"), MOMENTS),
}


class Cubic(Weight):
    r"""A weight whose derivative is the default one."""

    def value(self, t: Tensor) -> Tensor:
        return t**3


WEIGHTS = {
    "cubic": Cubic,
    "constant": lambda: Constant(3.0),
    "bridge": BridgeWeight,
    "inverse-variance": lambda: InverseVarianceWeight(make_path(), MOMENTS),
    "inverse-variance-learnable": lambda: InverseVarianceWeight(make_path("kumaraswamy"), MOMENTS),
    "noise-variance": lambda: NoiseVarianceWeight(make_path("follmer")),
    "noise-variance-learnable": lambda: NoiseVarianceWeight(make_path("kumaraswamy")),
}


@pytest.fixture(params=TIMES)
def times(request: pytest.FixtureRequest) -> Times:
    return TIMES[request.param]()


@pytest.fixture(params=WEIGHTS)
def weight(request: pytest.FixtureRequest) -> Weight:
    return WEIGHTS[request.param]()


def test_density_integrates_to_one(times: Times) -> None:
    x, w = map(torch.as_tensor, np.polynomial.legendre.leggauss(64))
    # Denser towards the ends, where densities of logits are steep.
    edges = times.low + (times.high - times.low) * torch.linspace(-6, 6, 25).sigmoid()
    edges[0], edges[-1] = times.low, times.high
    half = edges.diff()[:, None] / 2
    t = edges[:-1, None] + half * (x + 1)
    mass = (half * w * times.density(t)).sum()

    torch.testing.assert_close(mass, torch.tensor(1.0), rtol=0, atol=1e-5)


def test_samples_follow_the_density(times: Times) -> None:
    t = times.sample(4000, torch.Generator().manual_seed(1))
    assert t.shape == (4000,)
    assert times.low <= t.min() < t.max() <= times.high

    grid = torch.linspace(times.low, times.high, 4001)
    cdf = integrate.cumulative_trapezoid(times.density(grid), grid, initial=0)
    uniform = torch.as_tensor(cdf[torch.searchsorted(grid, t).clamp(max=4000)])
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3


def test_samples_come_from_the_generator(times: Times) -> None:
    a, b, c = (times.sample(9, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


STRATIFIED = [name for name in TIMES if name.endswith("stratified")]


def cdf(times: Times, t: Tensor) -> Tensor:
    grid = torch.linspace(times.low, times.high, 20_001, dtype=torch.float64)
    mass = integrate.cumulative_trapezoid(times.density(grid), grid, initial=0)
    return torch.as_tensor(np.interp(t, grid, mass))


@pytest.mark.parametrize("name", STRATIFIED)
def test_stratified_times_are_evenly_spaced_in_probability(name: str) -> None:
    times = TIMES[name]()
    spaces = cdf(times, times.sample(50, torch.Generator().manual_seed(2))).sort().values.diff()

    torch.testing.assert_close(spaces, torch.full_like(spaces, 1 / 50), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", STRATIFIED)
def test_each_stratified_time_is_distributed_as_an_independent_one(name: str) -> None:
    times, generator = TIMES[name](), torch.Generator().manual_seed(3)
    first = torch.stack([times.sample(8, generator)[0] for _ in range(800)])

    assert stats.kstest(cdf(times, first).numpy(), "uniform").pvalue > 1e-3


def test_stratified_times_come_in_random_order() -> None:
    t = UniformTimes(stratified=True).sample(4000, torch.Generator().manual_seed(4))

    assert abs(np.corrcoef(t[1:], t[:-1])[0, 1]) < 0.06
    # As the times of a part of a batch have to cover the interval, too.
    assert stats.kstest(t[:1000].numpy(), "uniform").pvalue > 1e-3


def test_stratified_times_take_the_noise_out_of_time_score_matching() -> None:
    r"""Of a score without x the exact loss is known, the integral of its square."""

    def score(t: Tensor) -> Tensor:
        return (6 * t).sin()

    def losses(times: Times) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        t = torch.stack([times.sample(64, generator) for _ in range(200)])
        ends = score(torch.zeros(())), score(torch.ones(()))
        term = TimeScoreMatching(make_path(), times=times)
        return term.loss_of_scores(t, score(t), 6 * (6 * t).cos(), *ends).mean(dim=1)

    exact = 0.5 - np.sin(12) / 24
    independent, stratified = losses(UniformTimes()), losses(UniformTimes(stratified=True))
    assert abs(independent.mean() - exact) < 5 * independent.std() / 200**0.5
    assert abs(stratified.mean() - exact) < 5 * stratified.std() / 200**0.5
    assert stratified.std() < 0.1 * independent.std()


def test_log_derivative_is_that_of_the_density(times: Times) -> None:
    t = times.low + (times.high - times.low) * torch.linspace(0.05, 0.95, 19)
    step = 1e-5
    later, earlier = times.density(t + step).log(), times.density(t - step).log()

    torch.testing.assert_close(
        times.log_derivative(t), (later - earlier) / (2 * step), rtol=1e-6, atol=1e-6
    )


def test_logit_normal_times_are_inside_where_their_density_is_not_zero() -> None:
    torch.set_default_dtype(torch.float32)
    times = LogitNormalTimes(0.0, 8.0)
    t = times.sample(200_000)

    assert t.dtype == torch.float32
    assert 0 < t.min() < t.max() < 1
    assert torch.isfinite(times.log_derivative(t)).all()
    assert (times.density(torch.tensor([0.0, 1.0])) == 0).all()


def test_inverse_variance_times_follow_a_learnable_path() -> None:
    path = make_path("kumaraswamy")
    times = InverseVarianceTimes(path, MOMENTS)
    before = times.density(torch.tensor([0.1, 0.5]))
    with torch.no_grad():
        for p in path.parameters():
            p.add_(0.5 * torch.randn_like(p))

    after = times.density(torch.tensor([0.1, 0.5]))
    assert not torch.allclose(before, after)
    assert not after.requires_grad


def test_inverse_variance_times_fill_the_cells_of_their_table() -> None:
    t = InverseVarianceTimes(make_path(), MOMENTS, size=4).sample(1000)
    share = (4 * t) % 1

    assert stats.kstest(share.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "make",
    [
        lambda: UniformTimes(-0.1, 1),
        lambda: UniformTimes(0, 1.1),
        lambda: UniformTimes(0.5, 0.5),
        lambda: LogitNormalTimes(std=0.0),
    ],
)
def test_constructors_assert_what_is_no_distribution(make: Callable[[], Times]) -> None:
    with pytest.raises(AssertionError):
        make()


def test_weight_derivative_matches_differences(weight: Weight) -> None:
    t, step = torch.linspace(0.05, 0.95, 19), 1e-5
    expected = (weight.value(t + step) - weight.value(t - step)) / (2 * step)

    torch.testing.assert_close(weight.derivative(t), expected, rtol=1e-6, atol=1e-7)


def test_weights_are_non_negative_and_leave_the_path_alone(weight: Weight) -> None:
    t = torch.linspace(0.001, 0.999, 33, requires_grad=False)
    value, slope = weight.value(t), weight.derivative(t)

    assert value.shape == slope.shape == t.shape
    assert (value >= 0).all()
    assert not value.requires_grad
    assert not slope.requires_grad
