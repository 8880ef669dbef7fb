r"""Tests for the ood_osdre.data.benchmark module."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from image_roots import SETS, make_root, write_image
from PIL import Image

from ood_osdre.data import BenchmarkData, ImageSet, load_benchmark, load_manifest, status
from ood_osdre.data import benchmark as module
from ood_osdre.data.images import decode
from ood_osdre.data.manifests import benchmark_names
from ood_osdre.data.status import runnable
from ood_osdre.errors import UserError

LISTS = Path("benchmark_imglist/toy")
IMAGES = Path("images_classic")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_root(tmp_path)
    return tmp_path


def load(root: Path, **kwargs) -> BenchmarkData:
    return load_benchmark(load_manifest(root / "toy.yml", "toy"), root, **kwargs)


def edit(root: Path, name: str, **changes: object) -> None:
    r"""Changes entries of one list in the manifest."""
    content = yaml.safe_load((root / "toy.yml").read_text())
    for entry in content["ids"]["toy"]["sets"]:
        if entry["list"] == name:
            entry.update(changes)
    (root / "toy.yml").write_text(yaml.safe_dump(content))


def test_everything_present_is_loaded(root: Path) -> None:
    data = load(root)

    assert [len(s) for s in (data.id_train, data.id_val, data.id_test)] == [12, 4, 8]
    assert len(data.reference) == 48
    assert {k: len(v) for k, v in data.near.items()} == {"near": 5}
    assert {k: len(v) for k, v in data.far.items()} == {"far": 5, "far away": 5}
    assert data.ood_val is not None
    assert len(data.ood_val) == 3
    assert not data.absent
    assert set(data.checksums) == {f"{role}/{name}" for role, name, *_ in SETS}


def test_images_labels_and_names_match_the_files(root: Path) -> None:
    data = load(root)

    for images in (data.id_train, data.id_test, data.reference, data.far["far away"]):
        for pixels, name in zip(images.images, images.names, strict=True):
            np.testing.assert_array_equal(pixels, decode(root / IMAGES / name, 32))
    assert [g == "bird" for g in data.id_test.groups] == (data.id_test.labels == 1).tolist()
    assert (data.reference.labels == -1).all()
    assert data.reference_name == "others"


def test_second_load_decodes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(root)
    monkeypatch.setattr(module, "decode_all", lambda *args: pytest.fail("decoded again"))
    second = load(root)

    np.testing.assert_array_equal(first.id_train.images, second.id_train.images)
    assert first.checksums == second.checksums


@pytest.mark.parametrize("same_size", [False, True])
def test_changed_image_is_decoded_again(root: Path, same_size: bool) -> None:
    before = load(root)
    path = root / IMAGES / before.id_test.names[0]
    stat = path.stat()
    write_image(path, seed=10**6, size=(32, 32) if same_size else (40, 40))
    if same_size:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    after = load(root)

    assert not np.array_equal(before.id_test.images[0], after.id_test.images[0])
    np.testing.assert_array_equal(after.id_test.images[0], decode(path, 32))


def test_cache_folder_can_be_chosen(root: Path, tmp_path: Path) -> None:
    load(root, cache_dir=tmp_path / "elsewhere")

    assert len(list((tmp_path / "elsewhere").iterdir())) == len(SETS)
    assert not (root / module.CACHE).exists()


def test_absent_and_partial_sets_are_named_not_loaded(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / LISTS / "test_far.txt").unlink()
    (root / IMAGES / "far away" / "far" / "3.png").unlink()
    with caplog.at_level(logging.WARNING):
        data = load(root)

    assert data.absent == ["far", "far away"]
    assert not data.far
    assert "absent" in data.missing["far"]
    assert "partial, 4 of 5 images" in data.missing["far away"]
    assert "far away/far/3.png" in data.missing["far away"]
    assert data.absent_by_role() == {"near": [], "far": ["far", "far away"]}
    assert "far away" in caplog.text


def test_missing_files_are_reported_at_once_first_ten_shown(root: Path) -> None:
    for path in (root / IMAGES / "toy" / "id_train").rglob("*.png"):
        if path.stem != "0":
            path.unlink()
    for i in range(3):
        write_image(root / IMAGES / "toy" / "id_train" / "air plane" / f"{i}.png", i)

    with pytest.raises(UserError) as error:
        load(root)
    message = str(error.value)
    assert "id_train toy: partial, 4 of 12 images" in message
    assert "8 files: " in message

    (root / LISTS / "train_toy.txt").write_text("".join(f"nothing/{i}.png 0\n" for i in range(40)))
    write_image(root / IMAGES / "nothing" / "0.png", 0)
    with pytest.raises(UserError, match=r"39 files: nothing/1\.png.* and 29 more"):
        load(root)


@pytest.mark.parametrize(
    "name", ["train_toy.txt", "val_toy.txt", "test_toy.txt", "train_others.txt"]
)
def test_required_set_absent_is_explained(root: Path, name: str) -> None:
    (root / LISTS / name).unlink()

    with pytest.raises(UserError) as error:
        load(root)
    message = str(error.value)
    assert str(root / LISTS / name) in message
    assert "Ask around." in message
    assert "--id digits needs none" in message
    assert len(message.splitlines()) <= 6


def test_nothing_at_all_is_explained_in_a_few_lines(tmp_path: Path) -> None:
    for name, id_name in (("openood", "cifar10"), ("paper", "cifar100"), ("pack", "cifar10")):
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


def test_id_images_need_labels(root: Path) -> None:
    path = root / LISTS / "test_toy.txt"
    path.write_text(path.read_text().replace(".png 1", ".png -1"))
    with pytest.raises(UserError, match=r"ID images need labels >= 0"):
        load(root)


def test_damaged_image_is_named(root: Path) -> None:
    path = root / IMAGES / "far" / "far" / "2.png"
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(UserError, match=r"far far: cannot decode 1 file: .*far/far/2\.png"):
        load(root)
    path.write_bytes(b"")
    assert "empty in" in load(root).missing["far"]


def reference_of(data: BenchmarkData) -> tuple[str, ImageSet]:
    return data.reference_name, data.reference


def test_reference_may_be_a_folder(root: Path, tmp_path: Path) -> None:
    for i in range(3):
        write_image(tmp_path / "my images" / f"class {i}" / "x.png", i, (50, 40))
    name, reference = reference_of(load(root, reference=tmp_path / "my images"))

    assert name == "my images"
    assert reference.groups == ["class 0", "class 1", "class 2"]
    assert reference.images.shape == (3, 32, 32, 3)


@pytest.mark.parametrize("beside", [False, True])
def test_reference_may_be_a_list(root: Path, tmp_path: Path, beside: bool) -> None:
    folder = tmp_path / "apart" if beside else root / IMAGES
    write_image(folder / "ours" / "a b.png", 1)
    path = tmp_path / "apart" / "ours.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("ours/a b.png -1\n")
    name, reference = reference_of(load(root, reference=str(path)))

    assert (name, reference.names) == ("ours", ["ours/a b.png"])


@pytest.mark.parametrize("shape", [(7, 32, 32, 3), (7, 28, 28), (7, 28, 28, 1), (7, 64, 48, 3)])
def test_reference_may_be_an_array(root: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "noise.npy"
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(path, array)
    name, reference = reference_of(load(root, reference=path))

    assert name == "noise"
    assert reference.images.shape == (7, 32, 32, 3)
    assert reference.names[3] == "noise.npy[3]"
    if shape == (7, 32, 32, 3):
        np.testing.assert_array_equal(reference.images, array)


@pytest.mark.parametrize("content", ["floats", "flat", "text", "objects", "cut"])
def test_other_arrays_are_refused(root: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "noise.npy"
    match content:
        case "floats":
            np.save(path, np.zeros((2, 32, 32, 3)))
        case "flat":
            np.save(path, np.zeros((2, 3072), np.uint8))
        case "text":
            path.write_text("no array")
        case "objects":
            np.save(path, np.array([None]), allow_pickle=True)
        case "cut":
            np.save(path, np.zeros((2, 32, 32, 3), np.uint8))
            path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(UserError, match=r"reference noise: corrupt.*noise\.npy"):
        load(root, reference=path)


def test_unknown_reference_suggests_the_nearest(root: Path) -> None:
    with pytest.raises(UserError, match=r"no reference 'other' .did you mean 'others'"):
        load(root, reference="other")


def test_first_present_reference_without_overlap_is_taken(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = yaml.safe_load((root / "toy.yml").read_text())
    sets = content["ids"]["toy"]["sets"]
    overlapping = {
        "name": "leaky",
        "role": "reference",
        "list": "test_near.txt",
        "overlaps": ["near"],
    }
    missing = {"name": "gone", "role": "reference", "list": "gone.npy", "count": 3}
    sets[0:0] = [overlapping, missing]
    (root / "toy.yml").write_text(yaml.safe_dump(content))

    assert load(root).reference_name == "others"
    assert "contains classes of near" not in caplog.text
    assert load(root, reference="leaky").reference_name == "leaky"
    assert "contains classes of near" in caplog.text
    with pytest.raises(UserError, match=r"gone: absent, 0 of 3 images, .*gone\.npy"):
        load(root, reference="gone")

    (root / LISTS / "train_others.txt").unlink()
    with pytest.raises(
        UserError, match="--reference leaky is there, but shares classes with near"
    ):
        load(root)


def test_split_holds_out_ten_classes(root: Path) -> None:
    train, validation = load(root).split_reference(seed=1)
    assert (len(set(train.groups)), len(set(validation.groups))) == (14, 10)


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


def test_the_known_benchmarks_are_those_with_id_sets() -> None:
    assert benchmark_names() == ["digits", "openood", "pack", "paper"]
    assert benchmark_names("digits") == ["digits"]
    assert "pack" in benchmark_names("cifar10")


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


def as_bitmaps(root: Path, stamp: int = 1_600_000_000) -> None:
    r"""Turns images into files of equal sizes and times, whatever they show."""
    for path in (root / IMAGES).rglob("*.png"):
        with Image.open(path) as image:
            pixels = np.asarray(image)
        Image.fromarray(pixels).save(path, format="BMP")
        os.utime(path, (stamp, stamp))


@pytest.mark.parametrize("fallback", [False, True])
def test_roots_with_the_same_lists_share_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "file").write_text("no folder")
    cache = tmp_path / ("file" if fallback else "cache")
    roots = tmp_path / "r1", tmp_path / "r2"
    for root in roots:
        make_root(root)
    for path in (roots[1] / IMAGES).rglob("*.png"):
        write_image(path, seed=10**7)
    for root in roots:
        as_bitmaps(root)

    ours = [load(root, cache_dir=cache, progress=False).id_test for root in roots]
    assert ours[0].names == ours[1].names
    for root, images in zip(roots, ours, strict=True):
        expected = decode(root / IMAGES / images.names[0], 32)
        np.testing.assert_array_equal(images.images[0], expected)


def test_a_root_under_another_name_keeps_its_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(root, cache_dir=tmp_path / "cache", progress=False)
    (tmp_path / "alias").symlink_to(root)
    monkeypatch.setattr(module, "decode_all", lambda *args: pytest.fail("decoded again"))
    load(tmp_path / "alias", cache_dir=tmp_path / "cache", progress=False)


@pytest.mark.parametrize("shape", [(40, 0, 32, 3), (40, 32, 0), (3, 32, 32), (32, 32, 3)])
def test_arrays_that_are_no_batch_of_images_are_refused(
    root: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    np.save(tmp_path / "noise.npy", np.zeros(shape, np.uint8))
    with pytest.raises(UserError, match=r"reference noise: corrupt.*expected uint8"):
        load(root, reference=tmp_path / "noise.npy")


def test_irregular_files_and_endless_names_are_named(root: Path) -> None:
    path = root / IMAGES / "far" / "far" / "2.png"
    path.unlink()
    os.mkfifo(path)
    assert "no regular files: 1 file: far/far/2.png" in load(root, progress=False).missing["far"]
    with pytest.raises(UserError, match="no reference 'xxx"):
        load(root, reference="x" * 5000)
