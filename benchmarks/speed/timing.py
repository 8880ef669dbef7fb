r"""Two calls timed against each other.

They are timed in pairs, back to back and in a random order, so that a drift of the machine's speed
cancels. A pair's ratio is the first call's time over the second's.
"""

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

WARM_UP = 3

Call = Callable[[], object]


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
