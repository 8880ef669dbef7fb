r"""Approximation of time scores by temporal bases: the tables of docs/theory.md.

Everything here is deterministic, in float64, and takes a few seconds on one core::

    python benchmarks/approximation.py

The time scores are those of a Gaussian path from :math:`p_0 = \mathcal{N}(0, 1)` to
:math:`p_1 = \mathcal{N}(2, 1/4)`, at one point :math:`x`, travelled at a varying speed. With the
time score :math:`S(x, u)` of the path :math:`u \mapsto (1 - u) X_0 + u X_1` and a clock
:math:`u = \theta(t)`, the time score is :math:`\theta'(t) \, S(x, \theta(t))`: as rough as the
speed :math:`\theta'`, and always with the integral :math:`\log p_1(x) / p_0(x)`, in closed form.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ood_osdre.models.bases import KERNELS, RBFBasis, conditioning
from ood_osdre.paths.quadrature import composite_rule

Array = NDArray[np.floating[Any]]
Function = Callable[[Array], Array]

X = 1.3
KINK = 1 / math.pi
SIGMA = 0.1
SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128)
RCOND = 1e-13


class Target(NamedTuple):
    r"""A function of time to approximate.

    Attributes:
        name: What it is, for the table.
        smoothness: The supremum of the orders of the Sobolev spaces that contain it.
        function: The function, from times with shape :math:`(N)` to values.
    """

    name: str
    smoothness: float
    function: Function


class Approximation(NamedTuple):
    r"""The best approximation in a span, by SVD least squares.

    Attributes:
        error: The :math:`L^2` error relative to the target's norm, for each target.
        coefficients: The coefficients of the atoms, with shape :math:`(K, T)`.
        rank: The numerical rank; below :math:`K`, rounding limits the error.
    """

    error: Array
    coefficients: Array
    rank: int


def time_score(u: Array, x: float = X) -> Array:
    r"""Returns the time score :math:`S(x, u)` of the path at unit speed."""
    mean, d_mean = 2 * u, 2.0
    variance, d_variance = (1 - u) ** 2 + u**2 / 4, u / 2 - 2 * (1 - u)
    z = (x - mean) / variance
    return d_variance / 2 * (z**2 - 1 / variance) + d_mean * z


def log_ratio(x: float = X) -> float:
    r"""Returns :math:`\log p_1(x) / p_0(x)`."""
    return x**2 / 2 - 2 * (x - 2) ** 2 + math.log(2)


def power_clock(power: float) -> Function:
    r"""Returns the time score with a speed proportional to :math:`t^p`."""
    return lambda t: (power + 1) * t**power * time_score(t ** (power + 1))


def kinked_clock(power: float, slow: float = 0.25) -> Function:
    r"""Returns the time score with a speed proportional to :math:`1/4 + |t - 1/\pi|^p`."""

    def clock(t: Array) -> Array:
        return slow * t + np.sign(t - KINK) * np.abs(t - KINK) ** (power + 1) / (power + 1)

    ends = clock(np.array([0.0, 1.0]))
    total = ends[1] - ends[0]

    def function(t: Array) -> Array:
        speed = (slow + np.abs(t - KINK) ** power) / total
        return speed * time_score((clock(t) - ends[0]) / total)

    return function


TIME_SCORES = (
    Target("speed t^1/4", 0.75, power_clock(0.25)),
    Target("speed t^1/2", 1.0, power_clock(0.5)),
    Target("speed with kink", 1.5, kinked_clock(1.0)),
    Target("speed with kink^3/2", 2.0, kinked_clock(1.5)),
    Target("constant speed", math.inf, time_score),
)


def native(kernel: str) -> Target:
    r"""Returns an atom between the centres, which is in the kernel's native space."""
    atom = RBFBasis(kernel, 1, SIGMA, floor=0.0).double()
    shift = atom.centers.item() - KINK
    return Target("atom off the grid", math.inf, lambda t: evaluate(atom, t + shift)[:, 0])


def evaluate(basis: RBFBasis, t: Array) -> Array:
    r"""Evaluates a basis at times with shape :math:`(N)`, to shape :math:`(N, K)`."""
    with torch.no_grad():
        return basis(torch.from_numpy(t)).numpy()


def rule() -> tuple[Array, Array]:
    r"""Returns nodes and weights with an edge at the kink, graded towards 0."""
    edges = np.union1d(np.linspace(0, 1, 385), [KINK])
    return composite_rule(np.union1d(edges, np.geomspace(1e-10, edges[1], 24)), nodes=8)


def approximate(values: Array, weights: Array, targets: Array) -> Approximation:
    r"""Approximates targets in a span.

    Arguments:
        values: The atoms at the nodes, with shape :math:`(N, K)`.
        weights: The weights of the nodes, with shape :math:`(N)`.
        targets: The targets at the nodes, with shape :math:`(N, T)`.
    """
    root = np.sqrt(weights)[:, None]
    coefficients, _, rank, _ = np.linalg.lstsq(root * values, root * targets, rcond=RCOND)
    residual = root * (values @ coefficients - targets)
    error = np.linalg.norm(residual, axis=0) / np.linalg.norm(root * targets, axis=0)
    return Approximation(error, coefficients, int(rank))


def study(kernel: str) -> Iterator[tuple[Target, dict[int, tuple[float, bool]]]]:
    r"""Yields, for each target, the error and whether it is above rounding, by size."""
    times, weights = rule()
    targets = (*TIME_SCORES, native(kernel))
    stacked = np.stack([target.function(times) for target in targets], axis=1)
    fits = {}
    for size in SIZES:
        basis = RBFBasis(kernel, size, SIGMA, floor=0.0).double()
        fits[size] = approximate(evaluate(basis, times), weights, stacked)
    for i, target in enumerate(targets):
        yield target, {k: (float(fit.error[i]), fit.rank == k) for k, fit in fits.items()}


def algebraic_rate(errors: dict[int, tuple[float, bool]], smallest: int = 16) -> float:
    r"""Returns the exponent of :math:`K^{-\beta}`, fitted to the sizes above rounding."""
    return _slope({math.log(k): e for k, (e, above) in errors.items() if above and k >= smallest})


def exponential_rate(errors: dict[int, tuple[float, bool]], smallest: int = 8) -> float:
    r"""Returns the rate :math:`c` of :math:`e^{-c K}`, fitted to the sizes above rounding."""
    return _slope({k: e for k, (e, above) in errors.items() if above and k >= smallest})


def _slope(errors: dict[float, float]) -> float:
    if len(errors) < 2:
        return math.nan
    return float(-np.polyfit(list(errors), np.log(list(errors.values())), 1)[0])


def legendre(t: Array, size: int) -> Array:
    r"""Returns the orthonormal shifted Legendre polynomials, with shape :math:`(N, K)`."""
    values = np.polynomial.legendre.legvander(2 * t - 1, size - 1)
    return values * np.sqrt(2 * np.arange(size) + 1)


def cosine(t: Array, size: int) -> Array:
    r"""Returns the orthonormal cosines, the constant first, with shape :math:`(N, K)`."""
    values = math.sqrt(2) * np.cos(math.pi * t[:, None] * np.arange(size))
    values[:, 0] = 1
    return values


def sine(t: Array, size: int) -> Array:
    r"""Returns the orthonormal sines, none of them constant, with shape :math:`(N, K)`."""
    return math.sqrt(2) * np.sin(math.pi * t[:, None] * np.arange(1, size + 1))


ORTHONORMAL = {"Legendre": legendre, "cosine": cosine, "sine": sine}


def orthonormal_table() -> str:
    r"""Returns what orthonormal bases keep of the constant-speed time score."""
    times, weights = rule()
    target = time_score(times)
    norm = math.sqrt(weights @ target**2)
    rows = [
        "| basis | K | largest integral, all / but first | error of s | log-ratio | estimate |",
        "|---|---|---|---|---|---|",
    ]
    for name, basis in ORTHONORMAL.items():
        for size in (1, 4, 16):
            values = basis(times, size)
            integrals, h = weights @ values, values.T @ (weights * target)
            error = math.sqrt(weights @ (values @ h - target) ** 2) / norm
            rest = np.abs(integrals[1:]).max(initial=0)
            rest = 0 if rest < 1e-12 else rest
            rows.append(
                f"| {name} | {size} | {np.abs(integrals).max():.3f} / {rest:.3f} | {error:.1e} "
                f"| {log_ratio():.4f} | {h @ integrals:.4f} |"
            )
    return "\n".join(rows)


def approximation_table() -> str:
    r"""Returns the errors of best approximation, by kernel, target and size."""
    rows = [
        "| kernel | target | order | " + " | ".join(f"K={k}" for k in SIZES) + " | K^-β: β "
        "| e^-cK: c |",
        "|---|---|---|" + "---|" * (len(SIZES) + 2),
    ]
    for kernel in KERNELS:
        for target, errors in study(kernel):
            cells = [f"{e:.1e}" if above else f"({e:.1e})" for e, above in errors.values()]
            order = "∞" if math.isinf(target.smoothness) else f"{target.smoothness:g}"
            rates = algebraic_rate(errors), exponential_rate(errors)
            rows.append(
                f"| {kernel} | {target.name} | {order} | "
                + " | ".join(cells)
                + f" | {rates[0]:.2f} | {rates[1]:.2f} |"
            )
    return "\n".join(rows)


def conditioning_table() -> str:
    r"""Returns the conditioning of 400 atoms, by kernel and shape."""
    shapes = {"1/K": 1 / 400, "3/K": 3 / 400, "0.05": 0.05, "0.2": 0.2, "0.5": 0.5, "1": 1.0}
    rows = [
        "| kernel, shape | " + " | ".join(shapes) + " |",
        "|---|" + "---|" * len(shapes),
    ]
    for kernel in KERNELS:
        cells = []
        for sigma in shapes.values():
            number, rank = conditioning(RBFBasis(kernel, 400, sigma, floor=0.0))
            cells.append(f"{number:.0e} / {rank}" if math.isfinite(number) else f"∞ / {rank}")
        rows.append(f"| {kernel} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    r"""Prints the tables."""
    for table in (orthonormal_table(), approximation_table(), conditioning_table()):
        print(table, end="\n\n")


if __name__ == "__main__":
    main()
