r"""Tests for the mutual-information task: truths, transforms, estimates and the command."""

import argparse
import csv
import importlib
import json
import logging
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Generator

from ood_osdre.models.bases import KERNELS
from ood_osdre.tasks import information
from ood_osdre.tasks.__main__ import main
from ood_osdre.tasks.features import NormalScores
from ood_osdre.tasks.fit import FitOptions
from ood_osdre.tasks.gaussians import FAMILIES, correlated_pairs, correlation_of, dependence_task
from ood_osdre.tasks.information import DEFAULTS, Information, ksg, mutual_information
from ood_osdre.tasks.neighbours import ksg_terms
from ood_osdre.tasks.suites.mutual_information import (
    QUADRATIC,
    Job,
    add_arguments,
    estimate,
    gaussian_jobs,
    pathological_jobs,
)

# The function of its name hides the module from an import of the package's attribute.
Rows = np.ndarray
mutual_information_module = importlib.import_module("ood_osdre.tasks.suites.mutual_information")


@pytest.mark.parametrize(("dim", "nats"), [(40, 10.0), (160, 40.0), (640, 160.0), (6, 0.5)])
def test_gaussian_truths(dim: int, nats: float) -> None:
    pair = correlated_pairs(dim, nats)
    rho = pair.covariance[0, 1].item()

    assert pair.divergence == pytest.approx(nats)
    assert nats == pytest.approx(-dim / 4 * math.log(1 - rho**2))
    assert pair.id == f"gaussian-pairs-d{dim}-{nats:g}nats"


def test_the_papers_correlation_does_not_give_its_nats() -> None:
    assert correlation_of(160, 40.0) == pytest.approx(math.sqrt(1 - math.exp(-1)))
    assert -160 / 4 * math.log(1 - 0.5**2) == pytest.approx(11.51, abs=0.01)


def test_gaussian_pairs_draw_what_they_say() -> None:
    pair = correlated_pairs(4, 1.0)
    x_0, x_1 = pair.draw_pairs(100_000, Generator().manual_seed(0))
    mvn = stats.multivariate_normal

    assert torch.allclose(torch.cov(x_0.T), torch.eye(4), atol=0.02)
    assert torch.allclose(torch.cov(x_1.T), pair.covariance, atol=0.02)
    expected = mvn(np.zeros(4), pair.covariance).logpdf(x_1[:9]) - mvn(np.zeros(4)).logpdf(x_1[:9])
    assert np.allclose(pair.log_ratio(x_1[:9]), expected)
    assert pair.log_ratio(x_1).mean().item() == pytest.approx(1.0, abs=0.02)


def entropy(density: object, low: float, high: float, points: list[float] | None = None) -> float:
    def integrand(y: float) -> float:
        p = density(y)
        return -p * math.log(p) if p > 0 else 0.0

    return integrate.quad(integrand, low, high, points=points, limit=200)[0]


@pytest.mark.parametrize("noise", [0.1, 0.5, 0.9])
def test_truth_of_additive_noise(noise: float) -> None:
    def density(y: float) -> float:
        overlap = min(1.0, y + noise) - max(0.0, y - noise)
        return max(0.0, overlap) / (2 * noise)

    kinks = sorted({noise, 1 - noise})
    expected = entropy(density, -noise, 1 + noise, kinks) - math.log(2 * noise)
    assert dependence_task("additive-noise", noise).truth == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [0.7, 1.8, 4.0])
def test_truth_of_gamma_exponential(shape: float) -> None:
    # y is Lomax with scale one; given x, its entropy is 1 - log x.
    def density(u: float) -> float:
        return shape / (1 + u) ** (shape + 1)

    marginal = stats.lomax(shape).entropy()
    assert density(0.3) == pytest.approx(stats.lomax(shape).pdf(0.3))
    conditional = 1 - stats.gamma(shape).expect(math.log)
    task = dependence_task("gamma-exp", shape)
    assert task.truth == pytest.approx(float(marginal) - conditional, rel=1e-5)

    x, y = task.sample(50_000, Generator().manual_seed(0))
    assert stats.kstest(x[:, 0], stats.gamma(shape).cdf).pvalue > 1e-3
    assert stats.kstest(y[:, 0], stats.lomax(shape).cdf).pvalue > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_dependence_they_claim(family: str) -> None:
    task = dependence_task(family, 0.6)
    x, y = task.sample(20_000, Generator().manual_seed(1))

    assert x.shape == y.shape == (20_000, 1)
    assert task.id == f"{family}-0.6"
    scores = NormalScores(torch.cat([x, y], dim=1))(torch.cat([x, y], dim=1))
    assert ksg(scores[:, 0], scores[:, 1]) == pytest.approx(task.truth, abs=0.04)


def test_pairs_are_the_joint_and_the_product_of_its_marginals() -> None:
    task = dependence_task("gauss", 0.9)
    x_0, x_1 = task.draw_pairs(20_000, Generator().manual_seed(0))

    assert torch.corrcoef(x_1.T)[0, 1].item() == pytest.approx(0.9, abs=0.01)
    assert torch.corrcoef(x_0.T)[0, 1].item() == pytest.approx(0.0, abs=0.03)
    assert abs(torch.corrcoef(torch.cat([x_0[:, :1], x_1[:, :1]], dim=1).T)[0, 1]) < 0.03
    again = task.draw_pairs(20_000, Generator().manual_seed(0))
    assert torch.equal(again[0], x_0)
    assert torch.equal(again[1], x_1)


def test_normal_scores_are_normal_and_increasing() -> None:
    sample = torch.distributions.StudentT(torch.tensor(1.0)).sample((5000, 2)).double()
    scores = NormalScores(sample)
    mapped = scores(sample)
    grid = torch.cat([-(10.0 ** torch.arange(9, -4, -0.1)), 10.0 ** torch.arange(-4, 9, 0.1)])
    on_grid = scores(torch.stack([grid, grid], dim=1))

    assert stats.kstest(mapped[:, 0], "norm").statistic < 0.01
    assert (on_grid.diff(dim=0) > 0).all()
    # Beyond the sample the map grows, but slowly.
    assert on_grid.abs().max() < 30


def test_normal_scores_of_ties_and_constants() -> None:
    sample = torch.tensor([[0.0, 2.0]] * 50 + [[1.0, 2.0]] * 50)
    mapped = NormalScores(sample)(torch.tensor([[0.0, 2.0], [0.5, 2.5], [1.0, 1.0]]))

    assert torch.isfinite(mapped).all()
    assert mapped[0, 0] < mapped[1, 0] < mapped[2, 0]
    assert mapped[2, 1] < mapped[0, 1] == 0 < mapped[1, 1]


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(k, marks=() if k == "rq" else pytest.mark.slow) for k in KERNELS],
)
def test_every_kernel_finds_the_information_of_gaussians(kernel: str) -> None:
    options = QUADRATIC.replace(kernel=kernel, steps=200, batch_size=256)
    (row,) = estimate(Job("gaussian-pairs", 12, 3.0, "os-dre", options, 10_000))

    assert row["truth"] == pytest.approx(3.0)
    assert row["estimate"] == pytest.approx(3.0, rel=0.05)
    assert row["kernel"] == kernel


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_forty_nats_with_every_kernel(kernel: str) -> None:
    torch.set_default_dtype(torch.float32)
    errors = []
    for seed in range(3):
        options = QUADRATIC.replace(kernel=kernel, seed=seed)
        (row,) = estimate(Job("gaussian-pairs", 160, 40.0, "os-dre", options, 100_000))
        errors.append(row["estimate"] - 40)

    # The goal is a mean squared error; one draw alone may be off by twice its root.
    assert sum(error**2 for error in errors) / 3 < 0.05


def gauss(n: int, rho: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return x, rho * x + math.sqrt(1 - rho**2) * rng.normal(size=n)


QUICK = DEFAULTS.replace(steps=60, batch_size=128, backbone="quadratic", lr=0.05)


def test_the_result_is_one_line() -> None:
    result = Information(5 / 6, 0.79012, 0.876543, 1000, math.log(1000), "ksg")
    shown = "0.8333 nats, 0.7901 to 0.8765, 1000 rows support 6.908, ksg"
    assert repr(result) == f"Information({shown})"


def test_information_of_a_users_arrays() -> None:
    x, y = gauss(1000, 0.8)
    result = mutual_information(x, y, options=QUICK)

    assert result.low < result.nats < result.high
    assert result.nats == pytest.approx(-0.5 * math.log(1 - 0.64), abs=0.1)
    assert result.rows == 1000
    assert result.ceiling == math.log(1000)
    # Increasing maps of single variables change little; the knots of the scores move with them.
    mapped = mutual_information(np.exp(5 * x), np.arctan(y), options=QUICK)
    assert mapped.nats == pytest.approx(result.nats, abs=0.04)
    x, y = gauss(600, 0.0)
    assert abs(mutual_information(np.stack([x, x**2], axis=1), y, options=QUICK).nats) < 0.05


def test_the_product_of_marginals_has_no_pair_of_one_row() -> None:
    rows = torch.arange(6.0).repeat(2, 1).T  # x and y of a row are equal
    x_0, x_1 = information._shuffled(rows, 1)(20_000, torch.Generator().manual_seed(0))

    assert (x_0[:, 0] != x_0[:, 1]).all()
    assert (x_1[:, 0] == x_1[:, 1]).all()
    pairs = 6 * x_0[:, 0] + x_0[:, 1]
    share = torch.bincount(pairs.long(), minlength=36).reshape(6, 6) / 20_000
    torch.testing.assert_close(share, (1 - torch.eye(6)) / 30, rtol=0, atol=0.01)


def test_a_ratio_that_cannot_tell_pairs_from_shuffled_ones_is_none() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 300, 3))
    result = mutual_information(x, y, options={"steps": 40, "features": 32})

    # Of 300 rows networks find dependence that held-out pairs do not have.
    assert abs(result.nats) < 0.05
    assert result.high >= 0


@pytest.mark.parametrize(
    ("rows", "columns", "nats", "warnings"),
    [
        (300, 20, -1.0, ["300 rows are few for 40 columns", "interval is below 0"]),
        (300, 1, 9.0, ["9.00 nats is more than the log(n) = 5.70 that 300 rows can support"]),
        (9000, 1, 9.0, []),
    ],
)
def test_information_says_its_limits(
    rows: int,
    columns: int,
    nats: float,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fitted(*args: object) -> tuple[Rows, Rows]:
        return np.full(len(args[3]), nats), np.zeros(len(args[3]))

    monkeypatch.setattr(information, "_cross_fit", fitted)
    x, y = np.random.default_rng(0).normal(size=(2, rows, columns))
    with caplog.at_level(logging.WARNING):
        assert mutual_information(x, y, "os-dre").nats == pytest.approx(nats)
    assert len(caplog.records) == len(warnings)
    for expected, record in zip(warnings, caplog.messages, strict=True):
        assert expected in record


def test_rows_are_scored_by_models_that_have_not_seen_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested: list[int] = []

    def record(
        x: object, y: object, train: Rows, test: Rows, _: str, options: FitOptions, *__: object
    ) -> tuple[Rows, Rows]:
        assert not set(train) & set(test)
        assert len(train) + len(test) == 301
        assert options == DEFAULTS.replace(batch_size=77, seed=options.seed)
        tested.extend(test)
        return test.astype(float), np.zeros(len(test))

    monkeypatch.setattr(information, "_cross_fit", record)
    result = mutual_information(*gauss(301, 0.5), options={"batch_size": 77})
    assert sorted(tested) == list(range(301))
    assert result.nats == pytest.approx(150.0)


def test_ksg_of_vectors() -> None:
    # Two pairs of coordinates with correlation 0.7 and 0.4, the second turned within x.
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 4000, 2))
    rho = np.array([0.7, 0.4])
    y = rho * x + np.sqrt(1 - rho**2) * z
    turn = np.array([[0.8, -0.6], [0.6, 0.8]])
    truth = -0.5 * np.log1p(-(rho**2)).sum()

    assert truth == pytest.approx(0.424, abs=1e-3)
    assert ksg(x @ turn, y) == pytest.approx(truth, abs=0.04)
    # The scale of a column is none of its business, nor is a column that does not vary.
    assert ksg(x * [1e3, 1e-3], y) == pytest.approx(ksg(x, y), abs=1e-3)
    constant = np.column_stack([x[:, 0], np.full(4000, 7.0)])
    assert ksg(constant, y[:, :1]) == pytest.approx(ksg(x[:, 0], y[:, 0]), abs=1e-6)
    # Independent variables have none, and the estimate is never negative.
    assert 0 <= ksg(x, z) < 0.03


@pytest.mark.parametrize("neighbours", [1, 3, 10])
def test_ksg_of_vectors_is_that_of_scalars(neighbours: int) -> None:
    x, y = (v[:, None] for v in gauss(1500, 0.8))
    assert ksg_terms(x, y, neighbours).mean() == pytest.approx(ksg(x, y, neighbours), abs=1e-6)


def test_ksg_by_its_formula() -> None:
    # Every distance, by brute force.
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 2)), rng.normal(size=(60, 3))
    y[:, :2] += 2 * x
    a, b = (
        np.abs(v[:, None] - v[None]).max(axis=2) for v in (x / x.std(axis=0), y / y.std(axis=0))
    )
    eps = np.sort(np.maximum(a, b), axis=1)[:, 4, None]
    counts = [(d < eps).sum(axis=1) for d in (a, b)]  # the point itself is the + 1
    psi = special.digamma
    expected = psi(4) + psi(60) - sum(psi(c).mean() for c in counts)
    assert expected > 0.3
    assert ksg(x, y, 4) == pytest.approx(expected, abs=1e-9)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_default_of_the_gaussian_suite_takes_minutes() -> None:
    jobs = gaussian_jobs(parsed())
    fits = Counter((j.dim, j.method, j.options.backbone) for j in jobs)
    rivals = dict.fromkeys(("dre-inf", "d3re", "logistic", "nwj", "infonce"), 1)
    quadratic = {"os-dre": len(KERNELS), **rivals}

    expected = {(d, m, "block_quadratic"): n for d in (40, 160) for m, n in quadratic.items()}
    assert fits == expected | {(d, "os-dre", "mlp"): 1 for d in (40, 160)}
    assert {j.options.seed for j in jobs} == {0}
    assert {j.options.kernel for j in jobs if j.options.backbone == "mlp"} == {"rq"}


def test_full_gaussian_suite_is_the_whole_grid() -> None:
    jobs = gaussian_jobs(parsed("--full"))

    assert {j.dim for j in jobs} == {40, 80, 120, 160, 320, 640}
    assert {j.options.seed for j in jobs} == {0, 1, 2}
    # Per dimension and seed, four kernels and five rivals on the one, six methods on the other.
    assert len(jobs) == 6 * 3 * (4 + 5 + 6)


def test_given_options_of_the_gaussian_suite_win() -> None:
    given = "--methods os-dre --backbones block_quadratic --dims 40 80 120 160 --seeds 3"
    jobs = gaussian_jobs(parsed(*given.split()))
    assert len(jobs) == 4 * 3 * len(KERNELS)
    given = "--methods nwj os-dre --backbones mlp --dims 40 --kernels imq rq"
    jobs = gaussian_jobs(parsed(*given.split()))
    assert [(j.method, j.options.kernel) for j in jobs] == [("nwj", "imq"), ("os-dre", "imq")]


@pytest.mark.parametrize(
    ("arguments", "kernels"),
    [
        ("", ["rq"]),
        ("--kernels imq gaussian", ["imq", "gaussian"]),
        ("--full --seeds 1", list(KERNELS)),
    ],
)
def test_pathological_suite_has_the_kernels_asked_for(arguments: str, kernels: list[str]) -> None:
    methods = "--methods os-dre os-dre-logistic mine ksg"
    jobs = pathological_jobs(parsed(*arguments.split(), *methods.split()))
    own = [j for j in jobs if (j.family, j.level) == ("gauss", 0.9)]
    found = [(j.method, j.options.kernel) for j in own if j.method.startswith("os-dre")]

    assert found == [(m, k) for m in ("os-dre", "os-dre-logistic") for k in kernels]
    assert Counter(j.method for j in own)["mine"] == Counter(j.method for j in own)["ksg"] == 1


def test_command_writes_table_plot_and_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutual_information_module, "KSG_POINTS", 2000)
    options = "--suite all --methods ksg --quiet"
    # Of all suites the one that has fits is run, the other left out.
    assert main(["mi", *options.split(), "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "mi-gaussian.md").exists()
    with (tmp_path / "mi-pathological.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 11
    for row in rows:
        assert float(row["mean"]) == pytest.approx(float(row["truth"]), abs=0.15)
    record = json.loads((tmp_path / "mi-pathological.json").read_text())
    assert len(record["results"]["rows"]) == 11
    assert record["config"]["suite"] == "pathological"
    assert (tmp_path / "mi-pathological.png").stat().st_size > 1000
    assert "| gauss-0.9 | KSG |" in " ".join(capsys.readouterr().out.split())


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from ood_osdre.tasks.__main__ import main
try:
    main(["--help"])
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.endswith("0 False\n")
