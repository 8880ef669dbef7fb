r"""Trains a one-step ratio detector and evaluates it: table, scores, density plot.

Trains unless a checkpoint is given, then scores the ID test set and every near- and far-OOD set
of the benchmark in one pass. With no arguments it runs on images that scikit-learn ships.
"""

__all__ = ["main", "parser", "read_config"]

import argparse
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .config import Config, load_config, shortened, with_seed
from .data.manifests import BENCHMARKS, benchmark_names, check_id
from .errors import Parser, UserError, count, exit_status, number
from .evaluation.records import read_record
from .files import local
from .resources import names
from .sections import FITTED
from .training.run import MODEL_FILE, RECORD, RESULTS, STATES, holds, locked, refuse_existing

if TYPE_CHECKING:
    import torch

    from .data import BenchmarkData, Manifest
    from .evaluation.tables import MetricsTable

UNFINISHED, COMMAND = 3, "ood-osdre-eval"  # of an installed package
IMAGENET = "imagenet", "imagenet200"
EPILOG = """\
examples:
  %(prog)s --id digits
  %(prog)s --id cifar10 --data-root ./data
  %(prog)s --id cifar10 --benchmark pack --seeds 3 training.lr=2e-3 data.broaden=0.5
  %(prog)s --id cifar10 --config cifar10_representation --classifier runs/classifier

A time budget or a signal saves the run and ends with status 3; go on with --resume.
"""
# What reads an option of `evaluation` that not everything reads.
READERS = {
    **dict.fromkeys(("select", "use_ood_val"), "training"),
    **dict.fromkeys(("solver", "evaluations", "tolerance"), "estimator time_conditioned"),
    **dict.fromkeys(("score", "neighbours"), "estimator classifier"),
}


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(
        prog=prog or (COMMAND if Path(sys.argv[0]).name == COMMAND else "eval_ood.py"),
        description=__doc__,
        epilog=EPILOG,
    )
    add = p.add_argument
    add("--id", metavar="NAME", help=f"{', '.join(BENCHMARKS)}, or one of --benchmark FILE")
    known = ", ".join(benchmark_names())
    add("--benchmark", metavar="NAME|FILE", help=f"{known} (default: what is whole)")
    known = ", ".join(names("configs"))
    add("--config", metavar="NAME|FILE", help=f"{known} (default: by --id and device)")
    add("--data-root", type=local, default=Path("data"), metavar="DIR", help="default: ./data")
    add("--cache-dir", type=local, metavar="DIR", help="decoded images (default: in data root)")
    known = "a name of the benchmark's, a folder, list file or .npy array"
    add("--reference", metavar="NAME|PATH", help=known)
    known = "of a head: a run folder, a file of weights, timm:NAME@FILE (default: trains one)"
    add("--classifier", metavar="SOURCE", help=known)
    add("--checkpoint", type=local, metavar="DIR", help="evaluate this run's model, no training")
    add("--seeds", type=count(1), default=1, metavar="N", help="runs with consecutive seeds")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add("--out", type=local, metavar="DIR", help="run folder (default: in ./runs, by its name)")
    add("--max-steps", type=count(1), metavar="N", help="shorten training to N steps")
    add("--time-budget", type=number(), metavar="S", help="save and stop after S seconds")
    add("--resume", action="store_true", help="go on with the folder's runs, options as before")
    add("--quiet", action="store_true", help="no progress bars")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="any key of the configuration")
    return p


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    r"""Runs the command and returns its exit status."""
    args = parser(prog).parse_intermixed_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± gets a ?
    try:
        return exit_status(lambda: run(args))
    finally:
        if "RANK" in os.environ:
            from .training.distributed import leave

            leave()


def run(args: argparse.Namespace) -> int:
    r"""Trains and evaluates every seed, or evaluates a checkpoint, then prints the table."""
    if args.id is not None and not (args.benchmark or args.checkpoint):
        check_id(args.id)
    table = evaluate_checkpoint(args) if args.checkpoint else train_and_evaluate(args)
    if table is None:
        return UNFINISHED
    if first_process():
        several = args.seeds > 1 and not args.checkpoint
        files = "Table, page and scores by seed" if several else "Table, page and scores"
        print(f"{table.to_terminal()}\n\n{files}: {args.out}")
    return 0


def train_and_evaluate(args: argparse.Namespace) -> "MetricsTable | None":
    r"""Trains and evaluates every seed; returns None if training was stopped early."""
    # A mistyped key is reported before torch is imported.
    read_config(args, args.config or default_config(args.id, gpu=False))
    device = pick_device(args.device)
    name = args.config or default_config(args.id, gpu=device.type == "cuda")
    config = read_config(args, name)

    from .data import load_benchmark
    from .detectors import read_classifier
    from .runs import join_seeds

    manifest = find_benchmark(config.benchmark, config.id, args.data_root, config.reference)
    config = config.replace(benchmark=config.benchmark or manifest.name)
    narrow = " (chosen: without a GPU, a narrow network)" if name.endswith("_cpu") else ""
    announce(f"{manifest.title}\n  config {name}{'' if args.config else narrow}, device {device}")
    args.out = args.out or Path("runs") / f"{config.id}-{manifest.name}-{Path(name).stem}"
    folders = {
        seed: args.out if args.seeds == 1 else args.out / f"seed-{seed}"
        for seed in range(config.training.seed, config.training.seed + args.seeds)
    }
    members = members_of(args, config)
    refuse_existing(args.out, folders, args.resume)
    if args.resume and not any(holds(folder, *RESULTS) for folder in folders.values()):
        announce(f"Nothing to go on with in {args.out}: from step 0")
    for seed, folder in folders.items():
        # Before the images are read, which may take minutes. What is finished needs none.
        if config.classifier and not holds(folder, RECORD):
            read_classifier(config.classifier, with_seed(config, seed), None, manifest.size)
    data = load_benchmark(
        manifest, args.data_root, args.cache_dir, config.reference, progress=not args.quiet
    )
    announce(f"reference {data.reference_name}")
    with claim(args.out):
        refuse_existing(args.out, folders, args.resume)  # again, as loading may have taken a while
        tables = []
        for seed, folder in folders.items():
            seeded = with_seed(config, seed)
            own = {k: with_seed(c, seed + c.training.seed) for k, c in members.items()}
            with nullcontext() if folder == args.out else claim(folder):
                table = one_seed(args, seeded, data, folder, device, own)
            if table is None:
                return None
            tables.append(table)
        return join_seeds(tables, args.out)


def one_seed(
    args: argparse.Namespace,
    config: Config,
    data: "BenchmarkData",
    folder: Path,
    device: "torch.device",
    members: Mapping[str, Config],
) -> "MetricsTable | None":
    r"""Trains and evaluates one seed; returns None if training was stopped early.

    A finished seed is not evaluated again: its table is made from its scores.
    """
    from .runs import evaluate_run, finished_table
    from .stages import train_run

    if args.resume and (folder / RECORD).exists():
        return finished_table(folder, config, data, members)
    scorer, outcome, selection = train_run(
        config, data, folder, device, args.time_budget, args.resume, not args.quiet, members
    )
    if not outcome.finished:
        announce(
            f"stopped ({outcome.reason}) at step {outcome.step} of {outcome.steps}, "
            f"saved in {folder}; go on with --resume"
        )
        return None
    return evaluate_run(scorer, data, config, folder, selection, outcome, not args.quiet)


def evaluate_checkpoint(args: argparse.Namespace) -> "MetricsTable":
    r"""Evaluates the model of a run folder, with the configuration it was trained with."""
    refuse_training_options(args)
    device = pick_device(args.device)
    from .data import load_benchmark
    from .detectors import load_scorer
    from .runs import changes_sum, evaluate_run, scorer_of

    scorer = load_scorer(args.checkpoint, device)
    source = str(args.checkpoint)
    config = Config.from_mapping(scorer.metadata["config"], source, args.overrides)
    scoring = config.head or config
    for key in (override.partition("=")[0].strip() for override in args.overrides):
        reader, estimator = READERS.get(key.removeprefix("evaluation.")), scoring.estimator
        if reader not in (None, f"estimator {estimator}"):
            raise UserError(
                f"option {key}: is for {reader}, and --checkpoint {source} is a trained "
                f"{estimator}."
            )
    if args.id not in (None, config.id):
        raise UserError(f"--checkpoint {source}: trained with --id {config.id}, not {args.id}.")
    manifest = find_benchmark(args.benchmark or config.benchmark, config.id, args.data_root)
    announce(f"{manifest.title}\n  checkpoint {source}, device {device}")
    # Some scores are fitted to ID training images; parts are standardised on others.
    summed = changes_sum(scorer.metadata, config)
    training = summed or (scoring.estimator == "classifier" and config.evaluation.score in FITTED)
    reference = config.reference if training and not args.benchmark else None
    data = load_benchmark(
        manifest, args.data_root, args.cache_dir, reference, training, progress=not args.quiet
    )
    scorer.check_images(data.id_test.images, f"benchmark {manifest.name}")
    if summed:
        scorer = scorer_of(args.checkpoint, config, data, device)
    if args.out is None:
        path = args.checkpoint.resolve()
        # A seed's folder says little without the run's.
        name = f"{path.parent.name}-{path.name}" if path.name.startswith("seed-") else path.name
        args.out = Path("runs") / f"{name}-on-{manifest.name}"
    selection = f"given: {source}"
    with claim(args.out):
        refuse_other_results(args.out, selection)
        return evaluate_run(scorer, data, config, args.out, selection, progress=not args.quiet)


def refuse_training_options(args: argparse.Namespace) -> None:
    r"""Raises an error for an option that would change nothing, as a checkpoint is not trained."""
    training_only = {
        "--config": args.config,
        "--seeds": args.seeds > 1,
        "--max-steps": args.max_steps,
        "--time-budget": args.time_budget is not None,
        "--resume": args.resume,
        "--reference": args.reference,
        "--classifier": args.classifier,
    }
    given = [option for option, value in training_only.items() if value]
    given += [f"option {o}" for o in args.overrides if not o.startswith("evaluation.")]
    if given:
        raise UserError(
            f"{given[0]}: is for training, and --checkpoint trains nothing; expected evaluation.*"
        )


def refuse_other_results(folder: Path, selection: str) -> None:
    r"""Raises an error if a folder holds results, and not those of the same checkpoint."""
    if not holds(folder, *RESULTS):
        return
    evaluated = holds(folder, RECORD) and not holds(folder, *STATES, MODEL_FILE)
    if not evaluated or read_record(folder / RECORD).selection != selection:
        raise UserError(
            f"--out {folder}: holds other results than of the checkpoint {selection}; "
            "choose another folder."
        )


def default_config(id_name: str | None, gpu: bool) -> str:
    r"""Returns the configuration of an ID data set when none is named.

    Arguments:
        id_name: The ID data set, None for the embedded one.
        gpu: Whether it is to be trained on a GPU; without one, CIFAR gets a smaller network. A set
            of small images without a configuration of its own is trained as CIFAR-10 is.
    """
    id_name = id_name or "digits"
    suffix = "" if gpu or id_name == "digits" else "_cpu"
    known = names("configs")
    if (own := f"{id_name}{suffix}") in known:
        return own
    return "imagenet_representation" if id_name in IMAGENET else f"cifar10{suffix}"


def find_benchmark(
    name: str | None, id_name: str, data_root: Path, reference: str | None = None
) -> "Manifest":
    r"""Returns the benchmark of a name; without one, chooses one and says which and why."""
    from .data import choose_benchmark, load_manifest

    if name is not None:
        return load_manifest(name, id_name)
    manifest, reason = choose_benchmark(id_name, data_root, reference)
    if not manifest.is_embedded:
        announce(reason)
    return manifest


def read_config(args: argparse.Namespace, name: str) -> Config:
    r"""Reads a configuration and applies the options of the command line.

    Arguments:
        args: The command line; what it does not say is the configuration's.
        name: The name or file of the configuration.
    """
    given = {key: getattr(args, key) for key in ("id", "benchmark", "reference", "classifier")}
    options = [(key, value) for key, value in given.items() if value is not None]
    config = load_config(name, [*options, *args.overrides])
    return config if args.max_steps is None else shortened(config, args.max_steps)


def members_of(args: argparse.Namespace, config: Config) -> dict[str, Config]:
    r"""Returns the configurations that `evaluation.together` names, on the run's data."""
    shared = [(key, getattr(config, key)) for key in ("id", "benchmark", "reference")]
    held = "hold_out_id", "hold_out_reference"
    shared += [(f"data.{key}", value) for key in held if (value := getattr(config.data, key))]
    members, parts = {}, config.evaluation.parts
    for source in config.evaluation.together:
        if source not in names("configs") and not source.endswith((".yml", ".yaml")):
            continue  # a run folder
        member = load_config(source, shared)
        if member.evaluation.is_sum or ("energy" in parts and not member.has_classes):
            expected = "that sums nothing" if member.evaluation.is_sum else "with a class head"
            raise UserError(f"evaluation.together: {source}: expected a configuration {expected}.")
        members[source] = member if args.max_steps is None else shortened(member, args.max_steps)
    return members


def first_process() -> bool:
    r"""Returns whether this process is alone, or the first that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def announce(message: str) -> None:
    r"""Prints a message that is not a result, in the first process."""
    if first_process():
        print(message, file=sys.stderr)


def claim(folder: Path) -> AbstractContextManager[None]:
    r"""Keeps other runs out of a run folder; the first process does so for all of a run."""
    return locked(folder, "--out") if first_process() else nullcontext()


def pick_device(name: str) -> "torch.device":
    r"""Returns the device of a name, this process's own if `torchrun` started several."""
    from .training.distributed import find_device, join

    return join(find_device(None if name == "auto" else name, "--device"))


if __name__ == "__main__":
    sys.exit(main())
