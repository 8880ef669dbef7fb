r"""Tests for the ood_osdre.data.manifests module and the manifests themselves."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ood_osdre.data import Manifest, load_manifest
from ood_osdre.data.__main__ import main
from ood_osdre.data.manifests import benchmark_names
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
        assert manifest.datasets[spec.dataset].source
        assert manifest.datasets[spec.dataset].licence
        assert (spec.list is None) == (name == "digits" or spec.synthetic is not None)
        # Of these no public source has the number.
        unknown = ("train_imagenet200.txt", "train_imagenet800.txt", "train_reference.txt")
        assert name == "digits" or spec.count or (name == "imagenet" and spec.list in unknown)
        assert spec.sha256 is None or len(spec.sha256) == 64
        assert set(spec.overlaps) <= {s.name for s in manifest.role("near")}


@pytest.mark.parametrize(
    ("name", "id_name", "near", "far"),
    [
        ("openood", "cifar10", "cifar100 tin", "mnist svhn texture places365"),
        ("openood", "cifar100", "cifar10 tin", "mnist svhn texture places365"),
        ("paper", "cifar10", "cifar100 tin", "mnist svhn"),
        ("paper", "cifar100", "cifar10 tin", "mnist svhn"),
        ("pack", "cifar10", "tin", "mnist fashion_mnist"),
        (
            "openood_subset",
            "cifar10",
            "cifar100 cifar100_held tin",
            "mnist svhn texture places365",
        ),
        (
            "openood_subset",
            "cifar100",
            "cifar10 cifar10_held tin",
            "mnist svhn texture places365",
        ),
        ("mirror0", "mirror", "near_same near_other", "fashion_mnist patch_shuffled shapes noise"),
        ("mirror1", "mirror", "near_same near_other", "fashion_mnist patch_shuffled shapes noise"),
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
    assert manifests["openood_subset"].title == "A subset of OpenOOD v1.5's sets"
    others = [n for n in manifests if n not in ("openood", "openood_subset")]
    assert "OpenOOD" not in " ".join(manifests[n].title for n in others if n != "paper")
    assert "shares its source" in manifests["pack"].note


def test_what_a_reference_holds_of_near_sets_and_what_stands_in() -> None:
    for id_name, whole in (("cifar10", "cifar100"), ("cifar100", "cifar10")):
        manifest = load_manifest("openood_subset", id_name)
        assert [s.name for s in manifest.role("reference")] == ["tiny_reference", "tin_reference"]
        assert manifest.overlaps("tiny_reference") == {whole: f"{whole}_held"}
        for reference in ("tin_reference", "my_folder", None):
            assert manifest.overlaps(reference) == {}
        assert manifest.parts == {f"{whole}_held": whole}
        openood = load_manifest("openood", id_name)
        # The first two are those that may be taken unnamed.
        names = [s.name for s in openood.role("reference")]
        assert names == ["random300k", "tin597", "tin_reference", "tiny_reference"]
        assert openood.overlaps("tin_reference") == {"tin": None}
        assert openood.parts == {}


LONG = "x" * 300
ID = "ids.toy"
MISTAKES: list[tuple[Callable[[dict], object], str]] = [
    (lambda c: c.update(titel="x"), "unknown key 'titel'; did you mean 'title'?"),
    (lambda c: c.pop("title"), "title: is missing"),
    (lambda c: c.update(title=3), "title: got 3"),
    (lambda c: c.update(title=NESTED), "title: got [[[..."),
    (lambda c: c.update(title="\ud800"), "title: got '\\ud800'"),
    (lambda c: c.update(size=True), "size: got true"),
    (lambda c: c.update(size=-3), "size: got -3"),
    (lambda c: c.update(size=1000000), "size: got 1000000"),
    (lambda c: c.update(ids=[1]), "ids: got [1]"),
    (lambda c: c.update(ids={}), "ids: got {}"),
    (lambda c: c.update(lists="{foo}"), "lists: got '{foo}', expected no field but {id}"),
    (lambda c: c.update(lists="{"), "lists: got '{', expected no field but {id}"),
    (lambda c: c.update(images="a\0"), "images: got 'a\\x00', expected the path"),
    (lambda c: c.update(hold_out=[NESTED]), "hold_out[0]: got [[[..."),
    (lambda c: c.update(hold_out=[True]), "hold_out[0]: got true"),
    (lambda c: c["datasets"]["toy"].update(license="x"), "did you mean 'datasets.toy.licence'?"),
    (lambda c: toy(c).pop("std"), f"{ID}.std: is missing"),
    (lambda c: toy(c).update(std=[-1, 1, 1]), f"{ID}.std[0]: got -1, expected a number greater"),
    (lambda c: toy(c).update(std=[0, 1, 1]), f"{ID}.std[0]: got 0, expected a number greater"),
    (lambda c: toy(c).update(std=[NAN, 1, 1]), f"{ID}.std[0]: got nan, expected"),
    (lambda c: toy(c).update(mean=[0.5]), f"{ID}.mean[1]: is missing"),
    (lambda c: toy(c).update(mean=[125, 0, 0]), f"{ID}.mean[0]: got 125, expected a number less"),
    (lambda c: toy(c).update(mean=[True, 0, 1]), f"{ID}.mean[0]: got true, expected a number"),
    (lambda c: toy(c).update(mean=[10**400, 0, 1]), f"{ID}.mean[0]: got 100000"),
    (lambda c: toy(c).update(mean=[NESTED] * 3), f"{ID}.mean[0]: got [[[..."),
    (lambda c: toy(c).update(sets=[]), f"{ID}.sets: got [], expected"),
    (lambda c: toy(c).update(sets=None), f"{ID}.sets: got null, expected"),
    (lambda c: change(c, 0, sha265="x"), f"unknown key '{ID}.sets[0].sha265'; did you mean"),
    (lambda c: change(c, 1, role="neer"), f"{ID}.sets[1].role: got 'neer', expected"),
    (lambda c: change(c, 0, dataset="tow"), "sets[0].dataset: got 'tow' (did you mean 'toy'?)"),
    (lambda c: change(c, 0, count="3"), "sets[0].count: got '3', expected"),
    (lambda c: change(c, 1, count=0), "sets[1].count: got 0, expected"),
    (lambda c: sets(c)[0].pop("name"), "sets[0].name: is missing"),
    (lambda c: change(c, 1, list=LONG), "expected the path of a file"),
    (lambda c: change(c, 1, list="a\0b"), "list: got 'a\\x00b', expected the path"),
    (lambda c: change(c, 1, list=""), "list: got '', expected the path"),
    (lambda c: change(c, 1, list=None), "sets[1].list: got none for the near other, expected"),
    (lambda c: change(c, 1, name="all"), "sets[1].name: got 'all', expected one that no other"),
    (lambda c: change(c, 1, name="nearood x"), "sets[1].name: got 'nearood x', expected one that"),
    (lambda c: change(c, 1, name="toy_test"), "sets[1].name: got 'toy_test', expected one that"),
    (lambda c: change(c, 1, name="\ud800"), "name: got '\\ud800', expected"),
    (lambda c: change(c, 1, name="a\nb"), "name: got 'a\\nb', expected a name on one line"),
    (lambda c: change(c, 1, name=""), "name: got '', expected a name"),
    (lambda c: add(c, "other", "far"), "sets[2].name: got 'other', expected one that no"),
    (lambda c: add(c, "second", "id_train"), "sets[2].role: got a second set of role id_train"),
    (
        lambda c: add(c, "a", "id_val", "b", "id_val"),
        "sets[3].role: got a second set of role id_v",
    ),
    (lambda c: change(c, 0, overlaps=["other"]), "overlaps: got 'other' for the id_train toy"),
    (lambda c: change(c, 0, role="reference", overlaps={"other": "x"}), "overlaps: got 'x' for"),
    (lambda c: change(c, 0, role="reference", overlaps=[NESTED]), "overlaps: got"),
    (lambda c: change(c, 1, synthetic="shape"), "synthetic: got 'shape', expected"),
    (
        lambda c: change(c, 1, synthetic="shapes"),
        "synthetic: expected for a near or far set, with",
    ),
    (lambda c: change(c, 0, download={"dataset": "mnist"}), "download.splits: is missing"),
    (lambda c: change(c, 0, download=download("{")), "download.path: got '{', expected a pattern"),
    (lambda c: change(c, 0, download=download("{no}")), "path: got '{no}', expected a pattern"),
    (lambda c: change(c, 0, download=download("x", "minst")), "did you mean 'mnist'?"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_named(tmp_path: Path, make: Callable[[dict], object], message: str) -> None:
    content = copy.deepcopy(CONTENT)
    make(content)
    with pytest.raises(UserError) as error:
        load_manifest(write(tmp_path, content), "toy")
    text = str(error.value)
    assert message in text
    assert "toy.yml: " in text
    assert "\n" not in text
    assert len(text.replace(str(tmp_path), "")) < 250


def test_data_check_refuses_what_training_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, {**CONTENT, "size": 0}))
    assert main(["check", "--id", "toy", "--benchmark", path, "--data-root", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def toy(content: dict) -> dict:
    return content["ids"]["toy"]


def sets(content: dict) -> list[dict]:
    return toy(content)["sets"]


def change(content: dict, index: int, **values: object) -> None:
    sets(content)[index].update(values)


def add(content: dict, *names_and_roles: str) -> None:
    for name, role in zip(names_and_roles[::2], names_and_roles[1::2], strict=True):
        sets(content).append({"name": name, "role": role, "list": "b.txt"})


def download(path: str, dataset: str = "mnist") -> dict:
    return {"dataset": dataset, "splits": ["test"], "path": path}


@pytest.mark.parametrize("text", ["a: [1", "", "- 1", "\t", "title: " + "[" * 1000])
def test_other_text_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"toy\.yml"):
        load_manifest(write(tmp_path, text), "toy")


def test_unknown_id_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ids: got 'tov' .did you mean 'toy'"):
        load_manifest(write(tmp_path, CONTENT), "tov")


def test_digits_alone_go_without_lists(tmp_path: Path) -> None:
    r"""A manifest that forgets its lists is not the embedded benchmark under its title."""
    content = yaml.safe_load(find("data_manifests", "digits").read_text())
    assert load_manifest(write(tmp_path, content), "digits").is_embedded

    sets = content["ids"]["digits"]["sets"]
    for changed in (
        {"cifar10": content["ids"]["digits"]},
        {"digits": {**content["ids"]["digits"], "sets": sets[:-1]}},
    ):
        (id_name,) = changed
        path = write(tmp_path, {**content, "ids": changed})
        with pytest.raises(UserError, match=rf"ids\.{id_name}\.sets\[0\]\.list: got none"):
            load_manifest(path, id_name)


def test_the_known_benchmarks_are_those_with_id_sets() -> None:
    known = ["digits", "imagenet", "mirror0", "mirror1", "openood", "openood_subset", "pack"]
    assert benchmark_names() == [*known, "paper", "places100"]
    assert benchmark_names("digits") == ["digits"]
    assert "pack" in benchmark_names("cifar10")
