r"""A server that forks runs and kills them, for tests/test_faults_runs.py.

Importing torch costs seconds and a fork next to nothing: every life of a run is a child of this
process, which has imported all and computed nothing. Its arguments are a folder, the kind of run,
the number of kills and the longest life in seconds; it prints one JSON object.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_training

from ood_osdre.cli import main
from ood_osdre.training import checkpoint as checkpoints

STEPS = 60
# A killed process loses nothing that it handed to the system, and waiting for disks is slow.
os.fsync = lambda fd: None  # type: ignore[assignment]
SMALL = ["network.width=0.125", "network.depths=[1,1,1,1]", "network.stem_stride=2"]
SMALL += ["training.batch_size=8", "training.checkpoint_every=2", "training.eval_every=10"]
SMALL += ["data.val_limit=10", "training.warmup=2", "--max-steps", "40", "--quiet"]


def train(folder: Path) -> int:
    r"""Trains the vectors of tests/test_training.py."""
    torch.set_default_dtype(torch.float64)
    options = test_training.OPTIONS.replace(
        steps=STEPS, checkpoint_every=3, eval_every=50, warmup=5
    )
    outcome = test_training.make(folder, options).run(progress=False, resume=True)
    return 0 if outcome.finished else 1


def command(folder: Path) -> int:
    r"""Runs the main command on the embedded images."""
    return main(["--out", str(folder), "--device", "cpu", "--resume", *SMALL])


RUNS: dict[str, Callable[[Path], int]] = {"train": train, "command": command}


def fork(run: Callable[[Path], int], folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            torch.set_num_threads(1)
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            status = run(folder)
        finally:
            os._exit(status)
    return pid


def finish(run: Callable[[Path], int], folder: Path) -> int:
    _, status = os.waitpid(fork(run, folder), 0)
    return os.waitstatus_to_exitcode(status)


def end(run: Callable[[Path], int], folder: Path, life: float, number: int, started: bool) -> int:
    r"""Lets a run live for a while and sends it a signal; returns how it ended.

    Arguments:
        run: The run.
        folder: Its folder.
        life: The number of seconds.
        number: The signal.
        started: Whether the seconds count from the first checkpoint of this life.
    """
    pid, step = fork(run, folder), step_of(folder)
    ended = 0
    while started and not ended and step_of(folder) == step:
        time.sleep(0.01)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        time.sleep(life)
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def step_of(folder: Path) -> int:
    r"""Returns the step of the checkpoint, which must be whole if there is one."""
    if not checkpoints.checkpoint_path(folder, checkpoints.STATE).is_file():
        return 0
    return checkpoints.read_checkpoint(folder, checkpoints.STATE)[1]["step"]


def serve(root: Path, kind: str, kills: int, longest: float) -> dict[str, object]:
    if kind == "command":
        # The command imports it when it is called, which every life would pay for.
        import_module("ood_osdre.stages")
    run, rng = RUNS[kind], random.Random(0)
    statuses = [finish(run, root / "whole")]
    steps, rounds, killed = [], 0, 0
    folder = root / "part-0"
    while killed < kills:
        # However busy the machine, most deaths come after some progress.
        life, started = rng.uniform(0, longest), bool((killed + 1) % 4)
        status = end(run, folder, life, signal.SIGKILL, started)
        if status == -signal.SIGKILL:
            killed += 1
            steps.append(step_of(folder))
        else:  # it was faster than its death
            statuses.append(status)
            rounds += 1
            folder = root / f"part-{rounds}"
    terminated = None
    if kind == "command":
        terminated = end(run, folder, 0.0, signal.SIGTERM, started=True)
    statuses.append(finish(run, folder))
    parts = [root / f"part-{i}" for i in range(rounds + 1)]
    digests = [
        checkpoints.read_checkpoint(p, checkpoints.MODEL)[2] for p in (root / "whole", *parts)
    ]
    return {
        "statuses": statuses,
        "terminated": terminated,
        "steps": steps,
        "digests": digests,
    }


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))))
