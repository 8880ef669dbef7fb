r"""Tests for the ood_osdre.errors module."""

import pytest

from ood_osdre.config import KEYS
from ood_osdre.errors import did_you_mean, nearest


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
