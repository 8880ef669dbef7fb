r"""Mixtures of Gaussians in any dimension, as truths and as proposals of importance sampling."""

__all__ = ["GaussianMixture", "isotropic"]

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

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
