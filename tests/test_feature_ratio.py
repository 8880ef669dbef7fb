r"""Tests of the ratio head on a frozen network: laws of the ratio, its files, what it refuses."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openood_host import HostNet
from torch import Tensor, nn
from torch.nn import functional as F

from ood_osdre.config import HeadConfig
from ood_osdre.detectors.feature_ratio import FeatureRatio
from ood_osdre.errors import UserError
from ood_osdre.models.frozen import extract_features
from ood_osdre.training import checkpoint as checkpoints


def options(steps: int, batch_size: int, lr: float = 5e-3, **others: object) -> HeadConfig:
    training = {"steps": steps, "batch_size": batch_size, "lr": lr, "warmup": 5, "eval_every": 5}
    return HeadConfig.of({"width": 16, "depth": 1, "training": training, **others}, "head")


QUICK = options(60, 64, objective={"time_score": 0.0, "endpoint": 1.0})
HEAD = options(5, 16)


def gaussians(n: int, m: int, shift: float = 0.5) -> tuple[Tensor, Tensor]:
    r"""Returns features of ID and of reference data; the log-ratio is affine in them."""
    scale, offset = torch.logspace(-2, 2, 8), torch.linspace(-300, 300, 8)
    return (torch.randn(n, 8) + shift) * scale + offset, torch.randn(m, 8) * scale + offset


def log_ratio(x: Tensor, shift: float = 0.5) -> Tensor:
    scale, offset = torch.logspace(-2, 2, 8), torch.linspace(-300, 300, 8)
    z = (x - offset) / scale
    return shift * z.sum(dim=1) - 8 * shift**2 / 2


def images(n: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float32) + shift


def head_on(net: nn.Module) -> FeatureRatio:
    return FeatureRatio(HEAD).fit(net, images(60, 0, 1.0), images(60, 1))


# Whatever trains it, a head's log-ratio is that of the densities; here affine in the features.
TERMS = {
    "conditional": {"time_score": 0.0, "conditional": 1.0},
    "time_score": {},
    "path_difference": {"time_score": 0.0, "path_difference": 1.0},
    "logistic": {"time_score": 0.0, "endpoint": 1.0, "endpoint_clean": True},
}


@pytest.mark.parametrize(
    ("backbone", "term"),
    [
        ("linear", "conditional"),
        ("quadratic", "time_score"),
        ("mlp", "time_score"),
        ("linear", "path_difference"),
        ("mlp", "logistic"),
    ],
)
def test_log_ratio_is_that_of_the_feature_densities(backbone: str, term: str) -> None:
    head = options(
        400, 512, 1e-2, held_out=0.0, backbone=backbone, width=32, objective=TERMS[term]
    )
    # Sets of different sizes: priors do not enter a ratio.
    ratio = FeatureRatio(head).fit_features(*gaussians(20_000, 5_000))
    x = torch.cat(gaussians(1000, 1000))
    error = ratio.log_ratio_of_features(x) - log_ratio(x)

    assert error.abs().mean() < 0.25
    assert abs(error.mean()) < 0.15


def test_fit_on_a_network_is_fit_on_its_features_and_scores_in_one_pass() -> None:
    net = HostNet().float().eval()
    id_images, reference = images(200, 0) * 2 + 1, images(300, 1)
    ratio = FeatureRatio(QUICK).fit(net, id_images, reference.split(50))

    net.passes = 0
    scores = ratio.log_ratio(id_images[:50])
    assert net.passes == 1
    assert scores.mean() > ratio.log_ratio(reference).mean() + 1
    features = [extract_features(net, x).features for x in (id_images, reference)]
    again = FeatureRatio(QUICK).fit_features(*features).log_ratio_of_features(features[0][:50])
    assert torch.allclose(scores, again, atol=1e-4)


def test_fits_are_reproducible_and_leave_the_generator_alone() -> None:
    x_1, x_0 = gaussians(300, 300)
    state = torch.get_rng_state()
    fits = [FeatureRatio(HEAD).fit_features(x_1, x_0) for _ in range(2)]

    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*(fit.log_ratio_of_features(x_0) for fit in fits))


def test_held_out_features_select_the_step() -> None:
    r"""Sixty random vectors a side can be told apart only by heart."""
    x_1, x_0 = torch.randn(2, 60, 32)

    def fit(select: str) -> FeatureRatio:
        head = options(100, 256, 1e-2, width=64, select=select, objective=TERMS["logistic"])
        return FeatureRatio(head).fit_features(x_1, x_0)

    selected, by_heart = fit("held_out"), fit("last")
    fresh = torch.randn(1000, 32)

    size = [f.log_ratio_of_features(fresh).abs().mean() for f in (selected, by_heart)]
    assert size[0] < size[1] / 3


@pytest.mark.parametrize("silent", [2, 30])
def test_silent_and_repeated_features_are_no_components(silent: int) -> None:
    plain = gaussians(300, 300)
    ratio = FeatureRatio(HEAD).fit_features(*plain)
    padded = [torch.cat([F.pad(x, (0, silent)), x[:, :3]], dim=1) for x in plain]
    wider = FeatureRatio(HEAD).fit_features(*padded)
    assert wider.trained is not None
    assert wider.trained.whitening.matrix.shape == (11 + silent, 8)
    x = padded[0][:5].clone()
    before = wider.log_ratio_of_features(x)
    x[:, 8 : 8 + silent] = 0.5  # one that wakes up says nothing
    assert torch.allclose(wider.log_ratio_of_features(x), before, atol=1e-4)
    assert torch.isfinite(ratio.log_ratio_of_features(plain[0])).all()


def test_parts_in_training_mode_neither_score_nor_change() -> None:
    net, x = HostNet().float().eval(), images(7, 2)
    ratio = head_on(net)
    expected = ratio.log_ratio(x)
    net.norm.train()
    state = copy.deepcopy(net.state_dict())

    assert torch.equal(ratio.log_ratio(x), expected)
    assert torch.equal(head_on(net).log_ratio(x), expected)
    assert net.norm.training
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


def test_saved_ratios_load_to_the_same_scores(tmp_path: Path) -> None:
    x_1, x_0 = gaussians(300, 300)
    ratio = FeatureRatio(HEAD.replace(layers=["conv"])).fit_features(x_1, x_0)
    ratio.save(tmp_path)
    loaded = FeatureRatio.load(tmp_path)

    assert (loaded.options, loaded.features) == (ratio.options, 8)
    assert torch.equal(loaded.log_ratio_of_features(x_0), ratio.log_ratio_of_features(x_0))
    assert [p.name for p in tmp_path.iterdir()] == ["feature_ratio.safetensors"]


def test_a_head_scores_no_other_network_and_pickles_without_its_own(tmp_path: Path) -> None:
    net, x = HostNet().float().eval(), images(5, 2)
    ratio = head_on(net)
    ratio.save(tmp_path)
    pickled = pickle.loads(pickle.dumps(ratio))
    assert pickled.net is None
    for same in (pickled.attach(copy.deepcopy(net)), FeatureRatio.load(tmp_path, net)):
        assert torch.equal(same.log_ratio(x), ratio.log_ratio(x))

    other = HostNet().float().eval()
    further = copy.deepcopy(net)
    with torch.no_grad():
        further.conv.weight.mul_(1.5)
    for net in (other, further):
        for call in (
            lambda net=net: FeatureRatio.load(tmp_path, net),
            lambda net=net: FeatureRatio.load(tmp_path).attach(net),
            lambda net=net: pickled.evaluate(net, x),
        ):
            with pytest.raises(UserError, match="HostNet: not the network, or not the weights"):
                call()


X_1, X_0 = torch.zeros(4, 3), torch.ones(4, 3)


@pytest.mark.parametrize(
    ("x_1", "x_0", "message"),
    [
        (X_1[:0], X_0, r"ID features: got float32 of shape \(0, 3\), expected .* \(B, 3\)"),
        (X_1[:, :0], X_0, r"ID features: got float32 of shape \(4, 0\)"),
        (X_1, X_0[0], r"reference features: got float32 of shape \(3,\)"),
        (X_1, X_0[:, :2], r"reference features: got float32 of shape \(4, 2\), .* \(B, 3\)"),
        (X_1[..., None], X_0, r"ID features: got float32 of shape \(4, 3, 1\)"),
        (X_1.cfloat(), X_0, "ID features: got complex64"),
        (X_1 * torch.nan, X_0, "ID features: 4 of 4 inputs hold NaN or infinity"),
        (X_1, X_0 / 0, "reference features: 4 of 4 inputs hold NaN or infinity"),
        (X_1, X_0.double() * 1e300, "reference features: 4 of 4 inputs hold NaN"),
        (torch.eye(3), X_1[:1].repeat(50, 1), "features: all 50 of a set are copies of one"),
        (X_1, X_1, r"head\.rank: got null, but the 3 features of 8 images vary in 0 directions"),
    ],
)
def test_features_that_no_head_can_learn_from_are_refused(
    x_1: Tensor, x_0: Tensor, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        FeatureRatio(HEAD).fit_features(x_1, x_0)
    with pytest.raises(TypeError, match="ID features: got ndarray, expected a tensor"):
        FeatureRatio(HEAD).fit_features(np.zeros((4, 3)), x_0)  # type: ignore[arg-type]


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(UserError, match=r"id_from: got held_out, expected train: ID images"):
        FeatureRatio({"id_from": "held_out"})


def test_scoring_needs_a_fit_a_network_and_finite_features(tmp_path: Path) -> None:
    ratio, x = FeatureRatio(HEAD), torch.randn(60, 8)

    def refused(message: str, call: Any, *args: object) -> None:  # noqa: ANN401
        with pytest.raises(UserError, match=message):
            call(*args)

    refused("FeatureRatio: not fitted; call fit", ratio.log_ratio_of_features, x)
    refused("FeatureRatio: not fitted", ratio.save, tmp_path)
    ratio.fit_features(x + 1, x)
    refused(r"of shape \(60, 7\), expected .* \(B, 8\)", ratio.log_ratio_of_features, x[:, 1:])
    refused(r"call fit, or attach\(net\)", ratio.log_ratio, x)
    x[:3, 1] = torch.nan
    refused("features: 3 of 60 inputs hold NaN", ratio.log_ratio_of_features, x)
    ratio.ratio.head.bias.data[0] = torch.nan  # type: ignore[union-attr]
    refused("features scores: 57 of 57 are NaN", ratio.log_ratio_of_features, x[3:])
    refused(
        "options: unknown key 'step'; did you mean 'training.steps'", FeatureRatio, {"step": 5}
    )
    assert FeatureRatio({"training": {"steps": 5}}).options.training.steps == 5
    refused("features: got float32 of shape", FeatureRatio(HEAD).fit, HostNet(), [], [])


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"whitening.mean": torch.full((4,), torch.nan)}, {}, r"whitening\.mean holds NaN"),
        (
            {"whitening.mean": torch.zeros(2)},
            {},
            r"of another architecture: whitening\.mean \(2,\)",
        ),
        ({}, {"options": {"width": "8"}}, "width: got '8'"),
        ({"whitening.matrix": torch.zeros(4)}, {}, "not a ratio of features"),
    ],
)
def test_files_of_heads_are_checked_when_read(
    tensors: dict[str, Tensor], metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    FeatureRatio(HEAD).fit_features(*torch.randn(2, 60, 4)).save(tmp_path)
    old = checkpoints.read_checkpoint(tmp_path, "feature_ratio")
    checkpoints.write_checkpoint(
        tmp_path, "feature_ratio", {**old[0], **tensors}, {**old[1], **metadata}
    )
    with pytest.raises(UserError, match=rf"feature_ratio\.safetensors: {message}"):
        FeatureRatio.load(tmp_path)


FAR = 1.6e9


def test_features_far_from_zero_keep_their_differences(tmp_path: Path) -> None:
    r"""In seconds since 1970 the features of two sets are as far apart as from zero."""
    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    x_1, x_0 = torch.randn(2, 300, 4, generator=generator).double()
    x_1[:, 0] += 2
    # What is left of them beside the shift is exact.
    x_1, x_0 = (torch.round(x * 2**20) / 2**20 for x in (x_1, x_0))
    options = {"rank": 4, "training": {"steps": 40}}
    near = FeatureRatio(options).fit_features(x_1, x_0)
    far = FeatureRatio(options).fit_features(x_1 + FAR, x_0 + FAR)
    expected = near.log_ratio_of_features(x_1)
    assert expected.std() > 0.1
    torch.testing.assert_close(far.log_ratio_of_features(x_1 + FAR), expected, atol=2e-3, rtol=0)
    far.save(tmp_path)
    again = FeatureRatio.load(tmp_path).log_ratio_of_features(x_1 + FAR)
    assert torch.equal(again, far.log_ratio_of_features(x_1 + FAR))
