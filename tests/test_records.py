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
from ood_osdre.evaluation.records import (
    RunRecord,
    command_line,
    git_commit,
    library_versions,
    platform_summary,
)


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

    # No path that the user did not give
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text
    assert os.fspath(Path(sys.executable).parent) not in text


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

    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", os.fspath(tmp_path), *identity, *args]
        return subprocess.run(
            command, capture_output=True, check=True, text=True, env=_env()
        ).stdout.strip()

    assert git_commit(package) is None

    git("init")
    git("add", "package")
    assert git_commit(package) is None

    git("commit", "-m", "first")
    revision = git("rev-parse", "HEAD")
    assert git_commit(package) == {"revision": revision, "dirty": False}

    # As hooks do
    monkeypatch.setenv("GIT_DIR", os.fspath(tmp_path / "elsewhere"))
    assert git_commit(package) == {"revision": revision, "dirty": False}

    # Code that git does not know counts, a result does not.
    (package / "new.csv").write_text("1")
    assert git_commit(package) == {"revision": revision, "dirty": False}
    (package / "new.py").write_text("1")
    assert git_commit(package) == {"revision": revision, "dirty": True}
    (package / "new.py").unlink()

    (package / "a.py").write_text("2")
    assert git_commit(package) == {"revision": revision, "dirty": True}

    # Merely lies below a repository, which says nothing about its code
    assert git_commit(installed) is None


def test_commit_is_none_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None


def test_versions_and_platform() -> None:
    versions = library_versions(["numpy", "no-such-distribution"])

    assert set(versions) == {"ood_osdre", "python", "numpy"}
    assert versions["numpy"] == np.__version__
    assert all(platform_summary().values())


def _env() -> dict[str, str]:
    root = os.fspath(Path(ood_osdre.__file__).parent.parent)
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return {**env, "PYTHONPATH": root}
