r"""Tests for the ood_osdre.evaluation.records module."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ood_osdre
from ood_osdre.errors import UserError
from ood_osdre.evaluation.records import (
    RunRecord,
    command_line,
    git_commit,
    library_versions,
    platform_summary,
    read_record,
)

FINISHED = {
    "config": {"steps": 3},
    "benchmark": "digits",
    "data": {"reference": None, "counts": {}},
    "absent": ["svhn"],
    "selection": "given",
    "results": {"accuracy": None, "parameters": 5},
    "score_seconds": 2,
    "more": 1,
}


def test_record_holds_the_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["eval_ood.py", "--data-root", "../my data", "--out=./o"]
    monkeypatch.setattr(sys, "argv", arguments)
    record = RunRecord(config={"steps": 3}, seed=1, absent=["svhn"], results={"x": (1.5, 2)})
    record.write(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    read = json.loads(text)
    assert read["command"] == arguments
    assert read["config"] == {"steps": 3}
    assert (read["seed"], read["absent"], read["results"]) == (1, ["svhn"], {"x": [1.5, 2]})
    assert read["versions"]["ood_osdre"] == ood_osdre.__version__
    assert read["train_seconds"] is None
    assert set(read) >= {"benchmark", "commit", "data", "device", "platform", "selection"}
    # No path that the user did not give.
    for folder in (Path.cwd(), Path.home(), Path(sys.executable).parent):
        assert os.fspath(folder) not in text


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"config": []}, "config: got \\[\\]"),
        ({"benchmark": None}, "benchmark: got null"),
        ({"data": {}}, "data.reference"),
        ({"absent": "svhn"}, "absent: got 'svhn'"),
        ({"results": {"accuracy": 0.5}}, "results.parameters"),
        ({"results": {"parameters": 5}}, "results.accuracy"),
        ({"results": {"accuracy": 0.5, "parameters": "5"}}, "results.parameters: got '5'"),
        ({"score_seconds": None}, "score_seconds: got null"),
    ],
)
def test_reading_a_record_checks_what_a_reader_relies_on(
    tmp_path: Path, changed: dict[str, object], found: str
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(FINISHED))
    record = read_record(path)
    assert (record.reference, record.accuracy, record.parameters) == (None, None, 5)
    assert (record.config, record.absent, record.score_seconds) == ({"steps": 3}, ["svhn"], 2)
    path.write_text(json.dumps({**FINISHED, **changed}))
    with pytest.raises(UserError, match=f"run.json: not a run record .*{found}"):
        read_record(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\x00", "[" * 5000, None])
def test_a_damaged_record_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json: not a run record") as error:
        read_record(tmp_path / "run.json")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_command_line_keeps_given_paths_and_drops_expanded_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = os.path.join(os.sep, "env", "bin", "ood-osdre")
    monkeypatch.setattr(sys, "argv", [program, "--out", "/given"])
    assert command_line() == ["ood-osdre", "--out", "/given"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/eval_ood.py"])
    assert command_line() == ["benchmarks/eval_ood.py"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_commit_is_that_of_a_tracked_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, installed = tmp_path / "package", tmp_path / "env" / "package"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text("1")
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}

    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", os.fspath(tmp_path), *identity, *args]
        done = subprocess.run(command, capture_output=True, check=True, text=True, env=env)
        return done.stdout.strip()

    assert git_commit(package) is None
    git("init")
    git("add", "package")
    assert git_commit(package) is None
    git("commit", "-m", "first")
    clean = {"revision": git("rev-parse", "HEAD"), "dirty": False}
    assert git_commit(package) == clean
    # As hooks do.
    monkeypatch.setenv("GIT_DIR", os.fspath(tmp_path / "elsewhere"))
    assert git_commit(package) == clean
    # Code that git does not know counts, a result does not.
    (package / "new.csv").write_text("1")
    assert git_commit(package) == clean
    (package / "new.py").write_text("1")
    assert git_commit(package) == {**clean, "dirty": True}
    (package / "new.py").unlink()
    (package / "a.py").write_text("2")
    assert git_commit(package) == {**clean, "dirty": True}
    # Merely lies below a repository, which says nothing about its code.
    assert git_commit(installed) is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(package) is None


def test_versions_and_platform() -> None:
    versions = library_versions(["numpy", "no-such-distribution"])
    assert set(versions) == {"ood_osdre", "python", "numpy"}
    assert versions["numpy"] == np.__version__
    assert all(platform_summary().values())
