r"""What static int8 quantisation of the exported scorer costs in AUROC and gains in time.

    python benchmarks/int8.py CHECKPOINT --data-root DIR [--calibration 512]

Exports the scorer of a run folder to ONNX, quantises weights and activations with onnxruntime,
calibrated on ID *validation* images, and scores the test sets of the run's benchmark with both.
Nothing is chosen by the result. The time is the median over interleaved batches. Needs the
packages of the extra `export`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

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

from ood_osdre.config import Config
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.experiment import load_scorer
from ood_osdre.export import export_scorer
from ood_osdre.metrics import ood_metrics
from ood_osdre.records import RunRecord

RESULTS = Path(__file__).parent / "results" / "int8"
BATCH = 64

Images = NDArray[np.uint8]


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


def score(model: onnxruntime.InferenceSession, images: Images) -> NDArray[np.float32]:
    r"""Scores images in batches."""
    parts = [
        model.run(["log_ratio"], {"images": np.ascontiguousarray(images[i : i + BATCH])})[0]
        for i in range(0, len(images), BATCH)
    ]
    return np.concatenate(parts)


def time_ratio(
    a: onnxruntime.InferenceSession, b: onnxruntime.InferenceSession, x: Images
) -> float:
    r"""Returns the median ratio of the times of two models on the same batch, in turn."""
    ratios = []
    for _ in range(50):
        times = []
        for model in (a, b):
            started = time.perf_counter()
            model.run(["log_ratio"], {"images": x})
            times.append(time.perf_counter() - started)
        ratios.append(times[0] / times[1])
    return float(np.median(ratios[5:]))


def main(argv: Sequence[str] | None = None) -> int:
    r"""Quantises, scores with both, prints the table and writes it with its record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--calibration", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)

    scorer = load_scorer(args.checkpoint)
    config = Config.from_mapping(scorer.metadata["config"])
    manifest = load_manifest(config.benchmark, config.id)
    data = load_benchmark(manifest, args.data_root)
    with tempfile.TemporaryDirectory() as folder:
        plain, ready, int8 = (Path(folder) / f"{n}.onnx" for n in ("plain", "ready", "int8"))
        export_scorer(scorer, plain)
        quant_pre_process(plain, ready)
        quantize_static(
            ready,
            int8,
            Calibration(data.id_val.images[: args.calibration]),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        models = {"float32": session(plain), "int8": session(int8)}
        sizes = {"float32": plain.stat().st_size, "int8": int8.stat().st_size}
        batch = np.ascontiguousarray(data.id_test.images[:BATCH])
        speed = time_ratio(models["int8"], models["float32"], batch)

        id_scores = {name: score(model, data.id_test.images) for name, model in models.items()}
        rows = {}
        for name, images in {**data.near, **data.far}.items():
            values = [
                100 * ood_metrics(id_scores[k], score(model, images.images)).auroc
                for k, model in models.items()
            ]
            rows[name] = (values[0], values[1], values[1] - values[0])
    ratios = {"time": speed, "size": sizes["int8"] / sizes["float32"]}
    results = {"auroc": rows, "int8 over float32": ratios}
    print(
        f"{bench_tables.int8(results)}\nint8 over float32: time {speed:.2f}, file {ratios['size']:.2f}"
    )
    RunRecord(
        config={"checkpoint": config.to_dict(), "calibration": args.calibration},
        device="cpu (1 thread)",
        data={"checksums": data.checksums},
        results=results,
    ).write(args.out / "run.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
