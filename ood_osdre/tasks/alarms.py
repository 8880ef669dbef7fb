r"""The alarms of a fixed detector on streams with a change and without one.

What is measured is :class:`ood_osdre.tasks.drift.DriftMonitor`: how long its alarm takes after a
change, and how often it comes without one.
"""

__all__ = ["DRIFT_NOTE", "RUN_LENGTH", "monitor_config", "monitor_table"]

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from ..data.batches import step_generator
from .drift import DriftMonitor
from .estimators import TEST, fit_ratio
from .reports import Row
from .tracking import QUADRATIC

# The mean run length, inputs that the monitor is calibrated with, before the change and after it,
# shifts, and how the detector is fitted, whatever the options for the tracked streams are.
RUN_LENGTH, CALIBRATION, BEFORE, AFTER = 10_000, 1000, 1000, 3000
MONITORED = replace(QUADRATIC, steps=300)
MONITORED_DIM = 20
DRIFTS = (0.0, 0.1, 0.25, 0.5, 1.0)

DRIFT_NOTE = (
    f"Streams of {MONITORED_DIM} dimensions, N(0, I) and from input {BEFORE:,} on of the variance "
    "given; the detector's reference is N(0, 2 I). `truth` is E_q[log r] = KL(q || p0) - KL(q || p1) "
    f"in closed form, in nats. Guarantee: at most one alarm in {RUN_LENGTH:,} inputs without a "
    "change, on average."
)


def monitor_config(streams: int, seed: int) -> dict[str, Any]:
    r"""Returns what the record of :func:`monitor_table` says was run."""
    return {
        **asdict(replace(MONITORED, seed=seed)),
        "dim": MONITORED_DIM,
        "run_length": RUN_LENGTH,
        "before": BEFORE,
        "after": AFTER,
        "streams": streams,
    }


def monitor_table(streams: int, seed: int) -> list[Row]:
    r"""Measures alarms of a fixed detector on streams that drift from the ID data.

    The ID data are :math:`\mathcal{N}(0, I)` in 20 dimensions, the reference
    :math:`\mathcal{N}(0, 2 I)`; from input 1000 on, the stream is :math:`\mathcal{N}(0, (1 + a)
    I)`. The detector is fitted once, in 300 steps.

    Arguments:
        streams: The number of streams a row.
        seed: The seed.
    """
    dim = MONITORED_DIM

    def draw_pairs(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(2, n, dim, generator=generator)
        return 2**0.5 * x[0], x[1]

    fit = fit_ratio("os-dre", draw_pairs, dim, replace(MONITORED, seed=seed))
    table = []
    for drift in DRIFTS:
        early, delays, differences = 0, [], []
        for stream in range(streams):
            generator = step_generator(seed, TEST, stream, "cpu")
            calibration = torch.randn(CALIBRATION, dim, generator=generator)
            monitor = DriftMonitor(fit.log_ratio, calibration, RUN_LENGTH, seed=stream)
            monitor.update(torch.randn(BEFORE, dim, generator=generator))
            early += monitor.alarm is not None
            x = (1 + drift) ** 0.5 * torch.randn(AFTER, dim, generator=generator)
            report = monitor.update(x)
            differences.append(report.divergence_difference)
            if report.alarm is not None and report.alarm > BEFORE:
                delays.append(report.alarm - BEFORE)
        table.append(
            {
                "variance": 1 + drift,
                "streams": streams,
                "alarms before": early,
                "alarms after": len(delays),
                "median delay": float(np.median(delays)) if delays else None,
                "largest delay": max(delays) if delays else None,
                "E_q[log r]": float(np.mean(differences)),
                "truth": dim / 2 * (float(np.log(2)) - (1 + drift) / 2),
            }
        )
    return table
