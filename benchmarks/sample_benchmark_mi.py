r"""Samples the tasks of the `benchmark-mi` package, one `.npz` file each, for `score_benchmark_mi`.

    python -m venv bmi && bmi/bin/pip install benchmark-mi
    bmi/bin/python benchmarks/sample_benchmark_mi.py --out bmi_samples --samples 10000

Run it in an environment of its own: the package pins an old NumPy and JAX, and nothing of this
repository is imported here. Each task becomes `<id>.npz` with `x`, `y` (float32), the true mutual
information in nats, `truth`, and its `name`. The data are not kept in the repository.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def main(argv: Sequence[str] | None = None) -> int:
    r"""Samples every task, or those that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--samples", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", nargs="+", metavar="ID", help="default: all of BENCHMARK_TASKS")
    args = parser.parse_args(argv)
    args.out = args.out.expanduser()
    try:
        from bmi.benchmark import BENCHMARK_TASKS
    except ImportError:
        print("error: benchmark-mi is not installed here, see --help.", file=sys.stderr)
        return 2

    unknown = set(args.tasks or ()) - set(BENCHMARK_TASKS)
    if unknown:
        print(f"error: --tasks: no task {min(unknown)!r} in benchmark-mi.", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.tasks or sorted(BENCHMARK_TASKS):
        task = BENCHMARK_TASKS[name]
        x, y = task.sample(args.samples, seed=args.seed)
        np.savez_compressed(
            args.out / f"{name}.npz",
            x=np.asarray(x, dtype=np.float32),
            y=np.asarray(y, dtype=np.float32),
            truth=float(task.mutual_information),
            name=str(task.name),
        )
        print(f"{name}: {np.shape(x)}, {np.shape(y)}, {task.mutual_information:.4f} nats")
    return 0


if __name__ == "__main__":
    sys.exit(main())
