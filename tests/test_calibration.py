r"""Tests for the ood_osdre.evaluation.calibration module, against exact laws.

Log-ratios are those of Gaussians; the promise of split-conformal calibration has exact laws.
"""

import logging
import math
from argparse import ArgumentTypeError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, betabinom

from ood_osdre.errors import RATE, UserError, rate
from ood_osdre.evaluation.calibration import SplitConformal, ratio_calibration

SHIFT = 1.0


def exact(n: int, m: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns log N(x; 1, 1) / N(x; 0, 1) of draws of either."""
    rng = np.random.default_rng(seed)
    x_1, x_0 = rng.normal(SHIFT, 1, n), rng.normal(0, 1, m)
    return SHIFT * x_1 - SHIFT**2 / 2, SHIFT * x_0 - SHIFT**2 / 2


def test_the_true_log_ratio_is_calibrated_whatever_the_sizes() -> None:
    for n, m in ((100_000, 100_000), (100_000, 20_000)):
        found = ratio_calibration(*exact(n, m))
        assert found.log_mass_0 == pytest.approx(0, abs=0.05)
        assert found.log_mass_1 == pytest.approx(0, abs=0.05)
        assert found.posterior_error < 0.01


@pytest.mark.parametrize("constant", [-1.0, 0.5])
def test_a_constant_shows_in_both_masses(constant: float) -> None:
    id_scores, reference = exact(100_000, 100_000)
    found = ratio_calibration(id_scores + constant, reference + constant)
    assert found.log_mass_0 == pytest.approx(constant, abs=0.05)
    assert found.log_mass_1 == pytest.approx(-constant, abs=0.05)
    assert found.posterior_error > 0.05


def test_overconfidence_shows_though_the_order_is_kept() -> None:
    id_scores, reference = exact(100_000, 100_000)
    found = ratio_calibration(3 * id_scores, 3 * reference)
    # E_0[r^3] = exp(3 * 2 / 2 * shift^2) in closed form, dominated by rare draws.
    assert found.log_mass_0 == pytest.approx(3, abs=1.0)
    assert found.posterior_error > 0.1


def test_magnitudes_that_overflow_are_finite_numbers() -> None:
    found = ratio_calibration([1e4, -1e4], [1e4, -1e4])
    assert found.log_mass_0 == pytest.approx(1e4 - np.log(2))
    assert found.posterior_error == pytest.approx(0.5)


SIZES = [50, 500, 2000]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("alpha", [0.05, 0.1])
def test_counts_of_flagged_id_inputs_follow_the_beta_binomial_law(n: int, alpha: float) -> None:
    rng = np.random.default_rng(n)
    m, runs = 40, 1000
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
    assert conformal.rates == pytest.approx(beta(k, n + 1 - k).interval(0.95))
    assert counts.mean() == pytest.approx(law.mean(), abs=4 * law.std() / math.sqrt(runs))
    # Kolmogorov-Smirnov at the level 1e-3, conservative for a discrete law.
    empirical = np.searchsorted(np.sort(counts), np.arange(m + 1), side="right") / runs
    assert np.abs(empirical - law.cdf(np.arange(m + 1))).max() < 1.95 / math.sqrt(runs)


@pytest.mark.parametrize(("share", "kinds", "n"), [(0.2, 40, 2000), (0.4, 60, 400), (0.1, 1, 30)])
def test_inputs_that_repeat_by_nature_are_flagged_at_the_rate(
    share: float, kinds: int, n: int
) -> None:
    r"""Inputs with the lowest scores, of a share, are among a few kinds; the others are distinct."""
    rng = np.random.default_rng(0)

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        scores, marks = rng.normal(size=count), np.arange(kinds, kinds + count)
        repeated = rng.random(count) < share
        marks[repeated] = rng.integers(0, kinds, repeated.sum())
        scores[repeated] = -10 - marks[repeated] / kinds
        return scores, marks

    rates = []
    for _ in range(300):
        scores, marks = drawn(n)
        rates.append(SplitConformal(scores, 0.1, marks).flagged(drawn(1000)[0]).mean())
    assert np.mean(rates) < 0.1 + 3 * np.std(rates) / 300**0.5


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


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 5, math.nan, "0,1"])
def test_rates_that_are_none_are_refused(alpha: float) -> None:
    with pytest.raises(UserError, match=f"alpha: got .*, expected {RATE}"):
        SplitConformal([1.0, 2.0], alpha)
    with pytest.raises(ArgumentTypeError, match=f"got {alpha}, expected {RATE}"):
        rate(str(alpha))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_or_absent_are_refused(bad: float) -> None:
    conformal = SplitConformal([0.0, 1.0], 0.5)
    for use in (conformal.pvalue, conformal.flagged, lambda x: ratio_calibration([0.0], x)):
        with pytest.raises(UserError, match="scores: 1 of 1 are NaN or infinite"):
            use([bad])
    for scores in ([0.0, bad], []):
        with pytest.raises(UserError, match="calibration scores: "):
            SplitConformal(scores, 0.1)
