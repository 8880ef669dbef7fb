r"""Tests for the ratio head on a frozen network and for where it takes features from."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ood_osdre.detectors.feature_ratio import FeatureRatio, FeatureRatioOptions
from ood_osdre.errors import UserError
from ood_osdre.models.frozen import collect_features, extract_features

QUICK = FeatureRatioOptions(steps=150, width=32, depth=1, batch_size=128)


class HostNet(nn.Module):
    r"""A classifier with the face that OpenOOD's networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)
        self.passes = 0

    def forward(self, x: Tensor, return_feature: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        self.passes += 1
        features = F.relu(self.norm(self.conv(x))).mean(dim=(2, 3))
        logits = self.fc(features)
        return (logits, features) if return_feature else logits


def features_of(net: HostNet, x: Tensor) -> Tensor:
    return F.relu(net.norm(net.conv(x))).mean(dim=(2, 3))


@pytest.fixture
def images() -> Tensor:
    return torch.randn(7, 3, 8, 8)


def test_features_by_return_feature(images: Tensor) -> None:
    net = HostNet().eval()
    h = extract_features(net, images)

    assert net.passes == 1
    assert torch.equal(h.features, features_of(net, images))
    assert torch.equal(h.logits, net(images))


def test_features_by_layer_equal_those_by_return_feature(images: Tensor) -> None:
    net = HostNet().eval()
    sequence = nn.Sequential(net.conv, net.norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    named = nn.Sequential(sequence, net.fc).eval()
    h = extract_features(named, images, layer="0")

    assert torch.allclose(h.features, features_of(net, images))
    assert torch.allclose(h.logits, net(images))
    # A feature map is averaged over its cells, and no hook stays behind.
    assert torch.allclose(extract_features(named, images, layer="0.2").features, h.features)
    assert not any(m._forward_hooks for m in named.modules())


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_features_by_timm(name: str) -> None:
    options = {} if name == "resnet18" else {"img_size": 32}
    net = timm.create_model(name, num_classes=5, **options).eval()
    x = torch.randn(3, 3, 32, 32)
    h = extract_features(net, x)

    assert h.features.shape == (3, net.num_features)
    assert torch.allclose(h.logits, net(x), atol=1e-6)
    assert torch.allclose(net.get_classifier()(h.features), h.logits, atol=1e-6)
    net.reset_classifier(0)
    assert extract_features(net, x).logits is None


def test_features_through_a_wrapper(images: Tensor) -> None:
    net = HostNet().eval()
    assert torch.equal(
        extract_features(nn.DataParallel(net), images).features, features_of(net, images)
    )


def test_half_precision_features_become_single(images: Tensor) -> None:
    h = extract_features(HostNet().bfloat16(), images.bfloat16())
    assert h.features.dtype == torch.float32


@pytest.mark.parametrize(
    ("net", "layer", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), None, "Sequential: offers no features"),
        (HostNet(), "head", r"HostNet: has no layer 'head'.* conv, norm, fc"),
        (HostNet(), "", "HostNet: has no layer ''"),
        (nn.Sequential(nn.Flatten(1, 2)), "0", None),
    ],
)
def test_networks_without_features_are_refused(
    net: nn.Module, layer: str | None, message: str | None, images: Tensor
) -> None:
    if message is None:
        # (B, N, F) is taken for tokens.
        assert extract_features(net, images, layer).features.shape == (7, 8)
        return
    with pytest.raises(UserError, match=message) as caught:
        extract_features(net, images, layer)
    assert "\n" not in str(caught.value)


def test_layers_that_do_not_return_one_tensor_are_refused(images: Tensor) -> None:
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

    with pytest.raises(UserError, match="'layer' gave 2 outputs"):
        extract_features(Twice(), images, "layer")
    with pytest.raises(UserError, match="'pair' gave tuple"):
        extract_features(Twice(), images, "pair")
    with pytest.raises(UserError, match="Bare: with return_feature=True it returns Tensor"):
        extract_features(Bare(), images)


def test_collected_features_depend_neither_on_batches_nor_on_their_form() -> None:
    net, x = HostNet(), torch.randn(20, 3, 8, 8)
    labels = torch.arange(20)
    expected = features_of(net.eval(), x)

    def loader() -> Iterator[dict[str, Tensor]]:
        yield from ({"data": part, "label": torch.zeros(len(part))} for part in x.split(6))

    for data in (x, loader(), DataLoader(TensorDataset(x, labels), batch_size=3), x.split(1)):
        assert torch.allclose(collect_features(net, data, batch_size=7), expected)
    with pytest.raises(UserError, match="inputs: got a batch of dict, expected a tensor"):
        collect_features(net, [{"pixels": x}])
    with pytest.raises(UserError, match="no inputs"):
        collect_features(net, [])


def gaussians(n: int, m: int, shift: float = 0.5) -> tuple[Tensor, Tensor]:
    r"""Returns features of ID and of reference data; the log-ratio is affine in them."""
    scale, offset = torch.logspace(-2, 2, 8), torch.linspace(-300, 300, 8)
    return (torch.randn(n, 8) + shift) * scale + offset, torch.randn(m, 8) * scale + offset


def log_ratio(x: Tensor, shift: float = 0.5) -> Tensor:
    scale, offset = torch.logspace(-2, 2, 8), torch.linspace(-300, 300, 8)
    z = (x - offset) / scale
    return shift * z.sum(dim=1) - 8 * shift**2 / 2


@pytest.mark.parametrize("backbone", ["linear", "mlp"])
def test_log_ratio_is_that_of_the_feature_densities(backbone: str) -> None:
    options = FeatureRatioOptions(
        backbone=backbone,
        steps=400,
        width=32,
        depth=1,
        lr=5e-3,
        shrinkage=0.0,
        weight_decay=0.0,
    )
    # Sets of different sizes: priors do not enter a ratio.
    ratio = FeatureRatio(options).fit_features(*gaussians(20_000, 5_000))
    x = torch.cat(gaussians(1000, 1000))
    error = ratio.log_ratio_of_features(x) - log_ratio(x)

    assert error.abs().mean() < 0.25
    assert abs(error.mean()) < 0.15


def test_fit_on_a_network_is_fit_on_its_features_and_scores_in_one_pass() -> None:
    net = HostNet().float().eval()
    id_images = torch.randn(200, 3, 8, 8, dtype=torch.float32) * 2 + 1
    reference = torch.randn(300, 3, 8, 8, dtype=torch.float32)
    ratio = FeatureRatio(QUICK).fit(net, id_images, reference.split(50))

    net.passes = 0
    scores = ratio.log_ratio(id_images[:50])
    assert net.passes == 1
    assert scores.mean() > ratio.log_ratio(reference).mean() + 1
    expected = FeatureRatio(QUICK).fit_features(
        features_of(net, id_images).detach(), features_of(net, reference).detach()
    )
    again = expected.log_ratio_of_features(features_of(net, id_images[:50]))
    assert torch.allclose(scores, again, atol=1e-4)


def test_fits_are_reproducible_and_leave_the_generator_alone() -> None:
    x_1, x_0 = gaussians(300, 300)
    state = torch.get_rng_state()
    fits = [FeatureRatio(QUICK).fit_features(x_1, x_0) for _ in range(2)]

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*(fit.log_ratio_of_features(x_0) for fit in fits))


def test_held_out_features_select_the_step() -> None:
    r"""Sixty random vectors a side can be told apart only by heart."""
    x_1, x_0 = torch.randn(2, 60, 32)

    def fit(held_out: float) -> FeatureRatio:
        options = FeatureRatioOptions(
            steps=150, width=64, lr=1e-2, shrinkage=0.0, weight_decay=0.0, held_out=held_out
        )
        return FeatureRatio(options).fit_features(x_1, x_0)

    selected, by_heart = fit(0.1), fit(0.0)
    fresh = torch.randn(1000, 32)

    assert selected.history
    assert not by_heart.history
    size = [f.log_ratio_of_features(fresh).abs().mean() for f in (selected, by_heart)]
    assert size[0] < size[1] / 3


def test_silent_features_do_no_harm() -> None:
    x_1, x_0 = (F.pad(x, (0, 2)) for x in gaussians(300, 300))
    ratio = FeatureRatio(QUICK).fit_features(x_1, x_0)
    x = x_1[:5].clone()
    x[:, -1] = 0.1

    assert torch.isfinite(ratio.log_ratio_of_features(x)).all()


@pytest.mark.parametrize("silent", [2, 9, 30])
def test_a_silent_feature_that_wakes_up_is_not_blown_up(silent: int) -> None:
    x_1, x_0 = (F.pad(x, (0, silent)) for x in gaussians(300, 300))
    ratio = FeatureRatio(QUICK).fit_features(x_1, x_0)
    x = x_1[:5].clone()
    x[:, -1] = 0.5

    assert ratio.standardise is not None
    assert ratio.standardise(x).abs().max() < 10
    everything_silent = FeatureRatio(QUICK).fit_features(torch.zeros(50, 3), torch.zeros(50, 3))
    assert torch.isfinite(everything_silent.log_ratio_of_features(torch.ones(2, 3))).all()


def test_saved_ratios_load_to_the_same_scores(tmp_path: Path) -> None:
    x_1, x_0 = gaussians(300, 300)
    ratio = FeatureRatio(QUICK, layer="conv").fit_features(x_1, x_0)
    ratio.save(tmp_path)
    loaded = FeatureRatio.load(tmp_path)

    assert (loaded.options, loaded.layer, loaded.features) == (QUICK, "conv", 8)
    assert torch.equal(loaded.log_ratio_of_features(x_0), ratio.log_ratio_of_features(x_0))
    with pytest.raises(UserError, match="call attach"):
        loaded.log_ratio(torch.zeros(1, 3, 8, 8))
    assert all(p.suffix in (".json", ".safetensors") for p in tmp_path.iterdir())

    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="truncated or changed"):
        FeatureRatio.load(tmp_path)
    with pytest.raises(UserError, match=r"expected a file feature_ratio\.json"):
        FeatureRatio.load(tmp_path / "elsewhere")


def test_pickles_hold_the_head_but_not_the_network() -> None:
    net = HostNet().float()
    x_1, x_0 = torch.randn(2, 100, 3, 8, 8, dtype=torch.float32)
    ratio = FeatureRatio(QUICK).fit(net, 2 * x_1, x_0)
    copy = pickle.loads(pickle.dumps(ratio))

    assert copy.net is None
    assert torch.equal(copy.attach(net).log_ratio(x_1), ratio.log_ratio(x_1))


@pytest.mark.parametrize(
    ("x_1", "x_0", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(4, 3), r"ID features: got shape \(0, 3\)"),
        (torch.zeros(4, 3), torch.zeros(4), r"reference features: got shape \(4,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 2), "features: 3 of ID data but 2 of the reference"),
        (torch.full((4, 3), torch.nan), torch.zeros(4, 3), "ID features: 4 of 4 vectors hold NaN"),
        (torch.zeros(4, 3), torch.full((4, 3), torch.inf), "reference features: 4 of 4 vectors"),
    ],
)
def test_unusable_features_are_refused(x_1: Tensor, x_0: Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FeatureRatio().fit_features(x_1, x_0)


def test_scoring_needs_a_fit_of_the_same_features(tmp_path: Path) -> None:
    ratio = FeatureRatio(QUICK)
    with pytest.raises(UserError, match="not fitted"):
        ratio.log_ratio_of_features(torch.zeros(2, 8))
    with pytest.raises(UserError, match="nothing to save"):
        ratio.save(tmp_path)
    ratio.fit_features(*gaussians(60, 60))
    with pytest.raises(UserError, match=r"got shape \(2, 9\), expected \(N, 8\)"):
        ratio.log_ratio_of_features(torch.zeros(2, 9))
    with pytest.raises(UserError, match=r"FeatureRatioOptions\.backbone: got .cnn., expected one"):
        FeatureRatioOptions(backbone="cnn")
