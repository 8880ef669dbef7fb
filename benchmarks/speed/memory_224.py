r"""Peak memory of a fit to files, beside that of the model and one batch.

    python benchmarks/speed/memory_224.py [--images 20000] [--batch-size 32] [--steps 20]

Photographs are generated in a temporary folder. A detector is fitted to a few of them, and then to all
of them, in this process, for the same number of steps; what the second fit needs beyond the first is
what the number of images costs. Memory is the sum over this process and those that decode of what
each holds alone and its share of what is shared (Linux's PSS), looked at fifty times a second, and
the peak that the system keeps of this process (maximum RSS). The exit status is 1 if either is more
than 1,500 MiB larger in the second fit.
"""

import argparse
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import above  # noqa: F401
import bench_tables
import torch
from outputs import require_writable
from photographs import write_photographs
from torch import nn

from ood_osdre import OneStepDetector
from ood_osdre.data import image_files
from ood_osdre.errors import Parser, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.training.distributed import device_name

OUT = Path("runs") / "memory_224"
SEED, FEW, EVERY, MIB = 0, 40, 0.02, 2**20
MOST = 1500  # MiB beside model and batch


class Peak(threading.Thread):
    r"""Watches the memory of this process and its children, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        r"""Looks until it is told to stop."""
        while not self.done.wait(EVERY):
            self.most = max(self.most, sum(map(_pss, ("self", *_children()))))


def _children() -> list[str]:
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended since
            found += (task / "children").read_text().split()
    return found


def _pss(process: str) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # ended since
        return 0
    return next(
        1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")
    )


def measure(args: argparse.Namespace, folders: Sequence[Path]) -> dict[str, float]:
    r"""Returns the seconds and the peaks, in MiB, of a fit to the images of two folders."""
    # Next to no memory of its own: what is measured are the images.
    backbone = nn.Sequential(nn.AvgPool2d(args.side // 7), nn.Flatten())
    detector = OneStepDetector(
        "digits",
        backbone=backbone,
        size=args.side,
        device="cpu",
        training__steps=args.steps,
        training__warmup=0,
        training__batch_size=args.batch_size,
        evaluation__batch_size=args.batch_size,
        training__amp="none",
    )
    peak, started = Peak(), time.perf_counter()
    peak.start()
    detector.fit(folders[0], folders[1])
    peak.done.set()
    peak.join()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": time.perf_counter() - started, "pss": peak.most / MIB, "max_rss": rss}


def parser() -> argparse.ArgumentParser:
    r"""Returns the parser of the command line."""
    p = Parser(description=__doc__)
    add = p.add_argument
    add("--images", type=count(FEW), default=20_000, help="of each side, ID and reference")
    add("--side", type=count(14), default=224)
    add("--batch-size", type=count(2), default=32)
    add("--steps", type=count(1), default=20)
    add("--threads", type=count(1), help="torch's threads")
    add("--out", type=Path, default=OUT, metavar="DIR")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures, prints the table and writes it with its record."""
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures a small fit and a large one."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    require_writable(args.out)
    fits = {}
    with tempfile.TemporaryDirectory() as name:
        for title, size in (("few", FEW), ("all", args.images)):
            folders = [Path(name, title, side) for side in ("id", "reference")]
            for seed, folder in enumerate(folders):
                write_photographs(folder, size, (args.side, args.side), seed)
            fits[title] = {"images": 2 * size, **measure(args, folders)}
    more = {key: fits["all"][key] - fits["few"][key] for key in ("pss", "max_rss")}
    decoded = 2 * args.images * args.side**2 * 3 / MIB
    results = {"fits": fits, "more": more, "decoded": decoded, "ratio": more["pss"] / decoded}
    print(bench_tables.memory(results))
    print(
        f"\n{decoded:,.0f} MiB decoded; {results['ratio']:.3f} of it more in memory, most {MOST} MiB"
    )
    settings = {k: getattr(args, k) for k in ("images", "side", "batch_size", "steps")}
    RunRecord(
        config={"memory_224": {**settings, "limit": image_files.LIMIT}},
        seed=SEED,
        device=device_name(torch.device("cpu")),
        results=results,
    ).write(args.out / "run.json")
    return 0 if max(more.values()) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
