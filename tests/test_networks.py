r"""Tests of the networks: sizes, cells that add up, a start at zero, orthonormal features."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_osdre.errors import UserError
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import (
    MLP,
    CoefficientNetwork,
    QuadraticFeatures,
    ResNetBackbone,
    check_inputs,
)
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


@pytest.mark.parametrize("width", [0.125, 0.5])
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
    modules = list(backbone.modules())
    norms = [m for m in modules if isinstance(m, nn.BatchNorm2d | nn.GroupNorm)]
    # One behind the stem, two in each of 8 blocks, one in each of 3 shortcuts.
    assert len(norms) == 20
    assert all(isinstance(m, NORM_LAYERS[norm]) for m in norms)
    # The stem is replaced as a whole.
    assert {m.kernel_size for m in modules if isinstance(m, nn.Conv2d)} == {(3, 3), (1, 1)}
    assert not any(isinstance(m, nn.MaxPool2d) for m in modules)


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


def test_zero_head_starts_from_a_log_ratio_of_zero() -> None:
    backbone = ResNetBackbone(0.125, depths=(1, 1, 1, 1))
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
    ("x", "found"),
    [
        (torch.zeros(2, 3, 4, 5), r"got float32 of shape \(2, 3, 4, 5\)"),
        (torch.zeros(2, 1, 4, 4), r"got float32 of shape \(2, 1, 4, 4\)"),
        (torch.zeros(3, 4, 4), r"got float32 of shape \(3, 4, 4\)"),
        (torch.zeros(0, 3, 4, 4), r"got float32 of shape \(0, 3, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4).byte(), "got uint8"),
        (torch.zeros(2, 3, 4, 4).cfloat(), "got complex64"),
        (torch.full((2, 3, 4, 4), torch.nan), "2 of 2 inputs hold NaN or infinity"),
        (torch.full((2, 3, 4, 4), -torch.inf), "2 of 2 inputs hold NaN or infinity"),
    ],
)
def test_batches_unlike_those_of_training_are_refused(x: Tensor, found: str) -> None:
    with pytest.raises(
        UserError, match=rf"^x: {found}.*expected finite floats of shape \(B, 3, 4"
    ):
        check_inputs(x, (3, 4, 4))
    with pytest.raises(TypeError, match="x: got ndarray, expected a tensor"):
        check_inputs(x.numpy(), None)
    assert check_inputs(torch.zeros(2, 3, 4, 4), (3, 4, 4)).shape == (2, 3, 4, 4)


def test_quadratic_features_are_orthonormal_under_the_standard_normal() -> None:
    x, w = np.polynomial.hermite_e.hermegauss(4)
    grid = torch.cartesian_prod(*[torch.as_tensor(x)] * 3)
    weights = torch.cartesian_prod(*[torch.as_tensor(w / w.sum())] * 3).prod(dim=1)
    features = QuadraticFeatures(3)
    values = features(grid)

    assert values.shape == (64, features.features) == (64, 9)
    gram = values.T @ (weights[:, None] * values)
    assert torch.allclose(gram, torch.eye(9), atol=1e-12)
    assert torch.allclose(weights @ values, torch.zeros(9), atol=1e-12)


def test_block_features_couple_coordinates_of_a_block_only() -> None:
    x = torch.randn(5, 5)
    values = QuadraticFeatures(5, block=2)(x)

    assert values.shape == (5, 12)
    assert torch.allclose(values[:, 10:], torch.stack([x[:, 0] * x[:, 1], x[:, 2] * x[:, 3]], 1))
    assert QuadraticFeatures(4, block=1).features == 8
