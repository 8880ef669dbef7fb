r"""Pairs of Gaussians with a known log-ratio and divergence, and mixtures of Gaussians.

Each pair carries its truth, in nats, and a stable id. Pairs for mutual information are correlated
coordinates; those for divergences are the scenarios of a stream that drifts away from
:math:`\mathcal{N}(0, I)`. Mixtures serve as truths and as proposals of importance sampling.
"""

__all__ = [
    "SCENARIOS",
    "GaussianMixture",
    "GaussianPair",
    "correlated_pairs",
    "correlation_of",
    "isotropic",
    "scenario",
]

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Generator, Tensor
from torch.distributions import MultivariateNormal, kl_divergence


@dataclass(frozen=True, eq=False)
class GaussianPair:
    r"""A reference :math:`p_0 = \mathcal{N}(0, I)` and data :math:`p_1 = \mathcal{N}(m, \Sigma)`.

    Attributes:
        id: The name of the problem, which stays.
        mean: The mean :math:`m`, with shape :math:`(d)`.
        covariance: The covariance :math:`\Sigma`, with shape :math:`(d, d)`.
    """

    id: str
    mean: Tensor
    covariance: Tensor

    @property
    def dim(self) -> int:
        r"""The dimension :math:`d`."""
        return len(self.mean)

    @property
    def reference(self) -> MultivariateNormal:
        r"""The reference :math:`p_0`, in double precision."""
        mean = torch.zeros(self.dim, dtype=torch.float64)
        return MultivariateNormal(mean, scale_tril=torch.eye(self.dim, dtype=torch.float64))

    @property
    def data(self) -> MultivariateNormal:
        r"""The data's distribution :math:`p_1`, in double precision."""
        return MultivariateNormal(self.mean.double(), scale_tril=self._tril)

    @property
    def divergence(self) -> float:
        r"""The divergence :math:`\mathrm{KL}(p_1 \| p_0)`, in nats."""
        return kl_divergence(self.data, self.reference).item()

    @cached_property
    def _tril(self) -> Tensor:
        return torch.linalg.cholesky(self.covariance.double())

    def log_ratio(self, x: Tensor) -> Tensor:
        r"""Returns :math:`\log p_1(x) / p_0(x)`, in nats.

        Arguments:
            x: The points, with shape :math:`(N, d)`.

        Returns:
            The log-ratios, with shape :math:`(N)`.
        """
        y = x.double().cpu()
        return (self.data.log_prob(y) - self.reference.log_prob(y)).to(x)

    def draw_pairs(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        r"""Draws independent points of :math:`p_0` and :math:`p_1`.

        Arguments:
            n: The number :math:`N` of each.
            generator: The source of randomness, which also says the device.

        Returns:
            The points, each with shape :math:`(N, d)`, in the default precision.
        """
        device = generator.device
        z = torch.randn(2, n, self.dim, generator=generator, device=device)
        return z[0], self.mean.to(z) + z[1] @ self._tril.to(z).T


def correlation_of(dim: int, nats: float) -> float:
    r"""Returns the correlation :math:`\rho = \sqrt{1 - e^{-4 I / d}}` of `dim` coordinates.

    :math:`d / 2` pairs of coordinates, each with correlation :math:`\rho`, have a mutual
    information of :math:`I = -\frac{d}{4} \log(1 - \rho^2)`.

    Note:
        For :math:`I = d / 4`, the paper's 10 to 40 nats, this is 0.795. The 0.5 it prints would
        give 2.9 to 11.5 nats.

    Arguments:
        dim: The dimension :math:`d`, even.
        nats: The mutual information :math:`I`.
    """
    return math.sqrt(-math.expm1(-4 * nats / dim))


def correlated_pairs(dim: int, nats: float) -> GaussianPair:
    r"""Returns correlated pairs of neighbouring coordinates against independent ones.

    With :math:`x` the even and :math:`y` the odd coordinates, :math:`p_0` is the product of the
    marginals of :math:`p_1` and the divergence is the mutual information of :math:`x` and
    :math:`y`.

    Arguments:
        dim: The dimension :math:`d`, even.
        nats: The mutual information.
    """
    assert dim >= 2, "'dim' should be even and at least 2"
    assert dim % 2 == 0, "'dim' should be even and at least 2"
    rho = correlation_of(dim, nats)
    block = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    covariance = torch.block_diag(*[block] * (dim // 2))
    name = f"gaussian-pairs-d{dim}-{nats:g}nats"
    return GaussianPair(name, torch.zeros(dim, dtype=torch.float64), covariance)


def _linear_drift(dim: int, step: float) -> tuple[Tensor, Tensor]:
    return torch.full((dim,), 0.2 * step), torch.full((dim,), 1 - 0.05 * step)


def _noise_corruption(dim: int, step: float) -> tuple[Tensor, Tensor]:
    return torch.zeros(dim), torch.full((dim,), 1 + 0.3 * step)


def _controlled_divergence(dim: int, step: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(round(1000 * step))
    direction = torch.randn(dim, generator=generator, dtype=torch.float64)
    return math.sqrt(2 * step) * direction / direction.norm(), torch.ones(dim)


#: The mean and the variances of a stream at a step, by scenario, of the dimension and the step.
SCENARIOS: dict[str, Callable[[int, float], tuple[Tensor, Tensor]]] = {
    "linear_drift": _linear_drift,
    "noise_corruption": _noise_corruption,
    "controlled_divergence": _controlled_divergence,
}


def scenario(name: str, dim: int, step: float) -> GaussianPair:
    r"""Returns what a drifting stream has become, against :math:`\mathcal{N}(0, I)`.

    - `"linear_drift"`: mean :math:`0.2 \, t \, \mathbb{1}`, covariance :math:`(1 - 0.05 \, t) I`.
    - `"noise_corruption"`: mean zero, covariance :math:`(1 + 0.3 \, t) I`.
    - `"controlled_divergence"`: a mean of norm :math:`\sqrt{2 t}` whose direction is new at every
      step, covariance :math:`I`; the divergence is :math:`t` nats.

    Arguments:
        name: One of the keys of :data:`SCENARIOS`.
        dim: The dimension :math:`d`.
        step: The step :math:`t \geq 0`, below 20 for the linear drift.
    """
    mean, variance = SCENARIOS[name](dim, step)
    assert step >= 0, "'step' should not be negative"
    assert (variance > 0).all(), "the variances of this step are not positive"
    ident = f"{name.replace('_', '-')}-d{dim}-t{step:g}"
    return GaussianPair(ident, mean.double(), torch.diag(variance.double()))


# Points whose density is evaluated at once, so that many components fit in memory.
CHUNK = 1024


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
        seed: int = 0,
    ) -> "GaussianMixture":
        r"""Fits a mixture to a sample, with scikit-learn.

        Arguments:
            x: The sample, with shape :math:`(N, d)`.
            components: The number of components.
            defensive: The weight of a further component, :math:`\mathcal{N}(0, I)`, which keeps
                importance weights of anything close to it bounded.
            inflation: The factor on the covariances.
            seed: The seed of the initialisation.
        """
        # Imported here: nothing else in this module needs it.
        from sklearn.mixture import GaussianMixture as Fit

        fit = Fit(components, reg_covar=1e-4, random_state=seed).fit(x.cpu().double().numpy())
        means, weights = torch.as_tensor(fit.means_), torch.as_tensor(fit.weights_)
        factors = torch.linalg.cholesky(inflation * torch.as_tensor(fit.covariances_))
        if defensive:
            identity = torch.eye(x.shape[1], dtype=torch.float64)
            means = torch.cat([means, torch.zeros_like(means[:1])])
            factors = torch.cat([factors, identity[None]])
            weights = torch.cat([(1 - defensive) * weights, weights.new_tensor([defensive])])
        return cls(means, factors, weights)

    def sample(self, n: int, generator: Generator) -> Tensor:
        r"""Draws independent points.

        Arguments:
            n: The number :math:`N` of points.
            generator: The source of randomness, which also says the device.

        Returns:
            The points in the default precision, with shape :math:`(N, d)`.
        """
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
        r"""Evaluates the log-density, in nats.

        Arguments:
            x: The points, with shape :math:`(N, d)`.

        Returns:
            The log-densities in double precision, with shape :math:`(N)`.
        """
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


def isotropic(dim: int, std: float = 1.0) -> GaussianMixture:
    r"""Returns the normal distribution :math:`\mathcal{N}(0, \sigma^2 I)`.

    Arguments:
        dim: The dimension :math:`d`.
        std: The deviation :math:`\sigma`.
    """
    factor = std * torch.eye(dim, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    return GaussianMixture(torch.zeros(1, dim, dtype=torch.float64), factor[None], one)
