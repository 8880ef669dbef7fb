r"""The latency benchmark: timings against a clock that is set, memory against counted bytes."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ood_osdre.__main__ import VERBS
from ood_osdre.models.speed import SpeedBackbone

pytestmark = pytest.mark.usefixtures("benchmarks")

SMALL = ["--width", "0.125", "--batch-size", "2", "--pairs", "10", "--sizes", "3", "--nfe", "2"]


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def spend(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    r"""A function that lets the seconds pass which the benchmark sees, and no others."""
    import timing

    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


def arguments(*options: str) -> argparse.Namespace:
    import latency

    return latency.parser().parse_args([*SMALL, *options])


def test_a_ratio_is_ours_over_the_bare_call(spend: Callable[[float], None]) -> None:
    import timing

    rng = np.random.default_rng(0)
    ratios = timing.paired_ratios(lambda: spend(2), lambda: spend(1), 20, rng)
    np.testing.assert_array_equal(ratios, 2)
    assert timing.time_over(lambda: spend(2), lambda: spend(1), 20, rng) == (2, 2, 2)


def test_the_order_within_pairs_changes(spend: Callable[[float], None]) -> None:
    import timing

    order: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: (order.append(name), spend(1))[1]

    timing.paired_ratios(call("a"), call("b"), 40, np.random.default_rng(0))
    assert 10 < order[::2].count("a") < 30


def test_an_interval_covers_the_median() -> None:
    import timing

    rng = np.random.default_rng(0)
    assert timing.interval(np.full(9, 3.0), rng) == (3, 3)
    # Of a median of n normal values the deviation is sqrt(pi / 2n).
    low, high = timing.interval(rng.normal(1, 1, 400), rng)
    assert low < 1 < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(math.pi / 800), rel=0.35)
    inside = [
        low <= 0 <= high
        for values in rng.normal(size=(200, 50))
        for low, high in [timing.interval(values, rng)]
    ]
    assert 0.9 <= np.mean(inside) <= 0.99


@pytest.fixture
def seen() -> list[tuple[nn.Module, Tensor]]:
    r"""Every module that is called in the test, with its input."""
    calls: list[tuple[nn.Module, Tensor]] = []
    handle = register_module_forward_pre_hook(lambda m, args: calls.append((m, args[0])))
    yield calls
    handle.remove()


def test_scoring_is_in_evaluation_mode_and_training_is_not(
    seen: list[tuple[nn.Module, Tensor]],
) -> None:
    import latency

    bench = latency.Bench(arguments(), torch.device("cpu"))
    for part, training in ((bench.scoring, False), (bench.batch, False), (bench.training, True)):
        seen.clear()
        part()
        assert {m.training for m, _ in seen if isinstance(m, nn.BatchNorm2d)} == {training}


def test_peak_memory_is_what_is_held_at_once() -> None:
    import latency

    x = torch.zeros(1000, dtype=torch.float32)

    def peak(forward: latency.Forward) -> int:
        return latency.peak_memory(forward, x)

    # A Python number is a tensor of a few bytes.
    assert peak(lambda x: x + 1) == pytest.approx(4000, abs=50)
    assert peak(lambda x: (x + 1) * 2) == pytest.approx(8000, abs=50)
    assert peak(lambda x: ((x + 1) * 2).exp().sum()) == pytest.approx(8000, abs=50)
    assert peak(lambda x: (x + 1).mul_(2)) == pytest.approx(4000, abs=50)


def test_every_part_on_a_small_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import latency

    monkeypatch.chdir(tmp_path)
    assert latency.main([*SMALL, "--device", "cpu"]) == 0

    record = json.loads((tmp_path / "runs" / "latency" / "run.json").read_text())
    assert record["seed"] == latency.SEED
    assert record["config"]["parts"] == [p for p in latency.PARTS if p != "precision"]
    results = record["results"]
    expected = {
        "A/A control: backbone", "log-ratio, K = 3", "log-ratio, folded", "training step",
        "time-conditioned rival, NFE = 2", "batch 16, an image", "96x96 images, a pixel",
        "memory, log-ratio, K = 3", "memory, log-ratio, folded",
    }  # fmt: skip
    assert expected <= results.keys()
    counted = {k: v for k, v in results.items() if k.startswith("memory")}
    assert all(v[1:] == [None, None] for v in counted.values())
    timed = [v for k, v in results.items() if k not in counted]
    assert all(0 < low <= m <= high < math.inf for m, low, high in timed)
    assert results["memory, log-ratio, folded"][0] == pytest.approx(1, abs=0.05)
    table = capsys.readouterr().out
    assert "| log-ratio, K = 3 |" in table
    (line,) = [line for line in table.splitlines() if "memory, log-ratio, folded" in line]
    assert line.endswith("| - |")


def test_a_deployed_score_takes_one_pass_of_each_of_its_networks(
    spend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import deployed

    plain = SpeedBackbone.forward

    def forward(self: SpeedBackbone, x: Tensor) -> Tensor:
        spend(len(x))
        return plain(self, x)

    monkeypatch.setattr(SpeedBackbone, "forward", forward)
    options = ["--batch-sizes", "2", "--pairs", "10", "--device", "cpu"]
    assert deployed.main([*options, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    assert len(results) == 6
    assert all(ratio == [1, 1, 1] for ratio in results.values())


def test_the_help_of_every_verb_is_held_to_half_a_second(
    spend: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import startup

    for slow in (None, "--help", *VERBS):
        monkeypatch.setattr(startup, "call", lambda *a, slow=slow: spend(0.6 * (slow in a)))
        assert startup.main(["--runs", "2"]) == (slow is not None)
    lines = capsys.readouterr().out.splitlines()
    assert sum("--help" in line for line in lines) == (1 + len(VERBS)) * (2 + len(VERBS))
