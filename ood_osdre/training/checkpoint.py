r"""Checkpoints: tensors in safetensors, everything else in JSON, written atomically, no pickles.

A checkpoint `NAME` in a folder is two files. `NAME-DIGEST.safetensors` holds the tensors;
`NAME.json` names that file, holds the metadata and the SHA-256 of both, and is replaced last.
Whatever kills the writer, the folder holds the old checkpoint or the new one, and a file that was
cut short or edited is refused by name. So are weights that are not finite.

The state of a run as named tensors, to be written to a checkpoint and read back.

Modules are stored under their names, the optimiser's tensors under `optimizer.INDEX.NAME`.
"""

__all__ = [
    "MODEL",
    "STATE",
    "digest_of",
    "exists",
    "pack_state",
    "read_checkpoint",
    "restore",
    "unpack_state",
    "write_checkpoint",
]

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ..errors import UserError, one_line
from ..files import as_json, atomic_path, sweep, write_json_atomic

MODEL, STATE = "model", "state"
VERSION = 1
# What the file says of itself, beside the metadata.
SEAL = "metadata_sha256"
OWN_KEYS = ("format", "tensors", "sha256", SEAL)


def exists(folder: Path, name: str) -> bool:
    r"""Returns whether a folder holds a checkpoint of that name."""
    return (folder / f"{name}.json").is_file()


def write_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> str:
    r"""Writes a checkpoint, replacing an older one of the same name.

    Arguments:
        folder: The folder, created if needed.
        name: The name of the checkpoint.
        tensors: The tensors by name.
        metadata: What goes into the JSON file.

    Returns:
        The SHA-256 of the tensors' file.

    Raises:
        UserError: If the folder has a JSON file of that name that is no checkpoint, or it cannot
            be written.
    """
    path = folder / f"{name}.json"
    _refuse_foreign(path)
    try:
        seal = _seal(as_json(metadata))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    content = save({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
    digest = hashlib.sha256(content).hexdigest()
    final = folder / f"{name}-{digest[:12]}.safetensors"
    with atomic_path(final) as temporary:
        temporary.write_bytes(content)
    own = {"format": VERSION, "tensors": final.name, "sha256": digest, SEAL: seal}
    write_json_atomic(path, {**own, **metadata})
    for stale in folder.glob(f"{name}-*.safetensors"):
        # What a killed process left included, but nobody else's files.
        if stale != final and re.fullmatch(rf"{name}-[0-9a-f]{{12}}", stale.stem):
            stale.unlink()
    sweep(folder)
    return digest


def read_checkpoint(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    r"""Reads a checkpoint.

    Arguments:
        folder: The folder.
        name: The name of the checkpoint.

    Returns:
        The tensors by name, on the CPU, and the metadata as it was written.

    Raises:
        UserError: If a file is missing, cut short, edited, or of another format.
    """
    path = folder / f"{name}.json"
    try:
        metadata = json.loads(path.read_text())
        own = {key: metadata.pop(key) for key in OWN_KEYS}
        tensors, digest = folder / own["tensors"], own["sha256"]
    except (FileNotFoundError, NotADirectoryError):
        seeds = sorted(folder.glob(f"seed-*/{name}.json"))
        hint = f"; {seeds[0].parent} holds one" if seeds else ""
        raise UserError(
            f"{folder}: no checkpoint here, expected a file {name}.json{hint}."
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    # JSON that is broken, too deep or of another shape.
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(repr(error).split())[:80]
        raise UserError(f"{path}: not a checkpoint of ood_osdre ({reason}).") from None
    if own["format"] != VERSION:
        raise UserError(f"{path}: format {own['format']}, expected {VERSION}.")
    if own[SEAL] != _seal(metadata):
        raise UserError(f"{path}: edited, its SHA-256 is not the one it was written with.")
    try:
        content = tensors.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{tensors}: missing, {path.name} expects it.") from None
    except OSError as error:
        raise UserError(f"{tensors}: cannot be read: {error.strerror}.") from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{tensors}: truncated or changed, its SHA-256 is not {path.name}'s.")
    try:
        return load(content), metadata
    except SafetensorError as error:
        raise UserError(f"{tensors}: not a safetensors file ({error}).") from None


def digest_of(folder: Path, name: str) -> str:
    r"""Returns the SHA-256 of the tensors of a checkpoint that has been read."""
    return json.loads((folder / f"{name}.json").read_text())["sha256"]


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
    bad = [k for k, v in tensors.items() if v.is_floating_point() and not v.isfinite().all()]
    if bad:
        raise UserError(
            f"{source}: {bad[0]} holds NaN or infinity ({len(bad)} of {len(own)} tensors do), "
            "expected finite weights."
        )
    module.load_state_dict(dict(tensors))


def _seal(metadata: object) -> str:
    r"""Returns the SHA-256 of metadata, whatever the order and layout of its file."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _refuse_foreign(path: Path) -> None:
    r"""Raises an error if a file is there that is no checkpoint's, and would be replaced."""
    try:
        found = json.loads(path.read_text())
    except OSError:  # nothing there, or nothing that can be written over
        return
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= {*OWN_KEYS}:
        raise UserError(f"{path}: is there already and no checkpoint; choose another folder.")


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    # Precisions may differ, but weights are no integers.
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else ' of integers'}"


def pack_state(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    r"""Returns the tensors of modules and of their optimiser, by name.

    Arguments:
        modules: The modules by name.
        optimizer: The optimiser.
    """
    tensors = {
        f"{part}.{key}": value
        for part, module in modules.items()
        for key, value in module.state_dict().items()
    }
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    # Shared storage cannot be written twice: the kept ratio may be the averaged one.
    return {key: value.clone() for key, value in tensors.items()}


def unpack_state(
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    source: Path,
) -> None:
    r"""Puts tensors back into modules and their optimiser.

    Arguments:
        tensors: The tensors of :func:`pack_state`.
        modules: The modules by name.
        optimizer: The optimiser.
        source: The file to name in messages.

    Raises:
        UserError: If the tensors are those of another architecture.
    """
    for part, module in modules.items():
        own = {k.removeprefix(f"{part}."): v for k, v in tensors.items() if _in(k, part)}
        restore(module, own, source)
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for key, value in tensors.items():
            if _in(key, "optimizer"):
                _, index, name = key.split(".")
                state.setdefault(int(index), {})[name] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        reason = one_line(error, 80)
        raise UserError(f"{source}: the optimiser's tensors are not its own ({reason}).") from None


def _in(key: str, part: str) -> bool:
    return key.startswith(f"{part}.")
