r"""What may befall a checkpoint: damage, edits, pickles, other models, a full disk, a kill."""

import errno
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_training import assert_identical, batches, make
from torch import nn

from ood_osdre.cli import main
from ood_osdre.data.inputs import read
from ood_osdre.detectors.scorer import load_scorer, read_model
from ood_osdre.errors import FAILED, UserError
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.objectives import Batch
from ood_osdre.training.checkpoint import (
    FORMAT,
    MODEL,
    STATE,
    read_checkpoint,
    restore,
    write_checkpoint,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}
METADATA = {"step": 3, "run": {"lr": 1e-3}, "nested": {"a": [1, 2.5], "b": "x"}, "none": None}
NAME = f"{MODEL}.safetensors"


def test_a_checkpoint_is_one_file_that_safetensors_reads(tmp_path: Path) -> None:
    digests = set()
    for factor in (1, 2):  # the second replaces the first
        tensors = {k: factor * v for k, v in TENSORS.items()}
        write_checkpoint(tmp_path, MODEL, tensors, {**METADATA, "step": factor})
        digests.add(read_checkpoint(tmp_path, MODEL)[2])
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert len(digests) == 2

    read, metadata, digest = read_checkpoint(tmp_path, MODEL)
    assert metadata == {**METADATA, "step": 2}
    for found in (read, load_file(tmp_path / NAME)):
        assert found.keys() == TENSORS.keys()
        assert all(torch.equal(found[k], 2 * v) for k, v in TENSORS.items())
    with safe_open(tmp_path / NAME, "pt") as file:
        header = file.metadata()
    assert (header["format"], header["sha256"]) == (FORMAT, digest)
    assert json.loads(header["metadata"]) == metadata


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def renamed(content: bytes) -> bytes:
    return content.replace(FORMAT.encode(), FORMAT.replace("2", "9").encode())


random.seed(0)
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    **{
        f"cut at {share:.0%}": (lambda content, share=share: content[: int(share * len(content))])
        for share in sorted(random.random() for _ in range(8))
    },
    "the last byte is gone": lambda content: content[:-1],
    "empty": lambda content: b"",
    "gone": lambda content: None,
    "a byte of the weights": lambda content: flipped(content, len(content) - 3),
    "a byte of the metadata": lambda content: flipped(content, content.index(b"step") + 8),
    "a byte of a tensor's name": lambda content: content.replace(b'"a":', b'"c":'),
    "another version": renamed,
    "JSON": lambda content: b'{"format": 1}',
    "pickle": lambda content: pickle.dumps(TENSORS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name_in_one_line(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path, MODEL, TENSORS, METADATA)
    path = tmp_path / NAME
    content = DAMAGES[damage](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(UserError, match=NAME) as error:
        read_checkpoint(tmp_path, MODEL)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("metadata", [{"config": "x"}, {"config": {}, "classes": "two"}])
def test_metadata_of_other_types_are_no_model(tmp_path: Path, metadata: object) -> None:
    write_checkpoint(tmp_path, MODEL, TENSORS, metadata)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=NAME):
        read_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"my notes", "safetensors"])
def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / NAME
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file(TENSORS, path, {"format": "pt"})
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"{NAME}: is there already and no checkpoint"):
        write_checkpoint(tmp_path, MODEL, TENSORS, METADATA)
    assert path.read_bytes() == before


LINEAR = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (nn.Linear(4, 3).state_dict(), r"bias \(3,\), expected \(2,\)"),
        (nn.Linear(4, 2, bias=False).state_dict(), r"bias absent, expected \(2,\)"),
        ({**LINEAR.state_dict(), "more": torch.ones(1)}, r"more \(1,\), expected absent"),
        ({**LINEAR.state_dict(), "bias": torch.tensor([1, 2])}, r"bias \(2,\) of integers"),
        *[
            ({**LINEAR.state_dict(), "bias": torch.tensor([0.0, bad])}, "bias holds NaN or inf")
            for bad in (torch.nan, torch.inf, -torch.inf)
        ],
    ],
)
def test_weights_of_another_architecture_or_not_finite_are_refused(
    tensors: dict[str, torch.Tensor], message: str
) -> None:
    module = nn.Linear(4, 2)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(UserError, match=message) as error:
        restore(module, tensors, Path("model.safetensors"))
    assert str(error.value).startswith("model.safetensors: ")
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


def test_metadata_that_json_cannot_hold_leave_the_old_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MODEL, TENSORS, {"loss": 1.0})
    with pytest.raises(UserError, match=rf"{NAME}: 'loss' is nan"):
        write_checkpoint(tmp_path, MODEL, {"a": TENSORS["a"] + 1}, {"loss": float("nan")})
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert read_checkpoint(tmp_path, MODEL)[1] == {"loss": 1.0}


def test_a_reader_beside_a_writer_and_after_its_death_finds_the_old_or_the_new(
    tmp_path: Path,
) -> None:
    def write_for_ever() -> None:
        for step in range(10**6):
            write_checkpoint(tmp_path, MODEL, {"a": torch.full((10_000,), step)}, {"step": step})

    steps = []
    for life in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3):
        pid = os.fork()
        if not pid:
            try:
                write_for_ever()
            finally:
                os._exit(1)
        while not (tmp_path / NAME).is_file():
            time.sleep(0.001)
        deadline = time.monotonic() + life
        try:
            while time.monotonic() < deadline:
                read_checkpoint(tmp_path, MODEL)
        finally:
            os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        tensors, metadata, _ = read_checkpoint(tmp_path, MODEL)
        assert (tensors["a"] == metadata["step"]).all()
        steps.append(metadata["step"])
    assert max(steps) > 0


class Bomb:
    r"""Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.trace),)


# Everything that reads a file somebody may have swapped, by the file's name.
READERS: dict[str, Callable[[Path], object]] = {
    NAME: lambda path: load_scorer(path.parent),
    f"{STATE}.safetensors": lambda path: make(path.parent).run(progress=False, resume=True),
    "scores.npz": read_scores,
    "images.npy": lambda path: read(path, 32, "images"),
    "list.txt": lambda path: read(path, 32, "images"),
    "image.png": lambda path: read(path.parent, 32, "images"),
}


@pytest.mark.parametrize("wrapping", ["0", "2", "5", "torch", "numpy"])
@pytest.mark.parametrize("name", READERS)
def test_a_pickle_is_never_unpickled(tmp_path: Path, name: str, wrapping: str) -> None:
    trace, path = tmp_path / "trace", tmp_path / "files" / name
    path.parent.mkdir()
    if wrapping == "torch":
        torch.save({"a": Bomb(trace)}, path)
    elif wrapping == "numpy":
        bomb = np.empty(1, dtype=object)
        bomb[0] = Bomb(trace)
        with path.open("wb") as file:
            np.save(file, bomb, allow_pickle=True)
    else:
        path.write_bytes(pickle.dumps(Bomb(trace), int(wrapping)))
    with pytest.raises(UserError) as error:
        READERS[name](path)
    assert "\n" not in str(error.value)
    assert not trace.exists()

    if wrapping.isdigit():  # the bomb is live
        pickle.loads(path.read_bytes())
        assert trace.exists()


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


@pytest.mark.parametrize("after", [0, 5000])
def test_a_disk_that_fills_up_half_way_through_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
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
    assert read_checkpoint(tmp_path, STATE)[1]["step"] == 14
    # With room again, the run goes on as if nothing had happened.
    whole, resumed = make(), make(tmp_path)
    whole.run(progress=False)
    resumed.run(progress=False, resume=True)
    assert_identical(whole, resumed)


def test_the_command_refuses_bad_weights_in_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    folder, out = tmp_path / "run", tmp_path / "out"
    options = ["network.width=0.125", "network.depths=[1,1,1,1]", "network.stem_stride=2"]
    options += ["training.batch_size=8", "data.val_limit=10", "--quiet", "--device", "cpu"]
    assert main(["--out", str(folder), "--max-steps", "2", *options]) == 0
    content = (folder / NAME).read_bytes()
    tensors, metadata, _ = read_checkpoint(folder, MODEL)
    wrong = {k: (v[..., :1] if "class_head.weight" in k else v) for k, v in tensors.items()}
    bad = {k: (v * float("nan") if k.endswith("head.bias") else v) for k, v in tensors.items()}

    def swap(changed: dict[str, torch.Tensor]) -> Callable[[], object]:
        return lambda: write_checkpoint(folder, MODEL, changed, metadata)

    for damage, message in (
        (lambda: (folder / NAME).write_bytes(content[:-100]), "truncated"),
        (lambda: (folder / NAME).write_bytes(flipped(content, -1 + len(content))), "changed"),
        (swap(wrong), "another architecture"),
        (swap(bad), "holds NaN or infinity"),
        ((folder / NAME).unlink, "no checkpoint here"),
    ):
        (folder / NAME).write_bytes(content)
        damage()
        before = {p.name: p.read_bytes() for p in folder.iterdir()}
        capsys.readouterr()
        assert main(["--checkpoint", str(folder), "--out", str(out), "--quiet"]) == FAILED
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
        assert line.startswith("error: ")
        assert message in line
        assert NAME in line
        assert not out.exists()
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# Of the six images below; the run that it is of says the same again.
SCORES = [-2.335191, -0.839157, -0.654515, -0.740945, -0.369344, -0.297780]


def test_a_checkpoint_of_the_past_loads_and_scores() -> None:
    r"""It was made once, by a run that ends with these scores:

        python -m ood_osdre.cli --config digits_representation --device cpu --out OUT \
            network.kind=speed network.width=0.125 training.steps=60 \
            head.rank=8 head.width=16 head.depth=1 head.training.steps=60

    `model.safetensors` of it is kept; the numbers are its scores of the images below.
    """
    torch.set_default_dtype(torch.float32)
    folder = Path(__file__).parent / "checkpoint"
    assert (folder / "model.safetensors").stat().st_size < 100_000
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    images //= np.arange(1, 7, dtype=np.uint8)[:, None, None, None]
    scorer = load_scorer(folder)
    np.testing.assert_allclose(scorer.score(images), SCORES, atol=1e-4)
    assert scorer.metadata["reference"] == "digits567_china"
