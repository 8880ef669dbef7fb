r"""Tests for the ood_osdre.tasks.fit, methods and features modules."""

import math

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from ood_osdre.models import Prediction, RatioModel
from ood_osdre.models.bases import KERNELS, RBFBasis
from ood_osdre.models.networks import QuadraticFeatures
from ood_osdre.objectives import Batch, EndPointLoss
from ood_osdre.paths.quadrature import composite_rule
from ood_osdre.tasks.draws import check_drawn
from ood_osdre.tasks.features import OrthonormalBasis, TimeConditionedFeatures
from ood_osdre.tasks.fit import METHODS, FitOptions, RatioFit, divergence, fit_ratio
from ood_osdre.tasks.gaussians import GaussianPair
from ood_osdre.tasks.rows import Affine

QUICK = FitOptions(steps=100, batch_size=256, lr=0.1, backbone="quadratic", size=8, evaluations=8)


def shifted(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    r"""Draws N(0, I) and N((1, 0), I), whose log-ratio is x_1 - 1/2."""
    x = torch.randn(2, n, 2, generator=generator)
    return x[0], x[1] + torch.tensor([1.0, 0.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_orthonormal_basis_is_orthonormal_and_integrates_itself(kernel: str) -> None:
    inner = RBFBasis(kernel, size=6, sigma=0.3).requires_grad_(False)
    basis = OrthonormalBasis(inner, ridge=1e-12)
    t, w = map(torch.as_tensor, composite_rule(np.linspace(0, 1, 41), nodes=8))
    values = basis(t)

    assert torch.allclose(values.T @ (w[:, None] * values), 6 * torch.eye(6), atol=1e-4)
    assert torch.allclose(basis.integral(), w @ values, atol=1e-8)
    # The derivative is that of forward-mode differentiation.
    inside = t[(t[:, None] - inner.centers).abs().min(dim=1).values > 1e-3]
    assert torch.allclose(
        basis.derivative(inside), super(OrthonormalBasis, basis).derivative(inside)
    )
    # The span is that of the basis: no residual is left of a regression on it.
    weights = torch.linalg.lstsq(inner(t), values).solution
    assert torch.allclose(inner(t) @ weights, values, atol=1e-6)


def test_time_conditioned_features_start_at_zero_and_depend_on_time() -> None:
    network = TimeConditionedFeatures(QuadraticFeatures(2), 5)
    x, t = torch.randn(7, 2), torch.rand(7)
    assert torch.equal(network(x, t), torch.zeros(7))

    nn.init.normal_(network.head.weight)
    assert network(x, t).shape == (7,)
    assert not torch.allclose(network(x, t), network(x, t / 2))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_a_shift(method: str) -> None:
    # A smaller shift than elsewhere: least squares wants the fourth moment of the ratio.
    def slightly(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(2, n, 2, generator=generator)
        return x[0], x[1] + torch.tensor([0.5, 0.0])

    options = QUICK.replace(lr=0.01 if METHODS[method].solver else 0.03)
    if method == "os-dre-conditional":
        options = options.replace(gamma2=0.5, eps=0.005)
    fit = fit_ratio(method, slightly, 2, options)
    x = torch.randn(512, 2)
    estimate, truth = fit.log_ratio(x), x[:, 0] / 2 - 0.125

    # InfoNCE and MINE know the ratio up to a constant.
    if METHODS[method].bound in ("infonce", "dv"):
        estimate, truth = estimate - estimate.mean(), truth - truth.mean()
    if method == "chisq":
        truth = truth - math.log(1.2)
    assert (estimate - truth).abs().mean() < 0.2
    assert torch.corrcoef(torch.stack([estimate, truth]))[0, 1] > 0.9
    assert fit.seconds > 0
    assert fit.parameters > 0


def projected(pair: GaussianPair, rows: Tensor) -> GaussianPair:
    r"""Returns the distributions of the features A x, for orthonormal rows A."""
    return GaussianPair("features", rows @ pair.mean, rows @ pair.covariance @ rows.T)


def test_the_ratio_of_features_is_the_mean_of_the_ratio_given_them() -> None:
    rotation = torch.linalg.qr(torch.randn(3, 3))[0]
    rows, hidden = rotation[:2], rotation[2]
    root = torch.eye(3) + 0.3 * torch.randn(3, 3)
    pair = GaussianPair("points", 0.5 * torch.randn(3), root @ root.T)
    features = torch.randn(7, 2)

    # Under p_0 = N(0, I), what the features leave open is N(0, 1) along the hidden direction.
    z, w = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(80))
    x = (features @ rows)[:, None] + z[:, None] * hidden
    mean = pair.log_ratio(x.flatten(0, 1)).exp().reshape(7, -1) @ (w / w.sum())
    torch.testing.assert_close(projected(pair, rows).log_ratio(features), mean.log())


def test_features_lose_divergence_unless_they_are_sufficient() -> None:
    rows, eye = torch.eye(3)[:2], torch.eye(3)
    seen, unseen = torch.tensor([1.0, -0.5, 0.0]), torch.tensor([0.0, 0.0, 1.5])
    narrow = torch.diag(torch.tensor([0.4, 2.0, 1.0]))
    sufficient = GaussianPair("points", seen, narrow)
    assert projected(sufficient, rows).divergence == pytest.approx(sufficient.divergence)
    assert projected(GaussianPair("points", unseen, eye), rows).divergence == pytest.approx(0)

    # A fit on features finds theirs, 0.625 of 1.75 nats.
    pair = GaussianPair("points", seen + unseen, eye)

    def draw(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0, x_1 = pair.draw_pairs(n, generator)
        return x_0 @ rows.T, x_1 @ rows.T

    held_out = draw(20_000, Generator().manual_seed(1))
    found = divergence(fit_ratio("os-dre", draw, 2, QUICK), *held_out)
    assert found == pytest.approx(projected(pair, rows).divergence, abs=0.06)
    assert pair.divergence == pytest.approx(1.75)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_finds_the_divergence(kernel: str) -> None:
    fit = fit_ratio("os-dre", shifted, 2, QUICK.replace(kernel=kernel))
    x_0, x_1 = shifted(20_000, Generator().manual_seed(1))

    assert divergence(fit, x_0, x_1) == pytest.approx(0.5, abs=0.05)


def test_a_fit_depends_on_its_seed_alone() -> None:
    options = QUICK.replace(steps=5, backbone="mlp", features=8, lr=1e-2)
    x = torch.randn(10, 2)
    state = torch.get_rng_state()
    first = fit_ratio("os-dre", shifted, 2, options).log_ratio(x)

    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(fit_ratio("os-dre", shifted, 2, options).log_ratio(x), first)
    other = fit_ratio("os-dre", shifted, 2, options.replace(seed=1)).log_ratio(x)
    assert not torch.allclose(other, first)


@pytest.mark.parametrize("standardise", ["scale", "whiten"])
def test_affine_maps_of_the_data_leave_the_ratio(standardise: str) -> None:
    options = QUICK.replace(steps=20, standardise=standardise)
    x = torch.randn(10, 2)

    def stretched(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0, x_1 = shifted(n, generator)
        return move(x_0), move(x_1)

    def move(x: Tensor) -> Tensor:
        return x * torch.tensor([100.0, 0.01]) + 7

    plain = fit_ratio("os-dre", shifted, 2, options).log_ratio(x)
    moved = fit_ratio("os-dre", stretched, 2, options).log_ratio(move(x))
    assert torch.allclose(plain, moved, atol=1e-6)


def test_whitening_decorrelates_within_blocks_only() -> None:
    mix = torch.randn(4, 4)

    def pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(2, n, 4, generator=generator) @ mix.T
        return x[0], x[1]

    x = torch.cat(pairs(50_000, Generator().manual_seed(3)))
    options = QUICK.replace(steps=1, standardise="whiten")
    full = fit_ratio("os-dre", pairs, 4, options).standardise
    assert torch.allclose(torch.cov(full(x).T), torch.eye(4), atol=0.05)

    block = fit_ratio("os-dre", pairs, 4, options.replace(backbone="block_quadratic")).standardise
    assert torch.equal(block.matrix[:2, 2:], torch.zeros(2, 2))
    assert torch.allclose(torch.cov(block(x).T)[:2, :2], torch.eye(2), atol=0.05)


def test_a_constant_coordinate_does_no_harm() -> None:
    def pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat([x, torch.full((n, 1), 3.0)], dim=1) for x in shifted(n, generator))

    fit = fit_ratio("os-dre", pairs, 3, QUICK.replace(steps=3))
    assert torch.isfinite(fit.log_ratio(torch.randn(5, 3))).all()


def test_a_warm_start_goes_on_from_the_fit() -> None:
    first = fit_ratio("os-dre", shifted, 2, QUICK)
    still = QUICK.replace(steps=1, lr=1e-12, seed=9)
    second = fit_ratio("os-dre", shifted, 2, still, initial=first)
    x = torch.randn(10, 2)

    assert torch.allclose(second.log_ratio(x), first.log_ratio(x), atol=1e-6)
    assert second.standardise is first.standardise
    # The first fit is not trained on.
    before = first.log_ratio(x)
    fit_ratio("os-dre", shifted, 2, QUICK.replace(steps=5), initial=first)
    assert torch.equal(first.log_ratio(x), before)


def test_held_out_points_select_the_step() -> None:
    held_out = shifted(500, Generator().manual_seed(2))
    few = shifted(20, Generator().manual_seed(4))

    def twenty(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        i, j = torch.randint(20, (2, n), generator=generator)
        return few[0][i], few[1][j]

    options = QUICK.replace(backbone="mlp", features=32, lr=0.02, steps=100)
    fit = fit_ratio("logistic", twenty, 2, options, held_out=held_out)
    scores = [entry["held_out"] for entry in fit.history]
    f_0, f_1 = map(fit.log_ratio, held_out)
    kept = -(nn.functional.softplus(f_0) + nn.functional.softplus(-f_1)).mean().item()

    assert len(scores) == 20
    assert kept == pytest.approx(max(scores))
    assert scores[-1] < max(scores)


def test_watching_enters_the_history_and_selects_nothing() -> None:
    seen: list[RatioFit] = []

    def watch(fit: RatioFit) -> dict[str, float]:
        seen.append(fit)
        return {"at_zero": fit.log_ratio(torch.zeros(1, 2)).item()}

    fit = fit_ratio("os-dre", shifted, 2, QUICK.replace(steps=40), watch=watch)
    assert [h["step"] for h in fit.history] == list(range(2, 41, 2))
    assert fit.history[-1]["at_zero"] == fit.log_ratio(torch.zeros(1, 2)).item()


class Fixed(RatioModel):
    r"""The exact log-ratio of N(1, 1) to N(0, 1), plus a constant."""

    def __init__(self, constant: float = 0.0) -> None:
        super().__init__()
        self.constant = constant

    def outputs(self, x: Tensor) -> Prediction:
        return Prediction(x[:, 0] - 0.5 + self.constant)

    def log_ratio_at(self, outputs: Prediction) -> Tensor:
        return outputs.score


def fixed(method: str, constant: float = 0.0, batch_size: int = 64) -> RatioFit:
    identity = Affine(torch.zeros(1), torch.ones(1))
    options = FitOptions(batch_size=batch_size)
    return RatioFit(METHODS[method], Fixed(constant), options, identity, 1.0, [])


def test_bounds_are_tight_at_the_truth() -> None:
    x = torch.randn(2, 100_000, 1)
    x_0, x_1 = x[0], x[1] + 1

    for method in ("os-dre", "nwj", "mine"):
        assert divergence(fixed(method), x_0, x_1) == pytest.approx(0.5, abs=0.02)
    # Off by a constant c: the mean by c, NWJ by c + 1 - e^c, MINE and InfoNCE not at all.
    assert divergence(fixed("os-dre", 0.3), x_0, x_1) == pytest.approx(0.8, abs=0.02)
    expected = 0.5 + 0.3 + 1 - math.exp(0.3)
    assert divergence(fixed("nwj", 0.3), x_0, x_1) == pytest.approx(expected, abs=0.02)
    assert divergence(fixed("mine", 0.3), x_0, x_1) == pytest.approx(0.5, abs=0.02)
    assert divergence(fixed("infonce", batch_size=512), x_0, x_1) == pytest.approx(0.5, abs=0.02)


def test_infonce_cannot_exceed_the_logarithm_of_its_batch() -> None:
    x_0, x_1 = torch.zeros(64, 1), torch.full((64, 1), 1e3)

    assert divergence(fixed("infonce", batch_size=8), x_0, x_1) == pytest.approx(math.log(9))


def test_the_loss_of_mine_ignores_constants() -> None:
    x = torch.randn(2, 16, 1)
    draw = Batch(x[0], x[1], torch.zeros(16), x[0])
    losses = []
    for constant in (0.0, 2.0):
        model = Fixed(constant)
        at = {name: model.outputs(p) for name, p in (("x_0", x[0]), ("x_1", x[1]))}
        losses.append(EndPointLoss(loss="mine", clean=True).loss(model, draw, at).mean())
    bound = (x[1] - 0.5).mean() - (x[0] - 0.5).exp().mean().log()

    assert torch.allclose(losses[0], losses[1])
    assert torch.allclose(losses[0], -bound)


@pytest.mark.parametrize("kind", ["scale", "whiten", "no"])
def test_points_far_from_zero_keep_their_differences(kind: str) -> None:
    torch.set_default_dtype(torch.float32)
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)).double()
    x = torch.round(x * 2**20) / 2**20  # exact beside the shift
    shift = 0.0 if kind == "no" else 1.6e9
    (far, _), (near, _) = (check_drawn("x", (x + s, x + s), 2, 3) for s in (shift, 0.0))
    expected = Affine.of(near.double(), kind)(near)
    found = Affine.of(far, kind)(far)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
