r"""What both plugins must not score or fit: it would give a number that is no log-ratio."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openood_host import MEAN, STD, HostLoaders, HostNet, write_run
from PIL import Image
from torch import Tensor, nn

from ood_osdre.config import HeadConfig
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.detectors.scorer import load_scorer
from ood_osdre.errors import UserError
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor
from ood_osdre.plugin.openood.host import Foreign
from ood_osdre.plugin.openood.loaders import ReferenceImages

VECTORS = {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}}
FAST = {"training__steps": 2, "training__batch_size": 8, "training__warmup": 1}
HEAD = HeadConfig.of({"width": 8, "depth": 1, "training": {"steps": 5, "batch_size": 16}}, "head")


@pytest.fixture(autouse=True)
def single_precision() -> None:
    torch.set_default_dtype(torch.float32)  # conftest puts it back


def refused(message: str, error: type[Exception] = UserError) -> Foreign:
    r"""Expects an error of one line, of a length that a line may have."""
    return pytest.raises(error, match=f"^(?=.{{1,300}}$)[^\n]*{message}[^\n]*$")


def detector_of_vectors() -> OneStepDetector:
    return OneStepDetector(VECTORS, progress=False, device="cpu", **FAST)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


def noise(n: int, seed: int, size: int = 8) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


# pytorch-ood


def test_pytorch_ood_refuses_what_is_no_input(run: Path) -> None:
    pytest.importorskip("pytorch_ood.api")
    plugin = import_module("ood_osdre.plugin.pytorch_ood")
    scorer, pixels = load_scorer(run), torch.rand(4, 3, 32, 32)
    vectors = detector_of_vectors().fit(torch.randn(30, 8) + 1, torch.randn(30, 8))
    images, rows = plugin.OneStepRatioDetector(scorer), plugin.OneStepRatioDetector(vectors)
    bare = plugin.OneStepRatioDetector(scorer.ratio)
    not_images = [torch.rand(4, 3, 64, 64), torch.rand(4, 3, 16, 16), torch.rand(4, 3, 32, 40)]
    not_images += [pixels[:, :1], pixels[0], pixels[:0], pixels.permute(0, 2, 3, 1)]
    for x in not_images:
        with refused(r"x: got .*, expected finite floats of shape \(B, 3, 32, 32\), not empty"):
            images.predict(x)
    for x in (torch.zeros(2, 1), torch.zeros(2, 3), torch.zeros(8), torch.zeros(0, 8)):
        with refused(r"x: got .*, expected finite floats of shape \(B, 8\), not empty"):
            rows.predict(x)
    for x, name in ((torch.ones_like(pixels).byte(), "uint8"), (pixels > 0.5, "bool")):
        with refused(f"x: got {name} .*, expected finite floats"):
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
    with refused("features: 2 of 2 inputs hold NaN"):
        detector.predict_features(x[:2] * torch.nan)


# OpenOOD


@pytest.mark.parametrize("mode", ["network", "checkpoint"])
def test_openood_scores_in_evaluation_mode(mode: str, run: Path) -> None:
    options = {} if mode == "network" else {"checkpoint": str(run)}
    net: nn.Module = OSDRENet.load(run) if mode == "network" else HostNet()
    x, postprocessor = noise(6, 3, 32), OSDREPostprocessor(mode=mode, **options)
    expected = postprocessor.postprocess(net.eval(), x)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    modes = [module.training for module in net.modules()]
    for ours, theirs in zip(postprocessor.postprocess(net, x), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert [module.training for module in net.modules()] == modes


def test_heads_in_openood_score_no_other_network(tmp_path: Path) -> None:
    net, loaders = HostNet().eval(), HostLoaders(count=8)
    made = OSDREPostprocessor(
        mode="features", reference=loaders.reference, broaden=0, head={"training": {"steps": 3}}
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


@pytest.mark.parametrize("mode", ["network", "checkpoint"])
def test_openood_refuses_images_unlike_those_of_training(mode: str, run: Path) -> None:
    options = {} if mode == "network" else {"checkpoint": str(run)}
    postprocessor = OSDREPostprocessor(mode=mode, **options)
    net = OSDRENet.load(run) if mode == "network" else HostNet()
    for x in (noise(2, 0, 64), noise(2, 0, 16), noise(2, 0, 32)[:, :1], noise(1, 0, 32)[0]):
        with refused(
            r"images: got .*, expected finite floats of shape \(B, 3, 32, 32\), not empty"
        ):
            postprocessor.postprocess(net, x)
    with refused("images: got uint8 .*, expected finite floats"):
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
