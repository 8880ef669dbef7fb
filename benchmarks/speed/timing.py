r"""Two calls timed against each other, and what they are calls of: networks on noise.

They are timed in pairs, back to back and in a random order, so that a drift of the machine's speed
cancels. A pair's ratio is the first call's time over the second's.
"""

from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

WARM_UP = 3

Call = Callable[[], object]
M = TypeVar("M", bound=nn.Module)


def placed(module: M, device: torch.device) -> M:
    r"""Returns a module as it scores on a device."""
    return module.to(device).to(memory_format=torch.channels_last).eval()


def noise(size: int, device: torch.device, side: int = 32) -> Tensor:
    r"""Returns images of normal noise, with shape :math:`(N, 3, S, S)`."""
    x = torch.randn(size, 3, side, side, device=device)
    return x.to(memory_format=torch.channels_last)


def call_on(forward: Callable[[Tensor], object], x: Tensor) -> Call:
    r"""Returns a call of a function on a batch, which ends when the batch's device has done its work."""

    def call() -> None:
        forward(x)
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)

    return call


def seconds(call: Call) -> float:
    r"""Times one call, which returns when its work is done."""
    started = perf_counter()
    call()
    return perf_counter() - started


def paired_ratios(
    ours: Call, bare: Call, pairs: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Times two calls in turn and returns the ratio of each pair."""
    ratios = np.empty(pairs)
    for i in tqdm(range(pairs), leave=False, disable=None):
        if rng.random() < 0.5:
            a, b = seconds(ours), seconds(bare)
        else:
            b, a = seconds(bare), seconds(ours)
        ratios[i] = a / b
    return ratios


def interval(values: NDArray[np.float64], rng: np.random.Generator) -> tuple[float, float]:
    r"""Returns the 95 % bootstrap interval of the median."""
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def time_over(
    ours: Call, bare: Call, pairs: int, rng: np.random.Generator
) -> tuple[float, float, float]:
    r"""Returns the median of the pairs' ratios and the ends of its interval."""
    paired_ratios(ours, bare, WARM_UP, rng)
    ratios = paired_ratios(ours, bare, pairs, rng)
    return float(np.median(ratios)), *interval(ratios, rng)
