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
from ood_osdre.evaluation.scores import Scores, write_scores


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


@pytest.mark.usefixtures("quick")
def test_a_run_that_cannot_be_written_is_not_kept_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    def full(source: Path, target: Path) -> None:
        Path(target).write_text("{")
        raise OSError(28, "No space left on device")

    args = arguments(tmp_path, "--only", "a")
    with monkeypatch.context() as patch:
        patch.setattr(grid.shutil, "copyfile", full)
        assert grid.run_grid(with_variants(), args) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.json"))
    shutil.rmtree(tmp_path / "scratch")
    assert grid.run_grid(with_variants(), args) == 0


def test_a_damaged_record_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import grid

    kept = tmp_path / "out" / "a" / "seed-0"
    kept.mkdir(parents=True)
    (kept / "run.json").write_text("")
    assert grid.run_grid({"a": grid.Method([])}, arguments(tmp_path, "--only", "a")) == 1
    assert "run.json: not a run record" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [("--jobs", "0"), ("--seeds", "0"), ("--steps", "-1"), ("--threads", "0"), ("--only",),
     ("--keep", "nothere")],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(
    given: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(tmp_path, *given)
    assert f"argument {given[0]}: " in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_scores_are_kept_of_the_first_seed_alone(tmp_path: Path) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a", "--seeds", "2", "--first-seed", "3")
    args.keep = ["metrics.csv", "scores.npz"]
    assert grid.run_grid(with_variants(), args) == 0

    kept = {str(file.parent.relative_to(args.out)) for file in args.out.rglob("scores.npz")}
    assert kept == {"a/seed-3", "a/seed-3/NFE_2", "a/seed-3/NFE_5"}
    assert len(list(args.out.rglob("run.json"))) == 6


def test_confirmation_takes_one_candidate(capsys: pytest.CaptureFixture[str]) -> None:
    import path_terms

    with pytest.raises(SystemExit):
        path_terms.main(["confirm"])
    assert "takes one candidate" in capsys.readouterr().err


def test_no_run_starts_beyond_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import grid

    args = arguments(tmp_path, "--only", "a", "--budget", "0")
    assert grid.run_grid({"a": grid.Method([])}, args) == 1
    assert "not started: a, seed 0" in capsys.readouterr().err
    assert not (tmp_path / "scratch").exists()


def test_folders_of_methods_are_apart() -> None:
    import ablations
    import grid
    import methods
    import path_terms

    for known in (methods.METHODS, ablations.METHODS, path_terms.METHODS):
        slugs = [grid.slug(name) for name in known]
        assert len(set(slugs)) == len(slugs)
        assert all(set(s) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                 "0123456789._-") for s in slugs)  # fmt: skip


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


def test_a_solvers_rows_have_their_evaluations_and_no_validation_of_their_own(
    tmp_path: Path,
) -> None:
    import comparison

    run = tmp_path / "DRE-inf" / "seed-0"
    for folder, evaluations in ((run, 10), (run / "NFE_2", 2), (run / "adaptive", 23.5)):
        config = {"estimator": "time_conditioned", "evaluation": {"evaluations": 10}}
        write_run(folder, 0, config, **({"val_auroc": 0.6} if folder == run else {}))
        record = json.loads((folder / "run.json").read_text())
        record["results"] = {"evaluations": evaluations}
        (folder / "run.json").write_text(json.dumps(record))
    write_run(tmp_path / "Logistic" / "seed-0", 0, {"estimator": "direct"}, val_auroc=0.5)

    frame = comparison.collect(tmp_path)
    assert frame.set_index("variant")["evaluations"].to_dict() == {
        "": 1.0, "NFE 2": 2.0, "NFE 10": 10.0, "adaptive": 23.5,
    }  # fmt: skip
    table = comparison.summary(frame, "ratio").set_index("method")
    assert table["val AUROC"].to_dict() == {
        "DRE-∞, NFE 2": "-", "DRE-∞, NFE 10": "60.0", "DRE-∞, adaptive": "-", "Logistic": "50.0",
    }  # fmt: skip


def test_how_far_a_run_has_come_is_read_from_its_log(tmp_path: Path) -> None:
    import comparison

    for name, term in (("DRE-inf", "time_score"), ("OS-DRE-end-point", "endpoint")):
        run = tmp_path / name / "seed-0"
        write_run(run, 0, {}, val_auroc=0.6, step=600)
        log = [
            {"step": 100 * (i + 1), f"loss_{term}": loss, "loss_total": loss}
            for i, loss in enumerate([1.0, 0.0, -4.0, -1.0, -3.0, -5.0, -7.0])
        ]
        (run / "log.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in log))
        scores = Scores()
        scores.add("id", "cifar10", np.ones(2), np.zeros(2), ["a", "b"])
        scores.add("near", "tin", -np.ones(2), -np.ones(2), ["c", "d"])
        write_scores(run / "scores.npz", scores)
    write_run(tmp_path / "KLIEP" / "seed-0", 0, {}, val_auroc=0.75)  # keeps no log

    _, _, *rows = comparison.learning(tmp_path).splitlines()
    assert rows == ["| DRE-∞ | -1.0 ± 1.5 | -2.0 ± 1.0 | -6.0 ± 1.0 | 600 | 1.000 |"]


def test_paired_differences_carry_a_t_interval(tmp_path: Path) -> None:
    import path_terms

    rng = np.random.default_rng(0)
    base, other = rng.normal(size=(2, 5))
    text = path_terms.paired((other - base).tolist())
    test = stats.ttest_rel(other, base)
    low, high = test.confidence_interval(0.95)
    assert text == f"{(low + high) / 2:+.2f} ± {(high - low) / 2:.2f}"
    assert path_terms.paired([1.0, 2.0]) == "+1.50"


def test_path_terms_compares_equal_seeds_only(tmp_path: Path) -> None:
    import path_terms

    names = list(path_terms.CANDIDATES)
    best = {key: 0.5 for key in path_terms.COLUMNS.values()}
    for seed in range(3):
        write_run(tmp_path / "base" / f"seed-{seed}", seed, {}, **best)
    slug = path_terms.slug(names[0])
    better = best | {"val_auroc": 0.6}
    write_run(tmp_path / slug / "seed-1", 1, {}, **better)
    write_run(tmp_path / slug / "seed-7", 7, {}, **(best | {"val_auroc": 0.9}))
    rows = path_terms.table(tmp_path).splitlines()[2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| base", "3", "50.00"], [f"| {names[0]}", "1", "+10.00"],
    ]  # fmt: skip


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
