r"""Nine two-dimensional distributions, each with a sampler and its exact density.

They are the sets that normalising flows are drawn on, with those papers' constants, and the tree
of autoguidance. Samples are independent: where the original code walks a curve in equal steps, the
position here is uniform. All nine densities are known:

================ ==============================================================================
Set              Density
================ ==============================================================================
`8gaussians`     a mixture of Gaussians
`tree`           a mixture of 2032 Gaussians
`checkerboard`   uniform on eight squares
`circles`        a circle convolved with a Gaussian, a Bessel function, for each of two radii
`rings`          the same for four radii
`moons`          an arc convolved with a Gaussian, by quadrature over the arc
`swissroll`      the same for a spiral
`2spirals`       two spirals convolved with a square and a Gaussian, by quadrature over the spiral
`pinwheel`       a change of variables whose inverse takes a few Newton steps
================ ==============================================================================

Quadrature nodes lie within a third of the Gaussian's deviation, where Gauss-Legendre rules have
converged to many digits. The pinwheel's map folds over at points with a probability below
:math:`10^{-6}`; the density there is that of the main sheet alone.

References:
    | FFJORD: Free-form continuous dynamics for scalable reversible generative models (Grathwohl et
      al., 2019)
    | https://arxiv.org/abs/1810.01367

    | Guiding a diffusion model with a bad version of itself (Karras et al., 2024)
    | https://arxiv.org/abs/2406.02507
"""

__all__ = ["PLANAR_SETS", "PlanarSet", "planar_set"]

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from ...paths.quadrature import composite_rule
from ..partition import CHUNK, GaussianMixture

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class PlanarSet:
    r"""A distribution on the plane.

    Attributes:
        name: The name of the set.
        sample: Draws :math:`N` independent points, with shape :math:`(N, 2)`, given :math:`N` and
            a generator, on whose device they are.
        density: The log-density of points in double precision, from :math:`(N, 2)` to :math:`(N)`.
    """

    name: str
    sample: Callable[[int, Generator], Tensor]
    density: Callable[[Tensor], Tensor]

    def log_density(self, x: Tensor) -> Tensor:
        r"""Evaluates the log-density, in nats.

        Arguments:
            x: The points, with shape :math:`(N, 2)`.

        Returns:
            The log-densities in double precision, with shape :math:`(N)`.
        """
        return torch.cat([self.density(part.double()) for part in x.split(CHUNK)])


def _normal(n: int, generator: Generator) -> Tensor:
    return torch.randn(n, 2, generator=generator, device=generator.device)


def _uniform(n: int, generator: Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device)


def _choice(n: int, count: int, generator: Generator) -> Tensor:
    return torch.randint(count, (n,), generator=generator, device=generator.device)


def _polar(radius: float | Tensor, angle: Tensor) -> Tensor:
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)


def _mixture(name: str, means: Tensor, factors: Tensor, weights: Tensor) -> PlanarSet:
    mixture = GaussianMixture(means, factors, weights / weights.sum())
    return PlanarSet(name, mixture.sample, mixture.log_density)


def _eight_gaussians() -> PlanarSet:
    angles = torch.arange(8, dtype=torch.float64) * (math.pi / 4)
    factor = torch.eye(2, dtype=torch.float64) * (0.5 / 1.414)
    weights = torch.ones(8, dtype=torch.float64)
    return _mixture("8gaussians", _polar(4 / 1.414, angles), factor.repeat(8, 1, 1), weights)


def _tree() -> PlanarSet:
    rng = np.random.RandomState(2)
    scale = 4.0
    means, factors, weights = [], [], []

    def grow(depth: int, start: np.ndarray, angle: float) -> None:
        if depth == 7:
            return
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-along[1], along[0]])
        length = 0.292 * 0.8**depth * (0.2 * rng.randn() + 1)
        thickness = 0.4 * 0.8**depth / length
        size = 0.06 * scale * length
        for t in np.linspace(0.07, 0.93, 8):
            means.append(scale * (start + along * length * t))
            factors.append(size * np.stack([along, thickness * across], axis=1))
            weights.append(length * 0.5**depth)
        for sign in (1, -1):
            turn = sign * 0.7**depth * (0.2 * rng.randn() + 1)
            grow(depth + 1, start + along * length, angle + turn)

    root = np.array([0.0030, 0.0325])
    grow(0, root, 0.25 * np.pi)
    grow(0, root, 1.25 * np.pi)
    return _mixture("tree", *(torch.as_tensor(np.array(a)) for a in (means, factors, weights)))


def _checkerboard() -> PlanarSet:
    def sample(n: int, generator: Generator) -> Tensor:
        x = 4 * _uniform(n, generator) - 2
        y = _uniform(n, generator) - 2 * _choice(n, 2, generator) + x.floor() % 2
        return 2 * torch.stack([x, y], dim=1)

    def density(x: Tensor) -> Tensor:
        cell = (x / 2).floor()
        inside = ((cell >= -2) & (cell < 2)).all(dim=1) & (cell.sum(dim=1) % 2 == 0)
        return torch.where(inside, -math.log(32), -math.inf)

    return PlanarSet("checkerboard", sample, density)


def _circles(name: str, radii: tuple[float, ...], std: float) -> PlanarSet:
    r"""Builds circles of equal probability, convolved with a Gaussian."""

    def sample(n: int, generator: Generator) -> Tensor:
        angle = 2 * math.pi * _uniform(n, generator)
        radius = angle.new_tensor(radii)[_choice(n, len(radii), generator)]
        return _polar(radius, angle) + std * _normal(n, generator)

    def density(x: Tensor) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        a = x.new_tensor(radii)
        # The scaled Bessel function turns exp(-(r^2 + a^2)) I_0(2 r a) into exp(-(r - a)^2).
        bessel = torch.special.i0e(r * a / std**2).log()
        terms = bessel - (r - a) ** 2 / (2 * std**2)
        return terms.logsumexp(dim=1) - math.log(len(radii)) - LOG_2PI - 2 * math.log(std)

    return PlanarSet(name, sample, density)


def _curve(name: str, curve: Callable[[Tensor], Tensor], panels: int, std: float) -> PlanarSet:
    r"""Builds a curve with a uniform parameter in [0, 1], convolved with a Gaussian.

    For quadrature the interval is cut into `panels` parts of 32 nodes, which should not straddle
    the pieces of a curve that has some.
    """
    u, weights = map(torch.as_tensor, composite_rule(np.linspace(0, 1, panels + 1), 32))
    points, log_weights = curve(u), weights.log()

    def sample(n: int, generator: Generator) -> Tensor:
        return curve(_uniform(n, generator)) + std * _normal(n, generator)

    def density(x: Tensor) -> Tensor:
        squares = (x[:, None] - points.to(x)).square().sum(dim=2)
        terms = log_weights.to(x) - squares / (2 * std**2)
        return terms.logsumexp(dim=1) - LOG_2PI - 2 * math.log(std)

    return PlanarSet(name, sample, density)


def _moon(u: Tensor) -> Tensor:
    outer = u < 0.5
    angle = 2 * math.pi * torch.where(outer, u, u - 0.5)
    x = torch.where(outer, angle.cos(), 1 - angle.cos())
    y = torch.where(outer, angle.sin(), 0.5 - angle.sin())
    return torch.stack([2 * x - 1, 2 * y - 0.2], dim=-1)


def _roll(u: Tensor) -> Tensor:
    angle = 1.5 * math.pi * (1 + 2 * u)
    return _polar(angle / 5, angle)


def _two_spirals() -> PlanarSet:
    turns, width, std = 3 * math.pi, 0.5, 0.3  # of three times the points

    def spiral(angle: Tensor) -> Tensor:
        return torch.stack([-angle * angle.cos(), angle * angle.sin()], dim=-1)

    def sample(n: int, generator: Generator) -> Tensor:
        start = spiral(turns * _uniform(n, generator).sqrt())
        jitter = torch.stack([_uniform(n, generator) for _ in range(2)], dim=1)
        sign = 1 - 2 * _choice(n, 2, generator)[:, None]
        return (sign * (start + width * jitter) + std * _normal(n, generator)) / 3

    angles, weights = map(torch.as_tensor, composite_rule(np.linspace(0, turns, 9), 32))
    points = spiral(angles)
    log_weights = (weights * angles / turns**2).log()  # twice that, by two signs

    def density(x: Tensor) -> Tensor:
        terms = []
        for sign in (1, -1):
            z = (3 * sign * x[:, None] - points.to(x)) / std
            mass = _log_normal_mass(z - width / std, z).sum(dim=2)
            terms.append(mass + log_weights.to(x))
        return torch.cat(terms, dim=1).logsumexp(dim=1) + 2 * math.log(3 / width)

    return PlanarSet("2spirals", sample, density)


def _log_normal_mass(a: Tensor, b: Tensor) -> Tensor:
    r"""Returns :math:`\log (\Phi(b) - \Phi(a))` for :math:`a < b`, down to about -700."""
    # In the lower tail the difference keeps its relative accuracy.
    flip = a + b > 0
    a, b = torch.where(flip, -b, a), torch.where(flip, -a, b)
    mass = torch.special.ndtr(b) - torch.special.ndtr(a)
    return mass.clamp(min=torch.finfo(mass.dtype).tiny).log()


def _pinwheel() -> PlanarSet:
    arms, radial, tangential, rate = 5, 0.3, 0.1, 0.25

    def sample(n: int, generator: Generator) -> Tensor:
        z = _normal(n, generator)
        a, b = 1 + radial * z[:, 0], tangential * z[:, 1]
        turn = 2 * math.pi / arms * _choice(n, arms, generator) + rate * a.exp()
        return 2 * _polar(torch.hypot(a, b), torch.atan2(b, a) - turn)

    def density(x: Tensor) -> Tensor:
        # In polar coordinates the radius stays and the angle becomes phi - rate e^(r cos phi).
        r = torch.linalg.vector_norm(x, dim=1, keepdim=True) / 2
        arm = torch.arange(arms).to(x) * (2 * math.pi / arms)
        angle = torch.atan2(x[:, 1:], x[:, :1]) + arm + rate * r.exp()
        angle = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        phi = angle
        for _ in range(20):
            swirl = rate * (r * phi.cos()).exp()
            error = phi - swirl + rate * r.exp() - angle
            phi = phi - error / (1 + r * phi.sin() * swirl).clamp(min=0.5)
        a, b = r * phi.cos(), r * phi.sin()
        slope = 1 + b * rate * a.exp()
        squares = ((a - 1) / radial) ** 2 + (b / tangential) ** 2
        terms = -squares / 2 - slope.abs().log()
        constant = LOG_2PI + math.log(4 * arms * radial * tangential)
        return terms.logsumexp(dim=1) - constant

    return PlanarSet("pinwheel", sample, density)


BUILDERS: dict[str, Callable[[], PlanarSet]] = {
    "swissroll": lambda: _curve("swissroll", _roll, 24, std=0.2),
    "circles": lambda: _circles("circles", (3.0, 1.5), std=0.24),
    "rings": lambda: _circles("rings", (3.0, 2.25, 1.5, 0.75), std=0.08),
    "moons": lambda: _curve("moons", _moon, 6, std=0.2),
    "8gaussians": _eight_gaussians,
    "pinwheel": _pinwheel,
    "2spirals": _two_spirals,
    "checkerboard": _checkerboard,
    "tree": _tree,
}
#: The names of the sets, in the paper's order.
PLANAR_SETS = tuple(BUILDERS)


@functools.cache
def planar_set(name: str) -> PlanarSet:
    r"""Returns a set by its name, one of :data:`PLANAR_SETS`."""
    return BUILDERS[name]()
