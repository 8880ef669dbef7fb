r"""Devices, and training and scoring on several processes, as `torchrun` starts them.

Every process draws the same batch, a function of the seed and the step, and trains on its own
rows; PyTorch's `DistributedDataParallel` averages the gradients. The batches therefore do not
depend on the number of processes, and a run can be resumed by another number of them. Of images in
files each process decodes those that its own rows are made from. With group
normalisation a step is that of one process, up to the order of sums; training enlarges such rounding,
in 200 steps to scores that differ by a quarter of their deviation (`docs/bring_your_own.md`). With
batch normalisation each process normalises its own rows, as it always does there, which changes the
result; so does InfoNCE, whose negatives are the process's own.

Sets are scored in shares without overlap or loss, and every process gets all the scores. The first
process alone writes files.
"""

__all__ = [
    "device_name",
    "find_device",
    "from_first",
    "gather_rows",
    "is_first",
    "join",
    "leave",
    "mean_over_processes",
    "parallel",
    "share",
    "world_size",
]

import contextlib
import ctypes
import os
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UserError

T = TypeVar("T")
Scalar = TypeVar("Scalar", bound=np.generic)


# Of glibc's `mallopt`: when freed memory goes back to the system, and how many blocks are mapped.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def join(device: torch.device) -> torch.device:
    r"""Joins the processes that `torchrun` started, if it did, and returns this one's device.

    A command that computes on a CPU also keeps the memory that it frees. Otherwise glibc maps the
    activations of each step anew, and clearing those pages takes a seventh of the time of a step.

    Arguments:
        device: The device asked for; a CUDA device becomes the process's own.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, TypeError, AttributeError):  # another C library
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_MAX, 0)
            libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def leave() -> None:
    r"""Ends what :func:`join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    r"""Returns the number of processes, 1 for a plain run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    r"""Returns whether this is the process that writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def share(size: int) -> slice:
    r"""Returns the items of this process, of `size` in all: contiguous, as equal as may be."""
    if world_size() == 1:
        return slice(0, size)
    n, rank = world_size(), dist.get_rank()
    return slice(size * rank // n, size * (rank + 1) // n)


def gather_rows(rows: NDArray[Scalar]) -> NDArray[Scalar]:
    r"""Returns the rows of all processes, in the order of :func:`share`."""
    if world_size() == 1:
        return rows
    parts: list[NDArray[Scalar] | None] = [None] * world_size()
    dist.all_gather_object(parts, rows)
    return np.concatenate([part for part in parts if part is not None])


def mean_over_processes(value: Tensor) -> Tensor:
    r"""Returns the mean of a tensor over the processes."""
    if world_size() == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / world_size()


def from_first(value: T) -> T:
    r"""Returns the first process's value, which decides where processes might differ."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def parallel(module: nn.Module, device: torch.device) -> nn.Module:
    r"""Returns the module with its gradients averaged over the processes, if there are several."""
    if world_size() == 1:
        return module
    return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)


def find_device(name: torch.device | str | None = None, option: str = "device") -> torch.device:
    r"""Returns the device of a name, refusing one that is not there.

    Arguments:
        name: The name; None for a GPU if there is one, else the CPU.
        option: What to call it in messages.

    Raises:
        UserError: If there is no such device here, or it holds no data.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" exists, but holds no data
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{option} {name}: not available here ({reason})") from None
    return device


def device_name(device: torch.device) -> str:
    r"""Returns the name of a device, a GPU's card included."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"
