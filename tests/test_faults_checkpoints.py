r"""What may befall a checkpoint: damage, edits, pickles, other models, a full disk."""

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_training import OPTIONS, assert_identical, batches, make
from torch import nn

from ood_osdre.cli import FAILED, main
from ood_osdre.data.inputs import read
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import UserError
from ood_osdre.evaluation.scorer import load_scorer
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.files import write_json_atomic
from ood_osdre.objectives import Batch
from ood_osdre.training import checkpoint as checkpoints
from ood_osdre.training.checkpoint import (
    MODEL,
    STATE,
    read_checkpoint,
    restore,
    write_checkpoint,
)

TENSORS = {"a": torch.arange(6.0)}


class Bomb:
    r"""Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.trace),)


def readers(folder: Path) -> dict[str, Callable[[Path], object]]:
    r"""Returns everything that reads a file somebody may have swapped, by the file's name."""
    return {
        "model.json": lambda path: load_scorer(path.parent),
        "state.json": lambda path: make(path.parent).run(progress=False, resume=True),
        "scores.npz": read_scores,
        "images.npy": lambda path: read(path, 32, "images"),
        "list.txt": lambda path: read(path, 32, "images"),
        "image.png": lambda path: read(path.parent, 32, "images"),
    }


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", readers(Path()))
def test_a_pickle_is_never_unpickled(tmp_path: Path, name: str, protocol: int) -> None:
    trace, path = tmp_path / "trace", tmp_path / "files" / name
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Bomb(trace), protocol))
    with pytest.raises(UserError) as error:
        readers(tmp_path)[name](path)
    assert "\n" not in str(error.value)
    assert not trace.exists()

    # The bomb is live.
    pickle.loads(path.read_bytes())
    assert trace.exists()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_pickles_in_their_usual_wrapping_are_not_unpickled_either(
    tmp_path: Path, kind: str
) -> None:
    trace = tmp_path / "trace"
    bomb = np.empty(1, dtype=object)
    bomb[0] = Bomb(trace)
    write_checkpoint(tmp_path, MODEL, TENSORS, {})
    (file,) = tmp_path.glob("*.safetensors")
    if kind == "torch":
        torch.save({"a": Bomb(trace)}, file)
        with pytest.raises(UserError, match="truncated or changed"):
            load_scorer(tmp_path)
        # Even if the sum is right, the tensors' file must be safetensors.
        content = json.loads((tmp_path / "model.json").read_text())
        content["sha256"] = sha256(file.read_bytes())
        write_json_atomic(tmp_path / "model.json", content)
        with pytest.raises(UserError, match="not a safetensors file"):
            read_checkpoint(tmp_path, MODEL)
    else:
        np.save(tmp_path / "x.npy", bomb, allow_pickle=True)
        with pytest.raises(UserError, match=r"not a (readable|whole .npy) array"):
            read(tmp_path / "x.npy", 32, "images")
    assert not trace.exists()


def sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("key", ["step", "run", "nested.b", "added"])
def test_edited_metadata_are_refused(tmp_path: Path, key: str) -> None:
    metadata = {"step": 3, "run": {"lr": 1e-3}, "nested": {"a": [1, 2.5], "b": "x"}, "none": None}
    write_checkpoint(tmp_path, MODEL, TENSORS, metadata)
    assert read_checkpoint(tmp_path, MODEL)[1] == metadata

    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    # Another layout is the same content.
    path.write_text(json.dumps(dict(reversed(content.items()))))
    assert read_checkpoint(tmp_path, MODEL)[1] == metadata

    section, _, name = key.rpartition(".")
    (content[section] if section else content)[name] = 4
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.json: edited"):
        read_checkpoint(tmp_path, MODEL)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    module = nn.Linear(2, 2)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    state["bias"][1] = bad
    with pytest.raises(UserError, match=r"bias holds NaN or infinity \(1 of 2 tensors do\)"):
        restore(module, state, Path("model.json"))
    assert torch.isfinite(module.bias).all()


def test_metadata_that_json_cannot_hold_leave_the_old_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MODEL, TENSORS, {"loss": 1.0})
    before = {p.name for p in tmp_path.iterdir()}
    with pytest.raises(UserError, match="'loss' is nan"):
        write_checkpoint(tmp_path, MODEL, {"a": TENSORS["a"] + 1}, {"loss": float("nan")})
    assert {p.name for p in tmp_path.iterdir()} == before
    assert read_checkpoint(tmp_path, MODEL)[1] == {"loss": 1.0}


@pytest.mark.parametrize("tensors", [".", "..", "", 3, None, ["a"]])
def test_a_tensors_file_that_is_none_is_refused(tmp_path: Path, tensors: object) -> None:
    content = {"format": 1, "tensors": tensors, "sha256": ""}
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.json|cannot be read"):
        read_checkpoint(tmp_path, MODEL)


def full_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    r"""Makes the disk full after some bytes of the next files, as the system would say it."""
    write = Path.write_bytes
    room = after

    def write_bytes(self: Path, content: bytes) -> int:
        nonlocal room
        write(self, content[:room])
        if len(content) > room:
            room = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        room -= len(content)
        return len(content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.mark.parametrize("after", [0, 100, 5000, 20_000])
def test_a_disk_that_fills_up_half_way_through_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    whole = make()
    whole.run(progress=False)
    trainer = make(tmp_path)

    def filling(step: int) -> Batch:
        if step == 20:  # two checkpoints of seven steps are on the disk
            full_disk(monkeypatch, after)
        return batches(step)

    trainer.batches = filling
    with pytest.raises(UserError, match="cannot be written: No space left on device") as error:
        trainer.run(progress=False)
    monkeypatch.undo()

    assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob(".*tmp*"))
    _, metadata = read_checkpoint(tmp_path, STATE)
    assert metadata["step"] == 14
    # With room again, the run goes on as if nothing had happened.
    resumed = make(tmp_path)
    resumed.run(progress=False, resume=True)
    assert_identical(whole, resumed)
    assert len(list(tmp_path.glob("state-*.safetensors"))) == 1


def test_a_full_disk_at_the_end_keeps_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, OPTIONS.replace(steps=14))
    finish = trainer._finish

    def full() -> None:
        full_disk(monkeypatch, 10)
        finish()

    trainer._finish = full  # type: ignore[method-assign]
    with pytest.raises(UserError, match="No space left"):
        trainer.run(progress=False)
    monkeypatch.undo()
    assert not checkpoints.exists(tmp_path, MODEL)
    assert read_checkpoint(tmp_path, STATE)[1]["step"] == 14

    resumed = make(tmp_path, OPTIONS.replace(steps=14))
    assert resumed.run(progress=False, resume=True).finished
    assert checkpoints.exists(tmp_path, MODEL)


def small_detector() -> OneStepDetector:
    detector = OneStepDetector(
        {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}},
        device="cpu",
        progress=False,
        training__steps=2,
    )
    rng = np.random.default_rng(0)
    return detector.fit(rng.normal(size=(20, 2)), rng.normal(size=(20, 2)))


def test_a_full_disk_while_a_detector_is_saved_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float32)
    x = np.random.default_rng(1).normal(size=(30, 2))
    detector = small_detector().calibrate(x, 0.2)
    detector.save(tmp_path)
    full_disk(monkeypatch, 50)
    with pytest.raises(UserError, match="No space left"):
        small_detector().calibrate(x + 1, 0.3).save(tmp_path)
    monkeypatch.undo()
    assert (OneStepDetector.load(tmp_path).pvalue(x) == detector.pvalue(x)).all()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda f: f.write_bytes(f.read_bytes()[:-100]),
    "empty": lambda f: f.write_bytes(b""),
    "edited": lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\xff"),
    "gone": Path.unlink,
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("run")
    options = ["network.width=0.125", "network.depths=[1,1,1,1]", "network.stem_stride=2"]
    options += ["training.batch_size=8", "data.val_limit=10", "--quiet", "--device", "cpu"]
    assert main(["--out", str(folder), "--max-steps", "2", *options]) == 0
    return folder


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in run_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_command_refuses_a_damaged_checkpoint_in_one_line(
    copy: Path, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = copy.glob("model-*.safetensors")
    DAMAGES[damage](file)
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    out = tmp_path / "out"
    assert main(["--checkpoint", str(copy), "--out", str(out), "--quiet"]) == FAILED

    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
    assert line.startswith("error: ")
    assert file.name in line
    assert not out.exists()
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before


def test_the_command_refuses_weights_of_another_architecture_and_nan(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, metadata = read_checkpoint(copy, MODEL)
    wrong = {k: (v[..., :1] if "class_head.weight" in k else v) for k, v in tensors.items()}
    bad = {k: (v * float("nan") if k.endswith("head.bias") else v) for k, v in tensors.items()}
    for changed, message in ((wrong, "another architecture"), (bad, "holds NaN or infinity")):
        write_checkpoint(copy, MODEL, changed, metadata)
        command = ["--checkpoint", str(copy), "--out", str(tmp_path / "out"), "--quiet"]
        assert main(command) == FAILED
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
