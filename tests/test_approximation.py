r"""The two theory points of docs/theory.md, in numbers, and that page's tables."""

import importlib.util
import math
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ood_osdre.models.bases import KERNELS, RBFBasis

ROOT = Path(__file__).parents[1]


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "benchmarks_approximation", ROOT / "benchmarks" / "approximation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_benchmark()
smooth_kernels = pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "matern32"])


@cache
def study(kernel: str) -> dict:
    return {target.name: (target, errors) for target, errors in bench.study(kernel)}


@pytest.mark.parametrize("target", bench.TIME_SCORES, ids=lambda t: t.name)
def test_every_clock_leaves_the_log_ratio_alone(target: bench.Target) -> None:
    times, weights = bench.rule()
    assert weights @ target.function(times) == pytest.approx(bench.log_ratio(), abs=1e-9)


def test_time_score_is_that_of_the_path() -> None:
    def log_density(u: float) -> float:
        variance = (1 - u) ** 2 + u**2 / 4
        return -0.5 * ((bench.X - 2 * u) ** 2 / variance + math.log(2 * math.pi * variance))

    for u in (0.1, 0.5, 0.9):
        slope = (log_density(u + 1e-5) - log_density(u - 1e-5)) / 2e-5
        assert bench.time_score(np.array(u)) == pytest.approx(slope, rel=1e-7)
    assert log_density(1.0) - log_density(0.0) == pytest.approx(bench.log_ratio(), rel=1e-12)


# First point: orthonormal bases.


@pytest.mark.parametrize("name", bench.ORTHONORMAL)
def test_bases_are_orthonormal(name: str) -> None:
    times, weights = bench.rule()
    values = bench.ORTHONORMAL[name](times, 12)
    np.testing.assert_allclose(values.T @ (weights[:, None] * values), np.eye(12), atol=1e-12)


@pytest.mark.parametrize("name", ["Legendre", "cosine"])
@pytest.mark.parametrize("target", bench.TIME_SCORES, ids=lambda t: t.name)
def test_orthonormal_bases_lose_all_but_the_constant(name: str, target: bench.Target) -> None:
    times, weights = bench.rule()
    values, s = bench.ORTHONORMAL[name](times, 16), target.function(times)
    integrals = weights @ values
    h = values.T @ (weights * s)

    np.testing.assert_allclose(integrals, np.eye(16)[0], atol=1e-12)
    # The other coefficients are needed for the score and do nothing for the ratio.
    assert np.abs(h[1:]).max() > np.abs(h[0])
    assert integrals @ h == pytest.approx(h[0], abs=1e-9)
    assert integrals @ (h * np.r_[1, np.full(15, 1e3)]) == pytest.approx(h[0], abs=1e-7)


def test_an_orthonormal_basis_without_the_constant_keeps_its_integrals() -> None:
    times, weights = bench.rule()
    integrals = weights @ bench.sine(times, 8)
    k = np.arange(1, 9)
    expected = np.where(k % 2 == 1, 2 * math.sqrt(2) / (k * math.pi), 0)

    np.testing.assert_allclose(integrals, expected, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_radial_atoms_all_have_an_integral(kernel: str) -> None:
    integrals = RBFBasis(kernel, 16, bench.SIGMA).integral().detach().numpy()
    assert integrals.min() > 0.4 * integrals.max()


# Second point: rates of best approximation, with fixed shapes and above rounding.


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target", bench.TIME_SCORES, ids=lambda t: t.name)
def test_errors_fall_at_least_at_the_algebraic_rate(kernel: str, target: bench.Target) -> None:
    _, errors = study(kernel)[target.name]
    # The native space of the Matérn kernel is W^{2,2}: no more than K^-2 is promised.
    predicted = min(target.smoothness, 2.0)

    assert bench.algebraic_rate(errors) >= predicted - 0.1
    above = [e for e, resolved in errors.values() if resolved]
    assert len(above) >= 5
    assert above[-1] < above[0] / 100


def test_matern_rate_is_algebraic() -> None:
    _, errors = study("matern32")["constant speed"]
    assert bench.algebraic_rate(errors) < 3
    assert all(resolved for _, resolved in errors.values())


@smooth_kernels
@pytest.mark.parametrize("name", ["atom off the grid", "constant speed"])
def test_smooth_kernels_converge_exponentially(kernel: str, name: str) -> None:
    _, errors = study(kernel)[name]
    above = {k: e for k, (e, resolved) in errors.items() if resolved and k >= 8}
    sizes, logs = np.array(list(above)), np.log(list(above.values()))
    local = -np.diff(logs) / np.diff(np.log(sizes))

    # Faster than the Matérn kernel, and faster than any power: the local exponent grows.
    _, matern = study("matern32")[name]
    assert bench.algebraic_rate(errors) > bench.algebraic_rate(matern) + 2
    assert local[-1] > 2 * local[0]
    assert local[-1] > 6
    assert bench.exponential_rate(errors) > 0.1
    # And no slower than e^{-cK}: the rate per atom does not die out.
    assert logs[-1] <= logs[0] - 0.1 * (sizes[-1] - sizes[0])


def test_gaussian_rate_per_atom_grows() -> None:
    _, errors = study("gaussian")["atom off the grid"]
    above = {k: e for k, (e, resolved) in errors.items() if resolved and k >= 8}
    per_atom = -np.diff(np.log(list(above.values()))) / np.diff(list(above))

    assert (np.diff(per_atom) > 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [8, 16, 32])
def test_error_of_the_one_step_ratio_is_below_that_of_the_score(kernel: str, size: int) -> None:
    times, weights = bench.rule()
    scores = np.stack([target.function(times) for target in bench.TIME_SCORES], axis=1)
    basis = RBFBasis(kernel, size, bench.SIGMA, floor=0.0)
    fit = bench.approximate(bench.evaluate(basis, times), weights, scores)
    one_step = basis.integral().detach().numpy() @ fit.coefficients
    norm = np.sqrt(weights @ scores**2)

    assert (np.abs(one_step - bench.log_ratio()) <= fit.error * norm + 1e-9).all()


# The page.


def numbers(line: str) -> list[float]:
    return [float(n) for n in re.findall(r"(?<![\w.(^])\d+(?:\.\d+)?(?:e[+-]\d+)?", line)]


@pytest.mark.parametrize(
    "table", ["orthonormal_table", "approximation_table", "conditioning_table"]
)
def test_page_holds_the_tables_of_the_script(table: str) -> None:
    page = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
    _, _, rest = page.partition(f"<!-- {table} -->\n")
    kept, _, _ = rest.partition("\n<!-- end -->")
    lines, expected = kept.splitlines(), getattr(bench, table)().splitlines()

    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert re.sub(r"[\d.e+()-]", "", line) == re.sub(r"[\d.e+()-]", "", other)
        # Entries at the rounding limit, in parentheses, depend on the machine; so do ranks by 1.
        np.testing.assert_allclose(
            numbers(line),
            numbers(other),
            rtol=0.15,
            atol=1.0 * ("∞" in line or "400" in line) + 1e-8,
        )
