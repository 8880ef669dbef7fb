r"""The total mass of an unnormalised density, three ways, and how sure of it one can be.

A density from a ratio, :math:`\hat p(x) = \hat r(x) \, p_0(x)`, need not integrate to one. What it
does integrate to, :math:`\hat Z = \int \hat p(x) \, dx = \mathbb{E}_{p_0}[\hat r]`, has to be
known before its likelihoods mean anything: those of the normalised density are
:math:`\log \hat p(x) - \log \hat Z`. Here :math:`\log \hat Z` (nats) is estimated

- on a **grid**, in two dimensions: deterministic, the best where it applies;
- by **importance sampling** from a proposal :math:`q`, a mixture of Gaussians:
  :math:`\hat Z = \mathbb{E}_q[\hat p / q]`, unbiased, with a small error if :math:`q` covers
  :math:`\hat p`;
- by **annealed importance sampling** (AIS) from :math:`p_0 = \mathcal{N}(0, I)` through
  :math:`p_0 \hat r^\beta`: unbiased as well, and the choice in many dimensions.

An unbiased estimate of :math:`\hat Z` gives, with few effective draws, a :math:`\log \hat Z` that
is likely too *small*: weights that matter are rare and were missed. The estimated error misses
them too, so the effective number of draws is returned beside it.

References:
    | Annealed importance sampling (Neal, 2001)
    | https://arxiv.org/abs/physics/9803008
"""

__all__ = [
    "GaussianMixture",
    "LogMass",
    "annealed_mass",
    "grid_mass",
    "grid_points",
    "importance_mass",
    "isotropic",
    "log_normal",
    "proposal_of",
    "trusted",
    "weights_mass",
]

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..objectives import log_normal

LogDensity = Callable[[Tensor], Tensor]

# Points whose density is evaluated at once, so that many components fit in memory.
CHUNK = 1024
# The acceptance rate that the step sizes of annealing are tuned to.
ACCEPTANCE = 0.65
# The leapfrog steps of a transition.
LEAPFROG = 5
# A proposal: its largest number of components, the share of N(0, I), the factor on covariances.
COMPONENTS, DEFENSIVE, INFLATION = 10, 0.05, 1.3
# Effective draws from which importance sampling is trusted.
ENOUGH = 100


class LogMass(NamedTuple):
    r"""An estimate of :math:`\log \hat Z`.

    Attributes:
        value: The estimate, in nats.
        error: Its standard error, or for a grid the change from a grid twice as coarse.
        effective: The effective number of independent draws, :math:`(\sum w)^2 / \sum w^2`; for a
            grid the number of its points.
    """

    value: float
    error: float
    effective: float


@dataclass(frozen=True)
class GaussianMixture:
    r"""A mixture :math:`\sum_k w_k \, \mathcal{N}(m_k, A_k A_k^\top)`, in double precision.

    Attributes:
        means: The means :math:`m_k`, with shape :math:`(K, d)`.
        factors: The factors :math:`A_k` of the covariances, with shape :math:`(K, d, d)`.
        weights: The weights :math:`w_k`, which add up to one, with shape :math:`(K)`.

    Example:
        >>> mixture = GaussianMixture.fit(torch.randn(100, 3), components=2, defensive=0.1)
        >>> mixture.sample(5, torch.Generator()).shape
        torch.Size([5, 3])
    """

    means: Tensor
    factors: Tensor
    weights: Tensor

    @classmethod
    def fit(
        cls,
        x: Tensor,
        components: int,
        defensive: float = 0.0,
        inflation: float = 1.0,
    ) -> "GaussianMixture":
        r"""Fits a mixture to a sample, with scikit-learn.

        Arguments:
            x: The sample, with shape :math:`(N, d)`.
            components: The number of components.
            defensive: The weight of a further component, :math:`\mathcal{N}(0, I)`, which keeps
                importance weights of anything close to it bounded.
            inflation: The factor on the covariances.
        """
        from sklearn.mixture import GaussianMixture as Fit

        fit = Fit(components, reg_covar=1e-4, random_state=0).fit(x.cpu().double().numpy())
        means, weights = torch.as_tensor(fit.means_), torch.as_tensor(fit.weights_)
        factors = torch.linalg.cholesky(inflation * torch.as_tensor(fit.covariances_))
        if defensive:
            identity = torch.eye(x.shape[1], dtype=torch.float64)
            means = torch.cat([means, torch.zeros_like(means[:1])])
            factors = torch.cat([factors, identity[None]])
            weights = torch.cat([(1 - defensive) * weights, weights.new_tensor([defensive])])
        return cls(means, factors, weights)

    def sample(self, n: int, generator: Generator) -> Tensor:
        r"""Draws points, :math:`(N, d)`, in the default precision, on the generator's device."""
        u = torch.rand(n, generator=generator, device=generator.device)
        z = torch.randn(n, self.means.shape[1], generator=generator, device=generator.device)
        return self.place(u, z)

    def place(self, u: Tensor, z: Tensor) -> Tensor:
        r"""Maps random numbers to points of the mixture.

        Arguments:
            u: Uniform numbers in [0, 1], which choose the components, with shape :math:`(N)`.
            z: Standard normal numbers, with shape :math:`(N, d)`.

        Returns:
            The points, with shape :math:`(N, d)`.
        """
        k = torch.searchsorted(self.weights.cumsum(0).to(u), u).clamp(max=len(self.weights) - 1)
        return self.means.to(z)[k] + torch.einsum("nij,nj->ni", self.factors.to(z)[k], z)

    def log_density(self, x: Tensor) -> Tensor:
        r"""Returns the log-density of points, :math:`(N, d)`, in nats, double precision."""
        means, factors = self.means.to(x.device), self.factors.to(x.device)
        dim = means.shape[1]
        inverses = torch.linalg.inv(factors)
        shifts = torch.einsum("kij,kj->ki", inverses, means)
        volumes = torch.linalg.slogdet(factors)[1] + dim / 2 * math.log(2 * math.pi)
        constants = self.weights.to(x.device).log() - volumes
        parts = []
        for part in x.split(CHUNK):
            z = torch.einsum("kij,nj->nki", inverses, part.double()) - shifts
            parts.append((constants - z.square().sum(dim=2) / 2).logsumexp(dim=1))
        return torch.cat(parts)


def proposal_of(train: Tensor) -> GaussianMixture:
    r"""Returns a mixture of Gaussians, wider than the rows it is fitted to, :math:`(N, d)`."""
    components = max(1, min(COMPONENTS, len(train) // 500))
    return GaussianMixture.fit(train[:50_000], components, DEFENSIVE, INFLATION)


def isotropic(dim: int, std: float = 1.0) -> GaussianMixture:
    r"""Returns :math:`\mathcal{N}(0, \sigma^2 I)` in `dim` dimensions, of the deviation `std`."""
    factor = std * torch.eye(dim, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    return GaussianMixture(torch.zeros(1, dim, dtype=torch.float64), factor[None], one)


def grid_points(half_width: float, size: int) -> Tensor:
    r"""Returns the points of a square grid around the origin, with shape :math:`(n^2, 2)`."""
    axis = torch.linspace(-half_width, half_width, size)
    return torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1).reshape(-1, 2)


def grid_mass(log_density: LogDensity, half_width: float = 6.0, size: int = 241) -> LogMass:
    r"""Integrates a density on the plane by the trapezoidal rule.

    The rule converges faster than any power for a smooth density that is negligible at the
    border. The error returned is the change from every other point, which the rule's own error is
    far below, as long as the grid resolves the density at all.

    Arguments:
        log_density: The log-density of points, from :math:`(N, 2)` to :math:`(N)` nats.
        half_width: The half-width of the square.
        size: The odd number of points along a side.

    Example:
        >>> abs(grid_mass(log_normal).value) < 1e-6
        True
    """
    assert size % 2 == 1 and size >= 3, "'size' should be odd and at least 3"  # noqa: PT018
    values = log_density(grid_points(half_width, size)).double().reshape(size, size)
    step = 2 * half_width / (size - 1)

    def mass(values: Tensor, step: float) -> float:
        return values.flatten().logsumexp(dim=0).item() + 2 * math.log(step)

    fine, coarse = mass(values, step), mass(values[::2, ::2], 2 * step)
    return LogMass(fine, abs(fine - coarse), float(size**2))


def importance_mass(
    log_density: LogDensity, proposal: GaussianMixture, n: int, generator: Generator
) -> LogMass:
    r"""Integrates a density, from :math:`(N, d)` to :math:`(N)` nats, by `n` weighted draws."""
    x = proposal.sample(n, generator)
    return weights_mass(log_density(x).double() - proposal.log_density(x))


def weights_mass(log_weights: Tensor) -> LogMass:
    r"""Averages importance weights, given their logarithms with shape :math:`(N)`."""
    n = len(log_weights)
    top = log_weights.max()
    w = (log_weights - top).exp()
    mean = w.mean()
    # The delta method: the error of a logarithm is the relative error.
    error = w.std() / mean / math.sqrt(n)
    effective = w.sum() ** 2 / w.square().sum()
    return LogMass((top + mean.log()).item(), error.item(), effective.item())


def annealed_mass(
    log_ratio: LogDensity,
    dim: int,
    generator: Generator,
    chains: int = 256,
    levels: int = 200,
) -> LogMass:
    r"""Estimates :math:`\log \mathbb{E}_{p_0}[\hat r]` by AIS with Hamiltonian transitions.

    The chains start at :math:`p_0 = \mathcal{N}(0, I)` and pass the densities
    :math:`p_0 \hat r^\beta` with :math:`\beta` from 0 to 1. A pilot run tunes the step size of
    each level to an acceptance of about 65 %; the run that counts keeps them, as a step size that
    depends on the chains would bias it.

    Arguments:
        log_ratio: The log-ratio of points, differentiable, from :math:`(N, d)` to :math:`(N)`.
        dim: The dimension :math:`d`.
        generator: The source of randomness.
        chains: The number of chains, which are independent.
        levels: The number of densities.
    """
    # Levels crowd where the density changes fastest, at the start.
    betas = torch.linspace(0, 1, levels + 1)[1:] ** 2

    def run(chains: int, steps: list[float] | None) -> tuple[Tensor, list[float]]:
        x = torch.randn(chains, dim, generator=generator, device=generator.device)
        return _anneal(log_ratio, x, betas.tolist(), steps, generator)

    _, steps = run(max(chains // 4, 16), None)
    return weights_mass(run(chains, steps)[0])


def _anneal(
    log_ratio: LogDensity,
    x: Tensor,
    betas: list[float],
    steps: list[float] | None,
    generator: Generator,
) -> tuple[Tensor, list[float]]:
    r"""Moves chains from the first density to the last.

    Returns their log-weights and the step size of each level, which is tuned if `steps` is None.
    """
    size, used, before = 0.5, [], 0.0
    log_weights = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    f, slope = _value_and_slope(log_ratio, x)
    for i, beta in enumerate(betas):
        log_weights += (beta - before) * f.double()
        before = beta
        size = size if steps is None else steps[i]
        used.append(size)
        x, f, slope, rate = _transition(log_ratio, x, f, slope, beta, size, generator)
        if steps is None:
            size = min(size * math.exp(rate - ACCEPTANCE), 1.0)
    return log_weights, used


def _transition(
    log_ratio: LogDensity,
    x: Tensor,
    f: Tensor,
    slope: Tensor,
    beta: float,
    size: float,
    generator: Generator,
) -> tuple[Tensor, Tensor, Tensor, float]:
    r"""Takes one Hamiltonian step that leaves :math:`p_0 \hat r^\beta` invariant."""
    momentum = torch.randn(x.shape, generator=generator, device=x.device)
    u = torch.rand(len(x), generator=generator, device=x.device)

    def energy(x: Tensor, f: Tensor, momentum: Tensor) -> Tensor:
        return x.square().sum(dim=1) / 2 - beta * f + momentum.square().sum(dim=1) / 2

    y, g, along = x, f, slope
    p = momentum + size / 2 * (beta * along - y)
    for i in range(LEAPFROG):
        y = y + size * p
        g, along = _value_and_slope(log_ratio, y)
        p = p + (size if i < LEAPFROG - 1 else size / 2) * (beta * along - y)
    accepted = u.log() < energy(x, f, momentum) - energy(y, g, p)
    x, slope = (torch.where(accepted[:, None], *pair) for pair in ((y, x), (along, slope)))
    return x, torch.where(accepted, g, f), slope, accepted.double().mean().item()


@torch.enable_grad()
def _value_and_slope(log_ratio: LogDensity, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    f = log_ratio(x)
    (slope,) = torch.autograd.grad(f.sum(), x)
    return f.detach(), slope


def trusted(importance: LogMass | None, annealed: LogMass | None) -> float:
    r"""Returns the log-mass to normalise by, of estimates that miss mass sooner than invent it.

    That of importance sampling is taken if it has draws enough and annealing did not find clearly
    more, else the larger.
    """
    if importance is None or not math.isfinite(importance.value):
        return math.nan if annealed is None else annealed.value
    if annealed is None:
        return importance.value
    error = math.hypot(importance.error, annealed.error)
    more = annealed.value > importance.value + 3 * error
    if importance.effective >= ENOUGH and not more:
        return importance.value
    return max(importance.value, annealed.value)
