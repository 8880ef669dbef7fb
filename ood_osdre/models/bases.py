r"""Temporal bases :math:`g : [0, 1] \to \mathbb{R}^K` with closed-form integrals.

A time score is expanded as :math:`s(x, t) = \langle h(x), g(t) \rangle`. The coefficients
:math:`h(x)` do not depend on the time, so the log-ratio needs one network evaluation and no
solver,

.. math:: \log \frac{p_1(x)}{p_0(x)} = \int_0^1 s(x, t) \, dt = \langle h(x), \bar{g} \rangle
    \, , \qquad \bar{g} = \int_0^1 g(t) \, dt \, ,

as long as the basis can integrate itself. The time runs from the reference :math:`p_0`
(:math:`t = 0`) to the ID data :math:`p_1` (:math:`t = 1`).

The atoms here are radial, :math:`g_k(t) = \phi(u)` with :math:`u = (t - c_k) / \sigma_k`. A
kernel :math:`\phi` is given by its value, its derivative and its odd primitive
:math:`\Phi(u) = \int_0^u \phi`. Then :math:`g_k' = \phi'(u) / \sigma_k` and

.. math:: \int_a^b g_k(t) \, dt = \sigma_k \left[ \Phi \left( \frac{b - c_k}{\sigma_k} \right)
    - \Phi \left( \frac{a - c_k}{\sigma_k} \right) \right] .

On an interval that contains the centre nothing cancels, and the *relative* error is of the order
of the rounding unit. On an interval away from the centre only the *absolute* error is small.

Radial atoms are linearly independent for every :math:`K`, but only formally. What counts in
floating point are the eigenvalues of their Gram matrix :math:`\int_0^1 g_j(t) g_k(t) \, dt`
(:func:`conditioning`). Unless the atoms are about as narrow as the grid, most of these fall below
the rounding unit: whatever :math:`K`, the basis tells :math:`O(1 / \sigma)` functions of time
apart.
"""

__all__ = [
    "KERNELS",
    "Conditioning",
    "Kernel",
    "RBFBasis",
    "TemporalBasis",
    "conditioning",
    "gram_matrix",
]

import abc
import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..paths.quadrature import composite_rule

SQRT_3 = math.sqrt(3)
# An eigenvalue below, relative to the largest, does not count towards the rank: its direction
# changes the time score, in root mean square over the time, a thousand times less than the
# strongest one does.
LEAST_EIGENVALUE = 1e-6


class Kernel(NamedTuple):
    r"""A radial kernel as three functions of :math:`u = (t - c) / \sigma`, elementwise.

    Attributes:
        value: The even function :math:`\phi(u)`, with :math:`\phi(0) = 1`.
        derivative: Its derivative :math:`\phi'(u)`.
        primitive: Its odd primitive :math:`\Phi(u) = \int_0^u \phi`.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    primitive: Callable[[Tensor], Tensor]


def _matern32(u: Tensor) -> Tensor:
    r = SQRT_3 * u.abs()
    return (1 + r) * torch.exp(-r)


def _matern32_primitive(u: Tensor) -> Tensor:
    # Autograd takes 0 as the slope of both abs and sign at the centre, where the primitive's slope
    # should be phi(0) = 1; a side that is never 0 leaves a smooth function of u.
    side = torch.copysign(torch.ones_like(u), u.detach())
    r = SQRT_3 * side * u
    return side * torch.expm1(-r) * (-2 / SQRT_3) - u * torch.exp(-r)


KERNELS: dict[str, Kernel] = {
    "matern32": Kernel(
        value=_matern32,
        derivative=lambda u: -3 * u * torch.exp(-SQRT_3 * u.abs()),
        primitive=_matern32_primitive,
    ),
    "gaussian": Kernel(
        value=lambda u: torch.exp(-(u**2)),
        derivative=lambda u: -2 * u * torch.exp(-(u**2)),
        primitive=lambda u: torch.erf(u) * (math.sqrt(math.pi) / 2),
    ),
    "imq": Kernel(
        value=lambda u: torch.rsqrt(1 + u**2),
        derivative=lambda u: -u * torch.rsqrt(1 + u**2) ** 3,
        primitive=torch.asinh,
    ),
    "rq": Kernel(
        value=lambda u: 1 / (1 + u**2),
        derivative=lambda u: -2 * u / (1 + u**2) ** 2,
        primitive=torch.atan,
    ),
}


class TemporalBasis(nn.Module, abc.ABC):
    r"""Abstract temporal basis: :math:`K` functions of time that can be integrated exactly."""

    size: int

    @abc.abstractmethod
    def forward(self, t: Tensor) -> Tensor:
        r"""Returns the values :math:`g(t)`, with shape :math:`(*, K)`.

        Arguments:
            t: The times :math:`t`, with shape :math:`(*)`.
        """

    def derivative(self, t: Tensor) -> Tensor:
        r"""Returns the derivatives :math:`g'(t)`, with the arguments and shapes of :meth:`forward`.

        They come from forward-mode differentiation unless overridden.
        """
        return torch.func.jvp(self, (t,), (torch.ones_like(t),))[1]

    @abc.abstractmethod
    def integral(self, a: float | Tensor = 0.0, b: float | Tensor = 1.0) -> Tensor:
        r"""Returns the integrals :math:`\int_a^b g(t) \, dt` in closed form, :math:`(*, K)`.

        Arguments:
            a: The lower limit :math:`a`, a number or with shape :math:`(*)`.
            b: The upper limit :math:`b`. The limits' shapes broadcast; two numbers give shape
                :math:`(K)`.
        """


class RBFBasis(TemporalBasis):
    r"""Radial basis functions on a uniform grid of centres, with learnable shapes.

    The centres are :math:`c_k = k / (K - 1)` for :math:`k = 0, \dots, K - 1`, or :math:`1/2` if
    :math:`K = 1`; the shapes are :math:`\sigma_k = \sigma_{\min} + \mathrm{softplus}(\rho_k)`.
    With :math:`u = (t - c_k) / \sigma_k`, the atoms and their primitives are

    .. list-table::
        :header-rows: 1

        * - `kernel`
          - :math:`\phi(u)`
          - :math:`\Phi(u)`, odd, for :math:`u \geq 0`
        * - `"matern32"`
          - :math:`(1 + \sqrt{3} |u|) \, e^{-\sqrt{3} |u|}`
          - :math:`\frac{2}{\sqrt{3}} (1 - e^{-\sqrt{3} u}) - u \, e^{-\sqrt{3} u}`
        * - `"gaussian"`
          - :math:`e^{-u^2}`
          - :math:`\frac{\sqrt{\pi}}{2} \, \mathrm{erf}(u)`
        * - `"imq"` (inverse multiquadric)
          - :math:`(1 + u^2)^{-1/2}`
          - :math:`\mathrm{asinh}(u)`
        * - `"rq"` (rational quadratic)
          - :math:`(1 + u^2)^{-1}`
          - :math:`\arctan(u)`

    Warning:
        The paper misprints the Matérn integral over :math:`[0, 1]`. Its leading term should be
        :math:`4 \sigma_k / \sqrt{3}`, one :math:`2 \sigma_k / \sqrt{3}` for each side of the
        centre, not :math:`2 \sigma_k / \sqrt{3}`. As printed, the integral of a positive function
        is half its value for narrow atoms and negative for wide ones (-0.237 instead of 0.917 at
        :math:`c_k = 1/2`, :math:`\sigma_k = 1`). The paper's logarithm for the inverse
        multiquadric is right but cancels in float32; `asinh` does not.

    The default shapes are wide. Inference looks at clean inputs, whereas training constrains
    :math:`s(x, t)` only at times where :math:`x` is likely; with narrow atoms most of
    :math:`\bar{g}` belongs to other times, and the log-ratio is an extrapolation.

    Arguments:
        kernel: The kernel, one of `"matern32"`, `"gaussian"`, `"imq"` and `"rq"`.
        size: The number of atoms :math:`K \geq 1`.
        sigma: The initial shapes :math:`\sigma_k`, a number or with shape :math:`(K)`.
        floor: The lower bound :math:`\sigma_{\min} \geq 0` of the shapes.
        learnable: Whether the shapes are trained.

    Example:
        >>> basis = RBFBasis("gaussian", size=8)
        >>> basis(torch.rand(5)).shape, basis.integral().shape
        (torch.Size([5, 8]), torch.Size([8]))

    References:
        | Scattered Data Approximation (Wendland, 2004)
        | https://doi.org/10.1017/CBO9780511617539
    """

    centers: Tensor

    def __init__(
        self,
        kernel: str = "rq",
        size: int = 16,
        sigma: float | Tensor = 0.5,
        floor: float = 0.05,
        learnable: bool = True,
    ) -> None:
        super().__init__()
        shapes = torch.as_tensor(sigma, dtype=torch.float64).expand(size)
        assert (shapes > floor).all(), f"sigma: got {sigma}, expected more than floor={floor}."
        self.kernel = kernel
        self.size = size
        self.floor = floor
        centers = torch.linspace(0, 1, size) if size > 1 else torch.tensor([0.5])
        self.register_buffer("centers", centers)
        excess = shapes - floor
        # The inverse of softplus, in the form that does not overflow for wide shapes.
        raw = excess + torch.log(-torch.expm1(-excess))
        self.raw = nn.Parameter(raw.to(centers), requires_grad=learnable)

    @property
    def sigma(self) -> Tensor:
        r"""The shapes :math:`\sigma_k`, with shape :math:`(K)`."""
        return self.floor + F.softplus(self.raw)

    def forward(self, t: Tensor) -> Tensor:  # noqa: D102
        return KERNELS[self.kernel].value(self._standardize(t, self.sigma))

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        sigma = self.sigma
        return KERNELS[self.kernel].derivative(self._standardize(t, sigma)) / sigma

    def integral(self, a: float | Tensor = 0.0, b: float | Tensor = 1.0) -> Tensor:  # noqa: D102
        sigma, primitive = self.sigma, KERNELS[self.kernel].primitive
        upper = primitive(self._standardize(b, sigma))
        lower = primitive(self._standardize(a, sigma))
        return sigma * (upper - lower)

    def extra_repr(self) -> str:  # noqa: D102
        learnable = self.raw.requires_grad
        return f"{self.kernel!r}, size={self.size}, floor={self.floor}, learnable={learnable}"

    def _standardize(self, t: float | Tensor, sigma: Tensor) -> Tensor:
        # A number stays a number: making a tensor of it would stall a GPU for the copy.
        t = t[..., None] if isinstance(t, Tensor) else t
        return (t - self.centers) / sigma


class Conditioning(NamedTuple):
    r"""How far a basis is from being linearly dependent on :math:`[0, 1]`.

    Attributes:
        condition_number: The ratio of the extreme eigenvalues of the Gram matrix; infinite if
            the matrix is singular to float64.
        rank: The number of eigenvalues above :data:`LEAST_EIGENVALUE`.
    """

    condition_number: float
    rank: int


@torch.no_grad()
def gram_matrix(basis: RBFBasis) -> Tensor:
    r"""Returns the inner products :math:`\int_0^1 g_j(t) g_k(t) \, dt`, to about 1e-14.

    The rule is composite Gauss-Legendre with panels no wider than the narrowest atom and with an
    edge at each centre, where the Matérn kernel is not smooth.

    Arguments:
        basis: A basis of :math:`K` atoms.

    Returns:
        The Gram matrix, in float64 and on the CPU, with shape :math:`(K, K)`.
    """
    basis = copy.deepcopy(basis).to(device="cpu", dtype=torch.float64)
    panels = math.ceil(1 / min(1.0, basis.sigma.min().item()))
    edges = np.union1d(np.linspace(0, 1, panels + 1), basis.centers.numpy())
    times, weights = map(torch.from_numpy, composite_rule(edges, nodes=16))

    gram = torch.zeros(basis.size, basis.size, dtype=torch.float64)
    # In chunks: narrow atoms need very many nodes.
    for t, weight in zip(times.split(2**14), weights.split(2**14), strict=True):
        values = basis(t)
        gram += values.T @ (weight[:, None] * values)
    return gram


def conditioning(basis: RBFBasis) -> Conditioning:
    r"""Returns the :class:`Conditioning` of the Gram matrix of a basis of :math:`K` atoms."""
    values = torch.linalg.eigvalsh(gram_matrix(basis))
    resolution = basis.size * torch.finfo(values.dtype).eps
    largest, smallest = values[-1].item(), values[0].item()
    singular = smallest <= resolution * largest
    rank = int((values > LEAST_EIGENVALUE * largest).sum())
    return Conditioning(math.inf if singular else largest / smallest, rank)
