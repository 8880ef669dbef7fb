r"""Seconds to score a benchmark's test images: ours, OpenOOD's loop, and a plain DataLoader's.

    python benchmarks/speed/throughput.py --data-root DIR [--rounds 5] [--workers 0 4] [--threads N]
    python benchmarks/speed/throughput.py --photographs 1000 --network mobilenet_v3_small

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

With `--photographs` the images are generated JPEG files of `--stored` pixels, brought to `--side`, and
the network is one of torchvision's with random weights. Our way is then that of a detector that is
given a folder, which keeps no decoded images; `decoding` is the part of it without the network.
Whichever of `decoding` and `forward passes` takes longer bounds it.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import above  # noqa: F401
import bench_tables
import numpy as np
import torch
import torchvision
from host_inputs import Files, Logits, without_cuda
from numpy.typing import NDArray
from outputs import require_writable
from photographs import write_photographs
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from tqdm import tqdm

from ood_osdre.config import Config, load_config
from ood_osdre.data import BenchmarkData, ImageSet, SetSpec, load_benchmark, load_manifest
from ood_osdre.data.image_files import ArrayRows, in_batches
from ood_osdre.data.images import image_files
from ood_osdre.data.lists import read_list, write_list
from ood_osdre.data.status import SetStatus, inspect
from ood_osdre.data.transforms import Preprocess
from ood_osdre.errors import Parser, count, exit_status
from ood_osdre.evaluation.evaluate import Evaluation, evaluate_benchmark, score_images
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.evaluation.scores import ROLES
from ood_osdre.models import RatioModel
from ood_osdre.plugin.openood.host import is_importable, require
from ood_osdre.training.build import build_ratio
from ood_osdre.training.distributed import device_name, find_device

OUT = Path("runs") / "throughput"
CLASSES = 10
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HOST_BATCH = 200  # OpenOOD's default
SEED = 0

WARM = bench_tables.OURS_WARM
SCORING, COLD, BARE = "ours, warm, scoring", "ours, cold", "forward passes"
FILES, DECODING = bench_tables.FROM_FILES, "decoding"


class Pass(NamedTuple):
    r"""One way's pass over the test images.

    Attributes:
        seconds: What it took, by name.
        scores: The scores, set by set, with shape :math:`(N)`.
    """

    seconds: dict[str, float]
    scores: NDArray[np.floating]


Timed: TypeAlias = Callable[[str, Callable[[], NDArray[np.floating]]], Callable[[], Pass]]


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
        self.ratio = _untrained(config, self.classes, device)
        self.sets = [
            status
            for role in ("id_test", "near", "far")
            for spec in self.manifest.role(role)
            if (status := inspect(self.manifest, spec, args.data_root)).present
        ]
        self.transform = _transform(self.manifest.size, self.manifest.mean, self.manifest.std)

    def ways(self) -> dict[str, Callable[[], Pass]]:
        r"""Returns the ways by name, each a function that goes it once."""

        def timed(name: str, call: Callable[[], NDArray[np.floating]]) -> Callable[[], Pass]:
            def run() -> Pass:
                started = time.perf_counter()
                scores = call()
                self._wait()
                return Pass({name: time.perf_counter() - started}, scores)

            return run

        ways = self.own(timed) | {BARE: self.bare}
        for workers in self.args.workers:
            title = f"DataLoader, {workers} workers"
            ways[title] = timed(title, partial(self.loader, workers))
            if is_importable():
                title = f"OpenOOD, {workers} workers"
                ways[title] = timed(title, partial(self.openood, workers))
        return ways

    def own(self, timed: Timed) -> dict[str, Callable[[], Pass]]:
        r"""Returns our ways."""
        return {WARM: self.warm, COLD: timed(COLD, self.cold)}

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


class Photographs(Bench):
    r"""The ways to score generated photographs by a network of torchvision's.

    Arguments:
        args: The options of the command line.
        config: The configuration, whose batch size and head are taken.
        device: Where to score.
        folder: Where the files are written.
    """

    def __init__(
        self, args: argparse.Namespace, config: Config, device: torch.device, folder: Path
    ) -> None:
        self.args, self.batch_size, self.device = args, config.evaluation.batch_size, device
        self.count, self.classes, self.size = args.photographs, CLASSES, args.side
        self.preprocess = Preprocess(IMAGENET_MEAN, IMAGENET_STD, device)
        torch.manual_seed(SEED)
        network = torchvision.models.get_model(args.network, num_classes=1000)
        # The last layer alone classifies; what comes before it are the features.
        last = "fc" if hasattr(network, "fc") else "classifier"
        setattr(network, last, nn.Flatten())
        self.ratio = _untrained(config, CLASSES, device, network, self.size)
        self.names = write_photographs(folder / "images", self.count, tuple(args.stored), SEED)
        listed = folder / "list.txt"
        write_list(listed, self.names, [i % CLASSES for i in range(self.count)])
        spec = SetSpec(name="photographs", role="id_test", list=str(listed))
        facts = self.count, self.count, listed, folder / "images"
        self.sets = [SetStatus(spec, "present", *facts, list=read_list(listed))]
        lazy = image_files(folder / "images", self.names, self.size, "photographs")
        # As many as one batch are kept, for the network alone.
        held, none = lazy[: min(self.count, self.batch_size)], np.full(self.count, -1)
        repeated = ArrayRows(held, np.arange(self.count) % len(held))
        self.lazy, self.images = lazy, [ImageSet(repeated, none, self.names)]
        self.transform = _transform(self.size, IMAGENET_MEAN, IMAGENET_STD)

    def own(self, timed: Timed) -> dict[str, Callable[[], Pass]]:  # noqa: D102
        return {FILES: timed(FILES, self.from_files), DECODING: timed(DECODING, self.decoding)}

    def from_files(self) -> NDArray[np.floating]:
        r"""Decodes and scores, as a detector does."""
        return score_images(self.ratio, self.lazy, self.preprocess, self.batch_size)[0]

    def decoding(self) -> NDArray[np.floating]:
        r"""Decodes alone."""
        return np.array([len(batch) for batch in in_batches(self.lazy, self.batch_size)], float)


def _untrained(
    config: Config,
    classes: int,
    device: torch.device,
    backbone: nn.Module | None = None,
    size: int = 32,
) -> RatioModel:
    torch.manual_seed(SEED)
    ratio = build_ratio(config, classes, None, backbone, size)
    # A head starts at zero, where all scores are equal.
    for p in ratio.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.1)
    return ratio.to(device).eval().fold()


def _transform(size: int, mean: Sequence[float], std: Sequence[float]) -> transforms.Compose:
    steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize(mean, std)])


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
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--data-root", type=Path, metavar="DIR")
    add(
        "--photographs",
        type=count(2),
        metavar="N",
        help="generated files, in place of a benchmark",
    )
    add("--network", choices=("resnet18", "mobilenet_v3_small"), default="resnet18")
    add("--side", type=count(32), default=224, help="of the photographs as the network sees them")
    add("--stored", type=count(32), nargs=2, default=[500, 375], help="width and height of files")
    add("--batch-size", type=count(1), help="of our scoring (default: the configuration's)")
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
    if (args.data_root is None) == (args.photographs is None):
        parser.error("expected --data-root or --photographs, and not both")
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures every way, prints the table and writes it with its record."""
    device = find_device(args.device, "--device")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    overrides = [("id", args.id), ("benchmark", args.benchmark)]
    if args.batch_size is not None:
        overrides.append(("evaluation.batch_size", args.batch_size))
    config = load_config(args.config or f"{args.id}_cpu", overrides)
    require_writable(args.out)
    with tempfile.TemporaryDirectory() as folder:
        if args.photographs is None:
            bench, over = Bench(args, config, device), WARM
            name = bench.manifest.name
        else:
            bench, over = Photographs(args, config, device, Path(folder)), FILES
            name = "photographs"
        seconds = measure(bench, args.rounds)
    results = {"images": bench.count, "seconds": seconds}
    print(bench_tables.throughput(results, over))
    settings = {
        "rounds": args.rounds,
        "workers": args.workers,
        "threads": torch.get_num_threads(),
        "host_batch": HOST_BATCH,
    }
    if args.photographs is not None:
        settings |= {k: getattr(args, k) for k in ("network", "side", "stored", "photographs")}
    RunRecord(
        config={**config.to_dict(), "throughput": settings},
        seed=SEED,
        benchmark=name,
        device=device_name(device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
