r"""Tests for the ood_osdre.plugin.pytorch_ood module, inside pytorch-ood itself."""

import pickle
import sys
from collections.abc import Iterator
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from ood_osdre.config import HeadConfig
from ood_osdre.data import ImageSet
from ood_osdre.detectors.one_step import OneStepDetector
from ood_osdre.errors import UserError
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import Scores

api = pytest.importorskip("pytorch_ood.api")
plugin = import_module("ood_osdre.plugin.pytorch_ood")

SMALL = {
    "network__width": 0.125,
    "training__steps": 20,
    "training__batch_size": 16,
    "training__warmup": 2,
    "training__lr": 3e-3,
    "progress": False,
    "device": "cpu",
}
HEAD = HeadConfig.of(
    {
        "width": 16,
        "depth": 1,
        "basis": {"size": 4},
        "training": {"steps": 200, "batch_size": 64, "lr": 1e-2},
    },
    "head",
)
KEYS = {"AUROC": "auroc", "AUPR-IN": "aupr_in", "AUPR-OUT": "aupr_out", "FPR95TPR": "fpr95"}


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def draw(n: int, seed: int, shade: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(shade, shade + 128, (n, 32, 32, 3), dtype=np.uint8)


def pixels(images: np.ndarray) -> Tensor:
    r"""Returns what ToTensor makes of images."""
    return torch.as_tensor(images).permute(0, 3, 1, 2).contiguous() / 255


def batches(id_items: Tensor, ood_items: Tensor, size: int = 16) -> DataLoader:
    x = torch.cat([id_items, ood_items])
    y = torch.cat([torch.arange(len(id_items)) % 3, torch.full((len(ood_items),), -1)])
    return DataLoader(TensorDataset(x, y), batch_size=size)


def evaluated(detector: object, loader: DataLoader) -> tuple[dict[str, float], Tensor]:
    from pytorch_ood.metrics import OODMetrics

    metrics, scores = OODMetrics(), []
    for x, y in loader:
        scores.append(detector(x))  # type: ignore[operator]
        metrics.update(scores[-1], y)
    return metrics.compute(), torch.cat(scores)


@pytest.fixture(scope="module")
def fitted() -> OneStepDetector:
    torch.set_default_dtype(torch.float32)
    return OneStepDetector("digits", **SMALL).fit(draw(80, 0, 90), draw(80, 1))


def test_scores_are_the_detectors_with_their_sign(fitted: OneStepDetector) -> None:
    id_test, ood = draw(60, 2, 80), draw(70, 3, 60)
    detector = plugin.OneStepRatioDetector(fitted)
    result, scores = evaluated(detector, batches(pixels(id_test), pixels(ood)))

    assert isinstance(detector, api.Detector)
    assert 0.5 < result["AUROC"] < 1
    # Their sign: larger = more OOD.
    ours = np.concatenate([fitted.score(id_test), fitted.score(ood)])
    np.testing.assert_allclose(-scores, ours, atol=1e-6 * ours.std() + 1e-6)
    assert scores[60:].mean() > scores[:60].mean()


def test_a_whole_table_agrees_through_their_benchmark(fitted: OneStepDetector) -> None:
    r"""Their Benchmark.evaluate, with ties between ID and OOD, against our metrics."""
    from pytorch_ood.benchmark.base import Benchmark

    id_test, sets = draw(50, 2, 80), {"a": draw(30, 4, 60), "b": draw(40, 5, 100)}
    sets["b"][:10] = id_test[:10]
    mixed = {name: batches(pixels(id_test), pixels(s)).dataset for name, s in sets.items()}

    class Toy(Benchmark):
        ood_names = tuple(sets)

        def train_set(self) -> None:
            return None

        def test_sets(self, known: bool = True, unknown: bool = True) -> list[TensorDataset]:
            assert known
            assert unknown
            return list(mixed.values())

    detector = plugin.OneStepRatioDetector(fitted)
    rows = Toy().evaluate(detector, loader_kwargs={"batch_size": 25})
    scores = Scores()
    for name, data in mixed.items():
        score = torch.cat([-detector(x) for x, _ in DataLoader(data, batch_size=25)]).numpy()
        if not scores.of("id"):
            scores.add("id", "toy", score[:50], np.zeros(50), [""] * 50)
        scores.add("near", name, score[50:], np.full(len(score) - 50, -1), [""] * len(score[50:]))

    assert [row["Dataset"] for row in rows] == list(sets)
    for row in rows:
        ours = scores.metrics()["near"][row["Dataset"]]
        for key, name in KEYS.items():
            assert row[key] == pytest.approx(getattr(ours, name), abs=1e-9), (row["Dataset"], key)


def test_fit_trains_on_a_loader_whose_negative_labels_are_the_reference() -> None:
    detector = plugin.OneStepRatioDetector(OneStepDetector("digits", **SMALL))
    assert detector.requires_fit
    with pytest.raises(api.RequiresFittingException):
        detector.predict(pixels(draw(2, 0)))
    detector.fit(batches(pixels(draw(80, 0, 90)), pixels(draw(80, 1))))
    result, _ = evaluated(detector, batches(pixels(draw(50, 2, 90)), pixels(draw(50, 3))))

    assert not detector.requires_fit
    assert result["AUROC"] > 0.9


def test_a_bare_ratio_takes_network_inputs(fitted: OneStepDetector) -> None:
    x = pixels(draw(5, 6))
    whole, bare = (
        plugin.OneStepRatioDetector(model) for model in (fitted.scorer, fitted.scorer.ratio)
    )
    normalised = fitted.scorer.preprocess.normalise(x)

    assert torch.equal(whole.predict(x), bare.predict(normalised))
    assert bare.fit([]) is bare
    with pytest.raises(UserError, match=r"expected pixels in \[0, 1\]"):
        whole.predict(normalised)
    for model, found in ((nn.Linear(1, 1), "got Linear"), ("runs/digits", "got 'runs/digits'")):
        with pytest.raises(UserError, match=f"model: {found}.*load_scorer"):
            plugin.OneStepRatioDetector(model)


@pytest.mark.parametrize("kind", ["whole", "head"])
def test_detectors_move_and_pickle(fitted: OneStepDetector, kind: str) -> None:
    if kind == "whole":
        detector, x = plugin.OneStepRatioDetector(fitted), pixels(draw(4, 7))
    else:
        detector, x = head_on(nn.Identity()), torch.randn(4, 3)
    expected = detector.predict(x)

    assert detector.to("cpu") is detector
    assert detector.device == torch.device("cpu")
    assert torch.equal(detector.predict(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(detector)).predict(x), expected)


def gaussians(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator) + 1, torch.randn(n, 3, generator=generator)


def head_on(encoder: nn.Module | None) -> object:
    detector = plugin.FeatureRatioDetector(encoder, HEAD)
    x_1, x_0 = gaussians(1000, 0)
    if encoder is None:
        labels = torch.cat([torch.zeros(1000), -torch.ones(1000)])
        return detector.fit_features(torch.cat([x_1, x_0]), labels)
    return detector.fit(batches(x_1, x_0, 128))


def test_a_head_on_frozen_features_scores_with_their_sign() -> None:
    r"""For unit Gaussians at (1, 1, 1) and 0, log r(x) is x_1 + x_2 + x_3 - 3/2."""
    encoder = nn.Sequential(nn.Linear(3, 3, bias=False))
    nn.init.eye_(encoder[0].weight)
    detector = head_on(encoder)
    x_1, x_0 = gaussians(500, 1)
    result, scores = evaluated(detector, batches(x_1, x_0))
    truth = 1.5 - torch.cat([x_1, x_0]).sum(dim=1)

    assert isinstance(detector, api.FeaturesDetector)
    assert detector.info.tasks == {api.Task.CLASSIFICATION}
    assert np.corrcoef(scores, truth)[0, 1] > 0.95
    exact = ood_metrics((-truth[:500]).numpy(), (-truth[500:]).numpy())
    assert result["AUROC"] == pytest.approx(exact.auroc, abs=0.02)
    assert torch.equal(scores[:16], detector.predict_features(encoder(x_1[:16])).detach())


@pytest.mark.parametrize(
    ("end", "warned"),
    [
        ([nn.Linear(6, 3)], True),  # as many as there are classes
        ([nn.Linear(6, 1000)], True),
        ([nn.Linear(6, 4)], False),
        ([nn.Linear(6, 3), nn.Identity()], False),
    ],
)
def test_a_class_head_left_on_the_encoder_is_told(
    end: list[nn.Module], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head = HeadConfig.of({"width": 4, "depth": 1, "rank": 2, "training": {"steps": 2}}, "head")
    loader = batches(torch.randn(40, 6) + 1, torch.randn(40, 6))
    body, (last, *rest) = nn.Linear(6, 6), end
    plugin.FeatureRatioDetector(nn.Sequential(body, last, *rest), head).fit(loader)
    text = f"encoder: the features are the logits of its class head of {last.out_features}; put"
    assert (text in caplog.text) == warned
    if warned:  # what comes from below the head, or another function, is what is wanted

        class Below(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.last = body, last

            def forward(self, x: Tensor) -> Tensor:
                return self.body(x)

        caplog.clear()
        for encoder in (Below(), body.forward):
            plugin.FeatureRatioDetector(encoder, head).fit(loader)
        assert "class head" not in caplog.text


def test_layers_are_the_encoders_own() -> None:
    with pytest.raises(UserError, match=r"layers: got .*2.*, expected none"):
        plugin.FeatureRatioDetector(nn.Identity(), {"layers": ["2"]})


@pytest.mark.parametrize(
    ("features", "found"),
    [(lambda x: (x, x), "in a tuple"), (lambda x: x.mean((1, 2, 3)), r"of shape \(1,\)")],
    ids=["tuple", "numbers"],
)
def test_an_encoder_without_a_row_for_each_is_told(features: object, found: str) -> None:
    loader = [(torch.rand(2, 3, 4, 4), torch.tensor([0, -1]))]
    detector = plugin.FeatureRatioDetector(features, HEAD, broaden=0)
    with pytest.raises(UserError, match=f"^encoder: got features {found} for [12] input"):
        detector.fit(loader)


def test_features_alone_suffice() -> None:
    detector = head_on(None)
    x_1, x_0 = gaussians(200, 2)
    assert detector.predict_features(x_0).mean() > detector.predict_features(x_1).mean()
    with pytest.raises(api.ModelNotSetException):
        detector.predict(x_0)
    with pytest.raises(api.RequiresFittingException):
        plugin.FeatureRatioDetector(None).predict_features(x_0)


def test_a_reference_that_is_kept_has_its_digits() -> None:
    x_1, x_0 = (x.double() + 1e9 for x in gaussians(200, 2))
    y = torch.cat([torch.zeros(len(x_1)), -torch.ones(len(x_0))])
    detector = plugin.FeatureRatioDetector(None, HEAD).fit_features(torch.cat([x_1, x_0]), y)
    expected = detector.predict_features(x_1)
    assert torch.equal(detector.fit_features(x_1, y[y >= 0]).predict_features(x_1), expected)


@pytest.mark.parametrize("label", [0, -1])
def test_both_sides_are_needed(label: int) -> None:
    x, y = torch.randn(10, 3), torch.full((10,), label)
    message = f"{10 if label < 0 else 0} of 10 labels are below 0, expected both"
    with pytest.raises(ValueError, match=message):
        plugin.FeatureRatioDetector(None).fit_features(x, y)
    detector = plugin.OneStepRatioDetector(OneStepDetector("digits", **SMALL))
    with pytest.raises(ValueError, match=message):
        detector.fit([(torch.rand(10, 3, 32, 32), y)])
    with pytest.raises(ValueError, match="0 of 0 labels are below 0"):
        detector.fit([])
    with pytest.raises(UserError, match=r"shapes \[\(3, 16, 16\), \(3, 32, 32\)\], expected one"):
        detector.fit([(torch.rand(2, 3, n, n), torch.tensor([0, -1])) for n in (32, 16)])


# Images as the host's other detectors take them

MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.3, 0.25)


class Shown(TensorDataset):
    r"""Normalised images beside the transform that made them, as torchvision's sets have it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__((x - channels(MEAN)) / channels(STD), y)
        norm = type("Normalize", (), {"mean": MEAN, "std": STD})()
        self.transform = type("Compose", (), {"transforms": [lambda x: x, norm]})()


def channels(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def normalised(loader: DataLoader) -> DataLoader:
    return DataLoader(Shown(*loader.dataset.tensors), batch_size=loader.batch_size)


def without_transform(loader: DataLoader) -> DataLoader:
    return DataLoader(TensorDataset(*loader.dataset.tensors), batch_size=loader.batch_size)


class Watched(nn.Module):
    r"""An encoder that keeps what it was shown, and whose features are the channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x.mean(dim=(2, 3))


TINY = {"width": 8, "depth": 1, "training": {"steps": 5, "batch_size": 16}}


def test_a_third_of_the_reference_is_broadened_in_pixels_and_nothing_else() -> None:
    id_images, reference = pixels(draw(30, 0)), pixels(draw(60, 1))
    # Batches of one or two reference images, of which no share could be taken one by one.
    plain = batches(id_images, reference, size=2)
    loader = normalised(plain)
    for share, expected in ((0.33, 20), (0.0, 0)):
        encoder = Watched()
        plugin.FeatureRatioDetector(encoder, TINY, broaden=share).fit(loader)
        shown = [x * channels(STD) + channels(MEAN) for x in encoder.seen]
        changed, given = torch.cat(shown[15:]), reference
        assert torch.allclose(torch.cat(shown[:15]), id_images, atol=1e-6)
        assert (~torch.isclose(changed, given, atol=1e-6).flatten(1).all(1)).sum() == expected
        assert -1e-6 < changed.min() <= changed.max() < 1 + 1e-6


def test_statistics_are_given_or_the_transforms_or_the_images_are_pixels() -> None:
    plain = batches(pixels(draw(40, 0, 60)), pixels(draw(40, 1)))
    hidden, x = without_transform(normalised(plain)), pixels(draw(9, 2))
    x_normalised, options = (x - channels(MEAN)) / channels(STD), {"mean": MEAN, "std": STD}
    scores = []
    for loader, given in ((normalised(plain), {}), (hidden, options)):
        detector = plugin.FeatureRatioDetector(Watched(), TINY, **given).fit(loader)
        scores.append(detector.predict(x_normalised))
    assert torch.equal(*scores)
    # A set of several, and a part of one.
    nested = ConcatDataset([Subset(normalised(plain).dataset, range(80))])
    detector = plugin.FeatureRatioDetector(Watched(), TINY).fit(DataLoader(nested, batch_size=16))
    assert torch.equal(detector.predict(x_normalised), scores[0])

    plugin.FeatureRatioDetector(Watched(), TINY).fit(plain)  # pixels need nothing
    plugin.FeatureRatioDetector(Watched(), TINY, broaden=0).fit(hidden)
    with pytest.raises(UserError, match=r"values from -.* expected pixels in .* mean= and std="):
        plugin.FeatureRatioDetector(Watched(), TINY).fit(hidden)
    other = Shown(*plain.dataset.tensors)
    other.transform = type("Normalize", (), {"mean": [0.5], "std": [0.5]})()
    mixed = DataLoader(ConcatDataset([other, normalised(plain).dataset]))
    with pytest.raises(UserError, match="normalised by different means or deviations"):
        plugin.FeatureRatioDetector(Watched(), TINY).fit(mixed)
    for wrong, message in (
        ({"mean": MEAN}, "give both 'mean' and 'std'"),
        ({"mean": MEAN, "std": [1.0]}, "expected 3 numbers"),
        ({"broaden": 2.0}, "broaden: got 2"),
    ):
        with pytest.raises(UserError, match=message):
            plugin.FeatureRatioDetector(None, **wrong)


def test_a_network_is_trained_and_scores_as_on_pixels() -> None:
    plain, short = batches(pixels(draw(40, 0, 90)), pixels(draw(40, 1))), {**SMALL}
    short |= {"training__steps": 3, "training__eval_every": 3}
    one, two = (plugin.OneStepRatioDetector(OneStepDetector("digits", **SMALL)) for _ in range(2))
    x = pixels(draw(6, 9))
    expected = one.fit(plain).predict(x)
    found = two.fit(normalised(plain)).predict((x - channels(MEAN)) / channels(STD))
    assert torch.allclose(found, expected, atol=1e-5)
    # A trained model learns from the loader how its images are normalised.
    trained = plugin.OneStepRatioDetector(one._detector.scorer)
    with pytest.raises(UserError, match=r"expected pixels in \[0, 1\]"):
        trained.predict((x - channels(MEAN)) / channels(STD))
    trained.fit(normalised(plain))
    assert torch.allclose(
        trained.predict((x - channels(MEAN)) / channels(STD)), expected, atol=1e-5
    )


def test_a_network_broadens_unless_told_otherwise() -> None:
    loader = batches(pixels(draw(20, 0, 90)), pixels(draw(20, 1)))
    own = {"network.stem_stride": 2, "network.depths": [1, 1, 1, 1]}
    options = {**SMALL, "training__steps": 1, "training__warmup": 0}
    for config, given, expected in (
        ({}, None, 0.33),
        ({"data.broaden": 0.2}, None, 0.2),
        ({"data.broaden": 0.2}, 0.0, 0.0),
    ):
        base = OneStepDetector({**own, **config}, **options)
        detector = plugin.OneStepRatioDetector(base, broaden=given).fit(loader)
        assert base.config.data.broaden == expected
        assert detector.get_hyperparameters() == {"data.broaden": expected}


# The host's search of hyper-parameters


@pytest.mark.parametrize("is_fitted", [False, True])
def test_a_grid_search_trains_every_head_with_the_reference(is_fitted: bool) -> None:
    from pytorch_ood.utils import GridSearch

    fit = batches(pixels(draw(40, 0, 60)), pixels(draw(40, 1)))
    val = batches(pixels(draw(30, 2, 60)), pixels(draw(30, 3)))
    encoder = Watched()
    detector = plugin.FeatureRatioDetector(encoder, TINY)
    if is_fitted:
        detector.fit(fit)
        encoder.seen.clear()
    search = GridSearch(detector, fit, val, hyperparameter_space={"training.steps": [1, 30]})
    best = search.run()

    scores = [r["score"] for r in search.results_]
    assert best["training.steps"] == (30 if scores[1] > scores[0] else 1)
    assert detector.get_hyperparameters() == best
    assert max(scores) > 0.9
    x = next(iter(val))[0]
    assert torch.equal(detector.predict(x), detector.predict_features(encoder(x)))
    # Both sets once, of a detector that keeps a reference: no head needs its images again.
    assert (len(encoder.seen) < 20) == is_fitted


def test_what_is_searched_are_options_and_a_trained_ratio_has_none(
    fitted: OneStepDetector,
) -> None:
    head = plugin.FeatureRatioDetector(None)
    assert set(head.get_hyperparameters()) == set(plugin.FeatureRatioDetector.hyperparameter_space)
    network = plugin.OneStepRatioDetector(OneStepDetector("digits", **SMALL))
    for detector in (head, network):
        for name, values in detector.hyperparameter_space.items():
            for value in values:
                assert detector.set_hyperparameters(**{name: value}).requires_fit
                assert detector.get_hyperparameters()[name] == value
        with pytest.raises(UserError, match="unknown key 'foo'"):
            detector.set_hyperparameters(foo=1)
    trained = plugin.OneStepRatioDetector(fitted.scorer)
    assert trained.hyperparameter_space == trained.get_hyperparameters() == {}
    with pytest.raises(UserError, match="a trained ratio has none"):
        trained.set_hyperparameters(**{"data.broaden": 0.1})


@pytest.fixture
def without_pytorch_ood(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    name = "ood_osdre.plugin.pytorch_ood"
    for module in [m for m in sys.modules if m.split(".")[0] == "pytorch_ood"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pytorch_ood.api", None)
    monkeypatch.delitem(sys.modules, name)
    yield import_module(name)
    sys.modules.pop(name, None)


def test_without_pytorch_ood_what_to_install_is_named(without_pytorch_ood: object) -> None:
    for name in ("OneStepRatioDetector", "FeatureRatioDetector"):
        with pytest.raises(ImportError, match=r"pip install 'pytorch-ood>=0"):
            getattr(without_pytorch_ood, name)(None)


@pytest.mark.slow
def test_an_image_set_fits_alike() -> None:
    r"""Pixels that came through ToTensor are the images that they came from."""
    id_images, reference = draw(40, 0, 90), draw(40, 1)
    loader = batches(pixels(id_images), pixels(reference))
    ours = OneStepDetector("digits", **SMALL).fit(
        ImageSet(id_images, np.arange(40) % 3, [""] * 40), reference
    )
    theirs = plugin.OneStepRatioDetector(OneStepDetector("digits", **SMALL)).fit(loader)
    x = draw(6, 9)
    np.testing.assert_allclose(-theirs.predict(pixels(x)), ours.score(x), atol=1e-5)
