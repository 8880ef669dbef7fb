r"""The cost of the ratio over its backbone, of its baselines, and of a training step.

    python benchmarks/speed/latency.py [--width 1.0] [--batch-size 32] [--pairs 200] [--device cpu]
    python benchmarks/speed/latency.py --parts training

Everything is timed against the bare backbone on the same batch, in pairs (see `timing.py`); a
costly call is timed less often. Printed are the median ratio over the pairs and its bootstrap
interval. The A/A control times the bare backbone against itself: its interval says what the
measurement can resolve.

- `scoring`: the whole ratio for several K, the folded one, and the time-conditioned baseline at
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
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import above  # noqa: F401
import bench_tables
import numpy as np
import torch
from outputs import require_writable
from timing import call_on, noise, placed, time_over
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.models.baselines import TimeConditionedRatio, TimeConditionedResNet
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import CoefficientNetwork, ResNetBackbone
from ood_osdre.models.ratio import FoldedRatio, OneStepRatio
from ood_osdre.objectives import Batch, EndPointLoss, Objective
from ood_osdre.paths.gaussian import GaussianPath
from ood_osdre.paths.noises import DDBINoise
from ood_osdre.paths.schedules import TrigonometricSchedule
from ood_osdre.sections import WIDTH_STEP, TrainingConfig
from ood_osdre.training.distributed import device_name, find_device
from ood_osdre.training.trainer import Trainer

OUT = Path("runs") / "latency"

PARTS = ["scoring", "precision", "training", "batch", "pixels", "memory"]
SEED = 0
# The size of the basis where it is not what is compared: a folded ratio, a training step.
SIZE = 16
LEAST_PAIRS = 10

Forward = Callable[[Tensor], Tensor]


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


# A median and the ends of its interval, None for what is counted.
Results = dict[str, tuple[float, float | None, float | None]]


class Bench:
    r"""Networks on a device, and their timings against each other.

    Arguments:
        args: The options of the command line.
        device: Where to measure.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.args, self.device = args, device
        self.rng = np.random.default_rng(SEED)
        self.backbone = placed(ResNetBackbone(args.width), device)
        self.x = noise(args.batch_size, device)

    def scoring(self) -> Results:
        r"""Times ratios and baselines against the bare backbone."""
        comparisons: dict[str, tuple[Forward, int]] = {"A/A control: backbone": (self.backbone, 1)}
        for size in self.args.sizes:
            comparisons[f"log-ratio, K = {size}"] = self._unfolded(size).log_ratio, 1
        comparisons["log-ratio, folded"] = self._folded().log_ratio, 1
        for n in self.args.nfe:
            comparisons[f"time-conditioned rival, NFE = {n}"] = self._baseline(n).log_ratio, n
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
        on_gpu = self.device.type == "cuda"
        options = TrainingConfig(batch_size=half, amp="auto" if on_gpu else "none")
        path = GaussianPath(TrigonometricSchedule(), DDBINoise(0.01, 0.005)).to(self.device)
        network = self._network(ResNetBackbone(self.args.width), SIZE)
        ratio = OneStepRatio(network, RBFBasis(size=SIZE)).to(self.device)
        objective = Objective({"endpoint": (1.0, EndPointLoss(path))})
        x_0, x_1 = noise(half, self.device), noise(half, self.device)
        draw = Batch(x_0, x_1, torch.rand(half, device=self.device), torch.randn_like(x_0))
        trainer = Trainer(ratio, objective, lambda step: draw, options)
        bare = placed(ResNetBackbone(self.args.width), self.device).train()

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
        larger = {f"batch {k * size}, an image": noise(k * size, self.device) for k in (2, 4, 8)}
        return self._per_value(larger)

    def pixels(self) -> Results:
        r"""Times the folded ratio on larger images, a pixel, against 32x32 ones."""
        size = self.args.batch_size
        larger = {f"{s}x{s} images, a pixel": noise(size, self.device, s) for s in (64, 96)}
        return self._per_value(larger)

    def _per_value(self, larger: dict[str, Tensor]) -> Results:
        r"""Times larger inputs against the bench's, each by its number of values."""
        forward, results = self._folded().log_ratio, Results()
        with torch.inference_mode():
            for name, x in larger.items():
                share = self.x.numel() / x.numel()
                m, low, high = self._ratio(forward, forward, cost=4, x=x)
                results[name] = share * m, share * low, share * high
        return results

    def memory(self) -> Results:
        r"""Compares what scoring one batch allocates with what the bare backbone does."""
        bare = peak_memory(self.backbone, self.x)
        ratio, baseline = self._unfolded(max(self.args.sizes)), self._baseline(max(self.args.nfe))
        shares = {
            f"memory, log-ratio, K = {max(self.args.sizes)}": ratio.log_ratio,
            "memory, log-ratio, folded": self._folded().log_ratio,
            f"memory, time-conditioned rival, NFE = {max(self.args.nfe)}": baseline.log_ratio,
        }
        return {name: (peak_memory(f, self.x) / bare, None, None) for name, f in shares.items()}

    def _ratio(
        self, ours: Forward, bare: Forward, cost: int = 1, x: Tensor | None = None
    ) -> tuple[float, float, float]:
        r"""Returns the median ratio and its interval; ours is timed on `x`, the bench's if None."""
        pairs = max(self.args.pairs // cost, LEAST_PAIRS)
        first = call_on(ours, self.x if x is None else x)
        return time_over(first, call_on(bare, self.x), pairs, self.rng)

    def _network(self, backbone: ResNetBackbone, size: int) -> CoefficientNetwork:
        # As a run builds it whose losses look at no cells.
        return CoefficientNetwork(backbone, backbone.features, size, cells=False)

    def _unfolded(self, size: int) -> OneStepRatio:
        network = self._network(self.backbone, size)
        torch.nn.init.normal_(network.head.weight, std=0.01)
        return placed(OneStepRatio(network, RBFBasis(size=size)), self.device)

    def _folded(self) -> FoldedRatio:
        return placed(self._unfolded(SIZE).fold(), self.device)

    @cached_property
    def _network_of_time(self) -> TimeConditionedResNet:
        return placed(TimeConditionedResNet(self.args.width), self.device)

    def _baseline(self, evaluations: int) -> TimeConditionedRatio:
        return TimeConditionedRatio(self._network_of_time, evaluations)


def width(text: str) -> float:
    r"""Reads the width of a ResNet."""
    value = float(text)
    if not 0 < value < math.inf or value % WIDTH_STEP:
        raise argparse.ArgumentTypeError(
            f"got {text}, expected a positive multiple of {WIDTH_STEP:g}"
        )
    return value


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    add = p.add_argument
    add("--width", type=width, default=1.0)
    add("--sizes", type=count(1), nargs="+", default=[1, 16, 100, 800, 400], help="values of K")
    add("--nfe", type=count(2), nargs="+", default=[10, 50, 100, 200])
    add("--parts", nargs="+", choices=PARTS, help="default: all that the device has")
    add("--batch-size", type=count(1), default=32)
    add("--pairs", type=count(LEAST_PAIRS), default=200)
    add("--device", help="default: a GPU if there is one")
    add("--out", type=Path, default=OUT, metavar="DIR")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures the parts, after what can be refused before that."""
    device = find_device(args.device, "--device")
    possible = [part for part in PARTS if part != "precision" or device.type == "cuda"]
    parts = possible if args.parts is None else list(dict.fromkeys(args.parts))
    if not set(parts) <= set(possible):
        raise UserError(f"--parts precision: needs a GPU, got --device {device}.")
    if "training" in parts and args.batch_size < 2:
        raise UserError("--batch-size 1: a training step takes an image of each end, expected 2.")
    require_writable(args.out)
    results = Results()
    bench = Bench(args, device)
    for part in parts:
        results |= getattr(bench, part)()
    print(bench_tables.latency(results))
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    RunRecord(
        config={**settings, "parts": parts, "device": str(device), "size": SIZE},
        seed=SEED,
        device=device_name(device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
