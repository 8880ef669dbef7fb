r"""Seconds to score a benchmark's test images: ours, OpenOOD's loop, and a plain DataLoader's.

    python benchmarks/throughput.py --data-root DIR [--rounds 5] [--workers 0 4] [--threads N]

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import bench_tables
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm import tqdm

from ood_osdre.building import build_ratio
from ood_osdre.config import Config, load_config
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.data.benchmark import BenchmarkData
from ood_osdre.data.preprocess import Preprocess
from ood_osdre.data.status import SetStatus, inspect
from ood_osdre.errors import exit_status
from ood_osdre.evaluation import evaluate_benchmark
from ood_osdre.experiment import device_name
from ood_osdre.plugin.openood.host import is_importable, require
from ood_osdre.ratio import RatioModel
from ood_osdre.records import RunRecord

RESULTS = Path(__file__).parent / "results" / "throughput"
HOST_BATCH = 200  # OpenOOD's default

WARM = bench_tables.OURS_WARM
SCORING, COLD, BARE = "ours, warm, scoring", "ours, cold", "forward passes"


class Files(Dataset[Tensor]):
    r"""The images of a set, decoded and normalised one by one."""

    def __init__(self, status: SetStatus, transform: Callable[[Image.Image], Tensor]) -> None:
        assert status.list is not None
        self.paths = [status.images / name for name in status.list.names]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


class Logits(nn.Module):
    r"""The folded ratio as a host sees it: a network with logits."""

    def __init__(self, ratio: RatioModel) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the logits, with shape :math:`(B, C)`."""
        logits = self.ratio.coefficients(x).logits
        assert logits is not None
        return logits


class Bench:
    r"""The ways to score a benchmark's test images, each timed on its own.

    Arguments:
        args: The options of the command line.
        config: The configuration, whose network and batch size are taken.
    """

    def __init__(self, args: argparse.Namespace, config: Config) -> None:
        self.args, self.batch_size = args, config.evaluation.batch_size
        self.device = torch.device(args.device)
        self.manifest = load_manifest(args.benchmark, config.id)
        self.preprocess = Preprocess(self.manifest.mean, self.manifest.std, self.device)
        data = self._load(None)
        self.images = [data.id_test, *data.near.values(), *data.far.values()]
        self.count = sum(map(len, self.images))
        self.classes = int(data.id_test.labels.max()) + 1
        self.ratio = build_ratio(config, self.classes).to(self.device).eval().fold()
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

    def ways(self) -> dict[str, Callable[[], dict[str, float]]]:
        r"""Returns the ways by name; a call returns the seconds it took, by name."""

        def timed(name: str, call: Callable[[], object]) -> Callable[[], dict[str, float]]:
            def run() -> dict[str, float]:
                started = time.perf_counter()
                call()
                self._wait()
                return {name: time.perf_counter() - started}

            return run

        ways = {WARM: self.warm, COLD: timed(COLD, self.cold), BARE: self.bare}
        for workers in self.args.workers:
            title = f"DataLoader, {workers} workers"
            ways[title] = timed(title, partial(self.loader, workers))
            if is_importable():
                title = f"OpenOOD, {workers} workers"
                ways[title] = timed(title, partial(self.openood, workers))
        return ways

    def warm(self) -> dict[str, float]:
        r"""Times loading from the cache and scoring."""
        started = time.perf_counter()
        done = evaluate_benchmark(
            self.ratio, self._load(None), self.preprocess, self.batch_size, progress=False
        )
        return {WARM: time.perf_counter() - started, SCORING: done.seconds}

    def cold(self) -> None:
        r"""Decodes into an empty cache and scores."""
        with tempfile.TemporaryDirectory() as cache:
            data = self._load(Path(cache))
            evaluate_benchmark(self.ratio, data, self.preprocess, self.batch_size, progress=False)

    @torch.inference_mode()
    def bare(self) -> dict[str, float]:
        r"""Times the forward passes of batches that are ready."""
        seconds = 0.0
        for images in self.images:
            for start in range(0, len(images), self.batch_size):
                batch = np.ascontiguousarray(images.images[start : start + self.batch_size])
                x = self.preprocess(torch.as_tensor(batch))
                self._wait()
                started = time.perf_counter()
                self.ratio.coefficients(x)
                self._wait()
                seconds += time.perf_counter() - started
        return {BARE: seconds}

    @torch.inference_mode()
    def loader(self, workers: int) -> None:
        r"""Scores through torch's loader."""
        for status in self.sets:
            files = Files(status, self.transform)
            for x in DataLoader(files, HOST_BATCH, num_workers=workers):
                self.ratio.log_ratio(x.to(self.device)).cpu()

    def openood(self, workers: int) -> None:
        r"""Scores through OpenOOD's data set and loop."""
        lists = require("openood.datasets.imglist_dataset").ImglistDataset
        loop = require("openood.postprocessors.base_postprocessor").BasePostprocessor(None)
        net = Logits(self.ratio)
        for status in self.sets:
            files = lists(
                name=status.spec.name,
                imglist_pth=str(status.path),
                data_dir=str(status.images),
                num_classes=self.classes,
                preprocessor=self.transform,
                data_aux_preprocessor=self.transform,
            )
            with without_cuda(self.device):
                loop.inference(net, DataLoader(files, HOST_BATCH, num_workers=workers), False)

    def _load(self, cache: Path | None) -> BenchmarkData:
        cache = cache or self.args.cache_dir
        root = self.args.data_root
        return load_benchmark(self.manifest, root, cache, training=False, progress=False)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def without_cuda(device: torch.device) -> Iterator[None]:
    r"""Makes a tensor's `.cuda()` do nothing on a device that is none."""
    if device.type == "cuda":
        yield
        return
    with mock.patch.object(Tensor, "cuda", lambda x: x):
        yield


def measure(bench: Bench, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    r"""Returns the seconds of every way, one a round, after a round that does not count."""
    ways, rng = bench.ways(), np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {}
    for turn in tqdm(range(rounds + 1), unit="round"):
        for name in rng.permutation(list(ways)):
            for part, value in ways[name]().items():
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
    add("--rounds", type=int, default=5)
    add("--workers", type=int, nargs="+", default=[0, 4], help="of the loaders (OpenOOD's: 4)")
    add("--threads", type=int, help="torch's threads")
    add("--device", default="cpu")
    add("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)

    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures every way, prints the table and writes it with its record."""
    config = load_config(args.config or f"{args.id}_cpu", [("id", args.id)])
    bench = Bench(args, config)
    seconds = measure(bench, args.rounds)
    results = {"images": bench.count, "seconds": seconds}
    print(bench_tables.throughput(results))
    settings = {"rounds": args.rounds, "workers": args.workers, "threads": torch.get_num_threads()}
    RunRecord(
        config={**config.to_dict(), "throughput": settings},
        benchmark=bench.manifest.name,
        device=device_name(bench.device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
