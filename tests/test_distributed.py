r"""Tests of several processes: two on the CPU, against one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_osdre.evaluation.scores import read_scores
from ood_osdre.training import checkpoint, distributed

ROOT = Path(__file__).parents[1]
COMMAND = ["-m", "ood_osdre.cli"]
FAST = ["--id", "digits", "--device", "cpu", "--quiet", "--max-steps", "4"]
FAST += ["network.width=0.125", "network.depths=[1, 1, 1, 1]", "network.stem_stride=2"]
FAST += ["network.norm=group", "training.batch_size=8", "data.val_limit=20", "training.ema=0.5"]


def run(folder: Path, processes: int, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*(torchrun if processes > 1 else []), *COMMAND, "--out", str(folder)]
    return subprocess.run(
        [sys.executable, *command, *FAST, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_a_plain_run_is_the_first_and_only_process() -> None:
    assert distributed.world_size() == 1
    assert distributed.is_first()
    assert distributed.share(7) == slice(0, 7)
    rows, value = np.arange(3), torch.ones(2)
    assert distributed.gather_rows(rows) is rows
    assert distributed.mean_over_processes(value) is value
    assert distributed.from_first("x") == "x"


def test_the_mean_over_processes_is_one_and_leaves_its_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def all_reduce(value: torch.Tensor) -> None:
        value += 4 + 9  # what two others hold

    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    own = torch.tensor(2.0)
    assert distributed.mean_over_processes(own) == (2 + 4 + 9) / 3
    assert own == 2


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_shares_neither_overlap_nor_lose(
    size: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: n)
    items = []
    for rank in range(n):
        monkeypatch.setattr(distributed.dist, "get_rank", lambda rank=rank: rank)
        items += list(range(size))[distributed.share(size)]
    assert items == list(range(size))


@pytest.mark.slow
def test_two_processes_train_and_score_as_one(tmp_path: Path) -> None:
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    for folder, processes in ((one, 1), (two, 2)):
        # Sets of one image: one of two processes has none to score.
        done = run(folder, processes, "data.val_limit=1")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("nearood") == 1  # the table is printed once

    # Half by two processes, the rest by one.
    assert run(mixed, 2, "data.val_limit=1", "--time-budget", "0").returncode != 0
    assert checkpoint.read_checkpoint(mixed, checkpoint.STATE)[1]["step"] == 1
    done = run(mixed, 1, "data.val_limit=1", "--resume")
    assert done.returncode == 0, done.stderr

    weights = [checkpoint.read_checkpoint(f, checkpoint.MODEL)[0] for f in (one, two, mixed)]
    for name, expected in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-3, atol=1e-4)

    # The same model scored by two and by one.
    again = tmp_path / "again"
    command = ["--checkpoint", str(two), "--device", "cpu", "--quiet", "--out", str(again)]
    subprocess.run([sys.executable, *COMMAND, *command], capture_output=True, check=True, cwd=ROOT)
    for role in ("id", "near", "far"):
        a, b = (read_scores(folder / "scores.npz").of(role) for folder in (two, again))
        for name in a:
            np.testing.assert_allclose(a[name].score, b[name].score, atol=1e-5)


@pytest.mark.slow
def test_a_batch_is_to_be_shared_evenly(tmp_path: Path) -> None:
    done = run(tmp_path / "run", 2, "training.batch_size=7")
    assert done.returncode != 0
    assert "training.batch_size: got 7, expected a multiple of the 2 processes." in done.stderr


FAULTS = """
import resource, sys, torch
from ood_osdre.training.distributed import join
if sys.argv[1] == "joined":
    join(torch.device("cpu"))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# The first few find places between what is there.
print([faults() for _ in range(40)][-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_a_command_on_a_cpu_keeps_the_memory_that_it_frees() -> None:
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", FAULTS, mode]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert faults("joined") < 100 <= faults("alone")
