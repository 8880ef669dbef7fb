r"""The scikit-learn estimator: its own checks, and laws of Gaussians that have a closed form."""

import copy
import logging
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import beta, multivariate_normal
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from ood_osdre import OneStepOutlierDetector
from ood_osdre.detectors.outliers import MARGIN, REFERENCES, WIDER

#: The checks of scikit-learn that may fail, each with the reason; there are none.
EXPECTED: dict[str, str] = {}
QUICK: dict[str, Any] = {"max_iter": 2, "width": 8, "depth": 1, "random_state": 0}
MEAN, COVARIANCE = np.array([1.0, -50.0]), np.array([[1.0, 3.0], [3.0, 25.0]])


def rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).multivariate_normal(MEAN, COVARIANCE, n)


@pytest.fixture(scope="module")
def fitted() -> OneStepOutlierDetector:
    return OneStepOutlierDetector(random_state=0, max_iter=60).fit(rows(1000))


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Any:  # noqa: ANN401
    logging.disable(logging.WARNING)  # of few rows, hundreds of which are fitted here
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn() -> None:
    detector = OneStepOutlierDetector(**QUICK)
    results = check_estimator(
        detector, expected_failed_checks=EXPECTED, on_skip=None, on_fail="raise"
    )
    assert len([r for r in results if r["status"] == "passed"]) > 40


def test_the_example_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parent.parent / "docs" / "outliers.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {}
    exec(block.replace("random_state=0).fit", "random_state=0, max_iter=20).fit"), space)  # noqa: S102
    assert (space["detector"].feature_names_in_ == space["x"].columns).all()
    assert (space["decisions"] == -1).mean() > 0.3
    assert (space["p"] <= 0.05).mean() < 0.2


def test_log_ratio_of_two_gaussians_is_their_own() -> None:
    p_1, p_0 = multivariate_normal(MEAN, COVARIANCE), multivariate_normal(MEAN, 4 * COVARIANCE)
    detector = OneStepOutlierDetector(
        p_0.rvs(4000, random_state=1), **QUICK | {"max_iter": 150, "width": 32}, learning_rate=5e-3
    ).fit(rows(2000))
    x = np.concatenate([rows(500, 2), p_0.rvs(500, random_state=3)])
    truth = p_1.logpdf(x) - p_0.logpdf(x)
    found = detector.score_samples(x)
    assert abs((found - truth)[:500].mean()) < 0.2  # nats, of ratios from -20 to 1.4
    assert np.median(np.abs(found - truth)) < 0.25
    assert np.corrcoef(found, truth)[0, 1] > 0.97


def test_inliers_are_flagged_at_the_rate(fitted: OneStepOutlierDetector) -> None:
    # Of 200 rows that calibrate, the rate given them is uncertain: Beta(10, 191).
    flagged = int((fitted.predict(rows(2000, seed=4)) == -1).sum())
    assert beta(10, 191).ppf(1e-4) < flagged / 2000 < beta(10, 191).ppf(1 - 1e-4)
    with pytest.raises(ValueError, match="X: got masked values"):
        fitted.predict(np.ma.masked_greater(rows(9), 1.0))
    assert (fitted.predict([[1.0, -50.0], [6.0, -75.0]]) == [1, -1]).all()


@pytest.mark.parametrize("share", [0.15, 0.03])
def test_rows_that_repeat_are_inliers_that_count_as_often(share: float) -> None:
    def drawn(n: int, seed: int) -> np.ndarray:
        x, rng = rows(n, seed), np.random.default_rng(seed)
        x[rng.random(n) < share] = 3.0
        return x

    detector = OneStepOutlierDetector(random_state=0, max_iter=60, alpha=0.1)
    flagged = detector.fit(drawn(1000, 1)).predict(new := drawn(3000, 2)) < 0
    # A row of 3 % may be among the tenth that is flagged, a row of 15 % cannot.
    assert share < 0.1 or not flagged[new[:, 0] == 3].any()
    assert flagged.mean() < 0.1 + 3 * (0.09 / 200) ** 0.5


def test_decisions_p_values_and_threshold_agree(fitted: OneStepOutlierDetector) -> None:
    x = rows(300, seed=5) * [1.0, 1.02]
    x.flags.writeable = False
    scores = fitted.score_samples(x)
    np.testing.assert_array_equal(fitted.decision_function(x), scores - fitted.offset_)
    np.testing.assert_array_equal(fitted.predict(x) == -1, fitted.pvalue(x) <= 0.05)
    # What calibrates stands at the threshold itself, and a row there is an inlier.
    assert fitted.conformal_.size == 200


def test_one_seed_is_one_detector(fitted: OneStepOutlierDetector) -> None:
    x, state = rows(200), np.random.get_state()[1].copy()
    scores = OneStepOutlierDetector(**QUICK).fit(x).score_samples(x)
    assert (OneStepOutlierDetector(**QUICK).fit(x).score_samples(x) == scores).all()
    other = OneStepOutlierDetector(**QUICK | {"random_state": 1}).fit(x).score_samples(x)
    assert (other != scores).any()
    assert (np.random.get_state()[1] == state).all()
    for same in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        assert (same.score_samples(x) == fitted.score_samples(x)).all()
    assert clone(fitted).get_params() == fitted.get_params()
    assert not hasattr(clone(fitted), "ratio_")
    assert repr(fitted) == "OneStepOutlierDetector(max_iter=60, random_state=0)"


def test_columns_of_a_frame_have_names_and_an_order() -> None:
    x = pd.DataFrame(rows(100), columns=["a", "b"])
    detector = OneStepOutlierDetector(**QUICK).fit(x)
    assert detector.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        detector.predict(x[["b", "a"]])
    with pytest.raises(ValueError, match="feature names should match"):
        OneStepOutlierDetector(x.rename(columns={"a": "c"}), **QUICK).fit(x)
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        detector.predict(x.to_numpy())


def test_rows_may_run_backwards() -> None:
    x = rows(100)
    reference = 2 * x
    detector = OneStepOutlierDetector(reference[::-1], **QUICK).fit(x[::-1])
    same = OneStepOutlierDetector(reference[::-1].copy(), **QUICK).fit(x[::-1].copy())
    np.testing.assert_array_equal(detector.score_samples(x[::-1]), same.score_samples(x)[::-1])
    frame = pd.DataFrame(x).iloc[::-1]
    np.testing.assert_array_equal(detector.predict(frame), same.predict(x)[::-1])


def test_rows_too_far_to_score_are_outliers(fitted: OneStepOutlierDetector) -> None:
    far = np.array([[1e300, 1e300], [1.7e308, -1.7e308], [1.7e308, 1.7e308]])
    assert (fitted.predict(far) == -1).all()
    assert np.isfinite(fitted.decision_function(far)).all()
    assert (fitted.pvalue(far) == fitted.pvalue([[1e6, 1e6]])).all()
    # Rounding to nine digits overflows from here on, and the scores themselves do not.
    assert np.isfinite(fitted.score_samples([[1e303, 1e303]])).all()


def test_a_fit_that_fails_leaves_the_one_before() -> None:
    detector = OneStepOutlierDetector(**QUICK).fit(pd.DataFrame(rows(50), columns=["a", "b"]))
    before = dict(vars(detector))
    with pytest.raises(ValueError, match="copies of one"):
        detector.fit(pd.DataFrame(np.ones((50, 3)), columns=["c", "d", "e"]))
    assert vars(detector) == before


def test_fits_share_no_random_numbers() -> None:
    x, state = rows(60), torch.get_rng_state()

    def scores(_: int) -> np.ndarray:
        return OneStepOutlierDetector(**QUICK).fit(x).score_samples(x)

    alone = scores(0)
    with ThreadPoolExecutor(4) as pool:
        assert all((together == alone).all() for together in pool.map(scores, range(8)))
    assert torch.equal(torch.get_rng_state(), state)


def test_it_joins_pipelines_and_searches() -> None:
    x = np.concatenate([rows(100), rows(20, 1)])[np.arange(120) * 7 % 120]
    y = np.repeat([1, -1], [100, 20])[np.arange(120) * 7 % 120]
    pipeline = make_pipeline(StandardScaler(), OneStepOutlierDetector(**QUICK))
    scores = cross_val_score(pipeline, x, y, scoring="roc_auc", cv=3, error_score="raise")
    assert ((scores >= 0) & (scores <= 1)).all()
    grid = {"onestepoutlierdetector__reference": ["uniform", "gaussian"]}
    search = GridSearchCV(pipeline, grid, scoring="roc_auc", cv=2, error_score="raise").fit(x, y)
    assert search.best_estimator_.predict(x).shape == (120,)


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_what_they_say(name: str) -> None:
    x = rows(1000)
    drawn = REFERENCES[name](x, 50_000, np.random.default_rng(0))
    if name == "uniform":
        sides = np.ptp(x, axis=0) * (1 + 2 * MARGIN)
        np.testing.assert_allclose(drawn.std(axis=0), sides / np.sqrt(12), rtol=0.02)
        np.testing.assert_allclose(np.ptp(drawn, axis=0), sides, rtol=0.01)
        return
    covariance = np.cov(x.T)
    expected = WIDER**2 * covariance if name == "gaussian" else np.diag(np.diag(covariance))
    scale = np.sqrt(np.outer(*[np.diag(expected)] * 2))
    np.testing.assert_allclose(np.cov(drawn.T) / scale, expected / scale, atol=0.02)
    np.testing.assert_allclose(drawn.mean(axis=0), x.mean(axis=0), atol=0.15)
    if name == "shuffled":
        assert np.isin(drawn[:, 0], x[:, 0]).all()


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        ({"reference": "unifrom"}, rows(50), "reference: got 'unifrom'.*did you mean 'uniform'"),
        ({"reference": rows(50)[:, :1]}, rows(50), "X has 1 features, but .* 2 features"),
        ({"reference": [[np.nan, 0.0]] * 9}, rows(50), "contains NaN"),
        ({"alpha": 1.0}, rows(50), "OneStepOutlierDetector: alpha: got 1.0"),
        ({"alpha": None}, rows(50), "alpha: got null, expected a number"),
        ({"calibration": 0.6}, rows(50), "calibration: got 0.6"),
        ({"max_iter": 0}, rows(50), "max_iter: got 0"),
        ({"device": "cuda:9"}, rows(50), "not available here"),
        ({}, np.ones((50, 2)), "all 50 rows are copies of one"),
        ({}, rows(1), "1 sample"),
        ({}, rows(2), "X: 1 of 2 rows train and are equal"),
        ({}, rows(50) * 1e38, r"X: got .*e\+39, expected numbers up to 3.4e\+38"),
        ({}, rows(50) * 1e-308, "X: no column varies by more than .*e-.*, expected one by 1e-30"),
        ({}, np.ma.masked_greater(rows(50), 1.0), "X: got masked values"),
        ({"reference": np.ma.masked_greater(rows(50), 1.0)}, rows(50), "reference: got masked"),
    ],
)
def test_what_cannot_be_fitted_is_refused(options: dict, x: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OneStepOutlierDetector(**QUICK | options).fit(x)


def test_too_few_rows_for_a_rate_are_told(caplog: pytest.LogCaptureFixture) -> None:
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        detector = OneStepOutlierDetector(**QUICK).fit(rows(20))
    assert (
        "10 rows calibrate, too few for a rate of 0.05; inliers are flagged at one of 0.0909"
        in (caplog.text)
    )
    assert np.isfinite(detector.offset_)
