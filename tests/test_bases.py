r"""Laws of the temporal bases: closed forms against quadrature, derivatives against autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from torch import Tensor

from ood_osdre.models.bases import (
    KERNELS,
    RBFBasis,
    TemporalBasis,
    conditioning,
    gram_matrix,
)
from ood_osdre.paths.quadrature import composite_rule

# Independent of the package: NumPy, and the distance instead of its signed form.
PROFILES = {
    "matern32": lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "gaussian": lambda r: np.exp(-(r**2)),
    "imq": lambda r: 1 / np.hypot(1, r),
    "rq": lambda r: 1 / (1 + r**2),
}
SIGMAS = [1e-4, 1e-2, 0.1, 0.5, 10.0, 1e3]
kernels = pytest.mark.parametrize("kernel", PROFILES)
sigmas = pytest.mark.parametrize("sigma", SIGMAS)


def adaptive(kernel: str, center: float, sigma: float, a: float = 0.0, b: float = 1.0) -> float:
    r"""Integrates an atom by adaptive quadrature, with breaks at and around its centre."""
    offsets = sigma * np.array([-30, -10, -3, -1, 0, 1, 3, 10, 30])
    edges = np.unique(np.clip([a, *(center + offsets), b], a, b))

    def atom(t: float) -> float:
        return PROFILES[kernel](abs(t - center) / sigma)

    pieces = [
        quad(atom, *e, epsabs=1e-14, epsrel=1e-13, limit=400)
        for e in np.stack([edges[:-1], edges[1:]], 1)
    ]
    return math.fsum(p[0] for p in pieces)


def test_every_kernel_is_under_test() -> None:
    assert set(KERNELS) == set(PROFILES)


@kernels
@sigmas
def test_values_are_the_kernel(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 5, sigma, floor=0.0)
    t = torch.linspace(-0.2, 1.2, 29)
    distance = (t[:, None] - torch.linspace(0, 1, 5)).abs() / sigma

    torch.testing.assert_close(basis(t), torch.as_tensor(PROFILES[kernel](distance.numpy())))


@kernels
@sigmas
def test_integral_matches_adaptive_quadrature(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 3, sigma, floor=0.0)

    for a, b in [(0.0, 1.0), (0.2, 0.9), (0.6, 0.8), (-1.0, 2.0), (0.7, 0.1)]:
        low, high = min(a, b), max(a, b)
        areas = [adaptive(kernel, c, sigma, low, high) for c in (0.0, 0.5, 1.0)]
        expected = torch.tensor(areas) * (1 if a < b else -1)

        torch.testing.assert_close(basis.integral(a, b), expected, rtol=0, atol=1e-10)


@kernels
@sigmas
def test_float32_integral_is_as_accurate_as_documented(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 3, sigma, floor=0.0).float()
    assert basis.integral().dtype == torch.float32
    # Relatively on the unit interval, absolutely on others, where terms cancel.
    intervals = [(0.0, 1.0), (0.6, 0.61), (0.5, 0.9), (2.0, 3.0), (-1.0, -0.5)]
    for a, b in intervals:
        expected = torch.tensor([adaptive(kernel, c, sigma, a, b) for c in (0.0, 0.5, 1.0)])
        rtol, atol = (1e-5, 0) if (a, b) == (0.0, 1.0) else (0, 1e-6)
        torch.testing.assert_close(basis.integral(a, b).double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("sigma", [1.0, 1e-3])
def test_printed_matern_integral_is_wrong(sigma: float) -> None:
    r"""Quotes the paper's closed form of the Matérn integral, which lost a term."""
    center, tail = 0.5, 2 / math.sqrt(3)
    right = ((1 - center) / sigma + tail) * math.exp(-math.sqrt(3) * (1 - center) / sigma)
    left = (center / sigma + tail) * math.exp(-math.sqrt(3) * center / sigma)
    printed = 2 * sigma / math.sqrt(3) - sigma * (right + left)

    truth = adaptive("matern32", center, sigma)
    ours = RBFBasis("matern32", 1, sigma, floor=0.0).integral().item()

    assert ours == pytest.approx(truth, rel=1e-12)
    assert ours - printed == pytest.approx(2 * sigma / math.sqrt(3), rel=1e-12)
    if sigma == 1.0:
        assert printed == pytest.approx(-0.237, abs=5e-4)
        assert truth == pytest.approx(0.917, abs=5e-4)
    else:
        assert printed == pytest.approx(truth / 2, rel=1e-6)


@given(
    kernel=st.sampled_from(sorted(PROFILES)),
    size=st.integers(1, 40),
    sigma=st.floats(1e-3, 10.0),
    limits=st.lists(st.floats(-1.0, 2.0), min_size=3, max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_integral_is_additive_and_antisymmetric(
    kernel: str, size: int, sigma: float, limits: list[float]
) -> None:
    basis = RBFBasis(kernel, size, sigma, floor=0.0).double()
    a, b, c = limits

    torch.testing.assert_close(
        basis.integral(a, b) + basis.integral(b, c), -basis.integral(c, a), rtol=0, atol=1e-12
    )


@kernels
@sigmas
def test_derivative_matches_autograd(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 5, sigma, floor=0.0)
    # The grid holds the centres and the end points.
    t = torch.linspace(0, 1, 41)
    _, expected = torch.func.jvp(basis, (t,), (torch.ones_like(t),))

    torch.testing.assert_close(basis.derivative(t), expected)
    torch.testing.assert_close(TemporalBasis.derivative(basis, t), expected)
    assert (basis.derivative(basis.centers).diagonal() == 0).all()


@kernels
def test_integral_differentiates_to_the_basis_in_its_limits(kernel: str) -> None:
    basis = RBFBasis(kernel, 5, 0.2, floor=0.0)
    a = torch.linspace(0, 1, 9).requires_grad_()
    b = torch.linspace(1, 0, 9).requires_grad_()
    slope_a, slope_b = torch.autograd.grad(basis.integral(a, b).sum(), (a, b))

    torch.testing.assert_close(slope_a, -basis(a).sum(dim=-1))
    torch.testing.assert_close(slope_b, basis(b).sum(dim=-1))


@kernels
@pytest.mark.parametrize("sigma", [0.02, 0.3, 5.0])
def test_shape_gradient_matches_quadrature(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 5, sigma, floor=0.0)
    weights = torch.randn(5)
    times, areas = map(torch.from_numpy, composite_rule(np.linspace(0, 1, 401), 12))
    (ours,) = torch.autograd.grad(basis.integral() @ weights, basis.raw)
    (expected,) = torch.autograd.grad(areas @ basis(times) @ weights, basis.raw)

    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-12)


@kernels
@sigmas
def test_gradients_are_finite_in_float32(kernel: str, sigma: float) -> None:
    basis = RBFBasis(kernel, 5, sigma, floor=0.0).float()
    t = basis.centers
    total = basis(t).sum() + basis.derivative(t).square().mean() + basis.integral().sum()
    (slope,) = torch.autograd.grad(total, basis.raw)

    assert torch.isfinite(slope).all()


@kernels
@pytest.mark.parametrize("batch", [(), (7,), (2, 3), (0,)])
def test_shapes(kernel: str, batch: tuple[int, ...]) -> None:
    basis = RBFBasis(kernel, 5)
    t = torch.rand(batch)

    assert basis(t).shape == basis.derivative(t).shape == (*batch, 5)
    assert basis.integral(b=t).shape == basis.integral(a=t).shape == (*batch, 5)
    assert basis.integral(t[..., None], torch.rand(4)).shape == (*batch, 4, 5)
    assert basis.integral().shape == (5,)


@pytest.mark.parametrize("sigma", [0.06, 0.5, torch.linspace(0.1, 2.0, 7), 1e3])
@pytest.mark.parametrize("learnable", [True, False])
def test_shapes_start_where_they_should(sigma: float | Tensor, learnable: bool) -> None:
    basis = RBFBasis("rq", 7, sigma, floor=0.05, learnable=learnable)

    torch.testing.assert_close(basis.sigma, torch.as_tensor(sigma).double().expand(7))
    assert [p.requires_grad for p in basis.parameters()] == [learnable]
    with torch.no_grad():
        basis.raw.fill_(-1e3)
    torch.testing.assert_close(basis.sigma, torch.full((7,), 0.05))


def test_centres_are_uniform() -> None:
    torch.testing.assert_close(RBFBasis(size=1).centers, torch.tensor([0.5]))
    torch.testing.assert_close(RBFBasis(size=3).centers, torch.tensor([0.0, 0.5, 1.0]))


def test_state_round_trips() -> None:
    basis, other = RBFBasis("imq", 6, torch.rand(6) + 0.1), RBFBasis("imq", 6)
    other.load_state_dict(basis.state_dict())
    torch.testing.assert_close(other.integral(), basis.integral())


@kernels
def test_gram_matrix_holds_the_inner_products(kernel: str) -> None:
    sigmas, centers = [0.02, 0.1, 0.5, 3.0], [0, 1 / 3, 2 / 3, 1]
    gram = gram_matrix(RBFBasis(kernel, 4, torch.tensor(sigmas), floor=0.0))

    for i, j in [(0, 0), (0, 1), (1, 2), (2, 3), (3, 3)]:

        def product(t: float, pair: tuple[int, int] = (i, j)) -> float:
            return math.prod(PROFILES[kernel](abs(t - centers[k]) / sigmas[k]) for k in pair)

        points = [0.01, 0.05, *centers[1:3]]
        expected, _ = quad(product, 0, 1, points=points, epsabs=1e-14, epsrel=1e-13)
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
