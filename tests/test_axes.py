r"""Tests of the axes of layers: whatever their order, features are those of the network's own maps."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models import MaxVit, SwinTransformer, VisionTransformer

from ood_osdre.errors import UserError
from ood_osdre.models.frozen import extract_features

PIXELS = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).double()


class Ordered(nn.Module):
    r"""A convolution whose map reaches the layer `out` in another form."""

    def __init__(self, form: Callable[[Tensor], Any], fixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(3, 6, 3, padding=1), Form(form)
        self.fixed = fixed

    def forward(self, x: Tensor) -> object:
        if self.fixed and x.shape[-1] != 8:
            raise AssertionError(f"takes 8 pixels, not {x.shape[-1]}")
        return self.out(self.conv(x))

    def means(self) -> Tensor:
        return self.conv(PIXELS).mean((2, 3))


class Form(nn.Module):
    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> object:
        return self.form(x)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "channels first": lambda y: y,
    "channels last": lambda y: y.permute(0, 2, 3, 1),
    "channels between": lambda y: y.permute(0, 2, 1, 3),
    "tokens": lambda y: y.flatten(2).transpose(1, 2),
    "channels, tokens": lambda y: y.flatten(2),
    "tokens before the batch": lambda y: y.flatten(2).permute(2, 0, 1),
    "batch last": lambda y: y.permute(1, 2, 3, 0),
    "means": lambda y: y.mean((2, 3)),
    "features, batch": lambda y: y.mean((2, 3)).T,
    "cells of one": lambda y: y.mean((2, 3), keepdim=True),
    "pooled to four cells": lambda y: nn.functional.adaptive_avg_pool2d(y, 2),
    "tuple": lambda y: (y, None),
    "mapping": lambda y: {"hidden": [y.permute(0, 2, 3, 1)], "size": 8},
}


@pytest.mark.parametrize("fixed", [False, True], ids=["any side", "one side"])
@pytest.mark.parametrize("form", FORMS)
def test_the_order_of_axes_changes_no_feature(form: str, fixed: bool) -> None:
    net = Ordered(FORMS[form], fixed).eval()
    with torch.no_grad():
        torch.testing.assert_close(extract_features(net, PIXELS, ["out"]).features, net.means())
        # As long as the axis of tokens, the batch is found by what it changes.
        many = torch.cat([PIXELS] * 16)
        torch.testing.assert_close(
            extract_features(net, many, ["out"]).features, net.means().repeat(16, 1)
        )


def test_as_many_features_as_inputs_are_not_transposed() -> None:
    x = torch.cat([PIXELS, PIXELS[:2]])  # six inputs, six features
    for form in ("means", "features, batch"):
        net = Ordered(FORMS[form])
        expected = net.conv(x).mean((2, 3))
        torch.testing.assert_close(extract_features(net, x, ["out"]).features, expected)
    with pytest.raises(UserError, match=r"got \(6, 6\) for 6 inputs"):
        extract_features(Ordered(lambda y: y.mean((2, 3))[:1].expand(6, 6)), x, ["out"])


def test_the_tensors_of_a_tuple_stand_side_by_side() -> None:
    net = Ordered(lambda y: (y, {"mean": y.mean((2, 3))}))
    found = extract_features(net, PIXELS, ["out"]).features
    torch.testing.assert_close(found, net.means().repeat(1, 2))


@pytest.mark.parametrize(
    "form",
    [
        lambda y: y.unfold(2, 4, 4).flatten(0, 1),  # windows, two of an image in rows of their own
        lambda y: y.mean((1, 2, 3)),
        lambda y: y.unsqueeze(1).expand(-1, 6, -1, -1, -1),  # two axes of six
        lambda y: None,
    ],
    ids=["windows", "numbers", "ambiguous", "nothing"],
)
def test_what_has_no_row_for_each_input_is_refused_by_name(form: Callable[[Tensor], Any]) -> None:
    with pytest.raises(UserError, match=r"^Ordered: layer 'out': got .* 4 inputs, expected") as e:
        extract_features(Ordered(form), PIXELS, ["out"])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("layers", [["0"], ["1"], ["0", "1"]])
@pytest.mark.parametrize("act", [nn.ReLU, nn.Hardswish, nn.SiLU])
def test_what_runs_in_place_behind_a_layer_does_not_reach_its_features(
    act: type[nn.Module], layers: list[str]
) -> None:
    x = PIXELS.flatten(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(192, 5), nn.Dropout(), act(inplace=True), nn.Linear(5, 2)).eval()
    expected = net[0](x).detach().repeat(1, len(layers))
    assert torch.equal(extract_features(net, x, layers).features, expected)


def test_the_measurement_leaves_the_network_as_it_is_and_is_made_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rows: list[int] = []
    net[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    for _ in range(3):
        extract_features(net, PIXELS, ["1"])
    assert rows == [4, 2, 3, 2, 4, 4, 4]
    assert net.training
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert not any(m._forward_hooks for m in (net[1], net[2]))


SWIN: dict[str, Any] = {"embed_dim": 24, "depths": (1, 1, 1), "num_heads": (1, 2, 4)}
# Of each family one, small or made so; and whether it is fast.
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "ResNet": ("test_resnet", {}, 32),
    "ViT": ("test_vit", {"img_size": 32}, 32),
    "ConvNeXt": ("test_convnext", {}, 32),
    "EfficientNet": ("test_efficientnet", {}, 32),
    "Swin": ("swin_tiny_patch4_window7_224", {"img_size": 64, **SWIN}, 64),
    "Swin v2": ("swinv2_tiny_window8_256", {"img_size": 64, **SWIN}, 64),
    "Mixer": ("mixer_s32_224", {"img_size": 64}, 64),
    "RegNet": ("regnetx_002", {}, 32),
    "MaxViT": ("maxvit_rmlp_pico_rw_256", {"img_size": 64}, 64),
    "CoAtNet": ("coatnet_pico_rw_224", {"img_size": 64}, 64),
    "DenseNet": ("densenet121", {"block_config": (2, 2, 2, 2)}, 32),
    "MobileNet": ("mobilenetv3_small_050", {}, 32),
    "PoolFormer": ("poolformer_s12", {}, 32),
    "PVT": ("pvt_v2_b0", {}, 32),
}
FAST = ("ResNet", "ViT", "ConvNeXt")


@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_stages_are_those_of_the_architecture(family: str) -> None:
    name, options, side = FAMILIES[family]
    torch.manual_seed(0)
    net = timm.create_model(name, **options).eval()
    x = torch.randn(3, 3, side, side)
    with torch.no_grad():
        if hasattr(net, "blocks") and not isinstance(net.blocks[0], nn.Sequential):
            stages = [f"blocks.{i}" for i in range(len(net.blocks))]
            maps = net.forward_intermediates(x, intermediates_only=True, output_fmt="NLC")
            if family == "ViT":
                maps = net.forward_intermediates(
                    x, return_prefix_tokens=True, intermediates_only=True, output_fmt="NLC"
                )
                maps = [torch.cat([prefix, tokens], dim=1) for tokens, prefix in maps]
            expected = [y.mean(1) for y in maps]
        else:
            stages = [stage["module"] for stage in net.feature_info]
            maps = net.forward_intermediates(x, intermediates_only=True)
            expected = [y.mean((2, 3)) for y in maps]
    assert len(stages) == len(expected) >= 2
    for stage, means in zip(stages, expected, strict=True):
        torch.testing.assert_close(extract_features(net, x, [stage]).features, means)


def of_vit() -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    net = VisionTransformer(32, 8, 2, 2, 24, 32)

    def expected(x: Tensor) -> Tensor:
        tokens = torch.cat([net.class_token.expand(len(x), -1, -1), net._process_input(x)], dim=1)
        return net.encoder(tokens).mean(1)

    return net, "encoder", expected


def of_swin() -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    net = SwinTransformer([4, 4], 16, [1, 1], [1, 2], [2, 2])
    return net, "features.3", lambda x: net.features(x).mean((1, 2))


def of_maxvit() -> tuple[nn.Module, str, Callable[[Tensor], Tensor]]:
    net = MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 8, 0.0)
    first, last = net.blocks
    return net, "blocks.1", lambda x: last(first(net.stem(x))).mean((2, 3))


@pytest.mark.parametrize("build", [of_vit, of_swin, of_maxvit])
def test_layers_of_torchvision(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    net, layer, expected = build()
    net, x = net.eval(), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(extract_features(net, x, [layer]).features, expected(x))
