r"""The page docs/bring_your_own.md: its blocks run at a small size, its answers are held by tests."""

import csv
import re
import runpy
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from image_roots import make_root
from PIL import Image

import ood_osdre
from ood_osdre.cli import main
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import FAILED
from ood_osdre.evaluation.evaluate import evaluate_benchmark
from ood_osdre.evaluation.metrics import OODMetrics
from ood_osdre.evaluation.tables import MetricsTable
from ood_osdre.models import Prediction, RatioModel

PAGE = Path(__file__).parent.parent / "docs" / "bring_your_own.md"
HOSTS = ("openood", "pytorch_ood", "faiss", "cv2", "torchdiffeq", "onnx", "gdown")
# What makes the page's job small: fewer steps, smaller images, no download.
SMALLER = {
    "pretrained=True": "pretrained=False",
    "size=224": "size=40",
    "training__steps=2000": "training__steps=2",
    "training__batch_size=32": "training__batch_size=4, progress=False, device='cpu'",
    "training__steps=200)": "training__steps=2, training__batch_size=4, progress=False)",
    "training__steps=500)": "training__steps=50, training__batch_size=16, progress=False)",
}

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="needs a clone")


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def write_folder(folder: Path, count: int, seed: int, groups: int = 1) -> None:
    rng = np.random.default_rng(seed)
    for i in range(count):
        # Files come in all sizes.
        size = (int(rng.integers(30, 70)), int(rng.integers(30, 70)), 3)
        path = folder / (f"class{i % groups}" if groups > 1 else "") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(path)


def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "flowers" / "train", 12, 0, groups=3)
    write_folder(tmp_path / "flowers" / "calibration", 19, 1, groups=3)
    write_folder(tmp_path / "photographs", 12, 2)
    write_folder(tmp_path / "inbox", 3, 3)
    code = blocks()
    if find_spec("pytorch_ood") is None:  # an extra
        code = [block for block in code if "pytorch_ood" not in block]
    for long, short in SMALLER.items():
        assert any(long in block for block in code), long
        code = [block.replace(long, short) for block in code]

    space: dict[str, Any] = {}
    seen = []
    for i, block in enumerate(code):
        script = tmp_path / f"block{i}.py"
        script.write_text(block, encoding="utf-8")
        space = runpy.run_path(str(script), space)
        seen.append(space)

    assert seen[0]["scores"].shape == (3,)
    assert seen[0]["detector"].scorer.metadata["classes"] == 3
    assert set(seen[1]["decisions"].tolist()) <= {1, -1}
    assert ((seen[1]["decisions"] == -1) == (seen[1]["p"] <= 0.05)).all()
    first, same = seen[2]["detector"], seen[2]["same"]
    assert (first.score("inbox") == same.score("inbox")).all()
    assert (first.pvalue("inbox") == same.pvalue("inbox")).all()
    printed = capsys.readouterr().out
    assert "mirrored" in printed
    assert "FPR@95: fraction of ID flagged when 95 % of OOD is caught" in printed
    x = torch.zeros(3, 8)
    assert space["log_ratios"].shape == (5,)
    if "outlier_scores" in space:
        assert torch.equal(
            space["outlier_scores"], -torch.as_tensor(space["detector"].score(x.numpy()))
        )


# A vision transformer has its size built in.
@pytest.mark.parametrize(
    ("name", "options"), [("test_resnet", {}), ("test_vit2", {"img_size": 96})]
)
def test_a_timm_model_at_another_size(name: str, options: dict, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    backbone = timm.create_model(name, num_classes=0, **options)
    quick = {"progress": False, "training__steps": 2, "training__batch_size": 2}
    detector = OneStepDetector("digits", backbone=backbone, size=96, device="cpu", **quick)
    rng = np.random.default_rng(0)
    id_images, reference = (
        rng.integers(low, low + 100, (6, 96, 96, 3), dtype=np.uint8) for low in (0, 100)
    )
    scores = detector.fit(id_images, reference).score(id_images)
    assert np.isfinite(scores).all()

    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, backbone=backbone)
    assert (loaded.score(id_images) == scores).all()


def questions() -> list[list[str]]:
    r"""Returns the tests that each row of the page's table names."""
    rows = [x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith("|")]
    return [re.findall(r"`(test_\w+)`", row) for row in rows if "(#" in row or "| My table" in row]


def test_every_test_that_the_page_names_exists() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in PAGE.parents[1].glob("tests/test_*.py"))
    rows = questions()
    assert len(rows) == 14
    for names in rows:
        assert names
        for name in names:
            assert f"def {name}(" in text, name


def test_the_id_accuracy_stands_in_a_table_once(tmp_path: Path) -> None:
    metrics = OODMetrics(0.9, 0.2, 0.8, 0.7, 0.3)
    sets = {"near": {"a": metrics, "b": metrics}, "far": {"c": metrics, "d": metrics}}
    table = MetricsTable.of(sets, title="toy", accuracy=0.8125)

    for text in (table.to_terminal(), table.to_markdown()):
        assert text.count("81.25") == 1
    table.to_csv(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", newline="") as file:
        told = {row["set"]: row["ID_ACC"] for row in csv.DictReader(file)}
    assert [name for name, value in told.items() if value] == ["id"]


def test_nothing_is_downloaded_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    data = tmp_path / "data"
    for id_name in ("cifar10", "cifar100"):
        command = ["--id", id_name, "--data-root", str(data), "--out", str(tmp_path / "out")]
        assert main([*command, "--quiet", "--device", "cpu"]) == FAILED
        assert f"{data}/benchmark_imglist/{id_name}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_no_host_is_imported_uncalled() -> None:
    code = f"""
import sys
import ood_osdre
[getattr(ood_osdre, name) for name in ood_osdre.__all__]
print(sorted(set({HOSTS!r}) & {{name.split(".")[0] for name in sys.modules}}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(ood_osdre.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class FirstInput(RatioModel):
    r"""Scores an image by the first of its network inputs."""

    def outputs(self, x: torch.Tensor) -> Prediction:
        return Prediction(x[:, 0, 0, 0])

    def log_ratio_at(self, outputs: Prediction) -> torch.Tensor:
        return outputs.score


def test_ood_images_are_normalised_with_id_statistics(tmp_path: Path) -> None:
    make_root(tmp_path)
    manifest = load_manifest(tmp_path / "toy.yml", "toy")
    data = load_benchmark(manifest, tmp_path)
    preprocess = Preprocess(manifest.mean, manifest.std)
    scores = evaluate_benchmark(FirstInput(), data, preprocess, progress=False).scores

    for role, sets in (("near", data.near), ("far", data.far)):
        for name, images in sets.items():
            pixel = images.images[:, 0, 0, 0] / 255
            expected = (pixel - manifest.mean[0]) / manifest.std[0]
            np.testing.assert_allclose(scores.of(role)[name].score, expected, atol=1e-6)
