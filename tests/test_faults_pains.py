r"""What users of other benchmarks ran into, and the page that answers it."""

import csv
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from image_roots import make_root

import ood_osdre
from ood_osdre.cli import FAILED, main
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.data.standardise import Preprocess
from ood_osdre.evaluation.evaluate import evaluate_benchmark
from ood_osdre.evaluation.metrics import OODMetrics
from ood_osdre.evaluation.tables import MetricsTable
from ood_osdre.models.networks import Coefficients
from ood_osdre.models.ratio import RatioModel

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "bring_your_own.md"
HOSTS = ("openood", "pytorch_ood", "faiss", "cv2", "torchdiffeq", "onnx", "gdown")


def questions() -> list[list[str]]:
    r"""Returns the tests that each row of the page's table names."""
    rows = [x for x in PAGE.read_text(encoding="utf-8").splitlines() if x.startswith("|")]
    return [re.findall(r"`(test_\w+)`", row) for row in rows if "(#" in row or "| My table" in row]


@pytest.mark.skipif(not PAGE.is_file(), reason="needs a clone")
def test_every_test_that_the_page_names_exists() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in TESTS.glob("test_*.py"))
    rows = questions()
    assert len(rows) == 14
    for names in rows:
        assert names
        for name in names:
            assert f"\ndef {name}(" in text, name


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
import ood_osdre, ood_osdre.detectors.one_step, ood_osdre.evaluation.scorer, ood_osdre.detectors.feature_ratio
[getattr(ood_osdre, name) for name in ood_osdre.__all__]
print(sorted(set({HOSTS!r}) & {{name.split(".")[0] for name in sys.modules}}))
"""
    root = Path(ood_osdre.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class FirstInput(RatioModel):
    r"""Scores an image by the first of its network inputs."""

    def coefficients(self, x: torch.Tensor) -> Coefficients:
        return Coefficients(x[:, 0, 0, :1])

    def log_ratio_of(self, h: torch.Tensor) -> torch.Tensor:
        return h[..., 0]


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
