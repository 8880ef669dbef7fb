r"""Mechanics of the objectives: points, forward passes, gradients, formulas of single terms."""

from collections.abc import Callable

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from ood_osdre.errors import UserError
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork, Coefficients
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import (
    FORMS,
    LOSSES,
    Batch,
    ClassLoss,
    ConditionalJointScoreMatching,
    ConditionalScoreMatching,
    EndPointLoss,
    JointScoreMatching,
    Objective,
    OutlierExposure,
    PathDifference,
    PathVariance,
    Shrinkage,
    Term,
    TimeScoreMatching,
    evaluate,
)
from ood_osdre.objectives.conditional import block_grid
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import FollmerSchedule, KumaraswamySchedule, TrigonometricSchedule
from ood_osdre.paths.times import InverseVarianceWeight, UniformTimes

B = 6


class Score(nn.Module):
    r"""A data score for any event shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.gain * x.tanh() * (1 + t.reshape(-1, *(1,) * (x.ndim - 1)))


TERMS: dict[str, Callable[[GaussianPath], Term]] = {
    **{
        form: (lambda path, form=form: ConditionalScoreMatching(path, form=form))
        for form in FORMS
        if form != "per_dimension"
    },
    "time": TimeScoreMatching,
    "time-part": lambda path: TimeScoreMatching(path, times=UniformTimes(0.25, 0.5)),
    "difference": PathDifference,
    "difference-wide": lambda path: PathDifference(path, delta=0.3),
    "joint": lambda path: JointScoreMatching(path, Score()),
    "conditional_joint": lambda path: ConditionalJointScoreMatching(path, Score()),
    **{loss: (lambda path, loss=loss: EndPointLoss(path, loss)) for loss in LOSSES},
    "clean": lambda path: EndPointLoss(path, clean=True),
    "class": ClassLoss,
    "outlier_exposure": OutlierExposure,
    "shrinkage": Shrinkage,
    "variance": lambda path: PathVariance(path, Moments(48, 48.0, 3.0, 60.0)),
}


class Counting(nn.Module):
    r"""Counts the forward passes and the rows of the network it wraps."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.calls = network, []

    def forward(self, x: Tensor) -> Coefficients:
        self.calls.append(len(x))
        return self.network(x)


class Backbone(nn.Module):
    r"""A small convolutional backbone with a 2x2 feature map of 16x16 images."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.feature_map = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8) if norm == "batch" else nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 4, stride=4),
            nn.SiLU(),
        )


def make_path() -> GaussianPath:
    return GaussianPath(KumaraswamySchedule(kind="spherical"), DDBINoise(0.2, 0.05, True))


def make_ratio(classes: int = 4, norm: str = "group") -> OneStepRatio:
    network = CoefficientNetwork(Backbone(norm), features=8, size=4, classes=classes)
    nn.init.normal_(network.head.weight)
    return OneStepRatio(network, RBFBasis(size=4))


def make_batch(*event: int) -> Batch:
    event = event or (3, 16, 16)
    x_0, x_1, noise, probe = torch.randn(4, B, *event)
    return Batch(x_0, x_1, torch.rand(B), noise, torch.arange(B) % 4, probe)


def test_terms_share_one_forward_pass_and_their_points() -> None:
    path, ratio = make_path(), make_ratio()
    ratio.network = Counting(ratio.network)
    terms = {name: (float(i), make(path)) for i, (name, make) in enumerate(TERMS.items())}
    losses = Objective(terms)(ratio, make_batch())

    # x_t, -z, two gaps, two inner times, dequantised ends, clean ends
    assert ratio.network.calls == [B * (1 + 1 + 4 + 2 + 2 + 2)]
    assert set(losses) == {*TERMS, "total"}
    assert all(loss.shape == (B,) and loss.isfinite().all() for loss in losses.values())
    total = sum(weight * losses[name] for name, (weight, _) in terms.items())
    torch.testing.assert_close(losses["total"], total)


def test_equal_names_mean_equal_points() -> None:
    path, batch = make_path(), make_batch()
    seen: dict[str, Tensor] = {}
    for make in TERMS.values():
        for name, x in make(path).points(batch).items():
            torch.testing.assert_close(seen.setdefault(name, x), x)
            assert not x.requires_grad

    torch.testing.assert_close(seen["x_0"], batch.x_0)
    torch.testing.assert_close(seen["x_1"], batch.x_1)
    torch.testing.assert_close(seen["start"], path.start(batch.x_0, batch.noise))
    torch.testing.assert_close(seen["end"], path.end(batch.x_1, batch.noise))
    torch.testing.assert_close(seen["path"], path.sample(*batch[:4]))


@pytest.mark.parametrize("name", TERMS)
def test_gradients_reach_the_network_and_only_the_variance_reaches_the_path(name: str) -> None:
    path, ratio = make_path(), make_ratio()
    objective = Objective({name: (1.0, TERMS[name](path))})
    objective(ratio, make_batch())["total"].sum().backward()

    classes = name in ("class", "outlier_exposure")
    head = ratio.network.class_head if classes else ratio.network.head
    reached = [p.grad is not None and bool(p.grad.any()) for p in path.parameters()]
    if name == "variance":
        assert head.weight.grad is None
        assert any(reached)
    else:
        assert head.weight.grad.abs().sum() > 0
        assert not any(reached)
    if "joint" in name:
        assert objective.terms[name].data_score.gain.grad is not None


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_evaluate_is_a_concatenated_pass(norm: str) -> None:
    ratio, batch = make_ratio(norm=norm), make_batch()
    at = evaluate(ratio, {"a": batch.x_0, "b": batch.x_1[:2]})
    alone = ratio.outputs(batch.x_0)

    assert at["a"].cells.shape[0] == B
    assert at["b"].logits.shape == (2, 4)
    # Batch statistics are those of all points; group statistics those of each.
    assert torch.allclose(at["a"].total, alone.total) == (norm == "group")


def test_losses_are_single_precision_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    path = make_path()
    objective = Objective({name: (1.0, make(path)) for name, make in TERMS.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = objective(make_ratio(), make_batch())

    assert all(loss.dtype == torch.float32 for loss in losses.values())
    losses["total"].sum().backward()


@pytest.mark.parametrize("form", [f for f in FORMS if f != "per_dimension"])
def test_inverse_variance_weights_give_losses_of_order_one(form: str) -> None:
    n = 1500
    x_0, x_1 = torch.randn(n, 3, 16, 16), 0.5 + 0.5 * torch.randn(n, 3, 16, 16)
    batch = Batch(x_0, x_1, torch.rand(n), torch.randn(n, 3, 16, 16))
    path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.01, 0.005))
    weight = InverseVarianceWeight(path, Moments.of(x_0, x_1))
    term = ConditionalScoreMatching(path, weight, form)
    zero = Coefficients(torch.zeros(n, 4), torch.zeros(n, 4, 4))
    loss = term.loss(make_ratio(), batch, {"path": zero, "path-": zero})

    assert float(loss.detach().mean()) == pytest.approx(1, rel=0.15)


def test_terms_at_the_ends_are_their_formulas() -> None:
    path, ratio, batch = make_path(), make_ratio(), make_batch()
    ends = path.start(batch.x_0, batch.noise), path.end(batch.x_1, batch.noise)
    log_p_0, log_p_1 = (ratio.outputs(x).logits.log_softmax(dim=1) for x in ends)
    f_0, f_1 = ratio.log_ratio(ends[0]), ratio.log_ratio(ends[1])
    expected = {
        ClassLoss: -log_p_1[range(B), batch.label],
        OutlierExposure: -log_p_0.mean(dim=1),
        Shrinkage: (f_0**2 + f_1**2) / 2,
        EndPointLoss: nn.functional.softplus(f_0) + nn.functional.softplus(-f_1),
    }
    # A tenth of the target is spread over the four classes.
    smoothed = Objective({"x": (1.0, ClassLoss(path, smoothing=0.1))})(ratio, batch)["x"]
    spread = 0.9 * expected[ClassLoss] - 0.1 * log_p_1.mean(dim=1)
    torch.testing.assert_close(smoothed, spread)
    for term, loss in expected.items():
        torch.testing.assert_close(Objective({"x": (1.0, term(path))})(ratio, batch)["x"], loss)


def test_path_variance_is_the_integral_and_descends() -> None:
    path, moments = make_path(), Moments(48, 48.0, 3.0, 60.0)
    term, ratio, batch = PathVariance(path, moments), make_ratio(), make_batch()

    def loss() -> Tensor:
        return term.loss(ratio, batch, {})

    with torch.no_grad():
        expected = integrate.quad(
            lambda t: float(path.moment_variance(torch.tensor(t), moments)), 0, 1, limit=200
        )[0]
    first = loss()
    assert first.detach().exp().numpy() == pytest.approx(expected, rel=1e-4)

    optimizer = torch.optim.Adam(path.parameters(), lr=0.1)
    for _ in range(15):
        optimizer.zero_grad()
        loss().mean().backward()
        optimizer.step()
    assert loss().mean() < first.mean() - 0.1


@pytest.mark.parametrize("term", [JointScoreMatching, ConditionalJointScoreMatching])
def test_the_balance_is_a_factor_on_the_data_part(term: type[Term]) -> None:
    path, ratio, batch = make_path(), make_ratio(), make_batch()
    none, one, three = (
        Objective({"x": (1.0, term(path, Score(), balance=b))})(ratio, batch)["x"].detach()
        for b in (0.0, 1.0, 3.0)
    )
    assert ((one - none).abs() > 1e-3).all()
    torch.testing.assert_close(three - none, 3 * (one - none))


@pytest.mark.parametrize(
    ("cells", "shape", "grid"),
    [
        (16, (8, 3, 32, 32), (4, 4)),
        (8, (8, 3, 32, 64), (2, 4)),
        (8, (8, 3, 64, 32), (4, 2)),
        (1, (8, 3, 7, 5), (1, 1)),
        (16, (8, 48), None),
        (16, (8, 3, 30, 30), None),
        (7, (8, 3, 32, 32), None),
    ],
)
def test_the_grid_of_blocks_has_the_aspect_of_images_or_is_refused(
    cells: int, shape: tuple[int, ...], grid: tuple[int, int] | None
) -> None:
    if grid is not None:
        assert block_grid(cells, shape) == grid
        return
    with pytest.raises(UserError, match=rf"conditional_form: got .* expected .* {cells} cells"):
        block_grid(cells, shape)


def test_cell_forms_need_a_backbone_with_cells() -> None:
    ratio = OneStepRatio(CoefficientNetwork(MLP(3, 8), 8, 4), RBFBasis(size=4))
    path = make_path()
    terms = {name: (1.0, TERMS[name](path)) for name in ("scalar", "time", "joint", "kliep")}
    assert Objective(terms)(ratio, make_batch(3))["total"].shape == (B,)
    for form in ("per_dimension", "per_block"):
        objective = Objective({"x": (1.0, ConditionalScoreMatching(path, form=form))})
        with pytest.raises(UserError, match=rf"conditional_form: {form} needs .* expected scalar"):
            objective(ratio, make_batch(3))


@pytest.mark.parametrize(
    ("make", "change", "classes"),
    [
        (ClassLoss, {"label": None}, 4),
        (ClassLoss, {}, 0),
        (OutlierExposure, {}, 0),
        (lambda path: JointScoreMatching(path, Score()), {"probe": None}, 4),
        # One cell would broadcast to all dimensions.
        (lambda path: ConditionalScoreMatching(path, form="per_dimension"), {}, 4),
    ],
)
def test_what_a_term_lacks_is_asserted(
    make: Callable[[GaussianPath], Term], change: dict[str, None], classes: int
) -> None:
    objective = Objective({"x": (1.0, make(make_path()))})
    with pytest.raises(AssertionError):
        objective(make_ratio(classes), make_batch()._replace(**change))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: ConditionalScoreMatching(path, form="vector"),
        lambda path: EndPointLoss(path, "hinge"),
        lambda path: EndPointLoss(path, cap=0.0),
        lambda path: EndPointLoss(),
        lambda path: PathDifference(path, delta=0.0),
        lambda path: Objective({}),
        lambda path: Objective({"total": (1.0, Shrinkage(path))}),
        lambda path: Objective({"a": (1.0, Shrinkage(path)), "b": (1.0, Shrinkage(make_path()))}),
        lambda path: TimeScoreMatching(
            GaussianPath(FollmerSchedule(), DDBINoise(0.1, 0.1)), times=UniformTimes()
        ),
    ],
)
def test_constructors_assert_what_makes_no_objective(
    make: Callable[[GaussianPath], object],
) -> None:
    with pytest.raises(AssertionError):
        make(make_path())
