r"""Tests of what the tasks refuse: arrays of other kinds, discrete variables, damaged files."""

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
from ood_osdre.tasks import DriftMonitor, KLTracker, fit_density, mutual_information
from ood_osdre.tasks.features import NormalScores
from ood_osdre.tasks.fit import FitOptions, RatioFit, divergence, fit_ratio
from ood_osdre.tasks.information import DEFAULTS, ksg
from ood_osdre.tasks.rows import read_rows
from ood_osdre.tasks.suites.tables import load_table

FEW = DEFAULTS.replace(steps=3, batch_size=64, backbone="quadratic")
QUICK = FitOptions(steps=3, backbone="quadratic")


def gauss(n: int = 400, rho: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return x, rho * x + math.sqrt(1 - rho**2) * rng.normal(size=n)


def shifted(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, n, 2, generator=generator)
    return x[0], x[1] + 1


def same(x: ArrayLike) -> ArrayLike:
    return x


def refused(name: str, message: str, function: Callable[..., object], *arguments: object) -> None:
    r"""Checks that what is refused is named in one line that begins with it."""
    with pytest.raises(UserError, match=f"^{name}.*(?s:{message})") as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


X, Y = gauss()
CLASSES = np.arange(400) % 10
ZERO_INFLATED = np.where(np.arange(400) < 30, 0.0, X)

#: The public functions of an array of rows, each with the name that it gives to its argument.
EDGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "information of x": ("x", lambda v: mutual_information(v, Y)),
    "information of y": ("y", lambda v: mutual_information(X, v)),
    "neighbours": ("x", lambda v: ksg(v, Y)),
    "density": ("x", fit_density),
    "reference": ("reference", lambda v: KLTracker(1, reference=v)),
    "window": ("window", KLTracker(1, reference=X).update),
    "calibration": ("calibration", lambda v: DriftMonitor(same, v)),
    "stream": ("stream", DriftMonitor(same, X).update),
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.r_[np.nan, X[1:]], "NaN; expected finite numbers"),
        (np.full(400, np.inf), "infinity.*; expected finite numbers"),
        (np.ma.masked_less(X, 0), "masked"),
        (X + 1j, "[Cc]omplex"),
        (torch.complex(torch.tensor(X), torch.tensor(Y)), "[Cc]omplex"),
        (np.arange(400).astype("M8[s]"), "M8"),
        ([None, *Y[1:]], "expected finite numbers"),
        (["a"] * 400, "expected finite numbers"),
        (pd.DataFrame({"a": range(400), "b": ["x"] * 400}), "'x'; expected finite numbers"),
        (np.zeros((20, 20, 2)), "dim 3.*; expected finite numbers with shape"),
        ([], r"shape=\(0,\)"),
        (np.float64(3.0), "expected finite numbers with shape"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
@pytest.mark.parametrize("edge", EDGES)
def test_rows_are_checked_where_they_come_in(edge: str, values: object, message: str) -> None:
    name, function = EDGES[edge]
    refused(name, message, function, values)


@pytest.mark.parametrize(
    ("edge", "values", "message"),
    [
        ("information of x", X[:199], "199"),
        ("information of x", X[:300], "got 300 and 400 rows"),
        ("information of x", CLASSES, "column 0 has 10 distinct values among 400 rows"),
        ("information of y", np.c_[Y, CLASSES], "column 1 has 10 distinct values"),
        ("information of x", ZERO_INFLATED, "column 0 repeats one value in 30 of 400 rows"),
        ("information of y", np.ones(400), "column 0 has 1 distinct values .* constant"),
        (
            "information of x",
            2 * Y + 1,
            "column 0 of x is an increasing function of column 0 of y",
        ),
        ("information of y", np.c_[Y, -(X**3)], "a decreasing function of column 1 .* infinite"),
        ("neighbours", X[1:], "got 399 and 400 rows"),
        ("reference", X[:199], "199"),
        ("reference", np.ones(400), "column 0 is constant"),
        ("window", np.ones(400), "column 0 is constant"),
        ("window", X[:199], "199"),
        ("window", np.c_[X, Y], r"got shape \(400, 2\); .* \(n, 1\)"),
        ("calibration", X[:49], "49"),
        ("calibration", np.c_[X, Y], r"got shape \(400, 2\); .* \(n, 1\)"),
        ("calibration", np.full(99, 1.7e308), "got 1.7e\\+308, expected log-ratios in nats"),
    ],
)
def test_rows_that_do_not_serve(edge: str, values: object, message: str) -> None:
    name = "x and y" if "function" in message or "and" in message else EDGES[edge][0]
    refused(name, message, EDGES[edge][1], values)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: mutual_information(X, Y, level=1.0), "level: got 1.0"),
        (lambda: mutual_information(X, Y, level=math.nan), "level: got nan"),
        (lambda: mutual_information(X, Y, options=3), "options: got 3"),
        (lambda: mutual_information(X, Y, options={"batch": 7}), "options: unknown key 'batch'"),
        (lambda: mutual_information(X, Y, level="0.9"), "level: got '0.9'"),
        (lambda: mutual_information(X, Y, "ksg", {"steps": 3}), "options: got some .*'ksg'"),
        (
            lambda: mutual_information(np.r_[X[:150], X[:150]], np.r_[Y[:150], Y[:150]]),
            "x and y: 150 distinct rows",
        ),
        (lambda: mutual_information(X, Y, X), "method: got array"),
        # Their critics are no log-ratios.
        (lambda: mutual_information(X, Y, "infonce"), "method: .* expected one of os-dre,.* nwj"),
        (lambda: mutual_information(X, Y, "mine"), "method: got 'mine'"),
        (lambda: KLTracker(2, "osdre"), r"method: got 'osdre' \(did you mean 'os-dre'"),
        (lambda: fit_ratio("osdre", shifted, 2), "method: got 'osdre'"),
        (lambda: fit_ratio("os-dre", shifted, 2, {"steps": 0}), "options: steps: got 0"),
        (lambda: ksg(X[:3], Y[:3]), "x: .*3 sample.*; .* at least 4"),
        (lambda: DriftMonitor(same, X, run_length=math.nan), "run_length .* got nan"),
        (lambda: DriftMonitor(same, X, run_length=math.inf), "run_length .* got inf"),
        (lambda: DriftMonitor(same, X, run_length=1), "run_length .* got 1"),
        (lambda: DriftMonitor(same, X, run_length="9"), "run_length .* got '9'"),
        (lambda: DriftMonitor(same, X, window=0), "run_length and window: .* 0,"),
        (lambda: DriftMonitor(same, X, window=2.5), "run_length and window: .* 2.5,"),
        (lambda: DriftMonitor(same, X).report(), "stream: got no inputs"),
        (
            lambda: DriftMonitor(lambda x, y: x, X),
            r"log_ratio: got a function of \(x, y\), expected a function of \(inputs\)",
        ),
        (lambda: DriftMonitor(X, X), r"log_ratio: got ndarray, expected a function of \(inputs\)"),
        (
            lambda: DriftMonitor(lambda x: np.c_[x, x], X),
            r"calibration scores: got shape \(400, 2\); .* shape \(n,\) or \(n, 1\)",
        ),
        (
            lambda: DriftMonitor(lambda x: x[:150], X[:150]).update(X),
            "stream: got 150 scores of 400 inputs",
        ),
        (lambda: KLTracker(1).update(X), "window: got points, but the tracker has no 'reference'"),
        # A detector may drop a mask, or make one.
        (lambda: DriftMonitor(np.asarray, np.ma.masked_less(X, 0)), "calibration: .* masked"),
        (
            lambda: DriftMonitor(lambda x: np.ma.masked_less(x, 0), X),
            "calibration scores: .* mask",
        ),
    ],
)
def test_arguments_are_refused(function: Callable[[], object], message: str) -> None:
    refused(message, "", function)


def test_refused_updates_leave_the_monitor_as_it_is() -> None:
    monitor = DriftMonitor(same, torch.tensor(X, requires_grad=True))
    before = monitor.update(torch.tensor(Y).bfloat16())
    for inputs in (np.ma.masked_less(Y, 0), Y * 1e200, Y[:0], np.r_[1.0, np.nan]):
        refused("stream", "", monitor.update, inputs)
    assert monitor.report() == before


def test_rows_of_any_kind() -> None:
    for values in (
        X,
        X.tolist(),
        np.ma.array(X),
        pd.Series(X),
        pd.DataFrame({"a": X}),
        X[:, None],
    ):
        np.testing.assert_array_equal(read_rows("x", values), X[:, None])
    half = torch.tensor(X).bfloat16().requires_grad_()
    np.testing.assert_array_equal(read_rows("x", half)[:, 0], half.detach().double().numpy())
    np.testing.assert_array_equal(read_rows("x", [[True, 2]]), [[1.0, 2.0]])
    # Two decimals: some values repeat, none of them often.
    assert math.isfinite(mutual_information(X.round(2), Y, options=FEW).nats)


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


@pytest.fixture(scope="module")
def fit() -> RatioFit:
    return fit_ratio("infonce", shifted, 2, QUICK)


def test_points_of_another_shape_are_refused(fit: RatioFit) -> None:
    for points in (torch.zeros(5, 1), torch.zeros(5, 3), torch.zeros(2), np.zeros((5, 2))):
        with pytest.raises(ValueError, match=r"^x: got .*, expected .* \(N, 2\)"):
            fit.log_ratio(points)
    empty, five = torch.zeros(0, 2), torch.zeros(5, 2)
    for pair in ((empty, five), (five, empty)):
        with pytest.raises(ValueError, match=f"got {len(pair[0])} and {len(pair[1])}"):
            divergence(fit, *pair)
    assert math.isfinite(divergence(fit, torch.zeros(9, 2), five))


def nan(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x_0, x_1 = shifted(n, generator)
    x_1[0] = torch.nan
    return x_0, x_1


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda n, g: torch.zeros(n, 2), r"\(8192, 2\) torch.float64 on cpu"),
        (lambda n, g: None, "NoneType"),
        (lambda n, g: (np.zeros((n, 2)), np.zeros((n, 2))), "ndarray, ndarray"),
        (lambda n, g: torch.zeros(3, n, 2).unbind(), r"\(8192, 2\) .*, .*, "),
        (lambda n, g: (torch.zeros(n, 3), torch.zeros(n, 2)), r"\(8192, 3\)"),
        (lambda n, g: (torch.zeros(n, 1), torch.zeros(n, 1)), r"\(8192, 1\)"),
        (lambda n, g: (torch.zeros(n), torch.zeros(n)), r"\(8192,\)"),
        (lambda n, g: (torch.zeros(n, 2), torch.zeros(n - 1, 2)), r"\(8191, 2\)"),
        (lambda n, g: (torch.zeros(n, 2).long(),) * 2, "torch.int64"),
        (lambda n, g: (torch.zeros(n, 2, device="meta"),) * 2, "on meta"),
        (nan, "1 of 8192 points of p_1 not finite"),
    ],
)
def test_what_a_function_draws_is_checked_once(draw: Callable[..., Any], found: str) -> None:
    expected = r"expected two finite .* \(8192, 2\) on cpu"
    refused(f"draw_pairs: got .*{found}", expected, fit_ratio, "os-dre", draw, 2, QUICK)


def test_a_reference_that_draws_something_else_is_refused() -> None:
    wrong: list[Any] = [lambda n, g: np.zeros((n, 2)), lambda n, g: torch.zeros(n, 1), shifted]
    for draw, found in zip(wrong, ("ndarray", r"\(50000, 1\)", r"\(50000, 2\).*, "), strict=True):
        tracker = KLTracker(2, reference=draw)
        message = f"{found}.*; expected a finite floating-point tensor with shape .*, 2"
        refused("reference: got ", message, tracker.update, np.c_[X, Y])


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda n: torch.zeros(n, 2), r"a function of \(n\)"),
        (lambda n, *, generator: torch.zeros(n, 2), r"a function of \(n, \*, generator\)"),
        (lambda n, g, seed: torch.zeros(n, 2), r"a function of \(n, g, seed\)"),
    ],
)
def test_functions_of_other_arguments_are_refused(draw: Callable[..., Any], found: str) -> None:
    message = f"got {found}, expected a function of \\(n, generator\\)"
    refused("reference", message, lambda: KLTracker(2, reference=draw))
    refused("current", message, KLTracker(2).update, draw)
    refused("draw_pairs", message, fit_ratio, "os-dre", draw, 2, QUICK)


def test_what_is_no_function_draws_nothing() -> None:
    refused("draw_pairs", "got ndarray, expected a function", fit_ratio, "os-dre", X, 1, QUICK)
    # What a function raises itself is not ours to reword.
    with pytest.raises(TypeError, match="unsupported operand"):
        KLTracker(1, reference=lambda n, generator: n + "1").update(X)
    refused("current", "expected two finite", KLTracker(1).update, lambda n, g: torch.zeros(n, 1))


@pytest.mark.parametrize(
    "points", [torch.zeros(5, 3), torch.zeros(2), torch.zeros(0, 2), torch.full((5, 2), math.nan)]
)
def test_held_out_points_are_checked(points: Tensor) -> None:
    with pytest.raises(UserError, match="held_out: got"):
        fit_ratio("os-dre", shifted, 2, QUICK, held_out=(points, points))


@pytest.mark.parametrize(
    ("method", "dim", "options", "message"),
    [
        ("logistic", 2, QUICK, "method InfoNCE, expected Logistic"),
        ("infonce", 3, QUICK, "dim 2, expected 3"),
        ("infonce", 2, QUICK.replace(backbone="mlp"), "backbone quadratic, expected mlp"),
    ],
)
def test_a_fit_of_another_kind_is_no_start(
    fit: RatioFit, method: str, dim: int, options: FitOptions, message: str
) -> None:
    refused("initial: got a fit with ", message, fit_ratio, method, shifted, dim, options, fit)


def test_a_loss_that_is_not_finite_is_told() -> None:
    def broken(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0, x_1 = shifted(n, generator)  # the first draw is whole, and only that is checked
        return x_0, torch.where(torch.tensor(n < 8192), torch.nan, x_1)

    with pytest.raises(UserError, match="not finite"):
        fit_ratio("os-dre", broken, 2, QUICK)


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


def saved(save: Callable[..., None], *arrays: ArrayLike) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays)
    return buffer.getvalue()


WHOLE = saved(np.save, np.zeros((20, 8)))
GAS = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 5)), columns=[*"abcde"])
LABELLED = GAS.rename(columns={"a": "Meth", "b": "Eth", "c": "Time"})
ROWS = "# label,f0,f1\n" + "1.0,0.5,0.25\n0.0,1.5,2.5\n" * 20

DAMAGED = {
    "power/data.npy": [
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
    "gas/ethylene_CO.pickle": [
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
    "hepmass/1000_test.csv": [
        b"",
        b"# label,f0,f1\n",
        ROWS.replace("0.25", "text").encode(),
        "# étiquette,f0,f1\n1,2,3\n".encode("latin-1"),
        (ROWS + "1.0,0.5\n").encode(),
        b"1,2\n1,2,3,4\n1,2\n1,2,3,4,5,6\n",
        ROWS.replace("1.0,", "2.0,").encode(),
        b"label\n1\n1\n",
    ],
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.filterwarnings("ignore:Length of header")
def test_damaged_files_of_tables_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    if name.endswith("csv"):
        (path.parent / "1000_train.csv").write_text(ROWS)
    for content in DAMAGED[name]:
        path.write_bytes(content)
        refused(f".*{name}: ", "", load_table, path.parent.name, tmp_path)


@pytest.mark.parametrize(
    ("table", "change", "message"),
    [
        ("power", {"raw_columns": None}, r"tables.power.raw_columns: got null"),
        ("power", {"rows": [1, 2]}, r"tables.power.rows: got \[1, 2\]"),
        ("gas", {"dim": "8"}, r"tables.gas.dim: got '8'"),
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
    refused(rf".*m\.yml: {message}", "", load_table, table, tmp_path, path)


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
        ({"y": np.full((400, 1), np.nan)}, "y: .*NaN"),
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
    assert capsys.readouterr().err.count("\n") == 1
    refused(r".*b\.npz: ", message, script.read, tmp_path / "b.npz", None)


def test_scores_refuse_options_and_damage(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: object) -> str:
        given = [str(tmp_path), "--out", str(tmp_path / "out"), "--quiet", *map(str, arguments)]
        assert script.main(given) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "no .npz files" in told()
    np.savez(tmp_path / "a.npz", **GOOD)
    assert "--rows: got -5, expected at least 200" in told("--rows", -5)
    assert "a.npz: 400 rows, expected the 5000" in told("--rows", 5000)
    assert "method: got 'foo'" in told("--method", "foo")
    assert "method: got 'mine'" in told("--method", "mine")
    assert "none.json: no record of scores" in told("--add-ksg", tmp_path / "none.json")
    assert "steps" in told("--steps", 0)
    record = tmp_path / "bmi.json"
    for table in ([{"task": "a"}], [3], None, [{"task": "a", "rows": "many"}]):
        content = {"results": {"table": table}, "config": {}, "commit": None}
        record.write_text(json.dumps(content))
        assert "bmi.json: no record of scores" in told("--add-ksg", record)
    content["results"] = {"table": [{"task": "b", "rows": 300}]}
    record.write_text(json.dumps(content))
    assert "b.npz: no sample of a task" in told("--add-ksg", record)

    whole = (tmp_path / "a.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 3] ^= 255
    for damaged in (whole[: len(whole) // 2], bytes(flipped), b"", b"text", WHOLE):
        (tmp_path / "b.npz").write_bytes(damaged)
        assert "b.npz: no sample of a task" in told()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.05}, "sigma: got 0.05, expected a number greater than 0.05"),
        ({"seed": 2**64}, "seed: got "),
    ],
)
def test_options_that_no_fit_can_have(options: dict[str, Any], message: str) -> None:
    x = np.random.default_rng(0).normal(size=(200, 2))
    with pytest.raises(UserError, match=message):
        fit_density(x, options={"steps": 2, **options})


def test_rows_beyond_single_precision_have_no_density() -> None:
    x = np.random.default_rng(0).normal(size=(200, 2))
    density = fit_density(x, options={"steps": 2})
    with pytest.raises(UserError, match="x: 2 of 3 rows are too far from the data"):
        density.log_density(x[:3] * [[1e200], [1], [1e200]])
