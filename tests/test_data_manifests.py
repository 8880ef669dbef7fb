r"""Tests for the ood_osdre.data.manifests module and the manifests themselves."""

import copy
from pathlib import Path

import pytest
import yaml

from ood_osdre.data import Manifest, load_manifest
from ood_osdre.data.download import DATASETS
from ood_osdre.data.manifests import ROLES
from ood_osdre.data.openood import SUBSETS, subset_mask
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


def sets(content: dict) -> list[dict]:
    return content["ids"]["toy"]["sets"]


@pytest.mark.parametrize("text", ["a: [1", "", "- 1", "\t"])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"toy\.yml"):
        load_manifest(write(tmp_path, text), "toy")


def test_unknown_id_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no ID data set 'tov' .did you mean 'toy'"):
        load_manifest(write(tmp_path, CONTENT), "tov")
    assert set(ROLES) >= {s.role for s in load_manifest(write(tmp_path, CONTENT), "toy").sets}
