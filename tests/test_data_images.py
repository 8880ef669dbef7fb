r"""Tests for the ood_osdre.data.images module."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from ood_osdre.data.images import (
    as_rgb,
    cached_array,
    decode,
    decode_all,
    load,
    save,
    square,
    sweep,
)
from ood_osdre.errors import UserError

SHAPE = (5, 4, 4, 3)
PIXELS = np.arange(np.prod(SHAPE), dtype=np.uint8).reshape(SHAPE)


@pytest.mark.parametrize("w", [1, 20, 28, 31, 32, 33, 50, 64, 97])
@pytest.mark.parametrize("h", [28, 32, 45, 64, 231])
def test_preprocessing_is_torchvisions(w: int, h: int) -> None:
    pixels = np.random.default_rng(w * h).integers(0, 256, (h, w, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    resize = Resize(32, InterpolationMode.BILINEAR)
    expected = np.asarray(CenterCrop(32)(resize(image)))

    np.testing.assert_array_equal(square(image, 32), expected)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    grey = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (32, 1))
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 256 + (255 - grey))
    else:
        image = Image.fromarray(grey).convert("RGB").convert(mode)
    path = tmp_path / f"a b.{'tiff' if mode in ('CMYK', 'YCbCr') else 'png'}"
    image.save(path)

    pixels = decode(path, 32)
    assert pixels.shape == (32, 32, 3)
    assert pixels.dtype == np.uint8
    if mode not in ("1", "P"):
        np.testing.assert_allclose(pixels.astype(int), grey[..., None].repeat(3, 2), atol=2)
    else:
        assert pixels[:, -1].min() > 200
        assert pixels[:, 0].max() < 50


def test_every_damaged_file_is_named_at_once(tmp_path: Path) -> None:
    good = tmp_path / "good.png"
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(good)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    for suffix in ("png", "jpg"):
        Image.fromarray(noise).save(tmp_path / f"cut.{suffix}")
        whole = (tmp_path / f"cut.{suffix}").read_bytes()
        (tmp_path / f"cut.{suffix}").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no image")

    with pytest.raises(UserError) as error:
        decode_all([good, *sorted(tmp_path.glob("[!g]*"))], 32, "toy")

    message = str(error.value)
    assert "4 files" in message
    assert "good" not in message
    assert all(n in message for n in ("cut.jpg", "cut.png", "empty.png", "text.png"))
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


DAMAGES = ["cut", "empty", "shape", "dtype", "text", "pickle"]
DAMAGES += ["zeroed", "one bit", "no checksum", "longer", "order", "archive", "header", "renamed"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case "empty":
            path.write_bytes(b"")
        case "shape":
            np.save(path, PIXELS[1:])
        case "dtype":
            np.save(path, PIXELS.astype(np.int8))
        case "text":
            path.write_text("no array")
        case "pickle":
            np.save(path, np.array([None]), allow_pickle=True)
        case "zeroed":
            path.write_bytes(content[:128] + bytes(200) + content[328:])
        case "one bit":
            path.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
        case "no checksum":
            np.save(path, PIXELS)
        case "longer":
            path.write_bytes(content + b"x")
        case "order":
            path.write_bytes(content.replace(b"False", b"True "))
        case "archive":
            np.savez(tmp_path / "z.npz", PIXELS)
            (tmp_path / "z.npz").replace(path)
        case "header":
            path.write_bytes(content.replace(b"}", b"(", 1))
        case "renamed":
            cached_array(lambda: 255 - PIXELS, SHAPE, [b"b"], "x", tmp_path / "other")
            next((tmp_path / "other").iterdir()).replace(path)

    assert path.read_bytes() != content
    again = cached_array(lambda: PIXELS, SHAPE, [b"a"], "x", tmp_path)
    np.testing.assert_array_equal(again, PIXELS)
    assert load(path, SHAPE) is not None


def test_parts_of_a_key_are_kept_apart(tmp_path: Path) -> None:
    for key in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"]):
        cached_array(lambda: PIXELS, SHAPE, key, "x" * 300, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


RAMP = np.linspace(0, 255, 32).round().astype(np.uint8)[None].repeat(32, 0)
SCALES = {
    "unit floats.tif": RAMP.astype(np.float32) / 255,
    "32-bit integers.tif": RAMP.astype(np.int32),
    "16-bit.png": RAMP.astype(np.uint16) * 257,
    "16-bit.tif": RAMP.astype(np.uint16) * 257,
}


@pytest.mark.parametrize("name", SCALES)
def test_grey_of_any_depth_keeps_its_scale(tmp_path: Path, name: str) -> None:
    Image.fromarray(SCALES[name]).save(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        np.testing.assert_array_equal(np.asarray(as_rgb(image)), RAMP[..., None].repeat(3, 2))
    np.testing.assert_array_equal(decode(tmp_path / name, 32), RAMP[..., None].repeat(3, 2))


def test_sixteen_bits_held_in_32_keep_their_scale(tmp_path: Path) -> None:
    data = (RAMP.astype(np.uint16) // 2).astype(">u2").tobytes()  # dark: no pixel is above 255
    (tmp_path / "x.pgm").write_bytes(b"P5 32 32 65535\n" + data)
    assert decode(tmp_path / "x.pgm", 32).max() == 0


@pytest.mark.parametrize(
    "pixels",
    [
        np.float32([[0, 255]]),
        np.float32([[0, np.nan]]),
        np.float32([[-1, 1]]),
        np.int32([[0, 256]]),
        np.int32([[-1, 255]]),
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
