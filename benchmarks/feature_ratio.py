r"""A ratio head on a frozen classifier, beside MSP, energy and KNN on the same network.

    python benchmarks/feature_ratio.py --data-root DIR [--cache-dir DIR]

Trains a narrow CIFAR-10 classifier, with no outlier data, in about two minutes of one core. It is
then frozen. The head sees the features of ID and of reference images; MSP, energy and KNN see ID
data alone, so the comparison says what the reference is worth, not which method is better.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import bench_tables
import numpy as np
import torch
from numpy.typing import NDArray
from outputs import require_writable
from torch import Tensor

from ood_osdre.config import Config, HeadConfig, load_config
from ood_osdre.data import BenchmarkData, ImageSet, load_benchmark, load_manifest
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors.feature_ratio import FeatureRatio
from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.metrics import OODMetrics, ood_metrics
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.files import local
from ood_osdre.models.baselines import Classifier
from ood_osdre.models.frozen import collect_features, extract_features
from ood_osdre.plugin.openood import OSDRENet
from ood_osdre.stages import train_run
from ood_osdre.training.batches import broadened
from ood_osdre.training.distributed import device_name

OUT = Path("runs") / "feature_ratio"
BATCH = 500

CLASSIFIER = [
    "estimator=classifier",
    "objective.endpoint=0",
    "objective.class_weight=1",
    "data.broaden=0",
    "training.warmup=100",
]


def inputs(images: ImageSet, preprocess: Preprocess) -> Iterator[Tensor]:
    r"""Yields preprocessed batches."""
    for start in range(0, len(images), BATCH):
        batch = np.ascontiguousarray(images.images[start : start + BATCH])
        yield preprocess(torch.as_tensor(batch))


class Scored:
    r"""The features, logits and scores of one set of images."""

    def __init__(self, net: OSDRENet, images: ImageSet, preprocess: Preprocess) -> None:
        parts = [extract_features(net, x) for x in inputs(images, preprocess)]
        self.features = torch.cat([p.features for p in parts])
        self.logits = torch.cat([p.logits for p in parts if p.logits is not None])

    def scores(self, knn: Classifier, heads: dict[str, FeatureRatio]) -> dict[str, NDArray]:
        r"""Returns the scores by method, larger = more ID."""
        # The class itself scores features where its backbone is the identity.
        found = {}
        for name in ("msp", "energy", "knn"):
            knn.score = name
            parts = [knn.log_ratio(x) for x in self.features.split(BATCH)]
            found[name] = torch.cat(parts)
        found |= {name: head.log_ratio_of_features(self.features) for name, head in heads.items()}
        return {name: score.detach().numpy() for name, score in found.items()}


def fit_heads(
    net: OSDRENet, data: BenchmarkData, preprocess: Preprocess
) -> tuple[dict[str, FeatureRatio], dict[str, float], Tensor]:
    r"""Fits the heads; returns them, their seconds, and the ID features."""
    started = time.perf_counter()
    reference, _ = data.split_reference()
    id_features = collect_features(net, inputs(data.id_train, preprocess))
    plain = collect_features(net, inputs(reference, preprocess))
    broad = collect_features(net, broadened(inputs(reference, preprocess), preprocess))
    seconds = {"features": time.perf_counter() - started}
    heads = {}
    linear, mlp = HeadConfig(backbone="linear"), HeadConfig()
    for name, options, features in (
        ("ratio_linear", linear, plain),
        ("ratio_mlp", mlp, plain),
        ("ratio_linear_broad", linear, broad),
        ("ratio_mlp_broad", mlp, broad),
    ):
        heads[name] = FeatureRatio(options).fit_features(id_features, features)
        seconds[name] = heads[name].seconds
    return heads, seconds, id_features


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    p.add_argument("--data-root", type=local, required=True)
    p.add_argument("--cache-dir", type=local)
    p.add_argument(
        "--steps", type=count(1), default=1800, help="of the classifier (default: 1800)"
    )
    p.add_argument("--classifier", type=local, help="a run folder of it, to train none")
    p.add_argument("--out", type=local, default=OUT)
    return p


def train_classifier(config: Config, data: BenchmarkData, folder: Path) -> tuple[OSDRENet, float]:
    r"""Trains the classifier, without outlier data, and freezes it."""
    scorer, outcome, _ = train_run(config, data, folder, torch.device("cpu"), progress=False)
    if not outcome.finished:
        raise UserError(f"training: stopped ({outcome.reason}) at step {outcome.step}.")
    return OSDRENet.of(scorer), outcome.seconds


def main(argv: Sequence[str] | None = None) -> int:
    r"""Trains, fits, scores, and writes the table."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Trains, fits, scores, and writes the table."""
    steps = [f"training.{k}={args.steps}" for k in ("steps", "eval_every", "checkpoint_every")]
    config = load_config("cifar10_cpu", [*CLASSIFIER, *steps, "data.val_limit=500"])
    manifest = load_manifest("pack", "cifar10")
    require_writable(args.out)
    given = None if args.classifier is None else OSDRENet.load(args.classifier)
    data = load_benchmark(manifest, args.data_root, args.cache_dir)
    train_seconds = None
    if given is None:
        net, train_seconds = train_classifier(config, data, args.out / "classifier")
    else:
        net, config = given, given.config or config
    preprocess = Preprocess(manifest.mean, manifest.std)
    heads, seconds, id_features = fit_heads(net, data, preprocess)

    knn = Classifier(
        torch.nn.Identity(), net.feature_size, net.num_classes, "knn", bench_tables.NEIGHBOURS
    )
    knn.class_head = net.get_fc_layer()
    knn.fit(id_features.split(BATCH), torch.as_tensor(data.id_train.labels))
    with torch.no_grad():
        scored_id = Scored(net, data.id_test, preprocess)
        id_scores = scored_id.scores(knn, heads)
        metrics: dict[str, dict[str, OODMetrics]] = {name: {} for name in id_scores}
        for name, images in {**data.near, **data.far}.items():
            for method, scores in Scored(net, images, preprocess).scores(knn, heads).items():
                metrics[method][name] = ood_metrics(id_scores[method], scores)
    accuracy = float((scored_id.logits.argmax(1).numpy() == data.id_test.labels).mean())

    results = {
        "accuracy": accuracy,
        "seconds": seconds,
        "metrics": {
            m: {n: {"auroc": v.auroc, "fpr95": v.fpr95} for n, v in row.items()}
            for m, row in metrics.items()
        },
    }
    RunRecord(
        config={
            **config.replace(benchmark=manifest.name).to_dict(),
            "neighbours": bench_tables.NEIGHBOURS,
            "bank": len(id_features),
            "heads": {name: head.options.to_dict() for name, head in heads.items()},
        },
        seed=config.training.seed,
        benchmark=manifest.name,
        device=device_name(torch.device("cpu")),
        data={"reference": data.reference_name, "checksums": data.checksums},
        selection="last step of every head; no OOD set is seen",
        train_seconds=train_seconds,
        results=results,
    ).write(args.out / "run.json")
    print(bench_tables.feature_ratio(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
