r"""Tests for the modules ood_osdre.evaluation.evaluate, .scorer .runs and .stages, at small size."""

import csv
import json
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ood_osdre import runs, stages
from ood_osdre.config import Config
from ood_osdre.data import BenchmarkData, load_digits_benchmark, load_manifest
from ood_osdre.data.sets import hold_out_id
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors.scorer import Scorer, load_scorer
from ood_osdre.errors import UserError
from ood_osdre.evaluation.evaluate import (
    Validation,
    evaluate_benchmark,
    score_images,
    scoring_model,
)
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.models.baselines import TimeConditionedRatio
from ood_osdre.models.bases import RBFBasis
from ood_osdre.models.networks import Coefficients
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.runs import evaluate_run
from ood_osdre.sections import EvaluationConfig
from ood_osdre.stages import train_run
from ood_osdre.training.build import build_ratio
from ood_osdre.training.run import Outcome

SMALL = {
    "id": "digits",
    "benchmark": "digits",
    "network": {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2},
    "training": {
        "steps": 4,
        "batch_size": 8,
        "warmup": 1,
        "eval_every": 2,
        "ema": 0.5,
        "amp": "none",
    },
    "data": {"val_limit": 20, "flip": "none"},
    "objective": {"class_weight": 0.5},
}
CONFIG, CPU = Config.from_mapping(SMALL), torch.device("cpu")


@pytest.fixture(scope="module")
def digits() -> BenchmarkData:
    return load_digits_benchmark()


@pytest.fixture(scope="module")
def small(digits: BenchmarkData) -> BenchmarkData:
    r"""Returns a benchmark of few test images."""
    few = np.arange(40)
    near, far = (
        {name: images.subset(few) for name, images in sets.items()}
        for sets in (digits.near, digits.far)
    )
    return replace(digits, id_test=digits.id_test.subset(few), near=near, far=far)


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


class Brightness(torch.nn.Module):
    r"""A network whose only coefficient is the mean input, with two classes."""

    def forward(self, x: torch.Tensor) -> Coefficients:
        mean = x.flatten(1).mean(1, keepdim=True)
        return Coefficients(mean, logits=torch.cat([-mean, mean], dim=1))


def brightness() -> OneStepRatio:
    basis = RBFBasis(size=1, learnable=False)
    return OneStepRatio(Brightness(), basis)


PREPROCESS = Preprocess((0.5,) * 3, (0.25,) * 3)


def test_scores_are_log_ratios_in_the_order_of_the_images() -> None:
    images = np.arange(7, dtype=np.uint8)[:, None, None, None].repeat(4, 1).repeat(4, 2)
    images = images.repeat(3, 3) * 30
    ratio = brightness()
    scores, predicted = score_images(ratio, images, PREPROCESS, batch_size=3)

    gbar = float(ratio.basis.integral().detach())
    expected = (images.mean((1, 2, 3)) / 255 - 0.5) / 0.25 * gbar
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
    assert predicted is not None
    assert predicted.tolist() == (expected > 0).astype(int).tolist()


def test_a_process_without_rows_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ood_osdre.training.distributed.share", lambda size: slice(0, 0))
    ratio = build_ratio(CONFIG, classes=5)

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        assert len(inputs[0])  # not every network takes an empty batch

    ratio.network.register_forward_pre_hook(check)
    images = np.zeros((2, 32, 32, 3), dtype=np.uint8)
    scores, predicted = score_images(ratio, images, PREPROCESS)
    assert predicted is not None
    assert (scores.shape, scores.dtype) == ((0,), np.float32)
    assert (predicted.shape, predicted.dtype) == ((0,), np.int64)


def test_memory_of_scoring_is_that_of_one_batch() -> None:
    class Made:
        r"""Images that exist only where they are looked at."""

        taken = 0

        def __len__(self) -> int:
            return 640

        def __getitem__(self, rows: slice) -> np.ndarray:
            count = len(range(*rows.indices(len(self))))
            self.taken = max(self.taken, count)
            return np.zeros((count, 4, 4, 3), dtype=np.uint8)

    ratio, images = brightness(), Made()
    batches: list[weakref.ref[torch.Tensor]] = []

    def watch(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
        batches.append(weakref.ref(inputs[0]))
        assert sum(batch() is not None for batch in batches) == 1

    ratio.network.register_forward_pre_hook(watch)
    scores, _ = score_images(ratio, images, PREPROCESS, batch_size=64)  # type: ignore[arg-type]
    assert (len(scores), len(batches), images.taken) == (640, 10, 64)


class Decay(torch.nn.Module):
    r"""A time score that falls with the time, the faster the brighter the image."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.exp(-4 * x.flatten(1).mean(1) * t)


def test_a_solver_is_chosen_by_the_options_and_its_cost_is_told(small: BenchmarkData) -> None:
    options = {
        "adaptive": EvaluationConfig(solver="ode", tolerance=1e-6),
        "loose": EvaluationConfig(solver="ode", tolerance=1e-2),
        "fixed": EvaluationConfig(evaluations=100),
    }
    ratio = TimeConditionedRatio(Decay())
    ratio(torch.zeros(5, 3, 2, 2))  # what validation took does not count
    scores, costs = {}, {}
    for name, chosen in options.items():
        model = scoring_model(ratio, chosen, small.id_train, PREPROCESS)
        done = evaluate_benchmark(model, small, PREPROCESS, batch_size=30, progress=False)
        scores[name], costs[name] = done.scores.of("id")["digits_test"].score, done.evaluations
    np.testing.assert_allclose(scores["adaptive"], scores["fixed"], rtol=1e-3)
    assert costs["fixed"] == 100
    assert 6 < costs["loose"] < costs["adaptive"] < 100


def test_evaluations_are_the_mean_over_images_not_over_batches(digits: BenchmarkData) -> None:
    network, total = Decay(), 0
    model = TimeConditionedRatio(network, solver="ode", tolerance=1e-6)
    for images in (digits.id_test.images[:60], np.zeros((30, 32, 32, 3), np.uint8)):
        network.calls = 0
        score_images(model, images, PREPROCESS)
        total += len(images) * network.calls
    assert model.cost == (90, total)


def test_validation_matches_the_metrics_and_never_sees_test_sets(digits: BenchmarkData) -> None:
    _, near = digits.split_reference()
    validation = Validation(digits.id_val, near, PREPROCESS, limit=30)
    ratio = brightness()
    numbers = validation(ratio)

    id_scores, _ = score_images(ratio, validation.id_val.images, PREPROCESS)
    near_scores, _ = score_images(ratio, validation.near["near"], PREPROCESS)
    assert numbers["val_near"] == pytest.approx(ood_metrics(id_scores, near_scores).auroc)
    far = [v for k, v in numbers.items() if k.startswith("val_far_")]
    assert len(far) == 3
    assert numbers["val_far"] == pytest.approx(np.mean(far))
    assert numbers["val_auroc"] == pytest.approx((numbers["val_near"] + np.mean(far)) / 2)
    for select in ("last", "val_auroc"):
        assert "held-out reference" in validation.describe(select)
        assert "OOD VALIDATION" not in validation.describe(select)
    for select in ("val_near", "val_far"):
        rule = validation.describe(select)
        assert f"largest validation AUROC {select}: " in rule
        assert ("held-out reference" in rule) == (select == "val_near")
        assert ("shapes" in rule) == (select == "val_far")

    test_images = {
        x.tobytes()
        for s in (digits.id_test, *digits.near.values(), *digits.far.values())
        for x in s.images
    }
    used = [*validation.id_val.images, *validation.near["near"], *validation.far["shapes"]]
    assert not test_images & {x.tobytes() for x in used}


def test_ood_validation_lists_join_on_request_and_are_named(digits: BenchmarkData) -> None:
    _, near = digits.split_reference()
    validation = Validation(digits.id_val, near, PREPROCESS, limit=10, ood_val=near)
    for select in ("last", "val_auroc"):
        assert "OOD VALIDATION LISTS" in validation.describe(select)
    assert set(validation.near) == {"near", "ood_val"}


@pytest.fixture(scope="module")
def trained(
    digits: BenchmarkData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Scorer, Outcome, str, Path]:
    r"""Returns what a short training returns, and its folder."""
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("run")
    return *train_run(CONFIG, digits, folder, CPU, progress=False), folder


def test_the_last_step_is_kept_unless_another_is_asked_for(
    digits: BenchmarkData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([0.5, 0.9, 0.1] * 2)  # the first of a rehearsal
    monkeypatch.setattr(Validation, "__call__", lambda *_: {"val_auroc": next(numbers)})
    kept = {}
    for select in ("last", "val_auroc"):
        changes = {} if select == "last" else {"select": select}
        config = CONFIG.replace(evaluation=CONFIG.evaluation.replace(**changes))
        scorer, outcome, rule = train_run(config, digits, tmp_path / select, CPU, progress=False)
        assert (f"{select} step" in rule) == (select == "last")
        kept[select] = outcome.best["step"], scorer.score(digits.id_val.images[:9])
    assert [step for step, _ in kept.values()] == [4, 2]
    assert not np.allclose(*(scores for _, scores in kept.values()), rtol=1e-3)


def test_held_out_id_images_train_nothing_and_are_those_whose_accuracy_is_told(
    digits: BenchmarkData, small: BenchmarkData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, held = len(digits.id_train), 100
    rest, last = hold_out_id(digits.id_train, held)
    assert last is not None
    assert (len(rest), len(last)) == (size - held, held)
    assert sorted([*rest.names, *last.names]) == sorted(digits.id_train.names)
    assert set(last.labels) == set(range(5))
    assert hold_out_id(digits.id_train, 0) == (digits.id_train, None)

    seen, near = list[int](), list[int]()
    batches = stages.ImageBatches
    monkeypatch.setattr(
        stages, "ImageBatches", lambda x, *args: (seen.append(len(x)), batches(x, *args))[1]
    )
    told = {}
    for seed in (0, 1):
        config = CONFIG.replace(
            data=CONFIG.data.replace(hold_out_id=held),
            training=CONFIG.training.replace(seed=seed),
        )
        scorer, outcome, _ = train_run(config, digits, tmp_path / str(seed), CPU, progress=False)
        _, predicted = score_images(scorer.ratio, last.images, scorer.preprocess)
        assert predicted is not None
        with monkeypatch.context() as patch:
            patch.setattr(
                runs, "scoring_model", lambda m, o, x, *args: (near.append(len(x)), m.fold())[1]
            )
            evaluate_run(scorer, small, config, tmp_path / f"{seed}-scored", "", progress=False)
        told[seed] = outcome.best["val_accuracy"], np.mean(predicted == last.labels)
    assert seen == near == [size - held] * 2
    for accuracy, expected in told.values():
        assert accuracy == pytest.approx(expected)

    with pytest.raises(UserError, match=f"hold_out_id: got {size}, expected less than {size}"):
        hold_out_id(digits.id_train, size)


def test_the_end_of_a_reference_validates_where_that_is_asked_for(
    digits: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, names = len(digits.reference), digits.reference.names
    train, last = digits.split_reference(7)
    assert (train.names, last.names) == (names[:-7], names[-7:])
    with pytest.raises(UserError, match=f"hold_out_reference: got {size}, expected less than"):
        digits.split_reference(size)
    seen = []
    monkeypatch.setattr(
        stages, "fit", lambda m, o, batches, *a, **k: seen.append(batches) or 1 / 0
    )
    config = CONFIG.replace(data=CONFIG.data.replace(hold_out_reference=7, reference_limit=None))
    validation = Validation.of(config, digits, Preprocess([0.5] * 3, [0.5] * 3))
    np.testing.assert_array_equal(validation.near["near"], last.images)
    with pytest.raises(ZeroDivisionError):
        train_run(config, digits, Path("unused"), CPU, progress=False)
    assert len(seen[0].reference_images) == size - 7


def test_a_table_says_what_is_not_known_of_a_reference_given_by_path() -> None:
    manifest = load_manifest("openood_subset", "cifar10")
    known, unknown = (runs._remark(manifest, name) for name in ("tin_reference", "share_050"))
    assert unknown.startswith(f"{known} What share_050, a reference given by path, holds")
    assert "classes of cifar100 is not known: nearood counts all of it, near_held" in unknown
    digits = load_manifest("digits", "digits")  # no near set is a part of another
    assert runs._remark(digits, "share_050") == runs._remark(digits, None)


def test_a_run_leaves_its_folder_and_the_model_scores_alike(
    trained: tuple[Scorer, Outcome, str, Path], small: BenchmarkData
) -> None:
    scorer, outcome, selection, folder = trained
    table = evaluate_run(scorer, small, CONFIG, folder, selection, outcome, progress=False)
    names = {p.name for p in folder.iterdir()}
    assert {"metrics.csv", "metrics.md", "scores.npz", "score_density.png", "run.json"} <= names
    assert (folder / "score_density.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert page.count("<img ") > 20
    assert "Losses" in page

    record = json.loads((folder / "run.json").read_text())
    assert record["selection"] == selection
    assert record["config"] == CONFIG.to_dict()
    assert [h["step"] for h in record["validation"]["history"]] == [2, 4]
    assert record["data"]["checksums"]
    assert record["results"]["evaluations"] == 1
    assert record["results"]["amp"] == "none"

    scores = read_scores(folder / "scores.npz")
    metrics = scores.metrics()
    with open(folder / "metrics.csv", newline="") as file:
        rows = {row["set"]: row for row in csv.DictReader(file)}
    for sets in metrics.values():
        for name, values in sets.items():
            assert float(rows[name]["AUROC"]) == pytest.approx(100 * values.auroc, abs=1e-3)
    assert table.rows["nearood"][0].auroc == pytest.approx(
        np.mean([m.auroc for m in metrics["near"].values()])
    )

    expected = scorer.score(small.id_test.images)
    np.testing.assert_array_equal(load_scorer(str(folder)).score(small.id_test.images), expected)
    (stored,) = scores.of("id").values()
    np.testing.assert_allclose(stored.score, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((2, 3, 32, 32), np.uint8),
        np.zeros((2, 32, 32, 3), np.float32),
        np.zeros((2, 28, 28, 3), np.uint8),
        np.zeros((32, 32, 3), np.uint8),
        np.zeros((0, 32, 32, 3), np.uint8),
        torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
        [1, 2],
        None,
    ],
    ids=lambda x: f"{getattr(x, 'dtype', x)}{[*getattr(x, 'shape', ())]}",
)
def test_a_scorer_says_which_images_it_takes(images: np.ndarray) -> None:
    scorer = Scorer(brightness(), PREPROCESS, {"size": 32}, parameters=0)
    with pytest.raises(
        UserError, match=r"got .*expected uint8 with shape \(N, 32, 32, 3\), N > 0"
    ):
        scorer.score(images)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_autocast_trains_in_half_precision_and_scores_in_single(
    tmp_path: Path, digits: BenchmarkData, amp: str
) -> None:
    config = CONFIG.replace(training=CONFIG.training.replace(amp=amp, steps=2))
    scorer, outcome, _ = train_run(config, digits, tmp_path, CPU, progress=False)
    assert outcome.finished
    assert {p.dtype for p in scorer.ratio.parameters()} == {torch.float32}
    assert np.isfinite(scorer.score(digits.id_test.images[:8])).all()


def test_train_run_resumes_to_the_same_weights(
    trained: tuple[Scorer, Outcome, str, Path], tmp_path: Path, digits: BenchmarkData
) -> None:
    steps: list[int] = []
    while CONFIG.training.steps not in steps:
        part, outcome, _ = train_run(CONFIG, digits, tmp_path, CPU, 0.0, True, progress=False)
        steps.append(outcome.step)
    assert len(set(steps)) > 1
    states = [scorer.ratio.state_dict() for scorer in (trained[0], part)]
    assert states[0].keys() == states[1].keys()
    for key, x in states[0].items():
        assert torch.equal(x, states[1][key]), key


def test_scores_that_are_not_finite_are_refused_before_a_table(
    tmp_path: Path, small: BenchmarkData
) -> None:
    ratio = build_ratio(CONFIG, classes=5)
    with torch.no_grad():
        ratio.network.head.bias.fill_(float("nan"))
    scorer = Scorer(ratio, PREPROCESS, {}, parameters=0)
    with pytest.raises(UserError, match=r"digits_test.*NaN|NaN.*digits_test|nan"):
        evaluate_run(scorer, small, CONFIG, tmp_path, "given", progress=False)
    assert not list(tmp_path.iterdir())


def test_evaluation_scores_every_set_once(digits: BenchmarkData) -> None:
    done = evaluate_benchmark(brightness(), digits, PREPROCESS, progress=False)
    expected = {"digits_test": len(digits.id_test)}
    expected |= {k: len(v) for g in (digits.near, digits.far) for k, v in g.items()}
    assert done.scores.counts() == expected
    assert done.accuracy is not None
    assert done.evaluations == 1
