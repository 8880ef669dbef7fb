r"""Tests for the ood_osdre.errors module."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from ood_osdre.errors import count, did_you_mean, nearest, number

KEYS = ["training.steps", "training.lr", "path.gamma2", "basis.size", "network.width"]


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("", None),
        ("zzz", None),
        ("GAMMA2", "path.gamma2"),
        ("training.stepz", "training.steps"),
        ("trainig.lr", "training.lr"),
        ("basis.siz", "basis.size"),
    ],
)
def test_nearest_key(word: str, near: str | None) -> None:
    assert nearest(word, KEYS) == near


def test_a_beginning_counts_if_only_one_choice_has_it() -> None:
    assert nearest("trig", ["linear", "trigonometric"]) == "trigonometric"
    assert nearest("c", ["cifar10", "cifar100"]) is None
    assert nearest("cifar_10", iter(["cifar10", "digits"])) == "cifar10"


def test_advice() -> None:
    assert did_you_mean("neer", ("near", "far")) == " (did you mean 'near'?)"
    assert did_you_mean("svhn", ("near", "far")) == ""


@pytest.mark.parametrize("text", ["0", "10", "1.5", "many", ""])
def test_counts_of_an_interval(text: str) -> None:
    assert [count(1, 9)("1"), count(1, 9)("9"), count(0)("99")] == [1, 9, 99]
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a whole number, 1 to 9"):
        count(1, 9)(text)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "many", "0"])
def test_numbers_from_0(text: str) -> None:
    assert [number()("0"), number(positive=True)("1e-3")] == [0.0, 1e-3]
    with pytest.raises(argparse.ArgumentTypeError, match="expected a finite number"):
        number(positive=text == "0")(text)


@pytest.mark.parametrize("length", [1, 99_999])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(length: int) -> None:
    code = f"""
import sys
from ood_osdre.errors import UserError, exit_status
sys.stdin.read()
sys.exit(exit_status(lambda: print({length} * "x") or 0))
"""
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_a_command_that_is_asked_to_end_leaves_nothing_half_written(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from ood_osdre.errors import exit_status
from ood_osdre.files import atomic_path

def write():
    with atomic_path(sys.argv[1]) as temporary:
        temporary.write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)

status = exit_status(write)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
sys.exit(status)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "scores.csv")]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    assert not list(tmp_path.iterdir())
