r"""Tests for the ood_osdre.training.checkpoint module."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ood_osdre.errors import UserError
from ood_osdre.training.checkpoint import (
    exists,
    read_checkpoint,
    restore,
    write_checkpoint,
)

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


def tensor_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    assert not exists(tmp_path, "model")
    for factor in (1, 2):
        tensors = {k: factor * v for k, v in TENSORS.items()}
        write_checkpoint(tmp_path, "model", tensors, {"step": factor})
        read, metadata = read_checkpoint(tmp_path, "model")

        assert metadata["step"] == factor
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[k], tensors[k]) for k in read)
    assert exists(tmp_path, "model")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_crash_between_the_two_files_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "model", TENSORS, {"step": 1})

    def crash(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ood_osdre.training.checkpoint.write_json_atomic", crash)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, "model", {"a": TENSORS["a"] + 1}, {"step": 2})
    monkeypatch.undo()

    read, metadata = read_checkpoint(tmp_path, "model")
    assert metadata["step"] == 1
    assert torch.equal(read["a"], TENSORS["a"])


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path, "model", TENSORS, {})
    file = tensor_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    match damage:
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "flip":
            file.write_bytes(content)
        case "gone":
            file.unlink()
        case "empty":
            file.write_bytes(b"")

    with pytest.raises(UserError, match=file.name) as error:
        read_checkpoint(tmp_path, "model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"pickle"', "\x80\x04"])
def test_a_json_file_that_is_no_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.json: not a checkpoint"):
        read_checkpoint(tmp_path, "model")


def test_a_missing_checkpoint_and_another_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint here"):
        read_checkpoint(tmp_path, "model")

    write_checkpoint(tmp_path, "model", TENSORS, {})
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        read_checkpoint(tmp_path, "model")


def test_restoring_another_architecture_is_one_line() -> None:
    with pytest.raises(UserError, match=r"bias \(3,\), expected \(2,\)"):
        restore(nn.Linear(4, 2), nn.Linear(4, 3).state_dict(), Path("model.json"))
    with pytest.raises(UserError, match=r"bias absent"):
        restore(nn.Linear(4, 2), nn.Linear(4, 2, bias=False).state_dict(), Path("model.json"))
