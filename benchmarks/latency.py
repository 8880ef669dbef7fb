r"""The cost of the ratio over its backbone, of its rivals, and of a training step.

    python benchmarks/latency.py [--width 1.0] [--batch-size 32] [--pairs 200] [--device cpu]

Everything is timed against the bare backbone on the same batch. Each pair is timed back to back in
a random order, so that a drift of the machine's speed cancels; a pair's ratio is ours over the
bare backbone's. Printed are the median ratio over the pairs and its bootstrap interval. The A/A
control times the bare backbone against itself: its interval says what the measurement can resolve.

- `scoring`: the whole ratio for several K, the folded one, and the time-conditioned rival at
  several numbers of network evaluations (NFE), each against one forward pass.
- `precision`: the folded ratio under autocast, against itself in single precision (CUDA only).
- `training`: a whole step, optimiser and averaging included, against the bare forward and backward
  pass of the same images in the same precision.
- `batch`: the folded ratio's time an image, against that of the smallest batch.
- `pixels`: its time a pixel, against that of 32x32 images.
- `memory`: the most that is allocated at once beside weights and input, which has no interval.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import bench_tables
import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from ood_osdre.baselines import TimeConditionedRatio, TimeConditionedResNet
from ood_osdre.bases import RBFBasis
from ood_osdre.experiment import device_name
from ood_osdre.networks import CoefficientNetwork, ResNetBackbone
from ood_osdre.noises import DDBINoise
from ood_osdre.objectives import Draw, EndPointLoss, Objective
from ood_osdre.paths import GaussianPath
from ood_osdre.ratio import FoldedRatio, OneStepRatio
from ood_osdre.records import RunRecord
from ood_osdre.schedules import TrigonometricSchedule
from ood_osdre.sections import TrainingConfig
from ood_osdre.training import Trainer

RESULTS = Path(__file__).parent / "results" / "latency"

PARTS = ["scoring", "precision", "training", "batch", "pixels", "memory"]

Forward = Callable[[Tensor], Tensor]
M = TypeVar("M", bound=nn.Module)


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


def peak_memory(forward: Forward, x: Tensor) -> int:
    r"""Returns the most bytes that a forward pass holds at once, beside what there was before."""
    with torch.inference_mode():
        forward(x)  # whatever is allocated once
        if x.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            forward(x)
            return torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            forward(x)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    return int(np.cumsum([size for _, size in changes]).max())


Results = dict[str, tuple[float, float, float]]


class Bench:
    r"""Networks on a device, and their timings against each other.

    Arguments:
        args: The options of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args, self.rng = args, np.random.default_rng(0)
        self.device = torch.device(args.device)
        self.backbone = self._placed(ResNetBackbone(args.width))
        self.x = self._images(args.batch_size)

    def scoring(self) -> Results:
        r"""Times ratios and rivals against the bare backbone."""
        comparisons: dict[str, tuple[Forward, int]] = {"A/A control: backbone": (self.backbone, 1)}
        for size in self.args.sizes:
            comparisons[f"log-ratio, K = {size}"] = self._unfolded(size).log_ratio, 1
        comparisons["log-ratio, folded"] = self._folded().log_ratio, 1
        for n in self.args.nfe:
            comparisons[f"time-conditioned rival, NFE = {n}"] = self._rival(n).log_ratio, n
        with torch.inference_mode():
            return {
                name: self._ratio(forward, self.backbone, cost)
                for name, (forward, cost) in comparisons.items()
            }

    def precision(self) -> Results:
        r"""Times the folded ratio under autocast against itself in single precision."""
        folded = self._folded()

        def cast(dtype: torch.dtype) -> Forward:
            def forward(x: Tensor) -> Tensor:
                with torch.autocast(self.device.type, dtype):
                    return folded.log_ratio(x)

            return forward

        with torch.inference_mode():
            return {
                f"folded, {name}": self._ratio(cast(dtype), folded.log_ratio)
                for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
            }

    def training(self) -> Results:
        r"""Times a training step against the forward and backward pass of the same images."""
        half = self.args.batch_size // 2
        options = TrainingConfig(batch_size=half)
        path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.01, 0.005)).to(self.device)
        network = CoefficientNetwork(ResNetBackbone(self.args.width), self.backbone.features, 16)
        ratio = OneStepRatio(network, RBFBasis(size=16)).to(self.device)
        objective = Objective({"endpoint": (1.0, EndPointLoss(path))})
        x_0, x_1 = self._images(half), self._images(half)
        draw = Draw(x_0, x_1, torch.rand(half, device=self.device), torch.randn_like(x_0))
        trainer = Trainer(ratio, objective, lambda step: draw, options)
        bare = self._placed(ResNetBackbone(self.args.width)).train()

        def step(x: Tensor) -> Tensor:
            return trainer.step(draw)["total"]

        def forward_backward(x: Tensor) -> Tensor:
            bare.zero_grad(set_to_none=True)
            with trainer.autocast:
                loss = bare(x).sum()
            loss.backward()
            return loss

        return {"training step": self._ratio(step, forward_backward, cost=3)}

    def batch(self) -> Results:
        r"""Times the folded ratio's batches, an image, against the smallest."""
        size = self.args.batch_size
        larger = {f"batch {k * size}, an image": self._images(k * size) for k in (2, 4, 8)}
        return self._per_value(larger)

    def pixels(self) -> Results:
        r"""Times the folded ratio on larger images, a pixel, against 32x32 ones."""
        size = self.args.batch_size
        larger = {f"{s}x{s} images, a pixel": self._images(size, s) for s in (64, 96)}
        return self._per_value(larger)

    def _per_value(self, larger: dict[str, Tensor]) -> Results:
        r"""Times larger inputs against the bench's, each by its number of values."""
        folded, results = self._folded(), Results()

        def on(x: Tensor) -> Forward:
            return lambda _: folded.log_ratio(x)

        with torch.inference_mode():
            for name, x in larger.items():
                share = self.x.numel() / x.numel()
                m, low, high = self._ratio(on(x), on(self.x), cost=4)
                results[name] = share * m, share * low, share * high
        return results

    def memory(self) -> Results:
        r"""Compares what scoring one batch allocates with what the bare backbone does."""
        bare = peak_memory(self.backbone, self.x)
        ratio, rival = self._unfolded(max(self.args.sizes)), self._rival(max(self.args.nfe))
        shares = {
            f"memory, log-ratio, K = {max(self.args.sizes)}": ratio.log_ratio,
            "memory, log-ratio, folded": self._folded().log_ratio,
            f"memory, time-conditioned rival, NFE = {max(self.args.nfe)}": rival.log_ratio,
        }
        return {name: (peak_memory(f, self.x) / bare,) * 3 for name, f in shares.items()}

    def _ratio(self, ours: Forward, bare: Forward, cost: int = 1) -> tuple[float, float, float]:
        r"""Returns the median ratio and its interval; a costly call is timed less often."""
        pairs = max(self.args.pairs // cost, 10)
        paired_ratios(ours, bare, self.x, 3, self.rng)  # warm-up
        ratios = paired_ratios(ours, bare, self.x, pairs, self.rng)
        return float(np.median(ratios)), *interval(ratios, self.rng)

    def _unfolded(self, size: int) -> OneStepRatio:
        network = CoefficientNetwork(self.backbone, self.backbone.features, size, cells=False)
        torch.nn.init.normal_(network.head.weight, std=0.01)
        return self._placed(OneStepRatio(network, RBFBasis(size=size)))

    def _folded(self) -> FoldedRatio:
        return self._placed(self._unfolded(16).fold())

    @cached_property
    def _network_of_time(self) -> TimeConditionedResNet:
        return self._placed(TimeConditionedResNet(self.args.width))

    def _rival(self, evaluations: int) -> TimeConditionedRatio:
        return TimeConditionedRatio(self._network_of_time, evaluations)

    def _placed(self, module: M) -> M:
        return module.to(self.device).to(memory_format=torch.channels_last).eval()

    def _images(self, size: int, side: int = 32) -> Tensor:
        x = torch.randn(size, 3, side, side, device=self.device)
        return x.to(memory_format=torch.channels_last)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--width", type=float, default=1.0)
    add("--sizes", type=int, nargs="+", default=[1, 16, 100, 800, 400], help="values of K")
    add("--nfe", type=int, nargs="+", default=[10, 50, 100, 200])
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--batch-size", type=int, default=32)
    add("--pairs", type=int, default=200)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    bench, results = Bench(args), Results()
    for part in args.parts:
        if part == "precision" and args.device == "cpu":
            continue
        results |= getattr(bench, part)()
    print(bench_tables.latency(results))
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    RunRecord(
        config=settings, device=device_name(torch.device(args.device)), results=results
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
