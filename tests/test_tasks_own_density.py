r"""Tests of the density of a user's own rows, against Gaussians in closed form."""

import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.typing import ArrayLike
from scipy.stats import multivariate_normal

from ood_osdre.errors import UserError
from ood_osdre.tasks import fit_density
from ood_osdre.tasks.density import Density
from ood_osdre.tasks.methods import FitOptions
from ood_osdre.tasks.suites.tables import load_table

MEAN, COVARIANCE = np.array([3.0, -20.0]), np.array([[4.0, 1.2], [1.2, 0.5]])
QUICK = {"steps": 150, "batch_size": 256, "features": 32, "depth": 1}


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).multivariate_normal(MEAN, COVARIANCE, n)


@pytest.fixture(scope="module")
def fitted() -> Density:
    return fit_density(rows(2000), options=QUICK)


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


def test_units_change_the_density_by_their_volume() -> None:
    x, new = rows(500), rows(50, seed=1)
    a = fit_density(x, options=QUICK).log_density(new)
    b = fit_density(x * [10.0, 0.1] + 7, options=QUICK).log_density(new * [10.0, 0.1] + 7)
    np.testing.assert_allclose(b, a, atol=1e-6)
    one = fit_density(x[:, 0], options=QUICK | {"steps": 10})
    assert one.log_density(new[:, 0]).shape == (50,)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((99, 2)), "x: 99 rows, expected at least 100"),
        (np.zeros((300, 2, 2)), r"x: got shape \(300, 2, 2\), expected"),
        (np.r_[rows(200), [[np.nan, 0.0]]], "x: 1 of 201 rows hold NaN"),
        (np.c_[rows(200), np.ones(200)], "x: column 2 is constant"),
        (rows(200)[:, [0, 1, 0]], "x: a column is a linear function of others"),
        (np.c_[rows(200), rows(200)[:, 0] * (1 + 1e-9 * np.arange(200))], "linear function"),
        (rows(200) * 1e200, "x: column 0 goes up to .*, too large"),
        (rows(200) * 1e-300, "x: column 0 goes up to .*, too large or too small"),
        ([["a", "b"]] * 200, "x: expected numbers"),
        (pd.DataFrame({"a": range(200), "b": ["x"] * 200}), "x: expected numbers, column 'b'"),
    ],
)
def test_rows_are_refused(x: ArrayLike, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_density(x)


def test_rounded_values_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit_density(rows(200).round(), options=QUICK | {"steps": 2})
    assert "column 0 has" in caplog.text
    assert "has no bound" in caplog.text


def test_slips_are_told(fitted: Density) -> None:
    with pytest.raises(
        UserError, match="method: got 'flow', expected one of os-dre, os-dre-likelihood"
    ):
        fit_density(rows(200), "flow")
    with pytest.raises(UserError, match=r"unknown option 'step' \(did you mean 'steps'"):
        fit_density(rows(200), options={"step": 3})
    with pytest.raises(UserError, match="steps: got 0"):
        fit_density(rows(200), options={"steps": 0})
    with pytest.raises(TypeError, match="'options' should be a mapping"):
        fit_density(rows(200), options=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"x: got shape \(5, 3\), expected \(N, 2\)"):
        fitted.log_density(np.zeros((5, 3)))


def test_a_device_that_is_not_there_is_told() -> None:
    for options in ({"device": "cuda:9"}, FitOptions(device="meta")):
        with pytest.raises(UserError, match=r"options: device .*: not available here"):
            fit_density(rows(200), options=options)


def test_a_solver_is_a_density_too() -> None:
    # All options are given: whatever is not named is then FitOptions's own default.
    options = FitOptions(steps=40, standardise="no", features=16, depth=1, evaluations=3)
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
    csv, npy = tmp_path / "mine.csv", tmp_path / "mine.npy"
    pd.DataFrame(x, columns=["a", "b"]).to_csv(csv, index=False)
    np.save(npy, x)
    tables = load_table(str(csv)), load_table(str(npy))
    for table in tables:
        assert table.name in ("mine.csv", "mine.npy")
        assert [len(part) for part in (table.train, table.val, table.test)] == [240, 30, 30]
        np.testing.assert_allclose(table.train.mean(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(table.train.std(axis=0), 1)
    np.testing.assert_allclose(tables[0].test, tables[1].test)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "mine.csv: is absent"),
        ("", "mine.csv: not a table of numbers"),
        ("a,b\n1,x\n", "mine.csv: column 'b' holds"),
        ("a,b\n1,\n", "mine.csv: 1 of 1 rows are short or not finite"),
        ("a,b\n1,2\n", "mine.csv: 1 rows, expected at least 100"),
    ],
)
def test_files_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "mine.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_table(str(path))
