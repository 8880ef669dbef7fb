r"""Tests for the ood_osdre.data.benchmark, status and sets modules."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from image_roots import SETS, edit, make_root, rewrite, write_image
from PIL import Image

from ood_osdre.data import (
    BenchmarkData,
    ImageSet,
    choose_benchmark,
    hold_out_reference,
    load_benchmark,
    load_manifest,
    status,
)
from ood_osdre.data import benchmark as module
from ood_osdre.data.builtin import synthetic_ood
from ood_osdre.data.images import decode
from ood_osdre.data.manifests import BENCHMARKS
from ood_osdre.data.status import runnable
from ood_osdre.errors import UserError

LISTS = Path("benchmark_imglist/toy")
IMAGES = Path("images_classic")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_root(tmp_path)
    return tmp_path


def load(root: Path, **options: object) -> BenchmarkData:
    manifest = load_manifest(root / "toy.yml", "toy")
    return load_benchmark(manifest, root, progress=False, **options)


def test_everything_present_is_loaded(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = load(root)
        load(root, training=False)
    assert not caplog.records
    assert [len(s) for s in (data.id_train, data.id_val, data.id_test)] == [12, 4, 8]
    assert len(data.reference) == 48
    assert {k: len(v) for k, v in data.near.items()} == {"near": 5}
    assert {k: len(v) for k, v in data.far.items()} == {"far": 5, "far away": 5}
    assert data.ood_val is not None
    assert len(data.ood_val) == 3
    assert data.absent_by_role() == {"near": [], "far": []}
    assert set(data.checksums) == {f"{role}/{name}" for role, name, *_ in SETS}


def test_images_labels_and_names_match_the_files(root: Path) -> None:
    data = load(root)
    for images in (data.id_train, data.id_test, data.reference, data.far["far away"]):
        for pixels, name in zip(images.images, images.names, strict=True):
            np.testing.assert_array_equal(pixels, decode(root / IMAGES / name, 32))
    assert [g == "bird" for g in data.id_test.groups] == (data.id_test.labels == 1).tolist()
    assert (data.reference.labels == -1).all()
    assert data.reference_name == "others"


class TestCache:
    def test_second_load_decodes_nothing(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = load(root, cache_dir=tmp_path / "cache")
        kept = [path.name for path in (tmp_path / "cache").iterdir()]
        assert len([name for name in kept if not name.startswith("marks-")]) == len(SETS)
        assert not (root / module.CACHE).exists()
        (tmp_path / "alias").symlink_to(root)
        monkeypatch.setattr(module, "decode_all", lambda *args: pytest.fail("decoded again"))
        for same in (root, tmp_path / "alias"):
            second = load(same, cache_dir=tmp_path / "cache")
            np.testing.assert_array_equal(first.id_train.images, second.id_train.images)
            assert first.checksums == second.checksums

    @pytest.mark.parametrize("same_size", [False, True])
    def test_changed_image_is_decoded_again(self, root: Path, same_size: bool) -> None:
        before = load(root)
        path = root / IMAGES / before.id_test.names[0]
        stat = path.stat()
        write_image(path, seed=10**6, size=(32, 32) if same_size else (40, 40))
        if same_size:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
        after = load(root)
        assert not np.array_equal(before.id_test.images[0], after.id_test.images[0])
        np.testing.assert_array_equal(after.id_test.images[0], decode(path, 32))

    @pytest.mark.parametrize("fallback", [False, True])
    def test_roots_with_the_same_lists_share_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
    ) -> None:
        r"""Though names, sizes and times of all their images are the same."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        (tmp_path / "file").write_text("no folder")
        cache = tmp_path / ("file" if fallback else "cache")
        for index in range(2):
            root = tmp_path / f"r{index}"
            make_root(root)
            for path in (root / IMAGES).rglob("*.png"):
                pixels = np.full((32, 32, 3), index, np.uint8)
                Image.fromarray(pixels).save(path, format="BMP")
                os.utime(path, (1_600_000_000,) * 2)
            assert (load(root, cache_dir=cache).id_test.images == index).all()


def test_absent_and_partial_sets_are_named_not_loaded(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / LISTS / "test_far.txt").unlink()
    (root / IMAGES / "far away" / "far" / "3.png").unlink()
    with caplog.at_level(logging.WARNING):
        data = load(root)
    assert data.absent == ["far", "far away"]
    assert data.absent_by_role() == {"near": [], "far": ["far", "far away"]}
    assert not data.far
    assert "absent" in data.missing["far"]
    assert "partial, 4 of 5 images" in data.missing["far away"]
    assert "far away/far/3.png" in data.missing["far away"]
    assert "far away" in caplog.text


def test_missing_files_are_reported_at_once_first_ten_shown(root: Path) -> None:
    (root / LISTS / "train_toy.txt").write_text("".join(f"nothing/{i}.png 0\n" for i in range(40)))
    write_image(root / IMAGES / "nothing" / "0.png", 0)
    message = r"toy: partial, 1 of 12 .*39 files: nothing/1\.png.* and 29 more"
    with pytest.raises(UserError, match=message):
        load(root)


REQUIRED = ["train_toy.txt", "val_toy.txt", "test_toy.txt", "train_others.txt"]


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("content", [None, "", "\n\n"])
def test_required_set_absent_or_empty_is_explained(
    root: Path, name: str, content: str | None
) -> None:
    if content is None:
        (root / LISTS / name).unlink()
    else:
        (root / LISTS / name).write_text(content)
    with pytest.raises(UserError) as error:
        load(root)
    message = str(error.value)
    assert str(root / LISTS / name) in message
    assert "Ask around." in message
    assert "--id digits needs none" in message
    assert len(message.splitlines()) <= 6


def test_nothing_at_all_is_explained_in_a_few_lines(tmp_path: Path) -> None:
    for name, id_name in (("openood", "cifar10"), ("pack", "cifar10")):
        with pytest.raises(UserError) as error:
            load_benchmark(load_manifest(name, id_name), tmp_path / "data")
        lines = str(error.value).splitlines()
        assert len(lines) <= 9
        assert str(tmp_path / "data") in lines[0]
    assert not list(tmp_path.iterdir())


def test_no_table_set_at_all_is_an_error(root: Path) -> None:
    for name in ("test_near.txt", "test_far.txt", "test_far_away.txt"):
        (root / LISTS / name).unlink()
    with pytest.raises(UserError, match="near near: absent"):
        load(root)
    manifest = load_manifest(root / "toy.yml", "toy")
    sets = tuple(s for s in manifest.sets if s.role != "id_val")
    with pytest.raises(UserError, match="no set of role id_val"):
        load_benchmark(manifest.model_copy(update={"sets": sets}), root)


def test_another_version_of_a_list_is_no_row(root: Path) -> None:
    edit(root, "test_far.txt", sha256="0" * 64)
    edit(root, "test_far_away.txt", count=4)
    edit(root, "test_near.txt", count=6)
    edit(root, "val_near.txt", sha256="0" * 64)
    with pytest.raises(UserError) as error:
        load(root)
    message = str(error.value)
    assert "far far: corrupt" in message
    assert "far far away: corrupt, 5 of 4" in message
    assert "near near: partial, 5 of 6" in message


LABELS = {
    "beyond training": ("test_toy.txt", "2", "id_test: 4 of 8 labels are beyond 1"),
    "validation beyond training": ("val_toy.txt", "7", "id_val: 2 of 4 labels are beyond 1"),
    "as many as a class head cannot have": ("train_toy.txt", "500000", "a label is 500000, of 12"),
    "negative": ("test_toy.txt", "-1", "ID images need labels >= 0"),
    "more digits than an integer has": ("train_toy.txt", "9" * 30, "expected 'path LABEL'"),
    "minus two": ("train_toy.txt", "-2", "expected 'path LABEL'"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_out_of_range_are_refused(root: Path, name: str) -> None:
    file, label, message = LABELS[name]
    rewrite(root / LISTS / file, lambda x: x.replace(".png 1", f".png {label}"))
    with pytest.raises(UserError, match=message):
        load(root)


def mkfifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.write_bytes(b""), "empty in .*far/2.png"),
        (mkfifo, "no regular files: 1 file: far/far/2.png"),
        (
            lambda p: rewrite(p.parents[3] / LISTS / "test_far.txt", lambda x: x + " x"),
            "path LABEL",
        ),
        (lambda p: (p.parents[3] / LISTS / "test_far.txt").write_text(""), "absent, 0 of 5"),
    ],
)
def test_a_damaged_ood_set_costs_its_row(
    root: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(root / IMAGES / "far" / "far" / "2.png")
    data = load(root)
    assert data.absent == ["far"]
    assert re.search(message, data.missing["far"])


def test_damaged_image_is_named(root: Path) -> None:
    path = root / IMAGES / "far" / "far" / "2.png"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"far far: cannot decode 1 file: .*far/far/2\.png"):
        load(root)


class TestReference:
    def test_it_may_be_a_folder(self, root: Path, tmp_path: Path) -> None:
        for i in range(3):
            write_image(tmp_path / "my images" / f"class {i}" / "x.png", i, (50, 40))
        data = load(root, reference=tmp_path / "my images")
        assert data.reference_name == "my images"
        assert data.reference.groups == ["class 0", "class 1", "class 2"]
        assert data.reference.images.shape == (3, 32, 32, 3)

    @pytest.mark.parametrize("beside", [False, True])
    def test_it_may_be_a_list(self, root: Path, tmp_path: Path, beside: bool) -> None:
        folder = tmp_path / "apart" if beside else root / IMAGES
        write_image(folder / "ours" / "a b.png", 1)
        path = tmp_path / "apart" / "ours.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("ours/a b.png -1\n")
        data = load(root, reference=str(path))
        assert (data.reference_name, data.reference.names) == ("ours", ["ours/a b.png"])

    @pytest.mark.parametrize(
        "shape", [(7, 32, 32, 3), (7, 28, 28), (7, 28, 28, 1), (7, 64, 48, 3)]
    )
    def test_it_may_be_an_array(self, root: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
        array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        np.save(tmp_path / "noise.npy", array)
        data = load(root, reference=tmp_path / "noise.npy")
        assert data.reference_name == "noise"
        assert data.reference.images.shape == (7, 32, 32, 3)
        assert data.reference.names[3] == "noise.npy[3]"
        if shape == (7, 32, 32, 3):
            np.testing.assert_array_equal(data.reference.images, array)

    @pytest.mark.parametrize(
        "array",
        [
            np.zeros((2, 32, 32, 3)),
            np.array([None]),
            *(np.zeros(s, np.uint8) for s in ((2, 3072), (9, 0, 32, 3), (9, 32, 0))),
            *(np.zeros(s, np.uint8) for s in ((3, 32, 32), (32, 32, 3))),
        ],
        ids=lambda a: f"{a.dtype} {a.shape}",
    )
    def test_other_arrays_are_refused(self, root: Path, tmp_path: Path, array: np.ndarray) -> None:
        np.save(tmp_path / "noise.npy", array, allow_pickle=True)
        with pytest.raises(UserError, match=r"reference noise: corrupt.*noise\.npy"):
            load(root, reference=tmp_path / "noise.npy")

    def test_an_unknown_one_suggests_the_nearest(self, root: Path) -> None:
        with pytest.raises(UserError, match=r"no reference 'other' .did you mean 'others'"):
            load(root, reference="other")
        with pytest.raises(UserError, match="no reference 'xxx"):
            load(root, reference="x" * 5000)

    def test_the_first_present_without_overlap_is_taken(
        self, root: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        content = yaml.safe_load((root / "toy.yml").read_text())
        leaky = {"name": "leaky", "role": "reference", "list": "test_near.txt"}
        content["ids"]["toy"]["sets"][0:0] = [
            {**leaky, "overlaps": ["near"]},
            {"name": "gone", "role": "reference", "list": "gone.npy", "count": 3},
        ]
        (root / "toy.yml").write_text(yaml.safe_dump(content))

        assert load(root).reference_name == "others"
        assert "holds classes of near" not in caplog.text
        assert load(root, reference="leaky").reference_name == "leaky"
        assert "holds classes of near" in caplog.text
        with pytest.raises(UserError, match=r"gone: absent, 0 of 3 images, .*gone\.npy"):
            load(root, reference="gone")

        (root / LISTS / "train_others.txt").unlink()
        with pytest.raises(UserError, match="--reference leaky is there, but shares classes"):
            load(root)

        # One with a companion costs no row, so it may be the default and needs no warning.
        caplog.clear()
        sets = content["ids"]["toy"]["sets"]
        sets[0]["overlaps"] = {"near": "held"}
        sets.append({"name": "held", "role": "near", "list": "test_far.txt"})
        (root / "toy.yml").write_text(yaml.safe_dump(content))
        data = load(root)
        assert (data.reference_name, list(data.near)) == ("leaky", ["near", "held"])
        assert "holds classes of near" not in caplog.text


def test_the_first_benchmark_that_is_whole_is_chosen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = yaml.safe_load((root / "toy.yml").read_text())
    content["ids"]["toy"]["sets"].append({"name": "gone", "role": "far", "list": "gone.txt"})
    (root / "larger.yml").write_text(yaml.safe_dump(content))
    monkeypatch.setitem(BENCHMARKS, "toy", (str(root / "larger.yml"), str(root / "toy.yml")))

    manifest, reason = choose_benchmark("toy", root)
    assert manifest.name == "toy"
    assert reason.startswith(
        f"benchmark toy: whole in {root}, unlike larger, which lacks far gone: "
    )
    with pytest.raises(UserError) as error:
        choose_benchmark("toy", root, reference="nothing")
    assert (
        len(re.findall(r"larger|toy, which lacks .*no reference 'nothing'", str(error.value))) > 1
    )
    (root / LISTS / "gone.txt").write_text((root / LISTS / "test_far.txt").read_text())
    assert choose_benchmark("toy", root) == (
        load_manifest(root / "larger.yml", "toy"),
        f"benchmark larger: whole in {root}",
    )
    with pytest.raises(UserError, match=r"benchmark: got none, .* ID 'mine'"):
        choose_benchmark("mine", root)


def test_synthetic_sets_are_made_from_test_images_and_are_not_those_of_validation(
    root: Path,
) -> None:
    kinds = ("noise", "patch_shuffled")
    content = yaml.safe_load((root / "toy.yml").read_text())
    content["ids"]["toy"]["sets"] += [
        {"name": f"my {k}", "role": "far", "synthetic": k, "count": 5} for k in kinds
    ]
    (root / "toy.yml").write_text(yaml.safe_dump(content))
    data, again = load(root), load(root, training=False)
    of_validation = synthetic_ood(data.id_val.images, 5)
    tests = {tuple(np.sort(image, None)) for image in data.id_test.images}
    for kind in kinds:
        made = data.far[f"my {kind}"].images
        np.testing.assert_array_equal(made, again.far[f"my {kind}"].images)
        assert made.shape == (5, 32, 32, 3)
        assert not (made == of_validation[kind]).all((1, 2, 3)).any()
    # Shuffled patches keep the pixels of an image.
    assert {tuple(np.sort(image, None)) for image in made} <= tests
    assert list(data.far)[-2:] == ["my noise", "my patch_shuffled"]


SHARED = [
    ("others/n03/images", "far/far", "reference others and far far share images: 2 of the 5"),
    ("toy/id_train/bird", "near/near", "id_train toy and near near share images: 2 of the 5"),
    ("toy/id_train/bird", "toy/id_test/bird", "id_train toy and id_test toy share images: 2 of"),
    ("toy/id_train/bird", "others/n05/images", "id_train toy and reference others share images"),
    ("near/near", "far/far", None),
]


@pytest.mark.parametrize(("source", "target", "message"), SHARED)
def test_sets_that_share_images_are_warned_of_with_the_count(
    root: Path, caplog: pytest.LogCaptureFixture, source: str, target: str, message: str | None
) -> None:
    r"""By their content: copies under another name are found too. OOD sets may share images."""
    for i in range(2):
        copy = (root / IMAGES / source / f"{i}.png").read_bytes()
        (root / IMAGES / target / f"{1 - i}.png").write_bytes(copy)
    with caplog.at_level(logging.WARNING):
        load(root)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == (0 if message is None else 1)
    assert all(message in line for line in lines)


def test_repeated_entries_are_warned_of_with_their_count(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = root / LISTS / "train_toy.txt"
    path.write_text(path.read_text() + "".join(path.read_text().splitlines(keepends=True)[:6]))
    edit(root, "train_toy.txt", count=15)
    with caplog.at_level(logging.WARNING):
        assert len(load(root).id_train) == 15
    assert "train_toy.txt: 3 of its entries repeat others" in caplog.text


@pytest.mark.parametrize("folder", ["toy/id_train/bird", "others/n05/images"])
def test_copies_among_what_trains_are_warned_of_by_their_content(
    root: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    first, second = ((root / IMAGES / folder / f"{i}.png") for i in range(2))
    second.write_bytes(first.read_bytes())
    with caplog.at_level(logging.WARNING):
        load(root)
    (line,) = (r.getMessage() for r in caplog.records)
    assert "1 of its entries repeat others" in line


def test_what_is_lacking_for_one_benchmark_may_suffice_for_another(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "benchmark_names", lambda _: [root / "toy.yml"])
    assert runnable("toy", root) == ["toy"]
    other = root / "other.yml"
    other.write_text((root / "toy.yml").read_text().replace("train_toy", "train_other"))
    with pytest.raises(UserError, match="What is there suffices for --benchmark toy"):
        load_benchmark(load_manifest(other, "toy"), root)
    edit(root, "train_toy.txt", count=7)
    assert not runnable("toy", root)


def make_set(names: list[str]) -> ImageSet:
    images = np.arange(len(names) * 12).astype(np.uint8).reshape(-1, 2, 2, 3)
    return ImageSet(images, np.full(len(names), -1), names)


CLASSES = make_set([f"tin/train/n{i % 25:02d}/images/{i}.JPEG" for i in range(200)])
FEW = CLASSES.subset(np.arange(200) % 25 < 19)
PLAIN = make_set([f"random.npy[{i}]" for i in range(200)])


class TestImageSet:
    @pytest.mark.parametrize(
        ("name", "group"),
        [
            ("tin/train/n01/x.JPEG", "n01"),
            ("tin/train/n01/images/x.JPEG", "n01"),
            ("tin/val/images/x.JPEG", "tin"),
            ("air plane/x y.png", "air plane"),
            ("x.png", ""),
            ("random.npy[3]", ""),
        ],
    )
    def test_class_is_the_folder(self, name: str, group: str) -> None:
        assert make_set([name]).groups == [group]

    def test_shapes_are_checked(self) -> None:
        images, labels = np.zeros((3, 2, 2, 3), np.uint8), np.zeros(3, np.int64)
        for bad in (images[..., 0], images.astype(float), images[..., :1], images[:2]):
            with pytest.raises(ValueError, match="expected uint8"):
                ImageSet(bad, labels, ["", "", ""])
        with pytest.raises(ValueError, match="2 names, expected"):
            ImageSet(images, labels, ["", ""])

    @pytest.mark.parametrize("as_mask", [False, True])
    def test_subset_keeps_images_labels_and_names_together(self, as_mask: bool) -> None:
        indices = np.array([2, 5, 7])
        picked = CLASSES.subset(np.isin(np.arange(200), indices) if as_mask else indices)
        assert picked.names == [CLASSES.names[i] for i in indices]
        np.testing.assert_array_equal(picked.images, CLASSES.images[indices])
        assert len(picked) == len(picked.labels) == 3
        assert len(CLASSES.subset([])) == 0


class TestHeldOutReference:
    @pytest.mark.parametrize(
        ("reference", "classes", "held"),
        [(CLASSES, 10, 10), (CLASSES, ["n03", "n07"], 2), (PLAIN, 10, 0), (FEW, 10, 0)],
    )
    def test_parts_share_no_class_or_are_a_tenth(
        self, reference: ImageSet, classes: int | list[str], held: int
    ) -> None:
        train, validation = hold_out_reference(reference, classes)
        assert sorted(train.names + validation.names) == sorted(reference.names)
        if held:
            assert len(set(validation.groups)) == held
            assert not set(train.groups) & set(validation.groups)
        else:
            assert len(validation) == round(0.1 * len(reference))
        if isinstance(classes, list):
            assert set(validation.groups) == set(classes)

    def test_the_split_depends_on_the_seed_only(self) -> None:
        for reference in (PLAIN, CLASSES):
            names = [hold_out_reference(reference, seed=s)[1].names for s in (0, 0, 1)]
            assert names[0] == names[1] != names[2]

    @pytest.mark.parametrize(
        ("reference", "classes"),
        [
            (PLAIN.subset([0]), 10),
            (PLAIN.subset([]), 10),
            (CLASSES, sorted(set(CLASSES.groups))),
            (CLASSES, ["n03", "n99"]),
        ],
    )
    def test_impossible_splits_are_refused(
        self, reference: ImageSet, classes: int | list[str]
    ) -> None:
        message = rf"reference: {len(reference)} images .*cannot be split"
        with pytest.raises(UserError, match=message):
            hold_out_reference(reference, classes)


@pytest.mark.slow
@pytest.mark.skipif("OOD_OSDRE_DATA" not in os.environ, reason="needs the unpacked data pack")
def test_pack_is_as_it_should_be(tmp_path: Path) -> None:
    data = load_benchmark(
        load_manifest("pack", "cifar10"), os.environ["OOD_OSDRE_DATA"], cache_dir=tmp_path
    )
    sizes = {s: len(getattr(data, s)) for s in ("id_train", "id_val", "id_test", "reference")}
    assert sizes == {"id_train": 50000, "id_val": 1000, "id_test": 9000, "reference": 50000}
    assert {k: len(v) for k, v in data.near.items()} == {"tin": 3650}
    assert {k: len(v) for k, v in data.far.items()} == {"mnist": 10000, "fashion_mnist": 10000}
    assert len(set(data.reference.groups)) == 100
    assert data.ood_val is not None
    assert len(set(data.ood_val.groups)) == 73
    assert not set(data.ood_val.groups) & set(data.reference.groups)
    pixels = data.id_train.images[::10] / 255
    np.testing.assert_allclose(pixels.mean((0, 1, 2)), data.manifest.mean, atol=0.01)
    np.testing.assert_allclose(pixels.std((0, 1, 2)), data.manifest.std, atol=0.01)
