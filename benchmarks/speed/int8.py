r"""What static int8 quantisation of the exported scorer costs in AUROC and gains in time.

    python benchmarks/speed/int8.py CHECKPOINT --data-root DIR [--calibration 512]

Exports the scorer of a run folder to ONNX, quantises weights and activations with onnxruntime,
calibrated on ID *validation* images, and scores the test sets of the run's benchmark with both.
Nothing is chosen by the result. The time is that of a batch, in pairs (see `timing.py`). Needs the
packages of the extra `export`.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import above  # noqa: F401
import bench_tables
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from outputs import require_writable
from timing import time_over

from ood_osdre.cli import find_benchmark
from ood_osdre.config import Config
from ood_osdre.data import BenchmarkData, load_benchmark
from ood_osdre.detectors.scorer import load_scorer
from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.export import export_scorer

OUT = Path("runs") / "int8"
BATCH, PAIRS, SEED = 64, 50, 0
# The estimators that can be exported.
EXPORTED = ("one_step", "direct")

Images = NDArray[np.uint8]
Results = dict[str, Any]


class Calibration(CalibrationDataReader):
    r"""Batches of ID images, from which the ranges of activations are read."""

    def __init__(self, images: Images) -> None:
        self.batches: Iterator[Images] = iter(
            np.ascontiguousarray(images[i : i + BATCH]) for i in range(0, len(images), BATCH)
        )

    def get_next(self) -> dict[str, Images] | None:  # noqa: D102
        batch = next(self.batches, None)
        return None if batch is None else {"images": batch}


def session(path: Path) -> onnxruntime.InferenceSession:
    r"""Opens a model on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


class Predicted(NamedTuple):
    r"""What a model says about a set of images.

    Attributes:
        scores: The log-ratios in nats, larger = more ID, with shape :math:`(N)`.
        classes: The predicted classes, with shape :math:`(N)`; None without a class head.
    """

    scores: NDArray[np.float32]
    classes: NDArray[np.int64] | None


def predict(model: onnxruntime.InferenceSession, images: Images) -> Predicted:
    r"""Scores images in batches."""
    names = [output.name for output in model.get_outputs()]
    batches = [
        model.run(names, {"images": np.ascontiguousarray(images[i : i + BATCH])})
        for i in range(0, len(images), BATCH)
    ]
    outputs = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    found = dict(zip(names, outputs, strict=True))
    classes = found["logits"].argmax(axis=1) if "logits" in found else None
    return Predicted(found["log_ratio"], classes)


def evenly(images: Images, number: int) -> Images:
    r"""Returns evenly spaced images, as lists are sorted by class; all, if there are fewer."""
    chosen = np.linspace(0, len(images) - 1, min(number, len(images))).round().astype(int)
    return images[chosen]


def compare(models: Mapping[str, onnxruntime.InferenceSession], data: BenchmarkData) -> Results:
    r"""Returns the AUROC of each set, and the ID accuracy if there are classes, in percent.

    Arguments:
        models: The model in single precision and the quantised one.
        data: The benchmark.
    """
    on_id = [predict(model, data.id_test.images[:]) for model in models.values()]
    results: Results = {"auroc": {}}
    for name, images in {**data.near, **data.far}.items():
        a, b = (
            100 * ood_metrics(known.scores, predict(model, images.images[:]).scores).auroc
            for known, model in zip(on_id, models.values(), strict=True)
        )
        results["auroc"][name] = a, b, b - a
    right = [
        100 * np.mean(p.classes == data.id_test.labels) for p in on_id if p.classes is not None
    ]
    return results | ({"accuracy": right} if right else {})


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--data-root", type=Path, default=Path("data"))
    p.add_argument("--calibration", type=count(1), default=512, help="number of images")
    p.add_argument("--out", type=Path, default=OUT)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Quantises, scores with both, prints the table and writes it with its record."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Quantises, scores with both, prints the table and writes it with its record."""
    if not args.checkpoint.is_dir():
        raise UserError(f"{args.checkpoint}: no such folder, expected a run's.")
    scorer = load_scorer(args.checkpoint)
    config = Config.from_mapping(scorer.metadata["config"])
    if config.estimator not in EXPORTED:
        raise UserError(
            f"{args.checkpoint}: holds a model of estimator {config.estimator}, "
            f"expected {' or '.join(EXPORTED)}."
        )
    require_writable(args.out)
    manifest = find_benchmark(config.benchmark, config.id, args.data_root)
    data = load_benchmark(manifest, args.data_root)
    calibration = evenly(data.id_val.images[:], args.calibration)
    with tempfile.TemporaryDirectory() as folder:
        plain, ready, int8 = (Path(folder) / f"{n}.onnx" for n in ("plain", "ready", "int8"))
        export_scorer(scorer, plain)
        quant_pre_process(plain, ready)
        quantize_static(
            ready,
            int8,
            Calibration(calibration),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        models = {"float32": session(plain), "int8": session(int8)}
        size = int8.stat().st_size / plain.stat().st_size
    batch = np.ascontiguousarray(data.id_test.images[:BATCH])
    plain_run, int8_run = (
        partial(m.run, ["log_ratio"], {"images": batch}) for m in models.values()
    )
    speed, *ends = time_over(int8_run, plain_run, PAIRS, np.random.default_rng(SEED))

    results = compare(models, data)
    results["int8 over float32"] = {"time": speed, "interval": ends, "size": size}
    print(
        f"{bench_tables.int8(results)}\nint8 over float32: time {speed:.2f} "
        f"[{ends[0]:.2f}, {ends[1]:.2f}], file {size:.2f}"
    )
    RunRecord(
        config={
            "checkpoint": config.to_dict(),
            "calibration": len(calibration),
            "batch": BATCH,
            "pairs": PAIRS,
        },
        seed=SEED,
        benchmark=manifest.name,
        device="cpu (1 thread)",
        data={"checksums": data.checksums},
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
