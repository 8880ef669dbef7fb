r"""Seconds to score a benchmark's test images: ours, OpenOOD's loop, and a plain DataLoader's.

    python benchmarks/speed/throughput.py --data-root DIR [--rounds 5] [--workers 0 4] [--threads N]

The same network, folded, with a class head and random weights, scores the same images, from files
to scores, in every way. Each round times each way once, in a random order; what is reported is the
median over the rounds of a way's time over that of our warm pass in the same round.

- `ours, warm`: checks the lists, maps the decoded images from the cache, scores.
- `ours, warm, scoring`: the part of it after loading.
- `ours, cold`: the same with an empty cache, so that every file is decoded (and kept).
- `forward passes`: the network alone, on batches that are ready in memory.
- `DataLoader`: torch's loader over the files with torchvision's transforms.
- `OpenOOD`: its `BasePostprocessor.inference` over its `ImglistDataset`, where it is importable.
  On a CPU its calls of `.cuda()`, which are hard-coded, are made to do nothing.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import above  # noqa: F401
import bench_tables
import numpy as np
import torch
from host_inputs import Files, Logits, without_cuda
from numpy.typing import NDArray
from outputs import require_writable
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from tqdm import tqdm

from ood_osdre.config import Config, load_config
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.data.benchmark import BenchmarkData
from ood_osdre.data.status import inspect
from ood_osdre.data.transforms import Preprocess
from ood_osdre.errors import count, exit_status
from ood_osdre.evaluation.evaluate import Evaluation, evaluate_benchmark
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.evaluation.scores import ROLES
from ood_osdre.plugin.openood.host import is_importable, require
from ood_osdre.training.build import build_ratio
from ood_osdre.training.distributed import device_name, find_device

OUT = Path("runs") / "throughput"
HOST_BATCH = 200  # OpenOOD's default
SEED = 0

WARM = bench_tables.OURS_WARM
SCORING, COLD, BARE = "ours, warm, scoring", "ours, cold", "forward passes"


class Pass(NamedTuple):
    r"""One way's pass over the test images.

    Attributes:
        seconds: What it took, by name.
        scores: The scores, set by set, with shape :math:`(N)`.
    """

    seconds: dict[str, float]
    scores: NDArray[np.floating]


class Bench:
    r"""The ways to score a benchmark's test images, each timed on its own.

    Arguments:
        args: The options of the command line.
        config: The configuration, whose network and batch size are taken.
        device: Where to score.
    """

    def __init__(self, args: argparse.Namespace, config: Config, device: torch.device) -> None:
        self.args, self.batch_size = args, config.evaluation.batch_size
        self.device = device
        self.manifest = load_manifest(args.benchmark, config.id)
        self.preprocess = Preprocess(self.manifest.mean, self.manifest.std, self.device)
        data = self._load(None)
        self.images = [data.id_test, *data.near.values(), *data.far.values()]
        self.count = sum(map(len, self.images))
        self.classes = int(data.id_test.labels.max()) + 1
        torch.manual_seed(SEED)
        ratio = build_ratio(config, self.classes)
        # A head starts at zero, where all scores are equal.
        for p in ratio.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.1)
        self.ratio = ratio.to(self.device).eval().fold()
        self.sets = [
            status
            for role in ("id_test", "near", "far")
            for spec in self.manifest.role(role)
            if (status := inspect(self.manifest, spec, args.data_root)).present
        ]
        mean, std = self.manifest.mean, self.manifest.std
        self.transform = transforms.Compose(
            [
                transforms.Resize(self.manifest.size),
                transforms.CenterCrop(self.manifest.size),
                transforms.ToTensor(),
                transforms.Normalize(mean, std),
            ]
        )

    def ways(self) -> dict[str, Callable[[], Pass]]:
        r"""Returns the ways by name, each a function that goes it once."""

        def timed(name: str, call: Callable[[], NDArray[np.floating]]) -> Callable[[], Pass]:
            def run() -> Pass:
                started = time.perf_counter()
                scores = call()
                self._wait()
                return Pass({name: time.perf_counter() - started}, scores)

            return run

        ways = {WARM: self.warm, COLD: timed(COLD, self.cold), BARE: self.bare}
        for workers in self.args.workers:
            title = f"DataLoader, {workers} workers"
            ways[title] = timed(title, partial(self.loader, workers))
            if is_importable():
                title = f"OpenOOD, {workers} workers"
                ways[title] = timed(title, partial(self.openood, workers))
        return ways

    def warm(self) -> Pass:
        r"""Loads from the cache and scores."""
        started = time.perf_counter()
        done = self._evaluate(self._load(None))
        seconds = {WARM: time.perf_counter() - started, SCORING: done.seconds}
        return Pass(seconds, _scores_of(done))

    def cold(self) -> NDArray[np.floating]:
        r"""Decodes into an empty cache and scores."""
        with tempfile.TemporaryDirectory() as cache:
            return _scores_of(self._evaluate(self._load(Path(cache))))

    @torch.inference_mode()
    def bare(self) -> Pass:
        r"""Times the forward passes of batches that are ready."""
        seconds, scores = 0.0, []
        for images in self.images:
            for start in range(0, len(images), self.batch_size):
                batch = np.ascontiguousarray(images.images[start : start + self.batch_size])
                x = self.preprocess(torch.as_tensor(batch))
                self._wait()
                started = time.perf_counter()
                score = self.ratio.predict(x).score
                self._wait()
                seconds += time.perf_counter() - started
                scores.append(score.cpu())
        return Pass({BARE: seconds}, torch.cat(scores).numpy())

    @torch.inference_mode()
    def loader(self, workers: int) -> NDArray[np.floating]:
        r"""Scores through torch's loader."""
        scores = []
        for status in self.sets:
            files = Files(status, self.transform)
            for x in DataLoader(files, HOST_BATCH, num_workers=workers):
                scores.append(self.ratio.log_ratio(x.to(self.device)).cpu())
        return torch.cat(scores).numpy()

    def openood(self, workers: int) -> NDArray[np.floating]:
        r"""Scores through OpenOOD's data set and loop, whose score is a softmax's maximum."""
        lists = require("openood.datasets.imglist_dataset").ImglistDataset
        loop = require("openood.postprocessors.base_postprocessor").BasePostprocessor(None)
        net = Logits(self.ratio)
        scores = []
        for status in self.sets:
            files = lists(
                name=status.spec.name,
                imglist_pth=str(status.path),
                data_dir=str(status.images),
                num_classes=self.classes,
                preprocessor=self.transform,
                data_aux_preprocessor=self.transform,
            )
            loader = DataLoader(files, HOST_BATCH, num_workers=workers)
            with without_cuda(self.device):
                scores.append(loop.inference(net, loader, False)[1])
        return np.concatenate(scores)

    def _evaluate(self, data: BenchmarkData) -> Evaluation:
        return evaluate_benchmark(
            self.ratio, data, self.preprocess, self.batch_size, progress=False
        )

    def _load(self, cache: Path | None) -> BenchmarkData:
        cache = cache or self.args.cache_dir
        root = self.args.data_root
        return load_benchmark(self.manifest, root, cache, training=False, progress=False)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _scores_of(done: Evaluation) -> NDArray[np.floating]:
    return np.concatenate([s.score for role in ROLES for s in done.scores.of(role).values()])


def measure(bench: Bench, rounds: int) -> dict[str, list[float]]:
    r"""Returns the seconds of every way, one a round, after a round that does not count."""
    ways, rng = bench.ways(), np.random.default_rng(SEED)
    seconds: dict[str, list[float]] = {}
    for turn in tqdm(range(rounds + 1), unit="round", disable=None):
        for name in rng.permutation(list(ways)):
            for part, value in ways[name]().seconds.items():
                if turn:
                    seconds.setdefault(part, []).append(value)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data-root", type=Path, required=True, metavar="DIR")
    add("--cache-dir", type=Path, metavar="DIR", help="decoded images (default: in data root)")
    add("--id", choices=("cifar10", "cifar100"), default="cifar10")
    add("--benchmark", default="pack", metavar="NAME|FILE")
    add("--config", metavar="NAME|FILE", help="of the network (default: the CPU budget's)")
    add("--rounds", type=count(1), default=5)
    add(
        "--workers", type=count(0), nargs="+", default=[0, 4], help="of the loaders (OpenOOD's: 4)"
    )
    add("--threads", type=count(1), help="torch's threads")
    add("--device", default="cpu")
    add("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures every way, prints the table and writes it with its record."""
    device = find_device(args.device, "--device")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    overrides = [("id", args.id), ("benchmark", args.benchmark)]
    config = load_config(args.config or f"{args.id}_cpu", overrides)
    require_writable(args.out)
    bench = Bench(args, config, device)
    seconds = measure(bench, args.rounds)
    results = {"images": bench.count, "seconds": seconds}
    print(bench_tables.throughput(results))
    settings = {
        "rounds": args.rounds,
        "workers": args.workers,
        "threads": torch.get_num_threads(),
        "host_batch": HOST_BATCH,
    }
    RunRecord(
        config={**config.to_dict(), "throughput": settings},
        seed=SEED,
        benchmark=bench.manifest.name,
        device=device_name(device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
