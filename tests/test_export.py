r"""Tests of exported scorers: they agree with the original, whatever the batch."""

import resource
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ood_osdre import export
from ood_osdre.commands.export import main
from ood_osdre.config import Config
from ood_osdre.data.transforms import Preprocess, Standardise
from ood_osdre.detectors.scorer import Scorer, TrainedModel
from ood_osdre.errors import UserError
from ood_osdre.evaluation.evaluate import score_images
from ood_osdre.export import export_scorer
from ood_osdre.training.build import build_ratio

NETWORK = {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2}
SIZE = 16
IMAGES = np.random.default_rng(1).integers(0, 256, (5, SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def make(class_weight: float = 0.5, **options: object) -> Scorer:
    objective = {"class_weight": class_weight, **options.pop("objective", {})}  # type: ignore
    config = Config.from_mapping({"network": NETWORK, **options, "objective": objective})
    ratio = build_ratio(config, 10).eval()
    for p in ratio.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    metadata = {"config": config.to_dict(), "size": SIZE}
    return Scorer.of(TrainedModel(ratio, Preprocess((0.4, 0.5, 0.6), (0.2, 0.25, 0.3)), metadata))


@pytest.mark.parametrize("classes", [False, True])
def test_a_program_gives_the_scores_of_the_scorer(tmp_path: Path, classes: bool) -> None:
    scorer, path = make(0.5 * classes), tmp_path / "scorer.pt2"
    assert export_scorer(scorer, path) <= export.TOLERANCE
    expected, program = scorer.score(IMAGES), torch.export.load(path).module()
    for batch in (1, 5):
        outputs = program(torch.as_tensor(IMAGES[:batch]))
        assert len(outputs) == 1 + classes
        np.testing.assert_allclose(
            outputs[0].detach().numpy(), expected[:batch], atol=1e-4 * expected.std() + 1e-6
        )


SPEED = {"network": {"kind": "speed", "width": 0.25}}


@pytest.mark.parametrize(
    "options", [{}, SPEED, pytest.param({"estimator": "direct"}, marks=pytest.mark.slow)]
)
def test_an_onnx_file_gives_the_scores_of_the_scorer(
    tmp_path: Path, options: dict[str, object]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    scorer, path = make(**options), tmp_path / "scorer.onnx"
    assert export_scorer(scorer, path) <= export.TOLERANCE
    assert [p.name for p in tmp_path.iterdir()] == ["scorer.onnx"]
    session = onnxruntime.InferenceSession(path)
    expected = scorer.score(IMAGES)
    assert "resized to 16 pixels" in session.get_modelmeta().custom_metadata_map["images"]
    for batch in (1, 5):
        scores, logits = session.run(["log_ratio", "logits"], {"images": IMAGES[:batch]})
        np.testing.assert_allclose(scores, expected[:batch], atol=1e-4 * expected.std() + 1e-6)
        assert logits.shape == (batch, 10)


@pytest.mark.parametrize("wrong", ["mean", "std", "logits"])
def test_a_file_that_disagrees_is_found_and_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    class Wrong(export.DeployedScorer):
        def __init__(self, scorer: Scorer, extras: Sequence[str]) -> None:
            super().__init__(scorer, extras)
            if wrong != "logits":
                setattr(self, wrong, 1.01 * getattr(self, wrong))

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            log_ratio, logits = super().forward(images)
            return log_ratio, (-logits if wrong == "logits" else logits)

    monkeypatch.setattr(export, "DeployedScorer", Wrong)
    with pytest.raises(UserError, match=r"original \w+ differ by .* nothing was written"):
        export_scorer(make(), tmp_path / "scorer.pt2")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    # Without the line, torch's own writer ends the process, and this test with it.
    scorer, limit = make(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        with pytest.raises(UserError, match=r"pt2: cannot be written: File too large$"):
            export_scorer(scorer, tmp_path / "scorer.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_refusals_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"pth: got the suffix '\.pth', expected \.onnx or \.pt2"):
        export_scorer(make(), tmp_path / "scorer.pth")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"extra 'export': pip install onnx onnxscript onnxruntime\.$"
    ):
        export_scorer(make(), tmp_path / "scorer.onnx")
    classifier = make(estimator="classifier", objective={"endpoint": 0})
    with pytest.raises(UserError, match="got a Classifier, only one-step and direct"):
        export_scorer(classifier, tmp_path / "scorer.pt2")
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "scorer.pt2")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.delitem(sys.modules, "ood_osdre.export")
    with pytest.raises(SystemExit, match="2"):  # of a module that has no command
        runpy.run_module("ood_osdre.export", run_name="__main__")
    assert capsys.readouterr().err.startswith("usage: ood-osdre export RUN FILE")


def make_vectors() -> Scorer:
    config = Config.from_mapping({"network": {"kind": "mlp", "width": 0.125, "depths": [1]}})
    ratio = build_ratio(config, 0, dim=3).eval()
    for p in ratio.parameters():
        nn.init.normal_(p, std=0.3)
    # The first coordinate is a time in seconds, of which single precision keeps no second.
    standardise = Standardise((1.7e9, 0.0, 1.0), (10.0, 1.0, 2.0))
    return Scorer.of(
        TrainedModel(ratio, standardise, {"config": config.to_dict(), "dim": 3, "size": 32})
    )


def test_vectors_are_exported_with_their_digits(tmp_path: Path) -> None:
    scorer = make_vectors()
    x = np.random.default_rng(0).normal(size=(6, 3)) * (10, 1, 2) + (1.7e9, 0, 1)
    assert export_scorer(scorer, tmp_path / "s.pt2", x) <= export.TOLERANCE
    (found,) = torch.export.load(tmp_path / "s.pt2").module()(torch.as_tensor(x))
    expected, _ = score_images(scorer.ratio, x, scorer.preprocess)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert expected.std() > 0.1
    with pytest.raises(
        UserError, match=r"inputs: got shape \(6, 2\), expected two or more of shape"
    ):
        export_scorer(scorer, tmp_path / "t.pt2", x[:, :2])


def test_a_file_may_be_named_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    export_scorer(make_vectors(), "~/s.pt2")
    assert (tmp_path / "s.pt2").is_file()


def test_the_difference_is_a_share_of_the_spread_that_may_be_none() -> None:
    one = torch.ones(4)
    assert export._difference(one, one) == 0
    # Rounding of scores that are all alike is no disagreement, other scores are.
    assert (
        export._difference(one + 1e-7, one) < export.TOLERANCE < export._difference(1.1 * one, one)
    )
    spread = torch.arange(4.0)
    assert export._difference(spread + 0.5, spread) == pytest.approx(0.5 / float(spread.std()))


def test_synthetic_images_have_the_statistics_and_several_scales() -> None:
    images = export._synthetic(make()).double() / 255
    assert images.shape == (export.SAMPLES, SIZE, SIZE, 3)
    np.testing.assert_allclose(images.mean((0, 1, 2)), (0.4, 0.5, 0.6), atol=0.1)
    flat = images.std((1, 2)).amax(1)
    assert flat.min() == 0
    assert flat.max() > 0.15


def test_a_tolerance_is_an_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="spread over 5 given inputs, expected at most 1e-30"):
        export_scorer(make(), tmp_path / "s.pt2", IMAGES, tolerance=1e-30)


def test_a_network_that_rounds_itself_is_told_from_a_wrong_file(tmp_path: Path) -> None:
    class Rounding(nn.Module):
        r"""Loses digits, as differences of large numbers do: the order of a sum decides."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            many = x.flatten(1) + 1e5
            return many.sum(1, keepdim=True) - 1e5 * many.shape[1]

    scorer = make()
    scorer.ratio.backbone, scorer.ratio.class_head = Rounding(), None
    scorer.ratio.head = nn.Linear(1, 1)
    x = torch.as_tensor(IMAGES)
    (rounding,) = export._rounding(scorer, x, export._outputs(scorer, x))
    assert rounding > 1e-3
    scorer = make(0.0)
    (rounding,) = export._rounding(scorer, x, export._outputs(scorer, x))
    assert rounding < export.TOLERANCE / export.ROUNDINGS
