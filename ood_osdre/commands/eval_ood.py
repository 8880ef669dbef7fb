r"""Trains a one-step ratio detector and evaluates it: table, scores, density plot.

Trains unless a checkpoint is given, then scores the ID test set and every near- and far-OOD set
of the benchmark in one pass. With no arguments it runs on images that scikit-learn ships.
"""

__all__ = ["main"]

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ood_osdre.config import Config, load_config
from ood_osdre.errors import UserError

if TYPE_CHECKING:
    import torch

    from ood_osdre.data import BenchmarkData
    from ood_osdre.tables import MetricsTable

FAILED, UNFINISHED = 2, 3
BENCHMARKS = {"digits": "digits", "cifar10": "openood", "cifar100": "openood"}
EPILOG = """\
examples:
  eval_ood.py --id digits
  eval_ood.py --id cifar10 --data-root ./data
  eval_ood.py --id cifar10 --benchmark pack --seeds 3 training.lr=2e-3 data.broaden=0.5

A time budget or a signal saves the run and ends with status 3; go on with --resume.
"""


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = argparse.ArgumentParser(
        prog="eval_ood.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = p.add_argument
    add("--id", choices=list(BENCHMARKS), default="digits", help="in-distribution data set")
    add("--benchmark", metavar="NAME|FILE", help="manifest of reference and OOD sets")
    add("--config", metavar="NAME|FILE", help="configuration (default: by --id and device)")
    add("--data-root", type=Path, default=Path("data"), metavar="DIR", help="default: ./data")
    add("--cache-dir", type=Path, metavar="DIR", help="decoded images (default: in data root)")
    add("--reference", metavar="NAME|PATH", help="name, folder, list file or .npy array")
    add("--checkpoint", type=Path, metavar="DIR", help="evaluate this run's model, no training")
    add("--seeds", type=positive, default=1, metavar="N", help="runs with consecutive seeds")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--out", type=Path, metavar="DIR", help="run folder (default: runs/ID-BENCHMARK-CONFIG)")
    add("--max-steps", type=positive, metavar="N", help="shorten training to N steps")
    add("--time-budget", type=float, metavar="S", help="save and stop after S seconds")
    add("--resume", action="store_true", help="go on with the runs of the folder")
    add("--quiet", action="store_true", help="no progress bars")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="any key of the configuration")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the command and returns its exit status."""
    args = parser().parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    r"""Trains and evaluates every seed, then prints the table."""
    config = read_config(args, gpu=False)  # a mistyped key is reported before torch is imported
    device = pick_device(args.device)
    config = read_config(args, gpu=device.type == "cuda")

    from ood_osdre.data import load_benchmark, load_manifest
    from ood_osdre.tables import aggregate

    manifest = load_manifest(config.benchmark, config.id)
    print(f"{manifest.title}\n  config {args.config}, device {device}", file=sys.stderr)
    data = load_benchmark(manifest, args.data_root, args.cache_dir, config.reference)

    out = args.out or Path("runs") / f"{config.id}-{manifest.name}-{Path(args.config).stem}"
    with claimed(out):
        tables = []
        for index in range(args.seeds):
            seeded = replace(
                config, training=replace(config.training, seed=config.training.seed + index)
            )
            folder = out if args.seeds == 1 else out / f"seed-{seeded.training.seed}"
            table = one_seed(args, seeded, data, folder, device)
            if table is None:
                return UNFINISHED
            tables.append(table)
        table = aggregate(tables)
        if len(tables) > 1:
            from ood_osdre.records import write_text_atomic

            table.to_csv(out / "metrics.csv")
            write_text_atomic(out / "metrics.md", table.to_markdown())
    print(table.to_terminal())
    print(f"\nTable, scores and plot: {out}")
    return 0


def one_seed(
    args: argparse.Namespace,
    config: Config,
    data: "BenchmarkData",
    folder: Path,
    device: "torch.device",
) -> "MetricsTable | None":
    r"""Trains or loads one scorer and evaluates it; None if training was stopped early."""
    from ood_osdre.experiment import evaluate_run, load_scorer, train_run

    progress = not args.quiet
    if args.checkpoint is not None:
        scorer = load_scorer(args.checkpoint, device)
        trained = Config.from_mapping(scorer.metadata["config"], str(args.checkpoint))
        if trained.id != config.id:
            raise UserError(
                f"--checkpoint {args.checkpoint}: trained with --id {trained.id}, not {config.id}."
            )
        selection = f"given: {args.checkpoint}"
        return evaluate_run(scorer, data, trained, folder, selection, progress=progress)

    if not args.resume and (folder / "state.json").exists():
        raise UserError(
            f"{folder}: holds a run already; go on with --resume or choose another --out."
        )
    scorer, outcome, selection = train_run(
        config, data, folder, device, args.time_budget, args.resume, progress
    )
    if not outcome.finished:
        print(
            f"stopped ({outcome.reason}) at step {outcome.step} of {config.training.steps}, "
            f"saved in {folder}; go on with --resume",
            file=sys.stderr,
        )
        return None
    return evaluate_run(scorer, data, config, folder, selection, outcome, progress)


def read_config(args: argparse.Namespace, gpu: bool) -> Config:
    r"""Reads the configuration, by default that of the ID set and the kind of device."""
    if args.config is None or getattr(args, "config_by_default", False):
        args.config_by_default = True
        cpu = not gpu and args.id == "cifar10"
        args.config = f"{args.id}_cpu" if cpu else args.id
    options = [("id", args.id), ("benchmark", args.benchmark or BENCHMARKS[args.id])]
    if args.reference is not None:
        options.append(("reference", args.reference))
    config = load_config(args.config, [*options, *args.overrides])
    if args.max_steps is not None and args.max_steps < config.training.steps:
        t, steps = config.training, args.max_steps
        config = replace(
            config,
            training=replace(
                t,
                steps=steps,
                warmup=min(t.warmup, steps // 5),
                eval_every=min(t.eval_every, steps),
            ),
        )
    return config


def pick_device(name: str) -> "torch.device":
    r"""Returns the device of a name, refusing one that is not there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: not available here ({reason})") from None
    return device


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    r"""Holds a run folder against a second process; the claim ends with this one."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written: {error.strerror}") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"--out {folder}: another run is writing here.") from None
        yield


def positive(text: str) -> int:
    r"""Reads a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
