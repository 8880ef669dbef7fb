r"""The cost of the ratio over its backbone, on the same batches.

    python benchmarks/latency.py [--width 1.0] [--batch-size 32] [--pairs 200] [--device cpu]

Times one forward pass of the bare backbone against `log_ratio` of the whole ratio (K = 400) and of
the folded one. Each pair is timed back to back in a random order, so that a drift of the machine's
speed cancels; a pair's ratio is ours over the bare backbone's. Printed are the median ratio over
the pairs and its bootstrap interval. The A/A control times the bare backbone against itself: its
interval says what the measurement can resolve.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ood_osdre.bases import RBFBasis
from ood_osdre.experiment import device_name
from ood_osdre.files import write_text_atomic
from ood_osdre.networks import CoefficientNetwork, ResNetBackbone
from ood_osdre.ratio import OneStepRatio
from ood_osdre.records import RunRecord

RESULTS = Path(__file__).parent / "results" / "latency"

Forward = Callable[[Tensor], Tensor]


def seconds(forward: Forward, x: Tensor) -> float:
    r"""Times one forward pass, to its end on the device."""
    started = time.perf_counter()
    forward(x)
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def paired_ratios(
    ours: Forward, bare: Forward, x: Tensor, pairs: int, rng: np.random.Generator
) -> np.ndarray:
    r"""Times two functions in turn and returns the ratio of each pair."""
    ratios = np.empty(pairs)
    for i in tqdm(range(pairs), leave=False):
        if rng.random() < 0.5:
            a, b = seconds(ours, x), seconds(bare, x)
        else:
            b, a = seconds(bare, x), seconds(ours, x)
        ratios[i] = a / b
    return ratios


def interval(values: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    r"""Returns the 95 % bootstrap interval of the median."""
    medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


@torch.inference_mode()
def measure(args: argparse.Namespace) -> dict[str, tuple[float, float, float]]:
    r"""Returns the median ratio of each comparison and its interval."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    device = torch.device(args.device)
    backbone = ResNetBackbone(args.width)
    network = CoefficientNetwork(backbone, backbone.features, args.size, cells=False)
    torch.nn.init.normal_(network.head.weight, std=0.01)
    ratio = OneStepRatio(network, RBFBasis(size=args.size)).to(device).eval()
    folded = ratio.fold()
    for module in (ratio, folded):
        module.to(memory_format=torch.channels_last)
    x = torch.randn(args.batch_size, 3, 32, 32, device=device)
    x = x.to(memory_format=torch.channels_last)

    comparisons: dict[str, Forward] = {
        "A/A control: backbone": backbone,
        f"log-ratio, K = {args.size}": ratio.log_ratio,
        "log-ratio, folded": folded.log_ratio,
    }
    results = {}
    for name, forward in comparisons.items():
        paired_ratios(forward, backbone, x, 5, rng)  # warm-up
        ratios = paired_ratios(forward, backbone, x, args.pairs, rng)
        results[name] = (float(np.median(ratios)), *interval(ratios, rng))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--width", type=float, default=1.0)
    add("--size", type=int, default=400)
    add("--batch-size", type=int, default=32)
    add("--pairs", type=int, default=200)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    results = measure(args)
    lines = [
        "| forward pass | time over the bare backbone's | 95 % interval |",
        "| :-- | --: | :-: |",
    ]
    lines += [f"| {k} | {m:.4f} | [{a:.4f}, {b:.4f}] |" for k, (m, a, b) in results.items()]
    table = "\n".join(lines) + "\n"
    print(table)
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    RunRecord(
        config=settings, device=device_name(torch.device(args.device)), results=results
    ).write(args.out / "run.json")
    write_text_atomic(args.out / "latency.md", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
