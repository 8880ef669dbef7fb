r"""Tests for the ood_osdre.detectors.one_step module: from data as people hold them to decisions."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor

from ood_osdre import load_scorer
from ood_osdre.data import ImageSet
from ood_osdre.detectors.fitting import Problem
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.training.checkpoint import MODEL, write_checkpoint

VECTORS = {"network": {"kind": "mlp", "width": 0.125, "depths": [1]}}
FAST = {"training__steps": 3, "training__batch_size": 8, "training__warmup": 1}
SMALL = {"network__width": 0.125, "progress": False, "device": "cpu", **FAST}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def draw(n: int, seed: int, shade: int = 0, size: int = 32) -> np.ndarray:
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
    return OneStepDetector("digits", **SMALL).fit(draw(60, 0, 100), draw(60, 1))


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
    with caplog.at_level(logging.WARNING):
        vectors.calibrate(mixed, seen="warn")
    assert "30 of 100 items were read in fit" in caplog.text
    with pytest.raises(ValueError, match="'seen' should be"):
        vectors.calibrate(mixed, seen="ignore")  # type: ignore[arg-type]


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
    x = draw(10, 9, 50)
    expected = images.score(x)
    assert len(np.unique(expected)) == len(x)
    for name, form in forms(x, tmp_path).items():
        np.testing.assert_allclose(images.score(form), expected, atol=1e-5, err_msg=name)


def test_floats_are_rounded_to_the_nearest_pixel(images: OneStepDetector) -> None:
    x = draw(5, 9, 50)
    for shift in (-0.4, 0.4):
        assert (images.score((x + shift) / 255) == images.score(x)).all()


@pytest.mark.parametrize("kind", ["data set", "folder", "array with labels"])
def test_fit_takes_labels_where_there_are_some(tmp_path: Path, kind: str) -> None:
    x = draw(30, 0)
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
    detector = OneStepDetector("digits", **SMALL).fit(given, draw(30, 1), labels=labels)

    assert detector.scorer.metadata["classes"] == 3
    assert "val_accuracy" in detector.outcome.best


def test_fit_without_labels_trains_no_class_head(images: OneStepDetector) -> None:
    assert images.scorer.metadata["classes"] == 0
    assert images.scorer.metadata["config"]["objective"]["class_weight"] == 0
    assert "val_accuracy" not in images.outcome.best


def test_torchvision_data_sets_are_read_as_they_are() -> None:
    fake = FakeData(20, image_size=(3, 40, 36), num_classes=4, random_offset=1)
    other = FakeData(20, image_size=(3, 32, 32), num_classes=4, random_offset=2)
    detector = OneStepDetector("digits", **SMALL).fit(fake, other)

    assert detector.score(fake).shape == (20,)


def test_images_are_standardised_by_the_id_data_alone(images: OneStepDetector) -> None:
    mean = np.array(images.scorer.metadata["mean"])
    np.testing.assert_allclose(mean, draw(60, 0, 100).mean((0, 1, 2)) / 255, atol=5e-3)


@pytest.mark.parametrize("which", ["images", "vectors"])
def test_save_and_load_without_pickles(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    detector: OneStepDetector = request.getfixturevalue(which)
    x = draw(8, 3) if which == "images" else gaussian(8, 3)
    fresh = draw(40, 4, 100) if which == "images" else gaussian(40, 9, 1.0)
    detector.calibrate(fresh, alpha=0.2)
    detector.save(tmp_path)
    loaded = OneStepDetector.load(tmp_path, device="cpu")

    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert (loaded.score(x) == detector.score(x)).all()
    assert (loaded.predict(x) == detector.predict(x)).all()
    assert (loaded.pvalue(x) == detector.pvalue(x)).all()
    # What fit has read is still known.
    with pytest.raises(UserError, match="were read in fit"):
        loaded.calibrate(draw(60, 0, 100) if which == "images" else gaussian(2000, 0, 1.0))
    # Saved again, it is the same model.
    loaded.save(tmp_path / "again")
    again = OneStepDetector.load(tmp_path / "again")
    assert (again.pvalue(x) == detector.pvalue(x)).all()
    if which == "images":
        # Ours is folded, which changes the rounding.
        np.testing.assert_allclose(load_scorer(tmp_path).score(x), detector.score(x), atol=1e-5)


def test_a_calibration_of_another_model_is_refused(
    images: OneStepDetector, vectors: OneStepDetector, tmp_path: Path
) -> None:
    vectors.calibrate(gaussian(50, 20, 1.0)).save(tmp_path / "vectors")
    images.save(tmp_path / "images")
    for file in (tmp_path / "vectors").glob("calibration*"):
        (tmp_path / "images" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=r"calibration\.json: of another model"):
        OneStepDetector.load(tmp_path / "images")


def test_the_model_of_a_run_folder_loads_and_calibrates(
    images: OneStepDetector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    detector = OneStepDetector("digits", **SMALL)
    detector.fit(draw(20, 0), draw(20, 1), folder=folder)
    assert (folder / "log.jsonl").is_file()
    loaded = OneStepDetector.load(folder)  # what training itself wrote
    with caplog.at_level(logging.WARNING):
        loaded.calibrate(draw(20, 0), alpha=0.2)
    assert "not recorded" in caplog.text
    assert (loaded.score(draw(5, 2)) == detector.score(draw(5, 2))).all()


def test_fit_resumes_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SMALL, "training__steps": 4, "training__checkpoint_every": 2}
    data = draw(20, 0), draw(20, 1)
    whole = OneStepDetector("digits", **options).fit(*data)

    def stop(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    make = Problem.trainer

    def interrupted(*args: object) -> object:
        trainer = make(*args)  # type: ignore[arg-type]
        batches = trainer.batches
        trainer.batches = lambda step: (stop(step), batches(step))[1]
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(Problem, "trainer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            OneStepDetector("digits", **options).fit(*data, folder=tmp_path)
    resumed = OneStepDetector("digits", **options).fit(*data, folder=tmp_path, resume=True)
    assert (resumed.score(data[0]) == whole.score(data[0])).all()


class Backbone(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (5,)) -> None:
        super().__init__()
        self.conv, self.shape = nn.Conv2d(3, 5, 3, stride=4), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)).reshape(len(x), *self.shape)


def test_a_backbone_of_ones_own_is_trained_as_a_copy(tmp_path: Path) -> None:
    backbone = Backbone()
    before = {k: v.clone() for k, v in backbone.state_dict().items()}
    data = draw(20, 0, size=48), draw(20, 1, 100, size=48)
    detector = OneStepDetector("digits", backbone=backbone, size=48, **SMALL).fit(*data)

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


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (Backbone((5, 1, 1)), r"returns \(2, 5, 1, 1\) for 2 inputs"),
        (nn.Linear(4, 2), "Linear: fails on float32 inputs of shape"),
    ],
)
def test_a_backbone_that_returns_no_features_is_refused(backbone: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OneStepDetector("digits", backbone=backbone, **SMALL).fit(draw(9, 0), draw(9, 1))


def test_shared_items_are_warned_of_with_their_count(caplog: pytest.LogCaptureFixture) -> None:
    x = gaussian(50, 0, 1.0)
    with caplog.at_level(logging.WARNING):
        detector = OneStepDetector(VECTORS, progress=False, **FAST)
        detector.fit(x, np.concatenate([gaussian(40, 1), x[:7]]))
    assert "7 of 47 reference items are ID items too" in caplog.text


PIXELS = draw(4, 0)
BAD_INPUTS = {
    "normalised": (torch.randn(4, 3, 32, 32), r"pixels from .* expected floats in \[0, 1\]"),
    "NaN": (np.full((4, 32, 32, 3), np.nan), "pixels from nan"),
    "another size": (draw(4, 0, size=28), "28 x 28 pixels, expected 32 x 32"),
    "channels first": (PIXELS.transpose(0, 3, 1, 2), r"expected images \(N, H, W, 3\)"),
    "channels last": (torch.as_tensor(PIXELS), r"expected images \(N, 3, H, W\) in a tensor"),
    "int64": (PIXELS.astype(np.int64), "images of int64"),
    "one image": (PIXELS[0, 0], "items of shape"),
    "vectors": (gaussian(4, 0), r"items of shape \(2,\), expected \(32, 32, 3\)"),
    "empty array": (PIXELS[:0], "empty"),
    "empty list": ([], "empty"),
    "a number": (3.0, "got float, expected an array"),
    "a mapping": ({"a": PIXELS}, "got dict, expected an array"),
    "numbers": ([1, 2], r"input\[0\]: got int"),
    "strings": (iter(["a"]), "input: a batch: got str"),
    "no such path": ("nowhere/at/all", "no such folder"),
    "another key": (iter([{"x": 1}]), "input: a batch: got NoneType"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_inputs_that_cannot_be_scored_are_one_line(images: OneStepDetector, name: str) -> None:
    data, message = BAD_INPUTS[name]
    with pytest.raises(UserError, match=message) as error:
        images.score(data)
    assert "\n" not in str(error.value)


BAD_FITS = {
    "one ID image": (draw(1, 0), draw(9, 1), None, "got 1 ID and 9 reference items"),
    "one reference image": (draw(9, 0), draw(1, 1), None, "got 9 ID and 1 reference items"),
    "no ID image": (draw(9, 0)[:0], draw(9, 1), None, "ID data: empty"),
    "no reference": (draw(9, 0), [], None, "reference: empty"),
    "vectors as reference": (draw(9, 0), gaussian(9, 0), None, "reference: items of shape"),
    "negative label": (draw(4, 0), draw(9, 1), [0, 1, -1, 1], "1 of 4 labels are negative"),
    "label too large": (draw(4, 0), draw(9, 1), [0, 1, 400, 1], "a label is 400"),
    "labels of others": (draw(4, 0), draw(9, 1), [0, 1], "4 items but labels of shape"),
    "vectors for images": (gaussian(9, 0), gaussian(9, 1), None, "network.kind: got resnet"),
    "NaN": (np.full((9, 2), np.nan), gaussian(9, 1), None, "9 of 9 vectors hold NaN"),
}


@pytest.mark.parametrize("name", BAD_FITS)
def test_data_that_cannot_be_fitted_are_one_line(name: str) -> None:
    id_data, reference, labels, message = BAD_FITS[name]
    with pytest.raises(UserError, match=message) as error:
        OneStepDetector("digits", **SMALL).fit(id_data, reference, labels=labels)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training__stepz": 3}, r"unknown key 'training\.stepz'; did you mean 'training\.steps'"),
        ({"trainin__steps": 3}, "unknown key 'trainin'"),
        ({"training__steps": 0}, r"training\.steps"),
        ({"device": "cuda:77"}, "device cuda:77: not available here"),
        ({"config": "digitz"}, "did you mean 'digits'"),
        ({"estimator": "classifier", "objective__endpoint": 0}, "estimator: got classifier"),
    ],
)
def test_options_are_checked_at_once(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OneStepDetector(**{"config": "digits", **options})


def test_vectors_refuse_transforms_of_images() -> None:
    with pytest.raises(UserError, match=r"data\.broaden: transforms images"):
        OneStepDetector("digits", network__kind="mlp", progress=False, **FAST).fit(
            gaussian(9, 0), gaussian(9, 1)
        )


def test_methods_come_in_order() -> None:
    detector = OneStepDetector(VECTORS, progress=False, **FAST)
    x = gaussian(9, 0)
    for method in (detector.score, detector.predict, detector.pvalue, detector.calibrate):
        with pytest.raises(UserError, match="is not fitted; call fit first"):
            method(x)
    with pytest.raises(UserError, match="is not fitted"):
        detector.save("nowhere")
    detector.fit(x, gaussian(9, 1))
    for method in (detector.predict, detector.pvalue):
        with pytest.raises(UserError, match="no threshold yet; call calibrate"):
            method(x)
    detector.calibrate(gaussian(9, 2), 0.5)
    # A threshold belongs to the model it was made with.
    with pytest.raises(UserError, match="no threshold yet"):
        detector.fit(x, gaussian(9, 1)).predict(x)


def test_a_stopped_fit_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ood_osdre.training.trainer import Trainer

    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, **kwargs: run(self, time_budget=0, **kwargs))
    detector = OneStepDetector(VECTORS, progress=False, **FAST)
    with pytest.raises(UserError, match=r"stopped \(time budget\) at step 1 of 3; saved in"):
        detector.fit(gaussian(9, 0), gaussian(9, 1), folder=tmp_path)
    assert not detector.is_fitted


def test_loading_what_is_no_detector_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint here"):
        OneStepDetector.load(tmp_path)
    detector = vector_detector(steps=3, training__warmup=1)
    metadata = {k: v for k, v in detector.scorer.metadata.items() if k != "mean"}
    write_checkpoint(tmp_path, MODEL, {}, metadata)
    with pytest.raises(UserError, match="'mean' is missing, expected a trained model"):
        OneStepDetector.load(tmp_path)
