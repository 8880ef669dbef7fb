r"""What must not be scored, fitted or loaded, in the detector, the feature ratio and the plugins.

Each case gave a number that is no log-ratio, or a traceback from inside PyTorch.
"""

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openood_host import MEAN, STD, HostLoaders, HostNet, write_run
from PIL import Image
from torch import Tensor, nn

from ood_osdre.detectors.feature_ratio import FeatureRatio, FeatureRatioOptions
from ood_osdre.detectors.one_step import OneStepDetector, class_labels
from ood_osdre.errors import UserError
from ood_osdre.evaluation.calibration import SplitConformal
from ood_osdre.evaluation.scorer import load_scorer
from ood_osdre.models.frozen import KnownNetwork, collect_features, evaluating, extract_features
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor
from ood_osdre.plugin.openood.host import Foreign
from ood_osdre.plugin.openood.loaders import ReferenceImages
from ood_osdre.training import checkpoint as checkpoints

VECTORS = {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}}
FAST = {"training__steps": 2, "training__batch_size": 8, "training__warmup": 1}
HEAD = FeatureRatioOptions(steps=5, width=8, depth=1, batch_size=16)


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)  # conftest puts it back


def refused(message: str, error: type[Exception] = UserError) -> Foreign:
    r"""Expects an error of one line, of a length that a line may have."""
    return pytest.raises(error, match=f"^(?=.{{1,300}}$)[^\n]*{message}[^\n]*$")


def detector_of_vectors(**options: object) -> OneStepDetector:
    return OneStepDetector(VECTORS, progress=False, device="cpu", **{**FAST, **options})


def normal(n: int, seed: int, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, dim))


@pytest.fixture(scope="module")
def vectors() -> OneStepDetector:
    torch.set_default_dtype(torch.float32)
    return detector_of_vectors().fit(normal(30, 0) + 1, normal(30, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


class Net(nn.Module):
    r"""A classifier with everything that training mode changes."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, width, 3)
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(width, 4)

    def forward(self, x: Tensor, return_feature: bool = False) -> Foreign:
        z = self.drop(self.conv(self.norm(x)).relu().mean((2, 3)))
        return (self.fc(z), z) if return_feature else self.fc(z)


def noise(n: int, seed: int, size: int = 8) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def head_on(net: nn.Module) -> FeatureRatio:
    return FeatureRatio(HEAD).fit(net, noise(60, 0) + 1, noise(60, 1))


# Training mode of parts


def partly_training(net: nn.Module) -> dict[str, bool]:
    net.eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout):
            module.train()
    return {name: module.training for name, module in net.named_modules()}


def test_parts_in_training_mode_neither_score_nor_change() -> None:
    net, x = Net().eval(), noise(7, 2)
    ratio = head_on(net)
    expected = ratio.log_ratio(x)
    modes, state = partly_training(net), copy.deepcopy(net.state_dict())

    assert torch.equal(ratio.log_ratio(x), expected)
    assert torch.equal(ratio.log_ratio(x[:1]), ratio.log_ratio(x[:1]))
    assert {name: module.training for name, module in net.named_modules()} == modes
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    # A fit reads the same features, and leaves each module in its own mode, too.
    again = head_on(net)
    assert torch.equal(again.log_ratio(x), expected)
    assert net.drop.training
    assert not net.training


def test_modes_are_restored_after_a_failure() -> None:
    net = Net()
    net.conv.eval()
    with refused("Net: fails on float32 inputs of shape"):
        extract_features(net, torch.zeros(2, 5, 8, 8))
    assert net.training
    assert net.drop.training
    assert not net.conv.training


def test_a_network_that_does_not_leave_training_mode_is_refused() -> None:
    class Stubborn(Net):
        def train(self, mode: bool = True) -> "Stubborn":
            return super().train(True)

    with refused(r"Stubborn: eval\(\) leaves 5 of 5 modules in training mode"):
        head_on(Stubborn())
    with refused("training mode"):
        OSDREPostprocessor().postprocess(Stubborn(), noise(2, 0))


@pytest.mark.parametrize("mode", ["network", "checkpoint"])
def test_openood_scores_in_evaluation_mode(mode: str, run: Path) -> None:
    options = {} if mode == "network" else {"checkpoint": str(run)}
    net: nn.Module = OSDRENet.load(run) if mode == "network" else Net()
    x, postprocessor = noise(6, 3, 32), OSDREPostprocessor(mode=mode, **options)
    net.eval()
    expected = postprocessor.postprocess(net, x)
    modes = partly_training(net)
    for ours, theirs in zip(postprocessor.postprocess(net, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert {name: module.training for name, module in net.named_modules()} == modes


# Another network


def test_a_head_scores_no_other_network(tmp_path: Path) -> None:
    net, x = Net(0).eval(), noise(5, 2)
    ratio = head_on(net)
    ratio.save(tmp_path)

    same = FeatureRatio.load(tmp_path, Net(0).eval())
    assert torch.equal(same.log_ratio(x), ratio.log_ratio(x))
    other = Net(1).eval()
    with refused("Net: not the network, or not the weights, that the head was fitted to"):
        FeatureRatio.load(tmp_path, other)
    with refused("not the network"):
        FeatureRatio.load(tmp_path).attach(other)
    with refused("not the network"):
        pickle.loads(pickle.dumps(ratio)).evaluate(other, x)
    # Nor the same one, trained further.
    with torch.no_grad():
        net.conv.weight.mul_(1.5)
    with refused("not the network"):
        ratio.log_ratio(x)
    # A head of another network's takes that one.
    assert head_on(other).log_ratio(x).shape == (5,)


def test_networks_are_known_by_their_modules_and_weights() -> None:
    net = Net()
    known = KnownNetwork.of(net)
    halves, relabelled = copy.deepcopy(net).half(), copy.deepcopy(net)
    relabelled.drop = nn.AlphaDropout()

    assert known.matches(net)
    assert known.matches(copy.deepcopy(net).eval().to(memory_format=torch.channels_last))
    assert known.matches(nn.DataParallel(net))
    assert known.matches(torch.compile(net))
    assert not known.matches(halves)
    assert not known.matches(relabelled)
    assert not known.matches(Net(1))
    net.load_state_dict(Net(1).state_dict())
    assert not known.matches(net)


def test_a_known_network_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    known = KnownNetwork.of(net)
    module = import_module("ood_osdre.models.frozen")
    monkeypatch.setattr(module, "_digest", lambda net: pytest.fail("hashed"))
    assert known.matches(net)


def test_heads_in_openood_score_no_other_network(tmp_path: Path) -> None:
    net, loaders = HostNet().eval(), HostLoaders(count=8)
    made = OSDREPostprocessor(
        mode="features", reference=loaders.reference, broaden=0, head={"steps": 3}
    )
    made.setup(net, loaders.id, {})
    with refused("HostNet: not the network"):
        made.inference(HostNet().eval(), loaders.id["test"], progress=False)

    made.mode.ratio.save(tmp_path)
    saved = OSDREPostprocessor(mode="features", checkpoint=str(tmp_path))
    with refused("HostNet: not the network"):
        saved.setup(HostNet(), loaders.id, {})
    saved.setup(net, loaders.id, {})
    with torch.no_grad():
        net.conv.weight.neg_()
    for postprocessor in (made, saved):
        with refused("HostNet: not the network"):
            postprocessor.inference(net, loaders.id["test"], progress=False)


# Features and the files of heads


def test_features_and_log_ratios_that_are_not_finite_are_refused() -> None:
    x_1, x_0 = torch.randn(2, 60, 4)
    ratio = FeatureRatio(HEAD).fit_features(x_1 + 1, x_0)
    for value in (torch.nan, torch.inf, 1e300):
        bad = x_0.double()
        bad[:3, 1] = value
        with refused("features: 3 of 60 vectors hold NaN or infinity"):
            ratio.log_ratio_of_features(bad)
    ratio.ratio.head.bias.data[0] = torch.nan  # type: ignore[union-attr]
    with refused("features: 60 of 60 log-ratios are NaN or infinite"):
        ratio.log_ratio_of_features(x_0)


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (np.zeros((4, 3), np.float32), TypeError, "ID features: got ndarray, expected a tensor"),
        (torch.zeros(4, 3, dtype=torch.cfloat), UserError, "got complex64, expected real"),
        (torch.zeros(4, 0), UserError, r"got shape \(4, 0\), expected \(N, F\)"),
        (1e30 * torch.randn(4, 3), UserError, "features: std: 3 of 3 are not positive and finite"),
    ],
)
def test_features_that_no_head_can_learn_from(
    features: Foreign, error: type[Exception], message: str
) -> None:
    with refused(message, error):
        FeatureRatio(HEAD).fit_features(features, torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": torch.tensor([0.0, torch.nan, 0.0, 0.0])}, "mean: 1 of 4 are not finite"),
        ({"std": torch.zeros(4)}, "std: 4 of 4 are not positive"),
        ({"std": -torch.ones(4)}, "std: 4 of 4 are not positive"),
        ({"mean": torch.zeros(2)}, r"mean: got shape \(2,\), expected 4 numbers"),
    ],
)
def test_statistics_of_a_head_are_checked_when_loaded(
    change: dict[str, Tensor], message: str, tmp_path: Path
) -> None:
    FeatureRatio(HEAD).fit_features(*torch.randn(2, 60, 4)).save(tmp_path)
    tensors, metadata = checkpoints.read_checkpoint(tmp_path, "feature_ratio")
    checkpoints.write_checkpoint(tmp_path, "feature_ratio", {**tensors, **change}, metadata)
    with refused(rf"feature_ratio\.json: {message}"):
        FeatureRatio.load(tmp_path)


@pytest.mark.parametrize("net", [None, nn.Linear, lambda x: x])
def test_what_is_no_network_has_no_features(net: Foreign) -> None:
    for call in (extract_features, collect_features, FeatureRatio(HEAD).fit):
        with refused("'net' should be a torch.nn.Module", TypeError):
            call(net, noise(2, 0), noise(2, 0))
    with refused("'net' should be", TypeError), evaluating(net):
        pass


def test_inputs_on_which_a_network_fails_are_named() -> None:
    with refused(r"Net: fails on float32 inputs of shape \(3, 8, 8\)"):
        head_on(Net()).log_ratio(noise(1, 0)[0])
    with refused(r"Net: fails on uint8 inputs of shape"):
        extract_features(Net(), noise(2, 0).byte())
    with refused("'x' should be a tensor", TypeError):
        extract_features(Net(), noise(2, 0).numpy())


# The detector


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [0.7, 1.7, 0.7],
            "labels: 3 of 3 are no class index, the first is 0.7; expected class indices",
        ),
        ([0.0, np.nan, np.inf], "labels: 2 of 3 are no class index, the first is nan"),
        ([0, -5, 1], "labels: 1 of 3 are no class index, the first is -5"),
        (["a", "b", "c"], "labels: got .*'a'.*, expected class indices"),
        ([None] * 3, "labels: got None"),
        ([10**30] * 3, "labels: got 1000"),
        (object(), "labels: got <object"),
        ([[0], [1, 2]], "labels: lists of different lengths"),
    ],
)
def test_labels_are_not_rounded(labels: Foreign, message: str, vectors: OneStepDetector) -> None:
    with refused(message):
        vectors.fit(normal(3, 0), normal(3, 1), labels=labels)


def test_labels_that_are_whole_are_taken() -> None:
    for labels in ([0, 2, -1], [0.0, 2.0, -1.0], torch.tensor([0, 2, -1])):
        assert class_labels(labels).tolist() == [0, 2, -1]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config": 5}, UserError, "config: got int, expected the name"),
        ({"config": [1]}, UserError, "config: got list, expected the name"),
        ({"config": {"training": 5}, **FAST}, UserError, "config: training: got 5"),
        ({"backbone": 3}, TypeError, "'backbone' should be a torch.nn.Module, got int"),
        ({"backbone": nn.Linear}, TypeError, "'backbone' should be a torch.nn.Module, got Linear"),
        ({"size": "32"}, UserError, "size: got '32'"),
        ({"size": 0}, UserError, "size: got 0"),
    ],
)
def test_detectors_that_cannot_be_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with refused(message, error):
        OneStepDetector(device="cpu", **options)


@pytest.mark.parametrize("alpha", ["0.1", None, 1j, np.nan, torch.tensor(0.1)])
def test_rates_that_are_no_numbers_are_refused(alpha: Foreign) -> None:
    with refused("alpha: got .*, expected a rate between 0 and 1"):
        SplitConformal([1.0, 2.0], alpha)


def test_the_smallest_rate_flags_nothing() -> None:
    assert SplitConformal([1.0, 2.0], 5e-324).threshold == -np.inf


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({}, {"alpha": "0.1"}, r"calibration\.json: not a calibration \(alpha: got '0\.1'"),
        ({}, {"alpha": None}, r"calibration\.json: not a calibration \(alpha: got None"),
        ({"scores": torch.ones(3, 2)}, {}, r"calibration\.json: .*found \(3, 2\)"),
        ({"scores": torch.full((9,), torch.nan)}, {}, r"calibration\.json: .*9 of 9 are NaN"),
    ],
)
def test_a_calibration_is_checked_when_loaded(
    tensors: dict[str, Tensor],
    metadata: dict[str, Any],
    message: str,
    vectors: OneStepDetector,
    tmp_path: Path,
) -> None:
    vectors.calibrate(normal(9, 5), alpha=0.5).save(tmp_path)
    old = checkpoints.read_checkpoint(tmp_path, "calibration")
    checkpoints.write_checkpoint(
        tmp_path, "calibration", {**old[0], **tensors}, {**old[1], **metadata}
    )
    with refused(message):
        OneStepDetector.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mean", ["a"] * 8, "mean: expected 8 numbers"),
        ("std", [0.0] * 8, "std: 8 of 8 are not positive"),
        ("std", [1.0], "expected 8 numbers"),
        ("size", "32", "size: got '32'"),
    ],
)
def test_a_detectors_statistics_are_checked_when_loaded(
    name: str, value: Foreign, message: str, vectors: OneStepDetector, tmp_path: Path
) -> None:
    vectors.save(tmp_path)
    tensors, metadata = checkpoints.read_checkpoint(tmp_path, checkpoints.MODEL)
    digest = checkpoints.write_checkpoint(
        tmp_path, checkpoints.MODEL, tensors, {**metadata, name: value}
    )
    assert digest
    with refused(message):
        OneStepDetector.load(tmp_path, device="cpu")


# pytorch-ood


def test_pytorch_ood_refuses_what_is_no_input(run: Path, vectors: OneStepDetector) -> None:
    pytest.importorskip("pytorch_ood.api")
    plugin = import_module("ood_osdre.plugin.pytorch_ood")
    scorer, pixels = load_scorer(run), torch.rand(4, 3, 32, 32)
    images, rows = plugin.OneStepRatioDetector(scorer), plugin.OneStepRatioDetector(vectors)
    bare = plugin.OneStepRatioDetector(scorer.ratio)
    not_images = [torch.rand(4, 3, 64, 64), torch.rand(4, 3, 16, 16), torch.rand(4, 3, 32, 40)]
    not_images += [pixels[:, :1], pixels[0], pixels[:0], pixels.permute(0, 2, 3, 1)]
    for x in not_images:
        with refused(r"x: got shape .*, expected \(B, 3, 32, 32\) as in training"):
            images.predict(x)
    for x in (torch.zeros(2, 1), torch.zeros(2, 3), torch.zeros(8), torch.zeros(0, 8)):
        with refused(r"x: got shape .*, expected \(B, 8\) as in training"):
            rows.predict(x)
    for x, name in ((torch.ones_like(pixels).byte(), "uint8"), (pixels > 0.5, "bool")):
        with refused(f"x: got {name}, expected floats"):
            images.predict(x)
    for detector, x in ((rows, torch.zeros(2, 8)), (images, pixels), (bare, pixels)):
        assert detector.predict(x).isfinite().all()
        for value in (torch.nan, torch.inf):
            bad = x.clone()
            bad[-1] = value
            with refused(rf"x: 1 of {len(x)} inputs hold NaN or infinity"):
                detector.predict(bad)
        with refused("x: got ndarray, expected a tensor", TypeError):
            detector.predict(x.numpy())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((1, 2, 3), r"a batch has 3 parts \(int, int, int\), expected a pair"),
        (torch.zeros(4, 8), r"a batch has 1 parts \(Tensor\), expected a pair"),
        ((torch.zeros(4, 8), [0, 0, -1, -1]), r"a batch has 2 parts \(Tensor, list\)"),
        ((torch.zeros(4, 8), torch.zeros(3)), r"inputs with shape \(4, 8\) and labels with shape"),
        ((torch.zeros(4, 8), torch.full((4,), torch.nan)), "a label for each, none of them NaN"),
    ],
)
def test_pytorch_ood_refuses_batches_that_are_no_pairs(batch: Foreign, message: str) -> None:
    pytest.importorskip("pytorch_ood.api")
    plugin = import_module("ood_osdre.plugin.pytorch_ood")
    with refused(message):
        plugin.OneStepRatioDetector(detector_of_vectors()).fit([batch])
    with refused(message):
        plugin.FeatureRatioDetector(nn.Identity()).fit([batch])


def test_pytorch_ood_encodes_in_evaluation_mode() -> None:
    pytest.importorskip("pytorch_ood.api")
    plugin = import_module("ood_osdre.plugin.pytorch_ood")
    x, y = torch.randn(80, 4), torch.arange(80) % 2 - 1
    encoder = nn.Dropout(0.5)
    detector = plugin.FeatureRatioDetector(encoder, HEAD).fit([(x, y)])
    assert torch.equal(detector.predict(x), detector.predict_features(x))
    assert encoder.training
    with refused("features: 2 of 2 vectors hold NaN"):
        detector.predict_features(x[:2] * torch.nan)


# OpenOOD


@pytest.mark.parametrize("mode", ["network", "checkpoint"])
def test_openood_refuses_images_unlike_those_of_training(mode: str, run: Path) -> None:
    options = {} if mode == "network" else {"checkpoint": str(run)}
    postprocessor = OSDREPostprocessor(mode=mode, **options)
    net = OSDRENet.load(run) if mode == "network" else HostNet()
    for x in (noise(2, 0, 64), noise(2, 0, 16), noise(2, 0, 32)[:, :1], noise(1, 0, 32)[0]):
        with refused(r"images: got shape .*, expected \(B, 3, 32, 32\) as in training"):
            postprocessor.postprocess(net, x)
    with refused("images: got uint8, expected floats"):
        postprocessor.postprocess(net, torch.zeros(2, 3, 32, 32).byte())

    # Nothing says how the host normalises, but its ID images show that it does not.
    pixels = [{"data": torch.rand(1, 3, 32, 32), "label": torch.zeros(1)} for _ in range(20)]
    with refused("the ID images have channels of .*, so they are not normalised"):
        postprocessor.setup(net, {"test": pixels}, {})
    for nothing in ({"test": []}, {"test": iter(())}):
        with refused("the ID loader is empty"):
            postprocessor.setup(net, nothing, {})
    normalised = [{"data": 4 * (batch["data"] - 0.5)} for batch in pixels]
    postprocessor.setup(net, {"test": normalised}, {})
    # Or the options say it.
    said = OSDREPostprocessor(mode=mode, **options, mean=list(MEAN), std=list(STD))
    said.setup(net, {"test": pixels}, {})
    with refused("a batch is a Tensor, expected a mapping with 'data'"):
        postprocessor.setup(net, {"test": [torch.zeros(2, 3, 32, 32)]}, {})
    with pytest.raises(TypeError, match="NoneType"):
        postprocessor.setup(net, None, {})


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (([0.5] * 3, [0.0] * 3), r"postprocessor_args: std.*: got 0"),
        (([0.5] * 3, [-1.0] * 3), r"postprocessor_args: std.*: got -1"),
        (([np.nan] * 3, [1.0] * 3), r"postprocessor_args: mean.*: got nan"),
        (([125.0] * 3, [1.0] * 3), r"postprocessor_args: mean.*: got 125"),
        (([0.5] * 2, [1.0] * 3), r"mean: got shape \(2,\), expected 3 numbers"),
    ],
)
def test_openood_refuses_statistics_that_are_none(
    statistics: tuple[list[float], list[float]], message: str, run: Path
) -> None:
    mean, std = statistics
    with refused(message):
        OSDREPostprocessor(mode="checkpoint", checkpoint=str(run), mean=mean, std=std)


def test_one_number_for_all_channels_is_taken_as_torchvision_does(run: Path) -> None:
    x, net = noise(4, 0, 32), HostNet()
    scores = [
        OSDREPostprocessor(
            mode="checkpoint", checkpoint=str(run), mean=[0.5] * n, std=[0.25] * n
        ).postprocess(net, x)[1]
        for n in (1, 3)
    ]
    assert torch.equal(*scores)


IMAGES, LABELS = torch.zeros(2, 3, 32, 32), torch.zeros(2)
BATCHES: list[tuple[Any, str]] = [
    ({"data": IMAGES, "label": torch.zeros(5)}, r"Tensor\(5,\) under 'label', expected"),
    ({"data": IMAGES}, "NoneType under 'label', expected"),
    ({"data": IMAGES, "label": [0, 1]}, "list under 'label', expected"),
    ({"data": [IMAGES], "label": LABELS}, "list under 'data', Tensor"),
    ((IMAGES, LABELS), "a batch is a tuple, expected a mapping with 'data' and 'label'"),
]


@pytest.mark.parametrize(("batch", "message"), BATCHES)
def test_openood_refuses_batches_that_are_not_the_hosts(
    batch: Foreign, message: str, run: Path
) -> None:
    with refused(f"postprocessor: .*{message}"):
        OSDREPostprocessor().inference(OSDRENet.load(run), [batch], progress=False)


def test_openood_refuses_networks_that_return_no_logits(run: Path) -> None:
    postprocessor = OSDREPostprocessor(mode="checkpoint", checkpoint=str(run))
    for output, found in ((lambda x: (x, 1), "tuple"), (torch.sum, r"\(\)")):
        net = HostNet()
        net.forward = output  # type: ignore[assignment, method-assign]
        with refused(rf"HostNet returns {found} for 2 images, expected class logits"):
            postprocessor.postprocess(net, IMAGES)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"postprocessor": 5}, "postprocessor: got 5, expected a mapping"),
        ({"postprocessor": {"postprocessor_args": 5}}, "postprocessor_args: got 5"),
        (
            {"postprocessor": {"postprocessor_args": {"head": 5}}},
            "postprocessor_args: head: got 5",
        ),
        ({"postprocessor": {"postprocessor_sweep": [1]}}, r"postprocessor_sweep: got \[1\]"),
        ({"postprocessor": {"APS_mode": "no"}}, "postprocessor: APS_mode: got 'no'"),
    ],
)
def test_openood_configurations_that_are_no_mappings(config: Foreign, message: str) -> None:
    with refused(message):
        OSDREPostprocessor(config)


def test_reference_images_of_absurd_size_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("RGB", (40, 40)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    images = ReferenceImages(tmp_path, None, lambda image: torch.zeros(1))
    with refused(r"reference: .*bomb\.png: not readable \(Image size \(1600 pixels\)"):
        images[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)

    def transform(image: object) -> None:
        raise OSError("mine")

    # What the host's transform raises is its own.
    with pytest.raises(OSError, match=r"^mine$"):
        ReferenceImages(tmp_path, None, transform)[0]


def test_single_precision_copies_of_what_was_fitted_are_recognised() -> None:
    rng = np.random.default_rng(0)
    x, reference = rng.normal(1, 1, (60, 3)), rng.normal(0, 1, (60, 3))
    small = {"training__steps": 2, "training__batch_size": 4, "training__warmup": 1}
    detector = OneStepDetector({"network": {"kind": "mlp"}}, progress=False, **small)
    detector.fit(x, reference)
    for again in (x, x.astype(np.float32)):
        with pytest.raises(UserError, match="were read in fit"):
            detector.calibrate(again)
