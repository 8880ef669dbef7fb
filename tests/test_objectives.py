r"""Tests for the mechanics of the objectives: points, forward passes, gradients, refusals."""

from collections.abc import Callable

import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

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
from ood_osdre.paths.schedules import (
    FollmerSchedule,
    KumaraswamySchedule,
    TrigonometricSchedule,
)
from ood_osdre.paths.times import UniformTimes
from ood_osdre.paths.weights import InverseVarianceWeight

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
    "class": lambda path: ClassLoss(path, label_smoothing=0.1),
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


def make_draw(*event: int) -> Batch:
    event = event or (3, 16, 16)
    x_0, x_1, noise, probe = torch.randn(4, B, *event)
    return Batch(x_0, x_1, torch.rand(B), noise, torch.arange(B) % 4, probe)


def test_terms_share_one_forward_pass_and_their_points() -> None:
    path = make_path()
    ratio = make_ratio()
    ratio.network = Counting(ratio.network)
    terms = {name: make(path) for name, make in TERMS.items()}
    losses = Objective({name: (1.0, term) for name, term in terms.items()})(ratio, make_draw())

    # x_t, -z, two gaps, two inner times, dequantised ends, clean ends
    assert ratio.network.calls == [B * (1 + 1 + 4 + 2 + 2 + 2)]
    assert set(losses) == {*TERMS, "total"}
    assert all(loss.shape == (B,) for loss in losses.values())
    assert all(torch.isfinite(loss).all() for loss in losses.values())


def test_equal_names_mean_equal_points() -> None:
    path, draw = make_path(), make_draw()
    seen: dict[str, Tensor] = {}
    for make in TERMS.values():
        for name, x in make(path).points(draw).items():
            torch.testing.assert_close(seen.setdefault(name, x), x)
            assert not x.requires_grad

    torch.testing.assert_close(seen["x_0"], draw.x_0)
    torch.testing.assert_close(seen["x_1"], draw.x_1)
    torch.testing.assert_close(seen["start"], path.start(draw.x_0, draw.noise))
    torch.testing.assert_close(seen["end"], path.end(draw.x_1, draw.noise))
    torch.testing.assert_close(seen["path"], path.sample(*draw[:4]))


def test_total_is_the_weighted_sum() -> None:
    path = make_path()
    weights = {name: float(i) for i, name in enumerate(TERMS)}
    objective = Objective({name: (weights[name], make(path)) for name, make in TERMS.items()})
    losses = objective(make_ratio(), make_draw())
    expected = sum(weights[name] * losses[name] for name in TERMS)

    torch.testing.assert_close(losses["total"], expected)


@pytest.mark.parametrize("name", TERMS)
def test_gradients_reach_the_network_and_only_the_variance_reaches_the_path(name: str) -> None:
    path, ratio = make_path(), make_ratio()
    objective = Objective({name: (1.0, TERMS[name](path))})
    objective(ratio, make_draw())["total"].sum().backward()

    head = ratio.network.class_head if name == "class" else ratio.network.head
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
    ratio, draw = make_ratio(norm=norm), make_draw()
    at = evaluate(ratio, {"a": draw.x_0, "b": draw.x_1[:2]})
    alone = ratio.coefficients(draw.x_0)

    assert at["a"].cells.shape[0] == B
    assert at["b"].logits.shape == (2, 4)
    # Batch statistics are those of all points; group statistics those of each.
    assert torch.allclose(at["a"].total, alone.total) == (norm == "group")


def test_losses_are_single_precision_under_autocast() -> None:
    torch.set_default_dtype(torch.float32)
    path = make_path()
    objective = Objective({name: (1.0, make(path)) for name, make in TERMS.items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = objective(make_ratio(), make_draw())

    assert all(loss.dtype == torch.float32 for loss in losses.values())
    losses["total"].sum().backward()


def test_conditional_forms_split_one_target() -> None:
    path, ratio, draw = make_path(), make_ratio(), make_draw()
    nn.init.zeros_(ratio.network.head.weight)
    target = path.time_score(*draw[:4])
    opposite = path.time_score(*draw[:3], -draw.noise)
    blocks = path.time_score_per_block(*draw[:4], grid=(2, 2))
    expected = {
        "scalar": target**2,
        "antithetic": (target**2 + opposite**2) / 2,
        "per_block": (blocks**2).sum(dim=1),
    }

    torch.testing.assert_close(blocks.sum(dim=1), target)
    for form, loss in expected.items():
        term = ConditionalScoreMatching(path, form=form)
        torch.testing.assert_close(Objective({"x": (1.0, term)})(ratio, draw)["x"], loss)


@pytest.mark.parametrize("form", [f for f in FORMS if f != "per_dimension"])
def test_inverse_variance_weights_give_losses_of_order_one(form: str) -> None:
    n = 1500
    x_0, x_1 = torch.randn(n, 3, 16, 16), 0.5 + 0.5 * torch.randn(n, 3, 16, 16)
    draw = Batch(x_0, x_1, torch.rand(n), torch.randn(n, 3, 16, 16))
    path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.01, 0.005))
    weight = InverseVarianceWeight(path, Moments.of(x_0, x_1))
    term = ConditionalScoreMatching(path, weight, form)
    zero = Coefficients(torch.zeros(n, 4), torch.zeros(n, 4, 4))
    loss = term.loss(make_ratio(), draw, {"path": zero, "path-": zero})

    assert float(loss.detach().mean()) == pytest.approx(1, rel=0.15)


def test_path_difference_divides_by_the_actual_gap() -> None:
    path, ratio = make_path(), make_ratio()
    draw = make_draw()._replace(t=torch.tensor([0.0, 0.01, 0.3, 0.5, 0.97, 1.0]))
    loss = Objective({"x": (1.0, PathDifference(path, delta=0.05))})(ratio, draw)["x"]

    later = torch.tensor([0.05, 0.06, 0.35, 0.55, 1.0, 1.0])
    earlier = torch.tensor([0.0, 0.0, 0.25, 0.45, 0.92, 0.95])
    s, s_later, s_earlier = (
        ratio.time_score(path.sample(draw.x_0, draw.x_1, u, draw.noise), draw.t)
        for u in (draw.t, later, earlier)
    )
    torch.testing.assert_close(loss, s**2 - 2 * (s_later - s_earlier) / (later - earlier))


def test_class_loss_is_a_smoothed_cross_entropy_at_the_end_points() -> None:
    path, ratio, draw = make_path(), make_ratio(), make_draw()
    loss = Objective({"x": (1.0, ClassLoss(path, label_smoothing=0.2))})(ratio, draw)["x"]
    log_p = ratio.coefficients(path.end(draw.x_1, draw.noise)).logits.log_softmax(dim=1)
    target = 0.8 * nn.functional.one_hot(draw.label, 4) + 0.2 / 4

    torch.testing.assert_close(loss, -(target * log_p).sum(dim=1))


def test_shrinkage_is_the_mean_square_of_the_log_ratios() -> None:
    ratio, draw = make_ratio(), make_draw()
    loss = Objective({"x": (1.0, Shrinkage(clean=True))})(ratio, draw)["x"]
    expected = (ratio.log_ratio(draw.x_0) ** 2 + ratio.log_ratio(draw.x_1) ** 2) / 2

    torch.testing.assert_close(loss, expected)


def test_path_variance_is_the_integral_and_descends() -> None:
    path, moments = make_path(), Moments(48, 48.0, 3.0, 60.0)
    term, ratio, draw = PathVariance(path, moments), make_ratio(), make_draw()

    def loss() -> Tensor:
        return term.loss(ratio, draw, {})

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
    path, ratio, draw = make_path(), make_ratio(), make_draw()
    none, one, three = (
        Objective({"x": (1.0, term(path, Score(), balance=b))})(ratio, draw)["x"].detach()
        for b in (0.0, 1.0, 3.0)
    )
    assert ((one - none).abs() > 1e-3).all()
    torch.testing.assert_close(three - none, 3 * (one - none))


def test_vectors_need_no_feature_map() -> None:
    path = make_path()
    ratio = OneStepRatio(CoefficientNetwork(MLP(3, 8), 8, 4), RBFBasis(size=4))
    terms = {name: (1.0, TERMS[name](path)) for name in ("scalar", "time", "joint", "kliep")}

    assert Objective(terms)(ratio, make_draw(3))["total"].shape == (B,)


@pytest.mark.parametrize(
    ("cells", "shape", "grid"),
    [
        (16, (8, 3, 32, 32), (4, 4)),
        (4, (8, 1, 28, 28), (2, 2)),
        (8, (8, 3, 32, 64), (2, 4)),
        (8, (8, 3, 64, 32), (4, 2)),
        (1, (8, 3, 7, 5), (1, 1)),
    ],
)
def test_block_grid(cells: int, shape: tuple[int, ...], grid: tuple[int, int]) -> None:
    assert block_grid(cells, shape) == grid


@pytest.mark.parametrize(
    ("cells", "shape"), [(16, (8, 48)), (16, (8, 3, 30, 30)), (7, (8, 3, 32, 32))]
)
def test_block_grid_refuses_what_does_not_tile(cells: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tile evenly"):
        block_grid(cells, shape)


@pytest.mark.parametrize(
    ("term", "change", "message"),
    [
        (lambda path: ClassLoss(path), {"label": None}, "'label' in the batch"),
        (lambda path: JointScoreMatching(path, Score()), {"probe": None}, "'probe' in the batch"),
        (lambda path: ConditionalScoreMatching(path, form="per_dimension"), {}, "one cell per"),
    ],
)
def test_terms_say_what_the_draw_lacks(
    term: Callable[[GaussianPath], Term], change: dict[str, None], message: str
) -> None:
    objective = Objective({"x": (1.0, term(make_path()))})
    with pytest.raises(ValueError, match=message):
        objective(make_ratio(), make_draw()._replace(**change))


@pytest.mark.parametrize("form", ["per_dimension", "per_block"])
def test_cell_forms_need_cells(form: str) -> None:
    ratio = OneStepRatio(CoefficientNetwork(MLP(3, 8), 8, 4), RBFBasis(size=4))
    objective = Objective({"x": (1.0, ConditionalScoreMatching(make_path(), form=form))})
    with pytest.raises(ValueError, match="returns cells"):
        objective(ratio, make_draw(3))


def test_class_loss_needs_a_class_head() -> None:
    objective = Objective({"x": (1.0, ClassLoss(make_path()))})
    with pytest.raises(ValueError, match="class head"):
        objective(make_ratio(classes=0), make_draw())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: ConditionalScoreMatching(path, form="vector"), "'form' should be one of"),
        (lambda path: EndPointLoss(path, "hinge"), "'loss' should be one of"),
        (lambda path: EndPointLoss(path, cap=0.0), "'cap' should be positive"),
        (lambda path: EndPointLoss(), "'path' should be given"),
        (lambda path: ClassLoss(path, label_smoothing=1.0), "'label_smoothing' should be"),
        (lambda path: PathDifference(path, delta=0.0), "'delta' should be"),
        (lambda path: Objective({}), "'terms' should be named"),
        (lambda path: Objective({"total": (1.0, Shrinkage(path))}), "'terms' should be named"),
        (
            lambda path: Objective(
                {"a": (1.0, Shrinkage(path)), "b": (1.0, Shrinkage(make_path()))}
            ),
            "on one path",
        ),
        (
            lambda path: TimeScoreMatching(
                GaussianPath(FollmerSchedule(), DDBINoise(0.1, 0.1)), times=UniformTimes()
            ),
            "'times' should stay within",
        ),
    ],
)
def test_refusals(make: Callable[[GaussianPath], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_path())
