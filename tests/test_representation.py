r"""The ratio of a frozen classifier's features: laws of the model, its stages, given classifiers."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from ood_osdre.cli import UNFINISHED, main, parser, read_config
from ood_osdre.config import Config, HeadConfig, with_seed
from ood_osdre.data import BenchmarkData, load_digits_benchmark
from ood_osdre.data.sets import hold_out_id
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors import Scorer, TrainedModel, head_data, load_scorer, read_classifier
from ood_osdre.detectors import feature_head as heads
from ood_osdre.detectors.scorer import read_model
from ood_osdre.errors import FAILED, UserError
from ood_osdre.evaluation.evaluate import Validation
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.export import TOLERANCE, export_scorer
from ood_osdre.models import (
    Classifier,
    FoldedRatio,
    NetworkDigest,
    RepresentationRatio,
    ResNetBackbone,
    TimeConditionedRatio,
    WhitenedRatio,
    classifier_features,
    whitening_of,
)
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor
from ood_osdre.stages import train_run
from ood_osdre.training import checkpoint as checkpoints
from ood_osdre.training.build import build_head
from ood_osdre.training.fit import Fit
from ood_osdre.training.run import HEAD, MODEL_FILE, STATES, Outcome, holds

CPU = torch.device("cpu")
NETWORK = {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2}
BASE = {
    "id": "digits",
    "benchmark": "digits",
    "estimator": "classifier",
    "network": NETWORK,
    "objective": {"endpoint": 0.0, "class_weight": 1.0},
    "data": {"flip": "none", "train_limit": 60, "reference_limit": 50, "val_limit": 10},
    "training": {"steps": 2, "batch_size": 8, "warmup": 1, "checkpoint_every": 1},
}
SMALL_HEAD = {
    "rank": 6,
    "width": 16,
    "depth": 1,
    "training": {"steps": 4, "batch_size": 16, "warmup": 1, "checkpoint_every": 2},
}
CONFIG = Config.from_mapping({**BASE, "head": SMALL_HEAD})


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def digits() -> BenchmarkData:
    return load_digits_benchmark()


def configured(**head: object) -> Config:
    return Config.from_mapping({**BASE, "head": {**SMALL_HEAD, **head}})


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim > 1 or "head" in name:
            nn.init.normal_(p, std=0.3)
    return model.eval()


def representation(layers: tuple[str, ...] = (), **head: object) -> RepresentationRatio:
    r"""Returns an untrained model with heads that are not zero, whitened to random images."""
    config = configured(layers=list(layers), **head)
    assert config.head is not None
    backbone = ResNetBackbone(0.125, (1, 1, 1, 1), 2)
    classifier = randomised(Classifier(backbone, 64, 5))
    x_1, x_0 = (
        classifier_features(classifier, torch.randn(40, 3, 16, 16) + shift, layers).features
        for shift in (0.0, 0.5)
    )
    whitening = whitening_of(x_1.detach(), x_0.detach(), 6)
    inner = build_head(config.head, 6, 5)
    if config.head.estimator == "gaussians":
        w_1, w_0 = whitening(x_1.detach()), whitening(x_0.detach())
        inner.backbone.fit(w_1, torch.arange(40) % 5, w_0)
    ratio = WhitenedRatio(whitening, randomised(inner))
    return RepresentationRatio(classifier, ratio, layers).eval()


# The model


def test_the_whitened_pool_has_identity_covariance_whatever_the_sizes() -> None:
    mix = torch.randn(7, 5) * torch.logspace(-2, 1, 5)
    x_1, x_0 = torch.randn(300, 7) @ mix + 3, torch.randn(2000, 7).exp() @ mix - 50
    for rank in (None, 3):
        whitening = whitening_of(x_1, x_0, rank)
        w = [whitening(x).double() for x in (x_1, x_0)]
        assert w[0].shape == (300, rank or 5)
        mean = torch.stack([x.mean(dim=0) for x in w]).mean(dim=0)
        second = torch.stack([x.T @ x / len(x) for x in w]).mean(dim=0)
        assert torch.allclose(mean, torch.zeros_like(mean), atol=1e-4)
        assert torch.allclose(second, torch.eye(len(mean)).double(), atol=1e-3)
    # The largest come first, and signs do not depend on the library's choice.
    assert torch.equal(whitening.matrix, whitening_of(x_1, x_0, None).matrix[:, :3])
    assert (whitening.matrix.gather(0, whitening.matrix.abs().argmax(0, keepdim=True)) > 0).all()


HEADS: list[dict[str, Any]] = [
    {},
    {"backbone": "linear"},
    {"backbone": "quadratic"},
    {"estimator": "direct", "objective": {"time_score": 0.0, "endpoint": 1.0}},
    {"estimator": "time_conditioned"},
    {"estimator": "gaussians", "objective": {"time_score": 0.0}},
]


@pytest.mark.parametrize("head", HEADS, ids=lambda h: "-".join(map(str, h.values())) or "default")
@pytest.mark.parametrize("layers", [(), ("net.layer2", "net.layer4")])
def test_the_folded_model_scores_alike_in_one_pass(
    head: dict[str, Any], layers: tuple[str, ...]
) -> None:
    whole, x, passes = representation(layers, **head), torch.randn(50, 3, 16, 16), []
    folded = whole.fold()
    folded.backbone.register_forward_hook(lambda *args: passes.append(1))
    with torch.no_grad():
        expected, found = whole.predict(x), folded.predict(x)
    assert len(passes) == 1
    assert (found.score - expected.score).abs().max() < 1e-5 * expected.score.std()
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(expected.logits, whole.classifier.predict(x).logits)
    # What is left of the whitening is the mean, wherever the head begins with an affine layer.
    names = {name.rpartition(".")[2] for name in folded.ratio.state_dict()}
    keeps = head.get("backbone") == "quadratic" or head.get("estimator") == "gaussians"
    assert ("matrix" in names) == keeps
    again = folded.fold().predict(x).score.detach()
    assert torch.equal(again, found.score)


def test_layers_are_read_in_the_pass_that_classifies() -> None:
    model = representation(("net.layer2", "net.layer4"))
    x = torch.randn(4, 3, 16, 16)
    features, logits = classifier_features(model.classifier, x, model.layers)
    net = model.backbone.net
    maps = net.layer2(net.layer1(net.act1(net.bn1(net.conv1(x)))))
    last = net.layer4(net.layer3(maps)).mean(dim=(2, 3))
    assert torch.allclose(features, torch.cat([maps.mean(dim=(2, 3)), last], dim=1), atol=1e-5)
    assert torch.allclose(logits, model.class_head(last), atol=1e-5)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_the_folded_model_is_one_file_from_pixels_to_score(tmp_path: Path, suffix: str) -> None:
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    model = representation(("net.layer2", "net.layer4"))
    metadata = {"config": CONFIG.to_dict(), "size": 16}
    scorer = Scorer.of(TrainedModel(model, Preprocess([0.5] * 3, [0.25] * 3), metadata))
    assert export_scorer(scorer, tmp_path / f"scorer{suffix}") <= TOLERANCE
    plugged = representation(estimator="gaussians", objective={"time_score": 0.0})
    scorer = Scorer.of(TrainedModel(plugged, Preprocess([0.5] * 3, [0.25] * 3), metadata))
    assert export_scorer(scorer, tmp_path / f"gaussians{suffix}") <= TOLERANCE
    timed = representation(estimator="time_conditioned")
    scorer = Scorer.of(TrainedModel(timed, Preprocess([0.5] * 3, [0.25] * 3), metadata))
    with pytest.raises(UserError, match="only one-step and direct ratios can be exported"):
        export_scorer(scorer, tmp_path / f"timed{suffix}")


# Its stages


@pytest.fixture(scope="module")
def finished(digits: BenchmarkData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("run")
    assert train_run(CONFIG, digits, folder, CPU, progress=False)[1].finished
    return folder


def digest(folder: Path) -> str:
    return checkpoints.read_checkpoint(folder, checkpoints.MODEL)[2]


def test_every_stage_stops_for_the_budget_and_resumes_to_the_same_weights(
    finished: Path, tmp_path: Path, digits: BenchmarkData
) -> None:
    reasons = []
    for _ in range(20):
        _, outcome, rule = train_run(CONFIG, digits, tmp_path, CPU, 0.0, True, progress=False)
        reasons.append(outcome.reason)
        assert (tmp_path / MODEL_FILE).exists() == outcome.finished
        if outcome.finished:
            break
    assert reasons[0] == "time budget, training the classifier"
    assert reasons[-2:] == ["time budget, training the head", "finished"]
    assert "head: the last step; classifier: the averaged weights of the last step" in rule
    assert digest(tmp_path) == digest(finished)
    assert outcome.seconds > 0


def interrupting(monkeypatch: pytest.MonkeyPatch, where: str, act: Callable[[], object]) -> None:
    r"""Lets something happen at the second batch of features, or at the third step of the head."""
    if where == "features":
        held, calls = head_data.classifier_features, iter(range(1000))

        def features(*args: object) -> object:
            if next(calls) == 2:  # the first looks at zeros, before anything is trained
                act()
            return held(*args)

        monkeypatch.setattr(head_data, "classifier_features", features)
        return
    pairs = heads.VectorBatches.pairs

    def batch(self: object, step: int, generator: object) -> object:
        if step == 2:
            act()
        return pairs(self, step, generator)

    monkeypatch.setattr(heads.VectorBatches, "pairs", batch)


@pytest.mark.parametrize("where", ["features", "head"])
@pytest.mark.parametrize("kind", ["signal", "death"])
def test_whatever_stops_a_stage_it_resumes_to_the_same_weights(
    finished: Path,
    tmp_path: Path,
    digits: BenchmarkData,
    where: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act() -> None:
        if kind == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise MemoryError

    interrupting(monkeypatch, where, act)
    if kind == "death":
        with pytest.raises(MemoryError):
            train_run(CONFIG, digits, tmp_path, CPU, progress=False)
    else:
        outcome = train_run(CONFIG, digits, tmp_path, CPU, progress=False)[1]
        reason = {"features": "computing features", "head": "training the head"}[where]
        assert (outcome.finished, outcome.reason) == (False, f"SIGTERM, {reason}")
    assert not (tmp_path / MODEL_FILE).exists()
    monkeypatch.undo()
    assert train_run(CONFIG, digits, tmp_path, CPU, resume=True, progress=False)[1].finished
    assert digest(tmp_path) == digest(finished)


def test_a_resumed_head_keeps_the_whitening_that_it_began_with(
    finished: Path, tmp_path: Path, digits: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    r"""Another number of threads changes the last bits of features, and with them the axes."""
    for _ in range(6):
        outcome = train_run(CONFIG, digits, tmp_path, CPU, 0.0, True, progress=False)[1]
        if outcome.reason.endswith("the head"):
            break
    whiten = heads.whitening_of

    def flipped(*args: object) -> nn.Module:
        whitening = whiten(*args)
        whitening.matrix *= -1
        return whitening

    monkeypatch.setattr(heads, "whitening_of", flipped)
    assert train_run(CONFIG, digits, tmp_path, CPU, resume=True, progress=False)[1].finished
    assert digest(tmp_path) == digest(finished)


def test_the_command_runs_resumes_evaluates_and_refuses_what_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "small.yml", tmp_path / "out"
    file.write_text(yaml.safe_dump(CONFIG.to_dict()))
    run = ["--config", str(file), "--quiet", "--device", "cpu", "--out", str(out)]
    assert main([*run, "--time-budget", "0"]) == UNFINISHED
    assert "stopped (time budget, training the classifier) at step 1" in capsys.readouterr().err
    # The folder is taken, by a run with a head and with these options.
    assert main(run) == FAILED
    assert "holds a run already" in capsys.readouterr().err
    pixels = ["head=null", "estimator=one_step", "objective.endpoint=1"]
    assert main([*run, "--resume", *pixels]) == FAILED
    assert "holds a run with a head" in capsys.readouterr().err
    assert main([*run, "--resume"]) == 0
    table = capsys.readouterr().out
    assert "Training: 6 steps" in table  # 2 of the classifier, 4 of the head
    assert main([*run, "--resume"]) == 0  # from its scores
    assert capsys.readouterr().out == table
    assert main([*run, "--resume", "head.rank=5"]) == FAILED
    assert "differs in 1 key: head.rank=6 (not 5)" in capsys.readouterr().err

    again = ["--quiet", "--device", "cpu", "--out", str(tmp_path / "again")]
    assert main(["--checkpoint", str(out), *again]) == 0
    folders = out, tmp_path / "again"
    for files in zip(
        *(read_scores(f / "scores.npz").of("near").values() for f in folders), strict=True
    ):
        np.testing.assert_array_equal(*(scores.score for scores in files))
    assert main(["--checkpoint", str(out), *again, "evaluation.score=energy"]) == FAILED
    assert "is a trained one_step" in capsys.readouterr().err


def test_a_given_classifier_is_the_one_that_was_trained_first(
    finished: Path, tmp_path: Path, digits: BenchmarkData
) -> None:
    r"""A run of a classifier, of a head on one, and of a ratio with a class head will do."""
    for source in (finished / "classifier", finished):
        folder = tmp_path / source.name
        config = CONFIG.replace(classifier=str(source))
        scorer, outcome, rule = train_run(config, digits, folder, CPU, progress=False)
        assert outcome.finished
        assert rule.endswith(f"classifier: given: {source}")
        assert [p.name for p in folder.iterdir() if p.is_dir()] == [HEAD]
        expected = load_scorer(finished).score(digits.id_test.images[:20])
        np.testing.assert_array_equal(scorer.score(digits.id_test.images[:20]), expected)


def test_of_a_run_of_several_seeds_each_takes_its_own_classifier(tmp_path: Path) -> None:
    r"""As the runs that a score is summed of do; where that seed is not there, it is told."""
    for seed, value in ((0, 0.5), (3, 0.25)):
        write_classifier(tmp_path / f"seed-{seed}", value)
    for seed, value in ((0, 0.5), (3, 0.25)):
        own = CONFIG.replace(training=CONFIG.training.replace(seed=seed))
        model = read_classifier(str(tmp_path), own, 5, 32).model
        assert model.class_head.weight.unique().tolist() == [value]
    other = CONFIG.replace(training=CONFIG.training.replace(seed=1))
    with pytest.raises(UserError, match="no checkpoint here"):
        read_classifier(str(tmp_path), other, 5, 32)


def test_the_precision_of_a_run_is_that_of_its_classifier(
    finished: Path, tmp_path: Path, digits: BenchmarkData
) -> None:
    config = CONFIG.replace(training=CONFIG.training.replace(amp="bf16"))
    assert train_run(config, digits, tmp_path, CPU, progress=False)[1].amp == "bf16"
    given = config.replace(classifier=str(finished))
    assert train_run(given, digits, tmp_path / "given", CPU, progress=False)[1].amp == "none"


def test_a_run_on_a_network_that_folds_is_read_again(
    tmp_path: Path, digits: BenchmarkData
) -> None:
    r"""As it was scored; a second head on its classifier finds the same network, and its features."""
    speed = {"kind": "speed", "width": 0.125}
    config = Config.from_mapping({**BASE, "network": speed, "head": SMALL_HEAD})
    scorer, outcome, _ = train_run(config, digits, tmp_path, CPU, progress=False)
    assert outcome.finished
    images = digits.id_test.images[:20]
    read = read_model(tmp_path)
    np.testing.assert_allclose(
        load_scorer(tmp_path).score(images), scorer.score(images), rtol=1e-5
    )
    given = read_classifier(str(tmp_path / "classifier"), config, digits.classes, 32).model
    assert NetworkDigest.of(given).digest == NetworkDigest.of(read.ratio.classifier).digest


def test_gaussians_are_fitted_in_a_run_of_their_own(
    finished: Path, tmp_path: Path, digits: BenchmarkData
) -> None:
    config = configured(estimator="gaussians", objective={"time_score": 0.0})
    config = config.replace(classifier=str(finished / "classifier"))
    scorer, outcome, rule = train_run(config, digits, tmp_path, CPU, progress=False)
    assert outcome.finished
    assert rule.startswith("head: in closed form")
    assert "held_out_log_mass_0" in outcome.best
    assert holds(tmp_path, *STATES)  # so that --resume knows a run of its own
    images = digits.id_test.images[:20]
    given = load_scorer(tmp_path)
    np.testing.assert_array_equal(given.score(images), scorer.score(images))
    before = digest(tmp_path)
    assert train_run(config, digits, tmp_path, CPU, resume=True, progress=False)[1].finished
    assert digest(tmp_path) == before
    # Against the classes' features themselves: it is the mixture of Gaussians of one covariance.
    head, data = config.head, head_data.HeadData(config, config.head, digits)
    (x_1, x_0), _ = data.features(
        read_classifier(config.classifier, config, 5, 32).model, scorer.preprocess
    )
    fitted = heads.fit_head(head, x_1, x_0, "cpu", *data.classes).model
    expected = fitted.log_ratio(x_1).detach().numpy()
    np.testing.assert_allclose(scorer.score(data.id_images.images), expected, rtol=1e-3, atol=1e-3)
    assert np.ptp(expected) > 1
    alone = heads.fit_head(head, x_1, x_0).model  # without labels, one Gaussian
    assert not torch.allclose(alone.log_ratio(x_1), fitted.log_ratio(x_1), atol=0.1)


def test_a_run_is_validated_with_its_own_solver(
    tmp_path: Path, digits: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def validate(self: object, model: nn.Module) -> dict[str, float]:
        timed = [m for m in model.modules() if isinstance(m, TimeConditionedRatio)]
        taken.extend(m.evaluations for m in timed)
        return {}

    monkeypatch.setattr(Validation, "__call__", validate)
    config = configured(estimator="time_conditioned")
    config = config.replace(evaluation=config.evaluation.replace(evaluations=7))
    assert train_run(config, digits, tmp_path, CPU, progress=False)[1].finished
    assert taken == [7]


def test_hosts_score_by_the_model_as_it_is(finished: Path, digits: BenchmarkData) -> None:
    scorer = load_scorer(finished)
    assert isinstance(scorer.ratio, RepresentationRatio)
    assert isinstance(scorer.ratio.ratio, FoldedRatio)
    x = scorer.preprocess(torch.as_tensor(digits.id_test.images[:12]))
    with torch.no_grad():
        expected = scorer.ratio.predict(x)
    for folded in (True, False):
        net, postprocessor = OSDRENet.load(finished, folded), OSDREPostprocessor()
        postprocessor.setup(net, {}, {})
        pred, conf = postprocessor.postprocess(net, x)
        assert torch.allclose(conf, expected.score, atol=1e-5)
        assert torch.equal(pred, expected.logits.argmax(dim=1))
        assert torch.allclose(net(x), expected.logits, atol=1e-5)
        assert net(x, return_feature=True)[1].shape == (12, net.feature_size)
    plugin = pytest.importorskip("ood_osdre.plugin.pytorch_ood")
    if plugin.REASON is None:
        pixels = torch.as_tensor(digits.id_test.images[:12]).permute(0, 3, 1, 2) / 255
        found = plugin.OneStepRatioDetector(scorer).predict(pixels)
        assert torch.allclose(-found, expected.score, atol=1e-5)


def test_features_come_from_the_images_that_are_asked_for(
    digits: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ood_osdre.training.batches.broaden", lambda x, _: torch.zeros_like(x))
    data = {**BASE["data"], "train_limit": None, "hold_out_id": 40, "broaden": 0.5, "mixture": 0.2}
    model, broadened = representation().classifier, []
    preprocess = Preprocess([0.3] * 3, [0.3] * 3)
    black = classifier_features(model, preprocess(torch.zeros(1, 32, 32, 3).byte())).features
    for id_from in ("train", "held_out"):
        head = {**SMALL_HEAD, "id_from": id_from}
        batches = {"batch_size": 8}
        config = Config.from_mapping({**BASE, "data": data, "head": head, "evaluation": batches})
        images = head_data.HeadData(config, config.head, digits)
        expected = hold_out_id(digits.id_train, 40)[id_from == "held_out"]
        np.testing.assert_array_equal(images.id_images.images, expected.images)
        (x_1, x_0), stopped = images.features(model, preprocess)
        # The rest of the reference are ID images, which fit_head draws.
        assert (len(x_1), len(x_0), images.mixed, stopped) == (len(expected), 40, 10, "")
        broadened.append(sum(bool(x.isclose(black).all()) for x in x_0) / 50)
    assert broadened == [0.5, 0.5]


def test_id_images_in_the_reference_are_split_with_their_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []

    def fit(model: nn.Module, _: object, batches: object, *args: object, **kwargs: object) -> Fit:
        taken.extend([batches.id_train, batches.reference])
        return Fit(model, Outcome(finished=True))

    def watch(
        id_held: Tensor, held: Tensor, *_: object
    ) -> Callable[[nn.Module], dict[str, float]]:
        taken.extend((id_held, held))
        return lambda _: {}

    monkeypatch.setattr(heads, "fit", fit)
    monkeypatch.setattr(heads, "_HeldOut", watch)
    x_1, x_0 = torch.randn(100, 8), torch.randn(80, 8) + 9
    heads.fit_head(HeadConfig(held_out=0.25), x_1, x_0, mixed=20)
    id_held, held, id_train, train = taken[:4]
    assert [len(x) for x in taken[:4]] == [25, 25, 75, 75]

    def copies(x: Tensor, of: Tensor) -> int:
        return int(x[:, None].isclose(of, atol=1e-4).all(dim=2).any(dim=1).sum())

    assert (copies(train, id_train), copies(held, id_held)) == (15, 5)
    assert (copies(train, id_held), copies(held, id_train)) == (0, 0)


def test_a_head_is_calibrated_on_what_it_was_not_trained_on_as_its_objective_sees_it() -> None:
    r"""Of N(0.6, 1) and N(-0.6, 1) the log-ratio is 1.2 x; with noise of variance eps less steep."""
    eps, m = 0.25, 0.6
    torch.manual_seed(0)
    x_1, x_0 = torch.randn(100_000, 1) + m, torch.randn(100_000, 1) - m
    head = HeadConfig.of({**SMALL_HEAD, "rank": None, "path": {"eps": eps}}, "head")
    noisy = heads._dequantised(head, x_1, x_0)
    clean = [nn.Linear(1, 1, bias=False) for _ in "ab"]
    for layer, slope in zip(clean, (2 * m, 2 * m / (1 + eps)), strict=True):
        nn.init.constant_(layer.weight, slope)
    steep, flat = (FoldedRatio(nn.Identity(), layer) for layer in clean)
    for ratio, ends, mass in (
        (steep, (x_1, x_0), 0.0),
        (flat, noisy, 0.0),
        (steep, noisy, 2 * m * m * eps),  # log E exp(2 m w), w ~ N(-m, 1 + eps)
    ):
        rows = (torch.arange(100_000),) * 2
        numbers = heads._HeldOut(*ends, rows, "x")(ratio)
        assert numbers["x_log_mass_0"] == pytest.approx(mass, abs=0.03)
        assert numbers["x_log_mass_1"] == pytest.approx(mass, abs=0.03)
    both = ["held_out", "held_out_noisy"]
    direct = {"time_score": 0.0, "endpoint": 1.0}
    for objective, expected in (
        ({}, both), (direct, both), ({**direct, "endpoint_clean": True}, both[:1])
    ):  # fmt: skip
        told = heads.fit_head(
            head.replace(objective=head.objective.replace(**objective)), x_1[:60], x_0[:60]
        )
        best = told.outcome.best
        assert [k.removesuffix("_log_mass_0") for k in best if k.endswith("mass_0")] == expected


def test_transforms_of_the_reference_follow_the_seed(digits: BenchmarkData) -> None:
    model, preprocess = representation().classifier, Preprocess([0.3] * 3, [0.3] * 3)
    found = []
    for seed in (0, 1, 1):
        config = Config.from_mapping({**BASE, "data": {"broaden": 1.0}, "head": SMALL_HEAD})
        images = head_data.HeadData(with_seed(config, seed), config.head, digits)
        images.reference = images.reference.subset(range(12))
        found.append(images.features(model, preprocess)[0][1].sort(dim=0).values)
    assert torch.equal(found[1], found[2])
    assert not torch.allclose(found[0], found[1])


def test_limits_and_seeds_reach_the_head(tmp_path: Path) -> None:
    file = tmp_path / "small.yml"
    file.write_text(yaml.safe_dump(CONFIG.to_dict()))
    args = parser().parse_args(["--config", str(file), "--max-steps", "3"])
    config = read_config(args, args.config)
    assert (config.training.steps, config.head.training.steps) == (2, 3)
    moved = with_seed(configured(training={**SMALL_HEAD["training"], "seed": 5}), 2)
    assert (moved.training.seed, moved.head.training.seed) == (2, 7)


# Classifiers of others


def named_as_openood(classifier: Classifier) -> dict[str, Tensor]:
    names = {k: v for k, v in classifier.state_dict().items()}
    renamed = {}
    for key, value in names.items():
        key = key.removeprefix("backbone.net.").replace("downsample", "shortcut")
        renamed[key.replace("class_head", "fc")] = value
    return renamed


def openood_forward(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    r"""A ResNet-18 of 32x32 images, by the names that OpenOOD gives its parts."""

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def norm(x: Tensor, name: str) -> Tensor:
        parts = [tensors[f"{name}.{p}"] for p in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(x, *parts)

    x = norm(conv(x, "conv1"), "bn1").relu()
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            name, stride = f"layer{layer}.{block}", 2 if layer > 1 and not block else 1
            y = norm(conv(x, f"{name}.conv1", stride), f"{name}.bn1").relu()
            y = norm(conv(y, f"{name}.conv2"), f"{name}.bn2")
            if stride > 1:
                x = norm(conv(x, f"{name}.shortcut.0", stride), f"{name}.shortcut.1")
            x = (x + y).relu()
    return F.linear(x.mean(dim=(2, 3)), tensors["fc.weight"], tensors["fc.bias"])


@pytest.mark.parametrize("wrap", [False, True])
def test_openoods_resnet_is_read(tmp_path: Path, wrap: bool) -> None:
    torch.manual_seed(0)
    classifier = Classifier(ResNetBackbone(), 512, 10)
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    tensors = named_as_openood(classifier.eval())
    saved = {"state_dict": {f"module.{k}": v for k, v in tensors.items()}} if wrap else tensors
    torch.save(saved, tmp_path / "best.ckpt")
    given = read_classifier(str(tmp_path / "best.ckpt"), CONFIG, 10, 32)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        logits = given.model.predict(x).logits
        assert torch.allclose(logits, openood_forward(tensors, x), rtol=1e-3, atol=1e-3)


def test_networks_of_timm_and_of_our_trainer_are_read(tmp_path: Path) -> None:
    net = timm.create_model("test_resnet", num_classes=5).eval()
    torch.save(net.state_dict(), tmp_path / "timm.pth")
    given = read_classifier(f"timm:test_resnet@{tmp_path}/timm.pth", CONFIG, 5, 32)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected, found = net(x), given.model.predict(x)
        assert torch.allclose(found.logits, expected, atol=1e-5)
        features = classifier_features(given.model, x, ["layer3", "layer4"]).features
    assert features.shape == (2, sum(net.feature_info[i]["num_chs"] for i in (-2, -1)))

    own = OSDRENet.build(
        Config.from_mapping({"network": NETWORK, "objective": {"class_weight": 1}}), 5
    )
    torch.save(own.state_dict(), tmp_path / "best.ckpt")
    given = read_classifier(str(tmp_path / "best.ckpt"), CONFIG, 5, 32)
    with torch.no_grad():
        assert torch.allclose(given.model.predict(x).logits, own.eval()(x), atol=1e-5)


def write_classifier(folder: Path, value: float | None = None, **changes: object) -> str:
    r"""Writes a run of a classifier, of the digits, whose weights have a value."""
    config = Config.from_mapping({**BASE, **{k: v for k, v in changes.items() if k == "id"}})
    model = Classifier(ResNetBackbone(0.125, (1, 1, 1, 1), 2), 64, int(changes.get("classes", 5)))
    for p in model.parameters() if value is not None else ():
        nn.init.constant_(p, value)
    metadata = {"config": config.to_dict(), "classes": changes.get("classes", 5), "size": 32}
    metadata |= {"mean": [0.5] * 3, "std": [0.25] * 3, **changes}
    metadata.pop("id", None)
    checkpoints.write_checkpoint(folder, checkpoints.MODEL, model.state_dict(), metadata)
    return str(folder)


def saved(path: Path, content: object) -> str:
    torch.save(content, path)
    return str(path)


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, object], str]] = {
    "no file": (lambda p: str(p / "none"), {}, "none: no weights"),
    "no weights": (lambda p: saved(p / "x.pt", [1]), {}, "got list, expected tensors by name"),
    "code": (lambda p: saved(p / "x.pt", Path), {}, "x.pt: no weights"),
    "other names": (lambda p: saved(p / "x.pt", {"a": torch.ones(1)}), {}, "got tensors a"),
    "no run": (lambda p: str(p), {}, "no checkpoint here"),
    "other classes": (
        lambda p: write_classifier(p / "c", classes=7),
        {},
        "has 7 classes, expected 5",
    ),
    "another set": (
        lambda p: write_classifier(p / "c", id="cifar10"),
        {},
        "id cifar10, expected digits",
    ),
    "another size": (lambda p: write_classifier(p / "c", size=16), {}, "size 16, expected 32"),
    "NaN": (lambda p: write_classifier(p / "c", float("nan")), {}, "NaN or infinity"),
    "NaN features": (
        lambda p: write_classifier(p / "c", 1e38),
        {},
        "ID features: 60 of 60 inputs hold NaN",
    ),
    "all alike": (
        lambda p: write_classifier(p / "c", 0.0),
        {},
        "all 60 of a set are copies of one",
    ),
    "no name": (lambda p: "timm:resnet18", {}, "expected timm:NAME@FILE"),
    "unknown name": (lambda p: "timm:resnet_18@x", {}, "no model 'resnet_18' .did you mean"),
    "no layer": (
        lambda p: None,
        {"layers": ["net.layer9"]},
        r"has no layer 'net.layer9', .*last are: .*net\.layer3, net\.layer4",
    ),
    "rank": (
        lambda p: None,
        {"rank": 65},
        "head.rank: got 65, expected at most 64, the number of features",
    ),
    "images": (
        lambda p: None,
        {"rank": 110, "layers": ["net.layer3", "net.layer4", "net.layer2", "net.layer1"]},
        "head.rank: got 110, expected at most 109, the number of images",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_head_can_be_put_on_is_refused_in_one_line_and_leaves_nothing(
    name: str, tmp_path: Path, digits: BenchmarkData
) -> None:
    make, head, message = REFUSED[name]
    config = configured(**head).replace(classifier=make(tmp_path))
    out = tmp_path / "out"
    with pytest.raises(UserError, match=message) as caught:
        train_run(config, digits, out, CPU, progress=False)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not out.exists() or not list(out.rglob("*"))
