r"""Tests of what each objective is minimised by, on a Gaussian problem.

Expectations are exact (see gaussian_problem.py), so the tolerances are those of arithmetic, or of
a temporal basis with a dozen functions, and nothing else.
"""

import itertools
import math

import pytest
import torch
from gaussian_problem import (
    ExactRatio,
    GaussianProblem,
    Quadratic,
    QuadraticCells,
    gradient,
    minimise,
)
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import CoefficientNetwork
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import (
    LOSSES,
    Batch,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    EndPointLoss,
    JointScoreMatching,
    Objective,
    PathDifference,
    Term,
    TimeScoreMatching,
)
from ood_osdre.paths.gaussian import GaussianPath
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import (
    KumaraswamySchedule,
    LinearSchedule,
    TrigonometricSchedule,
    VariancePreservingSchedule,
)
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

EPS = 0.1
# What each loss subtracts from the log-ratio; that of InfoNCE and MINE is undetermined, the ridge
# of PW bends it.
OFFSETS = {
    loss: math.log(1.2) if loss == "chisq" else 0.0
    for loss in LOSSES
    if loss not in ("infonce", "mine", "pw_ridge")
}


def make_problem(schedule: nn.Module | None = None, dim: int = 1) -> GaussianProblem:
    schedule = TrigonometricSchedule() if schedule is None else schedule
    return GaussianProblem(GaussianPath(schedule, DDBINoise(0.5, EPS)), dim=dim)


def make_times(name: str, problem: GaussianProblem) -> Times:
    low, high = problem.path.t_range
    return {
        "uniform": UniformTimes(low, high),
        "middle": UniformTimes(0.2, 0.9),
        "logit_normal": LogitNormalTimes(low=low, high=high),
        "inverse_variance": InverseVarianceTimes(problem.path, problem.moments),
    }[name]


def make_weight(name: str, problem: GaussianProblem) -> Weight:
    return {
        "constant": Constant(2.0),
        "bridge": BridgeWeight(),
        "inverse_variance": InverseVarianceWeight(problem.path, problem.moments),
        "noise_variance": NoiseVarianceWeight(problem.path),
    }[name]


class LinearDataScore(nn.Module):
    r"""A data score (1, x) times quadratics of the time, for dim = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 1, bias=False)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        powers = torch.stack([t**k for k in range(5)], dim=1)
        return self.linear(torch.cat([powers, x * powers], dim=1))


# At the truth, the expected gradient vanishes.


@pytest.mark.parametrize(
    ("times", "weight"),
    [
        ("uniform", "constant"),
        ("uniform", "inverse_variance"),
        ("middle", "bridge"),
        ("uniform", "bridge"),
        ("logit_normal", "noise_variance"),
        ("inverse_variance", "constant"),
        ("inverse_variance", "noise_variance"),
    ],
)
@pytest.mark.parametrize("loss", ["scalar", "antithetic", "time", "joint"])
def test_expected_gradient_is_zero_at_the_truth(loss: str, times: str, weight: str) -> None:
    problem = make_problem()
    p, w = make_times(times, problem), make_weight(weight, problem)
    term: Term
    if loss == "time":
        term = TimeScoreMatching(problem.path, w, p)
    elif loss == "joint":
        term = JointScoreMatching(problem.path, LinearDataScore(), w, p)
    else:
        term = ConditionalScoreMatching(problem.path, w, loss)
    batch, weights = problem.quadrature(p, breaks=(0.3, 0.8), probe=loss == "joint")

    grad = gradient(ExactRatio(problem), term, batch, weights)
    off = gradient(ExactRatio(problem, scale=0.9), term, batch, weights)

    # The table behind the inverse-variance density normalises it to second order only.
    torch.testing.assert_close(grad, torch.zeros(9), rtol=0, atol=1e-6)
    assert off.norm() > 1e-3


@pytest.mark.parametrize(
    "schedule",
    [LinearSchedule(), VariancePreservingSchedule(), KumaraswamySchedule(kind="affine")],
    ids=lambda s: type(s).__name__,
)
def test_time_score_matching_holds_on_the_path_s_own_interval(schedule: nn.Module) -> None:
    problem = make_problem(schedule)
    term = TimeScoreMatching(problem.path)
    batch, weights = problem.quadrature(term.times, size=24, breaks=(0.02, 0.1, 0.9, 0.98))
    grad = gradient(ExactRatio(problem), term, batch, weights)

    torch.testing.assert_close(grad, torch.zeros(9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("interval", ["inner", "clipped"])
def test_path_difference_error_is_second_order(interval: str) -> None:
    problem = make_problem()
    errors = []
    for delta in (0.04, 0.02, 0.01):
        low, high = (0.1, 0.9) if interval == "inner" else (0.0, 1.0)
        breaks = () if interval == "inner" else (delta, 1 - delta)
        batch, weights = problem.quadrature(UniformTimes(low, high), breaks=breaks)
        term = PathDifference(problem.path, Constant(), delta)
        errors.append(gradient(ExactRatio(problem), term, batch, weights).norm())

    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_the_papers_joint_loss_is_linear_in_the_time_score_and_ours_is_not() -> None:
    problem = make_problem()
    term = TimeScoreMatching(problem.path)
    batch, weights = problem.quadrature(term.times)

    s = problem.time_score(problem.path.sample(*batch[:4]), batch.t)
    second_moment = float((weights @ s**2).detach())

    @torch.no_grad()
    def ours(scale: float) -> float:
        losses = Objective({"term": (1.0, term)})(ExactRatio(problem, scale=scale), batch)
        return float(weights @ losses["term"])

    def printed(scale: float) -> float:
        return ours(scale) - scale**2 * second_moment

    # Linear with a negative slope: worth minus infinity.
    assert printed(1.0) < -0.1
    assert printed(1e3) == pytest.approx(1e3 * printed(1.0))
    # Quadratic with its minimum at the exact score.
    assert ours(1.0) < min(ours(0.99), ours(1.01))


# Minimised over a linear model, the objectives recover the scores and ratios.


def make_ratio(problem: GaussianProblem, size: int = 12, cells: bool = False) -> OneStepRatio:
    network: nn.Module = QuadraticCells(problem.dim, size)
    if not cells:
        network = CoefficientNetwork(Quadratic(), 2 * problem.dim, size)
    return OneStepRatio(network, RBFBasis("rq", size, sigma=0.5, learnable=False))


def assert_recovers(ratio: OneStepRatio, problem: GaussianProblem, atol: float) -> None:
    t = torch.linspace(0, 1, 21).repeat_interleave(50)
    x = problem.path.sample(
        torch.randn(len(t), problem.dim),
        problem.mean + problem.std * torch.randn(len(t), problem.dim),
        t,
        torch.randn(len(t), problem.dim),
    )
    torch.testing.assert_close(
        ratio.time_score(x, t), problem.time_score(x, t), rtol=0, atol=10 * atol
    )
    torch.testing.assert_close(ratio.log_ratio(x), problem.log_ratio(x, EPS), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("loss", "times"),
    [
        ("scalar", "uniform"),
        ("antithetic", "logit_normal"),
        ("time", "uniform"),
        ("time", "logit_normal"),
        ("time", "inverse_variance"),
        ("difference", "uniform"),
        ("difference", "logit_normal"),
        ("conditional_joint", "uniform"),
    ],
)
def test_path_losses_recover_the_dequantised_ratio(loss: str, times: str) -> None:
    problem = make_problem()
    path, p = problem.path, make_times(times, problem)
    term: Term
    if loss == "time":
        term = TimeScoreMatching(path, times=p)
    elif loss == "difference":
        term = PathDifference(path, delta=0.002)
    elif loss == "conditional_joint":
        term = ConditionalJointScoreMatching(path, LinearDataScore())
    else:
        term = ConditionalScoreMatching(path, form=loss)
    batch, weights = problem.quadrature(p, size=32, breaks=(0.05, 0.95))
    ratio = make_ratio(problem)
    minimise(ratio, term, batch, weights)

    # A logit-normal density leaves the basis' own error unweighted near 0 and 1.
    assert_recovers(ratio, problem, atol=1e-2 if times == "logit_normal" else 5e-3)


def test_per_dimension_form_recovers_the_dequantised_ratio() -> None:
    problem = make_problem(dim=2)
    term = ConditionalScoreMatching(problem.path, form="per_dimension")
    batch, weights = problem.quadrature(UniformTimes(), size=12)
    ratio = make_ratio(problem, size=8, cells=True)
    minimise(ratio, term, batch, weights)

    assert_recovers(ratio, problem, atol=1e-2)


@pytest.mark.parametrize("form", ["per_block", "antithetic_per_block"])
def test_block_forms_recover_the_dequantised_ratio(form: str) -> None:
    class Images(nn.Module):
        r"""Sees vectors (B, 2) as images (B, 1, 1, 2), with one cell a pixel."""

        def feature_map(self, x: Tensor) -> Tensor:
            return torch.cat([x, x**2], dim=1)

    problem = make_problem(dim=2)
    term = ConditionalScoreMatching(problem.path, form=form)
    batch, weights = problem.quadrature(UniformTimes(), size=16)
    x_0, x_1, noise = (x[:, None, None] for x in (batch.x_0, batch.x_1, batch.noise))
    images = Batch(x_0, x_1, batch.t, noise)
    ratio = OneStepRatio(CoefficientNetwork(Images(), 2, 8), RBFBasis(size=8, learnable=False))
    minimise(ratio, term, images, weights)

    t = torch.linspace(0, 1, 21)
    x = torch.randn(21, 2)
    s, expected = ratio.time_score(x[:, None, None], t), problem.time_score(x, t)
    torch.testing.assert_close(s, expected, rtol=0, atol=5e-2)
    log_r = ratio.log_ratio(x[:, None, None])
    torch.testing.assert_close(log_r, problem.log_ratio(x, EPS), rtol=0, atol=1e-2)


@pytest.mark.parametrize("conditional", [False, True])
def test_joint_objectives_recover_the_data_score(conditional: bool) -> None:
    problem = make_problem()
    data_score = LinearDataScore()
    term: Term = (
        ConditionalJointScoreMatching(problem.path, data_score)
        if conditional
        else JointScoreMatching(problem.path, data_score)
    )
    batch, weights = problem.quadrature(UniformTimes(), probe=True)
    ratio = make_ratio(problem, size=8)
    minimise(ratio, term, batch, weights)

    t = torch.linspace(0, 1, 21)
    x = torch.randn(21, 1)
    (expected,) = torch.autograd.grad(
        problem.log_density(x.requires_grad_(), t).sum(), x, retain_graph=True
    )
    torch.testing.assert_close(data_score(x, t), expected, rtol=0, atol=5e-2)
    torch.testing.assert_close(ratio.log_ratio(x), problem.log_ratio(x, EPS), rtol=0, atol=1e-2)


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("loss", OFFSETS)
def test_end_point_losses_recover_the_ratio_they_define(loss: str, clean: bool) -> None:
    problem = make_problem()
    term = EndPointLoss(problem.path, loss, clean)
    batch, weights = problem.ends()
    ratio = make_ratio(problem, size=2)
    # LSIF is not convex in the log-ratio, so Newton's method starts close: at the other ratio.
    minimise(ratio, EndPointLoss(problem.path, clean=not clean), batch, weights, 8, ridge=1e-9)
    minimise(ratio, term, batch, weights, steps=8, ridge=1e-9)

    x = torch.linspace(-2, 2, 9)[:, None]
    expected = problem.log_ratio(x, 0.0 if clean else EPS) - OFFSETS[loss]
    torch.testing.assert_close(ratio.log_ratio(x), expected, rtol=0, atol=1e-3)


def test_infonce_recovers_the_ratio_up_to_a_constant() -> None:
    p_0, p_1 = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])
    f = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [f], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    negatives = list(itertools.product(range(3), repeat=2))

    def expected_loss() -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros(())
        for one, pair in itertools.product(range(3), negatives):  # every batch there is
            weight = p_1[one] * p_0[list(pair)].prod()
            loss = loss + weight * LOSSES["infonce"](f[list(pair)], f[[one, one]], 10.0).mean()
        loss.backward()
        return loss

    optimizer.step(expected_loss)
    offset = f.detach() - (p_1 / p_0).log()
    torch.testing.assert_close(offset, offset[:1].expand(3), rtol=0, atol=1e-6)


# The cap of the end-point losses.


@pytest.mark.parametrize("p_1", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("loss", OFFSETS)
def test_pointwise_minimiser_is_the_log_ratio_up_to_the_cap(loss: str, p_1: float) -> None:
    cap = 4.0
    zero = torch.zeros(())

    def expected_loss(f: float) -> float:
        # At a point of density p_0 and p_1 only; the constant of the other end cancels.
        x = torch.tensor(f)
        return float(
            (1 - p_1) * (LOSSES[loss](x, zero, cap) - LOSSES[loss](zero, zero, cap))
            + p_1 * (LOSSES[loss](zero, x, cap) - LOSSES[loss](zero, zero, cap))
        )

    truth = torch.logit(torch.tensor(p_1))
    found = minimize_scalar(expected_loss, bounds=(-9, 12), method="bounded").x
    # The cap is on f, not on the log-ratio that a penalty moves it away from.
    truth = truth - OFFSETS[loss]
    target = truth if loss in ("logistic", "nce") else truth.clamp(max=cap)
    if loss == "nwj" and truth > cap:
        target = torch.tensor(12.0)  # where the search ends: its minimiser has no bound
    assert found == pytest.approx(float(target), abs=1e-3)


@pytest.mark.parametrize("loss", ["kliep", "lsif", "chisq", "pw", "pw_ridge"])
def test_a_cap_beyond_single_precision_still_pulls_back(loss: str) -> None:
    # A reference point far too high, and a network whose features are in the tens.
    weight = torch.full((1000,), 0.06, dtype=torch.float32, requires_grad=True)
    f_0 = (weight @ torch.ones(1000, 4).float()) * torch.tensor([1.0, 0.5, 0.1, 0.0]).float()
    LOSSES[loss](f_0, torch.zeros(4).float(), 50.0).mean().backward()

    assert weight.grad is not None
    nn.utils.clip_grad_norm_([weight], 10.0)
    assert torch.isfinite(weight.grad).all()
    assert weight.grad.norm() == pytest.approx(10.0, rel=1e-3)
    # A larger cap counts as the largest.
    limit = {"kliep": 30.0, "pw": 20.0}.get(loss, 15.0)
    f = torch.tensor([0.0, limit - 1, limit + 1, 3 * limit])
    if loss != "pw_ridge":
        torch.testing.assert_close(LOSSES[loss](f, f, 50.0), LOSSES[loss](f, f, limit))


def test_the_ridge_of_pw_bends_the_minimiser_and_bounds_it() -> None:
    # The root w = 2u of w^2 + 0.01 (1 + r) w - r, for ratios r of all sizes.
    r = torch.logspace(-3, 9, 25)
    w = 2 * r / (0.01 * (1 + r) + (1e-4 * (1 + r) ** 2 + 4 * r).sqrt())
    f = (2 * w.log()).requires_grad_()
    zero = torch.zeros_like(f)
    loss = LOSSES["pw_ridge"](f, zero, 20.0) / (1 + r) + LOSSES["pw_ridge"](zero, f, 20.0) * (
        r / (1 + r)
    )
    (slope,) = torch.autograd.grad(loss.sum(), f)
    torch.testing.assert_close(slope, zero, atol=1e-6, rtol=0)
    assert (f.diff() > 0).all()
    assert f.max() < 2 * math.log(100)
    # Without the ridge it is the log-ratio.
    assert f[0].item() == pytest.approx(r[0].log().item(), abs=0.4)


@pytest.mark.parametrize("loss", LOSSES)
def test_extreme_ratios_stay_finite_and_are_pulled_back(loss: str) -> None:
    f_0 = torch.tensor([-1e4, 1e4], dtype=torch.float32, requires_grad=True)
    f_1 = torch.tensor([-1e4, 1e4], dtype=torch.float32, requires_grad=True)
    value = LOSSES[loss](f_0, f_1, 10.0)
    g_0, g_1 = torch.autograd.grad(value.sum(), (f_0, f_1))

    assert all(torch.isfinite(x).all() for x in (value, g_0, g_1))
    assert g_0[1] > 0
    assert g_1[0] <= 0
    # A ridge at the ID points pulls those back, too.
    assert g_1[1] > 0 if loss == "pw_ridge" else g_1[1] <= 0
