r"""Tests for the ood_osdre.evaluation.scores module."""

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import ROLES, Scores, read_scores, write_scores

SETS = [("id", "cifar10", 30), ("near", "tin", 20), ("far", "svhn", 5), ("far", "a b", 7)]


def make_scores() -> Scores:
    rng = np.random.default_rng(0)
    scores = Scores()
    for role, name, size in SETS:
        label = rng.integers(10, size=size) if role == "id" else np.full(size, -1)
        names = [f"{name}/é {i}.png" for i in range(size)]
        scores.add(role, name, rng.normal(size=size).astype(np.float32), label, names)
    return scores


def test_scores_are_short_and_drawn() -> None:
    scores = make_scores()
    assert repr(scores).startswith("Scores(")
    assert len(repr(scores)) < 40 * len(SETS)
    assert repr(scores.of("id")) == f"{{'{SETS[0][1]}': ScoredSet({SETS[0][2]} scores)}}"
    ax = scores.plot(Figure().subplots())
    areas = [(p.get_data().values * np.diff(p.get_data().edges)).sum() for p in ax.patches]
    assert len(areas) == len(SETS)
    assert all(0.7 < area <= 1 + 1e-9 for area in areas)  # of few scores, one is outside
    # Whether numbers are log-ratios, they do not say: those of a classifier look alike.
    assert ax.get_xlabel() == "score, larger = more ID"
    named = scores.plot(Figure().subplots(), "log-ratio (nats)")
    assert named.get_xlabel() == "log-ratio (nats), larger = more ID"
    scores.add("far", "_x", [0.0, 1.0], [-1, -1], ["a", "b"])
    names = [t.get_text().strip() for t in scores.plot(Figure().subplots()).get_legend().texts]
    assert names == [f"{name} (n = {n})" for _, name, n in (*SETS, ("far", "_x", 2))]
    with pytest.raises(UserError, match="got no scores"):
        Scores().plot()


def assert_equal(one: Scores, other: Scores) -> None:
    for role in ROLES:
        assert list(one.of(role)) == list(other.of(role))
        for name, found in one.of(role).items():
            expected = other.of(role)[name]
            assert found.name == expected.name
            np.testing.assert_array_equal(found.score, expected.score)
            np.testing.assert_array_equal(found.label, expected.label)


def test_scores_file_is_plain_arrays_of_one_entry_an_image(tmp_path: Path) -> None:
    scores, path = make_scores(), tmp_path / "scores.npz"
    write_scores(path, scores)
    read = read_scores(path)
    assert_equal(read, scores)
    assert read.counts() == {name: size for _, name, size in SETS}
    assert read.metrics() == scores.metrics()
    assert scores.metrics()["near"]["tin"] == ood_metrics(
        scores.of("id")["cifar10"].score, scores.of("near")["tin"].score
    )
    with np.load(path, allow_pickle=False) as file:
        keys = ("score", "label", "name", "set", "role")
        assert {key: file[key].shape for key in file} == dict.fromkeys(keys, (62,))
        assert file["name"][-1] == "a b/é 6.png"
        assert file["label"][file["role"] != "id"].max() == -1


@pytest.mark.parametrize(
    ("role", "name", "score", "label", "names", "found"),
    [
        ("far", "new", [0.0, math.nan], [-1, -1], ["0.png", "1.png"], "1 of 2 .*first at 1.png"),
        ("far", "new", [], [], [], r"shape \(0,\)"),
        ("far", "tin", [0.0], [-1], ["0.png"], "a new name"),
        ("id", "new", [0.0], [1], ["0.png"], "one ID set"),
        ("csid", "new", [0.0], [1], ["0.png"], "role 'csid'.*expected one of id, near, far"),
        ("far", "new", [0.0], [1, 2], ["0.png"], r"labels of shape \(2,\).*\(1,\)"),
        ("far", "new", [0.0], [-1], ["0.png", "1.png"], r"shape \(1,\), .*shape \(2,\)"),
    ],
)
def test_scores_are_refused_as_they_are_added(
    role: str, name: str, score: list, label: list, names: list, found: str
) -> None:
    with pytest.raises(UserError, match=f"{name} scores: .*{found}"):
        make_scores().add(role, name, score, label, names)


def arrays() -> dict[str, np.ndarray]:
    columns = {"score": np.arange(3.0), "label": np.arange(3), "name": np.array(list("abc"))}
    return columns | {"set": np.array(["x", "y", "y"]), "role": np.array(["id", "near", "near"])}


@pytest.mark.parametrize(
    "changed",
    [
        {"score": np.zeros(2)},
        {"score": np.zeros((3, 1))},
        {"score": np.array(0.0)},
        {"score": np.array([0.0, np.nan, 1.0])},
        {"score": np.array(["a", "b", "c"])},
        {"role": np.array(["id", "id", "near"])},
        {"role": np.array(["id", "near", "csid"])},
        {"set": np.array(["x", "y", "x"])},
        {"set": np.full(3, "x"), "role": np.full(3, "id")},  # nothing to compare it with
        {"name": np.array([{}, {}, {}], object)},  # a pickle could run code
    ],
    ids=lambda changed: "-".join(f"{k}{v.shape}{v.dtype.kind}" for k, v in changed.items()),
)
def test_odd_scores_files_are_one_line(tmp_path: Path, changed: dict[str, np.ndarray]) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, **arrays())
    assert list(read_scores(path).of("near")) == ["y"]
    np.savez(path, **{**arrays(), **changed})
    with pytest.raises(UserError, match=r"scores\.npz: not a readable scores file") as error:
        read_scores(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("what", ["absent", "an array", "no arrays", "half"])
def test_what_is_no_scores_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "scores.npz"
    if what == "an array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    elif what == "no arrays":
        np.savez(path, score=np.zeros(3))
    elif what == "half":
        write_scores(path, make_scores())
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"scores\.npz: not a readable scores file"):
        read_scores(path)


def test_damaged_bytes_are_refused_or_change_nothing(tmp_path: Path) -> None:
    scores, path = make_scores(), tmp_path / "scores.npz"
    write_scores(path, scores)
    whole = path.read_bytes()
    for i in range(0, len(whole), 11):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
        try:
            read, refusal = read_scores(path), ""
        except UserError as error:
            read, refusal = scores, str(error)
        assert not refusal or (refusal.startswith(f"{path}: ") and "\n" not in refusal)
        assert_equal(read, scores)
