r"""Tests for the main command, as a user gives it."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from image_roots import as_cifar, make_root

from ood_osdre.cli import BENCHMARKS, UNFINISHED, default_config, main, parser, read_config
from ood_osdre.detectors import load_scorer
from ood_osdre.errors import FAILED, UserError
from ood_osdre.evaluation.scores import read_scores

FAST = ["--quiet", "--device", "cpu", "network.width=0.125", "network.depths=[1, 1, 1, 1]"]
FAST += ["network.stem_stride=2", "training.batch_size=8", "data.val_limit=20"]
ESTIMATORS = {
    "one_step": ["objective.path_variance=1"],
    "direct": ["objective.endpoint_loss=kliep", "objective.separate_forwards=true"],
    "time_conditioned": [
        "network.norm=group", "objective.endpoint=0", "objective.class_weight=0",
        "objective.time_score=1", "evaluation.evaluations=2",
    ],
    "classifier": ["objective.endpoint=0", "objective.outlier_exposure=0.5"],
}  # fmt: skip
AGAIN = {
    "one_step": ["evaluation.batch_size=512"],
    "direct": ["evaluation.batch_size=100"],
    "time_conditioned": ["evaluation.evaluations=3"],
    "classifier": ["evaluation.score=knn", "evaluation.neighbours=3"],
}
IDLE = {
    "one_step": ["solver=ode", "tolerance=1e-3", "evaluations=5", "score=knn", "neighbours=3"],
    "direct": ["solver=ode", "score=knn"],
    "time_conditioned": ["score=energy"],
    "classifier": ["solver=ode"],
}
KNN = ["estimator=classifier", "objective.endpoint=0", "objective.class_weight=1"]
KNN += ["data.broaden=0", "evaluation.score=knn"]


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    r"""A function from an estimator to a run folder of its, trained once."""

    @cache
    def train(estimator: str) -> Path:
        out = tmp_path_factory.mktemp(estimator) / "run"
        command = ["--id", "digits", "--out", str(out), "--max-steps", "2", *FAST]
        assert main([*command, f"estimator={estimator}", *ESTIMATORS[estimator]]) == 0
        return out

    return train


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_model_is_trained_scored_and_scored_anew(
    tmp_path: Path,
    estimator: str,
    trained: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = trained(estimator), tmp_path / "second"
    record = (first / "run.json").read_text()
    capsys.readouterr()
    command = ["--checkpoint", str(first), "--quiet", "--device", "cpu"]
    assert main([*command, "--out", str(second), *AGAIN[estimator]]) == 0
    printed = capsys.readouterr().out
    assert "nearood" in printed
    assert "FPR@95: fraction of ID flagged" in printed

    records = [json.loads((run / "run.json").read_text()) for run in (first, second)]
    assert [r["config"]["estimator"] for r in records] == [estimator] * 2
    learnt = records[0]["results"].get("path", {})
    assert learnt.keys() == ({"gamma2", "eps"} if estimator == "one_step" else set())
    scores = [read_scores(run / "scores.npz").of("id") for run in (first, second)]
    same = all(
        np.allclose(a.score, b.score) for a, b in zip(*map(dict.values, scores), strict=True)
    )
    assert same == (estimator in ("one_step", "direct"))

    # A training run is never overwritten by an evaluation.
    assert main([*command, "--out", str(first)]) == FAILED
    assert (first / "run.json").read_text() == record


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_options_that_do_nothing_with_a_checkpoint_are_refused(
    tmp_path: Path,
    estimator: str,
    trained: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["--checkpoint", str(trained(estimator)), "--out", str(tmp_path / "out")]
    command += ["--quiet", "--device", "cpu"]
    idle = [(o, "is for estimator") for o in IDLE[estimator]]
    idle += [(o, "is for training") for o in ("select=val_near", "use_ood_val=false")]
    capsys.readouterr()
    for option, reason in idle:
        assert main([*command, f"evaluation.{option}"]) == FAILED
        error = capsys.readouterr().err
        assert f"evaluation.{option.partition('=')[0]}: {reason}" in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

    if estimator == "classifier":
        many = ["evaluation.score=knn", "evaluation.neighbours=100000"]
        assert main([*command, *many]) == FAILED
        assert "expected at most" in capsys.readouterr().err
        assert not (tmp_path / "out" / "run.json").exists()


def test_seeds_are_aggregated_and_not_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--seeds", "2", "--max-steps", "2", *FAST]
    assert main(command) == 0
    assert "±" in capsys.readouterr().out
    seeds = [json.loads((tmp_path / f"seed-{s}/run.json").read_text())["seed"] for s in (0, 1)]
    assert seeds == [0, 1]
    table = (tmp_path / "metrics.md").read_text()
    assert "±" in table

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("a test set was read twice")

    monkeypatch.setattr("ood_osdre.runs.evaluate_benchmark", never)
    assert main([*command, "--resume"]) == 0
    assert (tmp_path / "metrics.md").read_text() == table
    assert main([*command, "--resume", "training.lr=1e-4"]) == FAILED


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
    args = parser().parse_intermixed_args(["--id", id_name])
    config = read_config(args, default_config(id_name, gpu))

    assert config.id == id_name
    assert config.benchmark is None  # the first of BENCHMARKS that is whole
    if id_name.startswith("imagenet"):
        assert config.head is not None  # on a network that the user gives
        return
    network = ("resnet", 0.25) if id_name == "digits" else ("resnet" if gpu else "speed", 1.0)
    assert (config.network.kind, config.network.width) == network


def test_a_configuration_keeps_its_own_id_and_benchmark() -> None:
    config = read_config(parser().parse_intermixed_args([]), "cifar10_paper")
    assert (config.id, config.benchmark) == ("cifar10", "paper")
    args = parser().parse_intermixed_args(["--id", "cifar100", "--benchmark", "openood"])
    config = read_config(args, "cifar10_paper")
    assert (config.id, config.benchmark) == ("cifar100", "openood")


def test_the_benchmark_that_was_taken_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    manifest = as_cifar(make_root(root).parent)
    monkeypatch.setitem(BENCHMARKS, "cifar10", ("openood", str(manifest)))
    out = tmp_path / "out"
    command = ["--id", "cifar10", "--data-root", str(root), "--out", str(out), "--max-steps", "2"]
    assert main([*command, *FAST]) == 0
    error = capsys.readouterr().err
    taken = f"benchmark toy: whole in {root}, unlike openood, which lacks reference random300k: "
    assert taken in error
    assert "reference others\n" in error
    record = json.loads((out / "run.json").read_text())
    assert (record["benchmark"], record["config"]["benchmark"]) == ("toy", "toy")


ERRORS = [
    (["--checkpoint", "x", "--seeds", "2"], "--seeds: is for training"),
    (["--checkpoint", "x", "--time-budget", "0"], "--time-budget: is for training"),
    (["--checkpoint", "x", "training.lr=1"], "option training.lr=1: is for training"),
    (["--checkpoint", "nowhere"], "nowhere: no checkpoint here"),
    (["--device", "meta"], "--device meta: not available"),
    (["--device", "cuda:77"], "--device cuda:77: not available"),
    (["--device", "gpu"], "--device gpu: not available"),
    (["--id", "cifar10", "--data-root", "nowhere"], "--id digits needs none"),
    (["--id", "cifar10", "--data-root", "nowhere"], "no benchmark of --id cifar10 is whole in"),
    (["--id", "mirror", "--data-root", "nowhere"], "  mirror1, which lacks reference reference_o"),
    (
        ["--id", "cifar10", "--benchmark", "mirror0"],
        "ids: got 'cifar10', expected one of 'mirror'",
    ),
    (["--benchmark", "openod"], "openood"),
    (["--config", "cifar11"], "cifar1"),
    # Refused by the options' own rules, see tests/test_config.py
    (["training.step=5"], "did you mean 'training.steps'?"),
    (["network.width=0.3"], "network.width: got 0.3"),
    # Refused where they meet the data
    (["data.crop=40"], "data.crop"),
    (["network.kind=mlp"], "network.kind: got mlp"),
    (["evaluation.use_ood_val=true"], "evaluation.use_ood_val"),
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
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("metrics*"))


@pytest.mark.parametrize("options", [["--seeds", "0"], ["--max-steps", "x"]])
def test_the_parser_refuses_by_the_option(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == FAILED
    assert f"argument {options[0]}: " in capsys.readouterr().err


def test_help_and_key_errors_do_not_import_torch() -> None:
    code = (
        "import sys; from ood_osdre.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert main(['training.step=5']) == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nearest_neighbours_are_validated_as_they_are_scored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--id", "digits", "--max-steps", "2", *FAST, *KNN]
    out = tmp_path / "out"
    assert main([*command, "--out", str(out), "evaluation.neighbours=3"]) == 0
    record = json.loads((out / "run.json").read_text())
    assert {"val_near", "val_far", "val_auroc"} <= set(record["validation"]["best"])

    # A finished classifier is scored by Gaussians of its ID training features.
    again = ["--checkpoint", str(out), "--out", str(tmp_path / "again"), "--device", "cpu"]
    assert main([*again, "--quiet", "evaluation.score=relative_mahalanobis"]) == 0
    near, other = (read_scores(f / "scores.npz").of("near") for f in (out, tmp_path / "again"))
    assert not any(np.allclose(near[name].score, other[name].score) for name in near)
    with pytest.raises(UserError, match="score: knn is fitted to ID training images"):
        load_scorer(out).score(np.zeros((1, 32, 32, 3), np.uint8))
    capsys.readouterr()

    # More neighbours than images are refused before training.
    other = tmp_path / "other"
    assert main([*command, "--out", str(other), "evaluation.neighbours=100000"]) == FAILED
    assert "evaluation.neighbours: got 100000, expected at most" in capsys.readouterr().err
    assert not (other / "log.jsonl").exists()
