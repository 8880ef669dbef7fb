r"""Studies: their lines and tables, what is refused before the first run, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from scipy import stats

from ood_osdre import cli
from ood_osdre.config import Config
from ood_osdre.errors import UserError
from ood_osdre.evaluation.scores import Scores, write_scores

if TYPE_CHECKING:
    from records import Run

pytestmark = pytest.mark.usefixtures("benchmarks")

METHODS = {
    "a": {"options": ["data.train_limit=50"], "variants": {"NFE 2": ["evaluation.evaluations=2"]}},
    "b": {"options": ["note={run:a}", "data.train_limit=4{seed}"]},
}
STUDY = {
    "question": "Which?", "protocol": "None.", "config": "digits", "ids": ["digits"],
    "benchmarks": ["digits"], "steps": 3, "seeds": [0, 1], "methods": METHODS,
}  # fmt: skip


def write_study(tmp_path: Path, **changes: object) -> None:
    (tmp_path / "s.yml").write_text(yaml.safe_dump({**STUDY, **changes}))


def give(tmp_path: Path, *options: str) -> int:
    import study

    places = ["--out", "runs", "--studies", ".", "--records", "records", "--results", "results"]
    places = [str(tmp_path / p) if not p.startswith("--") else p for p in places]
    return study.main(["s", "--jobs", "1", *places, *options])


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    from records import read_runs

    runs = read_runs(tmp_path / "records" / "s.jsonl")
    return [{k: v for k, v in dict(run).items() if v is not None} for run in runs]


class Quick:
    r"""Stands in for the main command: writes the files of a run of its options, or stops."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []
        self.stop_at: int | None = None
        self.checksums = {"id": "a" * 64, "id_train": "b" * 64}

    def __call__(self, _: object, options: Sequence[str]) -> None:
        if len(self.given) == self.stop_at:
            raise KeyboardInterrupt
        self.given.append(list(options))
        args = cli.parser().parse_intermixed_args(options)
        config, checksums, seconds = None, self.checksums, 1.5
        if args.checkpoint:
            trained = json.loads((args.checkpoint / "run.json").read_text())["config"]
            config = Config.from_mapping(trained, "run.json", args.overrides)
            checksums, seconds = {"id": checksums["id"]}, None
        else:
            config = cli.read_config(args, args.config)
        record = {
            "config": config.to_dict(), "device": "cpu (1 threads)", "train_seconds": seconds,
            "score_seconds": 0.5, "commit": {"revision": "c0ffee", "dirty": True},
            "data": {"reference": "other", "checksums": checksums},
            "validation": {"best": {"val_auroc": 0.75, "step": 3}} if seconds else {},
            "results": {"accuracy": 0.5, "parameters": 7, "evaluations": 1.0},
        }  # fmt: skip
        scores = Scores()
        scores.add("id", "digits", [2.0, 4.0], [0, 1], ["a", "b"])
        scores.add("near", "eight", [0.0, 2.0], [-1, -1], ["c", "d"])
        args.out.mkdir(parents=True)
        write_scores(args.out / "scores.npz", scores)
        (args.out / "score_density.png").write_bytes(b"plot")
        table = "set,role,AUROC,FPR@95,AUPR_IN,AUPR_OUT,FPR@95_ID\ndigits,id,,,,,\n"
        (args.out / "metrics.csv").write_text(
            f"{table}eight,near,{80 + config.training.seed},,,,\n"
        )
        log = [{"step": 1, "loss_total": 2.0, "seconds": 1}, {"step": 1, "val_auroc": 0.5}]
        (args.out / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
        (args.out / "run.json").write_text(json.dumps(record))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Quick:
    import study

    command = Quick()
    monkeypatch.setattr(study.Runner, "_command", lambda self, given: command(self, given))
    return command


def test_a_run_leaves_one_line_that_remakes_it(tmp_path: Path, quick: Quick) -> None:
    write_study(tmp_path, curve=True, keep=["a"])
    assert give(tmp_path, "--seeds", "1") == 0
    own, other, variant = lines(tmp_path)
    assert [own["method"], other["method"], variant["variant"]] == ["a", "b", "NFE 2"]
    assert own["config"]["training"]["steps"] == 3
    assert own["config"]["data"]["train_limit"] == 50
    assert variant["config"]["evaluation"]["evaluations"] == 2
    # The other run's folder is this machine's, and is not in the record.
    assert str(tmp_path) in " ".join(quick.given[1])
    assert other["config"]["note"] == "{run:a}"
    assert other["config"]["data"]["train_limit"] == 41
    assert str(tmp_path) not in json.dumps(other)
    assert own["metrics"] == {"eight": {"AUROC": 81.0}}
    assert (own["accuracy"], own["seed"], own["threads"]) == (50.0, 1, 1)
    assert (own["commit"], own["checksums"]["id"]) == ("c0ffee+", "a" * 16)
    assert own["spread"] == pytest.approx(np.std([2, 4, 0, 2]))
    assert own["curve"] == {"step": [1.0], "loss_total": [2.0]}
    assert "curve" not in variant
    assert not (tmp_path / "results").exists()  # of the first seed alone

    assert give(tmp_path) == 0
    # Neither of a method that is not named nor of a further way to score.
    assert [path.name for path in (tmp_path / "results" / "s").iterdir()] == [
        "digits-digits-a.png"
    ]
    assert len(lines(tmp_path)) == 6


@pytest.mark.parametrize("stop_at", range(6))
def test_interrupted_and_given_again_makes_the_same_lines(
    tmp_path: Path, quick: Quick, stop_at: int
) -> None:
    write_study(tmp_path)
    quick.stop_at = stop_at
    assert give(tmp_path) == 130
    assert len(lines(tmp_path)) == stop_at
    quick.stop_at = None
    assert give(tmp_path) == 0
    again = lines(tmp_path)
    assert give(tmp_path) == 0
    assert lines(tmp_path) == again
    expected = [(m, v, s) for s in (0, 1) for m, v in (("a", ""), ("b", ""), ("a", "NFE 2"))]
    assert [(r["method"], r["variant"], r["seed"]) for r in again] == expected
    assert len(quick.given) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {**METHODS, "c": {"options": ["data.nope=1"]}}}, "c: .*nope"),
        ({"methods": {**METHODS, "c": {"variants": {"v": ["evaluation.score=x"]}}}}, "c: .*score"),
        ({"config": "absent"}, "absent"),
        ({"steps": 700}, r"steps: got 700, expected at most training.steps \(600\)"),
        ({"seed": 1}, "unknown key 'seed'"),
        ({"seeds": []}, "seeds: "),
        ({"methods": {"b": METHODS["b"]}}, "'b' needs the run of 'a', which is no method"),
        ({"methods": {"a": {"seeds": [0]}, "b": METHODS["b"]}}, "'a', which has fewer seeds"),
        ({"methods": {"a": {"options": ["note={run:a}"]}}}, "circle"),
        ({"methods": {"a, b": {}, "a + b": {}}}, "one folder"),
        ({"methods": {"a": {"references": ["x"]}}}, "reference 'x', which the study lacks"),
        ({"common": ["note={run:a}"]}, "common: "),
        ({"benchmarks": ["pack"]}, "pack"),
        ({"references": ["absent"]}, "references: got 'absent', expected one of"),
    ],
)
def test_what_is_wrong_is_told_before_the_first_run(
    tmp_path: Path,
    quick: Quick,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    message: str,
) -> None:
    write_study(tmp_path, **changes)
    assert give(tmp_path) == 2
    (told,) = capsys.readouterr().err.strip().splitlines()
    with pytest.raises(UserError, match=message):
        raise UserError(told)
    assert not quick.given
    assert not lines(tmp_path)


def test_a_line_of_another_run_is_not_taken_for_done(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    assert give(tmp_path) == 0
    before = lines(tmp_path)
    for changes, message in (
        ({"common": ["training.lr=0.5"]}, "training.lr=0.001 (not 0.5)"),
        ({"steps": 4}, "training.steps=3 (not 4)"),
    ):
        write_study(tmp_path, **changes)
        assert give(tmp_path) == 2
        assert message in capsys.readouterr().err
    assert lines(tmp_path) == before
    assert len(quick.given) == 6


def test_runs_of_other_data_or_without_their_model_get_no_line(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    assert give(tmp_path, "--only", "a", "--seeds", "0", "--without", "NFE 2") == 0
    quick.checksums = {**quick.checksums, "id_train": "c" * 64}
    assert give(tmp_path, "--only", "a", "--seeds", "1", "--without", "NFE 2") == 1
    assert "other data than a, seed 0" in capsys.readouterr().err
    (tmp_path / "runs" / "s" / "digits-digits" / "a" / "seed-0" / "run.json").unlink()
    assert give(tmp_path, "--seeds", "0") == 1
    told = capsys.readouterr().err
    assert "a, NFE 2, seed 0: " in told
    assert "b, seed 0: " in told
    assert told.count("lacks the run of 'a'; remove its line to train it again") == 2
    assert len(lines(tmp_path)) == 1


def test_what_only_a_variant_needs_is_not_waited_for_to_train(
    tmp_path: Path, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    import study

    trained = Event()

    def command(runner: object, options: Sequence[str]) -> None:
        if "title=d" in options:
            trained.set()
        elif "title=a" in options:
            assert trained.wait(20)  # c does not wait for a, nor does d for c
        quick(runner, options)

    monkeypatch.setattr(study.Runner, "_command", command)
    summed = {"variants": {"with a": ["evaluation.together=[{run:a}]"]}}
    write_study(tmp_path, methods={"a": {}, "c": summed, "d": {}}, seeds=[0])
    assert give(tmp_path, "--jobs", "2") == 0
    assert [(line["method"], line["variant"]) for line in lines(tmp_path)][-1] == ("c", "with a")


def test_nothing_starts_beyond_the_budget(
    tmp_path: Path, quick: Quick, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path)
    assert give(tmp_path, "--budget", "0") == 1
    assert "not started: a, seed 0" in capsys.readouterr().err
    assert not quick.given


def test_an_error_of_a_run_is_told_and_not_its_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(tmp_path, config="cifar10_cpu", ids=["cifar10"], benchmarks=["pack"])
    assert give(tmp_path, "--only", "a", "--seeds", "0", "--data-root", str(tmp_path / "no")) == 1
    assert "a, seed 0: failed: error: " in capsys.readouterr().err
    assert not lines(tmp_path)


def test_an_interrupted_study_stops_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import study

    started = []

    def sleep(command: list[str], **_: object) -> "subprocess.Popen[str]":
        started.append(command)
        return popen(["sleep", "600"], stderr=subprocess.PIPE, text=True)

    def interrupted(*_: object, **__: object) -> Iterator[str]:
        while not study.RUNNING:
            time.sleep(0.01)
        raise KeyboardInterrupt
        yield

    popen = subprocess.Popen
    monkeypatch.setattr(study.subprocess, "Popen", sleep)
    monkeypatch.setattr(study, "tqdm", interrupted)
    write_study(tmp_path)
    # A shell starts what is in the background deaf to interrupts, and its children with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert give(tmp_path) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 1
    assert not study.RUNNING


def test_a_reference_that_is_a_path_goes_by_its_last_part(tmp_path: Path, quick: Quick) -> None:
    (tmp_path / "other.txt").touch()
    write_study(tmp_path, references=[str(tmp_path / "other.txt")])
    assert give(tmp_path) == 0
    assert give(tmp_path) == 0
    assert len(lines(tmp_path)) == len(quick.given) == 6


def run_of(method: str, seed: int, auroc: float, near: float = 50.0, **changes: object) -> "Run":
    from records import Run

    values: dict[str, Any] = {
        "method": method, "seed": seed, "id": "i", "benchmark": "m", "reference": None, "config": {},
        "commit": None, "checksums": {}, "device": None, "train_seconds": 1.0, "score_seconds": 3.0,
        "parameters": 7, "metrics": {"nearood": {"AUROC": near}}, "validation": {"val_auroc": auroc},
    }  # fmt: skip
    return Run.of({**values, **changes}, "test")


def test_a_duplicate_or_damaged_line_is_refused(tmp_path: Path) -> None:
    from records import append, read_runs, write_runs

    path = tmp_path / "s.jsonl"
    run = run_of("a", 0, 0.5)
    append(path, run)
    assert read_runs(path) == [run]
    with pytest.raises(UserError, match="a, seed 0 is there already"):
        append(path, run.replace(parameters=8))
    append(path, run.replace(seed=1))
    append(path, run.replace(variant="v"))
    append(path, run.replace(reference="r"))
    assert len(read_runs(path)) == 4
    write_runs(path, [run, run])
    with pytest.raises(UserError, match=r"s\.jsonl:2: a, seed 0 is there already"):
        read_runs(path)
    for text, message in (("{", "not a line of JSON"), ('{"method": "a"}', "seed: is missing")):
        path.write_text(f"{text}\n")
        with pytest.raises(UserError, match=rf"s\.jsonl:1: .*{message}"):
            read_runs(path)


def test_lines_hold_what_differs_from_the_first_and_are_read_whole(tmp_path: Path) -> None:
    from records import read_runs, write_runs

    path, base = tmp_path / "s.jsonl", {"head": {"rank": 1, "eps": 1, "layers": []}, "id": "i"}
    configs = [base, base | {"head": None}, base | {"head": {**base["head"], "eps": 1.0}}]
    configs += [{"other": 1}, base | {"head": {"rank": True, "eps": 1, "layers": ["a", "b"]}}]
    runs = [
        run_of("a", i, 0.5, config=config, checksums={"set/a.b": str(i)})
        for i, config in enumerate(configs)
    ]
    write_runs(path, runs)
    assert [repr(run) for run in read_runs(path)] == [repr(run) for run in runs]
    first, second, *_ = path.read_text().splitlines()
    assert json.loads(second)["changes"] == [
        [["config", "head"], None], [["checksums", "set/a.b"], "1"],
    ]  # fmt: skip
    for other in ('["config","feet"]', '[["config"],"head"]', "[]", "7"):
        damaged = second.replace('["config","head"]', other)
        path.write_text(f"{first}\n{damaged}\n")
        with pytest.raises(UserError, match=r"s\.jsonl:2: changes: not keys of the first line"):
            read_runs(path)


def test_one_writer_a_file(tmp_path: Path) -> None:
    import study

    path = tmp_path / "s.jsonl"
    with study.locked(path), pytest.raises(UserError, match="another"), study.locked(path):
        pass


def test_a_kill_while_lines_are_added_leaves_whole_ones(tmp_path: Path) -> None:
    from records import append, read_runs

    path = tmp_path / "s.jsonl"
    for life in (0.0, 0.01, 0.02, 0.04):
        path.unlink(missing_ok=True)
        if not (child := os.fork()):
            try:
                for seed in range(10**6):
                    append(path, run_of("a" * 10_000, seed, 0.5))
            finally:
                os._exit(1)
        while not path.exists():
            time.sleep(0.001)
        time.sleep(life)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        runs = read_runs(path)
        assert runs
        assert [run.seed for run in runs] == list(range(len(runs)))


def test_a_table_is_what_its_lines_say() -> None:
    import study_tables as tables
    from studies import Study

    methods = {"a": {"group": "g"}, "b": {"group": "g", "variants": {"v": []}}, "c": {}}
    study = Study.of({**STUDY, "methods": methods}, "test")
    runs = [run_of("a", 0, 0.6, 60.0), run_of("b", 0, 0.75), run_of("a", 1, 0.8, 64.0)]
    runs += [run_of("b", 0, 0.75, 40.0, variant="v", validation={}), run_of("c", 0, 0.9)]
    rows = tables.best_first(tables.rows_of(study, runs, "g"))
    columns = {"val": tables.validation("val_auroc"), "near": tables.metric("nearood")}
    table = tables.means(rows, columns)
    # 70 and 62; the deviations of two values are their difference over the root of 2.
    assert table.splitlines() == [
        "| method | seeds | val | near |",
        "| :-- | --: | --: | --: |",
        "| b | 1 | 75.0 | 50.0 |",
        "| b, v | 1 | - | 40.0 |",
        "| a | 2 | 70.0 ± 14.1 | 62.0 ± 2.8 |",
    ]
    latex = tables.latex(table)
    assert r"a & 2 & 70.0 $\pm$ 14.1 & 62.0 $\pm$ 2.8 \\" in latex
    assert latex.startswith(r"\begin{tabular}{lrrr}")


def test_paired_differences_carry_a_t_interval() -> None:
    import study_tables as tables

    base, other = np.random.default_rng(0).normal(size=(2, 5))
    # Seeds are paired whatever their order; one without its pair counts for nothing.
    rows = {
        "base": [run_of("base", s, 0.5, v) for s, v in enumerate(base)],
        "other": [run_of("other", s, 0.5, other[s]) for s in (3, 1, 0, 2, 4)],
        "third": [run_of("third", s, 0.5, base[s] + 1) for s in (0, 1)]
        + [run_of("third", 9, 0.5, 99.0)],
    }
    low, high = stats.ttest_rel(other, base).confidence_interval(0.95)
    table = tables.differences(rows, {"near": tables.metric("nearood")}).splitlines()
    assert table[2] == f"| base | 5 | {base.mean():.2f} |"
    assert table[3] == f"| other | 5 | {(low + high) / 2:+.2f} ± {(high - low) / 2:.2f} |"
    assert table[4] == "| third | 2 | +1.00 |"


def test_a_ranking_pairs_settings_and_counts_the_blind_once() -> None:
    import study_tables as tables

    near = {("a", "r"): (60.0, 70.0), ("a", "q"): (80.0, 90.0), ("blind", "r"): (50.0, 62.0)}
    near[("b", "r")] = (55.0, 61.0)
    rows: dict[str, list[Run]] = {"b": [], "blind": [], "a": []}
    for (name, reference), values in near.items():
        for seed, value in enumerate(values):
            config = {"estimator": "classifier"} if name == "blind" else {}
            run = run_of(name, seed, 0.5, value, reference=reference, config=config)
            rows[name].append(run)
    column = tables.metric("nearood")
    first, *others = tables.ranking(rows, {"near": column}, column).splitlines()[2:]
    assert first == "| a | 4 | 75.0 |  |"
    # b against a with the reference that both have: gaps of -5 and -9; the blind classifier
    # against the mean of a over references: -20 and -18.
    assert others == ["| b | 2 | 58.0 | -7.0 ± 2.0 |", "| blind | 2 | 56.0 | -19.0 ± 1.0 |"]


def test_columns_are_compared_in_pairs_of_a_setting_and_seed() -> None:
    import study_tables as tables
    from studies import Study

    held, fitted = np.random.default_rng(1).normal(size=(2, 4))
    study = Study.of(
        {**STUDY, "methods": {"classifier": {}, "a: held out": {}, "a: fitted": {}}}, "t"
    )
    runs = [run_of("classifier", 0, 0.5, 1.0)]
    for name, values in (("a: held out", held), ("a: fitted", fitted[::-1])):
        keys = [(r, s) for r in ("r", "q") for s in range(2)]
        keys = keys if name == "a: held out" else keys[::-1]
        runs += [
            run_of(name, s, 0.5, v, reference=r) for (r, s), v in zip(keys, values, strict=True)
        ]
    low, high = stats.ttest_rel(held, fitted).confidence_interval(0.95)
    table = tables.crossed_differences(study, runs, tables.metric("nearood")).splitlines()
    assert table[0] == "|  | pairs | held out | fitted | held out, less fitted |"
    gap = f"{(low + high) / 2:+.2f} ± {(high - low) / 2:.2f}"
    assert table[2:] == [f"| a | 4 | {held.mean():.1f} | {fitted.mean():.1f} | {gap} |"]


def test_every_study_has_valid_options() -> None:
    from jobs import config_of, plan
    from studies import STUDIES, load_study

    for path in STUDIES.glob("*.yml"):
        methods = load_study(path.stem)
        for job in plan(methods, list(methods.methods), [0], Path("runs")):
            for further in ((), *job.method.variants.values()):
                config_of(job, further)


def test_a_reference_given_by_path_is_remarked_on() -> None:
    import study_tables as tables
    from studies import Study

    study = Study.of(
        {**STUDY, "references": ["own", "lists/other.txt"], "methods": {"a": {}}}, "t"
    )
    near = {"metrics": {"nearood": {"AUROC": 50.0}, "near_held": {"AUROC": 60.0}}}
    runs = [run_of("a", 0, 0.5, reference=name, **near) for name in ("own", "other")]
    own, other = tables.overview(study, runs).split("AUROC in percent: ")[1:]
    assert "given by path" not in own
    assert other.startswith("i, m, reference other, given by path: nearood counts near sets whole")


def test_the_calibration_of_heads_is_a_table_of_its_own() -> None:
    import study_tables as tables
    from studies import Study

    study = Study.of({**STUDY, "methods": {"a": {}, "b": {}}}, "test")
    numbers = {"held_out_log_mass_0": 0.25, "held_out_log_mass_1": -0.5}
    numbers |= {"held_out_posterior_error": 0.03, "held_out_noisy_log_mass_0": 1.5}
    runs = [run_of("a", 0, 0.5, validation=numbers), run_of("b", 0, 0.5)]
    table = tables.overview(study, runs).split("Calibration on held-out images")[1]
    assert [line for line in table.splitlines() if line.startswith("|")][2:] == [
        "| a | 1 | 0.25 | -0.50 | 3.00 | 1.50 | - | - |"
    ]
    assert "Calibration" not in tables.overview(study, runs[1:])


def test_methods_stand_side_by_side_with_each_reference() -> None:
    import study_tables as tables
    from studies import Study

    values = {**STUDY, "methods": {"a": {}, "blind": {"references": ["r"]}}}
    study = Study.of({**values, "ids": ["i", "j"], "references": ["r", "s"]}, "test")

    def run(method: str, seed: int, id_name: str, reference: str, near: float) -> "Run":
        metrics = {"near_held": {"AUROC": near}, "farood": {"AUROC": 90.0}}
        config = {"estimator": "classifier"} if method == "blind" else {}
        settings = {"id": id_name, "reference": reference, "config": config}
        return run_of(method, seed, 0.5, metrics=metrics, train_seconds=180.0, **settings)

    runs = [run("a", 0, "i", "r", 70.0), run("a", 1, "i", "r", 72.0), run("a", 0, "j", "s", 50.0)]
    runs += [run("blind", 0, "i", "r", 60.0), run("a", 0, "i", "s", 71.0)]
    assert tables.side_by_side(study, runs).splitlines() == [
        "| near / far AUROC (%) | seeds | i, r | i, s | j, s | minutes |",
        "| :-- | --: | --: | --: | --: | --: |",
        "| a | 1 to 2 | 71.0 ± 1.4 / 90.0 ± 0.0 | 71.0 / 90.0 | 50.0 / 90.0 | 3 |",
        "| blind | 1 | 60.0 / 90.0 | 60.0 / 90.0 | - | 3 |",
    ]


def test_the_training_time_of_a_head_counts_its_classifier(tmp_path: Path) -> None:
    from records import finished_run, training_seconds

    classifier = run_of("c", 1, 0.5, train_seconds=100.0)
    variant = classifier.replace(variant="v", train_seconds=None)
    others = [run_of("c", 0, 0.5, train_seconds=7.0), variant, classifier]
    named, given = ({"classifier": source} for source in ("{run:c}", "runs/other/seed-1"))
    for config, known, expected in (
        (named, None, 101.0),  # a line of before, whose classifier is in the same study
        (given, 50.0, 51.0),
        (given, None, np.nan),
        ({"classifier": None}, None, 1.0),
    ):
        head = run_of("h", 1, 0.5, config=config, classifier_seconds=known)
        assert training_seconds(head, others) == pytest.approx(expected, nan_ok=True)
    # A further way to score is as old as its model; a sum needs all its networks, each once.
    assert training_seconds(variant, others) == 100.0
    head = run_of("h", 1, 0.5, config=named)
    parts = {"evaluation": {"together": ["{run:h}", "{run:c}"]}}
    total = run_of("t", 1, 0.5, config=parts, train_seconds=5.0)
    assert training_seconds(total, [*others, head, total]) == 106.0
    further = total.replace(variant="v", train_seconds=None)
    assert training_seconds(further, [*others, head, total]) == 106.0
    assert np.isnan(training_seconds(total, [head, total]))
    # Of a part that is trained with each reference, the one of the same.
    other = head.replace(reference="r", train_seconds=9.0)
    for found in ([other, head], [head, other]):
        assert training_seconds(total, [*others, *found, total]) == 106.0
        own = total.replace(reference="r")
        assert training_seconds(own, [*others, *found, own]) == 114.0

    quick = Quick()
    for name, options in (("c", []), ("h", [f"classifier={tmp_path / 'c'}"])):
        head = ["--config", "digits_representation"]
        quick(None, [*head, "--out", str(tmp_path / name), *options])
    given = {"method": "h", "seed": 0, "id": "digits", "benchmark": "digits", "config": {}}
    found = [finished_run(tmp_path / name, **given).classifier_seconds for name in ("c", "h")]
    assert found == [None, 1.5]


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_lines_of_one_that_was_not(
    tmp_path: Path, benchmarks: Path
) -> None:
    methods = {"a": METHODS["a"], "b": {"options": ["data.train_limit=40"]}}
    methods["a"] = {**methods["a"], "variants": {}}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_study(tmp_path / name, methods=methods, seeds=[0])
    assert give(tmp_path / "whole") == 0

    folder = tmp_path / "killed"
    places = {"--out": "runs", "--studies": ".", "--records": "records", "--results": "results"}
    options = [part for k, v in places.items() for part in (k, str(folder / v))]
    command = [sys.executable, str(benchmarks / "study.py"), "s", "--jobs", "1", *options]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    while not lines(folder):
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert give(folder) == 0
    timed = ("train_seconds", "score_seconds", "validation", "commit")
    a, b = (
        [{k: v for k, v in r.items() if k not in timed} for r in lines(p)]
        for p in (tmp_path / "whole", folder)
    )
    assert a == b


def test_a_variant_may_name_the_run_of_another_method(tmp_path: Path) -> None:
    import jobs
    from studies import load_study

    both = {"variants": {"together": ["evaluation.together=[{run:a, 1}]"]}}
    write_study(tmp_path, methods={"c": both, "a, 1": {}}, seeds=[3])
    study = load_study("s", tmp_path)
    first, second = jobs.plan(study, ["c"], None, tmp_path)
    assert (first.name, second.name) == ("a, 1", "c")
    (option,) = second.method.variants["together"]
    assert option == f"evaluation.together=[{first.folder}]"
    found = jobs.config_of(second, [option])["evaluation"]["together"]
    assert found == ["{run:a, 1}"]
