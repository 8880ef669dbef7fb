r"""Tests of rows that are no independent draws, of rates, and of intervals that hold the truth."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from ood_osdre.data.sets import ImageSet, cut_apart, draws_of, hold_out_reference
from ood_osdre.detectors.feature_head import _split
from ood_osdre.detectors.fitting import _hold_out
from ood_osdre.evaluation.calibration import SplitConformal
from ood_osdre.tasks import DriftMonitor, KLTracker, fit_density, mutual_information
from ood_osdre.tasks.density import DEFAULTS
from ood_osdre.tasks.draws import (
    error_of_mean,
    firsts,
    marks_of,
    source_of,
    warn_of_order,
    whitened_parts,
)
from ood_osdre.tasks.fit import fit_ratio
from ood_osdre.tasks.methods import RATES, FitOptions, fit_options
from ood_osdre.tasks.neighbours import debiased_ksg, ksg


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


PICK = np.random.default_rng(1).integers(0, 300, 3000)


def test_a_cut_parts_no_copies_and_moves_nothing_else() -> None:
    rng = np.random.default_rng(0)
    order = rng.permutation(3000)
    parts = cut_apart(order, PICK, [300, 600])
    assert sorted(np.concatenate(parts)) == list(range(3000))
    assert sum(len(set(PICK[part])) for part in parts) == len(set(PICK))
    assert 300 <= len(parts[0]) < 330
    for found, expected in zip(
        cut_apart(order, np.arange(3000), [300, 600]), np.split(order, [300, 600]), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_an_item_is_as_often_in_a_part_whether_it_has_copies_or_not() -> None:
    marks = np.r_[np.zeros(4, np.int64), np.arange(1, 197)]  # one of 200 items four times
    rng = np.random.default_rng(0)
    held = [cut_apart(rng.permutation(200), marks, [20])[0] for _ in range(1000)]
    shares = np.bincount(np.concatenate(held), minlength=200) / 1000
    assert abs(shares[0] - 0.1) < 4 * (0.09 / 1000) ** 0.5
    assert set(shares[:4]) == {shares[0]}


def test_what_is_likely_by_itself_is_a_draw_each_time() -> None:
    rng = np.random.default_rng(0)
    for share, kinds in (
        (0.15, 10**9),
        (0.02, 10**9),
        (0.0, 9),
    ):  # frames among others; categories
        marks = np.where(rng.random(1000) < share, -1, rng.integers(0, kinds, 1000))
        assert len(set(draws_of(marks).tolist())) == 1000
        parts = cut_apart(rng.permutation(1000), draws_of(marks), [100])
        assert [len(part) for part in parts] == [100, 900]
    # One item twice, a whole set ten times, and some far more often than others: copies.
    for marks in (
        np.r_[7, 7, 10:1000],
        np.arange(300).repeat(10),
        np.r_[:60, np.arange(60, 100).repeat(10)],
        np.r_[:1000, np.arange(1000, 1020).repeat(50)],  # a rare class, to balance it
    ):
        assert len(set(draws_of(marks).tolist())) == len(set(marks.tolist()))


def test_copies_are_rows_that_no_chance_makes_equal(caplog: pytest.LogCaptureFixture) -> None:
    rows = normal(300, 6)
    with caplog.at_level(logging.WARNING):
        marks = marks_of("rows", rows[PICK])
    assert "rows: 300 of 3000 rows are distinct" in caplog.text
    assert len({(m, p) for m, p in zip(marks, PICK, strict=True)}) == len(set(PICK)) == 300
    caplog.clear()
    # Rounded numbers, atoms, and signed zeros of other rows.
    for values in (rows[:, :1].round(1), np.where(rows < 0, 0, rows)[:, :1], rows):
        assert len(firsts(marks_of("rows", values))) == 300
    assert not caplog.messages
    # Of few kinds, rows of a continuum are copies, one-hot rows are categories.
    for values, count in ((rows[:50], 50), (np.eye(50), 3000)):
        assert len(firsts(marks_of("rows", values[PICK % 50]))) == count
    images = np.random.default_rng(0).integers(0, 256, (50, 48), dtype=np.uint8)
    assert len(firsts(marks_of("rows", images[PICK[:99] % 50]))) <= 50


def test_errors_count_distinct_rows() -> None:
    values = normal(200)
    assert error_of_mean(values, np.arange(200)) == pytest.approx(values.std(ddof=1) / 200**0.5)
    copied = error_of_mean(values.repeat(9), np.arange(200).repeat(9))
    assert copied == pytest.approx(values.std(ddof=1) / 200**0.5)


def test_no_split_has_a_copy_on_both_sides() -> None:
    rows = normal(300, 4)[PICK]
    splits = [
        [np.asarray(part) for part in whitened_parts(rows, DEFAULTS)[2]],
        [PICK[part, None] for part in _hold_out(PICK, np.random.default_rng(0))],
        [rows[part] for part in _split(torch.as_tensor(rows), 0.1, 0, 1)],
    ]
    source = source_of("rows", rows, 0.25, Generator().manual_seed(0), 4)
    assert source.kept is not None
    splits.append([source.kept.numpy(), source.draw(5000, Generator().manual_seed(0)).numpy()])
    images = np.zeros((3000, 1, 1, 3), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = PICK % 250, PICK // 250
    everything = ImageSet(images, np.zeros(3000, np.int64), [""] * 3000)
    splits.append([s.images.reshape(-1, 3) for s in hold_out_reference(everything, marks=PICK)])
    for parts in splits:
        sets = [set(map(tuple, part.tolist())) for part in parts]
        assert sum(map(len, sets)) == len(set().union(*sets)) == 300


def test_calibration_counts_distinct_inputs(caplog: pytest.LogCaptureFixture) -> None:
    scores = normal(300)
    with caplog.at_level(logging.WARNING):
        copied = SplitConformal(scores.repeat(10), 0.1, np.arange(300).repeat(10))
        monitor = DriftMonitor(lambda x: x[:, 0], np.c_[scores, scores**2][PICK])
    np.testing.assert_array_equal(copied.scores, np.sort(scores))
    assert len(monitor._sorted) == 300
    assert "300 of 3000 inputs are distinct" in caplog.text
    assert "calibration: 300 of 3000 rows are distinct" in caplog.text
    # Four fifths of the inputs are of 40 kinds: whatever counts as a draw, that is what inputs are.
    kinds = np.r_[np.arange(40).repeat(20), np.arange(40, 240)]
    inputs = normal(240)[np.random.default_rng(0).permutation(kinds)]
    common = set(normal(240)[:40].tolist())
    monitor = DriftMonitor(lambda x: x[:, 0], inputs[:, None])
    assert len(monitor._sorted) == 240
    assert sum(score in common for score in monitor._sorted) == pytest.approx(0.8 * 240, abs=20)


def warned(rows: np.ndarray, caplog: pytest.LogCaptureFixture) -> bool:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_of_order("rows", rows)
    return bool(caplog.messages)


@pytest.mark.parametrize("kind", ["normal", "zeros", "counts"])
def test_independent_rows_are_hardly_ever_taken_for_a_series(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(2)
    draw = {
        "normal": lambda: rng.normal(size=(200, 3)),
        "zeros": lambda: np.where(rng.random((200, 2)) < 0.9, 0.0, rng.random((200, 2))),
        "counts": lambda: rng.poisson(1.0, size=(200, 2)).astype(float),
    }[kind]
    # At a rate of 1 %, more than 5 of 100 have a probability of 1 in 2,000.
    assert sum(warned(draw(), caplog) for _ in range(100)) <= 5


def test_series_are_told_from_their_order(caplog: pytest.LogCaptureFixture) -> None:
    noise = normal(2, 500, seed=3)
    walk, weekly = noise.cumsum(axis=1), np.tile(noise[:, :7], 72)[:, :500] + 0.5 * noise
    bursts = noise * np.exp(walk[::-1] / 10)
    for series in (walk, weekly, bursts):
        assert warned(series.T, caplog)
        assert not warned(np.random.default_rng(0).permutation(series.T), caplog)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        mutual_information(*walk)
    assert "mutual information: rows depend on their neighbours" in caplog.text
    assert "series that drifts" in caplog.text


def test_rates_are_those_of_the_backbone() -> None:
    defaults = FitOptions(lr=0.007)
    for backbone, rate in RATES.items():
        expected = 0.007 if backbone == defaults.backbone else rate
        assert fit_options({"backbone": backbone}, defaults).lr == expected
        assert fit_options({"backbone": backbone, "lr": 0.5}, defaults).lr == 0.5
    assert fit_options({"backbone": "block_quadratic"}, defaults.replace(backbone="mlp")).lr == 0.3


def shifted(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, n, 3, generator=generator)
    return x[0], x[1] + 2**0.5


@pytest.mark.parametrize("backbone", RATES)
def test_every_backbone_finds_three_nats(backbone: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"backbone": backbone, "steps": 200, "batch_size": 64, "features": 32, "depth": 1}
    with caplog.at_level(logging.WARNING):
        tracked = KLTracker(3, options=options, reference=normal(2000, 3)).update(
            2**0.5 + normal(2000, 3, seed=1)
        )
    # The log-ratio has a deviation of 6 ** 0.5, over 500 points that are held out.
    assert tracked.estimate == pytest.approx(3.0, abs=0.5)
    assert not [text for text in caplog.messages if "constant" in text]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 1e-9}, "the rate 1e-09 does not suit the backbone mlp (0.002 does"),
        ({"lr": 2e-3}, "still moving when its 60 steps ended"),
    ],
)
def test_fits_that_did_not_arrive_say_so(
    options: dict[str, float], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"batch_size": 64, "features": 16, "depth": 1, "steps": 60, **options}
    with caplog.at_level(logging.WARNING):
        fit_ratio("os-dre", shifted, 3, small)
    assert message in caplog.text


@pytest.mark.parametrize(("d", "rho"), [(1, 0.9), (1, 0.0), (3, 0.6)])
def test_neighbours_without_their_bias(d: int, rho: float) -> None:
    truth = -d / 2 * math.log(1 - rho**2)
    z = []
    for seed in range(3):
        x, noise = normal(2, 300, d, seed=seed)
        y = rho * x + math.sqrt(1 - rho**2) * noise
        found = debiased_ksg(x**3, np.arctan(y))
        z.append((found.nats - truth) / found.error)
        assert 0.7 < found.error / math.sqrt((d * rho**2 + 0.5) / 300) < 2
    assert np.abs(z).max() < 3
    assert abs(np.mean(z)) < 1.5
    # What is taken off is no small thing where neighbours are far away.
    assert d == 1 or ksg(x, y, 10) < truth - 0.08


def test_the_result_says_its_method_and_drops_copies(caplog: pytest.LogCaptureFixture) -> None:
    x, y = normal(2, 250, 3)
    pick = np.random.default_rng(0).integers(0, 250, 2000)
    with caplog.at_level(logging.WARNING):
        result = mutual_information(x[pick], y[pick])
    assert "250 of 2000 rows are distinct" in caplog.text
    assert (result.method, result.rows) == ("ksg", 250)
    assert result.low < 0 < result.high < 0.3
    quick = {"steps": 5, "features": 8, "depth": 1}
    assert mutual_information(x, y, options=quick).method == "os-dre"
    assert mutual_information(x, y, "logistic", quick).method == "logistic"


def test_a_ratio_is_normalised_and_its_interval_holds_the_truth() -> None:
    x, noise = normal(2, 600, seed=5)
    y = 0.8 * x + 0.6 * noise
    options = {"backbone": "quadratic", "steps": 100, "batch_size": 128}
    result = mutual_information(x, y, options=options)
    truth = -math.log(0.6)
    assert result.low < truth < result.high
    # An oracle's interval, which knows the log-ratio, is 2 * 1.96 * 0.8 / 600 ** 0.5 wide.
    assert 0.128 < result.high - result.low < 0.32


def test_a_density_of_copies_tells_what_new_rows_find(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ood_osdre.tasks.density.DRAWS", 500)
    options = {"steps": 150, "batch_size": 128, "features": 32, "depth": 1, "evaluations": 3}
    with caplog.at_level(logging.WARNING):
        density = fit_density(normal(300, 6)[PICK], "d3re", options)
    fresh = density.log_density(normal(1000, 6, seed=9)).mean()
    assert "300 of 3000 rows are distinct" in caplog.text
    assert density.log_likelihood == pytest.approx(fresh, abs=1 + 3 * density.standard_error)


def test_truths_of_the_benchmark_are_means_of_its_log_ratios(benchmarks: Path) -> None:
    import information

    for task, dims in information.DIMS.items():
        d = dims[-1]
        drawn = information.draw(task, d, 20_000, np.random.default_rng(99))
        error = drawn.log_ratio.std() / 20_000**0.5
        assert abs(drawn.log_ratio.mean() - information.truth(task, d)) <= 4 * error + 1e-9
    assert len(list(information.grid())) == 23 * (40 + 10)


def test_the_report_of_the_benchmark_counts_what_holds_the_truth(benchmarks: Path) -> None:
    import information

    line = {"task": "weak", "d": 1, "n": 500, "truth": 1.0, "nats": 1.0, "low": 0.8, "high": 1.2}
    line |= {"oracle": 0.2, "seconds": 1.0, "method": "ksg"}
    lines = [line, line | {"low": 1.1}, line | {"task": "independent", "oracle": 0.0}]
    text = information.report(lines)
    assert "| independent | 1 | 500 | 1 | 1 | 0 | 1 | 0 | 1 | ksg |  |" in text
    assert "| weak | 1 | 500 | 2 | 1 | 0 | 0.5 | 1.25 | 1 | ksg | coverage |" in text
    assert "3 runs: pooled coverage 0.667 (asked 0.9), median width 1.25 oracles" in text
