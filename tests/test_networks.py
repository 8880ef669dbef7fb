r"""Tests for the ood_osdre.models.networks module."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import MLP, CoefficientNetwork, ResNetBackbone
from ood_osdre.models.ratio import OneStepRatio

NORM_LAYERS = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts_of_the_full_width() -> None:
    backbone = ResNetBackbone()
    # He et al.'s ResNet-18 with the 3x3 stem, without its classifier.
    assert count(backbone) == 11_168_832
    assert count(CoefficientNetwork(backbone, backbone.features, 400)) == 11_374_032
    assert count(CoefficientNetwork(backbone, backbone.features, 400, 10)) == 11_379_162


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("norm", NORM_LAYERS)
@pytest.mark.parametrize("stem_stride", [1, 2])
def test_widths_norms_and_strides(width: float, norm: str, stem_stride: int) -> None:
    backbone = ResNetBackbone(width, stem_stride=stem_stride, norm=norm)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        maps = backbone.eval().feature_map(x)
        features = backbone(x)

    side = 4 // stem_stride
    assert backbone.features == int(512 * width)
    assert maps.shape == (2, backbone.features, side, side)
    torch.testing.assert_close(maps.mean(dim=(2, 3)), features)
    norms = [m for m in backbone.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    # One behind the stem, two in each of 8 blocks, one in each of 3 shortcuts.
    assert len(norms) == 20
    assert all(isinstance(m, NORM_LAYERS[norm]) for m in norms)


@pytest.mark.parametrize("norm", NORM_LAYERS)
def test_stem_is_replaced_as_a_whole(norm: str) -> None:
    backbone = ResNetBackbone(0.25, norm=norm)
    kernels = [tuple(m.kernel_size) for m in backbone.modules() if isinstance(m, nn.Conv2d)]

    assert set(kernels) == {(3, 3), (1, 1)}
    assert not any(isinstance(m, nn.MaxPool2d) for m in backbone.modules())
    assert count(backbone) < count(ResNetBackbone(0.5, norm=norm)) / 3.5


def test_depths() -> None:
    shallow, deep = (count(ResNetBackbone(0.25, depths=(n,) * 4)) for n in (1, 2))
    assert shallow < deep / 2


def test_group_norm_does_not_mix_the_batch() -> None:
    backbone = ResNetBackbone(0.25, depths=(1, 1, 1, 1), norm="group").train()
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(backbone(x)[:1], backbone(x[:1]))


@pytest.mark.parametrize("classes", [0, 10])
@pytest.mark.parametrize("training", [True, False])
def test_cells_sum_to_the_total(classes: int, training: bool) -> None:
    backbone = ResNetBackbone(0.125, depths=(1, 1, 1, 1))
    network = CoefficientNetwork(backbone, backbone.features, 6, classes).train(training)
    nn.init.normal_(network.head.weight)
    nn.init.normal_(network.head.bias)
    h = network(torch.randn(3, 3, 32, 32))

    assert h.total.shape == (3, 6)
    assert h.cells.shape == (3, 16, 6)
    torch.testing.assert_close(h.cells.sum(dim=1), h.total)
    assert (h.logits is None) == (classes == 0)
    assert classes == 0 or h.logits.shape == (3, classes)


def test_cells_are_in_row_major_order() -> None:
    class Corner(nn.Module):
        def feature_map(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=(2, 3))

    network = CoefficientNetwork(Corner(), 1, 1)
    nn.init.ones_(network.head.weight)
    x = torch.arange(6.0).reshape(1, 1, 2, 3)

    torch.testing.assert_close(network(x).cells.flatten() * 6, torch.arange(6.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 5)),
        lambda: nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten()),
        lambda: nn.Sequential(nn.Flatten(), MLP(12, 5)),
    ],
)
def test_any_backbone_can_be_injected(make: Callable[[], nn.Module]) -> None:
    network = CoefficientNetwork(make(), features=5, size=4, classes=3)
    h = network(torch.randn(7, 3, 2, 2))

    assert h.total.shape == (7, 4)
    assert h.cells is None
    assert h.logits.shape == (7, 3)


@pytest.mark.parametrize("width", [0.125, 0.25])
def test_zero_head_starts_from_a_log_ratio_of_zero(width: float) -> None:
    backbone = ResNetBackbone(width, depths=(1, 1, 1, 1))
    ratio = OneStepRatio(CoefficientNetwork(backbone, backbone.features, 8), RBFBasis(size=8))
    x = torch.randn(3, 3, 32, 32)

    assert (ratio(x) == 0).all()
    # It does not stay there: the head receives a gradient at once.
    ratio(x).sum().backward()
    assert (ratio.network.head.weight.grad != 0).any()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_mlp(depth: int) -> None:
    mlp = MLP(3, 16, depth)
    x = torch.randn(5, 3)
    mlp(x).square().sum().backward()

    assert mlp(x).shape == (5, 16)
    assert mlp.features == 16
    assert len(mlp.layers) == depth
    assert all((p.grad != 0).any() for p in mlp.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"norm": "layer"}, r"'norm' should be one of .*'batch', 'group'.* got 'layer'"),
        ({"width": 0.1}, "'width' should give multiples of 8 channels, got"),
        ({"width": 0.0}, "'width' should give multiples of 8 channels, got"),
        ({"width": -1.0}, "'width' should give multiples of 8 channels, got"),
    ],
)
def test_rejects_bad_arguments(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetBackbone(**kwargs)
