r"""Tests of frozen networks: where their features come from, and which network it is."""

import copy
import pickle
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
import timm
import torch
from openood_host import HostNet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ood_osdre.errors import UserError
from ood_osdre.models.frozen import collect_features, evaluating, extract_features
from ood_osdre.models.representation import NetworkDigest


def features_of(net: HostNet, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.conv(x))).mean(dim=(2, 3))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(7, 3, 8, 8)


class Net(nn.Module):
    r"""A classifier with everything that training mode changes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3)
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(6, 4)

    def forward(self, x: Tensor, return_feature: bool = False) -> object:
        z = self.drop(self.conv(self.norm(x)).relu().mean((2, 3)))
        return (self.fc(z), z) if return_feature else self.fc(z)


def test_features_by_return_feature(images: Tensor) -> None:
    net = HostNet().eval()
    for given in (net, nn.DataParallel(net)):
        net.passes = 0
        h = extract_features(given, images)
        assert net.passes == 1
        assert torch.equal(h.features, features_of(net, images))
        assert torch.equal(h.logits, net(images))


def test_features_by_layer_equal_those_by_return_feature(images: Tensor) -> None:
    net = HostNet().eval()
    sequence = nn.Sequential(net.conv, net.norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    named = nn.Sequential(sequence, net.fc).eval()
    h = extract_features(named, images, ["0"])

    assert torch.allclose(h.features, features_of(net, images))
    assert torch.allclose(h.logits, net(images))
    # A feature map is averaged over its cells, tokens (B, N, F) over N, and no hook stays behind.
    assert torch.allclose(extract_features(named, images, ["0.2"]).features, h.features)
    # Several layers stand side by side, in the order of their names.
    both = extract_features(named, images, ["0", "0.2"])
    assert torch.allclose(both.features, torch.cat([h.features, h.features], dim=1))
    assert not any(m._forward_hooks for m in named.modules())


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_features_by_timm(name: str) -> None:
    options = {} if name == "test_resnet" else {"img_size": 32}
    net = timm.create_model(name, num_classes=5, **options).eval()
    x = torch.randn(3, 3, 32, 32)
    h = extract_features(net, x)

    assert h.features.shape == (3, net.num_features)
    assert torch.allclose(h.logits, net(x), atol=1e-6)
    assert torch.allclose(net.get_classifier()(h.features), h.logits, atol=1e-6)
    net.reset_classifier(0)
    assert extract_features(net, x).logits is None


def test_half_precision_features_become_single(images: Tensor) -> None:
    h = extract_features(HostNet().bfloat16(), images.bfloat16())
    assert h.features.dtype == torch.float32


def test_collected_features_depend_neither_on_batches_nor_on_their_form() -> None:
    net, x = HostNet(), torch.randn(20, 3, 8, 8)
    expected = features_of(net.eval(), x)

    def loader() -> Iterator[dict[str, Tensor]]:
        yield from ({"data": part, "label": torch.zeros(len(part))} for part in x.split(6))

    labelled = DataLoader(TensorDataset(x, torch.arange(20)), batch_size=3)
    for data in (x, loader(), labelled, x.split(1)):
        assert torch.allclose(collect_features(net, data, batch_size=7), expected)
    with pytest.raises(
        UserError, match="inputs: a batch: got a mapping with the keys pixels, expected"
    ):
        collect_features(net, [{"pixels": x}])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pair = nn.Flatten(), Pair()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + self.pair(x)[0].flatten(1)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Bare(nn.Module):
    def forward(self, x: Tensor, return_feature: bool = False) -> Tensor:
        return x


class Stubborn(Net):
    def train(self, mode: bool = True) -> "Stubborn":
        return super().train(True)


X = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("net", "layer", "x", "message"),
    [
        (nn.Sequential(nn.Flatten()), None, X, "Sequential: offers no features, expected .* 0"),
        (HostNet(), "head", X, r"HostNet: has no layer 'head'.* conv, norm, fc"),
        (HostNet(), "", X, "HostNet: has no layer ''"),
        (Twice(), "layer", X, r"Twice: layer 'layer': got \(2, 192\) again for 2"),
        (Bare(), None, X, r"Bare: forward\(x, return_feature=True\): got no tensor for 2 inputs"),
        (nn.Sequential(nn.Flatten(0)), "0", X, r"Sequential: layer '0': got \(384,\) for 2"),
        (Stubborn(), None, X, r"Stubborn: eval\(\) leaves 5 of 5 modules in training mode"),
        (HostNet(), None, X[:, :2], r"HostNet: fails on float64 inputs of shape \(2, 2, 8, 8\)"),
        (HostNet(), None, X.byte(), "HostNet: fails on uint8 inputs"),
        (HostNet(), None, np.zeros((2, 3, 8, 8)), "HostNet: fails on float64 inputs"),
    ],
)
def test_networks_that_give_no_features_are_refused_in_one_line(
    net: nn.Module, layer: str | None, x: Tensor, message: str
) -> None:
    if isinstance(x, Tensor) and x.is_floating_point():
        x = x.double()
    with pytest.raises(UserError, match=f"^{message}") as caught:
        extract_features(net.double(), x, [] if layer is None else [layer])
    assert "\n" not in str(caught.value)


def test_modes_are_each_modules_own_again_after_a_pass_and_after_a_failure() -> None:
    net, x = Net(), torch.randn(2, 3, 8, 8)
    net.conv.eval()
    modes = {name: module.training for name, module in net.named_modules()}
    state = copy.deepcopy(net.state_dict())
    with evaluating(net):
        assert not any(module.training for module in net.modules())
    assert torch.equal(extract_features(net, x).features, extract_features(net, x).features)
    with pytest.raises(UserError, match="Net: fails on"):
        extract_features(net, x[:, :2])

    assert {name: module.training for name, module in net.named_modules()} == modes
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_networks_are_recognised_by_their_modules_and_weights() -> None:
    net = Net()
    digest = NetworkDigest.of(net)
    halves, relabelled = copy.deepcopy(net).half(), copy.deepcopy(net)
    relabelled.drop = nn.AlphaDropout()
    strided = copy.deepcopy(net)
    strided.conv.stride = (2, 2)
    centred, shifted = copy.deepcopy(net), copy.deepcopy(net)
    centred.register_buffer("mean", torch.zeros(1), persistent=False)
    shifted.register_buffer("mean", torch.ones(1), persistent=False)
    assert not NetworkDigest.of(centred).matches(shifted)

    moved = copy.deepcopy(net).eval().to(memory_format=torch.channels_last)
    for same in (net, moved, nn.DataParallel(net)):
        assert digest.matches(same)
        assert pickle.loads(pickle.dumps(digest)).matches(same)
    for other in (halves, relabelled, strided, Net(1)):
        assert not digest.matches(other)
    net.load_state_dict(Net(1).state_dict())
    assert not digest.matches(net)
    with pytest.raises(UserError, match=r"Net: not the network, or not the weights"):
        digest.check(net)


@pytest.mark.slow
def test_a_compiled_network_is_recognised() -> None:
    net = Net()
    assert NetworkDigest.of(net).matches(torch.compile(net))


def test_a_network_that_matched_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    digest = NetworkDigest.of(net)
    module = import_module("ood_osdre.models.representation")
    monkeypatch.setattr(module, "_hash", lambda net: pytest.fail("hashed"))
    assert digest.matches(net)
