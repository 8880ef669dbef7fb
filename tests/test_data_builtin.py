r"""Tests for the ood_osdre.data.builtin module: the embedded benchmark and synthetic OOD."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ood_osdre.data import (
    BenchmarkData,
    ImageSet,
    load_benchmark,
    load_digits_benchmark,
    load_manifest,
)
from ood_osdre.data.builtin import noise, patch_shuffle, shapes, synthetic_ood
from ood_osdre.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def data() -> BenchmarkData:
    return load_digits_benchmark()


def sets_of(data: BenchmarkData) -> dict[str, ImageSet]:
    train, validation = data.split_reference()
    return {
        "id": join(data.id_train, data.id_val, data.id_test),
        "reference": train,
        "validation": validation,
        **data.near,
        "far": join(*data.far.values()),
    }


def join(*sets: ImageSet) -> ImageSet:
    return ImageSet(
        np.concatenate([s.images for s in sets]),
        np.concatenate([s.labels for s in sets]),
        [n for s in sets for n in s.names],
    )


def test_sets_share_no_class_and_no_picture(data: BenchmarkData) -> None:
    for (_, a), (_, b) in itertools.combinations(sets_of(data).items(), 2):
        classes = [{g.removesuffix("_grey") for g in s.groups} for s in (a, b)]
        assert not classes[0] & classes[1]
        assert not {x.tobytes() for x in a.images} & {x.tobytes() for x in b.images}


def test_id_splits_share_no_image(data: BenchmarkData) -> None:
    splits = (data.id_train, data.id_val, data.id_test)
    names = [n for s in splits for n in s.names]

    assert len(names) == len(set(names)) == 901
    for split in splits:
        assert set(split.labels) == set(range(5))


def test_images_are_rgb_of_32_pixels(data: BenchmarkData) -> None:
    for images in sets_of(data).values():
        assert images.images.shape[1:] == (32, 32, 3)
        assert images.images.dtype == np.uint8
        assert images.images.std() > 10


def test_labels_say_what_is_id(data: BenchmarkData) -> None:
    for name, images in sets_of(data).items():
        assert (images.labels >= 0).all() if name == "id" else (images.labels == -1).all()


def test_validation_is_a_digit_that_training_never_sees(data: BenchmarkData) -> None:
    train, validation = data.split_reference()

    assert set(validation.groups) == {"7"}
    assert set(train.groups) == {"5", "6", "china", "china_grey"}


def test_manifest_agrees_with_the_images(data: BenchmarkData) -> None:
    pixels = data.id_train.images / 255
    np.testing.assert_allclose(pixels.mean((0, 1, 2)), data.manifest.mean, atol=1e-3)
    np.testing.assert_allclose(pixels.std((0, 1, 2)), data.manifest.std, atol=1e-3)
    assert [s.name for s in data.manifest.role("near")] == list(data.near)
    assert [s.name for s in data.manifest.role("far")] == list(data.far)
    assert not data.absent


def test_loading_twice_gives_the_same(data: BenchmarkData) -> None:
    again = load_benchmark(load_manifest("digits", "digits"), "no such folder")
    assert again.checksums == data.checksums
    assert again.id_test.names == data.id_test.names


def test_embedded_benchmark_takes_no_reference() -> None:
    with pytest.raises(UserError, match="takes no reference"):
        load_benchmark(load_manifest("digits", "digits"), "data", reference="tin597")


class TestSyntheticOOD:
    def test_patch_shuffling_permutes_patches(self) -> None:
        images = PIXELS[:6]
        shuffled = patch_shuffle(images, np.random.default_rng(1))
        for before, after in zip(images, shuffled, strict=True):
            patches = [
                {p.tobytes() for row in np.split(x, 4) for p in np.split(row, 4, axis=1)}
                for x in (before, after)
            ]
            assert patches[0] == patches[1]
        assert not np.array_equal(images, shuffled)

    @pytest.mark.parametrize("make_set", [shapes, noise])
    def test_drawn_sets_have_their_shape_and_vary(
        self, make_set: Callable[..., NDArray[np.uint8]]
    ) -> None:
        images = make_set(12, 16, 16, np.random.default_rng(0))
        assert images.shape == (12, 16, 16, 3)
        assert images.dtype == np.uint8
        assert len({x.tobytes() for x in images}) == 12

    def test_equal_images_give_equal_sets(self) -> None:
        a, b = (synthetic_ood(PIXELS[:5], 7) for _ in range(2))
        assert list(a) == ["patch_shuffled", "shapes", "noise"]
        for name in a:
            assert np.array_equal(a[name], b[name])
