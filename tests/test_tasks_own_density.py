r"""Tests of the density of a user's own rows, against Gaussians in closed form."""

import logging
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from scipy.stats import multivariate_normal

from ood_osdre.errors import UserError
from ood_osdre.tasks import density as density_module
from ood_osdre.tasks import fit_density
from ood_osdre.tasks.density import Density
from ood_osdre.tasks.methods import FitOptions
from ood_osdre.tasks.partition import LogMass
from ood_osdre.tasks.suites.tables import load_table
from ood_osdre.training.checkpoint import write_checkpoint

MEAN, COVARIANCE = np.array([3.0, -20.0]), np.array([[4.0, 1.2], [1.2, 0.5]])
CORRELATION = 1.2 / np.sqrt(4.0 * 0.5)
QUICK = {"steps": 100, "batch_size": 256, "features": 32, "depth": 1}
SOLVER = {"steps": 20, "batch_size": 64, "features": 16, "depth": 1, "evaluations": 3}


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).multivariate_normal(MEAN, COVARIANCE, n)


@pytest.fixture(scope="module")
def fitted() -> Density:
    with pytest.MonkeyPatch.context() as patch:
        quick = partial(density_module.annealed_mass, chains=64, levels=60)
        patch.setattr(density_module, "annealed_mass", quick)
        return fit_density(rows(2000), options=QUICK)


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density_module, "DRAWS", 500)


def test_density_of_a_gaussian_is_its_own(fitted: Density) -> None:
    x = rows(2000, seed=1)
    truth = multivariate_normal(MEAN, COVARIANCE).logpdf(x)
    found = fitted.log_density(x)

    assert abs((truth - found).mean()) < 0.05  # the divergence from the truth, in nats
    assert np.corrcoef(truth, found)[0, 1] > 0.97
    entropy = multivariate_normal(MEAN, COVARIANCE).entropy()
    assert fitted.log_likelihood == pytest.approx(-entropy, abs=4 * fitted.standard_error)
    assert abs(fitted.log_mass) < 0.1


def test_density_integrates_to_one(fitted: Density) -> None:
    side = np.linspace(-6, 6, 201)
    root = np.linalg.cholesky(COVARIANCE)
    z = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    density = np.exp(fitted.log_density(MEAN + z @ root.T))
    mass = density.sum() * (side[1] - side[0]) ** 2 * np.linalg.det(root)
    assert mass == pytest.approx(1, abs=0.05)


def test_its_rows_are_those_of_the_gaussian(fitted: Density) -> None:
    x = fitted.sample(3000)
    assert len(np.unique(x, axis=0)) == 3000
    # Errors of means and variances of 3000 rows, and what the fit itself is off by.
    scale = np.sqrt(np.diag(COVARIANCE))
    np.testing.assert_allclose((x.mean(axis=0) - MEAN) / scale, 0, atol=0.12)
    np.testing.assert_allclose(
        np.cov(x.T) / np.outer(scale, scale), [[1, CORRELATION], [CORRELATION, 1]], atol=0.15
    )
    # Rows of its own are as likely to it as -entropy says, both by its own density.
    assert fitted.log_density(x).mean() == pytest.approx(fitted.log_likelihood, abs=0.15)
    assert (fitted.sample(5, seed=1) == fitted.sample(5, seed=1)).all()
    assert (fitted.sample(5, seed=1) != fitted.sample(5, seed=2)).all()


def test_rows_that_cannot_be_drawn_are_refused(
    fitted: Density, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density_module, "DRAWS", 10)
    monkeypatch.setattr(density_module, "LOTS", 2)
    with pytest.raises(UserError, match="of 20 draws are accepted, expected 21"):
        fitted.sample(21)


@pytest.mark.parametrize("method", ["os-dre", "d3re", "direct-likelihood"])
def test_a_density_is_kept(
    method: str, fitted: Density, tmp_path: Path, few_draws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(density_module, "annealed_mass", lambda *_: LogMass(0.1, 0.2, 3.0))
    density = fitted if method == "os-dre" else fit_density(rows(300), method, SOLVER)
    density.save(tmp_path)
    loaded = Density.load(tmp_path)
    x = rows(50, seed=3)
    assert (loaded.log_density(x) == density.log_density(x)).all()
    assert (loaded.sample(9) == density.sample(9)).all()
    names = ("log_mass", "importance", "annealed", "log_likelihood", "standard_error")
    assert [getattr(loaded, n) for n in names] == [getattr(density, n) for n in names]
    assert loaded.fit.method.label == density.fit.method.label
    assert loaded.fit.options == density.fit.options


@pytest.mark.parametrize("n", [-1, 2.5, "3"])
def test_a_sample_has_a_number_of_rows(fitted: Density, n: int) -> None:
    with pytest.raises(UserError, match=r"^sample: got .*, expected a number of rows\.$"):
        fitted.sample(n)


def test_what_is_no_density_is_refused(fitted: Density, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no checkpoint here, expected a file density\.safetensors"
    ):
        Density.load(tmp_path)
    write_checkpoint(tmp_path, "density", {"model.x": torch.zeros(1)}, {"options": {}})
    with pytest.raises(UserError, match=r"density\.safetensors: not a density"):
        Density.load(tmp_path)


def test_densities_are_short_and_drawn(fitted: Density, few_draws: None) -> None:
    assert re.fullmatch(r"Density\(OS-DRE, 2 columns, -2\.\d+ ± 0\.\d+ nats a row\)", repr(fitted))
    figure = Figure()
    ax = fitted.plot(figure.subplots())
    (mesh,) = ax.collections
    assert mesh.get_array().sum() * np.prod(np.ptp(mesh.get_coordinates(), axis=(0, 1))) / (
        mesh.get_array().size
    ) == pytest.approx(1, abs=0.1)
    one = fit_density(rows(300)[:, 0], "d3re", SOLVER)
    assert len(one.plot(figure.subplots()).lines) == 1
    three = fit_density(np.c_[rows(300), rows(300, 1)[:, 0]], "d3re", SOLVER)
    with pytest.raises(UserError, match="3 columns, expected one or two"):
        three.plot()


def test_units_change_the_density_by_their_volume(few_draws: None) -> None:
    x, new = rows(500), rows(50, seed=1)
    a = fit_density(x, "d3re", SOLVER).log_density(new)
    b = fit_density(x * [10.0, 0.1] + 7, "d3re", SOLVER).log_density(new * [10.0, 0.1] + 7)
    np.testing.assert_allclose(b, a, atol=1e-6)
    one = fit_density(pd.DataFrame({"a": x[:, 0]}), "d3re", SOLVER)
    assert one.log_density(new[:, 0]).shape == (50,)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((99, 2)), "99 rows"),
        (np.c_[rows(200), np.ones(200)], "column 2 is constant"),
        (rows(200)[:, [0, 1, 0]], "linear function of others"),
        (np.c_[rows(200), rows(200)[:, 0] * (1 + 1e-9 * np.arange(200))], "linear function"),
        (rows(200) * 1e200, "column 0 goes up to .*, too large"),
        (rows(200) * 1e-300, "column 0 goes up to .*, too large or too small"),
    ],
)
def test_rows_without_a_density_are_refused(x: ArrayLike, message: str) -> None:
    with pytest.raises(UserError, match=f"^x: .*{message}"):
        fit_density(x)


def test_rounded_values_are_warned_of(caplog: pytest.LogCaptureFixture, few_draws: None) -> None:
    with caplog.at_level(logging.WARNING):
        fit_density(rows(200).round(), "d3re", SOLVER | {"steps": 1})
    assert "column 0 has" in caplog.text
    assert "has no bound" in caplog.text


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("flow", None, "method: got 'flow', expected one of os-dre, os-dre-likelihood"),
        ("os-dre", {"step": 3}, r"options: unknown key 'step'; did you mean 'steps'"),
        ("os-dre", {"steps": 0}, "options: steps: got 0"),
        ("os-dre", 3, "options: got 3, expected a mapping"),
        ("os-dre", {"device": "cuda:9"}, "options: device .*: not available here"),
        ("os-dre", FitOptions(device="meta"), "options: device .*: not available here"),
    ],
)
def test_methods_and_options_are_refused(method: str, options: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_density(rows(200), method, options)


def test_a_solver_is_a_density_too(few_draws: None) -> None:
    # All options are given: whatever is not named is then FitOptions's own default.
    options = FitOptions(**SOLVER, standardise="no")
    density = fit_density(rows(400), "dre-inf", options)
    assert density.fit.options is options
    assert density.annealed is None
    assert density.importance is not None
    assert density.log_mass == density.importance.value
    # Rows far away are less likely than those of the data.
    near, far = density.log_density(rows(200)), density.log_density(rows(200) + 100.0)
    assert near.mean() > far.mean() + 10


def test_a_file_of_numbers_is_a_table(tmp_path: Path) -> None:
    x = rows(300)
    pd.DataFrame(x, columns=["a", "b"]).to_csv(tmp_path / "mine.csv", index=False)
    pd.DataFrame(x).to_csv(tmp_path / "bare.csv", index=False, header=False)
    np.save(tmp_path / "mine.npy", x)
    names = "mine.csv", "bare.csv", "mine.npy"
    tables = [load_table(str(tmp_path / name)) for name in names]
    for name, table in zip(names, tables, strict=True):
        assert table.name == name
        assert [len(part) for part in (table.train, table.val, table.test)] == [240, 30, 30]
        np.testing.assert_allclose(table.train.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(table.train.std(axis=0), 1)
        np.testing.assert_allclose(table.test, tables[0].test)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.csv: is absent"),
        ("", r"mine.csv: cannot be read \(no rows of numbers"),
        ("a,b\n1,x\n", r"mine.csv: .*line 2 .*no number in single precision: 'x'"),
        ("a,b\n1,\n", r"mine.csv: .*line 2 .*no number in single precision: ''"),
        ("a,b\n1,2\n", "mine.csv: 1 rows, expected at least 100"),
    ],
)
def test_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_table(str(path))
