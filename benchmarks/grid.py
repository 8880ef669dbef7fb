r"""A grid of runs of the main command, methods by seeds, that can be interrupted and given again.

Each run trains in a folder of its own under `--scratch`, from where an interrupted one goes on;
what is kept of a finished one, its record and its metrics, goes to `--out`/METHOD/seed-N. What is
there already is skipped if it is the same run, of the same options and steps, and an error if it is
another; so is a run on other data than what is kept of the other methods. A method's variants score
the same trained model in other ways, without training it again.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from outputs import require_writable
from runs import record_of
from tqdm import tqdm

from ood_osdre import cli as eval_ood
from ood_osdre.errors import UserError, count, number
from ood_osdre.evaluation.records import differences
from ood_osdre.files import atomic_path

# Of a method's name, what a folder's should not hold.
REPLACED = (
    (" + ", "-"), (", ", "-"), (": ", "-"), (" = ", "_"), (" ", "_"), ("/", "_"), ("(", ""), (")", ""), ("∞", "inf"), ("³", "3"),
)  # fmt: skip
# The main commands that are at work.
RUNNING: set["subprocess.Popen[str]"] = set()
KEPT = ("metrics.csv", "metrics.md", "scores.npz", "score_density.png", "log.jsonl")


@dataclass(frozen=True)
class Method:
    r"""A method as options of the main command.

    Attributes:
        overrides: The options, `section.key=value`.
        variants: Further ways to score the trained model, `evaluation.key=value`, by name.
        group: The comparison that the method belongs to.
    """

    overrides: Sequence[str]
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    group: str = ""


def slug(name: str) -> str:
    r"""Returns the folder name of a method."""
    for old, new in REPLACED:
        name = name.replace(old, new)
    return name


def add_arguments(
    parser: argparse.ArgumentParser, methods: Sequence[str], out: Path, protocol: bool = False
) -> None:
    r"""Adds the options that all grids share.

    Arguments:
        parser: The parser of the command line.
        methods: The names of the methods.
        out: The default folder of what is kept.
        protocol: Whether seeds and steps are fixed, and no options.
    """
    add = parser.add_argument
    add("--id", default="cifar10")
    add("--benchmark", default="pack")
    add("--config", default="cifar10_cpu")
    add("--data-root", type=Path, default=Path("data"))
    if not protocol:
        add("--seeds", type=count(1), default=3)
        add("--first-seed", type=count(0), default=0)
        add("--steps", type=count(1), default=1500)
    add("--only", nargs="+", choices=methods, default=methods, metavar="NAME")
    add("--without", nargs="*", default=[], metavar="VARIANT", help="variants to leave out")
    add("--jobs", type=count(1), default=2, help="runs side by side")
    add("--threads", type=count(1), default=1, help="threads of each run on a CPU")
    add("--device", default="cpu")
    add(
        "--budget",
        type=number(),
        metavar="S",
        help="start or continue no training after S seconds",
    )
    add("--out", type=Path, default=out)
    add("--scratch", type=Path, default=Path("runs"))
    add("--keep", nargs="+", choices=KEPT, default=["metrics.csv"], help="beside the record")


def run_grid(methods: Mapping[str, Method], args: argparse.Namespace) -> int:
    r"""Runs what is not done yet, seed by seed, and returns the exit status.

    Arguments:
        methods: The methods by name.
        args: The options of :func:`add_arguments`.

    Raises:
        UserError: If nothing can be kept in `--out`.
    """
    require_writable(args.out)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    grid = [(name, seed) for seed, name in itertools.product(seeds, args.only)]
    deadline = None if args.budget is None else time.monotonic() + args.budget
    failures = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda job: _run(job[0], methods[job[0]], job[1], args, deadline), grid)
        try:
            for failure in tqdm(results, total=len(grid), unit="run"):
                if failure:
                    failures += 1
                    tqdm.write(failure, file=sys.stderr)
        except KeyboardInterrupt:
            # A terminal tells the runs, too; what else interrupts does not.
            pool.shutdown(wait=False, cancel_futures=True)
            for run in list(RUNNING):
                run.send_signal(signal.SIGINT)
            raise
    return 1 if failures else 0


def _run(
    name: str, method: Method, seed: int, args: argparse.Namespace, deadline: float | None
) -> str | None:
    r"""Trains and evaluates one method; returns what went wrong, if anything did."""
    label = f"{name}, seed {seed}"
    left = None if deadline is None else deadline - time.monotonic()
    kept = args.out / slug(name) / f"seed-{seed}"
    scratch = args.scratch / args.out.name / slug(name) / f"seed-{seed}"
    # The kept records of all grids were selected so.
    overrides = ["evaluation.select=val_auroc", f"training.seed={seed}", f"title={name}"]
    overrides += method.overrides
    # A figure needs the scores of one seed.
    unwanted = {"scores.npz"} if seed != args.first_seed else set()
    files = [file for file in args.keep if file not in unwanted]
    try:
        if not _is_done(kept, args, overrides):
            if left is not None and left <= 0:
                return f"not started: {label}"
            _command(
                ["--id", args.id, "--benchmark", args.benchmark, "--config", args.config,
                 "--data-root", str(args.data_root), "--out", str(scratch), "--resume",
                 "--max-steps", str(args.steps),
                 *([] if left is None else ["--time-budget", f"{left:.0f}"]), *overrides],
                args,
            )  # fmt: skip
            _keep(scratch, kept, files, args.out, trained=True)
        for variant, options in method.variants.items():
            label = f"{name}, seed {seed}, {variant}"
            again, place = scratch / slug(variant), kept / slug(variant)
            if variant in args.without or _is_done(place, args, [*overrides, *options]):
                continue
            if not (scratch / "run.json").is_file() or record_of(scratch) != record_of(kept):
                raise UserError(
                    f"{scratch}: does not hold the model of {kept}; remove that to train again."
                )
            _command(
                ["--checkpoint", str(scratch), "--data-root", str(args.data_root),
                 "--out", str(again), *options],
                args,
            )  # fmt: skip
            _keep(again, place, files, args.out, trained=False)
    except UserError as error:
        return f"{label}: {error}"
    return None


def _is_done(kept: Path, args: argparse.Namespace, overrides: Sequence[str]) -> bool:
    r"""Returns whether a run is kept already.

    Raises:
        UserError: If another run is.
    """
    if not (kept / "run.json").is_file():
        return False
    then = record_of(kept)
    given = ["--id", args.id, "--benchmark", args.benchmark, "--max-steps", str(args.steps)]
    parsed = eval_ood.parser().parse_intermixed_args([*given, *overrides])
    config = eval_ood.read_config(parsed, args.config)
    found = {"benchmark": then["benchmark"], **then["config"]}
    wanted = {"benchmark": args.benchmark, **json.loads(json.dumps(config.to_dict()))}
    # An option that is newer than the record is not held against it.
    if difference := differences(found, wanted, shared=True):
        raise UserError(f"{kept}: holds another run ({difference}); choose another --out.")
    return True


def _command(options: Sequence[str], args: argparse.Namespace) -> None:
    r"""Gives the main command.

    Raises:
        UserError: With its error, if it failed.
    """
    command = [sys.executable, "benchmarks/eval_ood.py", "--quiet", "--device", args.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    run = subprocess.Popen(
        [*command, *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    RUNNING.add(run)
    _, told = run.communicate()
    RUNNING.discard(run)
    if run.returncode:
        lines = told.strip().splitlines() or ["no message"]
        # Beneath an error there may be a hint.
        last = next((line for line in lines if line.startswith("error: ")), lines[-1])
        unfinished = run.returncode == eval_ood.UNFINISHED
        raise UserError(last if unfinished else f"failed: {last.replace('--out', '--scratch')}")


def _keep(source: Path, target: Path, files: Sequence[str], out: Path, *, trained: bool) -> None:
    r"""Copies what is kept; the record last, as it says that the rest is there.

    Raises:
        UserError: If the run is of other data than what is kept already, or cannot be written.
    """
    checksums = record_of(source)["data"]["checksums"]
    for other in sorted(out.glob("*/seed-*/run.json"))[:1]:
        kept = record_of(other.parent)["data"]["checksums"]
        # A variant has seen no training set.
        if checksums != kept if trained else not checksums.items() <= kept.items():
            raise UserError(f"{source}: other data than {other.parent}; choose another --out.")
    for file in [*files, "run.json"]:
        with atomic_path(target / file) as temporary:
            shutil.copyfile(source / file, temporary)
