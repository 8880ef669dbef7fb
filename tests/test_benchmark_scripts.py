r"""Single benchmarks: what they measure on small problems, and what they refuse before they do."""

import ast
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ood_osdre.config import Config
from ood_osdre.data import load_benchmark, load_manifest
from ood_osdre.objectives import TimeScoreMatching
from ood_osdre.paths.times import UniformTimes
from ood_osdre.tasks.__main__ import TASKS
from ood_osdre.training import checkpoint as checkpoints
from ood_osdre.training.build import build_ratio

if TYPE_CHECKING:
    from gradients import Bench

pytestmark = pytest.mark.usefixtures("benchmarks")

NETWORK = {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2}


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def write_model(folder: Path, **options: object) -> None:
    r"""Writes a run folder of an untrained network for the embedded benchmark."""
    given = {"id": "digits", "benchmark": "digits", "network": NETWORK, **options}
    config = Config.from_mapping(given)
    manifest = load_manifest("digits", "digits")
    ratio = build_ratio(config, 5)
    for p in ratio.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.1)
    statistics = {"mean": list(manifest.mean), "std": list(manifest.std), "size": manifest.size}
    metadata = {"config": config.to_dict(), "classes": 5, **statistics}
    checkpoints.write_checkpoint(folder, checkpoints.MODEL, ratio.state_dict(), metadata)


def status_of(script: str, options: Sequence[str]) -> int | str | None:
    try:
        return importlib.import_module(script).main(options)
    except SystemExit as stop:  # the parser's
        return stop.code


def test_help_has_no_markup(benchmarks: Path) -> None:
    package = Path(checkpoints.__file__).parents[1]
    suites = [package / "tasks" / "suites" / f"{name}.py" for name, _ in TASKS.values()]
    files = [path for folder in (package, benchmarks) for path in folder.rglob("*.py")]
    shown = [p for p in files if re.search(r"description=__doc__|new_parser\(", p.read_text())]
    assert len(shown) > 20
    for path in (*shown, *suites):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert not re.search(r":[a-z]+:`|^\.\. [a-z]+::", text, re.MULTILINE), path


def test_scripts_have_the_parser_of_the_commands(benchmarks: Path) -> None:
    r"""It tells a mistake in one line; one script runs where the package is not."""
    own, independent = set(), set()
    for path in benchmarks.rglob("*.py"):
        text = path.read_text()
        own |= {path.stem} if re.search(r"\bArgumentParser\(", text) else set()
        imports = re.search(r"^\s*(from|import) (ood_osdre|outputs)\b", text, re.MULTILINE)
        independent |= set() if imports else {path.stem}
    assert own == {"sample_benchmark_mi"} <= independent


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("latency", ["--nfe", "1"], "expected a whole number, at least 2"),
        ("latency", ["--width", "0.3"], "expected a positive multiple of 0.125"),
        ("latency", ["--device", "nope"], "--device nope: not available here"),
        ("latency", ["--parts", "training", "--batch-size", "1"], "--batch-size 1: "),
        ("latency", ["--parts", "precision", "--device", "cpu"], "precision: needs a GPU"),
        ("latency", ["--out", "file/below"], "--out file/below: cannot be written"),
        ("throughput", ["--data-root", ".", "--threads", "0"], "at least 1"),
        ("throughput", ["--data-root", ".", "--out", "file"], "--out file: cannot be written"),
        ("throughput", [], "expected --data-root or --photographs, and not both"),
        ("memory_224", ["--images", "3"], "at least 40"),
        ("int8", ["absent"], "absent: no such folder"),
        ("int8", ["integral"], "integral: holds a model of estimator time_conditioned, expected"),
        ("gradient_snr", ["--samples", "31", "--batch", "2"], "--samples 31: expected 16 batches"),
        ("joint_score", ["--steps", "0"], "at least 1"),
        ("share_lists", ["--data-root", "absent"], "train_tiny_reference.txt: cannot be read"),
        ("feature_ratio", ["--data-root", ".", "--classifier", "absent", "--out", "x"], "absent"),
    ],
)
def test_what_cannot_be_measured_is_told_before(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    options: list[str],
    message: str,
) -> None:
    if script == "int8":
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    if "integral" in options:
        write_model(
            tmp_path / "integral",
            estimator="time_conditioned",
            network={**NETWORK, "norm": "group"},
            objective={"endpoint": 0.0, "class_weight": 0.0, "time_score": 1.0},
        )
    if script in ("latency", "throughput"):
        monkeypatch.setattr(importlib.import_module(script), "Bench", None)
    before = sorted(tmp_path.iterdir())
    assert status_of(script, options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_shares_are_of_every_class_and_nested(tmp_path: Path) -> None:
    import share_lists

    folder = tmp_path / "benchmark_imglist" / "cifar10"
    folder.mkdir(parents=True)
    for name, source in ((share_lists.OWN, "cifar100"), (share_lists.OTHER, "tin")):
        kinds = "ab" if source == "cifar100" else "abcd"
        lines = [f"{source}/train/{c}/{i}.png -1" for c in kinds for i in range(100)]
        (folder / name).write_text("\n".join(lines))
    assert share_lists.main(["--data-root", str(tmp_path), "--out", str(tmp_path)]) == 0
    lists = {s: (tmp_path / f"share_{s:03d}.txt").read_text().splitlines() for s in (0, 5, 100)}
    # The last ones validate, the same in all; as many train in each.
    assert {tuple(lines[-8:]) for lines in lists.values()} == {tuple(lists[0][-8:])}
    assert [line.split("/")[2] for line in lists[0][-8:]] == ["b"] * 4 + ["d"] * 4
    lists = {s: lines[:-8] for s, lines in lists.items()}
    assert {len(lines) for lines in lists.values()} == {200}
    own = {s: [line for line in lines if "cifar100" in line] for s, lines in lists.items()}
    assert {s: len(lines) for s, lines in own.items()} == {0: 0, 5: 10, 100: 200}
    assert sorted({line.split("/")[2] for line in own[5]}) == list("ab")
    assert set(own[5]) < set(own[100])
    # Of the other source every second class.
    others = [line.split("/")[2] for line in lists[5] if "tin" in line]
    assert others == ["a"] * 95 + ["c"] * 95


class TestInt8:
    def test_the_calibration_is_of_every_class(self) -> None:
        pytest.importorskip("onnxruntime")
        import int8

        images = np.repeat(np.arange(10, dtype=np.uint8), 100)[:, None, None, None]
        for number in (10, 64, 512):
            chosen = int8.evenly(images, number)
            assert len(chosen) == number
            counts = np.bincount(chosen.ravel(), minlength=10)
            assert counts.max() - counts.min() <= 1
        assert len(int8.evenly(images, 5000)) == 1000

    def test_both_precisions_are_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        import int8

        from ood_osdre.detectors.scorer import load_scorer

        write_model(tmp_path / "run", objective={"class_weight": 0.5})
        options = [str(tmp_path / "run"), "--calibration", "64", "--out", str(tmp_path)]
        assert int8.main(options) == 0
        record = json.loads((tmp_path / "run.json").read_text())
        results = record["results"]
        assert record["seed"] == int8.SEED
        low, high = results["int8 over float32"]["interval"]
        assert 0 < low <= results["int8 over float32"]["time"] <= high
        assert "| ID accuracy |" in capsys.readouterr().out
        data = load_benchmark(load_manifest("digits", "digits"), ".")
        scorer = load_scorer(tmp_path / "run")
        with torch.no_grad():
            x = scorer.preprocess(torch.as_tensor(data.id_test.images))
            predicted = scorer.ratio.predict(x).logits.argmax(dim=1).numpy()
        single, eighth = results["accuracy"]
        assert single == pytest.approx(100 * np.mean(predicted == data.id_test.labels), abs=0.5)
        assert 0 <= eighth <= 100


class BlockMeans(nn.Module):
    r"""A linear backbone whose cells see a block each: its weighted sums."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * 64, features) / 64)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5)
        return blocks.flatten(3).flatten(1, 2) @ self.weight


@dataclass
class Normal:
    r"""Images of independent normal values of a mean."""

    mean: Tensor
    deviation: float

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.mean + self.deviation * torch.randn(n, 3, 32, 32, generator=generator)


class TestGradientSNR:
    @pytest.fixture(autouse=True)
    def _few_moments(self, benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.import_module("gradients"), "MOMENTS", 512)

    def linear(self, samples: int) -> "Bench":
        import gradients

        bench = gradients.Bench(BlockMeans(5), samples, 128, seed=0)
        means = 0.5 * torch.randn(2, 3, 32, 32)
        bench.reference, bench.id = Normal(means[0], 0.7), Normal(means[1], 1.3)
        return bench

    def test_moments_of_a_linear_model_are_exact(self) -> None:
        import gradients

        delta = 0.02
        bench = self.linear(8192)
        term = gradient_snr().PathDifference(bench.path, bench.weight, delta)
        found = gradients.Measurement.of(bench.gradients(term))

        # A(x_later - x_earlier) is normal at each time, and the loss's slope a function of time.
        t = (torch.arange(4000) + 0.5) / 4000
        ends = [bench.path.rates(u) for u in ((t + delta).clamp(max=1), (t - delta).clamp(min=0))]
        gap = (t + delta).clamp(max=1) - (t - delta).clamp(min=0)
        alpha, beta = ((a - b) / gap for a, b in zip(ends[0][:2], ends[1][:2], strict=True))
        noise = (ends[0].v.sqrt() - ends[1].v.sqrt()) / gap
        slope = -2 * bench.weight.value(t)[:, None] * bench.ratio.scale * bench.ratio.basis(t)
        sums = [bench.features(s.mean[None]).sum(dim=1)[0] for s in (bench.reference, bench.id)]
        sums = [f * torch.tensor([1.0] * 5 + [0.0]) for f in sums]  # the bias sees no difference
        mean = alpha[:, None] * sums[0] + beta[:, None] * sums[1]
        # A feature is the mean of 16 cells.
        spread = bench.backbone.weight.square().sum() / 16
        deviations = (0.7 * alpha) ** 2 + (1.3 * beta) ** 2 + noise**2
        signal = torch.einsum("tk,tf->kf", slope, mean).div(len(t)).square().sum()
        second = (slope.square().sum(1) * (mean.square().sum(1) + spread * deviations)).mean()
        assert found.signal() == pytest.approx(signal.item(), rel=0.05, abs=0)
        assert found.second_moment == pytest.approx(second.item(), rel=0.02, abs=0)
        assert found.batch_noise == pytest.approx((second - signal).item(), rel=0.3, abs=0)

    def test_stratified_times_leave_less_noise(self) -> None:
        import gradients

        bench = self.linear(4096)
        term = TimeScoreMatching(bench.path, bench.weight)
        noise = [
            gradients.Measurement.of(bench.gradients(term, UniformTimes(stratified=s))).batch_noise
            for s in (False, True)
        ]
        assert noise[1] < 0.5 * noise[0]

    def test_blocks_that_cells_see_alone_move_as_one(self) -> None:
        bench = self.linear(256)
        term = gradient_snr().PathDifference(bench.path, bench.weight, 0.005)
        pairs = zip(bench.gradients(term), bench.block_gradients(0.005), strict=True)
        for whole, blocks in pairs:
            torch.testing.assert_close(whole, blocks, rtol=1e-3, atol=1e-3 * whole.std().item())

    def test_seeds_differ_in_clusters_and_draws(self) -> None:
        import gradients

        a, again, b = (gradients.Bench(BlockMeans(5), 256, 128, seed) for seed in (0, 0, 1))
        assert torch.equal(next(a.draws()).x_0, next(again.draws()).x_0)
        assert not torch.equal(next(a.draws()).x_0, next(b.draws()).x_0)
        centres = [c.centres for bench in (a, b) for c in (bench.reference, bench.id)]
        assert len({c.sum().item() for c in centres}) == 4


def gradient_snr() -> ModuleType:
    return importlib.import_module("gradient_snr")


class TestJointScore:
    def test_exact_errors_are_none(self) -> None:
        import joint_score

        @torch.enable_grad()
        def exact(x: Tensor, t: Tensor) -> Tensor:
            return joint_score.exact_score(x, t[0].item()).float()

        def generator() -> torch.Generator:
            return torch.Generator().manual_seed(0)

        errors = joint_score.score_errors(exact, generator())
        assert list(errors) == [f"data score, t = {t}" for t in joint_score.TIMES]
        assert max(errors.values()) < 1e-9
        errors = joint_score.score_errors(lambda x, t: 0 * x, generator())
        assert list(errors.values()) == [1.0] * 5

        class Exact:
            def log_ratio(self, x: Tensor) -> Tensor:
                ends = joint_score.marginal(1.0), joint_score.marginal(0.0)
                return (ends[0].log_density(x) - ends[1].log_density(x)).float()

        errors = joint_score.ratio_errors(Exact(), generator())
        assert errors["ratio, correlation"] == pytest.approx(1)
        assert errors["ratio, mean error (nats)"] == pytest.approx(0, abs=1e-4)

    def test_every_form_is_trained(self, tmp_path: Path) -> None:
        import joint_score

        assert joint_score.main(["--steps", "2", "--out", str(tmp_path)]) == 0
        record = json.loads((tmp_path / "run.json").read_text())
        assert list(record["results"]) == list(joint_score.FORMS)
        assert record["config"]["training"]["batch_size"] == joint_score.BATCH
        assert (tmp_path / "data_score.png").is_file()
        scored = {k for k, row in record["results"].items() if "data score, t = 0.5" in row}
        assert scored == {"conditional", "sliced"}
