r"""Tests for the ood_osdre.evaluation.calibration module, on Gaussians whose log-ratio is known."""

import numpy as np
import pytest

from ood_osdre.evaluation.calibration import ratio_calibration

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
