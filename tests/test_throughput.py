r"""The throughput benchmark, on a few images: every way scores, and the record says what it did."""

import json
import sys
from pathlib import Path

import pytest
import torch
from image_roots import as_cifar, make_root


@pytest.mark.usefixtures("benchmarks")
def test_every_way_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    import throughput

    make_root(tmp_path)
    path = as_cifar(tmp_path)
    out = tmp_path / "out"
    options = ["--data-root", str(tmp_path), "--benchmark", str(path), "--out", str(out)]
    assert throughput.main([*options, "--rounds", "2", "--workers", "0"]) == 0

    record = json.loads((out / "run.json").read_text())
    seconds = record["results"]["seconds"]
    expected = {throughput.WARM, throughput.SCORING, throughput.COLD, throughput.BARE}
    assert expected | {"DataLoader, 0 workers"} <= set(seconds)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert record["results"]["images"] == 8 + 5 + 5 + 5
    assert f"| {throughput.WARM} |" in capsys.readouterr().out
    sys.modules.pop("throughput")
