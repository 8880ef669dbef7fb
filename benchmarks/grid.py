r"""A grid of runs of the main command, methods by seeds, that can be interrupted and given again.

Each run trains in a folder of its own under `--scratch`, from where an interrupted one goes on;
what is kept of a finished one, its record and its metrics, goes to `--out`/METHOD/seed-N. What is
there already is skipped if it is the same run, of the same data, options and steps, and an error
if it is another. A method's variants score the same trained model in other ways, without training
it again.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ood_osdre.commands import eval_ood

# Of a method's name, what a folder's should not hold.
REPLACED = (
    (" + ", "-"), (", ", "-"), (": ", "-"), (" = ", "_"), (" ", "_"), ("/", "_"), ("(", ""), (")", ""), ("∞", "inf"), ("³", "3"),
)  # fmt: skip
UNFINISHED = 3  # the main command's status for a run that its time budget stopped


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


def record_of(run: Path) -> dict[str, Any]:
    r"""Returns the record in a folder."""
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    return record


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
        add("--seeds", type=int, default=3)
        add("--first-seed", type=int, default=0)
        add("--steps", type=int, default=1500)
    add("--only", nargs="*", choices=methods, default=methods, metavar="NAME")
    add("--without", nargs="*", default=[], metavar="VARIANT", help="variants to leave out")
    add("--jobs", type=int, default=2, help="runs side by side")
    add("--threads", type=int, default=1, help="threads of each run on a CPU")
    add("--device", default="cpu")
    add("--budget", type=float, metavar="S", help="start or continue no training after S seconds")
    add("--out", type=Path, default=out)
    add("--scratch", type=Path, default=Path("runs"))
    add("--keep", nargs="*", default=["run.json", "metrics.csv"], metavar="FILE")


def run_grid(methods: Mapping[str, Method], args: argparse.Namespace) -> int:
    r"""Runs what is not done yet, seed by seed, and returns the exit status.

    Arguments:
        methods: The methods by name.
        args: The options of :func:`add_arguments`.
    """
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    grid = [(name, seed) for seed, name in itertools.product(seeds, args.only)]
    deadline = None if args.budget is None else time.monotonic() + args.budget
    failures = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda job: _run(job[0], methods[job[0]], job[1], args, deadline), grid)
        for failure in tqdm(results, total=len(grid), unit="run"):
            if failure:
                failures += 1
                tqdm.write(failure, file=sys.stderr)
    return 1 if failures else 0


def _run(
    name: str, method: Method, seed: int, args: argparse.Namespace, deadline: float | None
) -> str | None:
    r"""Trains and evaluates one method; returns what went wrong, if anything did."""
    kept = args.out / slug(name) / f"seed-{seed}"
    scratch = args.scratch / args.out.name / slug(name) / f"seed-{seed}"
    label = f"{name}, seed {seed}"
    overrides = [f"training.seed={seed}", f"title={name}", *method.overrides]
    # A figure needs the scores of one seed.
    unwanted = {"scores.npz"} if seed != args.first_seed else set()
    files = [file for file in args.keep if file not in unwanted]
    if (kept / "run.json").is_file():
        if other := _difference(kept, args, overrides):
            return f"{label}: {kept} holds another run ({other}); choose another --out"
    else:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return f"not started: {label}"
        command = [
            "--id", args.id, "--benchmark", args.benchmark, "--config", args.config,
            "--data-root", str(args.data_root), "--out", str(scratch), "--resume",
            "--max-steps", str(args.steps),
            *([] if left is None else ["--time-budget", f"{left:.0f}"]),
            *overrides,
        ]  # fmt: skip
        if failure := _command(command, args):
            return f"{label}: {failure}"
        _keep(scratch, kept, files)
    for variant, options in method.variants.items():
        if variant in args.without or (kept / slug(variant) / "run.json").is_file():
            continue
        if not scratch.is_dir():
            return f"{label}, {variant}: {scratch} is gone; remove {kept} to train it again"
        again = scratch / slug(variant)
        command = [
            "--checkpoint", str(scratch), "--data-root", str(args.data_root), "--out", str(again),
            *options,
        ]  # fmt: skip
        if failure := _command(command, args):
            return f"{label}, {variant}: {failure}"
        _keep(again, kept / slug(variant), files)
    return None


def _difference(run: Path, args: argparse.Namespace, overrides: Sequence[str]) -> str:
    r"""Returns where a kept run differs from the one that is asked for, if it does."""
    then = record_of(run)
    given = ["--id", args.id, "--benchmark", args.benchmark, "--max-steps", str(args.steps)]
    parsed = eval_ood.parser().parse_intermixed_args([*given, *overrides])
    config = eval_ood.read_config(parsed, args.config)
    found = {"benchmark": then["benchmark"], **_flat(then["config"])}
    wanted = {"benchmark": args.benchmark, **_flat(json.loads(json.dumps(config.to_dict())))}
    # An option that is newer than the record is not held against it.
    differing = [k for k in found.keys() & wanted.keys() if found[k] != wanted[k]]
    return ", ".join(f"{k} {found[k]}, not {wanted[k]}" for k in sorted(differing)[:3])


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    r"""Returns a nested configuration as a mapping from `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _command(options: Sequence[str], args: argparse.Namespace) -> str | None:
    r"""Gives the main command; returns its last word if it failed."""
    command = [sys.executable, "benchmarks/eval_ood.py", "--quiet", "--device", args.device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [*command, *options], env=environment, capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return last if done.returncode == UNFINISHED else f"failed: {last}"


def _keep(source: Path, target: Path, files: Sequence[str]) -> None:
    r"""Copies what is kept; the record last, as it says that the rest is there."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(files, key=lambda name: name == "run.json"):
        shutil.copy(source / file, target / file)
