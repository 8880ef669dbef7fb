r"""Tests for the ood_osdre.files module."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import ood_osdre
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import OODMetrics
from ood_osdre.files import atomic_path, sweep, write_json_atomic, write_text_atomic


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
        "import os, sys; from ood_osdre.files import atomic_path\n"
        "with atomic_path(sys.argv[1]) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.fspath(Path(ood_osdre.__file__).parent.parent)}
    result = subprocess.run([sys.executable, "-c", code, path], check=False, env=env)

    assert result.returncode == -9
    assert path.read_text() == "old"

    # What it left is swept once it is old, and nothing else is.
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    sweep(tmp_path, age=0.0)
    assert list(tmp_path.iterdir()) == [path]


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

    calls.clear()
    with atomic_path(tmp_path / "a", flush=False) as temporary:
        temporary.write_text("less important")
    assert calls == ["replace"]


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


def test_what_is_no_regular_file_is_written_in_place(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link.csv"
    os.mkfifo(fifo)
    link.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with atomic_path(link) as place:
            place.write_text("rows")
        assert os.read(reader, 9) == b"rows"
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["fifo", "link.csv"]


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder" / "x").mkdir(parents=True)
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match=r"folder: cannot be written: .*irectory"):
        write_text_atomic(tmp_path / "folder", "")
    with pytest.raises(UserError, match="cannot be written"):
        write_text_atomic(tmp_path / "file" / "a", "")

    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_a_working_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="a: cannot be written"), atomic_path("a"):
        pass


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
