r"""What may be wrong with images, lists and whole sets: each ends in one line, or in a warning."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from image_roots import as_cifar, make_root, write_image
from PIL import Image

from ood_osdre.cli import FAILED, main
from ood_osdre.data import BenchmarkData, load_benchmark, load_manifest
from ood_osdre.data import images as images_module
from ood_osdre.data.images import cached_array, decode
from ood_osdre.data.inputs import read
from ood_osdre.data.sets import count_shared, fingerprints
from ood_osdre.errors import UserError

LISTS, IMAGES = Path("benchmark_imglist/toy"), Path("images_classic")
RAMP = np.linspace(0, 255, 32).round().astype(np.uint8)[None].repeat(32, 0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    torch.set_default_dtype(torch.float32)
    make_root(tmp_path / "data")
    return tmp_path / "data"


def load(root: Path, **options: bool) -> BenchmarkData:
    return load_benchmark(load_manifest(root / "toy.yml", "toy"), root, **options)


def grey16(path: Path) -> None:
    Image.fromarray(RAMP.astype(np.uint16) * 257).save(path)


def palette(path: Path) -> None:
    colours = Image.fromarray(RAMP).convert("RGB").quantize(256)
    colours.save(path, transparency=0)


def alpha(path: Path) -> None:
    image = Image.fromarray(RAMP).convert("RGBA")
    image.putalpha(Image.fromarray(255 - RAMP))
    image.save(path)


def animated(path: Path) -> None:
    frames = [Image.fromarray(x).convert("RGB") for x in (RAMP, 255 - RAMP, 255 - RAMP)]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, **options)


def cmyk(path: Path) -> None:
    Image.fromarray(RAMP).convert("RGB").convert("CMYK").save(path, quality=100)


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "16-bit PNG": ("png", grey16),
    "16-bit TIFF": ("tiff", grey16),
    "palette with transparency": ("png", palette),
    "palette GIF": ("gif", palette),
    "alpha PNG": ("png", alpha),
    "alpha WebP": ("webp", lambda p: Image.fromarray(RAMP).convert("RGBA").save(p, lossless=True)),
    "animated GIF": ("gif", animated),
    "animated PNG": ("png", animated),
    "animated WebP": ("webp", animated),
    "multi-page TIFF": ("tiff", animated),
    "CMYK JPEG": ("jpg", cmyk),
    "CMYK TIFF": ("tiff", lambda p: Image.fromarray(RAMP).convert("CMYK").save(p)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_decode_to_the_picture_they_show(tmp_path: Path, kind: str) -> None:
    r"""Of an animation that is the first frame; the ramp and not its negative."""
    suffix, save = KINDS[kind]
    path = tmp_path / f"image.{suffix}"
    save(path)
    pixels = decode(path, 32)

    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels.astype(int), RAMP[..., None].repeat(3, 2), atol=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
def test_a_truncated_file_of_any_kind_is_named(tmp_path: Path, kind: str, part: float) -> None:
    suffix, save = KINDS[kind]
    path = tmp_path / f"broken.{suffix}"
    save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    Image.fromarray(RAMP).save(tmp_path / "good.png")
    message, pixels = outcome(tmp_path)

    if pixels is None:
        assert f"broken.{suffix}" in message
        assert "good.png" not in message
        assert "\n" not in message
    else:
        # Half of an animation may hold its whole first frame.
        assert "animated" in kind or "multi" in kind
        np.testing.assert_allclose(pixels[:, :, 0].astype(int), RAMP, atol=4)


def outcome(folder: Path) -> tuple[str, np.ndarray | None]:
    r"""Returns the error of reading a folder, or its first image."""
    try:
        return "", read(folder, 32, "set").values[0]
    except UserError as error:
        return str(error), None


NOT_IMAGES = {
    "text": b"no image",
    "page": b"<!DOCTYPE html><html>404</html>",
    "zeros": bytes(3000),
    "archive": b"PK\x03\x04" + bytes(100),
    "header alone": b"\x89PNG\r\n\x1a\n",
    "huge": b"P6\n100000 100000\n255\n",
}


@pytest.mark.parametrize("name", NOT_IMAGES)
def test_files_that_are_no_images_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "impostor.png").write_bytes(NOT_IMAGES[name])
    with pytest.raises(UserError, match=r"cannot decode 1 file: .*impostor\.png") as error:
        read(tmp_path, 32, "set")
    assert "\n" not in str(error.value)


def rewrite(root: Path, name: str, change: Callable[[list[str]], list[str]]) -> None:
    path = root / LISTS / name
    lines = [line for line in path.read_text().splitlines() if line]
    path.write_text("".join(f"{line}\n" for line in change(lines)))


LABELS = {
    "beyond training": ("test_toy.txt", "2", "id_test: 4 of 8 labels are beyond 1"),
    "validation beyond training": ("val_toy.txt", "7", "id_val: 2 of 4 labels are beyond 1"),
    "as many as a class head cannot have": ("train_toy.txt", "500000", "a label is 500000, of 12"),
    "negative": ("train_toy.txt", "-1", "ID images need labels >= 0"),
    "more digits than an integer has": ("train_toy.txt", "9" * 30, "expected 'path LABEL'"),
    "more digits, OOD": ("test_far.txt", "9" * 30, "expected 'path LABEL'"),
    "fraction": ("train_toy.txt", "1.5", "expected 'path LABEL'"),
    "minus two": ("train_toy.txt", "-2", "expected 'path LABEL'"),
    "word": ("train_toy.txt", "bird", "expected 'path LABEL'"),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_out_of_range_are_refused(
    root: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, label, message = LABELS[name]
    wrong = " 1" if "far" not in file else " -1"
    rewrite(
        root,
        file,
        lambda lines: [
            x.removesuffix(wrong) + f" {label}" if x.endswith(wrong) else x for x in lines
        ],
    )
    if "far" in file:
        # A damaged OOD list costs its row only.
        with caplog.at_level(logging.WARNING):
            assert "far" not in load(root).far
        assert message in caplog.text
    else:
        with pytest.raises(UserError) as error:
            load(root)
        assert message in str(error.value)


def test_repeated_entries_are_warned_of_with_their_count(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from test_data_benchmark import edit

    rewrite(root, "train_toy.txt", lambda lines: lines + lines[:3])
    edit(root, "train_toy.txt", count=15)
    with caplog.at_level(logging.WARNING):
        data = load(root)
    assert "train_toy.txt: 3 of its entries repeat others" in caplog.text
    assert len(data.id_train) == 15


SHARED = [
    ("others/n03/images", "far/far", "reference others and far far share images: 2 of the 5"),
    ("toy/id_train/bird", "near/near", "id_train toy and near near share images: 2 of the 5"),
    ("toy/id_test/bird", "far/far", "id_test toy and far far share images: 2 of the 5"),
    ("toy/id_train/bird", "toy/id_test/bird", "id_train toy and id_test toy share images: 2 of"),
    (
        "toy/id_train/bird",
        "others/n05/images",
        "id_train toy and reference others share images: 2",
    ),
]


@pytest.mark.parametrize(("source", "target", "message"), SHARED)
def test_sets_that_share_images_are_warned_of_with_the_count(
    root: Path, caplog: pytest.LogCaptureFixture, source: str, target: str, message: str
) -> None:
    r"""By their content: copies under another name are found too."""
    for i in range(2):
        copy = (root / IMAGES / source / f"{i}.png").read_bytes()
        (root / IMAGES / target / f"{1 - i}.png").write_bytes(copy)
    with caplog.at_level(logging.WARNING):
        load(root)
    (line,) = [r.getMessage() for r in caplog.records if "share images" in r.getMessage()]
    assert message in line


def test_sets_that_share_nothing_raise_no_warning(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(root)
        load(root, training=False)
    assert not caplog.records


def test_near_and_far_sets_may_share_images(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, target = root / IMAGES / "near" / "near", root / IMAGES / "far" / "far"
    (target / "0.png").write_bytes((source / "0.png").read_bytes())
    with caplog.at_level(logging.WARNING):
        load(root)
    assert not caplog.records


def test_fingerprints_are_those_of_the_content() -> None:
    rng = np.random.default_rng(0)
    items = rng.integers(0, 256, (500, 4, 4, 3), dtype=np.uint8)
    marks = fingerprints(items)
    assert len(np.unique(marks)) == 500
    assert (fingerprints(items[:, ::1][::-1]) == marks[::-1]).all()
    other = items.copy()
    other[100:, 0, 0, 0] ^= 128
    assert count_shared(fingerprints(other), marks) == 100
    assert fingerprints(items[:0]).shape == (0,)


EMPTY = ["train_toy.txt", "val_toy.txt", "test_toy.txt", "train_others.txt"]


@pytest.mark.parametrize("file", EMPTY)
@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_required_sets_are_refused(root: Path, file: str, content: str) -> None:
    (root / LISTS / file).write_text(content)
    with pytest.raises(UserError, match=file):
        load(root)


def test_an_empty_ood_set_costs_its_row(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / LISTS / "test_far.txt").write_text("")
    with caplog.at_level(logging.WARNING):
        data = load(root)
    assert data.absent == ["far"]
    assert "far far: absent, 0 of 5 images" in caplog.text


def run(root: Path, out: Path) -> int:
    options = ["network.width=0.125", "network.depths=[1,1,1,1]", "training.batch_size=4"]
    options += ["data.crop=2", "evaluation.batch_size=3", "training.warmup=1"]
    command = ["--id", "cifar10", "--config", "cifar10_cpu", "--benchmark", str(root / "toy.yml")]
    command += ["--data-root", str(root), "--out", str(out), "--max-steps", "2"]
    return main([*command, "--device", "cpu", "--quiet", *options])


ONE = {
    "id_train": "train_toy.txt",
    "id_val": "val_toy.txt",
    "id_test": "test_toy.txt",
    "near": "test_near.txt",
    "reference": "train_others.txt",
}


@pytest.mark.parametrize("role", ONE)
def test_sets_of_one_image(
    root: Path, tmp_path: Path, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    r"""They train and score, except a reference, of which a part must be held out."""
    from test_data_benchmark import edit

    rewrite(root, ONE[role], lambda lines: lines[:1])
    edit(root, ONE[role], count=1)
    if role == "id_train":  # the classes of the other ID sets are those of training
        for file in ("val_toy.txt", "test_toy.txt"):
            rewrite(root, file, lambda lines: [x.replace(" 1", " 0") for x in lines])
    as_cifar(root)
    out = tmp_path / "out"
    status = run(root, out)
    if role == "reference":
        assert status == FAILED
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "1 images with 0 classes held out cannot be split" in error
        assert not list(out.glob("*.csv"))
    else:
        assert status == 0
        assert (out / "metrics.csv").is_file()


def test_missing_files_through_the_command(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f"nothing/{i}.png 0\n" for i in range(40))
    (root / LISTS / "train_toy.txt").write_text(lines)
    write_image(root / IMAGES / "nothing" / "0.png", 0)
    as_cifar(root)
    assert run(root, tmp_path / "out") == FAILED
    error = capsys.readouterr().err
    assert "39 files: nothing/1.png" in error
    assert "nothing/10.png ... and 29 more" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_cache_of_another_version_is_left_alone_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (np.full((2, 4, 4, 3), value, np.uint8) for value in (1, 2))
    monkeypatch.setattr(images_module, "VERSION", images_module.VERSION - 1)
    cached_array(lambda: old, old.shape, [b"key"], "x", tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    monkeypatch.undo()

    for _ in range(2):
        array = cached_array(lambda: new, new.shape, [b"key"], "x", tmp_path)
        np.testing.assert_array_equal(array, new)
    assert file.read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_cache_file_cut_short_is_rebuilt(root: Path, part: float) -> None:
    expected = load(root).id_train.images.copy()
    for path in (root / ".ood_osdre_cache").iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))])
    np.testing.assert_array_equal(load(root).id_train.images, expected)


def test_a_reference_array_of_the_wrong_kind_is_one_line(tmp_path: Path) -> None:
    for name, array in {
        "floats": np.ones((3, 32, 32, 3)) * 200,
        "channels first": np.zeros((3, 3, 32, 32), np.uint8),
        "objects": np.array([[None]]),
    }.items():
        path = tmp_path / f"{name}.npy"
        np.save(path, array, allow_pickle=True)
        with pytest.raises(UserError) as error:
            read(path, 32, "reference")
        assert "\n" not in str(error.value)


def test_a_checkpoint_refuses_a_benchmark_of_another_size(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_cifar(root)
    trained, out = tmp_path / "trained", tmp_path / "out"
    assert run(root, trained) == 0
    manifest = root / "toy.yml"
    manifest.write_text("size: 48\n" + manifest.read_text())

    capsys.readouterr()
    command = ["--checkpoint", str(trained), "--benchmark", str(manifest), "--out", str(out)]
    assert main([*command, "--data-root", str(root), "--device", "cpu", "--quiet"]) == FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: benchmark toy: got uint8 with shape (")
    assert "48, 48, 3), expected uint8 with shape (N, 32, 32, 3)" in error
    assert not out.exists()


def test_quiet_decodes_without_bars(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_cifar(root)
    assert run(root, tmp_path / "out") == 0
    printed = capsys.readouterr().err
    assert "decoding" not in printed
    assert "%|" not in printed
