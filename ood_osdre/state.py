r"""The state of a run as named tensors, to be written to a checkpoint and read back.

Modules are stored under their names, the optimiser's tensors under `optimizer.INDEX.NAME`.
"""

__all__ = ["pack_state", "unpack_state"]

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoints import restore
from .errors import UserError, one_line


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
