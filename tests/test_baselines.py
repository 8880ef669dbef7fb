r"""Laws of the baselines: each is tied to the one-step ratio, SciPy or scikit-learn."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.covariance import EmpiricalCovariance
from sklearn.neighbors import NearestNeighbors
from torch import Tensor, nn

from ood_osdre.errors import UserError
from ood_osdre.models.baselines import (
    Classifier,
    TimeConditionedMLP,
    TimeConditionedRatio,
    TimeConditionedResNet,
)
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.gaussians import gaussian_ratio
from ood_osdre.models.networks import MLP, CoefficientNetwork, ResNetBackbone
from ood_osdre.models.ratio import DirectRatio, OneStepRatio
from ood_osdre.objectives import (
    Batch,
    ConditionalScoreMatching,
    EndPointLoss,
    Objective,
    OutlierExposure,
    TimeConditionedConditionalMatching,
    TimeConditionedScoreMatching,
    TimeScoreMatching,
)
from ood_osdre.paths.gaussian import GaussianPath
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import TrigonometricSchedule
from ood_osdre.paths.times import BridgeWeight, LogitNormalTimes

B, DIM = 6, 3


def make_path() -> GaussianPath:
    return GaussianPath(TrigonometricSchedule(), DDBINoise(0.2, 0.05))


def make_batch(*event: int) -> Batch:
    x_0, x_1, noise = torch.randn(3, B, *(event or (DIM,)))
    return Batch(x_0, x_1, torch.rand(B), noise, torch.arange(B) % 2)


def make_one_step() -> OneStepRatio:
    network = CoefficientNetwork(MLP(DIM, 8), features=8, size=5)
    nn.init.normal_(network.head.weight)
    return OneStepRatio(network, RBFBasis(size=5))


def perturbed(network: nn.Module) -> nn.Module:
    r"""Moves a network off its start at zero."""
    for p in network.parameters():
        nn.init.normal_(p, std=0.3)
    return network


class OneStepAsTimed(nn.Module):
    r"""A time-conditioned network that happens to be a one-step score."""

    def __init__(self, ratio: OneStepRatio) -> None:
        super().__init__()
        self.ratio, self.calls = ratio, 0

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return self.ratio.time_score(x, t)


# Direct ratios.


def test_a_direct_ratio_is_a_folded_network_that_starts_at_zero() -> None:
    ratio, x = DirectRatio(MLP(DIM, 8), 8, classes=2), torch.randn(B, DIM)
    assert torch.equal(ratio.log_ratio(x), torch.zeros(B))
    assert ratio.predict(x).logits.shape == (B, 2)
    perturbed(ratio)
    expected = ratio.head(ratio.backbone(x)).squeeze(1)
    torch.testing.assert_close(ratio.log_ratio(x), expected)
    torch.testing.assert_close(ratio.fold().log_ratio(x), expected)


def test_separate_forwards_give_classes_away_and_one_forward_does_not() -> None:
    class Counted(nn.BatchNorm1d):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    batch = make_batch()
    for separate, calls in ((False, 1), (True, 2)):
        norm = Counted(DIM, affine=False)
        ratio = DirectRatio(norm, DIM)
        objective = Objective({"end": (1.0, EndPointLoss(clean=True))}, separate=separate)
        objective(ratio, batch)
        assert norm.calls == calls
    # Apart, each side is standardised by itself: a shift between them is gone in training.
    shifted = batch._replace(x_1=batch.x_0 + 100.0)
    perturbed(ratio)
    losses = objective(ratio, shifted)["end"]
    f = ratio.head(norm(batch.x_0)).squeeze(1)
    torch.testing.assert_close(
        losses, nn.functional.softplus(f) + nn.functional.softplus(-f), rtol=0, atol=1e-6
    )


# Solver-based ratios.


def test_conditional_matching_is_that_of_a_network_without_time() -> None:
    path, ratio, batch = make_path(), make_one_step(), make_batch()
    ours = ConditionalScoreMatching(path, BridgeWeight())
    theirs = Objective({"x": (1.0, TimeConditionedConditionalMatching(path, BridgeWeight()))})
    expected = Objective({"x": (1.0, ours)})(ratio, batch)["total"]
    actual = theirs(TimeConditionedRatio(OneStepAsTimed(ratio)), batch)["total"]
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("times", [None, LogitNormalTimes(low=0.1, high=0.8)])
def test_time_score_matching_is_that_of_a_network_without_time(
    times: LogitNormalTimes | None,
) -> None:
    path, ratio, batch = make_path(), make_one_step(), make_batch()
    ours = TimeScoreMatching(path, BridgeWeight(), times)
    term = TimeConditionedScoreMatching(path, BridgeWeight(), times)
    theirs = Objective({"x": (1.0, term)})
    timed = TimeConditionedRatio(OneStepAsTimed(ratio))
    expected = Objective({"x": (1.0, ours)})(ratio, batch)["total"]
    torch.testing.assert_close(theirs(timed, batch)["total"], expected)

    # The derivative in time takes part in the gradient.
    parameters = list(ratio.parameters())
    a = torch.autograd.grad(theirs(timed, batch)["total"].mean(), parameters)
    b = torch.autograd.grad(
        Objective({"x": (1.0, ours)})(ratio, batch)["total"].mean(), parameters
    )
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)


def test_the_trapezoidal_rule_converges_to_the_closed_form_at_its_stated_cost() -> None:
    ratio, x = make_one_step(), torch.randn(B, DIM)
    network = OneStepAsTimed(ratio)
    expected = ratio.log_ratio(x).detach()
    errors = []
    for evaluations in (2, 5, 17, 65):
        network.calls = 0
        timed = TimeConditionedRatio(network, evaluations)
        errors.append(float((timed.log_ratio(x) - expected).abs().max()))
        assert network.calls == timed.integrate(x).evaluations == evaluations
        assert timed.cost == (B, B * evaluations)
    assert errors[3] < errors[2] / 12 < errors[1] / 100
    adaptive = TimeConditionedRatio(network, solver="ode", tolerance=1e-8)
    torch.testing.assert_close(adaptive.log_ratio(x), expected, rtol=0, atol=1e-6)


def test_the_integral_is_over_the_interval_that_was_trained() -> None:
    ratio, x = make_one_step(), torch.randn(B, DIM)
    timed = TimeConditionedRatio(OneStepAsTimed(ratio), 200, t_range=(0.2, 0.7))
    h = ratio.coefficients(x).total
    expected = ratio.scale * (h * ratio.basis.integral(0.2, 0.7)).sum(dim=1)
    torch.testing.assert_close(timed.log_ratio(x), expected.detach(), rtol=0, atol=1e-4)


TIMED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: TimeConditionedMLP(DIM, 8), (DIM,)),
    "resnet": (lambda: TimeConditionedResNet(0.125, (1, 1, 1, 1), 2), (3, 16, 16)),
}


@pytest.mark.parametrize("name", TIMED)
def test_a_score_depends_on_its_own_time_alone(name: str) -> None:
    make, event = TIMED[name]
    network = perturbed(make().train())
    x, t = torch.randn(B, *event), torch.rand(B, requires_grad=True)
    s = network(x, t)
    assert s.shape == (B,)
    (slopes,) = torch.autograd.grad(s[2], t)
    assert slopes[2] != 0
    assert torch.equal(slopes[torch.arange(B) != 2], torch.zeros(B - 1))
    with torch.no_grad():
        step = 1e-6
        difference = (network(x, t + step)[2] - network(x, t - step)[2]) / (2 * step)
    torch.testing.assert_close(slopes[2], difference, rtol=1e-5, atol=1e-8)


def test_without_its_time_the_network_is_the_backbone() -> None:
    network = TimeConditionedResNet(0.125, (1, 1, 1, 1), 2)
    nn.init.normal_(network.head.weight)
    plain = ResNetBackbone(0.125, (1, 1, 1, 1), 2, norm="group")
    plain.load_state_dict(network.backbone.state_dict())
    x = torch.randn(B, 3, 16, 16)
    expected = network.head(plain(x)).squeeze(1)
    torch.testing.assert_close(network(x, torch.rand(B)), expected)


# Classifiers.


def make_classifier(score: str, neighbours: int = 3) -> Classifier:
    return Classifier(MLP(DIM, 8), 8, classes=4, score=score, neighbours=neighbours)


def test_softmax_and_energy_are_functions_of_the_logits() -> None:
    x = torch.randn(B, DIM)
    for score in ("msp", "energy"):
        model = make_classifier(score).eval()
        logits = model.predict(x).logits
        if score == "msp":
            expected = logits.softmax(dim=1).amax(dim=1).logit()
        else:
            expected = logits.exp().sum(dim=1).log()
        torch.testing.assert_close(model.log_ratio(x), expected)


def test_a_confident_softmax_score_does_not_saturate() -> None:
    model = make_classifier("msp").eval()
    with torch.no_grad():
        model.class_head.weight.mul_(1e3)
        scores = model.float().log_ratio(torch.randn(50, DIM, dtype=torch.float32))
    assert len(set(scores.tolist())) > 25


def test_neighbours_are_those_of_scikit_learn() -> None:
    model, bank, x = make_classifier("knn"), torch.randn(40, DIM), torch.randn(B, DIM)
    model.fit(bank.split(7), torch.zeros(40))
    with torch.no_grad():
        unit = [nn.functional.normalize(model.backbone(z)).numpy() for z in (bank, x)]
    distances, _ = NearestNeighbors(n_neighbors=3).fit(unit[0]).kneighbors(unit[1])
    np.testing.assert_allclose(-model.log_ratio(x).detach().numpy(), distances[:, 2], atol=1e-7)


def test_relative_mahalanobis_is_that_of_scikit_learn() -> None:
    r"""Also where a feature is constant, and a class has no images."""
    model, bank, x = (
        make_classifier("relative_mahalanobis"),
        torch.randn(80, DIM),
        torch.randn(B, DIM),
    )
    perturbed(model)
    model.backbone = nn.Sequential(model.backbone, nn.ZeroPad1d((0, 1)))
    labels = torch.arange(80) % 3 + torch.arange(80) // 79  # of classes 0 to 3 none is 4
    model.class_head = nn.Linear(9, 5)
    model.fit(bank.split(7), labels)
    with torch.no_grad():
        f, g = (model.backbone(z).numpy() for z in (bank, x))
    means = np.stack([f[labels == c].mean(axis=0) for c in labels.unique()])
    own = [means[labels], f.mean(axis=0)]
    tied, whole = (EmpiricalCovariance(assume_centered=True).fit(f - m) for m in own)
    nearest = np.min([tied.mahalanobis(g - m) for m in means], axis=0)
    expected = (whole.mahalanobis(g - own[1]) - nearest) / 2
    np.testing.assert_allclose(model.log_ratio(x).detach().numpy(), expected, rtol=1e-6)
    # It is fitted anew with each use, and is no part of what is stored or folded away.
    assert not any("gaussians" in key for key in model.state_dict())
    assert torch.equal(model.fold().log_ratio(x), model.log_ratio(x))
    model.train()
    logits = model.predict(x).logits
    torch.testing.assert_close(model.log_ratio(x), logits.softmax(dim=1).amax(dim=1).logit())
    with pytest.raises(UserError, match="features: hold NaN or infinity"):
        model.fit([torch.full((80, DIM), torch.nan)], labels)


# Gaussians of features, in closed form.


@pytest.mark.parametrize("tied", [True, False])
def test_a_ratio_of_gaussians_is_that_of_torch(tied: bool) -> None:
    x_1, x_0, x = torch.randn(90, DIM) * 2, torch.randn(70, DIM) + 1, torch.randn(B, DIM)
    labels = torch.arange(90) % 3 % 2  # two thirds and one; a third class has none
    x_1 += labels[:, None]
    ratio = gaussian_ratio(DIM, 3, tied)
    ratio.backbone.fit(x_1, labels, x_0)
    parts = [x_1[labels == c] for c in (0, 1)]
    own = torch.stack([part.T.cov(correction=0) for part in parts])
    shares = torch.tensor([2 / 3, 1 / 3])
    if tied:
        own = (shares[:, None, None] * own).sum(dim=0).expand(2, -1, -1)
    means = torch.stack([part.mean(dim=0) for part in parts])
    normal = torch.distributions.MultivariateNormal
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(shares), normal(means, own)
    )
    expected = mixture.log_prob(x) - normal(x_0.mean(dim=0), x_0.T.cov(correction=0)).log_prob(x)
    torch.testing.assert_close(ratio.log_ratio(x).detach(), expected)
    torch.testing.assert_close(ratio.fold().log_ratio(x).detach(), expected)


def test_gaussians_refuse_what_has_no_density() -> None:
    x, two = (
        torch.randn(20, DIM),
        torch.arange(20) // 18,
    )  # of the second class there are two points
    flat = x * torch.tensor([1.0, 1.0, 0.0])
    for tied, ids, reference, message in (
        (True, flat, x, "ID features vary in 2 directions, expected all 3; lower head.rank."),
        (True, x, flat, "reference features vary in 2 directions"),
        (False, x, x, "one class's features vary in 1 directions.* or set head.tied"),
    ):
        with pytest.raises(UserError, match=message):
            gaussian_ratio(DIM, 2, tied).backbone.fit(ids, two, reference)


@pytest.mark.parametrize("solver", ["trapezoid", "ode"])
def test_a_network_in_half_precision_gives_log_ratios_in_single(solver: str) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return x[:, 0].half()

    ratio = TimeConditionedRatio(Half(), solver=solver)
    x = torch.randn(B, DIM, dtype=torch.float16)
    assert ratio.log_ratio(x).dtype is torch.float32


def test_outlier_exposure_is_least_at_the_uniform_distribution() -> None:
    batch = make_batch()
    model = make_classifier("msp")
    objective = Objective({"oe": (1.0, OutlierExposure(clean=True))})
    loss = objective(model, batch)["oe"]
    logits = model.predict(batch.x_0).logits
    uniform = torch.full_like(logits, 0.25)
    torch.testing.assert_close(
        loss, nn.functional.cross_entropy(logits, uniform, reduction="none")
    )
    assert (loss > np.log(4)).all()
