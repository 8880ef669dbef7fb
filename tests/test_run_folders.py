r"""Run folders: nothing is written over, and a finished run is believed only on its own data."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from image_roots import as_cifar, make_root, write_image

from ood_osdre.cli import UNFINISHED, main
from ood_osdre.errors import FAILED
from ood_osdre.evaluation.records import read_record
from ood_osdre.options import differences
from ood_osdre.training import checkpoint as checkpoints

FAST = ["--quiet", "--device", "cpu", "network.width=0.125", "network.depths=[1, 1, 1, 1]"]
FAST += ["training.batch_size=4", "data.val_limit=10", "training.warmup=1", "data.crop=2"]


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    r"""Returns a data root and the folder of a run on it."""
    torch.set_default_dtype(torch.float32)
    root = tmp_path_factory.mktemp("root")
    make_root(root)
    as_cifar(root)
    out = root / "run"
    assert main(command(root, out)) == 0
    return root, out


@pytest.fixture
def copied(finished: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    r"""Returns copies of both, to be changed."""
    root = tmp_path / "root"
    # With their times of change, which are a part of what identifies files.
    shutil.copytree(finished[0], root)
    return root, root / "run"


def command(root: Path, out: Path, *more: str) -> list[str]:
    names = ["--id", "cifar10", "--config", "cifar10_cpu", "--benchmark", str(root / "toy.yml")]
    return [*names, "--data-root", str(root), "--out", str(out), "--max-steps", "2", *FAST, *more]


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(arguments) == FAILED
    captured = capsys.readouterr()
    assert not captured.out
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    return line


def content(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def another_image(root: Path) -> None:
    for path in sorted((root / "images_classic" / "near").rglob("*.png")):
        write_image(path, seed=path.stat().st_size + 1)


def set_gone(root: Path) -> None:
    shutil.rmtree(root / "images_classic" / "far away")


@pytest.mark.parametrize(
    ("change", "named"), [(another_image, "pixels.near/near"), (set_gone, "absent")]
)
def test_a_finished_run_is_not_told_again_on_other_data(
    copied: tuple[Path, Path],
    change: Callable[[Path], None],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, out = copied
    assert main(command(root, out, "--resume")) == 0
    change(root)
    before = content(out)
    error = refusal(command(root, out, "--resume"), capsys)
    assert "a finished run that differs in" in error
    assert named in error
    assert content(out) == before


def test_an_unfinished_run_does_not_go_on_with_other_pixels(
    copied: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = copied[0], tmp_path / "cut"
    assert main(command(root, out, "--time-budget", "0")) == UNFINISHED
    for path in sorted((root / "images_classic" / "toy").rglob("*.png")):
        write_image(path, seed=path.stat().st_size + 1)
    assert "or other data" in refusal(command(root, out, "--resume"), capsys)


def test_a_reference_is_a_path_as_it_stands(
    copied: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = copied[0], tmp_path / "out"
    for i in range(20):
        write_image(tmp_path / "ref #2" / f"{i}.png", seed=i)
    assert main(command(root, out, "--reference", str(tmp_path / "ref #2"))) == 0
    assert read_record(out / "run.json").config["reference"].endswith("ref #2")
    error = refusal(command(root, tmp_path / "x", "--reference", ""), capsys)
    assert "reference: got ''" in error


def test_an_evaluation_is_replaced_by_its_own_checkpoint_only(
    copied: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = copied
    other, told = tmp_path / "other", tmp_path / "told"
    shutil.copytree(out, other)

    def evaluate(checkpoint: Path) -> list[str]:
        where = ["--benchmark", str(root / "toy.yml"), "--data-root", str(root)]
        return ["--checkpoint", str(checkpoint), *where, "--out", str(told), "--quiet"]

    assert main([*evaluate(out), "--device", "cpu"]) == 0
    assert main([*evaluate(out), "--device", "cpu"]) == 0
    before = content(told)
    assert "holds other results than of the checkpoint" in refusal(evaluate(other), capsys)
    assert "holds an evaluation, no training" in refusal(command(root, told, "--resume"), capsys)
    assert "holds a run already" in refusal(command(root, told), capsys)
    assert content(told) == before


def test_one_seed_and_several_do_not_share_a_folder(
    copied: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = copied
    before = content(out)
    assert "holds one seed's run" in refusal(command(root, out, "--seeds", "2"), capsys)
    assert content(out) == before
    several = tmp_path / "several"
    shutil.copytree(out, several / "seed-0")
    assert "holds several seeds' run" in refusal(command(root, several), capsys)


def test_a_damaged_log_and_state_do_not_end_in_a_traceback(
    copied: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = copied[0], tmp_path / "cut"
    assert main(command(root, out, "--time-budget", "0")) == UNFINISHED
    (out / "log.jsonl").write_bytes(b'{}\njunk}\n\xff\xfe\n{"step": 1, "loss_total": 1.0}\n')
    tensors, metadata, _ = checkpoints.read_checkpoint(out, checkpoints.STATE)
    checkpoints.write_checkpoint(
        out, checkpoints.STATE, tensors, {k: v for k, v in metadata.items() if k != "step"}
    )
    assert "state.safetensors: step is missing" in refusal(command(root, out, "--resume"), capsys)

    checkpoints.write_checkpoint(out, checkpoints.STATE, tensors, metadata)
    assert main(command(root, out, "--resume")) == 0
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_a_time_budget_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--time-budget", "nan"])
    assert "got nan, expected a finite number at least 0" in capsys.readouterr().err


def test_differences_name_keys_and_values() -> None:
    then = {"a": {"x": 1, "old": 2}, "b": None}
    assert differences(then, then) is None
    assert differences(then, {"a": {"x": 3, "new": 2}, "b": None}) == (
        "3 keys: a.new=None (not 2), a.old=2 (not None), a.x=1 (not 3)"
    )
    assert differences(then, {"a": {"x": 1}}, shared=True) is None
    assert differences(then, {"a": {"x": 3}}, shared=True) == "1 key: a.x=1 (not 3)"
    # A key that is missing is not one that is None.
    assert differences({"a": {"x": None}}, {"a": {}}) == "1 key: a.x=None (not None)"
