r"""Tests for the main command, as a user gives it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_osdre.cli import BENCHMARKS, FAILED, UNFINISHED, default_config, main
from ood_osdre.config import load_config
from ood_osdre.evaluation.scores import read_scores

FAST = ["--quiet", "--device", "cpu", "network.width=0.125", "network.depths=[1, 1, 1, 1]"]
FAST += ["network.stem_stride=2", "training.batch_size=8", "data.val_limit=20"]


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

    command = ["--checkpoint", str(first), "--out", str(second), "--quiet"]
    assert main([*command, "evaluation.batch_size=512"]) == 0
    tables = [(folder / "metrics.csv").read_text().splitlines() for folder in (first, second)]
    # All but the scoring seconds, in the row of the ID set.
    assert tables[0][0] == tables[1][0]
    assert tables[0][2:] == tables[1][2:]

    # A training run is never overwritten by an evaluation.
    record = (first / "run.json").read_text()
    assert main(["--checkpoint", str(first), "--out", str(first), "--quiet"]) == FAILED
    assert (first / "run.json").read_text() == record


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


@pytest.mark.parametrize("id_name", BENCHMARKS)
@pytest.mark.parametrize("gpu", [False, True])
def test_default_configurations_exist_and_are_smaller_without_a_gpu(
    id_name: str, gpu: bool
) -> None:
    config = load_config(default_config(id_name, gpu))

    assert config.id == id_name
    assert config.benchmark == BENCHMARKS[id_name]
    assert config.network.width == (1.0 if gpu and id_name != "digits" else 0.25)


def test_finished_seeds_are_not_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--out", str(tmp_path), "--max-steps", "2", *FAST]
    assert main(command) == 0
    table = (tmp_path / "metrics.md").read_text()

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test set was read twice")

    monkeypatch.setattr("ood_osdre.evaluation.scorer.evaluate_benchmark", never)
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "metrics.md").read_text() == table
    assert main([*command, "--resume", "training.lr=1e-4"]) == FAILED


def test_a_configuration_keeps_its_own_id_and_benchmark() -> None:
    from ood_osdre.cli import parser, read_config

    args = parser().parse_intermixed_args([])
    config = read_config(args, "cifar10_paper")
    assert (config.id, config.benchmark) == ("cifar10", "paper")
    args = parser().parse_intermixed_args(["--id", "cifar100", "--benchmark", "openood"])
    config = read_config(args, "cifar10_paper")
    assert (config.id, config.benchmark) == ("cifar100", "openood")


ERRORS = [
    (["--checkpoint", "x", "--seeds", "2"], "--seeds: is for training"),
    (["--checkpoint", "x", "training.lr=1"], "only evaluation.* applies"),
    (["--device", "meta"], "--device meta: not available"),
    (["network.width=0.3"], "network.width"),
    (["network.depths=[1, 1, 1]"], "network.depths"),
    (["path.schedule=vp", "path.t_min=0"], "path.t_min"),
    (["data.crop=40"], "data.crop"),
    (["network.kind=mlp"], "network.kind"),
    (["evaluation.use_ood_val=true"], "evaluation.use_ood_val"),
    (["title=2026-99-99"], "title"),
    (["training.step=5"], "did you mean 'training.steps'?"),
    (["training.steps=many"], "training.steps"),
    (["network.kind=mlp"], "network.kind: got mlp"),
    (["network.width=0.1"], "network.width: got 0.1"),
    (["path.schedule=vp", "path.t_min=0"], "path.t_min: got 0"),
    (["--config", "cifar11"], "cifar1"),
    (["--device", "cuda:77"], "--device cuda:77: not available"),
    (["--device", "gpu"], "--device gpu: not available"),
    (["--checkpoint", "nowhere"], "no such folder"),
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
    from ood_osdre.training.run import locked

    with locked(tmp_path):
        assert main(["--out", str(tmp_path), "--max-steps", "1", *FAST]) == FAILED
    assert "another run is writing here" in capsys.readouterr().err


def test_help_and_key_errors_do_not_import_torch() -> None:
    code = (
        "import sys; from ood_osdre.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (["--help"], ["training.step=5"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr


RIVALS = {
    "direct": ["objective.endpoint_loss=kliep", "objective.separate_forwards=true"],
    "time_conditioned": [
        "network.norm=group", "objective.endpoint=0", "objective.class_weight=0",
        "objective.time_score=1", "evaluation.evaluations=2",
    ],
    "classifier": ["objective.endpoint=0", "objective.outlier_exposure=0.5"],
}  # fmt: skip
AGAIN = {
    "direct": ["evaluation.batch_size=100"],
    "time_conditioned": ["evaluation.evaluations=3"],
    "classifier": ["evaluation.score=knn", "evaluation.neighbours=3"],
}


KNN = ["estimator=classifier", "objective.endpoint=0", "objective.class_weight=1"]
KNN += ["data.broaden=0", "evaluation.score=knn"]
IDLE = {
    "one_step": ["solver=ode", "tolerance=1e-3", "evaluations=5", "score=knn", "neighbours=3"],
    "time_conditioned": ["score=energy"],
    "classifier": ["solver=ode"],
}


def test_nearest_neighbours_are_validated_as_they_are_scored(tmp_path: Path) -> None:
    command = ["--id", "digits", "--out", str(tmp_path), "--max-steps", "2", *FAST, *KNN]
    assert main([*command, "evaluation.neighbours=3"]) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert {"val_near", "val_far", "val_auroc"} <= set(record["validation"]["best"])


def test_more_neighbours_than_images_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--id", "digits", "--out", str(tmp_path), *FAST, *KNN]
    assert main([*command, "evaluation.neighbours=100000"]) == FAILED
    (error,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error: "))
    assert "evaluation.neighbours: got 100000, expected at most" in error
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize("estimator", ["one_step", *RIVALS])
def test_options_that_do_nothing_with_a_checkpoint_are_refused(
    tmp_path: Path, estimator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["--id", "digits", "--out", str(first), "--max-steps", "1", *FAST]
    assert main([*command, f"estimator={estimator}", *RIVALS.get(estimator, [])]) == 0
    idle = [(o, "is for estimator") for o in IDLE.get(estimator, IDLE["one_step"])]
    idle += [(o, "is for training") for o in ("select=val_near", "use_ood_val=false")]
    command = ["--checkpoint", str(first), "--out", str(second), "--quiet", "--device", "cpu"]
    capsys.readouterr()
    for option, reason in idle:
        assert main([*command, f"evaluation.{option}"]) == FAILED
        error = capsys.readouterr().err
        assert f"evaluation.{option.partition('=')[0]}: {reason}" in error
        assert error.count("\n") == 1
    assert not second.exists()

    if estimator == "classifier":
        many = ["evaluation.score=knn", "evaluation.neighbours=100000"]
        assert main([*command, *many]) == FAILED
        assert "expected at most" in capsys.readouterr().err
        assert not (second / "run.json").exists()


@pytest.mark.parametrize("estimator", RIVALS)
def test_a_rival_is_trained_scored_and_scored_anew(tmp_path: Path, estimator: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    command = ["--id", "digits", "--out", str(first), "--max-steps", "2", *FAST]
    assert main([*command, f"estimator={estimator}", *RIVALS[estimator]]) == 0
    command = ["--checkpoint", str(first), "--out", str(second), "--quiet", "--device", "cpu"]
    assert main([*command, *AGAIN[estimator]]) == 0

    records = [json.loads((run / "run.json").read_text()) for run in (first, second)]
    assert [r["config"]["estimator"] for r in records] == [estimator] * 2
    scores = [read_scores(run / "scores.npz").of("id") for run in (first, second)]
    same = all(
        np.allclose(a.score, b.score) for a, b in zip(*map(dict.values, scores), strict=True)
    )
    assert same == (estimator == "direct")
