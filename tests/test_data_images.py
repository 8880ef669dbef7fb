r"""Tests for the ood_osdre.data.images module."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from ood_osdre.data import images
from ood_osdre.data.images import (
    cached_array,
    decode,
    decode_all,
    load,
    save,
    square,
    sweep,
)
from ood_osdre.data.inputs import read
from ood_osdre.errors import UserError

SHAPE = (5, 4, 4, 3)
PIXELS = np.arange(np.prod(SHAPE), dtype=np.uint8).reshape(SHAPE)
RAMP = np.linspace(0, 255, 32).round().astype(np.uint8)[None].repeat(32, 0)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_a_photograph_is_turned_as_its_tag_says(tmp_path: Path, kind: str) -> None:
    r"""As viewers show it; the sets of benchmarks have no such tag."""
    stored = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
    path = tmp_path / "photo.dat"
    for tag in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = tag
        options = {"lossless": True} if kind == "WEBP" else {}
        Image.fromarray(stored).save(path, kind, exif=exif, **options)
        with Image.open(path) as image:
            shown = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
            with Image.open(path) as same:
                found = [square(same, 8), square(same, 8)]  # also of one that was read before
        expected = square(Image.fromarray(shown), 8)
        assert all(np.array_equal(x, expected) for x in [*found, decode(path, 8)])


def test_a_damaged_tag_spoils_no_image(tmp_path: Path) -> None:
    stored = np.full((8, 8, 3), 9, np.uint8)
    Image.fromarray(stored).save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12")
    assert np.array_equal(decode(tmp_path / "a.png", 8), stored)


@pytest.mark.parametrize("w", [1, 20, 28, 31, 32, 33, 50, 64, 97])
@pytest.mark.parametrize("h", [28, 32, 45, 64, 231])
def test_preprocessing_is_torchvisions(w: int, h: int) -> None:
    pixels = np.random.default_rng(w * h).integers(0, 256, (h, w, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    resize = Resize(32, InterpolationMode.BILINEAR)
    expected = np.asarray(CenterCrop(32)(resize(image)))

    np.testing.assert_array_equal(square(image, 32), expected)


GREY = Image.fromarray(RAMP)
RGB = GREY.convert("RGB")
NEGATIVE = Image.fromarray(255 - RAMP)
FRAMES = {"save_all": True, "append_images": [NEGATIVE.convert("RGB")] * 2, "duration": 50}
KINDS: dict[str, tuple[str, Image.Image, dict]] = {
    "16-bit PNG": ("png", Image.fromarray(RAMP.astype(np.uint16) * 257), {}),
    "16-bit TIFF": ("tiff", Image.fromarray(RAMP.astype(np.uint16) * 257), {}),
    "32-bit integers": ("tiff", Image.fromarray(RAMP.astype(np.int32)), {}),
    "unit floats": ("tiff", Image.fromarray(RAMP.astype(np.float32) / 255), {}),
    "palette with transparency": ("png", RGB.quantize(256), {"transparency": 0}),
    "palette GIF": ("gif", RGB.quantize(256), {"transparency": 0}),
    "alpha PNG": ("png", Image.merge("RGBA", [*RGB.split(), NEGATIVE]), {}),
    "alpha WebP": ("webp", RGB.convert("RGBA"), {"lossless": True}),
    "grey and alpha PNG": ("png", GREY.convert("LA"), {}),
    "animated GIF": ("gif", RGB, FRAMES),
    "animated PNG": ("png", RGB, FRAMES),
    "animated WebP": ("webp", RGB, {**FRAMES, "lossless": True}),
    "multi-page TIFF": ("tiff", RGB, FRAMES),
    "CMYK JPEG": ("jpg", RGB.convert("CMYK"), {"quality": 100}),
    "CMYK TIFF": ("tiff", RGB.convert("CMYK"), {}),
    "YCbCr TIFF": ("tiff", RGB.convert("YCbCr"), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_files_decode_to_the_picture_they_show(tmp_path: Path, kind: str) -> None:
    r"""Of an animation that is the first frame; the ramp and not its negative."""
    suffix, image, options = KINDS[kind]
    path = tmp_path / f"image.{suffix}"
    image.save(path, **options)
    pixels = decode(path, 32)

    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels.astype(int), RAMP[..., None].repeat(3, 2), atol=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.0, 0.05, 0.5])
def test_a_truncated_file_of_any_kind_is_named(tmp_path: Path, kind: str, part: float) -> None:
    suffix, image, options = KINDS[kind]
    path = tmp_path / f"broken.{suffix}"
    image.save(path, **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    Image.fromarray(RAMP).save(tmp_path / "good.png")
    message, pixels = "", np.zeros(0)
    try:
        pixels = read(tmp_path, 32, "set").values[0]
    except UserError as error:
        message = str(error)
    if message:
        assert f"broken.{suffix}" in message
        assert "good.png" not in message
        assert "\n" not in message
    else:
        # Half of an animation may hold its whole first frame.
        assert "animated" in kind or "multi" in kind
        np.testing.assert_allclose(pixels[:, :, 0].astype(int), RAMP, atol=4)


NOT_IMAGES = {
    "empty": b"",
    "text": b"no image",
    "page": b"<!DOCTYPE html><html>404</html>",
    "zeros": bytes(3000),
    "archive": b"PK\x03\x04" + bytes(100),
    "header alone": b"\x89PNG\r\n\x1a\n",
    "huge": b"P6\n100000 100000\n255\n",
}


def test_every_file_that_is_no_image_is_named_at_once(tmp_path: Path) -> None:
    Image.fromarray(RAMP).save(tmp_path / "good.png")
    for name, content in NOT_IMAGES.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    with pytest.raises(UserError, match=rf"cannot decode {len(NOT_IMAGES)} files: ") as error:
        read(tmp_path, 32, "set")
    message = str(error.value)
    assert all(f"{name}.png" in message for name in NOT_IMAGES)
    assert "good" not in message
    assert "\n" not in message


def test_images_keep_the_order_of_their_paths(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(150)]
    for i, path in enumerate(paths):
        Image.fromarray(np.full((2, 2, 3), i, np.uint8)).save(path)

    images = decode_all(paths, 2, "toy")
    np.testing.assert_array_equal(images[:, 0, 0, 0], np.arange(150))


def test_cache_is_built_once_and_keyed(tmp_path: Path) -> None:
    calls = []

    def build() -> np.ndarray:
        calls.append(1)
        return PIXELS

    for key in (b"a", b"a", b"b", b"a"):
        np.testing.assert_array_equal(cached_array(build, SHAPE, [key], "x", tmp_path), PIXELS)

    assert len(calls) == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_writing_to_a_cached_array_leaves_the_file_alone(tmp_path: Path) -> None:
    for _ in range(2):
        array = cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
        np.testing.assert_array_equal(array, PIXELS)
        array[:] = 0


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "cut in half": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "shape": lambda _: saved(PIXELS[1:]),
    "dtype": lambda _: saved(PIXELS.astype(np.int8)),
    "text": lambda _: b"no array",
    "pickle": lambda _: saved(np.array([None])),
    "zeroed": lambda content: content[:128] + bytes(200) + content[328:],
    "one bit": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "no checksum": lambda _: saved(PIXELS),
    "longer": lambda content: content + b"x",
    "order": lambda content: content.replace(b"False", b"True "),
    "header": lambda content: content.replace(b"}", b"(", 1),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "archive", "another key"])
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if damage == "archive":
        np.savez(tmp_path / "z.npz", PIXELS)
        (tmp_path / "z.npz").replace(path)
    elif damage == "another key":
        cached_array(lambda: 255 - PIXELS, SHAPE, [b"b"], "x", tmp_path / "other")
        next((tmp_path / "other").iterdir()).replace(path)
    else:
        path.write_bytes(DAMAGES[damage](content))

    assert path.read_bytes() != content
    again = cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
    np.testing.assert_array_equal(again, PIXELS)
    assert load(path, SHAPE) is not None


def test_a_cache_of_another_version_is_left_alone_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(images, "VERSION", images.VERSION - 1)
        cached_array(lambda: 255 - PIXELS, SHAPE, [b"a"], "x", tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    for _ in range(2):
        array = cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
        np.testing.assert_array_equal(array, PIXELS)
    assert file.read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 2


def test_parts_of_a_key_are_kept_apart(tmp_path: Path) -> None:
    for key in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"]):
        cached_array(lambda: PIXELS, SHAPE, key, "x" * 300, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_sixteen_bits_held_in_32_keep_their_scale(tmp_path: Path) -> None:
    data = (RAMP.astype(np.uint16) // 2).astype(">u2").tobytes()  # dark: no pixel is above 255
    (tmp_path / "x.pgm").write_bytes(b"P5 32 32 65535\n" + data)
    assert decode(tmp_path / "x.pgm", 32).max() == 0


@pytest.mark.parametrize(
    "pixels",
    [
        *(np.float32([[0, x]]) for x in (255, np.nan, -1)),
        *(np.int32([[0, x]]) for x in (256, -1)),
    ],
)
def test_grey_on_an_unknown_scale_is_refused(tmp_path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(tmp_path / "x.tif")
    with pytest.raises(UserError, match=r"cannot decode 1 file: .*x\.tif .*expected") as error:
        decode_all([tmp_path / "x.tif"], 32, "toy", progress=False)
    assert "\n" not in str(error.value)


def test_fifos_are_refused_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(UserError, match=r"x\.png \(no regular file\)"):
        decode_all([tmp_path / "x.png"], 32, "toy", progress=False)


def test_unwritable_folder_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")

    def build() -> np.ndarray:
        return PIXELS

    cached_array(build, SHAPE, [b"a"], "x", blocked / "cache")
    assert len(list((tmp_path / "home" / "ood_osdre").iterdir())) == 1

    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    np.testing.assert_array_equal(
        cached_array(build, SHAPE, [b"b"], "x", blocked / "cache"), PIXELS
    )


def test_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match="No space"):
        save(tmp_path / "x.npy", PIXELS)
    assert not list(tmp_path.iterdir())


CHILD = """
import os, sys, time
import numpy as np
from pathlib import Path
from ood_osdre.data import images
folder, slow = Path(sys.argv[1]), sys.argv[2] == "slow"
if slow:
    def fsync(descriptor):
        (folder / "halfway").touch()
        time.sleep(60)
    os.fsync = fsync
shape = (5, 4, 4, 3)
def build():
    (folder / f"building-{os.getpid()}").touch()
    while not slow and len(list(folder.glob("building-*"))) < 2:
        time.sleep(0.01)
    return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
array = images.cached_array(build, shape, [b"a"], "x", folder / "cache")
sys.exit(0 if np.array_equal(array, build()) else 3)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_process_leaves_no_cache(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), "slow"])
    wait_for(tmp_path / "halfway")
    child.send_signal(signal.SIGKILL)
    child.wait()

    cache = tmp_path / "cache"
    assert [p.suffixes for p in cache.iterdir()] == [[".tmp", ".npy"]]
    np.testing.assert_array_equal(cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", cache), PIXELS)
    sweep(cache, age=0.0)
    assert [p.suffixes for p in cache.iterdir()] == [[".npy"]]


def test_two_processes_build_one_cache(tmp_path: Path) -> None:
    # Neither finishes building before both have begun.
    command = [sys.executable, "-c", CHILD, str(tmp_path), "fast"]
    children = [subprocess.Popen(command) for _ in range(2)]

    assert [child.wait(timeout=60) for child in children] == [0, 0]
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".npy"]
