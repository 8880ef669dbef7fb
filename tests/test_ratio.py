r"""Laws of the one-step ratio: it is the integral of its score, and folding changes rounding alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ood_osdre.models.baselines import Classifier, TimeConditionedMLP, TimeConditionedRatio
from ood_osdre.models.bases import KERNELS, RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork, Coefficients, ResNetBackbone
from ood_osdre.models.ratio import DirectRatio, OneStepRatio, RatioModel


def fill_head(network: CoefficientNetwork) -> CoefficientNetwork:
    nn.init.normal_(network.head.weight)
    nn.init.normal_(network.head.bias)
    return network


def mlp_ratio(kernel: str = "rq", size: int = 8, classes: int = 3) -> OneStepRatio:
    network = CoefficientNetwork(MLP(4, 32), 32, size, classes)
    return OneStepRatio(fill_head(network), RBFBasis(kernel, size))


def resnet_ratio(norm: str = "batch", size: int = 16, classes: int = 3) -> OneStepRatio:
    backbone = ResNetBackbone(width=0.125, depths=(1, 1, 1, 1), stem_stride=2, norm=norm)
    network = CoefficientNetwork(backbone, backbone.features, size, classes)
    return OneStepRatio(fill_head(network), RBFBasis("imq", size))


RATIOS: dict[str, tuple[Callable[[], OneStepRatio], tuple[int, ...]]] = {
    "mlp": (mlp_ratio, (4,)),
    "mlp-400": (lambda: mlp_ratio("matern32", size=400), (4,)),
    "mlp-no-classes": (lambda: mlp_ratio("gaussian", classes=0), (4,)),
    "resnet": (resnet_ratio, (3, 32, 32)),
    "resnet-400": (lambda: resnet_ratio(size=400), (3, 32, 32)),
    "resnet-group": (lambda: resnet_ratio("group", classes=0), (3, 32, 32)),
}
ratios = pytest.mark.parametrize(("make", "event"), RATIOS.values(), ids=RATIOS)


class Counter(nn.Module):
    r"""A network that counts its calls and returns a plain tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, size)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x)


@ratios
def test_log_ratio_is_the_integral_of_the_time_score(
    make: Callable[[], OneStepRatio], event: tuple[int, ...]
) -> None:
    ratio, x = make().eval(), torch.randn(3, *event)
    h = ratio.coefficients(x).total.detach()
    s = torch.func.vmap(lambda t: ratio.score(h, t.expand(3)))(torch.linspace(0, 1, 2001))

    torch.testing.assert_close(torch.trapezoid(s.T) / 2000, ratio(x), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(ratio.log_ratio(x), ratio(x))
    torch.testing.assert_close(ratio.log_ratio_of(h), ratio(x))
    torch.testing.assert_close(ratio.time_score(x, torch.full((3,), 0.3)), s[600])


@pytest.mark.parametrize("kernel", KERNELS)
def test_score_derivative_matches_autograd(kernel: str) -> None:
    ratio, h = mlp_ratio(kernel), torch.randn(6, 8)
    t = torch.rand(6, requires_grad=True)
    (expected,) = torch.autograd.grad(ratio.score(h, t).sum(), t)

    torch.testing.assert_close(ratio.score_derivative(h, t), expected)


def test_scale_is_the_inverse_root_of_the_size() -> None:
    for size in (1, 16, 400):
        ratio = OneStepRatio(Counter(size), RBFBasis(size=size))
        h, t = torch.randn(5, size), torch.rand(5)

        assert ratio.scale == pytest.approx(size**-0.5)
        expected = torch.einsum("bk,bk->b", h, ratio.basis(t)) / size**0.5
        torch.testing.assert_close(ratio.score(h, t), expected)


def test_cells_add_up_to_the_total() -> None:
    ratio, x, t = resnet_ratio().eval(), torch.randn(3, 3, 32, 32), torch.rand(3)
    h = ratio.coefficients(x)
    assert h.cells is not None

    assert ratio.score(h.cells, t).shape == h.cells.shape[:2]
    for contract in (
        lambda h: ratio.score(h, t),
        lambda h: ratio.score_derivative(h, t),
        ratio.log_ratio_of,
    ):
        torch.testing.assert_close(contract(h.cells).sum(dim=1), contract(h.total))


def test_log_ratio_costs_one_forward() -> None:
    network = Counter(8)
    ratio = OneStepRatio(network, RBFBasis(size=8))
    ratio.log_ratio(torch.randn(5, 4))

    assert network.calls == 1
    assert isinstance(ratio.coefficients(torch.randn(5, 4)), Coefficients)


@pytest.mark.parametrize("training", [True, False])
def test_log_ratio_follows_the_shapes(training: bool) -> None:
    ratio, x = mlp_ratio().train(training), torch.randn(5, 4)
    before = ratio(x)
    ratio(x).sum().backward()
    with torch.no_grad():
        ratio.basis.raw.add_(1.0)
    after = ratio(x)

    assert ratio.basis.raw.grad is not None
    assert (ratio.basis.raw.grad != 0).all()
    assert (before != after).all()
    expected = ratio.scale * ratio.coefficients(x).total @ ratio.basis.integral()
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contraction_is_in_float32_under_autocast(dtype: torch.dtype) -> None:
    size = 400
    ratio = OneStepRatio(Counter(size), RBFBasis(size=size, sigma=10.0)).float()
    # Each coefficient fits into float16; the log-ratio, 20 times as large, does not.
    h, t = torch.full((3, size), 4096.0, dtype=dtype), torch.rand(3, dtype=torch.float32)

    with torch.autocast("cpu", dtype):
        scores = ratio.score(h, t), ratio.score_derivative(h, t), ratio.log_ratio_of(h)
    reference = ratio.double()
    h, t = h.double(), t.double()
    expected = reference.score(h, t), reference.score_derivative(h, t), reference.log_ratio_of(h)

    for ours, theirs in zip(scores, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-3)
    assert scores[0].min() > 65504


@ratios
def test_fold_agrees_in_float32(make: Callable[[], OneStepRatio], event: tuple[int, ...]) -> None:
    ratio, x = make().float().train(), torch.randn(16, *event, dtype=torch.float32)
    folded = ratio.fold()
    assert not folded.training
    assert folded.head.out_features == 1

    ratio.eval()
    with torch.no_grad():
        h, unfolded = ratio.coefficients(x), ratio(x)
        size = ratio.scale * (h.total * ratio.basis.integral()).abs().sum(dim=-1)
        prediction = folded.predict(x)
    error = (prediction.score - unfolded).abs()

    assert (unfolded != 0).all()
    assert (error <= 1e-6 * size).all()
    assert error.max() <= 1e-5 * unfolded.std()
    assert torch.equal(folded.log_ratio(x), prediction.score)
    torch.testing.assert_close(prediction.logits, h.logits)


@pytest.mark.parametrize("bias", [True, False])
def test_fold_is_exact_in_float64(bias: bool) -> None:
    ratio, x = resnet_ratio().eval(), torch.randn(4, 3, 32, 32)
    if not bias:
        ratio.network.head.bias = None
    torch.testing.assert_close(ratio.fold()(x), ratio(x), rtol=1e-11, atol=1e-12)


def test_coefficients_are_the_k_coefficients_of_a_one_step_ratio_alone() -> None:
    ratio, x = mlp_ratio(size=8), torch.randn(5, 4)
    h = ratio.coefficients(x)
    assert h.total.shape == (5, 8)
    torch.testing.assert_close(ratio.scale * h.total @ ratio.basis.integral(), ratio(x))
    torch.testing.assert_close(ratio.log_ratio_at(ratio.outputs(x)), ratio(x))

    others: list[RatioModel] = [
        ratio.fold(),
        DirectRatio(MLP(4, 32), 32, 3),
        Classifier(MLP(4, 32), 32, 3).eval(),
        TimeConditionedRatio(TimeConditionedMLP(4, 32)),
    ]
    for model in others:
        assert not hasattr(model, "coefficients")
        torch.testing.assert_close(model.log_ratio_at(model.outputs(x)), model(x))


def test_fold_copies() -> None:
    ratio, x = mlp_ratio(), torch.randn(5, 4)
    ratio(x).sum().backward()
    folded = ratio.fold()
    expected = folded(x)
    pointers = {p.data_ptr() for p in ratio.state_dict().values()}

    assert not pointers & {p.data_ptr() for p in folded.state_dict().values()}
    assert all(p.is_leaf for p in folded.parameters())
    with torch.no_grad():
        for p in ratio.parameters():
            p.add_(1.0)
    assert torch.equal(folded(x), expected)


def test_folded_head_is_in_float32_under_autocast() -> None:
    ratio = mlp_ratio(size=400).float()
    with torch.no_grad():
        ratio.network.head.weight.mul_(3e4)
    folded, x = ratio.fold(), torch.randn(5, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        features = folded.backbone(x)
        ours = folded.log_ratio(x)
    expected = folded.head(features.float())[:, 0]

    assert ours.dtype == torch.float32
    assert torch.equal(ours, expected)


class Saturating(CoefficientNetwork):
    def forward(self, x: Tensor) -> Coefficients:
        return Coefficients(super().forward(x).total.tanh())


class ClampedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


def with_head(head: nn.Module) -> nn.Module:
    network = CoefficientNetwork(MLP(4, 32), 32, 8)
    network.head = head
    return network


def with_hook() -> CoefficientNetwork:
    network = CoefficientNetwork(MLP(4, 32), 32, 8)
    network.head.register_forward_hook(lambda module, inputs, output: output.tanh())
    return network


@pytest.mark.parametrize(
    ("network", "found"),
    [
        (Counter(8), "Counter"),
        (Saturating(MLP(4, 32), 32, 8), "Saturating"),
        (with_head(nn.Sequential(nn.Linear(32, 8))), "head Sequential"),
        (with_head(ClampedLinear(32, 8)), "head ClampedLinear"),
        (with_hook(), "with hooks"),
    ],
    ids=["plain", "subclass", "sequential", "clamped", "hook"],
)
def test_fold_refuses_what_is_not_affine(network: nn.Module, found: str) -> None:
    ratio = OneStepRatio(network, RBFBasis(size=8)).double()

    assert ratio(torch.randn(5, 4)).shape == (5,)
    with pytest.raises(TypeError, match=f"{found}.* expected a plain CoefficientNetwork"):
        ratio.fold()


def test_sizes_and_times_that_would_broadcast_are_refused() -> None:
    with pytest.raises(AssertionError, match="got 1 coefficients for a basis of 8"):
        OneStepRatio(Counter(1), RBFBasis(size=8))(torch.randn(5, 4))
    with pytest.raises(AssertionError, match=r"t: got shape \(5, 1\)"):
        mlp_ratio().score(torch.randn(5, 8), torch.rand(5, 1))
