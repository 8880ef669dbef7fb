r"""Tests for the ood_osdre.data.inputs, sources, values, vectors and fingerprints modules."""

import os
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from ood_osdre.data.inputs import read
from ood_osdre.data.sets import count_shared, fingerprints
from ood_osdre.data.standardise import Standardise
from ood_osdre.errors import UserError
from ood_osdre.files import map_array

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
TENSOR = torch.as_tensor(IMAGES).permute(0, 3, 1, 2)
PIXELS = TENSOR.float() / 255
VECTORS = np.random.default_rng(1).normal(size=(5, 8))

ONE = {
    "tensor": lambda: TENSOR[0],
    "array": lambda: IMAGES[0],
    "array, channels first": lambda: IMAGES[0].transpose(2, 0, 1),
    "tensors, one by one": lambda: (x for x in TENSOR),
    "tensors with labels": lambda: ((x, 0) for x in TENSOR),
}


@pytest.mark.parametrize("name", ONE)
def test_one_image_is_not_taken_for_grey_ones(name: str) -> None:
    with pytest.raises(
        UserError, match=r"one image or several grey ones; expected a batch, \(1, "
    ):
        read(ONE[name](), 32, "input")


def test_what_is_clearly_grey_or_an_item_is_read() -> None:
    grey = IMAGES[..., 0]
    for data in (
        grey,
        torch.as_tensor(grey),
        torch.as_tensor(grey[:3, None]),
        grey[:3, ..., None],
    ):
        np.testing.assert_array_equal(
            read(data, 32, "input").values[:, :, :, 1], grey[: len(data)]
        )
    np.testing.assert_array_equal(read(list(TENSOR), 32, "input").values, IMAGES)


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


OTHERS = {
    "series": (pd.Series(list(VECTORS), index=range(5, 10)), "got Series, expected an array"),
    "table": (pd.DataFrame(VECTORS), "got DataFrame, expected an array"),
    "no coordinates": (VECTORS[:, :0], r"got shape \(5, 0\), expected vectors of at least 1"),
    "no coordinates, tensor": (torch.zeros(3, 0), r"got shape \(3, 0\), expected vectors"),
    "masked": (np.ma.masked_array(IMAGES, IMAGES > 5), "got a masked array"),
    "label": ([(IMAGES[0], 2**64 - 1)], "a label is 18446744073709551615"),
    "float image": ([Image.fromarray(np.float32([[0, 255]]))], "pixels from 0 to 255"),
    "empty image": ([Image.new("RGB", (0, 3))], "an image of 0 x 3 pixels"),
    "device": ("/dev/null", "no such folder, list file or"),
    "long": ("x" * 5000, "no such folder, list file or"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_end_in_one_line(name: str) -> None:
    data, message = OTHERS[name]
    with pytest.raises(UserError, match=message) as error:
        read(data, 32, "input")
    assert "\n" not in str(error.value)


class Short:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> np.ndarray:
        return VECTORS[:3][index]


def test_a_data_set_shorter_than_it_says_is_named() -> None:
    with pytest.raises(UserError, match="input: has no item 3 of its 5"):
        read(Short(), 32, "input")


def test_lists_that_name_a_fifo_do_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.png")
    (tmp_path / "list.txt").write_text("p.png -1\n")
    with pytest.raises(UserError, match=r"p\.png \(no regular file\)"):
        read(tmp_path / "list.txt", 32, "input")


def damaged(path: Path, kind: str) -> None:
    np.save(path, IMAGES)
    content = path.read_bytes()
    match kind:
        case "archive":
            np.savez(path.with_suffix(".npz"), IMAGES)
            path.with_suffix(".npz").replace(path)
        case "pickle":
            path.write_bytes(pickle.dumps([1]))
        case "brackets":
            path.write_bytes(content.replace(b"}", b"(", 1))
        case "size":
            path.write_bytes(content.replace(b"(5, 32", b"(2e, 3"))
        case "number":
            path.write_bytes(content.replace(b"(5, 32", b"(5**99"))
        case "objects":
            path.write_bytes(content.replace(b"|u1", b"|O8"))
        case "fifo":
            path.unlink()
            os.mkfifo(path)


@pytest.mark.parametrize(
    "kind", ["archive", "pickle", "brackets", "size", "number", "objects", "fifo"]
)
def test_damaged_arrays_are_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.npy"
    damaged(path, kind)
    for reader in (map_array, lambda p: read(p, 32, "input")):
        with pytest.raises(UserError, match=r"x\.npy: (not a whole \.npy array|no such file)"):
            reader(path)


def test_large_offsets_leave_the_vectors_apart() -> None:
    r"""Centred in double precision, a shift of all vectors changes nothing."""
    shift, x = 1.6e9, np.round(VECTORS * 2**20) / 2**20  # what is left of them is exact
    values = read(x + shift, 32, "input").values
    mean, std = values.mean(0), values.std(0)
    standardise = Standardise(mean.tolist(), std.tolist())
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


def test_vectors_too_large_for_a_network_are_refused() -> None:
    with pytest.raises(UserError, match="5 of 5 vectors hold NaN or infinity"):
        read(VECTORS * 1e300, 32, "input")


def test_equal_vectors_have_equal_fingerprints_in_any_precision() -> None:
    single = VECTORS.astype(np.float32)
    assert count_shared(fingerprints(single), fingerprints(single.astype(np.float64))) == 5
    assert count_shared(fingerprints(VECTORS), fingerprints(VECTORS + 1e-12)) == 0
    shifted = VECTORS + 1.6e9
    assert len(np.unique(fingerprints(shifted))) == 5
