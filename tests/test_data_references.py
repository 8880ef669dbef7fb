r"""Tests for the ood_osdre.data.status and ood_osdre.data.sets modules."""

import numpy as np
import pytest

from ood_osdre.data import ImageSet, hold_out_reference
from ood_osdre.errors import UserError


def make_set(names: list[str]) -> ImageSet:
    n = len(names)
    images = np.arange(n * 12, dtype=np.int64).astype(np.uint8).reshape(n, 2, 2, 3)
    return ImageSet(images, np.full(n, -1), names)


CLASSES = make_set([f"tin/train/n{i % 25:02d}/images/{i}.JPEG" for i in range(200)])
FEW = CLASSES.subset(np.arange(200) % 25 < 19)
PLAIN = make_set([f"random.npy[{i}]" for i in range(200)])


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
def test_class_is_the_folder(name: str, group: str) -> None:
    assert make_set([name]).groups == [group]


def test_sets_check_their_shapes() -> None:
    images, labels = np.zeros((3, 2, 2, 3), np.uint8), np.zeros(3, np.int64)
    for bad in (images[..., 0], images.astype(float), images[..., :1]):
        with pytest.raises(ValueError, match="expected uint8"):
            ImageSet(bad, labels, ["", "", ""])
    with pytest.raises(ValueError, match="2 names, expected"):
        ImageSet(images, labels, ["", ""])


@pytest.mark.parametrize("as_mask", [False, True])
def test_subset_keeps_images_labels_and_names_together(as_mask: bool) -> None:
    indices = np.array([2, 5, 7])
    picked = CLASSES.subset(np.isin(np.arange(200), indices) if as_mask else indices)

    assert picked.names == [CLASSES.names[i] for i in indices]
    np.testing.assert_array_equal(picked.images, CLASSES.images[indices])
    assert len(picked) == len(picked.labels) == 3
    assert len(CLASSES.subset([])) == 0


def test_ten_classes_are_held_out() -> None:
    train, validation = hold_out_reference(CLASSES)

    assert len(set(validation.groups)) == 10
    assert len(set(train.groups)) == 15
    assert not set(train.groups) & set(validation.groups)
    assert sorted(train.names + validation.names) == sorted(CLASSES.names)


@pytest.mark.parametrize("reference", [PLAIN, FEW])
def test_without_enough_classes_a_tenth_is_held_out(reference: ImageSet) -> None:
    train, validation = hold_out_reference(reference)

    assert len(validation) == round(0.1 * len(reference))
    assert not set(train.names) & set(validation.names)
    assert len(train) + len(validation) == len(reference)


def test_split_depends_on_the_seed_only() -> None:
    splits = [hold_out_reference(r, seed=s)[1].names for s in (0, 0, 1) for r in (PLAIN, CLASSES)]

    assert splits[:2] == splits[2:4]
    assert splits[0] != splits[4]
    assert splits[1] != splits[5]


def test_named_classes_are_held_out() -> None:
    train, validation = hold_out_reference(CLASSES, ["n03", "n07"])

    assert set(validation.groups) == {"n03", "n07"}
    assert len(train) == 184


@pytest.mark.parametrize(
    ("reference", "classes"),
    [
        (PLAIN.subset([0]), 10),
        (PLAIN.subset([]), 10),
        (CLASSES, sorted(set(CLASSES.groups))),
        (CLASSES, ["n03", "n99"]),
    ],
)
def test_impossible_splits_are_refused(reference: ImageSet, classes: int | list[str]) -> None:
    with pytest.raises(UserError, match=rf"reference: {len(reference)} images .*cannot be split"):
        hold_out_reference(reference, classes)
