r"""Tests of the planar sets, of mixtures and of total masses."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ood_osdre.tasks.partition import (
    GaussianMixture,
    annealed_mass,
    grid_mass,
    grid_points,
    importance_mass,
    log_normal,
    weights_mass,
)
from ood_osdre.tasks.suites.toy import PLANAR_SETS, planar_set


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", PLANAR_SETS)
def test_density_integrates_to_one(name: str) -> None:
    # Cells of the grid end at even numbers, where the checkerboard's squares do.
    half, size = 6.0, 120
    step = 2 * half / size
    if name == "tree":  # finer than a grid would afford
        log_mass = importance_mass(
            planar_set(name).log_density,
            GaussianMixture.fit(planar_set(name).sample(2000, generator()), 12, 0.1, 1.5),
            3000,
            generator(1),
        )
        assert log_mass.error < 0.05
        assert abs(log_mass.value) < 4 * log_mass.error
        return
    axis = torch.linspace(-half + step / 2, half - step / 2, size)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).reshape(-1, 2)
    mass = planar_set(name).log_density(points).exp().sum() * step**2
    assert mass.item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", PLANAR_SETS)
def test_samples_follow_the_density(name: str) -> None:
    # Every cell's count against the integral of the density, by random points in the cell.
    n, half, inner = 20_000, 4.0, 100
    bins = 8 if name in ("tree", "2spirals") else 16  # slow densities
    x = planar_set(name).sample(n, generator())
    edges = torch.linspace(-half, half, bins + 1)
    count = torch.histogramdd(x, bins=[edges, edges]).hist
    u = torch.rand(bins, bins, inner, 2, generator=generator(1))
    corner = grid_points(half, bins + 1).reshape(bins + 1, bins + 1, 2)[:-1, :-1]
    points = corner[:, :, None] + u * (2 * half / bins)
    density = planar_set(name).log_density(points.reshape(-1, 2)).exp().reshape(u.shape[:3])
    area = (2 * half / bins) ** 2
    mass = density.mean(dim=2) * area
    error = density.std(dim=2) * area / math.sqrt(inner)
    z = (count / n - mass) / (mass * (1 - mass) / n + error**2 + (2 / n) ** 2).sqrt()
    assert z.abs().max() < 6
    assert z.square().mean() < 1.7


def test_constants_of_the_original_code() -> None:
    # scikit-learn's generators are the original code of three sets.
    from sklearn.datasets import make_circles, make_moons, make_swiss_roll

    n = 8000
    original = {
        "swissroll": make_swiss_roll(n, noise=1.0, random_state=0)[0][:, [0, 2]] / 5,
        "circles": make_circles(n, factor=0.5, noise=0.08, random_state=0)[0] * 3,
        "moons": make_moons(n, noise=0.1, random_state=0)[0] * 2 + np.array([-1, -0.2]),
    }
    for name, x in original.items():
        ours = planar_set(name).log_density(planar_set(name).sample(n, generator()))
        theirs = planar_set(name).log_density(torch.as_tensor(x))
        error = math.hypot(ours.std().item(), theirs.std().item()) / math.sqrt(n)
        assert abs(ours.mean() - theirs.mean()) < 5 * error, name


def test_tree_is_the_published_mixture() -> None:
    x = planar_set("tree").sample(20_000, generator())
    # 2 trees of 2^7 - 1 branches of 8 components; the trunk starts at the origin times 4.
    assert x.abs().max() < 5
    assert x.std(dim=0).tolist() == pytest.approx([1.53, 1.45], abs=0.03)


def test_mixture_of_one_component_is_a_gaussian() -> None:
    factor = torch.tensor([[1.0, 0.0, 0.0], [0.5, 2.0, 0.0], [-1.0, 0.3, 0.7]])
    mean = torch.tensor([1.0, -2.0, 0.5])
    mixture = GaussianMixture(mean[None], factor[None], torch.ones(1))
    truth = torch.distributions.MultivariateNormal(mean, scale_tril=factor)
    x = truth.sample((50,))
    torch.testing.assert_close(mixture.log_density(x), truth.log_prob(x))
    drawn = mixture.sample(50_000, generator())
    torch.testing.assert_close(drawn.mean(dim=0), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), factor @ factor.T, atol=0.15, rtol=0)


def test_fitted_mixture_is_defensive() -> None:
    x = 0.1 * torch.randn(500, 2) + 3
    mixture = GaussianMixture.fit(x, 2, defensive=0.2)
    assert mixture.weights.sum().item() == pytest.approx(1)
    far = torch.tensor([[-2.0, -2.0]])
    torch.testing.assert_close(mixture.log_density(far), log_normal(far) + math.log(0.2))


def shifted(x: Tensor) -> Tensor:
    r"""The log-ratio of twice the density of N((1, 0, ..), I / 4) to that of N(0, I)."""
    d = x.shape[1]
    y = x - torch.eye(d)[0].to(x)
    return math.log(2) + d * math.log(2) - 2 * y.square().sum(1) + x.square().sum(1) / 2


def test_three_estimates_of_a_known_mass() -> None:
    def log_density(x: Tensor) -> Tensor:
        return shifted(x) + log_normal(x)

    assert grid_mass(log_density).value == pytest.approx(math.log(2), abs=1e-6)
    proposal = GaussianMixture(torch.zeros(1, 2), torch.eye(2)[None], torch.ones(1))
    by_importance = importance_mass(log_density, proposal, 20_000, generator())
    assert by_importance.error < 0.05
    assert abs(by_importance.value - math.log(2)) < 4 * by_importance.error

    by_annealing = annealed_mass(shifted, 6, generator(), chains=128, levels=80)
    assert by_annealing.error < 0.12
    assert abs(by_annealing.value - math.log(2)) < 4 * by_annealing.error
    assert by_annealing.effective > 40


def test_error_of_a_mass_covers_its_spread() -> None:
    weights = torch.randn(400, 500)  # lognormal, with mean sqrt(e)
    estimates = [weights_mass(w) for w in weights]
    z = torch.tensor([(e.value - 0.5) / e.error for e in estimates])
    assert 0.85 < z.std() < 1.25
    assert estimates[0].effective < 500
    assert weights_mass(torch.zeros(10)).effective == pytest.approx(10)


def test_grid_tells_when_it_is_too_coarse() -> None:
    def narrow(x: Tensor) -> Tensor:
        return log_normal((x - 0.01) / 0.05) - 2 * math.log(0.05)

    assert grid_mass(narrow, size=41).error > 0.1
    fine = grid_mass(narrow, half_width=2, size=401)
    assert fine.error < 1e-6
    assert fine.value == pytest.approx(0, abs=1e-6)
