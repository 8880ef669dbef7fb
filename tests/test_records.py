r"""Tests for the ood_osdre.records module."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ood_osdre
from ood_osdre.errors import UserError
from ood_osdre.metrics import OODMetrics
from ood_osdre.records import (
    RunRecord,
    atomic_path,
    command_line,
    git_commit,
    library_versions,
    platform_summary,
    write_json_atomic,
    write_text_atomic,
)


def test_replaces_the_file_only_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a b.json"
    write_text_atomic(path, "old é")

    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.suffix == path.suffix
        temporary.write_text("new")
        assert path.read_text(encoding="utf-8") == "old é"

    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_error_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    write_text_atomic(path, "old")

    def half() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(UserError if error is OSError else error):
        half()

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_text_atomic(path, "old")
    code = (
        "import os, sys; from ood_osdre.records import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run([sys.executable, "-c", code, path], check=False, env=_env())

    assert result.returncode == -9
    assert path.read_text() == "old"


def test_the_data_reach_the_disk_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def spy(name: str) -> Callable[..., None]:
        original = getattr(os, name)

        def called(*args: object) -> None:
            calls.append(name)
            original(*args)

        return called

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, spy(name))

    write_text_atomic(tmp_path / "a", "text")

    assert calls[:2] == ["fsync", "replace"]


def test_permissions_follow_the_umask_and_links_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.touch()
    link.symlink_to(target)
    plain = tmp_path / "plain"
    plain.touch()
    write_text_atomic(link, "text")

    assert link.is_symlink()
    assert target.read_text() == "text"
    assert target.stat().st_mode == plain.stat().st_mode


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder" / "x").mkdir(parents=True)
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match=r"folder: cannot be written: .*irectory"):
        write_text_atomic(tmp_path / "folder", "")
    with pytest.raises(UserError, match="cannot be written"):
        write_text_atomic(tmp_path / "file" / "a", "")

    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_json_round_trip(tmp_path: Path) -> None:
    @dataclass
    class Config:
        path: Path
        rates: tuple[float, ...]

    obj = {
        "config": Config(Path("./my data"), (1e-3, 1.0)),
        "metrics": OODMetrics(1.0, 0.0, 1.0, 1.0, 0.0),
        "array": np.eye(2, dtype=np.float32),
        "numbers": [np.int64(3), np.float64(0.5), True, None, "é\udcff"],
        10: np.bool_(False),
    }
    write_json_atomic(tmp_path / "a.json", obj)

    assert json.loads((tmp_path / "a.json").read_text()) == {
        "config": {"path": "my data", "rates": [1e-3, 1.0]},
        "metrics": OODMetrics(1.0, 0.0, 1.0, 1.0, 0.0)._asdict(),
        "array": [[1.0, 0.0], [0.0, 1.0]],
        "numbers": [3, 0.5, True, None, "é\udcff"],
        "10": False,
    }


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, np.float32("nan"), np.array([1, -math.inf])]
)
def test_json_never_holds_what_is_not_a_number(value: object, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text_atomic(path, "old")

    with pytest.raises(UserError, match=r"run.json: 'validation.loss\[1\].* is (nan|-?inf)"):
        write_json_atomic(path, {"validation": {"loss": [0.5, value]}})

    assert path.read_text() == "old"


@pytest.mark.parametrize("value", [{1, 2}, object(), 1j, {None: 1}, {True: 1}, b"a"])
def test_json_refuses_other_types_by_their_key(value: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'config\.a'"):
        write_json_atomic(tmp_path / "a.json", {"config": {"a": value}})


def test_record_holds_the_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["eval_ood.py", "--data-root", "../my data", "--out=./o"]
    monkeypatch.setattr(sys, "argv", arguments)
    record = RunRecord(config={"steps": 3}, seed=1, absent=["svhn"], score_seconds=2.5)
    record.write(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    read = json.loads(text)

    assert read["command"] == arguments
    assert read["config"] == {"steps": 3}
    assert (read["seed"], read["absent"], read["score_seconds"]) == (1, ["svhn"], 2.5)
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
