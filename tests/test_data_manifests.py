r"""Tests for the ood_osdre.data.manifests module and the manifests themselves."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ood_osdre.data import Manifest, load_benchmark, load_manifest
from ood_osdre.data.__main__ import main
from ood_osdre.data.download import DATASETS, SUBSETS, subset_mask
from ood_osdre.data.manifests import ROLES
from ood_osdre.errors import UserError
from ood_osdre.resources import find, names

BENCHMARKS = [
    (name, id_name)
    for name in names("data_manifests")
    for id_name in yaml.safe_load(find("data_manifests", name).read_text())["ids"]
]
CONTENT = {
    "title": "Toy",
    "datasets": {"toy": {"source": "here", "licence": "none"}},
    "ids": {
        "toy": {
            "mean": [0.5, 0.5, 0.5],
            "std": [0.25, 0.25, 0.25],
            "sets": [
                {"name": "toy", "role": "id_train", "list": "a.txt", "dataset": "toy", "count": 3},
                {"name": "other", "role": "near", "list": "b.txt"},
            ],
        }
    },
}


NAN = float("nan")
NESTED: list = ["x"] * 10
for _ in range(7):
    NESTED = [NESTED] * 10  # ten million leaves, by reference


def write(folder: Path, content: object) -> Path:
    path = folder / "toy.yml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(("name", "id_name"), BENCHMARKS)
def test_shipped_manifests_are_whole(name: str, id_name: str) -> None:
    manifest = load_manifest(name, id_name)

    assert manifest.note
    assert manifest.get
    for role in ("id_train", "id_val", "id_test"):
        assert len(manifest.role(role)) == 1
    for role in ("reference", "near", "far"):
        assert manifest.role(role)
    for spec in manifest.sets:
        assert spec.source
        assert spec.licence
        assert spec.list is None or spec.count
        assert spec.checksum is None or len(spec.checksum) == 64
        assert set(spec.overlaps) <= {s.name for s in manifest.role("near")}
        if spec.download is not None:
            assert spec.download.dataset in DATASETS
            assert spec.download.subset in {None, *SUBSETS}


@pytest.mark.parametrize(
    ("name", "id_name", "near", "far"),
    [
        ("openood", "cifar10", "cifar100 tin", "mnist svhn texture places365"),
        ("openood", "cifar100", "cifar10 tin", "mnist svhn texture places365"),
        ("paper", "cifar10", "cifar100 tin", "mnist svhn"),
        ("paper", "cifar100", "cifar10 tin", "mnist svhn"),
        ("pack", "cifar10", "tin", "mnist fashion_mnist"),
        ("digits", "digits", "digit8 digit9", "flower flower_grey"),
    ],
)
def test_near_and_far_sets(name: str, id_name: str, near: str, far: str) -> None:
    manifest = load_manifest(name, id_name)

    assert [s.name for s in manifest.role("near")] == near.split()
    assert [s.name for s in manifest.role("far")] == far.split()


def test_counts_of_openood() -> None:
    expected = {
        "cifar10": [50000, 1000, 9000, 1000, 9000, 7793, 70000, 26032, 5640, 35195, 10000],
        "cifar100": [50000, 1000, 9000, 972, 10000, 6526, 70000, 26032, 5640, 33773],
    }
    for id_name, counts in expected.items():
        sets = load_manifest("openood", id_name).sets
        assert [s.count for s in sets if s.role != "reference"] == counts


def test_only_openood_is_titled_so() -> None:
    manifests: dict[str, Manifest] = {n: load_manifest(n, i) for n, i in BENCHMARKS}
    assert manifests["openood"].title.startswith("OpenOOD v1.5")
    assert "OpenOOD" not in manifests["pack"].title + manifests["digits"].title
    assert "shares its source" in manifests["pack"].note


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_openood_holds_out_every_class_alike(dataset: str) -> None:
    val, test = subset_mask(f"{dataset}_val"), subset_mask(f"{dataset}_test")

    assert (val ^ test).all()
    assert val.sum() == 1000
    assert set(val.sum(axis=1)) == {100 if dataset == "cifar10" else 10}
    assert subset_mask("cifar100_near").sum() == 9000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(titel="x"), "unknown key 'titel' (did you mean 'title'?)"),
        (lambda c: c.pop("title"), "the key 'title' is missing"),
        (lambda c: c.update(title=3), "title is 3 (int), expected str"),
        (lambda c: c.update(size=True), "size is True (bool), expected int"),
        (lambda c: c.update(ids=[1]), "ids: expected a mapping, found list"),
        (lambda c: c["datasets"]["toy"].update(license="x"), "did you mean 'licence'?"),
        (lambda c: c["ids"]["toy"].update(mean=[0.5]), "mean is [0.5], expected three numbers"),
        (lambda c: c["ids"]["toy"].pop("std"), "the key 'std' is missing"),
        (lambda c: sets(c)[0].update(sha265="x"), "sets[0]: unknown key 'sha265'"),
        (lambda c: sets(c)[1].update(role="neer"), "role 'neer' (did you mean 'near'?)"),
        (lambda c: sets(c)[0].update(dataset="tow"), "no dataset 'tow'"),
        (lambda c: sets(c)[0].update(count="3"), "count is '3' (str), expected int"),
        (lambda c: sets(c)[0].pop("name"), "sets[0]: the key 'name' is missing"),
        (lambda c: sets(c)[0].update(download={"dataset": "x"}), "'splits' is missing"),
        (lambda c: sets(c).append({"name": "other", "role": "far"}), "two sets are named 'other'"),
        (lambda c: toy(c).update(sets=[]), "sets is empty"),
        (lambda c: toy(c).update(sets=None), "sets is empty"),
        (lambda c: toy(c).update(std=[-1, 1, 1]), "std is [-1, 1, 1], expected 1e-06 to 1"),
        (lambda c: toy(c).update(std=[0, 1, 1]), "std is [0, 1, 1], expected 1e-06 to 1"),
        (lambda c: toy(c).update(std=[NAN, 1, 1]), "std is [nan, 1, 1], expected"),
        (lambda c: toy(c).update(mean=[125, 123, 113]), "mean is [125, 123, 113], expected 0 to"),
        (lambda c: toy(c).update(mean=[True, 0, 1]), "mean is [True, 0, 1], expected three"),
        (lambda c: toy(c).update(mean=[10**400, 0, 1]), "mean is [an integer of 1329 bits, 0, 1]"),
        (lambda c: toy(c).update(mean=[NESTED] * 3), "expected three numbers"),
        (lambda c: c.update(title=NESTED), "title is [[[...]"),
        (lambda c: c.update(title="\ud800"), "title is '\\ud800', expected text"),
        (lambda c: c.update(size=-3), "size is -3, expected 1 to 4096"),
        (lambda c: c.update(size=1000000), "size is 1000000, expected 1 to 4096"),
        (lambda c: c.update(lists="{foo}"), "lists is '{foo}', expected no field but {id}"),
        (lambda c: c.update(lists="{"), "lists is '{', expected no field but {id}"),
        (lambda c: c.update(images="a\0"), "images is 'a\\x00', expected the path"),
        (lambda c: c.update(hold_out=[NESTED]), "hold_out holds [[[...]"),
        (lambda c: sets(c)[1].update(list="x" * 300), "expected the path of a file"),
        (lambda c: sets(c)[1].update(list="a\0b"), "list is 'a\\x00b', expected the path"),
        (lambda c: sets(c)[1].update(list=""), "list is '', expected the path"),
        (lambda c: sets(c)[1].update(list=None), "the near set 'other' has no list"),
        (lambda c: sets(c)[1].update(count=0), "count is 0, expected 1 to"),
        (lambda c: sets(c)[1].update(name="all"), "near set 'all' has another row's name"),
        (lambda c: sets(c)[1].update(name="nearood x"), "'nearood x' has another row's name"),
        (lambda c: sets(c)[1].update(name="toy_test"), "'toy_test' has another row's name"),
        (lambda c: sets(c)[1].update(name="\ud800"), "name is '\\ud800', expected text"),
        (lambda c: sets(c)[1].update(name="a\nb"), "name is 'a\\nb', expected a name on one line"),
        (lambda c: sets(c)[1].update(name=""), "name is '', expected a name"),
        (lambda c: second(c, "id_train"), "'second' is a second set of role id_train"),
        (lambda c: second(c, "id_val", 2), "'second1' is a second set of role id_val"),
        (lambda c: second(c, "id_test", 2), "'second1' is a second set of role id_test"),
        (lambda c: sets(c)[0].update(download=download("{")), "path is '{', expected a pattern"),
        (lambda c: sets(c)[0].update(download=download("{no}")), "path is '{no}', expected"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: object, message: str) -> None:
    content = copy.deepcopy(CONTENT)
    assert callable(change)
    change(content)

    with pytest.raises(UserError) as error:
        load_manifest(write(tmp_path, content), "toy")
    assert message in str(error.value)
    assert "toy.yml" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value).replace(str(tmp_path), "")) < 250


def toy(content: dict) -> dict:
    return content["ids"]["toy"]


def sets(content: dict) -> list[dict]:
    return toy(content)["sets"]


def second(content: dict, role: str, count: int = 1) -> None:
    for i in range(count):
        name = f"second{i or ''}"
        sets(content).append({"name": name, "role": role, "list": "b.txt"})


def download(path: str) -> dict:
    return {"dataset": "mnist", "splits": ["test"], "path": path}


@pytest.mark.parametrize("text", ["a: [1", "", "- 1", "\t", "title: " + "[" * 1000])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"toy\.yml"):
        load_manifest(write(tmp_path, text), "toy")


def test_unknown_id_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no ID data set 'tov' .did you mean 'toy'"):
        load_manifest(write(tmp_path, CONTENT), "tov")
    assert set(ROLES) >= {s.role for s in load_manifest(write(tmp_path, CONTENT), "toy").sets}


def test_digits_alone_go_without_lists(tmp_path: Path) -> None:
    r"""A manifest that forgets its lists is not the embedded benchmark under its title."""
    content = yaml.safe_load(find("data_manifests", "digits").read_text())
    assert load_manifest(write(tmp_path, content), "digits").is_embedded

    content["ids"]["cifar10"] = copy.deepcopy(content["ids"]["digits"])
    content["ids"]["digits"]["sets"].pop()
    path = write(tmp_path, content)
    for id_name in ("cifar10", "digits"):
        with pytest.raises(UserError, match="the id_train set 'digits' has no list"):
            load_manifest(path, id_name)


def test_a_manifest_without_sets_is_not_embedded() -> None:
    manifest = replace(load_manifest("digits", "digits"), sets=())
    assert not manifest.is_embedded
    with pytest.raises(UserError, match="has no set of role id_train"):
        load_benchmark(manifest, "nowhere")


@pytest.mark.parametrize("name", ["sizes", "names"])
def test_data_check_refuses_what_training_would(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    content = copy.deepcopy(CONTENT)
    if name == "sizes":
        content["size"] = 0
    else:
        sets(content)[1]["name"] = "all"
    path = str(write(tmp_path, content))
    assert main(["check", "--id", "toy", "--benchmark", path, "--data-root", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
