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


def test_photographs_have_the_scores_of_a_data_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import throughput

    found = {}

    def keep(bench: throughput.Bench, rounds: int) -> dict[str, list[float]]:
        found.update({name: way().scores for name, way in bench.ways().items()})
        return {throughput.FILES: [1.0]}

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(throughput, "measure", keep)
    monkeypatch.setattr(throughput.RunRecord, "write", lambda *_: None)
    few = ["--photographs", "5", "--side", "32", "--stored", "50", "40", "--batch-size", "3"]
    network = ["--network", "mobilenet_v3_small", "--workers", "0", "--out", "."]
    assert throughput.main([*few, *network]) == 0
    ours, other = found[throughput.FILES], found["DataLoader, 0 workers"]
    assert ours.shape == found[throughput.BARE].shape == (5,)
    assert ours.std() > 0
    np.testing.assert_allclose(ours, other, atol=1e-3 * ours.std())


def test_memory_beside_model_and_batch_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memory_224

    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(memory_224, "FEW", 8)
    few = ["--images", "40", "--side", "32", "--batch-size", "4", "--steps", "4"]
    assert memory_224.main([*few, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "run.json").read_text())["results"]
    assert results["decoded"] == pytest.approx(80 * 32 * 32 * 3 / 2**20)
    assert results["fits"]["all"]["max_rss"] >= results["fits"]["few"]["max_rss"] > 100
    assert "| more |" in capsys.readouterr().out
