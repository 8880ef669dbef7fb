r"""The grids of runs and their tables: what is skipped, what fails, and what the means say."""

import argparse
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ood_osdre.config import Config, load_config


@pytest.fixture(autouse=True)
def _importable(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(benchmarks.parent)
    monkeypatch.setenv("PYTHONPATH", str(benchmarks.parent))


def arguments(tmp_path: Path, *given: str) -> argparse.Namespace:
    import grid

    parser = argparse.ArgumentParser()
    grid.add_arguments(parser, ["a", "b"], tmp_path / "out")
    return parser.parse_args(
        ["--id", "digits", "--benchmark", "digits", "--config", "digits", "--seeds", "1",
         "--steps", "3", "--jobs", "1", "--scratch", str(tmp_path / "scratch"), *given]
    )  # fmt: skip


@pytest.mark.slow
def test_a_grid_runs_what_is_not_done(tmp_path: Path) -> None:
    import grid

    methods = {"a": grid.Method(["data.train_limit=50", "data.val_limit=20"])}
    args = arguments(tmp_path, "--only", "a")
    assert grid.run_grid(methods, args) == 0
    record = tmp_path / "out" / "a" / "seed-0" / "run.json"
    assert json.loads(record.read_text())["config"]["training"]["steps"] == 3

    written = record.stat().st_mtime_ns
    assert grid.run_grid(methods, args) == 0
    assert record.stat().st_mtime_ns == written


def test_an_error_of_a_run_is_told_and_not_its_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a", "--id", "cifar10", "--benchmark", "pack")
    args.data_root = tmp_path / "absent"
    assert grid.run_grid({"a": grid.Method([])}, args) == 1
    assert "a, seed 0: failed: error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_run_is_not_taken_for_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    methods = {"a": grid.Method(["data.train_limit=50"])}
    args = arguments(tmp_path, "--only", "a")
    options = ["training.seed=0", "title=a", "data.train_limit=50", "training.steps=3"]
    options += ["benchmark=digits", "evaluation.select=val_auroc"]
    config = load_config("digits", [*options, "training.warmup=0", "training.eval_every=3"])
    kept = tmp_path / "out" / "a" / "seed-0"
    kept.mkdir(parents=True)
    record = {"benchmark": "digits", "config": config.to_dict()}
    (kept / "run.json").write_text(json.dumps(record))
    assert grid.run_grid(methods, args) == 0

    args.steps = 4
    assert grid.run_grid(methods, args) == 1
    assert "training.steps=3 (not 4)" in capsys.readouterr().err
    args.steps = 3
    methods = {"a": grid.Method(["data.train_limit=60"])}
    assert grid.run_grid(methods, args) == 1
    assert "data.train_limit=50 (not 60)" in capsys.readouterr().err


def run_quickly(command: list[str], args: argparse.Namespace) -> None:
    r"""Stands in for the main command: writes the files of a run of its options."""
    from ood_osdre import cli as eval_ood

    out = Path(command[command.index("--out") + 1])
    out.mkdir(parents=True)
    parsed = eval_ood.parser().parse_intermixed_args(command)
    if "--checkpoint" in command:
        trained = json.loads((parsed.checkpoint / "run.json").read_text())["config"]
        config = Config.from_mapping(trained, "run.json", parsed.overrides).to_dict()
    else:
        config = eval_ood.read_config(parsed, args.config).to_dict()
    checksums = getattr(args, "checksums", {"id": "a", "id_train": "b"})
    if "--checkpoint" in command:
        checksums = {"id": checksums["id"]}
    record = {"benchmark": "digits", "config": config, "data": {"checksums": checksums}}
    (out / "run.json").write_text(json.dumps(record))
    for file in ("metrics.csv", "scores.npz"):
        (out / file).write_text("")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    import grid

    monkeypatch.setattr(grid, "_command", run_quickly)


def with_variants() -> dict[str, Any]:
    import grid

    variants = {f"NFE {n}": [f"evaluation.evaluations={n}"] for n in (2, 5)}
    return {name: grid.Method([], variants) for name in ("a", "b")}


@pytest.mark.usefixtures("quick")
def test_a_variant_needs_the_model_that_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a", "--without", "NFE 2", "NFE 5")
    assert grid.run_grid(with_variants(), args) == 0
    scratch = tmp_path / "scratch" / "out" / "a" / "seed-0"
    whole = (scratch / "run.json").read_text()
    args.without = []
    for text in (None, whole.replace('"a"', '"b"')):
        (scratch / "run.json").unlink(missing_ok=True)
        if text:
            (scratch / "run.json").write_text(text)
        assert grid.run_grid(with_variants(), args) == 1
        assert "a, seed 0, NFE 2: " in capsys.readouterr().err
    (scratch / "run.json").write_text(whole)
    assert grid.run_grid(with_variants(), args) == 0


@pytest.mark.usefixtures("quick")
def test_another_variant_is_not_taken_for_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a")
    assert grid.run_grid(with_variants(), args) == 0
    assert grid.run_grid(with_variants(), args) == 0
    kept = tmp_path / "out" / "a" / "seed-0"
    shutil.copy(kept / "NFE_5" / "run.json", kept / "NFE_2" / "run.json")
    assert grid.run_grid(with_variants(), args) == 1
    assert "evaluation.evaluations=5 (not 2)" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_runs_of_other_data_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    assert grid.run_grid(with_variants(), arguments(tmp_path, "--only", "a")) == 0
    args = arguments(tmp_path, "--only", "b")
    for checksums in ({"id": "another"}, {"id": "a"}, {"id": "a", "id_train": "b", "near": "c"}):
        shutil.rmtree(tmp_path / "scratch" / "out" / "b", ignore_errors=True)
        args.checksums = checksums
        assert grid.run_grid(with_variants(), args) == 1
        assert "other data than" in capsys.readouterr().err
        assert not (tmp_path / "out" / "b").exists()


def test_no_run_starts_beyond_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a", "--budget", "0")
    assert grid.run_grid({"a": grid.Method([])}, args) == 1
    assert "not started: a, seed 0" in capsys.readouterr().err
    assert not (tmp_path / "scratch").exists()


def test_every_method_has_a_valid_configuration() -> None:
    import ablations
    import methods
    import path_terms
    import study

    for method in methods.METHODS.values():
        load_config("cifar10_cpu", method.overrides)
        for overrides in method.variants.values():
            load_config("cifar10_cpu", [*method.overrides, *overrides])
    for options in ablations.METHODS.values():
        load_config("digits", options)
    for options in study.METHODS.values():
        load_config("cifar10_cpu", options)
    for _, _, further in path_terms.STAGES.values():
        for options in path_terms.METHODS.values():
            load_config("cifar10_cpu", [*options, *further])


def write_run(folder: Path, seed: int, config: dict[str, Any], **best: float) -> None:
    folder.mkdir(parents=True)
    record = {
        "seed": seed,
        "config": {"evaluation": {"evaluations": 10}, **config},
        "validation": {"best": best},
        "train_seconds": 60.0,
    }
    (folder / "run.json").write_text(json.dumps(record))
    rows = [("id", "cifar10", 0), ("nearood", "", seed), ("farood", "", 2 * seed), ("all", "", 0)]
    frame = pd.DataFrame(rows, columns=["set", "role", "AUROC"])
    frame["role"] = np.where(frame["set"] == "id", "id", "")
    frame = frame.assign(
        **{"FPR@95": 1.0, "AUPR_IN": 1.0, "AUPR_OUT": 1.0}, parameters=7, seconds=3
    )
    frame.to_csv(folder / "metrics.csv", index=False)


def test_a_comparison_shows_means_and_deviations_best_validation_first(tmp_path: Path) -> None:
    import comparison

    for seed, auroc in enumerate((0.6, 0.8)):
        write_run(tmp_path / "Logistic" / f"seed-{seed}", seed, {}, val_auroc=auroc)
    write_run(tmp_path / "KLIEP" / "seed-0", 0, {}, val_auroc=0.75)
    table = comparison.summary(comparison.collect(tmp_path), "ratio")
    assert table["method"].tolist() == ["KLIEP", "Logistic"]
    assert table["val AUROC"].tolist() == ["75.0", "70.0 ± 14.1"]
    assert table["far AUROC"].tolist() == ["0.0", "1.0 ± 1.4"]
    assert table["parameters"].tolist() == ["7", "7"]
    latex = comparison.latex(table)
    assert r"70.0 $\pm$ 14.1" in latex
    assert "%" not in latex
    comparison.write(tmp_path)
    assert latex in (tmp_path / "table.tex").read_text()
    assert (tmp_path / "nfe.png").is_file()


def test_paired_differences_carry_a_t_interval(tmp_path: Path) -> None:
    import path_terms

    rng = np.random.default_rng(0)
    base, other = rng.normal(size=(2, 5))
    text = path_terms.paired((other - base).tolist())
    test = stats.ttest_rel(other, base)
    low, high = test.confidence_interval(0.95)
    assert text == f"{(low + high) / 2:+.2f} ± {(high - low) / 2:.2f}"
    assert path_terms.paired([1.0, 2.0]) == "+1.50"


def test_an_interrupted_grid_stops_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grid

    started = []

    def sleep(command: list[str], **_: object) -> subprocess.Popen[str]:
        started.append(command)
        return popen(["sleep", "600"], stderr=subprocess.PIPE, text=True)

    def interrupted(*_: object, **__: object) -> Iterator[str]:
        while not grid.RUNNING:
            time.sleep(0.01)
        raise KeyboardInterrupt
        yield

    popen = subprocess.Popen
    monkeypatch.setattr(grid.subprocess, "Popen", sleep)
    monkeypatch.setattr(grid, "tqdm", interrupted)
    args = arguments(tmp_path, "--only", "a", "b")
    # A shell starts what is in the background deaf to interrupts, and its children with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            grid.run_grid({"a": grid.Method([]), "b": grid.Method([])}, args)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1
    assert not grid.RUNNING
