r"""Tests of the detector: from data as people hold them to decisions, and what it refuses."""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from ood_osdre import cli, load_scorer
from ood_osdre.data import ImageSet
from ood_osdre.detectors.feature_ratio import FeatureRatio
from ood_osdre.detectors.labels import class_labels
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import UserError
from ood_osdre.evaluation.calibration import SplitConformal
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.files import write_text_atomic
from ood_osdre.models import describe_backbone
from ood_osdre.training.batches import ImageBatches, Pairs
from ood_osdre.training.checkpoint import MODEL, read_checkpoint, write_checkpoint
from ood_osdre.training.trainer import Trainer

VECTORS = {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}}
FAST = {"training__steps": 3, "training__batch_size": 8, "training__warmup": 1}
SMALL = {"network__width": 0.125, "progress": False, "device": "cpu", **FAST}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def pictures(n: int, seed: int, shade: int = 0, size: int = 32) -> np.ndarray:
    r"""Returns random images, darker or lighter."""
    rng = np.random.default_rng(seed)
    return rng.integers(shade, shade + 128, (n, size, size, 3), dtype=np.uint8)


def gaussian(n: int, seed: int, shift: float = 0.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, 2)) + shift).astype(np.float32)


def vector_detector(steps: int = 300, **options: object) -> OneStepDetector:
    detector = OneStepDetector(
        VECTORS,
        progress=False,
        device="cpu",
        **{"training__steps": steps, "training__warmup": 20, "training__lr": 3e-3, **options},
    )
    return detector.fit(gaussian(2000, 0, 1.0), gaussian(2000, 1))


@pytest.fixture(scope="module")
def vectors() -> OneStepDetector:
    torch.set_default_dtype(torch.float32)
    return vector_detector()


@pytest.fixture(scope="module")
def images() -> OneStepDetector:
    torch.set_default_dtype(torch.float32)
    return OneStepDetector("digits", **SMALL).fit(pictures(60, 0, 100), pictures(60, 1))


def test_the_log_ratio_of_two_gaussians_is_learnt(vectors: OneStepDetector) -> None:
    r"""For unit Gaussians at (1, 1) and 0, log r(x) is x_1 + x_2 - 1, in nats."""
    x = gaussian(500, 2, 0.5)
    truth = x.sum(axis=1) - 1
    scores = vectors.score(x)

    assert scores.dtype == np.float32
    assert np.corrcoef(scores, truth)[0, 1] > 0.98
    assert np.abs(scores - truth).mean() < 0.35
    # Larger is more ID.
    assert (
        ood_metrics(vectors.score(gaussian(500, 3, 1.0)), vectors.score(gaussian(500, 4)))[0] > 0.8
    )


def test_calibrated_decisions_keep_their_rate(vectors: OneStepDetector) -> None:
    vectors.calibrate(gaussian(999, 5, 1.0), alpha=0.1)
    fresh = gaussian(4000, 6, 1.0)
    decisions, p = vectors.predict(fresh), vectors.pvalue(fresh)

    assert set(decisions.tolist()) == {1, -1}
    assert ((decisions == -1) == (p <= 0.1)).all()
    # Given the calibration set the rate is Beta(100, 900), and the count binomial.
    assert np.mean(decisions == -1) == pytest.approx(0.1, abs=4 * 0.0106)
    assert np.mean(vectors.predict(gaussian(1000, 7, -3.0)) == -1) > 0.9


@pytest.mark.parametrize(
    "change",
    [lambda x: 1e-7 * x, lambda x: x + 1.6e9, lambda x: x + 2**40],
    ids=["unit", "shift", "far"],
)
def test_vectors_of_any_unit_and_origin_are_told_apart(
    change: Callable[[np.ndarray], np.ndarray],
) -> None:
    x, reference = (
        np.round(gaussian(300, *k).astype(float) * 2**20) / 2**20 for k in ((0, 2.0), (1,))
    )
    expected, found = (
        OneStepDetector(VECTORS, progress=False, training__steps=30)
        .fit(f(x), f(reference))
        .score(f(x))
        for f in (lambda x: x, change)
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_the_smallest_rate_flags_nothing() -> None:
    assert SplitConformal([1.0, 2.0], 5e-324).threshold == -np.inf


def test_rows_that_are_likely_by_themselves_are_fresh_each_time() -> None:
    def drawn(n: int, seed: int, share: float) -> np.ndarray:
        x = gaussian(n, seed, 1.0)
        x[np.random.default_rng(seed).random(n) < share] = 0
        return x

    detector = OneStepDetector(VECTORS, progress=False, **FAST)
    detector.fit(drawn(400, 1, 0.2), drawn(400, 2, 0.02))
    conformal = detector.calibrate(drawn(100, 3, 0.2), alpha=0.1).conformal
    assert conformal is not None
    assert conformal.size == 100
    new = drawn(2000, 4, 0.2)
    assert not (detector.predict(new) < 0)[(new == 0).all(axis=1)].any()


def test_calibration_on_what_fit_has_read_is_refused(
    vectors: OneStepDetector, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = np.concatenate([gaussian(30, 0, 1.0), gaussian(70, 8, 1.0)])
    mixed[:30] = gaussian(2000, 0, 1.0)[:30]
    with pytest.raises(UserError, match=r"30 of 100 items were read in fit.*hold data out"):
        vectors.calibrate(mixed)
    # The reference was read too.
    with pytest.raises(UserError, match="2000 of 2000"):
        vectors.calibrate(gaussian(2000, 1))
    with pytest.raises(UserError, match="seen: got 'ignore', expected 'refuse' or 'warn'"):
        vectors.calibrate(mixed, seen="ignore")  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        vectors.calibrate(mixed, seen="warn")
    assert "30 of 100 items were read in fit" in caplog.text
    # Copies in single precision are the same items.
    exact = (
        np.random.default_rng(0).normal(1, 1, (30, 3)),
        np.random.default_rng(1).normal(size=(30, 3)),
    )
    detector = OneStepDetector(VECTORS, progress=False, **FAST).fit(*exact)
    for again in (exact[0], exact[0].astype(np.float32)):
        with pytest.raises(UserError, match="30 of 30 items were read in fit"):
            detector.calibrate(again)


class Pictures(Dataset):
    r"""A data set as torchvision's are: Pillow images with labels."""

    def __init__(self, images: np.ndarray, transform: object = None) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[object, int]:
        image = Image.fromarray(self.images[index])
        return (image if self.transform is None else self.transform(image)), index % 3


def forms(x: np.ndarray, folder: Path) -> dict[str, object]:
    r"""Returns the same images in every form that they may come in."""
    for i, image in enumerate(x):
        path = folder / "images" / f"{i:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (folder / "list.txt").write_text("".join(f"images/{i:03d}.png -1\n" for i in range(len(x))))
    np.save(folder / "images.npy", x)
    chw = torch.as_tensor(x).permute(0, 3, 1, 2)
    labels = torch.arange(len(x))
    batches = [{"data": chw[:3] / 255, "label": labels[:3]}, {"image": chw[3:] / 255}]
    return {
        "array": x,
        "float array": x / 255,
        "tensor": chw,
        "float tensor": chw / 255,
        "image set": ImageSet(x, np.full(len(x), -1), [str(i) for i in range(len(x))]),
        "loader": DataLoader(TensorDataset(chw / 255, labels), batch_size=4),
        "loader of bare tensors": DataLoader(chw / 255, batch_size=5),
        "loader of mappings": iter(batches),
        "data set": Pictures(x),
        "data set of tensors": Pictures(x, ToTensor()),
        "loader of a data set": DataLoader(Pictures(x, ToTensor()), batch_size=3),
        "list of Pillow images": [Image.fromarray(i) for i in x],
        "folder": folder / "images",
        "folder by text": str(folder / "images"),
        "list file": folder / "list.txt",
        "npy": folder / "images.npy",
    }


def test_every_form_of_the_same_images_scores_the_same(
    images: OneStepDetector, tmp_path: Path
) -> None:
    x = pictures(10, 9, 50)
    expected = images.score(x)
    assert len(np.unique(expected)) == len(x)
    for name, form in forms(x, tmp_path).items():
        np.testing.assert_allclose(images.score(form), expected, atol=1e-5, err_msg=name)
    # Floats are rounded to the nearest pixel.
    for shift in (-0.4, 0.4):
        assert (images.score((x + shift) / 255) == expected).all()


@pytest.mark.parametrize("kind", ["data set", "folder", "array with labels"])
def test_fit_takes_labels_where_there_are_some(tmp_path: Path, kind: str) -> None:
    x = pictures(30, 0)
    given: object = x
    labels = None
    if kind == "data set":
        given = Pictures(x)
    elif kind == "folder":
        for i, image in enumerate(x):
            path = tmp_path / f"class{i % 3}" / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(image).save(path)
        given = tmp_path
    else:
        labels = np.arange(30) % 3
    detector = OneStepDetector("digits", **SMALL).fit(given, pictures(30, 1), labels=labels)

    assert detector.scorer.metadata["classes"] == 3
    assert "val_accuracy" in detector.outcome.best


def test_fit_without_labels_trains_no_class_head(images: OneStepDetector) -> None:
    assert images.scorer.metadata["classes"] == 0
    assert images.scorer.metadata["config"]["objective"]["class_weight"] == 0
    assert "val_accuracy" not in images.outcome.best


class Labelled(Pictures):
    r"""The same with labels of any kind."""

    def __init__(self, images: np.ndarray, label: Callable[[int], object]) -> None:
        super().__init__(images, ToTensor())
        self.label = label

    def __getitem__(self, index: int) -> tuple[object, object]:
        return super().__getitem__(index)[0], self.label(index)


LABEL_KINDS: dict[str, tuple[Callable[[int], object], int, str]] = {
    "classes": (lambda i: i % 3, 3, ""),
    "a column, as MedMNIST": (lambda i: np.array([i % 3]), 3, ""),
    "attributes, as CelebA": (lambda i: torch.arange(40) % 2, 0, r"shape \(12, 40\), no index"),
    "fractions": (lambda i: i / 2, 0, "float64 of shape"),
    "names": (lambda i: "a", 0, "labels are <U1"),
}


@pytest.mark.parametrize("name", LABEL_KINDS)
def test_fit_says_why_no_class_head_is_trained(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    label, classes, message = LABEL_KINDS[name]
    # Labels of a reference are nobody's business.
    reference = Labelled(pictures(12, 1), lambda i: -4)
    detector = OneStepDetector("digits", **SMALL).fit(Labelled(pictures(12, 0), label), reference)
    assert detector.scorer.metadata["classes"] == classes
    assert bool(message) == ("no class head is trained; ID data:" in caplog.text)
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("label", [*(k[0] for k in LABEL_KINDS.values()), lambda i: -4])
def test_scoring_looks_at_no_labels(
    images: OneStepDetector, label: Callable[[int], object], caplog: pytest.LogCaptureFixture
) -> None:
    data = Labelled(pictures(6, 0, 50), label)
    expected = images.score(data.images)
    for form in (data, DataLoader(data, 4)):
        np.testing.assert_allclose(images.score(form), expected, atol=1e-5)
    assert not caplog.records
    shuffled = images.score(DataLoader(data, 4, shuffle=True))
    assert "the loader shuffles" in caplog.text
    np.testing.assert_allclose(np.sort(shuffled), np.sort(expected), atol=1e-5)


def test_scores_come_with_names_in_the_order_of_sorted_paths(
    images: OneStepDetector, tmp_path: Path
) -> None:
    x = pictures(3, 0, 50)
    names = ["a/2.png", "a b/1.png", "a.b/3.png"]
    for name, image in zip(names, x, strict=True):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(image).save(tmp_path / name)
    found, scores = images.score_named(tmp_path)
    assert found == [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*.png"))]
    assert dict(zip(found, scores, strict=True)) == dict(zip(names, images.score(x), strict=True))
    assert images.score_named(x)[0] == ["0", "1", "2"]


def test_home_is_where_paths_with_a_tilde_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    x = pictures(12, 0)
    write_text_atomic("~/list.txt", "a.png -1\n")
    Image.fromarray(x[0]).save(tmp_path / "home" / "a.png")
    write_text_atomic("~/options.yml", "extends: digits\n")
    detector = OneStepDetector("~/options.yml", **SMALL).fit(x, x[::-1] // 2, folder="~/run")
    detector.save("~/detector")
    assert load_scorer("~/detector").shape == (32, 32, 3)
    loaded = OneStepDetector.load("~/detector")
    assert loaded.score("~/list.txt") == loaded.score("~/a.png") == detector.score(["~/a.png"])
    ratio = FeatureRatio({"rank": 2, "training": {"steps": 2}})
    ratio.fit_features(torch.randn(60, 4), torch.randn(60, 4)).save("~/ratio")
    assert FeatureRatio.load("~/ratio").features == 4
    args = cli.parser().parse_args(["--out=~/out", "--data-root=~/data", "--cache-dir=~/cache"])
    assert [p.parent for p in (args.out, args.data_root, args.cache_dir)] == [
        tmp_path / "home"
    ] * 3
    assert not any((tmp_path / "here").iterdir())


def test_torchvision_data_sets_are_read_as_they_are() -> None:
    fake = FakeData(20, image_size=(3, 40, 36), num_classes=4, random_offset=1)
    other = FakeData(20, image_size=(3, 32, 32), num_classes=4, random_offset=2)
    detector = OneStepDetector("digits", **SMALL).fit(fake, other)

    assert detector.score(fake).shape == (20,)


def test_images_are_standardised_by_the_id_data_alone(images: OneStepDetector) -> None:
    mean = np.array(images.scorer.metadata["mean"])
    np.testing.assert_allclose(mean, pictures(60, 0, 100).mean((0, 1, 2)) / 255, atol=5e-3)


@pytest.mark.parametrize("which", ["images", "vectors"])
def test_save_and_load_without_pickles(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    detector: OneStepDetector = request.getfixturevalue(which)
    x = pictures(8, 3) if which == "images" else gaussian(8, 3)
    fresh = pictures(40, 4, 100) if which == "images" else gaussian(40, 9, 1.0)
    detector.calibrate(fresh, alpha=0.2)
    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, device="cpu")

    assert {p.suffix for p in tmp_path.iterdir()} == {".safetensors"}
    assert (loaded.score(x) == detector.score(x)).all()
    assert (loaded.predict(x) == detector.predict(x)).all()
    assert (loaded.pvalue(x) == detector.pvalue(x)).all()
    # What fit has read is still known.
    with pytest.raises(UserError, match="were read in fit"):
        loaded.calibrate(pictures(60, 0, 100) if which == "images" else gaussian(2000, 0, 1.0))
    # Saved again, it is the same model.
    loaded.save(tmp_path / "again")
    again = OneStepDetector.load(tmp_path / "again")
    assert (again.pvalue(x) == detector.pvalue(x)).all()
    assert (load_scorer(tmp_path).score(x) == detector.score(x)).all()
    if which == "vectors":
        for wrong, problem in ((x[:, :1], r"\(8, 1\).*numbers"), (x + np.inf, "8 of 8 .* infin")):
            with pytest.raises(UserError, match=problem):
                load_scorer(tmp_path).score(wrong)


def test_a_calibration_of_another_model_is_refused(
    images: OneStepDetector, vectors: OneStepDetector, tmp_path: Path
) -> None:
    vectors.calibrate(gaussian(50, 20, 1.0)).save(tmp_path / "vectors")
    images.save(tmp_path / "images")
    for file in (tmp_path / "vectors").glob("calibration*"):
        (tmp_path / "images" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"calibration\.safetensors: another model's calibration"):
        OneStepDetector.load(tmp_path / "images")


def test_the_model_of_a_run_folder_loads_and_calibrates(
    images: OneStepDetector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    detector = OneStepDetector("digits", **SMALL)
    detector.fit(pictures(20, 0), pictures(20, 1), folder=folder)
    assert (folder / "log.jsonl").is_file()
    loaded = OneStepDetector.load(folder)  # what training itself wrote
    with caplog.at_level(logging.WARNING):
        loaded.calibrate(pictures(20, 0), alpha=0.2)
    assert "not recorded" in caplog.text
    assert (loaded.score(pictures(5, 2)) == detector.score(pictures(5, 2))).all()


def test_fit_resumes_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SMALL, "training__steps": 4, "training__checkpoint_every": 2}
    data = pictures(20, 0), pictures(20, 1)
    whole = OneStepDetector("digits", **options).fit(*data)
    pairs = ImageBatches.pairs

    def interrupted(self: ImageBatches, step: int, generator: torch.Generator) -> Pairs:
        if step == 3:
            raise KeyboardInterrupt
        return pairs(self, step, generator)

    with monkeypatch.context() as patch:
        patch.setattr(ImageBatches, "pairs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            OneStepDetector("digits", **options).fit(*data, folder=tmp_path)
    with pytest.raises(UserError, match="holds a run already; go on with resume=True"):
        OneStepDetector("digits", **options).fit(*data, folder=tmp_path)
    resumed = OneStepDetector("digits", **options).fit(*data, folder=tmp_path, resume=True)
    assert (resumed.score(data[0]) == whole.score(data[0])).all()


class Backbone(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (5,)) -> None:
        super().__init__()
        self.conv, self.shape = nn.Conv2d(3, 5, 3, stride=4), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)).reshape(len(x), *self.shape)


@pytest.mark.parametrize("estimator", ["one_step", "direct"])
def test_a_backbone_of_ones_own_is_trained_as_a_copy(tmp_path: Path, estimator: str) -> None:
    backbone = Backbone()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    data = pictures(20, 0, size=48), pictures(20, 1, 100, size=48)
    options = {**SMALL, "estimator": estimator}
    detector = OneStepDetector("digits", backbone=backbone, size=48, **options).fit(*data)

    assert all(torch.equal(before[k], v) for k, v in backbone.state_dict().items())
    trained = detector.scorer.ratio.backbone.state_dict()
    assert trained.keys() == before.keys()
    assert not torch.equal(trained["conv.weight"], before["conv.weight"])

    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, backbone=Backbone())
    assert (loaded.score(data[0]) == detector.score(data[0])).all()
    with pytest.raises(UserError, match="the Backbone it was trained with"):
        OneStepDetector.load(tmp_path)
    with pytest.raises(UserError, match="another architecture"):
        OneStepDetector.load(tmp_path, backbone=nn.Sequential(Backbone(), nn.Linear(5, 5)))


def test_a_detector_says_which_timm_model_to_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> nn.Module:
        return timm.create_model("test_resnet", num_classes=0)

    images = pictures(9, 0), pictures(9, 1)
    options = {**SMALL, "training__steps": 1, "training__warmup": 0}
    detector = OneStepDetector("digits", backbone=build(), **options).fit(*images)
    assert "its class head" not in caplog.text
    detector.save(tmp_path)
    built = r"ResNet \(timm\.create_model\('test_resnet', num_classes=0\)\) it was trained with"
    with pytest.raises(UserError, match=built):
        OneStepDetector.load(tmp_path)
    loaded = OneStepDetector.load(tmp_path, backbone=build())
    assert (loaded.score(images[0]) == detector.score(images[0])).all()


def test_a_class_head_left_on_a_backbone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with_head = timm.create_model("test_resnet", num_classes=7)
    by_hand = timm.create_model("test_resnet")  # of 1,000
    by_hand.fc = nn.Identity()
    assert "'test_resnet', num_classes=7" in describe_backbone(with_head)
    assert "logits of its class head of 7; create it with num_classes=0" in caplog.text
    caplog.clear()
    assert describe_backbone(nn.Sequential(Backbone(), nn.Linear(5, 1000))) == "Sequential"
    assert "class head of 1000; put nn.Identity() in its place" in caplog.text
    caplog.clear()
    for net in (by_hand, Backbone(), nn.Sequential(nn.Linear(5, 1000), nn.ReLU()), nn.Identity()):
        describe_backbone(net)
    assert not caplog.text


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (Backbone((5, 1, 1)), r"returns \(2, 5, 1, 1\) for 2 inputs"),
        (nn.Linear(4, 2), "Linear: fails on float32 inputs of shape"),
    ],
)
def test_a_backbone_that_returns_no_features_is_refused(backbone: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OneStepDetector("digits", backbone=backbone, **SMALL).fit(pictures(9, 0), pictures(9, 1))


def test_shared_items_are_warned_of_with_their_count(caplog: pytest.LogCaptureFixture) -> None:
    x = gaussian(50, 0, 1.0)
    with caplog.at_level(logging.WARNING):
        detector = OneStepDetector(VECTORS, progress=False, **FAST)
        detector.fit(x, np.concatenate([gaussian(40, 1), x[:7]]))
    assert "7 of 47 reference items are ID items too" in caplog.text


BAD_INPUTS = {
    "normalised": (torch.randn(4, 3, 32, 32), r"pixels from .* expected floats in \[0, 1\]"),
    "NaN": (np.full((4, 32, 32, 3), np.nan), "pixels from nan"),
    "another size": (pictures(4, 0, size=28), "28 x 28 pixels, expected 32 x 32"),
    "one image": (pictures(4, 0)[0, 0], "items of shape"),
    "vectors": (gaussian(4, 0), r"items of shape \(2,\), expected \(32, 32, 3\)"),
    "empty array": (pictures(4, 0)[:0], "empty"),
    "empty list": ([], "empty"),
    "a number": (3.0, "got float, expected an array"),
    "numbers": ([1, 2], r"input\[0\]: got int"),
    "no such path": ("nowhere/at/all", "no such folder"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_cannot_be_scored_are_one_line(images: OneStepDetector, name: str) -> None:
    data, message = BAD_INPUTS[name]
    with pytest.raises(UserError, match=message) as error:
        images.score(data)
    assert "\n" not in str(error.value)


def test_scores_that_are_not_finite_are_refused(images: OneStepDetector) -> None:
    bias = images.scorer.ratio.head.bias
    before = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(torch.nan)
        with pytest.raises(UserError, match="input scores: 4 of 4 are NaN or infinite"):
            images.score(pictures(4, 0))
        bias.copy_(before)


LABELS = "expected class indices from 0, or -1 for none"
ALL = "expected a class index from 0 for all, or for none"
ID, REFERENCE = pictures(4, 0), pictures(9, 1)
BAD_FITS: dict[str, tuple[object, object, object, str]] = {
    "one ID image": (ID[:1], REFERENCE, None, r"fit: got ID data of shape \(1, 32, .* 2 of each"),
    "one reference image": (ID, ID[:1], None, r"and a reference of shape \(1, 32, 32, 3\)"),
    "no ID image": (ID[:0], REFERENCE, None, "ID data: empty"),
    "no reference": (ID, [], None, "reference: empty"),
    "vectors as reference": (ID, gaussian(9, 0), None, r"a reference of shape \(9, 2\)"),
    "vectors for images": (
        gaussian(9, 0),
        gaussian(9, 1),
        None,
        r"data\.broaden: .*'kind': 'mlp'",
    ),
    "NaN": (np.full((9, 2), np.nan), gaussian(9, 1), None, "9 of 9 vectors hold NaN"),
    "some labels": (ID, REFERENCE, [0, 1, -1, 1], f"ID data: got 4 items and 1 negative .*{ALL}"),
    "label too large": (ID, REFERENCE, [0, 1, 400, 1], "ID data: got 4 items and a label 400"),
    "labels of others": (ID, REFERENCE, [0, 1], r"4 items and labels of shape \(2,\)"),
    "fractions": (ID, REFERENCE, [0.7, 1, 0.7, 0], f"labels: 2 of 4 .* first is 0.7; {LABELS}"),
    "NaN labels": (ID, REFERENCE, [0.0, np.nan, np.inf, 1], "labels: 2 of 4 are no class index"),
    "below -1": (ID, REFERENCE, [0, -5, 1, 0], "labels: 1 of 4 are no class index, .* -5"),
    "names": (ID, REFERENCE, ["a", "b", "c", "d"], "labels: 4 of 4 are no class index, .*'a'"),
    "nothing": (ID, REFERENCE, [None] * 4, "labels: 4 of 4 are no class index"),
    "too large": (ID, REFERENCE, [10**30] * 4, "labels: 4 of 4 .* first is 1000"),
    "an object": (ID, REFERENCE, object(), "labels: 1 of 1 are no class index"),
    "ragged": (
        ID,
        REFERENCE,
        [[0], [1, 2]],
        r"labels: 1 of 1 are no class index, .*\[0\], \[1, 2",
    ),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_data_that_cannot_be_fitted_are_one_line(name: str) -> None:
    id_data, reference, labels, message = BAD_FITS[name]
    with pytest.raises(UserError, match=message) as error:
        OneStepDetector("digits", **SMALL).fit(id_data, reference, labels=labels)  # type: ignore
    assert "\n" not in str(error.value)


def test_labels_that_are_whole_are_taken() -> None:
    for labels in ([0, 2, -1], [0.0, 2.0, -1.0], torch.tensor([0, 2, -1])):
        assert class_labels(labels).tolist() == [0, 2, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training__stepz": 3}, r"unknown key 'training\.stepz'; did you mean 'training__steps'"),
        ({"trainin__steps": 3}, "unknown key 'trainin"),
        ({"training__steps": 0}, r"training\.steps"),
        ({"device": "cuda:77"}, "device cuda:77: not available here"),
        ({"config": "digitz"}, "did you mean 'digits'"),
        ({"config": 5}, "config: got 5, expected a mapping"),
        ({"config": {"training": 5}, **FAST}, "config: training: got 5"),
        ({"estimator": "classifier", "objective__endpoint": 0}, "estimator: got 'classifier'"),
        ({"size": "32"}, "size: got '32'"),
        ({"size": 0}, "size: got 0"),
        (
            {"backbone": "resnet18"},
            r"backbone: got 'resnet18', expected an instance of nn\.Module",
        ),
        ({"backbone": nn.Linear}, "backbone: got <class"),
    ],
)
def test_options_are_checked_at_once(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OneStepDetector(**{"config": "digits", "device": "cpu", **options})


def test_vectors_need_a_network_for_vectors() -> None:
    options = {"data__broaden": 0.0, **SMALL}
    with pytest.raises(UserError, match=r"network\.kind: got resnet, expected mlp for vectors"):
        OneStepDetector("digits", **options).fit(gaussian(9, 0), gaussian(9, 1))


def test_a_fit_holds_out_for_itself() -> None:
    for key, default in (("hold_out_id", "0"), ("hold_out_reference", "null")):
        detector = OneStepDetector("digits", **{f"data__{key}": 2}, **SMALL)
        with pytest.raises(UserError, match=rf"data\.{key}: got 2, expected {default}"):
            detector.fit(ID, REFERENCE)


def test_methods_come_in_order() -> None:
    detector = OneStepDetector(VECTORS, progress=False, **FAST)
    x = gaussian(9, 0)
    for method in (detector.score, detector.predict, detector.pvalue, detector.calibrate):
        with pytest.raises(UserError, match="call fit"):
            method(x)
    with pytest.raises(UserError, match="is not fitted"):
        detector.save("nowhere")
    detector.fit(x, gaussian(9, 1))
    for method in (detector.predict, detector.pvalue):
        with pytest.raises(UserError, match="has no threshold; call fit, then calibrate"):
            method(x)
    detector.calibrate(gaussian(9, 2), 0.5)
    # A threshold belongs to the model it was made with.
    with pytest.raises(UserError, match="has no threshold"):
        detector.fit(x, gaussian(9, 1)).predict(x)


def test_a_stopped_fit_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, budget, *args: run(self, 0, *args))
    detector = OneStepDetector(VECTORS, progress=False, **FAST)
    with pytest.raises(UserError, match=r"stopped \(time budget\) at step 1 of 3; saved in"):
        detector.fit(gaussian(9, 0), gaussian(9, 1), folder=tmp_path)
    assert not detector.is_fitted


@pytest.mark.parametrize(
    ("name", "tensors", "metadata", "message"),
    [
        ("calibration", {}, {"alpha": "0.1"}, r"not a calibration \(alpha: got '0\.1'"),
        ("calibration", {}, {"alpha": None}, r"not a calibration \(alpha: got null"),
        ("calibration", {"scores": torch.ones(3, 2)}, {}, r"not a calibration .*\(3, 2\)"),
        ("calibration", {"scores": torch.full((9,), torch.nan)}, {}, ".*9 of 9 are NaN"),
        ("model", {}, {"mean": ["a"] * 2}, "mean: expected 2 numbers"),
        ("model", {}, {"std": [0.0] * 2}, "std: 2 of 2 are not positive"),
        ("model", {}, {"std": [1.0]}, r"std: got shape \(1,\), expected 2 numbers"),
    ],
)
def test_files_of_a_detector_are_checked_when_read(
    name: str,
    tensors: dict[str, Tensor],
    metadata: dict[str, object],
    message: str,
    vectors: OneStepDetector,
    tmp_path: Path,
) -> None:
    vectors.calibrate(gaussian(9, 55, 1.0), alpha=0.5).save(tmp_path)
    old = read_checkpoint(tmp_path, name)
    write_checkpoint(tmp_path, name, {**old[0], **tensors}, {**old[1], **metadata})
    with pytest.raises(UserError, match=rf"{name}\.safetensors: {message}"):
        OneStepDetector.load(tmp_path, device="cpu")


def test_loading_what_is_no_detector_is_one_line(vectors: OneStepDetector, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint here"):
        OneStepDetector.load(tmp_path)
    metadata = {k: v for k, v in vectors.scorer.metadata.items() if k != "mean"}
    write_checkpoint(tmp_path, MODEL, {}, metadata)
    with pytest.raises(UserError, match="'mean' is missing, expected a trained model"):
        OneStepDetector.load(tmp_path)
