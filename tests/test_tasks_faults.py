r"""Tests of what the tasks refuse: discrete variables, arrays of other kinds, damaged files."""

import io
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from numpy.typing import ArrayLike
from torch import Generator, Tensor

from ood_osdre.errors import UserError
from ood_osdre.resources import find
from ood_osdre.tasks.dependence import NormalScores
from ood_osdre.tasks.drift import DriftMonitor
from ood_osdre.tasks.fit import FitOptions, RatioFit, divergence, fit_ratio
from ood_osdre.tasks.information import DEFAULTS, ksg, mutual_information
from ood_osdre.tasks.rows import real_values
from ood_osdre.tasks.suites.tables import load_table
from ood_osdre.tasks.tracking import KLTracker

FEW = DEFAULTS.replace(steps=10, batch_size=64, features=16)
QUICK = FitOptions(steps=3, backbone="quadratic")


def gauss(n: int = 400, rho: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return x, rho * x + math.sqrt(1 - rho**2) * rng.normal(size=n)


def shifted(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, n, 2, generator=generator)
    return x[0], x[1] + 1


def one_line(error: pytest.ExceptionInfo[BaseException]) -> bool:
    return "\n" not in str(error.value)


X, Y = gauss()
CLASSES = np.arange(400) % 10
ZERO_INFLATED = np.where(np.arange(400) < 30, 0.0, X)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (CLASSES, CLASSES, "x: column 0 has 10 distinct values among 400 rows, expected conti"),
        (X, np.stack([Y, CLASSES], axis=1), "y: column 1 has 10 distinct values among 400 rows"),
        (ZERO_INFLATED, Y, "x: column 0 repeats one value in 30 of 400 rows"),
        (X, np.ones(400), "y: column 0 is constant over 400 rows, .*; leave it out"),
        (
            X,
            np.stack([Y, X], axis=1),
            "column 0 of x is an increasing function of column 1 of y, .* infinite",
        ),
        (np.ma.masked_less(X, 0), Y, "x: .* values are masked"),
        (X + 1j, Y, "x: expected numbers, got dtype complex128"),
        (torch.complex(torch.tensor(X), torch.tensor(Y)), Y, "x: expected numbers"),
        (X, np.arange(400).astype("M8[s]"), "y: expected numbers, got dtype datetime64"),
        (X, [None, *Y[1:]], "y: 1 of 400 rows hold NaN|y: expected numbers"),
    ],
)
def test_information_refuses(x: ArrayLike, y: ArrayLike, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        mutual_information(x, y)
    assert one_line(caught)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"method": None}, TypeError),
        ({"options": 3}, TypeError),
        ({"level": "a"}, TypeError),
        ({"level": math.nan}, ValueError),
    ],
)
def test_information_refuses_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"'{next(iter(arguments))}' should be"):
        mutual_information(X, Y, **arguments)


def test_rounded_numbers_are_continuous_enough() -> None:
    # Two decimals: some values repeat, none of them often.
    assert math.isfinite(mutual_information(X.round(2), Y, options=FEW).nats)


def test_a_mask_that_hides_nothing_and_any_real_tensor() -> None:
    expected = mutual_information(X, Y, options=FEW)
    tensor = torch.tensor(X, requires_grad=True)
    assert mutual_information(np.ma.array(X), Y, options=FEW) == expected
    assert mutual_information(tensor, Y, options=FEW) == expected
    half = torch.tensor(X).bfloat16()
    np.testing.assert_array_equal(real_values("x", half), half.double().numpy())


def test_information_of_numbers_at_the_ends_of_double_precision() -> None:
    expected = mutual_information(X, Y, options=FEW).nats
    largest = 1.7e308 * (X / np.abs(X).max())
    for mapped in (largest, X * 1e-310):
        assert mutual_information(mapped, Y, options=FEW).nats == pytest.approx(expected, abs=1e-3)
    outliers = X.copy()
    outliers[:2] = 1.7e308, -1.7e308
    assert mutual_information(outliers, Y, options=FEW).nats == pytest.approx(expected, abs=0.1)


def test_normal_scores_do_not_overflow() -> None:
    ends = torch.tensor([-1.7e308, -1e-310, 0.0, 5e-324, 1.0, 1.7e308])[:, None].double()
    for sample in (ends[:-1], ends[1:], ends[:2], ends[2:4], ends[[0, 0]]):
        mapped = NormalScores(sample)(ends)
        assert torch.isfinite(mapped).all()
        assert (mapped.diff(dim=0) >= 0).all()


def test_nearest_neighbours_of_any_scale() -> None:
    expected = ksg(X, Y)
    both = np.stack([X, Y], axis=1)
    for scale in (1e300, 1e-300, 1e-310, -1e200):
        assert ksg(X * scale, Y) == pytest.approx(expected, abs=1e-2)
        assert ksg(both * scale, Y[:, None] ** 3) == pytest.approx(
            ksg(both, Y[:, None] ** 3), abs=1e-2
        )
    assert expected > 0.3


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.r_[np.nan, X[1:]], Y, "x: 1 of 400 rows hold NaN"),
        (X, np.full(400, np.inf), "y: 400 of 400 rows hold NaN or infinity"),
        ([], [], "'x' should have shape"),
        (X, Y[1:], "got 400 and 399 rows and 3"),
        (np.ma.masked_less(X, 0), Y, "x: .* values are masked"),
        (X, Y + 1j, "y: expected numbers, got dtype complex128"),
    ],
)
def test_nearest_neighbours_refuse(x: ArrayLike, y: ArrayLike, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ksg(x, y)
    assert one_line(caught)
    with pytest.raises(TypeError, match="'neighbours' should be a whole number"):
        ksg(X, Y, 2.5)  # type: ignore[arg-type]


def same(x: ArrayLike) -> ArrayLike:
    return x


class Scored:
    r"""A detector, which is no function itself."""

    score = staticmethod(same)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"run_length": math.nan}, ValueError, "'run_length' should be more than 1"),
        ({"run_length": math.inf}, ValueError, "'run_length' should be .* finite"),
        ({"run_length": "9"}, TypeError, "'run_length' should be a number"),
        ({"window": 2.5}, TypeError, "'window' should be a whole number"),
        ({"log_ratio": "a.pt"}, TypeError, r"'log_ratio' .* such as detector\.score, got str"),
        ({"log_ratio": Scored()}, TypeError, r"such as detector\.score, got Scored"),
        ({"calibration": X[:0]}, UserError, "calibration: got no inputs, expected at least one"),
        ({"calibration": np.full(99, 1.7e308)}, UserError, "calibration scores: 99 of 99 are bey"),
        ({"calibration": np.ma.masked_less(X, 0)}, UserError, "calibration: got a masked array"),
        ({"calibration": X + 1j}, UserError, "calibration scores: expected numbers"),
    ],
)
def test_monitor_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        DriftMonitor(**{"log_ratio": same, "calibration": X, **arguments})
    assert one_line(caught)


def test_monitor_refuses_updates_and_goes_on() -> None:
    monitor = DriftMonitor(same, torch.tensor(X, requires_grad=True))
    before = monitor.update(torch.tensor(Y).bfloat16())
    for inputs in (np.ma.masked_less(Y, 0), Y * 1e200, Y[:0]):
        with pytest.raises(UserError, match="stream"):
            monitor.update(inputs)
        with pytest.raises(UserError, match=r"stream scores: .* masked"):
            DriftMonitor(lambda x: np.ma.masked_less(x, -5), X).update(Y - 9)
    assert monitor.report() == before


def test_tracker_refuses_masks() -> None:
    with pytest.raises(UserError, match=r"reference: .* masked"):
        KLTracker(1, reference=np.ma.masked_less(X[:, None], 0))


@pytest.fixture(scope="module")
def fit() -> RatioFit:
    return fit_ratio("infonce", shifted, 2, QUICK)


def test_points_of_another_dimension_are_refused(fit: RatioFit) -> None:
    for points in (torch.zeros(5, 1), torch.zeros(5, 3), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"shape \(N, 2\), got"):
            fit.log_ratio(points)
        with pytest.raises(ValueError, match=r"'held_out' should give .* shape \(.*, 2\), got"):
            fit_ratio("os-dre", shifted, 2, QUICK, held_out=(points, points))
    with pytest.raises(TypeError, match="should be a tensor, got ndarray"):
        fit.log_ratio(np.zeros((5, 2)))  # type: ignore[arg-type]
    for points in (torch.zeros(0, 2), torch.full((5, 2), torch.nan)):
        with pytest.raises(ValueError, match="held_out"):
            fit_ratio("os-dre", shifted, 2, QUICK, held_out=(points, points))
    with pytest.raises(ValueError, match="got 0 and 5"):
        divergence(fit, torch.zeros(0, 2), torch.zeros(5, 2))
    with pytest.raises(ValueError, match="got 5 and 0"):
        divergence(fit, torch.zeros(5, 2), torch.zeros(0, 2))
    assert math.isfinite(divergence(fit, torch.zeros(9, 2), torch.zeros(5, 2)))


def nan(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x_0, x_1 = shifted(n, generator)
    x_1[0] = torch.nan
    return x_0, x_1


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda n, g: torch.zeros(n, 2), "two tensors, got 1: Tensor"),
        (lambda n, g: None, "two tensors, got 1: NoneType"),
        (lambda n, g: (np.zeros((n, 2)), np.zeros((n, 2))), "two tensors, got 2: ndarray"),
        (lambda n, g: torch.zeros(3, n, 2).unbind(), "two tensors, got 3"),
        (lambda n, g: (torch.zeros(n, 3), torch.zeros(n, 2)), r"\(8192, 2\), got \(8192, 3\)"),
        (lambda n, g: (torch.zeros(n), torch.zeros(n)), r"\(8192, 2\), got \(8192,\)"),
        (lambda n, g: (torch.zeros(n, 2), torch.zeros(n - 1, 2)), r"and \(8191, 2\)"),
        (lambda n, g: (torch.zeros(n, 2).long(),) * 2, "floating-point points, got torch.int64"),
        (lambda n, g: (torch.zeros(n, 2, device="meta"),) * 2, "points on cpu, got meta"),
        (nan, "draw_pairs: 1 of 8192 points of p_1 are not finite"),
    ],
)
def test_pairs_are_checked_once(draw: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fit_ratio("os-dre", draw, 2, QUICK)
    assert one_line(caught)


def test_arguments_of_a_fit(fit: RatioFit) -> None:
    with pytest.raises(ValueError, match="'dim' should be at least 1, got 0"):
        fit_ratio("os-dre", shifted, 0, QUICK)
    with pytest.raises(TypeError, match="'method' should be"):
        fit_ratio(None, shifted, 2, QUICK)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'initial' is a fit by InfoNCE, not by Logistic"):
        fit_ratio("logistic", shifted, 2, QUICK, initial=fit)
    with pytest.raises(ValueError, match="'initial' is a fit in 2 dimensions, not in 3"):
        fit_ratio("infonce", shifted, 3, QUICK, initial=fit)
    with pytest.raises(ValueError, match="'initial' is a fit with backbone 'quadratic'"):
        fit_ratio("infonce", shifted, 2, QUICK.replace(backbone="mlp"), initial=fit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pairs_are_cast(dtype: torch.dtype) -> None:
    def draw(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0, x_1 = shifted(n, generator)
        return x_0.to(dtype).requires_grad_(), x_1.to(dtype)

    assert fit_ratio("os-dre", draw, 2, QUICK).log_ratio(torch.zeros(5, 2)).dtype == torch.float64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_fit_needs_no_mode(mode: Callable[[], Any]) -> None:
    points = torch.randn(5, 2)
    expected = fit_ratio("os-dre", shifted, 2, QUICK).log_ratio(points)
    with mode():
        held_out = shifted(50, Generator().manual_seed(0))
        found = fit_ratio("os-dre", shifted, 2, QUICK)
        fit_ratio("os-dre", shifted, 2, QUICK, held_out=held_out, initial=found)
    torch.testing.assert_close(found.log_ratio(points), expected)


def raw(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def saved(save: Callable[..., None], *arrays: ArrayLike) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays)
    return buffer.getvalue()


WHOLE = saved(np.save, np.zeros((20, 8)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 no archive",
        b"some text",
        WHOLE[: len(WHOLE) // 2],
        saved(np.savez, np.zeros((20, 8))),
        saved(np.save, np.array([["a"] * 8] * 20)),
        saved(np.save, np.zeros((20, 8), complex)),
        saved(np.save, np.zeros((0, 8))),
        saved(np.save, np.zeros(8)),
    ],
)
def test_damaged_arrays(tmp_path: Path, content: bytes) -> None:
    raw(tmp_path / "power/data.npy", content)
    with pytest.raises(UserError, match=r"power/data\.npy: ") as caught:
        load_table("power", str(tmp_path))
    assert one_line(caught)


GAS = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 5)), columns=[*"abcde"])
LABELLED = GAS.rename(columns={"a": "Meth", "b": "Eth", "c": "Time"})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"cnowhere_at_all\nThing\n.",
        pickle.dumps(LABELLED)[:300],
        *map(pickle.dumps, ({}, [1], np.zeros((5, 5)), GAS["a"], GAS)),
        pickle.dumps(LABELLED.drop(columns="Eth")),
        pickle.dumps(LABELLED.assign(d="x")),
        pickle.dumps(LABELLED[:0]),
        pickle.dumps(LABELLED[["Meth", "Eth", "Time"]]),
    ],
)
def test_damaged_pickles(tmp_path: Path, content: bytes) -> None:
    raw(tmp_path / "gas/ethylene_CO.pickle", content)
    with pytest.raises(UserError, match=r"gas/ethylene_CO\.pickle: ") as caught:
        load_table("gas", tmp_path)
    assert one_line(caught)


ROWS = "# label,f0,f1\n" + "1.0,0.5,0.25\n0.0,1.5,2.5\n" * 20


@pytest.mark.parametrize("name", ["1000_train.csv", "1000_test.csv"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# label,f0,f1\n",
        ROWS.replace("0.25", "text").encode(),
        "# étiquette,f0,f1\n1,2,3\n".encode("latin-1"),
        (ROWS + "1.0,0.5\n").encode(),
        b"1,2\n1,2,3,4\n1,2\n1,2,3,4,5,6\n",
        ROWS.replace("1.0,", "2.0,").encode(),
        b"label\n1\n1\n",
    ],
)
@pytest.mark.filterwarnings("ignore:Length of header")
def test_damaged_csv_files(tmp_path: Path, name: str, content: bytes) -> None:
    for each in ("1000_train.csv", "1000_test.csv"):
        raw(tmp_path / "hepmass" / each, ROWS.encode())
    raw(tmp_path / "hepmass" / name, content)
    with pytest.raises(UserError, match=f"hepmass/{name}: ") as caught:
        load_table("hepmass", tmp_path)
    assert one_line(caught)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("gas", {"strange": 1}, r"unknown key 'tables.gas.strange'"),
        ("power", {"raw_columns": None}, r"tables.power.raw_columns: got null"),
        ("power", {"rows": 3}, r"tables.power.rows: got 3, expected"),
        ("power", {"rows": [1, 2]}, r"tables.power.rows: got \[1, 2\]"),
        ("gas", {"dim": "8"}, r"tables.gas.dim: got '8'"),
        ("power", {"files": []}, r"tables.power.files: got \[\]"),
        ("hepmass", {"files": ["a.csv"]}, r"tables.hepmass.files: got \['a.csv'\]"),
        ("power", {"files": "a"}, r"tables.power.files: got 'a'"),
    ],
)
def test_faults_of_a_manifest(
    tmp_path: Path, table: str, change: dict[str, Any], message: str
) -> None:
    content = yaml.safe_load(find("data_manifests", "tabular").read_text())
    content["tables"][table] |= change
    path = tmp_path / "m.yml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=rf"m.yml: {message}"):
        load_table(table, tmp_path, path)
    del content["tables"]["miniboone"]["raw_columns"]
    content["tables"][table] = yaml.safe_load(find("data_manifests", "tabular").read_text())[
        "tables"
    ][table]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"the key 'tables\.miniboone\.raw_columns' is missing"):
        load_table(table, tmp_path, path)


def test_an_absent_file_names_the_manifest_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.yml"
    path.write_text(find("data_manifests", "tabular").read_text())
    with pytest.raises(UserError, match=r"m\.yml\.$") as caught:
        load_table("power", str(tmp_path), path)
    assert "yml.yml" not in str(caught.value)


@pytest.fixture
def script(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import score_benchmark_mi

    def fitted(*_: object) -> None:
        raise AssertionError("fitted before all files were checked")

    monkeypatch.setattr(score_benchmark_mi, "mutual_information", fitted)
    return score_benchmark_mi


GOOD = {"x": X[:, None], "y": Y[:, None], "truth": np.float64(0.5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X}, r"x and y have shapes \(400,\)"),
        ({"truth": None}, "no sample of a task"),
        ({"truth": np.ones(2)}, "truth: got"),
        ({"truth": np.float64(np.nan)}, "truth: got nan"),
        ({"truth": np.array("a")}, "truth: got a"),
        ({"x": np.array([[{}]] * 400)}, "no sample of a task"),
        ({"x": GOOD["x"][:300]}, "x and y: got 300 and 400 rows"),
        ({"y": np.full((400, 1), np.nan)}, "y: 400 of 400 rows hold NaN"),
        ({"y": CLASSES[:, None]}, "y: column 0 has 10 distinct"),
    ],
)
def test_scores_refuse_samples(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    message: str,
) -> None:
    np.savez(tmp_path / "a.npz", **GOOD)
    arrays = {k: v for k, v in {**GOOD, **change}.items() if v is not None}
    np.savez(tmp_path / "b.npz", **arrays)
    assert script.main([str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=rf"b\.npz: .*{message}"):
        script.read(tmp_path / "b.npz", None)


def test_scores_refuse_options_and_damage(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        given = [str(tmp_path), "--out", str(tmp_path / "out"), "--quiet", *map(str, arguments)]
        assert script.main(given) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "no .npz files" in refused()
    np.savez(tmp_path / "a.npz", **GOOD)
    assert "--rows: got -5, expected at least 200" in refused("--rows", -5)
    assert "a.npz: 400 rows, expected the 5000" in refused("--rows", 5000)
    assert "method: got 'foo'" in refused("--method", "foo")
    assert "method: got 'mine', expected one that" in refused("--method", "mine")
    assert "none.json: no record of scores" in refused("--add-ksg", tmp_path / "none.json")
    assert "steps" in refused("--steps", 0)
    record = tmp_path / "bmi.json"
    for table in ([{"task": "a"}], [3], None, [{"task": "a", "rows": "many"}]):
        content = {"results": {"table": table}, "config": {}, "commit": None}
        record.write_text(json.dumps(content))
        assert "bmi.json: no record of scores" in refused("--add-ksg", record)
    content["results"] = {"table": [{"task": "b", "rows": 300}]}
    record.write_text(json.dumps(content))
    assert "b.npz: no sample of a task" in refused("--add-ksg", record)

    whole = (tmp_path / "a.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255
    for damaged in (whole[: len(whole) // 2], bytes(flipped), b"", b"text", WHOLE):
        (tmp_path / "b.npz").write_bytes(damaged)
        assert "b.npz: no sample of a task" in refused()
