r"""Pairs of variables with a known mutual information, and maps that leave it as it is.

Mutual information does not change when :math:`x` or :math:`y` is mapped one-to-one. The truths
below rest on that, or on a line of calculus:

==================== ======================================================= ===================
Task                 Definition                                              Truth (nats)
==================== ======================================================= ===================
`gauss-R`            correlation :math:`R`                                   :math:`-\frac{1}{2}
                                                                             \log(1 - R^2)`
`half-cube-R`        :math:`x \to \mathrm{sign}(x) |x|^{3/2}` of `gauss-R`   the same
`half-cube-both-R`   the same map of :math:`x` and :math:`y`                 the same
`asinh-R`            :math:`x \to \mathrm{asinh}(x)` of `gauss-R`            the same
`additive-noise-E`   :math:`x \sim U(0, 1)`,                                 :math:`E - \log 2E`,
                     :math:`y = x + U(-E, E)`                                or :math:`1 / 4E`
                                                                             from 1/2 on
`gamma-exp-A`        :math:`x \sim \Gamma(A)`,                               :math:`\psi(A + 1)
                     :math:`y | x \sim \mathrm{Exp}(x)`                      - \log A`
==================== ======================================================= ===================

The half-cube and asinh maps of :math:`x` alone are those of the paper's code; the benchmark they
come from maps both.

References:
    | Beyond Normal: On the Evaluation of Mutual Information Estimators (Czyż et al., 2023)
    | https://arxiv.org/abs/2306.11078
"""

__all__ = ["FAMILIES", "DependenceTask", "NormalScores", "dependence_task"]

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import digamma
from torch import Generator, Tensor

Sampler = Callable[[int, Generator], tuple[Tensor, Tensor]]

# The largest number in double precision, and the least above zero.
LARGEST, LEAST = torch.finfo(torch.float64).max, 5e-324
# Below, the exponential's mean, one over a gamma variable, overflows single precision.
LEAST_SHAPE = 0.2


@dataclass(frozen=True)
class DependenceTask:
    r"""Two variables with a known mutual information.

    Attributes:
        id: The name of the task, which stays.
        truth: The mutual information, in nats.
        sample: Draws :math:`x` and :math:`y`, with shapes :math:`(N, d_x)` and
            :math:`(N, d_y)`, given :math:`N` and a generator.
    """

    id: str
    truth: float
    sample: Sampler

    def draw_pairs(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        r"""Draws from the product of the marginals, :math:`p_0`, and from the joint, :math:`p_1`.

        Arguments:
            n: The number :math:`N` of each.
            generator: The source of randomness.

        Returns:
            Independent points, each with shape :math:`(N, d_x + d_y)`.
        """
        x, y = self.sample(n, generator)
        first, second = self.sample(n, generator), self.sample(n, generator)
        return torch.cat([first[0], second[1]], dim=1), torch.cat([x, y], dim=1)


class NormalScores:
    r"""Maps each coordinate so that its distribution is about :math:`\mathcal{N}(0, 1)`.

    The map of a coordinate is increasing: piecewise linear between quantiles of a sample, and
    logarithmic beyond them. Increasing maps of single coordinates leave the mutual information as
    it is, and take away what makes heavy tails hard.

    Arguments:
        sample: The sample, with shape :math:`(N, d)`.
        knots: The largest number of quantiles.
    """

    def __init__(self, sample: Tensor, knots: int = 257) -> None:
        assert sample.ndim == 2, "'sample' should have shape (N, d)"
        size = min(knots, len(sample))
        order = sample.double().sort(dim=0).values
        ranks = torch.linspace(0, len(sample) - 1, size).round().long()
        levels = (ranks.double() + 0.5) / len(sample)
        self._maps = []
        for column in order[ranks].T:
            # Ties share the mean of their scores, so that the knots increase strictly.
            values, inverse = column.unique(return_inverse=True)
            total = torch.bincount(inverse, torch.special.ndtri(levels))
            scores = total / torch.bincount(inverse)
            self._maps.append((values, scores))

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps points, with shape :math:`(B, d)`."""
        columns = [
            _interpolate(column.double(), *knots)
            for column, knots in zip(x.T, self._maps, strict=True)
        ]
        return torch.stack(columns, dim=1).to(x)


def _interpolate(x: Tensor, values: Tensor, scores: Tensor) -> Tensor:
    if torch.cat([x, values]).abs().max() > LARGEST / 4:
        # Differences would overflow; a power of two changes nothing but that.
        x, values = x / 4, values / 4
    if len(values) == 1:  # a constant; what differs from it still has to be told apart
        return torch.asinh(x - values)
    i = torch.searchsorted(values, x.contiguous()).clamp(1, len(values) - 1)
    # Shares of a gap, not slopes: one over the least gap overflows.
    gap, rise = (values[i] - values[i - 1]).clamp(min=LEAST), scores[i] - scores[i - 1]
    nearest = x.clamp(values[0], values[-1])
    beyond = x - nearest
    inside = scores[i - 1] + rise * ((nearest - values[i - 1]) / gap)
    excess = (rise * (beyond.abs() / gap)).clamp(max=LARGEST)
    return inside + beyond.sign() * torch.log1p(excess)


def dependence_task(family: str, parameter: float) -> DependenceTask:
    r"""Returns a task of a family.

    Arguments:
        family: One of the keys of :data:`FAMILIES`.
        parameter: Its strength: a correlation in :math:`(-1, 1)`, or a positive noise or shape.

    Example:
        >>> task = dependence_task("additive-noise", 0.9)
        >>> task.id, round(task.truth, 4)
        ('additive-noise-0.9', 0.2778)
    """
    truth, sample = FAMILIES[family](parameter)
    return DependenceTask(f"{family}-{parameter:g}", truth, sample)


def _gauss(
    rho: float, map_x: Callable[[Tensor], Tensor], map_y: Callable[[Tensor], Tensor]
) -> tuple[float, Sampler]:
    assert -1 < rho < 1, "a correlation should be in (-1, 1)"

    def sample(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x, z = torch.randn(2, n, 1, generator=generator, device=generator.device)
        return map_x(x), map_y(rho * x + math.sqrt(1 - rho**2) * z)

    return -0.5 * math.log1p(-(rho**2)), sample


def _additive_noise(noise: float) -> tuple[float, Sampler]:
    assert noise > 0, "the noise should be positive"

    def sample(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x, u = torch.rand(2, n, 1, generator=generator, device=generator.device)
        return x, x + noise * (2 * u - 1)

    truth = noise - math.log(2 * noise) if noise <= 0.5 else 1 / (4 * noise)
    return truth, sample


def _gamma_exponential(shape: float) -> tuple[float, Sampler]:
    assert shape >= LEAST_SHAPE, f"the shape should be at least {LEAST_SHAPE}"

    def sample(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        # PyTorch's gamma distribution takes no generator; NumPy's is seeded by it.
        seed = torch.randint(2**62, (), generator=generator, device=generator.device)
        gamma = np.random.default_rng(int(seed)).standard_gamma(shape, (n, 1))
        u = torch.rand(n, 1, generator=generator, device=generator.device)
        x = torch.as_tensor(gamma).to(u)
        return x, -torch.log1p(-u) / x

    return float(digamma(shape + 1)) - math.log(shape), sample


def _identity(x: Tensor) -> Tensor:
    return x


def _half_cube(x: Tensor) -> Tensor:
    return x * x.abs().sqrt()


#: The families by name, of their parameter.
FAMILIES: dict[str, Callable[[float], tuple[float, Sampler]]] = {
    "gauss": lambda rho: _gauss(rho, _identity, _identity),
    "half-cube": lambda rho: _gauss(rho, _half_cube, _identity),
    "half-cube-both": lambda rho: _gauss(rho, _half_cube, _half_cube),
    "asinh": lambda rho: _gauss(rho, torch.asinh, _identity),
    "additive-noise": _additive_noise,
    "gamma-exp": _gamma_exponential,
}
