r"""What may befall a run: death, signals, full disks, other runs, absent devices, odd batches."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ood_osdre
from ood_osdre.cli import UNFINISHED, main
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import FAILED, UserError
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import CoefficientNetwork
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.training.run import locked

ROOT = Path(ood_osdre.__file__).parent.parent
FAST = ["--quiet", "--device", "cpu", "network.width=0.125", "network.depths=[1, 1, 1, 1]"]
FAST += ["network.stem_stride=2", "training.batch_size=8", "data.val_limit=10"]
FAST += ["--max-steps", "2"]
VECTORS = {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}}
TINY = {"device": "cpu", "progress": False, "training__steps": 2, "training__batch_size": 8}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "kills", "longest"),
    [
        ("train", 8, 0.1),
        pytest.param("command", 20, 0.3, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_points_ends_with_the_same_weights(
    tmp_path: Path, kind: str, kills: int, longest: float
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("killing.py")),
            str(tmp_path),
            kind,
            str(kills),
            str(longest),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told["statuses"]) == {0}
    assert len(told["steps"]) == kills
    # Deaths came all along, not only before the first checkpoint.
    assert len(set(told["steps"])) > kills // 3
    assert len(set(told["digests"])) == 1
    if kind == "command":
        assert told["terminated"] == UNFINISHED
        tables = {p.read_text().count("\n") for p in tmp_path.glob("*/metrics.csv")}
        assert len(tables) == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    r"""Lets no file grow beyond a size, which writers see as they see a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert main(["--out", str(folder), *FAST]) == 0
    return folder


def test_a_disk_that_is_really_full_ends_in_one_line(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = snapshot(finished), tmp_path / "out"
    with largest_file(30_000):
        assert main(["--out", str(out), *FAST]) == FAILED
    error = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(error) == 1
    assert "cannot be written: File too large" in error[0]
    assert {p.name for p in out.iterdir()} <= {".lock", "log.jsonl"}
    assert snapshot(finished) == before


def test_a_disk_that_fills_up_after_training_keeps_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    r"""Scores, plot and tables are written whole or not at all, and --resume makes them."""
    from ood_osdre import runs

    write = runs.write_scores

    def full(*args: object) -> None:
        with largest_file(1000):
            write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "write_scores", full)
    assert main(["--out", str(tmp_path), *FAST]) == FAILED
    assert "scores.npz: cannot be written" in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if "tmp" in p.name or p.name.startswith("scores")]
    assert not (tmp_path / "run.json").exists()
    monkeypatch.undo()
    assert main(["--out", str(tmp_path), "--resume", *FAST]) == 0
    assert (tmp_path / "metrics.csv").is_file()


@pytest.fixture(scope="module")
def fitted() -> OneStepDetector:
    x = np.random.default_rng(0).normal(size=(30, 2))
    return OneStepDetector(VECTORS, **TINY).fit(x, x + 1)


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_an_output_folder_that_cannot_be_written(
    tmp_path: Path, name: str, fitted: OneStepDetector, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    out = tmp_path / name
    assert main(["--out", str(out), *FAST]) == FAILED
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("error: ")
    assert f"--out {out}" in errors[-1]
    assert "cannot be written: " in errors[-1]

    x = np.random.default_rng(0).normal(size=(9, 2))
    with pytest.raises(UserError, match="cannot be written"):
        OneStepDetector(VECTORS, **TINY).fit(x, x + 1, folder=out)
    with pytest.raises(UserError, match="cannot be written"):
        fitted.save(out)
    assert (tmp_path / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


FAULTS = {
    "a finished run": [],
    "a mistyped key": ["training.stepz=3"],
    "no data": ["--id", "cifar10", "--data-root", "nowhere"],
    "another configuration": ["--resume", "training.lr=0.5"],
    "a checkpoint onto a run": ["--checkpoint", "nowhere"],
}


@pytest.mark.parametrize("name", FAULTS)
def test_no_fault_touches_the_files_of_a_finished_run(
    finished: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(finished)
    assert main(["--out", str(finished), *FAST, *FAULTS[name]]) == FAILED
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert len([x for x in error.splitlines() if x.startswith("error: ")]) == 1
    assert snapshot(finished) == before


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    with locked(tmp_path):
        with pytest.raises(UserError, match="another run is writing here"):
            OneStepDetector(VECTORS, **TINY).fit(x, x + 1, folder=tmp_path)
        assert main(["--out", str(tmp_path), *FAST]) == FAILED
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]

    OneStepDetector(VECTORS, **TINY).fit(x, x + 1, folder=tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="holds a run already"):
        OneStepDetector(VECTORS, **TINY).fit(x, x + 2, folder=tmp_path)
    # A run on other data is another run, even if it says that it resumes.
    with pytest.raises(UserError, match="another configuration or other data"):
        OneStepDetector(VECTORS, **TINY).fit(x, x + 2, folder=tmp_path, resume=True)
    assert snapshot(tmp_path) == before


def test_what_a_killed_run_left_half_written_is_swept(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 2))
    half = tmp_path / f".{'0123456789abcdef' * 2}.tmp.safetensors"
    half.write_bytes(bytes(100))
    OneStepDetector(VECTORS, **TINY).fit(x, x + 1, folder=tmp_path)
    assert not half.exists()


class Normalised(nn.Module):
    r"""A backbone whose last norm sees one value a channel and image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, stride=4), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize("backbone", [None, Normalised()], ids=["ours", "BatchNorm1d"])
@pytest.mark.parametrize("train_batch", [1, 3])
def test_batches_of_one_with_batch_norm(backbone: nn.Module | None, train_batch: int) -> None:
    r"""In training a pair still has two images; in scoring the statistics are fixed."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (2, 13, 32, 32, 3), dtype=np.uint8)
    options = {**TINY, "training__batch_size": train_batch, "evaluation__batch_size": 4}
    detector = OneStepDetector("digits", backbone=backbone, network__width=0.125, **options)
    scores = detector.fit(x, y).score(x)  # 13 = 3 x 4 + 1

    assert np.isfinite(scores).all()
    one_by_one = np.concatenate([detector.score(image[None]) for image in x])
    np.testing.assert_allclose(scores, one_by_one, atol=1e-5)


def test_a_ratio_beyond_float16_stays_finite() -> None:
    r"""The log-ratio exceeds 65504, the largest float16, and is right to float16's precision."""
    ratio = OneStepRatio(CoefficientNetwork(nn.Identity(), 16, 8), RBFBasis(size=8))
    with torch.no_grad():
        ratio.network.head.weight.fill_(1000.0)
    x = torch.full((2, 16), 30.0)
    expected = ratio.log_ratio(x)
    assert expected.min() > 65504

    with torch.autocast("cpu", torch.float16):
        assert torch.isinf(ratio.network.head(x) * 1000).all()  # it would overflow
    for model in (ratio.fold(), ratio):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model.log_ratio(x), expected, rtol=1e-2, atol=0)


def test_a_score_that_overflows_is_refused_not_returned(fitted: OneStepDetector) -> None:
    far = np.array([[3e38, 3e38], [0.0, 0.0]], dtype=np.float32)
    with pytest.raises(UserError, match="input scores: 1 of 2 are NaN or infinite, first at 0"):
        fitted.score(far)
