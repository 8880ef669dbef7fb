r"""The cost of whole scores, as they are deployed, over the networks that they are made of.

    python benchmarks/speed/deployed.py [--batch-sizes 1 32 256] [--pairs 200] [--device cpu]

Scores go from pixels to a number, on the networks of the shipped CPU configurations: the log-ratio,
its sum with the same network's class energy, heads on one layer and on three layers of a frozen
classifier, and the sum of a log-ratio with such a head. Each is one folded module, timed against its
networks' features alone, norms merged in both, in pairs (see `timing.py`). Weights are untrained:
no step depends on what they say. The A/A control times a network against itself.
"""

import argparse
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
from timing import call_on, noise, placed, time_over
from torch import Tensor, nn

from ood_osdre.config import load_config
from ood_osdre.errors import Parser, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.models import (
    Classifier,
    RatioModel,
    RepresentationRatio,
    SummedScore,
    WhitenedRatio,
    classifier_features,
    whitening_of,
)
from ood_osdre.training.build import build_head, build_ratio
from ood_osdre.training.distributed import device_name, find_device

OUT = Path("runs") / "deployed"
SEED = 0
# Of CIFAR-10; the images of either set that the features are whitened by.
CLASSES, WHITENED = 10, 64

Latencies = dict[str, tuple[float, float, float]]


def head_on(layers: Sequence[str], device: torch.device) -> RepresentationRatio:
    r"""Returns an untrained head on layers of an untrained classifier, none for its last features."""
    config = load_config("cifar10_representation")
    classifier, options = placed(build_ratio(config, CLASSES), device), config.head
    assert isinstance(classifier, Classifier)
    assert options is not None
    with torch.no_grad():
        one, other = (
            classifier_features(classifier, noise(WHITENED, device), layers).features
            for _ in range(2)
        )
    whitening = whitening_of(one, other, options.rank)
    inner = WhitenedRatio(whitening, build_head(options, whitening.shape[1], CLASSES))
    return RepresentationRatio(classifier, inner, layers)


def scores(device: torch.device) -> dict[str, RatioModel]:
    r"""Returns what is deployed, by its name."""
    pixels = build_ratio(load_config("cifar10_cpu"), CLASSES)
    head = head_on((), device)
    return {
        "log-ratio": pixels,
        "log-ratio + own energy": SummedScore([pixels], ["pixels"], ["log_ratio", "energy"]),
        "head, one layer": head,
        "head, three layers": head_on(["groups.0", "groups.1", "groups.2"], device),
        "log-ratio + head": SummedScore([pixels, head], ["pixels", "head"], ["log_ratio"]),
    }


def each(networks: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    r"""Returns the outputs of several networks on the same batch."""
    return [network(x) for network in networks]


@torch.inference_mode()
def measure(sizes: Sequence[int], pairs: int, device: torch.device) -> Latencies:
    r"""Times each score against its networks on batches of several sizes.

    Returns:
        The median ratio and the ends of its interval, by score and batch.
    """
    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    found: Latencies = {}
    for name, score in scores(device).items():
        folded = placed(score.fold(), device)
        parts: Any = folded.networks if isinstance(folded, SummedScore) else [folded]
        bare = partial(each, [part.backbone for part in parts])
        for size in sizes:
            x = noise(size, device)
            alone = call_on(bare, x)
            if name == "log-ratio":
                found[f"A/A control, batch {size}"] = time_over(alone, alone, pairs, rng)
            times = time_over(call_on(folded.predict, x), alone, pairs, rng)
            found[f"{name}, batch {size}"] = times
    return found


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    p.add_argument("--batch-sizes", type=count(1), nargs="+", default=[1, 32, 256])
    p.add_argument("--pairs", type=count(10), default=200)
    p.add_argument("--device", help="default: a GPU if there is one")
    p.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes its record."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures, after what can be refused before that."""
    device = find_device(args.device, "--device")
    require_writable(args.out)
    results = measure(args.batch_sizes, args.pairs, device)
    print(bench_tables.deployed(results))
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    RunRecord(
        config={**settings, "device": str(device)},
        seed=SEED,
        device=device_name(device),
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
