r"""Tests for the ood_osdre.models.bases module."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from ood_osdre.models.bases import RBFBasis, conditioning, gram_matrix

# Independent of the package: NumPy, and the distance instead of its signed form.
PROFILES = {
    "matern32": lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "gaussian": lambda r: np.exp(-(r**2)),
    "imq": lambda r: 1 / np.hypot(1, r),
    "rq": lambda r: 1 / (1 + r**2),
}
kernels = pytest.mark.parametrize("kernel", PROFILES)


@kernels
def test_gram_matrix_holds_the_inner_products(kernel: str) -> None:
    gram = gram_matrix(RBFBasis(kernel, 4, torch.tensor([0.02, 0.1, 0.5, 3.0]), floor=0.0))
    profile, centers = PROFILES[kernel], [0, 1 / 3, 2 / 3, 1]

    for i, j in [(0, 0), (0, 1), (1, 2), (2, 3), (3, 3)]:
        s_i, s_j = [0.02, 0.1, 0.5, 3.0][i], [0.02, 0.1, 0.5, 3.0][j]
        expected, _ = quad(
            lambda t, i=i, j=j, s_i=s_i, s_j=s_j: (
                profile(abs(t - centers[i]) / s_i) * profile(abs(t - centers[j]) / s_j)
            ),
            0,
            1,
            points=[0.01, 0.05, *centers[1:3]],
            epsabs=1e-14,
            epsrel=1e-13,
        )
        # The two halves may differ by a rounding, depending on the processor's matrix product.
        assert gram[i, j].item() == pytest.approx(expected, abs=1e-12)
        assert gram[j, i].item() == pytest.approx(expected, abs=1e-12)


# Orders of magnitude, for 400 atoms: condition number at sigma = 1 / K, ranks at .05, .2 and 1.
CONDITIONING = {
    "matern32": (2e2, 62, 17, 5),
    "gaussian": (7e1, 35, 10, 3),
    "imq": (2e4, 34, 10, 3),
    "rq": (3e2, 46, 13, 4),
}


@kernels
def test_conditioning_of_many_atoms(kernel: str) -> None:
    condition_number, *ranks = CONDITIONING[kernel]
    narrow = conditioning(RBFBasis(kernel, 400, 1 / 400, floor=0.0))

    assert narrow.rank == 400
    assert narrow.condition_number == pytest.approx(condition_number, rel=0.25)
    for sigma, rank in zip([0.05, 0.2, 1.0], ranks, strict=True):
        # Adding atoms to a saturated basis adds no rank, so that fewer serve as well.
        wide = conditioning(RBFBasis(kernel, 100, sigma, floor=0.0))
        assert wide.rank == pytest.approx(rank, abs=2)


def test_numerically_singular_basis_has_no_condition_number() -> None:
    singular = conditioning(RBFBasis("gaussian", 400, 3 / 400, floor=0.0))

    assert singular.condition_number == math.inf
    assert singular.rank == pytest.approx(225, abs=5)
    assert conditioning(RBFBasis("rq", 1)) == (1.0, 1)
