r"""Checkpoints: one safetensors file each, metadata in its header, written atomically, no pickles.

Whatever kills the writer, the folder holds the old checkpoint or the new one. The header also holds
a SHA-256 of tensors and metadata, so a file that was cut short or edited is refused by name. So are
weights that are not finite.

A tensor that a module has under several names, as tied weights are, is stored once. A module's extra
state (`get_extra_state`) may be made of tensors, bytes, numbers, text, lists, tuples and mappings.
"""

__all__ = [
    "MODEL",
    "STATE",
    "checkpoint_path",
    "digest_of",
    "input_shape",
    "model_metadata",
    "pack_state",
    "read_checkpoint",
    "refuse_other_run",
    "restore",
    "through_bytes",
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
from safetensors.torch import load, save
from torch import Tensor, nn

from ..data.transforms import Standardiser
from ..errors import UserError, one_line
from ..files import as_json, atomic_path, is_regular, sweep
from ..options import Options, differences
from .run import MODEL, STATE

FORMAT = "ood_osdre checkpoint 2"
# Where the header holds what is no tensor of its own, if there is such.
OTHERS = "others"
# What follows a key in the names of an extra state's tensors.
PART = "#extra"
CHANNELS = 3  # of images


def checkpoint_path(folder: Path, name: str) -> Path:
    r"""Returns the file of a checkpoint, whether it is there or not."""
    return folder / f"{name}.safetensors"


def digest_of(tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    r"""Returns the SHA-256 that a checkpoint of tensors and metadata has, see :func:`write_checkpoint`."""
    return _packed(tensors, metadata)[1]["sha256"]


def write_checkpoint(
    folder: Path, name: str, tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> None:
    r"""Writes a checkpoint, replacing an older one of the same name.

    Arguments:
        folder: The folder, created if needed.
        name: The name of the checkpoint.
        tensors: The tensors, and the extra states of modules, by name.
        metadata: What goes into the header, in types that JSON has.

    Raises:
        UserError: If the folder has a file of that name that is no checkpoint, or it cannot be
            written, or the metadata hold NaN or infinity.
    """
    path = checkpoint_path(folder, name)
    if is_regular(path) and _header(path).get("format") != FORMAT:
        raise UserError(f"{path}: is there already and no checkpoint; choose another folder.")
    try:
        content, header = _packed(tensors, metadata)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    with atomic_path(path) as temporary:
        # Not `save_file`, whose errors, temporary file and permissions are its own.
        temporary.write_bytes(save(content, header))
    sweep(folder)


def through_bytes(tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns tensors as a checkpoint would give them back, without a file.

    Raises:
        ValueError: If a checkpoint cannot hold them.
    """
    content, header = _packed(tensors, metadata)
    return _unpacked(load(save(content, header)), header)


def read_checkpoint(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    r"""Reads a checkpoint.

    Arguments:
        folder: The folder.
        name: The name of the checkpoint.

    Returns:
        The tensors and extra states by name, on the CPU, the metadata as they were written, and the SHA-256.

    Raises:
        UserError: If the file is missing, cut short, edited, or of another format.
    """
    path = checkpoint_path(folder, name)
    if not path.is_file():
        seeds = sorted(folder.glob(f"seed-*/{path.name}"))
        hint = f"; {seeds[0].parent} holds one" if seeds else ""
        hint = "; finish its training first" if checkpoint_path(folder, STATE).is_file() else hint
        raise UserError(f"{folder}: no checkpoint here, expected a file {path.name}{hint}.")
    problem = ""
    try:
        # Read once: `safe_open` opens the path twice, and a run may replace the file in between.
        content = path.read_bytes()
        tensors, length = load(content), int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    except (SafetensorError, OSError) as error:
        problem = f"truncated, or no checkpoint ({one_line(error, 80)})"
    else:
        text, digest = header.get("metadata", ""), header.get("sha256", "")
        if header.get("format") != FORMAT:
            problem = f"not a checkpoint of this version, expected {FORMAT!r}"
        elif _digest(tensors, text + header.get(OTHERS, "")) != digest:
            problem = "changed, its SHA-256 is not the one it was written with"
    if problem:
        raise UserError(f"{path}: {problem}.")
    return _unpacked(tensors, header), json.loads(text), digest


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


def refuse_other_run(source: Path, written: object, metadata: Mapping[str, Any]) -> None:
    r"""Raises a :class:`UserError` if what is to be resumed was written for another run.

    Arguments:
        source: The checkpoint.
        written: What the checkpoint says of its run; None of a model's, which no run goes on from.
        metadata: What is stored with the model of the run that is to go on.
    """
    now = json.loads(json.dumps(metadata))
    if written == now:
        return
    found = ""
    if isinstance(written, Mapping):
        sides = ({**m, **m.get("config", {}), "config": {}} for m in (written, now))
        found = f"; it has {differences(*sides)}"
    raise UserError(
        f"{source}: written by a run with another configuration or other data, cannot be resumed by "
        f"this one{found}."
    )


def restore(module: nn.Module, tensors: Mapping[str, Any], source: object) -> None:
    r"""Loads tensors into a module.

    Arguments:
        module: The module.
        tensors: The tensors and extra states of its state, by name.
        source: The file to name in messages.

    Raises:
        UserError: If the tensors are those of another architecture, or not finite.
    """
    own, problems = module.state_dict(), []
    for key in sorted(own.keys() | tensors.keys()):
        found, expected = _shape(tensors.get(key)), _shape(own.get(key))
        if found != expected:
            problems.append(f"of another architecture: {key} {found}, expected {expected}")
        # A mask may hold infinity from the start.
        elif (
            isinstance(own[key], Tensor)
            and (own[key].cpu().isfinite() > tensors[key].isfinite()).any()
        ):
            problems.append(f"{key} holds NaN or infinity, expected finite weights")
    if problems:
        more = f"{len(problems)} of {len(own)} tensors are wrong"
        raise UserError(f"{source}: {problems[0]} ({more}).")
    module.load_state_dict(dict(tensors))


def pack_state(
    modules: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
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
    tensors: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
    source: object,
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


def _packed(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    r"""Returns what a safetensors file can hold, and its header.

    Raises:
        ValueError: If the metadata or an extra state are of other types than may be stored.
    """
    content: dict[str, Tensor] = {}
    others: dict[str, object] = {}
    first: dict[object, str] = {}
    for key, value in tensors.items():
        if not isinstance(value, Tensor):
            others[key] = {"extra": _as_text(value, key, content)}
            continue
        where = value.data_ptr(), value.dtype, value.shape, value.stride()
        if value.numel() and first.setdefault(where, key) != key:
            others[key] = {"same": first[where]}
        else:
            # Cloned, as storage that is shared cannot be written.
            plain = torch.contiguous_format
            content[key] = value.detach().cpu().clone(memory_format=plain)
    text = json.dumps(as_json(metadata))
    header = {"format": FORMAT, "metadata": text}
    if others:
        header[OTHERS] = json.dumps(others)
    return content, header | {"sha256": _digest(content, text + header.get(OTHERS, ""))}


def _unpacked(content: Mapping[str, Tensor], header: Mapping[str, str]) -> dict[str, Any]:
    others = json.loads(header.get(OTHERS, "{}"))
    found: dict[str, Any] = {key: x for key, x in content.items() if PART not in key}
    for key, other in others.items():
        same = other.get("same")
        found[key] = _from_text(other["extra"], content) if same is None else content[same].clone()
    return found


def _as_text(value: Any, key: str, content: dict[str, Tensor]) -> object:  # noqa: ANN401
    r"""Returns an extra state as JSON has it; its tensors join the others, in parts of its key."""
    if isinstance(value, bytes):
        return {"bytes": _as_text(torch.tensor(list(value), dtype=torch.uint8), key, content)}
    if isinstance(value, Tensor):
        name = f"{key}{PART}{len(content)}"
        content[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"mapping": [[_as_text(x, key, content) for x in item] for item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_as_text(x, key, content) for x in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{key}: got a {type(value).__name__}, expected an extra state of tensors, bytes, numbers, "
        "text, lists, tuples and mappings"
    )


def _from_text(text: Any, content: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    r"""Returns what :func:`_as_text` was given."""
    if not isinstance(text, dict):
        return text
    ((kind, inner),) = text.items()
    if kind == "tensor":
        return content[inner]
    if kind == "mapping":
        return {_from_text(k, content): _from_text(v, content) for k, v in inner}
    if kind == "bytes":
        return _from_text(inner, content).numpy().tobytes()
    return (list if kind == "list" else tuple)(_from_text(x, content) for x in inner)


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


def _shape(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return "absent" if tensor is None else "of an extra state"
    # Precisions may differ, but weights are no integers.
    return f"{tuple(tensor.shape)}{'' if tensor.is_floating_point() else ' of integers'}"
