r"""Tests for the ood_osdre.evaluation.scores module."""

import math
from pathlib import Path

import numpy as np
import pytest

from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import Scores, read_scores, write_scores

SETS = [("id", "cifar10", 30), ("near", "tin", 20), ("far", "svhn", 5), ("far", "a b", 7)]


def make_scores() -> Scores:
    rng = np.random.default_rng(0)
    scores = Scores()

    for role, name, size in SETS:
        label = rng.integers(10, size=size) if role == "id" else np.full(size, -1)
        names = [f"{name}/é {i}.png" for i in range(size)]
        scores.add(role, name, rng.normal(size=size).astype(np.float32), label, names)

    return scores


def test_scores_round_trip(tmp_path: Path) -> None:
    scores = make_scores()
    write_scores(tmp_path / "scores.npz", scores)
    read = read_scores(tmp_path / "scores.npz")

    for role in ("id", "near", "far"):
        assert list(read.of(role)) == list(scores.of(role))

        for name, found in read.of(role).items():
            expected = scores.of(role)[name]
            assert found.name == expected.name
            np.testing.assert_array_equal(found.score, expected.score)
            np.testing.assert_array_equal(found.label, expected.label)

    assert read.counts() == {name: size for _, name, size in SETS}
    assert read.metrics() == scores.metrics()
    assert scores.metrics()["near"]["tin"] == ood_metrics(
        scores.of("id")["cifar10"].score, scores.of("near")["tin"].score
    )


def test_scores_file_is_plain_arrays_of_one_entry_an_image(tmp_path: Path) -> None:
    write_scores(tmp_path / "scores.npz", make_scores())

    with np.load(tmp_path / "scores.npz", allow_pickle=False) as file:
        assert {key: file[key].shape for key in file} == dict.fromkeys(
            ("score", "label", "name", "set", "role"), (62,)
        )
        assert file["name"][-1] == "a b/é 6.png"
        assert file["label"][file["role"] != "id"].max() == -1


def test_scores_are_refused_as_they_are_added() -> None:
    scores = make_scores()

    with pytest.raises(UserError, match=r"new scores: 1 of 2 are NaN or infinite, first at 1.png"):
        scores.add("far", "new", [0.0, math.nan], [-1, -1], ["0.png", "1.png"])
    with pytest.raises(UserError, match="new scores: the set is empty"):
        scores.add("far", "new", [], [], [])
    with pytest.raises(ValueError, match="'tin' has been added already"):
        scores.add("far", "tin", [0.0], [-1], ["0.png"])
    with pytest.raises(ValueError, match="second ID set"):
        scores.add("id", "new", [0.0], [1], ["0.png"])
    with pytest.raises(ValueError, match="unknown role 'csid'"):
        scores.add("csid", "new", [0.0], [1], ["0.png"])
    with pytest.raises(ValueError, match="1 scores but labels"):
        scores.add("far", "new", [0.0], [1, 2], ["0.png"])
    with pytest.raises(ValueError, match="1 scores but 2 file names"):
        scores.add("far", "new", [0.0], [-1], ["0.png", "1.png"])
    with pytest.raises(ValueError, match="ID set has not been added"):
        Scores().metrics()


def test_unreadable_scores_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"

    with pytest.raises(UserError, match="no such file"):
        read_scores(path)

    write_scores(path, make_scores())
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(UserError, match="not a readable scores file"):
        read_scores(path)

    np.savez(path, score=np.zeros(3))

    with pytest.raises(UserError, match="label"):
        read_scores(path)

    # A pickle could run code
    bad = np.array([{}], object)
    np.savez(path, score=bad, label=bad, name=bad, set=bad, role=bad)

    with pytest.raises(UserError, match="not a readable scores file"):
        read_scores(path)

    np.save(tmp_path / "array.npy", np.zeros(3))

    with pytest.raises(UserError, match="not a readable scores file"):
        read_scores(tmp_path / "array.npy")
