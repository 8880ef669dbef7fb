r"""Tests for the divergence task: scenarios, the tracker, the drift monitor and the command."""

import csv
import json
import logging
import math
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from torch import Generator, Tensor

from ood_osdre.config import Config
from ood_osdre.data import load_digits_benchmark
from ood_osdre.errors import UserError
from ood_osdre.stages import train_run
from ood_osdre.tasks import information, tracking
from ood_osdre.tasks.__main__ import main
from ood_osdre.tasks.fit import DrawPairs, RatioFit
from ood_osdre.tasks.gaussians import SCENARIOS, scenario
from ood_osdre.tasks.suites import kl
from ood_osdre.tasks.suites.kl import lag
from ood_osdre.tasks.tracking import QUADRATIC, DriftMonitor, DriftReport, KLTracker, Tracked


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "HELD_OUT", 5000)


@pytest.mark.parametrize(
    ("name", "truths"),
    [
        ("linear_drift", [0, 1.65, 6.61, 14.9, 26.5, 41.5]),
        ("noise_corruption", [0, 1.51, 5.20, 10.3, 16.5, 23.3]),
        ("controlled_divergence", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_scenarios_have_the_known_divergences(name: str, truths: list[float]) -> None:
    pairs = [scenario(name, 80, step) for step in range(6)]

    assert [p.divergence for p in pairs] == pytest.approx(truths, rel=5e-3, abs=1e-9)
    assert pairs[2].id == f"{name.replace('_', '-')}-d80-t2"
    # Against the formula, KL = (tr S + m.m - d - log det S) / 2.
    mean, variance = pairs[3].mean, pairs[3].covariance.diagonal()
    expected = (variance.sum() + mean @ mean - 80 - variance.log().sum()) / 2
    assert pairs[3].divergence == pytest.approx(expected.item())


def test_controlled_divergence_turns_at_every_step() -> None:
    first, second = (scenario("controlled_divergence", 20, step).mean for step in (1, 2))

    assert second.norm().item() == pytest.approx(2.0)
    assert abs(torch.cosine_similarity(first, second, dim=0)) < 0.7
    assert torch.equal(first, scenario("controlled_divergence", 20, 1).mean)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "linear_drift" else pytest.mark.slow)
        for name in SCENARIOS
    ],
)
def test_tracker_follows_the_truth(name: str) -> None:
    tracker = KLTracker(10, options=QUADRATIC.replace(steps=150, batch_size=256))
    for step in (0, 2):
        pair = scenario(name, 10, step)
        tracked = tracker.update(pair.draw_pairs)
        assert tracked.estimate == pytest.approx(pair.divergence, rel=0.05, abs=0.1)
    assert tracker.steps == 2


def test_tracker_starts_from_the_last_step() -> None:
    options = QUADRATIC.replace(steps=60, batch_size=256)
    warm, cold = KLTracker(10, options=options), KLTracker(10, options=options)
    for step in (2.0, 2.2):
        last = warm.update(scenario("noise_corruption", 10, step).draw_pairs)
    first = cold.update(scenario("noise_corruption", 10, 2.2).draw_pairs)
    truth = scenario("noise_corruption", 10, 2.2).divergence

    assert len(last.history) == len(first.history) == 20
    assert len(repr(last)) < 60
    ax = last.plot(Figure().subplots())
    assert ax.lines[0].get_ydata().tolist() == [value for _, value in last.history]
    assert abs(last.history[0][1] - truth) < abs(first.history[0][1] - truth) / 2


@pytest.mark.parametrize("fixed", ["points", "sampler"])
def test_tracker_of_windows_of_a_stream(fixed: str) -> None:
    rng = np.random.default_rng(0)
    reference = rng.normal(3, 2, size=(4000, 4))
    sampler = (
        reference if fixed == "points" else lambda n, g: 3 + 2 * torch.randn(n, 4, generator=g)
    )
    tracker = KLTracker(4, options=QUADRATIC.replace(steps=100), reference=sampler)
    for shift, scale in ((1.0, 0.8),) if fixed == "sampler" else ((0.0, 1.0), (1.0, 0.8)):
        window = 3 + 2 * (shift + scale * rng.normal(size=(2000, 4)))
        tracked = tracker.update(window)
        truth = 4 * (scale**2 + shift**2 - 1 - math.log(scale**2)) / 2
        # Within three standard errors of a mean over 500 held-out points, and some for the fit.
        assert tracked.estimate == pytest.approx(truth, abs=0.25)
    assert truth == pytest.approx(2.17, abs=0.01)
    assert tracked.history[-1] == (1.0, pytest.approx(tracked.estimate))


def test_tracker_keeps_held_out_points_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[float], ...]] = []

    def fit(method: str, draw_pairs: DrawPairs, *_: object, **__: object) -> RatioFit:
        drawn = draw_pairs(20_000, Generator().manual_seed(0))
        seen.append(tuple(set(x[:, 0].tolist()) for x in drawn))
        raise KeyboardInterrupt

    monkeypatch.setattr(tracking, "fit_ratio", fit)
    reference, window = torch.arange(400.0)[:, None], torch.arange(300.0)[:, None]
    tracker = KLTracker(1, reference=reference)
    with pytest.raises(KeyboardInterrupt):
        tracker.update(window)
    sources = tracker._source("reference", reference), tracker._source("window", window)
    for drawn, source, points in zip(seen[0], sources, (reference, window), strict=True):
        held_out = set(source.held_out(1, Generator())[:, 0].tolist())
        assert len(held_out) == len(points) / 4
        assert drawn == set(points[:, 0].tolist()) - held_out


def test_tracker_takes_options_by_name_and_tells_its_error() -> None:
    rng = np.random.default_rng(0)
    tracker = KLTracker(1, options={"steps": 80}, reference=rng.normal(size=4000))
    assert tracker.options == QUADRATIC.replace(steps=80)
    tracked = tracker.update(1 + rng.normal(size=4000))
    assert tracked.standard_error is not None
    # The log-ratio at truth is x - 1/2, with a deviation of 1 over the 1,000 held-out points.
    assert tracked.standard_error == pytest.approx(1 / 1000**0.5, rel=0.2)
    assert tracked.estimate == pytest.approx(0.5, abs=0.2)
    nwj = KLTracker(1, "nwj", {"steps": 5}, reference=rng.normal(size=300))
    assert nwj.update(rng.normal(size=300)).standard_error is None


def test_tracker_warns_of_what_its_points_cannot_tell(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    tracker = KLTracker(1, options={"steps": 60}, reference=rng.normal(size=400))
    with caplog.at_level(logging.WARNING):
        tracker.update(5 + rng.normal(size=400))  # 12.5 nats
    assert "is beyond the log of the 100 held-out points" in caplog.text


@pytest.mark.parametrize(
    ("estimates", "expected"),
    [
        ([9.0, 9.0, 9.0, 9.0], 0.25),
        ([0.0, 9.0, 9.0, 9.0], 0.5),
        ([9.0, 0.0, 9.4, 9.0], 0.75),
        ([0.0, 0.0, 0.0, 9.0], 1.0),
        ([9.0, 9.0, 9.0, 9.6], 2.0),
    ],
)
def test_lag_is_the_share_until_within_for_good(estimates: list[float], expected: float) -> None:
    history = [((i + 1) / 4, e) for i, e in enumerate(estimates)]

    assert lag(Tracked(estimates[-1], history, 0.0), truth=9.0) == expected


def normal(rng: np.random.Generator, n: int, shift: float = 0.0) -> np.ndarray:
    return rng.normal(size=n) + shift


def same(x: np.ndarray) -> np.ndarray:
    return x


def test_alarms_without_a_change_are_as_rare_as_stated() -> None:
    rng = np.random.default_rng(0)
    lengths = []
    for seed in range(100):
        monitor = DriftMonitor(same, normal(rng, 60), run_length=20, seed=seed)
        while monitor.alarm is None:
            monitor.update(normal(rng, 10))
        lengths.append(monitor.alarm)
    error = np.std(lengths, ddof=1) / math.sqrt(len(lengths))

    assert np.mean(lengths) + 2 * error > 20
    # Nor is it so cautious that it never speaks.
    assert np.mean(lengths) < 200


def test_statistic_has_the_mean_that_the_rate_rests_on() -> None:
    rng = np.random.default_rng(1)
    values = []
    for seed in range(800):
        monitor = DriftMonitor(same, normal(rng, 50), run_length=1e9, seed=seed)
        values.append(monitor.update(normal(rng, 3)).statistic)
    error = np.std(values, ddof=1) / math.sqrt(len(values))

    assert np.mean(values) == pytest.approx(3.0, abs=4 * error)
    assert error < 0.5


@pytest.mark.parametrize(("shift", "delay"), [(-0.5, 200), (-1.0, 60), (2.0, 20)])
def test_changes_raise_the_alarm_with_a_delay(shift: float, delay: int) -> None:
    rng = np.random.default_rng(2)
    for seed in range(5):
        monitor = DriftMonitor(same, normal(rng, 500), run_length=10_000, seed=seed)
        assert monitor.update(normal(rng, 500)).alarm is None
        report = monitor.update(normal(rng, 1000, shift))

        assert report.alarm is not None
        assert 500 < report.alarm <= 500 + delay
        assert report.start is not None
        assert abs(report.start - 500) < delay
        assert report.inputs == 1500


def test_alarm_depends_on_ranks_alone_and_not_on_batches() -> None:
    rng = np.random.default_rng(3)
    calibration, stream = normal(rng, 300), np.r_[normal(rng, 200), normal(rng, 300, -0.7)]
    plain = DriftMonitor(same, calibration, run_length=1000)
    expected = plain.update(stream).alarm
    mapped = DriftMonitor(np.exp, calibration, run_length=1000)
    for part in np.array_split(stream, 11):
        mapped.update(part)

    assert expected is not None
    assert mapped.alarm == expected
    # An alarm stays until it is forgotten.
    assert mapped.update(stream[:50]).alarm == expected


def test_restart_watches_for_a_change_from_the_new_normal() -> None:
    rng = np.random.default_rng(4)
    monitor = DriftMonitor(same, normal(rng, 300), run_length=10_000)
    assert monitor.update(normal(rng, 300, -2.0)).alarm is not None
    monitor.restart(normal(rng, 300, -2.0))

    report = monitor.update(normal(rng, 300, -2.0))
    assert report.alarm is None
    assert report.baseline == pytest.approx(-2.0, abs=0.2)
    assert monitor.update(normal(rng, 100)).alarm > 600


def test_divergence_difference_is_what_it_is_called() -> None:
    # p_1 = N(0, 1), p_0 = N(0, 4), q = N(1, 1).
    def log_ratio(x: Tensor) -> Tensor:
        return math.log(2) - x**2 / 2 + x**2 / 8

    generator = Generator().manual_seed(0)
    calibration, stream = torch.randn(2, 20_000, generator=generator)
    monitor = DriftMonitor(log_ratio, calibration[:1000], window=20_000)
    report = monitor.update(stream + 1)
    kl_0 = math.log(2) + (1 + 1) / 8 - 0.5
    kl_1 = 0.5

    difference = kl_0 - kl_1
    assert report.divergence_difference == pytest.approx(difference, abs=4 * report.standard_error)
    assert report.standard_error < 0.01
    assert report.baseline == pytest.approx(math.log(2) - 0.375, abs=0.1)


def test_reprs_of_trackers_and_monitors_are_one_line() -> None:
    monitor = DriftMonitor(same, np.arange(100.0) / 3, run_length=1e4)
    assert repr(monitor) == "DriftMonitor(0 inputs, calibrated at 16.5 nats, no alarm)"
    assert repr(KLTracker(2)) == "KLTracker(os-dre, 2 columns, 0 updates)"
    report = DriftReport(600, -19 / 6, 0.2345, 1.23456789, 12345.678, None, None)
    shown = "600 inputs, -3.167 ± 0.23 nats, calibrated at 1.235, statistic 1.235e+04"
    assert repr(report) == f"DriftReport({shown}, no alarm)"
    late = report._replace(alarm=310, start=0)
    assert repr(late) == f"DriftReport({shown}, alarm at 310, change after 0)"
    monitor.alarm = 7
    assert repr(monitor).endswith(" nats, alarm at 7)")


def test_a_window_longer_than_any_list_is_refused() -> None:
    with pytest.raises(UserError, match="a whole number from 1 to"):
        DriftMonitor(same, np.arange(60.0), window=2**63)


def test_equal_scores_are_no_change() -> None:
    monitor = DriftMonitor(same, np.zeros(100), run_length=1e6)
    report = monitor.update(np.zeros(500))

    assert report.alarm is None
    assert report.standard_error == 0.0


def test_monitor_works_on_images_with_a_trained_detector(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    small = {
        "id": "digits",
        "benchmark": "digits",
        "network": {"width": 0.125, "depths": [1, 1, 1, 1], "stem_stride": 2},
        "training": {"steps": 40, "batch_size": 32, "warmup": 5, "eval_every": 40, "ema": 0.9},
        "data": {"val_limit": 50, "flip": "none"},
    }
    data = load_digits_benchmark()
    scorer, outcome, _ = train_run(
        Config.from_mapping(small), data, tmp_path, torch.device("cpu"), progress=False
    )
    assert outcome.finished
    unseen = data.id_test.images
    half = len(unseen) // 2
    monitor = DriftMonitor(scorer.score, unseen[:half], run_length=1000)

    assert monitor.update(unseen[half:]).alarm is None
    noise = np.random.default_rng(0).integers(0, 256, (200, *unseen.shape[1:]), dtype=np.uint8)
    report = monitor.update(noise)
    assert report.alarm is not None
    assert report.alarm - (len(unseen) - half) < 100


PAGE = Path(__file__).parents[1] / "docs" / "divergences.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="needs a clone")
def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(tracking, "QUADRATIC", QUADRATIC.replace(steps=5))
    monkeypatch.setattr(information, "DEFAULTS", information.DEFAULTS.replace(steps=5))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {}
    lines, spaces = [], []
    for i, block in enumerate(blocks):
        script = tmp_path / f"block{i}.py"
        script.write_text(block, encoding="utf-8")
        space = runpy.run_path(str(script), space)
        spaces.append(space)
        lines.append(len(capsys.readouterr().out.splitlines()))
    assert lines == [3, 0, 2, 1]
    monitor, space = blocks[2], spaces[2]
    printed = [line.split("#")[1].split() for line in monitor.splitlines() if "print(" in line]
    (alarm, _, start, *_), (difference, *_) = printed
    report = space["report"]
    assert (report.alarm, report.start) == (int(alarm), int(start.rstrip(":")))
    assert f"{report.divergence_difference:.2f};" == difference
    # The detector is the log-ratio that it is said to be.
    x = np.random.default_rng(1).normal(size=(9, 4))
    truth = normal_log_density(x, 1.0) - normal_log_density(x, 2.0)
    np.testing.assert_allclose(space["log_ratio"](x), truth)


def normal_log_density(x: np.ndarray, sigma: float) -> ArrayLike:
    each = -((x / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
    return np.asarray(each.sum(axis=1))


def test_figure_says_what_its_band_and_its_steps_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(kl, "save_png", lambda figure, path, **_: saved.append(figure))
    rows = [
        {"task": "a", "step": step, "method": "OS-DRE", "seed": 0, "truth": step, "lag": 0.5,
         "estimate": step, "history": [[step - 0.5, step], [step, step]]}
        for step in range(2)
    ]  # fmt: skip
    kl.plot(tmp_path / "kl.png", rows)
    _, middle, bottom = saved[0].axes
    assert [t.get_text() for t in middle.get_legend().get_texts()] == ["5 % or 0.3 nats"]
    assert "from t to t + 1" in bottom.get_xlabel()
    top = saved[0].axes[0]
    assert top.get_xlim()[0] == 0
    # The refit to step 1 begins where the truth jumps to it.
    assert top.lines[0].get_xdata().tolist() == [0.5, 1.0, 1.5, 2.0]
    assert all(float(tick).is_integer() for tick in bottom.get_xticks())


def test_command_writes_tables_plot_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--dims 3 --horizon 1 --steps 5 --streams 1 --methods os-dre nwj --quiet"
    assert main(["kl", *options.split(), "--out", str(tmp_path)]) == 0

    with (tmp_path / "kl.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2
    expected = {s: scenario(s, 3, 1).divergence for s in SCENARIOS}
    for name, truth in expected.items():
        own = [r for r in rows if r["task"] == f"{name.replace('_', '-')}-d3" and r["step"] == "1"]
        assert [float(r["truth"]) for r in own] == pytest.approx([truth] * 2)
    record = json.loads((tmp_path / "kl.json").read_text())
    assert record["results"]["rows"][0]["history"][0][0] == pytest.approx(-0.8)
    assert (tmp_path / "kl.png").stat().st_size > 1000
    assert record["seed"] == record["config"]["seed"] == 0
    with (tmp_path / "drift.csv").open() as file:
        assert [float(r["variance"]) for r in csv.DictReader(file)] == [1, 1.1, 1.25, 1.5, 2]
    printed = capsys.readouterr().out
    assert f"Tables and record: {tmp_path}\nPlot: {tmp_path}/kl.png\n" in printed
    # The monitor has no plot, and says what its numbers are of.
    assert printed.endswith(f"Tables and record: {tmp_path}\n")
    assert "Streams of 20 dimensions" in printed
    assert "Guarantee: at most one alarm in 10,000 inputs" in printed
