r"""The throughput benchmark, on a few images: every way scores, and the record says what it did."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_roots import as_cifar, make_root

pytestmark = pytest.mark.usefixtures("benchmarks")

IMAGES = 8 + 5 + 5 + 5


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    torch.set_default_dtype(torch.float32)
    make_root(tmp_path)
    path = as_cifar(tmp_path)
    return ["--data-root", str(tmp_path), "--benchmark", str(path), "--workers", "0"]


def test_every_way_is_timed(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import throughput

    out = tmp_path / "out"
    assert throughput.main([*options, "--rounds", "2", "--out", str(out)]) == 0

    record = json.loads((out / "run.json").read_text())
    seconds = record["results"]["seconds"]
    expected = {throughput.WARM, throughput.SCORING, throughput.COLD, throughput.BARE}
    assert expected | {"DataLoader, 0 workers"} <= set(seconds)
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert record["results"]["images"] == IMAGES
    assert record["seed"] == throughput.SEED
    assert record["config"]["benchmark"] == options[3]
    assert f"| {throughput.WARM} |" in capsys.readouterr().out


def test_every_way_gives_the_same_scores(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import throughput

    benches = []

    def keep(bench: throughput.Bench, rounds: int) -> dict[str, list[float]]:
        benches.append(bench)
        return {throughput.WARM: [1.0]}

    monkeypatch.setattr(throughput, "measure", keep)
    monkeypatch.setattr(throughput.RunRecord, "write", lambda *_: None)
    assert throughput.main([*options, "--out", "."]) == 0

    scores = {
        name: way().scores
        for name, way in benches[0].ways().items()
        if not name.startswith("OpenOOD")  # its score is another one
    }
    warm = scores[throughput.WARM]
    assert warm.shape == (IMAGES,)
    assert warm.std() > 1e-3
    for values in scores.values():
        np.testing.assert_allclose(values, warm, atol=1e-3 * warm.std())
