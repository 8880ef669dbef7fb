r"""Tests for the ood_osdre.data.inputs module, and for fingerprints and statistics of what it reads."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from ood_osdre.data import ImageSet
from ood_osdre.data.image_files import fingerprints
from ood_osdre.data.inputs import read
from ood_osdre.data.sets import count_shared
from ood_osdre.data.transforms import Standardise
from ood_osdre.errors import UserError
from ood_osdre.files import map_array

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
TENSOR = torch.as_tensor(IMAGES).permute(0, 3, 1, 2)
PIXELS = TENSOR.float() / 255
GREY = IMAGES[..., 0]
VECTORS = np.random.default_rng(1).normal(size=(5, 8))

LAYOUTS: dict[str, Callable[[], object]] = {
    "array": lambda: IMAGES,
    "floats": lambda: IMAGES / 255,
    "tensor": lambda: TENSOR,
    "float tensor": lambda: PIXELS,
    "half precision": lambda: PIXELS.half(),
    "batches": lambda: iter([(TENSOR[:2], torch.zeros(2)), (TENSOR[2:], None)]),
    "mappings": lambda: iter([{"data": IMAGES[:3]}, {"image": IMAGES[3:], "label": ["a", "b"]}]),
    "tensors": lambda: list(TENSOR),
    "Pillow": lambda: [(Image.fromarray(x), 0) for x in IMAGES],
    "set": lambda: ImageSet(IMAGES, np.zeros(5, np.int64), [""] * 5),
    "Hugging Face's": lambda: [{"img": Image.fromarray(x), "label": 0} for x in IMAGES],
    "its loader's": lambda: iter([{"pixel_values": PIXELS, "labels": torch.zeros(5)}]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_images(name: str) -> None:
    np.testing.assert_array_equal(read(LAYOUTS[name](), 32, "input").values, IMAGES)


def test_what_is_clearly_grey_is_read() -> None:
    tensor = torch.as_tensor(GREY)
    for data in (GREY, tensor, tensor[:, None], GREY[..., None]):
        values = read(data, 32, "input").values
        np.testing.assert_array_equal(values, GREY[..., None].repeat(3, 3))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([3, 1, 0, 2, -1], [3, 1, 0, 2, -1]),
        (np.uint8([3, 1, 0, 2, 5]), [3, 1, 0, 2, 5]),
        (torch.arange(5), [0, 1, 2, 3, 4]),
        (list("abcde"), [-1] * 5),
        (np.arange(5)[:, None], [0, 1, 2, 3, 4]),
        (np.eye(5, dtype=int), [-1] * 5),
        (None, [-1] * 5),
    ],
)
def test_labels_are_integers_or_none(labels: object, expected: list[int]) -> None:
    of_items = [(x, None if labels is None else labels[i]) for i, x in enumerate(IMAGES)]
    for data in (of_items, iter([(IMAGES, labels)])):
        found = read(data, 32, "input")
        assert found.labels.tolist() == expected
        assert bool(found.unlabelled) == (max(expected) < 0)


@pytest.mark.parametrize("label", [-4, 2**64 - 1, "a", None, torch.eye(3).to_sparse(), [[1], 2]])
def test_labels_are_not_looked_at_where_none_are_wanted(label: object) -> None:
    for data in ([(x, label) for x in IMAGES], iter([(IMAGES, label)])):
        found = read(data, 32, "input", labelled=False)
        assert found.labels.tolist() == [-1] * 5


ONES: dict[str, Callable[[Path], object]] = {
    "array": lambda path: IMAGES[0],
    "tensor": lambda path: TENSOR[0],
    "Pillow": lambda path: Image.fromarray(IMAGES[0]),
    "path": lambda path: path,
    "text": str,
    "paths": lambda path: [path, str(path)],
    "data set": lambda path: [(path, 3), (IMAGES[0], 3)],
    "home": lambda path: f"~/{path.name}",
    "without suffix": lambda path: path.rename(path.with_suffix("")),
}


@pytest.mark.parametrize("kind", ONES)
def test_one_image_is_a_batch_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "photo.png"
    Image.fromarray(IMAGES[0]).save(path)
    found = read(ONES[kind](path), 32, "input")
    assert all(np.array_equal(x, IMAGES[0]) for x in found.values)
    assert len(found.values) == (2 if kind in ("paths", "data set") else 1)
    assert kind != "paths" or found.names == [str(path)] * 2


def test_the_keys_of_other_mappings_are_named() -> None:
    for data in ([{"photo": IMAGES[0], 7: 0}], iter([{"photo": IMAGES, 7: 0}])):
        with pytest.raises(
            UserError, match=r"^input.*: got a mapping with the keys photo, 7, exp"
        ):
            read(data, 32, "input")


def test_names_are_numbers_or_paths(tmp_path: Path) -> None:
    for i, x in enumerate(IMAGES):
        (tmp_path / f"class {i % 2}").mkdir(exist_ok=True)
        Image.fromarray(x).save(tmp_path / f"class {i % 2}" / f"{i}.png")
    found = read(tmp_path, 32, "input")
    assert found.names == [f"class {i % 2}/{i}.png" for i in (0, 2, 4, 1, 3)]
    assert found.labels.tolist() == [0, 0, 0, 1, 1]
    assert read(iter([TENSOR[:2], TENSOR[2:]]), 32, "input").names == list("01234")


class Short:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> np.ndarray:
        return VECTORS[:3][index]


ONE = "one image or several grey ones, expected a batch"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "array of one, channels first": (lambda: IMAGES[0].transpose(2, 0, 1), ONE),
    "tensors, one by one": (lambda: iter(TENSOR), ONE),
    "tensors with labels": (lambda: ((x, 0) for x in TENSOR), ONE),
    "another size": (lambda: IMAGES[:, :28], "28 x 32 pixels, expected 32 x 32"),
    "channels": (lambda: IMAGES[..., :2], r"shape \(5, 32, 32, 2\), expected images"),
    "normalised": (lambda: PIXELS * 2 - 1, r"pixels from .* expected floats in \[0, 1\]"),
    "integers": (lambda: IMAGES.astype(int), "images of int64, expected uint8"),
    "NaN": (lambda: PIXELS * torch.nan, "pixels from nan"),
    "NaN vectors": (lambda: [VECTORS[0] * np.nan], r"input\[0\]: 1 of 1 vectors hold NaN"),
    "too large": (lambda: VECTORS * 1e300, "5 of 5 vectors hold NaN or infinity"),
    "no coordinates": (lambda: VECTORS[:, :0], r"got vectors .*\(5, 0\), expected real numbers"),
    "no coordinates, tensor": (lambda: torch.zeros(3, 0), r"\(3, 0\), expected real numbers"),
    "complex": (lambda: VECTORS * 1j, "vectors of complex128"),
    "series": (lambda: pd.Series(list(VECTORS), range(5, 10)), "got Series, expected an array"),
    "table": (lambda: pd.DataFrame(VECTORS), "got DataFrame, expected an array"),
    "masked": (lambda: np.ma.masked_array(IMAGES, IMAGES > 5), "got MaskedArray, expected"),
    "large label": (lambda: [(IMAGES[0], 2**64 - 1)], "1 items but labels .*18446744073709551615"),
    "small label": (lambda: [(IMAGES[0], -2)], "labels .*from -2 to -2, expected"),
    "labels": (lambda: iter([(IMAGES, [1, 2])]), r"5 items but labels of shape \(2,\)"),
    "float image": (lambda: [Image.fromarray(np.float32([[0, 255]]))], "pixels from 0 to 255"),
    "empty image": (lambda: [Image.new("RGB", (0, 3))], "an image of 0 x 3 pixels"),
    "shapes": (lambda: [VECTORS[0], VECTORS[0, :3]], "different shapes"),
    "shapes of batches": (lambda: iter([VECTORS, IMAGES]), "different shapes"),
    "empty": (list, "input: empty"),
    "short": (Short, "has no item 3 of its 5"),
    "strings": (lambda: ["a"], r"input: cannot decode 1 file: a \(no regular file\)"),
    "numbers": (lambda: [3], r"input\[0\]: got int, expected an image"),
    "number": (lambda: 3, "got int, expected an array"),
    "device": (lambda: "/dev/null", "no such folder, list file, .npy array or image"),
    "long": (lambda: "x" * 5000, "no such folder, list file, .npy array or image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_data_end_in_one_line(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        read(data(), 32, "input")
    assert str(error.value).startswith("input")
    assert "\n" not in str(error.value)


KINDS = {
    "bfloat16": PIXELS.bfloat16(),
    "sparse_coo": PIXELS.to_sparse(),
    "meta": TENSOR.to("meta"),
    "float8": PIXELS.to(torch.float8_e4m3fn),
    "bfloat16 ": torch.as_tensor(VECTORS).bfloat16(),
}


@pytest.mark.parametrize("name", KINDS)
def test_tensors_that_numpy_has_not_are_refused(name: str) -> None:
    for data in (KINDS[name], [KINDS[name]], iter([KINDS[name]])):
        with pytest.raises(UserError, match=rf"got a (\w+ tensor of .*)?{name.strip()}"):
            read(data, 32, "input")


def test_lists_that_name_a_fifo_do_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.png")
    (tmp_path / "list.txt").write_text("p.png -1\n")
    with pytest.raises(UserError, match=r"p\.png \(no regular file\)"):
        read(tmp_path / "list.txt", 32, "input")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "pickle": lambda _: pickle.dumps([1]),
    "brackets": lambda content: content.replace(b"}", b"(", 1),
    "size": lambda content: content.replace(b"(5, 32", b"(2e, 3"),
    "number": lambda content: content.replace(b"(5, 32", b"(5**99"),
    "objects": lambda content: content.replace(b"|u1", b"|O8"),
    "cut": lambda content: content[:-1],
}


@pytest.mark.parametrize("kind", [*DAMAGES, "archive", "fifo"])
def test_damaged_arrays_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npy"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "archive":
        np.savez(tmp_path / "x.npz", IMAGES)
        (tmp_path / "x.npz").replace(path)
    else:
        np.save(path, IMAGES)
        path.write_bytes(DAMAGES[kind](path.read_bytes()))
    for reader in (map_array, lambda p: read(p, 32, "input")):
        with pytest.raises(UserError, match=r"x\.npy: (not a whole \.npy array|no such file)"):
            reader(path)


def test_large_offsets_leave_the_vectors_apart() -> None:
    r"""Centred in double precision, a shift of all vectors changes nothing."""
    shift, x = 1.6e9, np.round(VECTORS * 2**20) / 2**20  # what is left of them is exact
    values = read(x + shift, 32, "input").values
    standardise = Standardise(values.mean(0).tolist(), values.std(0).tolist())
    expected = torch.as_tensor((x - x.mean(0)) / x.std(0))
    for same in (standardise, standardise.on("cpu")):
        inputs = same(torch.as_tensor(values))
        assert inputs.dtype == torch.float32
        torch.testing.assert_close(inputs.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("f2", "f4"), ("f4", "f4"), (">f4", "f4"), ("f8", "f8"), (">f8", "f8"), ("i8", "f8")],
)
def test_vectors_keep_their_precision(kind: str, expected: str) -> None:
    values = read(VECTORS.astype(kind), 32, "input").values
    assert values.dtype == np.dtype(expected)
    np.testing.assert_array_equal(values, VECTORS.astype(kind))


def test_fingerprints_are_those_of_the_content() -> None:
    items = np.random.default_rng(0).integers(0, 256, (500, 4, 4, 3), dtype=np.uint8)
    marks = fingerprints(items)
    assert len(np.unique(marks)) == 500
    assert (fingerprints(items[:, ::1][::-1]) == marks[::-1]).all()
    other = items.copy()
    other[100:, 0, 0, 0] ^= 128
    assert count_shared(fingerprints(other), marks) == 100
    assert fingerprints(items[:0]).shape == (0,)


def test_equal_vectors_have_equal_fingerprints_in_any_precision() -> None:
    single = VECTORS.astype(np.float32)
    assert count_shared(fingerprints(single), fingerprints(single.astype(np.float64))) == 5
    assert count_shared(fingerprints(VECTORS), fingerprints(VECTORS + 1e-12)) == 0
    assert len(np.unique(fingerprints(VECTORS + 1.6e9))) == 5
