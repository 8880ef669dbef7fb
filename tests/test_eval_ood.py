r"""Tests for the main command, as a user gives it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ood_osdre.commands.eval_ood import FAILED, UNFINISHED, main

FAST = [
    "--quiet", "--device", "cpu", "network.width=0.125", "network.depths=[1, 1, 1, 1]",
    "network.stem_stride=2", "training.batch_size=8", "data.val_limit=20",
]  # fmt: skip


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def test_train_then_evaluate_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["--id", "digits", "--out", str(first), "--max-steps", "3", *FAST]) == 0
    printed = capsys.readouterr().out
    assert "nearood" in printed
    assert "FPR@95: fraction of ID flagged" in printed

    assert main(["--checkpoint", str(first), "--out", str(second), "--quiet"]) == 0
    tables = [(folder / "metrics.csv").read_text().splitlines() for folder in (first, second)]
    # All but the scoring seconds, in the row of the ID set.
    assert tables[0][0] == tables[1][0]
    assert tables[0][2:] == tables[1][2:]


def test_seeds_are_aggregated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--seeds", "2", "--max-steps", "2", *FAST]) == 0
    assert "±" in capsys.readouterr().out
    seeds = [json.loads((tmp_path / f"seed-{s}/run.json").read_text())["seed"] for s in (0, 1)]
    assert seeds == [0, 1]
    assert "±" in (tmp_path / "metrics.md").read_text()


def test_a_time_budget_ends_with_its_own_status_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--max-steps", "3", *FAST]
    assert main([*command, "--time-budget", "0"]) == UNFINISHED
    assert "step 1 of 3" in capsys.readouterr().err
    assert not (tmp_path / "metrics.csv").exists()

    assert main(command) == FAILED
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "metrics.csv").exists()


ERRORS = [
    (["training.step=5"], "did you mean 'training.steps'?"),
    (["training.steps=many"], "training.steps"),
    (["--config", "cifar11"], "cifar1"),
    (["--device", "cuda:77"], "--device cuda:77: not available"),
    (["--device", "gpu"], "--device gpu: not available"),
    (["--checkpoint", "nowhere"], "no checkpoint here"),
    (["--id", "cifar10", "--data-root", "nowhere"], "--id digits needs none"),
    (["--benchmark", "openod"], "openood"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=lambda x: str(x)[:30])
def test_mistakes_end_in_one_message_and_leave_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--quiet"]) == FAILED
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("metrics*"))


def test_an_output_folder_that_is_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert main(["--out", str(tmp_path / "out"), "--max-steps", "1", *FAST]) == FAILED
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ood_osdre.commands.eval_ood import claimed

    with claimed(tmp_path):
        assert main(["--out", str(tmp_path), "--max-steps", "1", *FAST]) == FAILED
    assert "another run is writing here" in capsys.readouterr().err


def test_help_and_key_errors_do_not_import_torch() -> None:
    code = (
        "import sys; from ood_osdre.commands.eval_ood import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["training.step=5"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
