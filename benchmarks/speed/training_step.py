r"""The cost of a training step over a bare loop with the same network, loss and augmentation.

    python benchmarks/speed/training_step.py [--width 1.0] [--batch-size 256] [--amp none] [--pairs 30]

Ours is what a run does in a step: a batch of the training batches, a step of the training loop. The
bare loop is written out here, on plain tensors: images flipped in turn, cropped, a third of the
reference broadened, one forward pass of both ends through the same fast network, with a head of one
output and a head of classes, the logistic loss and smoothed cross-entropy, Nesterov's SGD at the same
rates. It has no path, times, noise, basis, clipping or averaging, and looks at nothing on the way.

Both take steps in turn, in pairs (see `timing.py`). Printed are the median ratio over the pairs and
its bootstrap interval, and the bare loop against itself, which says what the measurement resolves.
Images are random: no step depends on what they show.
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import above  # noqa: F401
import bench_tables
import numpy as np
import torch
from outputs import require_writable
from timing import Call, time_over
from torch import Tensor
from torch.nn import functional as F

from ood_osdre.config import Config
from ood_osdre.data import ImageSet
from ood_osdre.data.transforms import Preprocess, Randomness, broaden
from ood_osdre.errors import Parser, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.models import DirectRatio, OneStepRatio
from ood_osdre.training.batches import ImageBatches
from ood_osdre.training.build import build_ratio, prepare_objective
from ood_osdre.training.distributed import device_name, find_device
from ood_osdre.training.fit import assemble
from ood_osdre.training.optimisation import DTYPES

OUT = Path("runs") / "training_step"
SEED, CLASSES, SIDE = 0, 10, 32
STEPS = 1_000_000  # never reached, so that the rate stays what it is
OPTIONS = {
    "network.kind": "speed",
    "objective.class_weight": 1.0,
    "objective.label_smoothing": 0.1,
    "objective.endpoint_clean": True,
    "data.flip": "alternating",
    "data.crop": 2,
    "data.broaden": 0.33,
    "training.steps": STEPS,
    "training.optimizer": "sgd",
    "training.lr": 0.01,
    "training.warmup": 1,
    "training.decay": "linear",
}


class Bench:
    r"""A run's training and a bare loop, each of which can take a step.

    Arguments:
        config: The configuration of both.
        images: The number of images of each end.
        device: Where to train.
    """

    def __init__(self, config: Config, images: int, device: torch.device) -> None:
        torch.manual_seed(SEED)
        rng = np.random.default_rng(SEED)
        id_train, reference = (
            ImageSet(
                rng.integers(0, 256, (images, SIDE, SIDE, 3), dtype=np.uint8),
                np.arange(images) % CLASSES,
                [f"{i}.png" for i in range(images)],
            )
            for _ in range(2)
        )
        self.config, self.device = config, device
        options = config.training
        self.preprocess = Preprocess((0.5, 0.45, 0.4), (0.25, 0.2, 0.3), device)
        self.batches = ImageBatches(
            id_train, reference, config.data, self.preprocess, options.batch_size, options.seed
        )
        ratio = build_ratio(config, CLASSES).to(device)
        self.trainer = assemble(
            ratio, partial(prepare_objective, config), self.batches, options, select=None
        )
        # The deployed network, before norms are merged: the same backbone under a head of one output.
        assert isinstance(ratio, OneStepRatio)
        backbone: Any = copy.deepcopy(ratio.network.backbone)
        net = DirectRatio(backbone, backbone.features, CLASSES).to(device).train()
        net.to(memory_format=torch.channels_last)
        assert net.class_head is not None
        self.net, self.class_head = net, net.class_head
        parameters = list(self.net.parameters())
        groups = [
            {
                "params": [p for p in parameters if p.ndim > 1],
                "weight_decay": options.weight_decay,
            },
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.SGD(
            groups, options.lr, options.momentum, nesterov=True, fused=device.type == "cuda"
        )
        pad = config.data.crop
        # The borders once and for all.
        self.padded = [
            torch.as_tensor(
                np.pad(s.images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect"),
                device=device,
            )
            for s in (reference, id_train)
        ]
        self.labels = torch.as_tensor(id_train.labels, device=device)
        self.orders = [torch.randperm(images, device=device) for _ in self.padded]
        self.flips = [torch.rand(images, device=device) < 0.5 for _ in self.padded]
        self.generator = torch.Generator(device).manual_seed(SEED)
        self.random = Randomness(self.generator, torch.Generator().manual_seed(SEED))
        self.step = 0

    def ours(self) -> None:
        r"""Takes a step as a run does."""
        self.trainer.step(self.batches(self.trainer.outcome.step))
        self._wait()

    def bare(self) -> None:
        r"""Takes a step of the bare loop."""
        size, total = self.config.training.batch_size, len(self.labels)
        epoch, batch = divmod(self.step, total // size)
        x_0, x_1 = (
            self._augmented(
                images, order[batch * size : (batch + 1) * size], flips ^ bool(epoch % 2)
            )
            for images, order, flips in zip(self.padded, self.orders, self.flips, strict=True)
        )
        broadened = round(self.config.data.broaden * size)
        x_0[:broadened] = broaden(x_0[:broadened], self.random)
        label = self.labels[self.orders[1][batch * size : (batch + 1) * size]]
        options = self.config.training
        for group in self.optimizer.param_groups:
            group["lr"] = options.lr * (1 - self.step / STEPS)
        amp = DTYPES[self.trainer.outcome.amp]
        with torch.autocast(self.device.type, amp, enabled=amp is not None):
            loss = self.loss(self._normalised(torch.cat([x_0, x_1])), label)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self._wait()

    def loss(self, x: Tensor, label: Tensor) -> Tensor:
        r"""Returns the bare loop's loss of reference images and as many ID images behind them."""
        features = self.net.backbone(x)
        f = self.net.head(features).float().squeeze(1)
        logits = self.class_head(features[len(label) :]).float()
        ratio = F.softplus(f[: len(label)]).mean() + F.softplus(-f[len(label) :]).mean()
        smoothing = self.config.objective.label_smoothing
        weight = self.config.objective.class_weight
        return ratio + weight * F.cross_entropy(logits, label, label_smoothing=smoothing)

    def _augmented(self, padded: Tensor, chosen: Tensor, flips: Tensor) -> Tensor:
        r"""Returns pixels in :math:`[0, 1]`, cropped out of reflected borders and flipped."""
        size, shifts = len(chosen), 2 * self.config.data.crop + 1
        shift = torch.randint(shifts**2, (size,), generator=self.generator, device=self.device)
        out = padded.new_empty(size, SIDE, SIDE, 3)
        # All images of one shift at once: there are few.
        for s in range(shifts**2):
            (here,) = torch.where(shift == s)
            i, j = divmod(s, shifts)
            out[here] = padded[chosen[here], i : i + SIDE, j : j + SIDE]
        out = torch.where(flips[chosen][:, None, None, None], out.flip(2), out)
        return out.permute(0, 3, 1, 2).float().div_(255)

    def _normalised(self, x: Tensor) -> Tensor:
        own = self.preprocess
        x = (x - own.mean[:, None, None]) / own.std[:, None, None]
        return x.to(memory_format=torch.channels_last)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    add = p.add_argument
    add("--width", type=float, default=1.0)
    add("--batch-size", type=count(2), default=256)
    add("--amp", choices=("none", "bf16", "auto"), default="none")
    add("--images", type=count(2), default=10_000, help="of each end")
    add("--pairs", type=count(2), default=30)
    add("--threads", type=count(1), help="torch's threads")
    add("--device", default="cpu")
    add("--out", type=Path, default=OUT, metavar="DIR")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def configured(args: argparse.Namespace) -> Config:
    r"""Returns the configuration of both loops."""
    options = {
        **OPTIONS,
        "network.width": args.width,
        "training.batch_size": args.batch_size,
        "training.amp": args.amp,
    }
    return Config.from_mapping({}, "options", list(options.items()))


def run(args: argparse.Namespace) -> int:
    r"""Measures the loops against each other."""
    device, config = find_device(args.device, "--device"), configured(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    require_writable(args.out)
    bench = Bench(config, max(args.images, args.batch_size), device)
    bench.ours()  # which decides on the precision
    rng = np.random.default_rng(SEED)

    def timed(ours: Call) -> tuple[float, float, float]:
        return time_over(ours, bench.bare, args.pairs, rng)

    results = {
        "A/A control: bare loop": timed(bench.bare),
        "training step": timed(bench.ours),
    }
    print(bench_tables.latency(results, "the bare loop's"))
    settings = {"images": args.images, "pairs": args.pairs, "amp": bench.trainer.outcome.amp}
    RunRecord(
        config={**config.to_dict(), "training_step": settings},
        seed=SEED,
        device=device_name(device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
