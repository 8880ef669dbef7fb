r"""Computing inside a caller's process: as in one of our own, and without a trace left in it.

A notebook may have turned gradients off, set another default type of floating point or another
default device, and it goes on drawing random numbers from its own seed when a fit is done.
"""

__all__ = ["own_surroundings", "reseed", "same_random_numbers"]

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


def reseed(numbers: Sequence[int], device: torch.device) -> None:
    r"""Seeds PyTorch's global random numbers on the CPU and on a device by several numbers."""
    # torch.manual_seed takes ten times as long, which is seen in the step of a small network.
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    r"""Leaves the global random numbers of PyTorch, NumPy and Python as they were found."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    seed, of_numpy, of_python = torch.initial_seed(), np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        if not cuda and torch.cuda.is_available():
            # What a GPU would have drawn next, had nobody used it yet.
            torch.cuda.manual_seed_all(seed)


@contextmanager
def own_surroundings() -> Iterator[None]:
    r"""Computes with gradients, in single precision and on the CPU where nothing else is said.

    The caller's modes, defaults and random numbers are then as they were.
    """
    default = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(same_random_numbers())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, default)
        torch.set_default_dtype(torch.float32)
        yield
