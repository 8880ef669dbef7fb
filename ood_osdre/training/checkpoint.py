r"""Checkpoints: one safetensors file each, metadata in its header, written atomically, no pickles.

Whatever kills the writer, the folder holds the old checkpoint or the new one. The header also holds
a SHA-256 of tensors and metadata, so a file that was cut short or edited is refused by name. So are
weights that are not finite.
"""

__all__ = [
    "MODEL",
    "STATE",
    "checkpoint_path",
    "input_shape",
    "model_metadata",
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
from safetensors.torch import save
from torch import Tensor, nn

from ..data.transforms import Standardiser
from ..errors import UserError, one_line
from ..files import as_json, atomic_path, is_regular, sweep
from ..options import Options
from .run import MODEL, STATE

FORMAT = "ood_osdre checkpoint 2"
# Of images.
CHANNELS = 3


def checkpoint_path(folder: Path, name: str) -> Path:
    r"""Returns the file of a checkpoint, whether it is there or not."""
    return folder / f"{name}.safetensors"


def write_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> str:
    r"""Writes a checkpoint, replacing an older one of the same name, and returns its SHA-256.

    Arguments:
        folder: The folder, created if needed.
        name: The name of the checkpoint.
        tensors: The tensors by name.
        metadata: What goes into the header, in types that JSON has.

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
    with atomic_path(path) as temporary:
        # Not `save_file`, whose errors, temporary file and permissions are its own.
        header = {"format": FORMAT, "sha256": digest, "metadata": text}
        temporary.write_bytes(save(content, header))
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
    problem = ""
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        problem = f"truncated, or no checkpoint ({one_line(error, 80)})"
    else:
        text, digest = header.get("metadata", ""), header.get("sha256", "")
        if header.get("format") != FORMAT:
            problem = f"not a checkpoint of this version, expected {FORMAT!r}"
        elif _digest(tensors, text) != digest:
            problem = "changed, its SHA-256 is not the one it was written with"
    if problem:
        raise UserError(f"{path}: {problem}.")
    return tensors, json.loads(text), digest


def input_shape(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    r"""Returns the shape of one input of a network: channels and sides, or a dimension."""
    size, dim = metadata["size"], metadata.get("dim")
    return (CHANNELS, size, size) if dim is None else (dim,)


def model_metadata(
    config: Options,
    classes: int,
    preprocess: Standardiser,
    size: int,
    reference: str | None,
    **facts: object,
) -> dict[str, Any]:
    r"""Returns what is stored with a model: how to build it again, on what it was trained.

    Arguments:
        config: Its configuration.
        classes: The number of ID classes, 0 without labels.
        preprocess: The preprocessing, with the statistics of the ID data.
        size: The side of the images in pixels.
        reference: The name of the reference; None if it has none.
        facts: What else is known: the dimension `dim` of vectors, `backbone`, checksums.
    """
    mean, std = (value.tolist() for value in preprocess.statistics)
    own = {"config": config.to_dict(), "classes": classes, "mean": mean, "std": std}
    return {**own, "size": size, "reference": reference, **facts}


def restore(module: nn.Module, tensors: Mapping[str, Tensor], source: Path) -> None:
    r"""Loads tensors into a module.

    Arguments:
        module: The module.
        tensors: The tensors of its state, by name.
        source: The file to name in messages.

    Raises:
        UserError: If the tensors are those of another architecture, or not finite.
    """
    own, problems = module.state_dict(), []
    for key in sorted(own.keys() | tensors.keys()):
        found, expected = _shape(tensors.get(key)), _shape(own.get(key))
        if found != expected:
            problems.append(f"of another architecture: {key} {found}, expected {expected}")
        elif tensors[key].is_floating_point() and not tensors[key].isfinite().all():
            problems.append(f"{key} holds NaN or infinity, expected finite weights")
    if problems:
        more = f"{len(problems)} of {len(own)} tensors are wrong"
        raise UserError(f"{source}: {problems[0]} ({more}).")
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
    r"""Puts the tensors of :func:`pack_state` back into modules and optimiser, as :func:`restore`."""
    for part, module in modules.items():
        prefix = f"{part}."
        own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        restore(module, own, source)
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    r"""Returns the SHA-256 of tensors, their names and types, and of a text."""
    hasher = hashlib.sha256(text.encode())
    for key, value in sorted(tensors.items()):
        hasher.update(f"{key}:{value.dtype}{tuple(value.shape)};".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _header(path: Path) -> dict[str, str]:
    r"""Returns the header of a safetensors file; empty for any other file."""
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
