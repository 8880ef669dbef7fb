r"""The latency benchmark: its memory against counted bytes, and every part on a small network."""

import json
import math
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("benchmarks")


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


def test_every_part_on_a_small_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    import latency

    options = ["--width", "0.125", "--batch-size", "2", "--pairs", "10", "--sizes", "3"]
    assert latency.main([*options, "--nfe", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0

    results = json.loads((tmp_path / "run.json").read_text())["results"]
    expected = {
        "A/A control: backbone", "log-ratio, K = 3", "log-ratio, folded", "training step",
        "time-conditioned rival, NFE = 2", "batch 16, an image", "96x96 images, a pixel",
        "memory, log-ratio, K = 3", "memory, log-ratio, folded",
    }  # fmt: skip
    assert expected <= results.keys()
    assert all(0 < low <= m <= high < math.inf for m, low, high in results.values())
    assert results["memory, log-ratio, folded"][0] == pytest.approx(1, abs=0.05)
    assert "| log-ratio, K = 3 |" in capsys.readouterr().out
