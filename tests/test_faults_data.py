r"""Data that is small or not as it should be, through the command: one line, nothing half-written."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from image_roots import as_cifar, edit, make_root, write_image

from ood_osdre.cli import main
from ood_osdre.errors import FAILED

LISTS, IMAGES = Path("benchmark_imglist/toy"), Path("images_classic")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.set_default_dtype(torch.float32)
    make_root(tmp_path / "data")
    return tmp_path / "data"


def run(root: Path, out: Path) -> int:
    options = ["network.width=0.125", "network.depths=[1,1,1,1]", "training.batch_size=4"]
    options += ["data.crop=2", "evaluation.batch_size=3", "training.warmup=1"]
    command = ["--id", "cifar10", "--config", "cifar10_cpu", "--benchmark", str(root / "toy.yml")]
    command += ["--data-root", str(root), "--out", str(out), "--max-steps", "2"]
    return main([*command, "--device", "cpu", "--quiet", *options])


def keep_one(root: Path, *names: str) -> None:
    for name in names:
        path = root / LISTS / name
        path.write_text(path.read_text().splitlines(keepends=True)[0])
        edit(root, name, count=1)


def test_sets_of_one_image_train_and_score_quietly_but_at_one_size(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_one(root, "train_toy.txt", "val_toy.txt", "test_toy.txt", "test_near.txt")
    as_cifar(root)
    trained, out = tmp_path / "trained", tmp_path / "out"
    assert run(root, trained) == 0
    assert (trained / "metrics.csv").is_file()
    printed = capsys.readouterr().err
    assert "decoding" not in printed
    assert "%|" not in printed

    manifest = root / "toy.yml"
    manifest.write_text("size: 48\n" + manifest.read_text())
    command = ["--checkpoint", str(trained), "--benchmark", str(manifest), "--out", str(out)]
    assert main([*command, "--data-root", str(root), "--device", "cpu", "--quiet"]) == FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"error: benchmark toy: got .*48, 48.*expected .*32, 32", error)
    assert not out.exists()


def test_a_reference_of_one_image_cannot_be_split(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_one(root, "train_others.txt")
    as_cifar(root)
    assert run(root, tmp_path / "out") == FAILED
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "1 images with 0 classes held out cannot be split" in error
    assert not list((tmp_path / "out").glob("*.csv"))


def test_missing_files_through_the_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"nothing/{i}.png 0\n" for i in range(40))
    (root / LISTS / "train_toy.txt").write_text(lines)
    write_image(root / IMAGES / "nothing" / "0.png", 0)
    as_cifar(root)
    assert run(root, tmp_path / "out") == FAILED
    error = capsys.readouterr().err
    assert "39 files: nothing/1.png" in error
    assert "nothing/10.png ... and 29 more" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def train_head(root: Path, out: Path, classifier: Path, *options: str) -> int:
    command = ["--config", "cifar10_representation", "--benchmark", str(root / "toy.yml")]
    command += ["--id", "cifar10", "--data-root", str(root), "--out", str(out), "--device", "cpu"]
    quick = ["head.rank=4", "head.training.steps=3", "head.training.warmup=1"]
    return main([*command, "--classifier", str(classifier), "--quiet", *options, *quick])


def test_a_classifier_that_is_not_there_is_told_before_images_are_read(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / LISTS / "train_toy.txt").write_text("nothing/0.png 0\n")
    as_cifar(root)
    assert train_head(root, tmp_path / "out", root / "nowhere") == FAILED
    error = capsys.readouterr().err
    assert re.search(r"^error: .*nowhere", error, re.MULTILINE)
    assert "nothing/0.png" not in error


def test_a_finished_head_is_told_again_without_its_classifier(root: Path, tmp_path: Path) -> None:
    as_cifar(root)
    trained, out = tmp_path / "trained", tmp_path / "out"
    assert run(root, trained) == 0
    assert train_head(root, out, trained) == 0
    shutil.rmtree(trained)
    assert train_head(root, out, trained, "--resume") == 0
