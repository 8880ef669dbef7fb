r"""Tests for the ood_osdre.evaluation.calibration module: the promise is checked by its exact law."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, betabinom

from ood_osdre.errors import UserError
from ood_osdre.evaluation.calibration import SplitConformal

SIZES = [50, 500, 5000]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("alpha", [0.05, 0.1])
def test_counts_of_flagged_id_inputs_follow_the_beta_binomial_law(n: int, alpha: float) -> None:
    rng = np.random.default_rng(n)
    m, runs = 40, 1500
    k = math.floor(alpha * (n + 1) + 1e-9)
    law = betabinom(m, k, n + 1 - k)

    counts = np.empty(runs, dtype=int)
    for i in range(runs):
        # A score of ID data may have any distribution; this one has heavy tails.
        conformal = SplitConformal(rng.standard_cauchy(n), alpha)
        counts[i] = conformal.flagged(rng.standard_cauchy(m)).sum()

    assert conformal.rank == k
    assert conformal.rate <= alpha
    assert conformal.rate == pytest.approx(law.mean() / m)
    assert counts.mean() == pytest.approx(law.mean(), abs=4 * law.std() / math.sqrt(runs))
    # Kolmogorov-Smirnov at the level 1e-3, conservative for a discrete law.
    empirical = np.searchsorted(np.sort(counts), np.arange(m + 1), side="right") / runs
    assert np.abs(empirical - law.cdf(np.arange(m + 1))).max() < 1.95 / math.sqrt(runs)


@pytest.mark.parametrize("n", SIZES)
def test_the_rate_given_a_calibration_set_follows_the_beta_law(n: int) -> None:
    r"""Scores are uniform here, so that the threshold is the rate."""
    rng = np.random.default_rng(1)
    rates = [SplitConformal(rng.random(n), 0.1).threshold for _ in range(800)]
    k = math.floor(0.1 * (n + 1))
    levels = np.linspace(0.05, 0.95, 19)

    assert np.abs(np.quantile(beta(k, n + 1 - k).cdf(rates), levels) - levels).max() < 0.06


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("values", [1, 3, 30])
def test_ties_only_lower_the_rate(n: int, values: int) -> None:
    rng = np.random.default_rng(2)
    alpha, runs, flagged = 0.1, 500, 0
    for _ in range(runs):
        conformal = SplitConformal(rng.integers(values, size=n), alpha)
        flagged += conformal.flagged(rng.integers(values, size=1))[0]

    assert flagged / runs <= alpha + 4 * math.sqrt(alpha / runs)
    if values == 1:
        assert flagged == 0


SCORES = st.lists(st.integers(-5, 5).map(float) | st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(SCORES, SCORES, st.floats(1e-6, 1 - 1e-6) | st.integers(1, 99).map(lambda i: i / 100))
def test_flagged_is_a_small_p_value(
    calibration: list[float], scores: list[float], alpha: float
) -> None:
    conformal = SplitConformal(calibration, alpha)
    n = len(calibration)
    p = conformal.pvalue(scores)

    counted = [(1 + sum(c <= s for c in calibration)) / (n + 1) for s in scores]
    assert p.tolist() == counted
    assert (conformal.flagged(scores) == (p <= alpha)).all()
    assert conformal.rate <= alpha < conformal.rate + 1 / (n + 1) + 1e-12


def test_the_rank_is_exact_where_products_are_rounded() -> None:
    r"""Around every multiple of 1 / (n + 1), where floats decide."""
    for n in (1, 2, 9, 18, 19, 99, 100, 999, 4999):
        for k in range(1, n + 1, max(1, n // 50)):
            exact = k / (n + 1)
            below, above = math.nextafter(exact, 0), math.nextafter(exact, 1)
            ranks = [SplitConformal(np.arange(n), a).rank for a in (below, exact, above)]
            assert ranks == [k - 1, k, k]


@pytest.mark.parametrize("n", [1, 5, 18, 19, 99])
def test_p_values_of_id_inputs_are_super_uniform(n: int) -> None:
    r"""With a test point a calibration, every p-value has the probability 1 / (n + 1)."""
    rng = np.random.default_rng(n)
    runs = 3000
    scores = rng.random((runs, n + 1))
    p = np.array([SplitConformal(s[:-1], 0.5).pvalue(s[-1:])[0] for s in scores])
    counts = np.bincount(np.rint(p * (n + 1)).astype(int), minlength=n + 2)[1:]

    assert len(counts) == n + 1
    expected = runs / (n + 1)
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected) + 1


def test_too_few_scores_flag_nothing_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        conformal = SplitConformal(np.arange(18.0), 0.05)
    assert "18 scores cannot flag at a rate of 0.05" in caplog.text
    assert "at least 19" in caplog.text
    assert conformal.threshold == -math.inf
    assert not conformal.flagged([-1e300]).any()

    caplog.clear()
    assert SplitConformal(np.arange(19.0), 0.05).flagged([-1e300]).all()
    assert not caplog.records


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 5, math.nan])
def test_rates_that_are_none_are_refused(alpha: float) -> None:
    with pytest.raises(UserError, match="alpha: got"):
        SplitConformal([1.0, 2.0], alpha)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(UserError, match="calibration scores: 1 of 2 are NaN or infinite"):
        SplitConformal([0.0, bad], 0.1)
    conformal = SplitConformal([0.0, 1.0], 0.5)
    for method in (conformal.pvalue, conformal.flagged):
        with pytest.raises(UserError, match="input scores: 1 of 1 are NaN or infinite"):
            method([bad])


def test_an_empty_calibration_set_is_refused() -> None:
    with pytest.raises(UserError, match="the set is empty"):
        SplitConformal([], 0.1)
