r"""Checkpoints: tensors in safetensors, everything else in JSON, written atomically, no pickles.

A checkpoint `NAME` in a folder is two files. `NAME-DIGEST.safetensors` holds the tensors;
`NAME.json` names that file, its SHA-256 and the metadata, and is replaced last. Whatever kills
the writer, the folder holds the old checkpoint or the new one, and a file that was cut short or
edited is refused by name.
"""

__all__ = ["MODEL", "STATE", "exists", "read_checkpoint", "restore", "write_checkpoint"]

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from .errors import UserError
from .files import atomic_path, write_json_atomic

MODEL, STATE = "model", "state"
VERSION = 1


def exists(folder: Path, name: str) -> bool:
    r"""Returns whether a folder holds a checkpoint of that name."""
    return (folder / f"{name}.json").is_file()


def write_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> None:
    r"""Writes a checkpoint, replacing an older one of the same name.

    Arguments:
        folder: The folder, created if needed.
        name: The name of the checkpoint.
        tensors: The tensors by name.
        metadata: What goes into the JSON file.
    """
    content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    final = folder / f"{name}-{digest[:12]}.safetensors"
    with atomic_path(final) as temporary:
        temporary.write_bytes(content)
    write_json_atomic(
        folder / f"{name}.json",
        {"format": VERSION, "tensors": final.name, "sha256": digest, **metadata},
    )
    for stale in folder.glob(f"{name}-*.safetensors"):
        if stale != final:
            stale.unlink()


def read_checkpoint(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    r"""Reads a checkpoint.

    Arguments:
        folder: The folder.
        name: The name of the checkpoint.

    Returns:
        The tensors by name, on the CPU, and the metadata.

    Raises:
        UserError: If a file is missing, cut short, edited, or of another format.
    """
    path = folder / f"{name}.json"
    try:
        metadata = json.loads(path.read_text())
        tensors, digest = folder / metadata["tensors"], metadata["sha256"]
        if metadata["format"] != VERSION:
            raise UserError(f"{path}: format {metadata['format']}, expected {VERSION}.")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder}: no checkpoint here, expected a file {name}.json.") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a checkpoint of ood_osdre ({error!r}).") from None
    try:
        content = tensors.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{tensors}: missing, {path.name} expects it.") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{tensors}: truncated or changed, its SHA-256 is not {path.name}'s.")
    try:
        return load(content), metadata
    except SafetensorError as error:
        raise UserError(f"{tensors}: not a safetensors file ({error}).") from None


def restore(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    r"""Loads tensors into a module, refusing those of another architecture in one line.

    Arguments:
        module: The module.
        tensors: The tensors of its state, by name.
        source: The file to name in messages.
    """
    own = module.state_dict()
    wrong = [
        f"{key} {_shape(tensors.get(key))}, expected {_shape(own.get(key))}"
        for key in sorted(own.keys() | tensors.keys())
        if _shape(tensors.get(key)) != _shape(own.get(key))
    ]
    if wrong:
        raise UserError(
            f"{source}: a checkpoint of another architecture: {wrong[0]} "
            f"({len(wrong)} of {len(own)} tensors differ)."
        )
    module.load_state_dict(dict(tensors))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))
