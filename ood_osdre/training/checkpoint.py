r"""Checkpoints: one safetensors file each, metadata in its header, written atomically, no pickles.

Whatever kills the writer, the folder holds the old checkpoint or the new one. The header also holds
a SHA-256 of tensors and metadata, so a file that was cut short or edited is refused by name. So are
weights that are not finite.
"""

__all__ = [
    "MODEL",
    "STATE",
    "checkpoint_path",
    "pack_state",
    "read_checkpoint",
    "restore",
    "unpack_state",
    "write_checkpoint",
]

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import UserError, one_line
from ..files import as_json, atomic_path, is_regular, sweep

MODEL, STATE = "model", "state"
FORMAT = "ood_osdre checkpoint 2"


def checkpoint_path(folder: Path, name: str) -> Path:
    r"""Returns the file of a checkpoint, whether it is there or not."""
    return folder / f"{name}.safetensors"


def write_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> str:
    r"""Writes a checkpoint, replacing an older one of the same name.

    Arguments:
        folder: The folder, created if needed.
        name: The name of the checkpoint.
        tensors: The tensors by name.
        metadata: What goes into the header, in types that JSON has.

    Returns:
        The checkpoint's SHA-256.

    Raises:
        UserError: If the folder has a file of that name that is no checkpoint, or it cannot be
            written, or the metadata hold NaN or infinity.
    """
    path = checkpoint_path(folder, name)
    if is_regular(path) and _header(path).get("format") != FORMAT:
        raise UserError(f"{path}: is there already and no checkpoint; choose another folder.")
    try:
        text = json.dumps(as_json(metadata))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    # Cloned, as storage that is shared cannot be written.
    content = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
    digest = _digest(content, text)
    header = {"format": FORMAT, "sha256": digest, "metadata": text}
    with atomic_path(path) as temporary:
        save_file(content, temporary, header)
    sweep(folder)
    return digest


def read_checkpoint(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    r"""Reads a checkpoint.

    Arguments:
        folder: The folder.
        name: The name of the checkpoint.

    Returns:
        The tensors by name, on the CPU, the metadata as they were written, and the SHA-256.

    Raises:
        UserError: If the file is missing, cut short, edited, or of another format.
    """
    path = checkpoint_path(folder, name)
    if not path.is_file():
        seeds = sorted(folder.glob(f"seed-*/{path.name}"))
        hint = f"; {seeds[0].parent} holds one" if seeds else ""
        raise UserError(f"{folder}: no checkpoint here, expected a file {path.name}{hint}.")
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise UserError(f"{path}: not a checkpoint of this version, expected {FORMAT!r}.")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated, or no checkpoint ({one_line(error, 80)}).") from None
    text = header.get("metadata", "")
    if _digest(tensors, text) != header.get("sha256"):
        raise UserError(f"{path}: changed, its SHA-256 is not the one it was written with.")
    return tensors, json.loads(text), header["sha256"]


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


def pack_state(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    r"""Returns the tensors of modules, under their names, and of their optimiser.

    Arguments:
        modules: The modules by name.
        optimizer: The optimiser, whose tensors are stored as `optimizer.INDEX.NAME`.
    """
    tensors = {
        f"{part}.{key}": value
        for part, module in modules.items()
        for key, value in module.state_dict().items()
    }
    for index, values in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in values.items()}
    return tensors


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
        prefix = f"{part}."
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        restore(module, own, source)
    state: dict[int, dict[str, Tensor]] = {}
    try:
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".")
                state.setdefault(int(index), {})[name] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (ValueError, KeyError) as error:
        reason = one_line(error, 80)
        raise UserError(f"{source}: the optimiser's tensors are not its own ({reason}).") from None


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    r"""Returns the SHA-256 of tensors, their names and types, and of a text."""
    hasher = hashlib.sha256(text.encode())
    for key, value in sorted(tensors.items()):
        hasher.update(f"{key}:{value.dtype}{tuple(value.shape)};".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _header(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    # Precisions may differ, but weights are no integers.
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else ' of integers'}"
