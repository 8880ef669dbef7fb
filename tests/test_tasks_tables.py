r"""Tests of the tables of the tasks' records, and of the scores of `benchmark-mi`'s tasks."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def tables(benchmarks: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    r"""The module of the tables, with a folder of records that is empty."""
    import task_tables

    monkeypatch.setattr(task_tables, "RECORDS", tmp_path)
    return task_tables


@pytest.fixture
def script(benchmarks: Path) -> ModuleType:
    r"""The script that scores the samples."""
    import score_benchmark_mi

    return score_benchmark_mi


def write(path: Path, table: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"config": {}, "results": {"table": table}}))


def cells(text: str) -> list[list[str]]:
    r"""Returns the cells of a Markdown table, without the rule."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    assert len({len(line) for line in lines}) == 1
    return [lines[0], *lines[2:]]


def pair(task: str, method: str, error: float, **others: object) -> dict[str, Any]:
    common = {"task": task, "method": method, "kernel": "-", "evaluations": 1, "truth": 1.0}
    return {**common, "mean": 1 + error, "mae": abs(error), "mse": error**2, **others}


def test_errors_over_pathological_pairs(tables: ModuleType, tmp_path: Path) -> None:
    rows = [pair(t, "KSG", e) for t, e in (("a", 0.1), ("b", -0.3))]
    for kernel, error in (("rq", 0.5), ("imq", 0.2)):
        rows += [pair(t, "OS-DRE", error, kernel=kernel) for t in "ab"]
    rows += [pair(t, "DRE-∞", 1.0, evaluations=50) for t in "ab"]
    write(tmp_path / "mi_pathological.json", rows)

    assert cells(tables.pathological_errors()) == [
        ["method", "MAE", "MSE"],
        ["KSG", "0.200", "0.05"],
        ["OS-DRE, rq", "0.500", "0.25"],
        ["OS-DRE, imq", "0.200", "0.04"],
        ["DRE-∞, NFE 50", "1.000", "1"],
    ]
    # The table by task has a column for each of the same rows.
    assert cells(tables.pathological())[1] == ["a", "1.00", "1.10", "1.50", "1.20", "2.00"]


def test_table_of_tables(tables: ModuleType, tmp_path: Path) -> None:
    row = {
        "table": "wine", "dim": 13, "p0": "standard", "method": "OS-DRE", "kernel": "rq",
        "evaluations": 1, "nll": -1.234, "log_mass": 0.5, "log_mass_error": 0.01,
        "effective": 123.4, "log_mass_ais": 0.75, "log_mass_ais_error": 0.2,
        "normalised_nll": -0.484, "train_seconds": 12.3,
    }  # fmt: skip
    solver = {"method": "D³RE", "kernel": "-", "evaluations": 10, "log_mass_ais": None}
    last = {**row, "table": "iris", "dim": 4}
    write(tmp_path / "density_tabular.json", [row, row | solver, last])
    write(tmp_path / "density_tabular_whitened.json", [row | {"p0": "whitened"}])

    found = cells(tables.tabular())
    assert found[0][:5] == ["table", "p0", "method", "NFE", "NLL, as it comes"]
    numbers = ["1", "-1.23", "0.50 ± 0.01", "123", "0.75 ± 0.20", "-0.48", "12"]
    assert found[1] == ["wine (d = 13)", "whitened", "OS-DRE, rq", *numbers]
    assert found[2] == ["wine (d = 13)", "standard", "OS-DRE, rq", *numbers]
    assert found[3][1:4] == ["standard", "D³RE", "10"]
    assert found[3][7] == "-"
    assert found[4][0] == "iris (d = 4)"


def sample(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=x, y=y, truth=0.5)


def test_scores_have_a_rival_on_vectors_too(script: ModuleType, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 2000, 2))
    y = 0.7 * x + math.sqrt(0.51) * z
    truth = -math.log(0.51)
    # Tails as heavy as these are none for normal scores.
    sample(tmp_path / "in" / "heavy.npz", np.sinh(5 * x), np.exp(4 * y))
    assert script.main([str(tmp_path / "in"), "--out", str(tmp_path / "a"), "--steps", "2",
                        "--rows", "1500", "--quiet"]) == 0  # fmt: skip
    (row,) = json.loads((tmp_path / "a" / "bmi.json").read_text())["results"]["table"]
    assert row["dims"] == "2+2"
    assert row["ksg"] == pytest.approx(truth, abs=0.06)

    # Added to a record, KSG's is the only number that changes.
    record = tmp_path / "a" / "bmi.json"
    content = json.loads(record.read_text())
    content["results"]["table"][0]["ksg"] = None
    record.write_text(json.dumps(content))
    arguments = [str(tmp_path / "in"), "--out", str(tmp_path / "b"), "--add-ksg", str(record)]
    assert script.main(arguments) == 0
    again = json.loads((tmp_path / "b" / "bmi.json").read_text())
    assert again["results"]["table"] == [row]
    assert again["config"] == {**content["config"], "estimates_of": content["commit"]}
