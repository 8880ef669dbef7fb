r"""Gaussian densities of features, fitted in closed form: what trained ratios have to beat.

**Plug-in ratio.** With one Gaussian for each ID class :math:`c`, of share :math:`\pi_c`, and one for
the reference,

.. math:: \log \hat r(w) = \log \sum_c \pi_c \, \mathcal{N}(w; m_c, \Sigma_c)
    - \log \mathcal{N}(w; m_0, \Sigma_0) \, ,

in nats, larger = more ID. The classes have one covariance, that of features about the means of their
classes (tied), or each its own.

**Relative Mahalanobis.** Without a reference, :math:`\max_c \frac{1}{2} (d_0^2 - d_c^2)`, with the
distances in the metric of the tied covariance of the classes, :math:`d_c`, and of all ID features
together, :math:`d_0`. It is a score of a :class:`~ood_osdre.models.baselines.Classifier`.

Covariances are those of maximum likelihood: sums over their number of points.

References:
    | A simple unified framework for detecting out-of-distribution samples and adversarial attacks
      (Lee et al., 2018)
    | https://arxiv.org/abs/1807.03888

    | A simple fix to Mahalanobis distance for improving near-OOD detection (Ren et al., 2021)
    | https://arxiv.org/abs/2106.09022
"""

__all__ = ["GaussianLogRatio", "Gaussians", "gaussian_ratio"]

import math

import torch
from torch import Tensor, nn

from ..errors import UserError
from .ratio import DirectRatio

# Directions with less than this share of the largest variance are rounding.
LEAST_VARIANCE = 1e-10
# The log of the share of a class without points.
ABSENT = -1e30


class Gaussians(nn.Module):
    r"""The Gaussians of classes and the shares of the classes.

    Arguments:
        classes: The number of classes :math:`C`.
        dim: The dimension :math:`d`.
        tied: Whether all have one covariance.
    """

    centre: Tensor
    factors: Tensor
    projected: Tensor
    constants: Tensor

    def __init__(self, classes: int, dim: int, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        # The inverse of a covariance is its factor times the transpose of it; means are stored in the
        # coordinates that the factors lead to, from a common centre.
        self.register_buffer("centre", torch.zeros(dim).double())
        self.register_buffer("factors", torch.zeros(1 if tied else classes, dim, dim).double())
        self.register_buffer("projected", torch.zeros(classes, dim).double())
        self.register_buffer("constants", torch.zeros(classes).double())

    @torch.no_grad()
    def fit(self, x: Tensor, labels: Tensor) -> int:
        r"""Fits points of known class.

        Arguments:
            x: The points, with shape :math:`(N, d)`.
            labels: Their classes, with shape :math:`(N)`; those without points have the share 0.

        Returns:
            The least number of directions in which the points of one covariance vary: of fewer than
            :math:`d`, distances count these alone, and densities are none.

        Raises:
            UserError: If a point is not finite.
        """
        if not x.isfinite().all():
            raise UserError("features: hold NaN or infinity, expected finite numbers.")
        (classes, dim), centre = self.projected.shape, x.double().mean(dim=0)
        counts = labels.bincount(minlength=classes).double()
        means, scatters = x.new_zeros(classes, dim).double(), []
        for c in range(classes):
            own = x[labels == c].double() - centre
            if len(own):
                means[c] = own.mean(dim=0)
            scatters.append((own - means[c]).T @ (own - means[c]))
        if self.tied:
            covariances = torch.stack(scatters).sum(dim=0)[None] / len(x)
        else:
            covariances = torch.stack(scatters) / counts.clamp(min=1)[:, None, None]
        values, vectors = torch.linalg.eigh(covariances)
        kept = values > LEAST_VARIANCE * values[:, -1:].clamp(min=torch.finfo(values.dtype).tiny)
        factors = vectors * torch.where(kept, values, torch.inf).rsqrt()[:, None]
        log_det = -torch.where(kept, values, 1.0).log().sum(dim=1) / 2
        constants = (counts / len(x)).log().clamp(min=ABSENT) + log_det
        self.centre.copy_(centre)
        self.factors.copy_(factors)
        self.projected.copy_((means[:, None] @ factors)[:, 0])
        self.constants.copy_(constants - dim / 2 * math.log(2 * math.pi))
        return int(kept.sum(dim=1)[counts > 0 if not self.tied else slice(None)].min())

    def distances(self, x: Tensor) -> Tensor:
        r"""Returns squared Mahalanobis distances of points :math:`(B, d)`, with shape :math:`(B, C)`."""
        z = torch.einsum("bd,kde->bke", x.to(self.centre.dtype) - self.centre, self.factors)
        return (z - self.projected).square().sum(dim=2)

    def log_density(self, x: Tensor) -> Tensor:
        r"""Returns the log-densities of the mixture in nats, with shape :math:`(B)`."""
        return (self.constants - self.distances(x) / 2).logsumexp(dim=1)


class GaussianLogRatio(nn.Module):
    r"""The log-ratio of the classes' Gaussians to that of the reference, as a feature.

    Arguments are those of :class:`Gaussians`.
    """

    def __init__(self, classes: int, dim: int, tied: bool = True) -> None:
        super().__init__()
        self.classes, self.reference = Gaussians(classes, dim, tied), Gaussians(1, dim)

    def fit(self, x_1: Tensor, labels: Tensor, x_0: Tensor) -> None:
        r"""Fits ID points of known class and reference points.

        Arguments:
            x_1: The ID points, with shape :math:`(N, d)`.
            labels: Their classes, with shape :math:`(N)`.
            x_0: The reference points, with shape :math:`(M, d)`.

        Raises:
            UserError: If the points of a Gaussian vary in too few directions, or are not finite.
        """
        none = torch.zeros(len(x_0), dtype=torch.long, device=x_0.device)
        for side, gaussians, x, own in (
            ("ID", self.classes, x_1, labels), ("reference", self.reference, x_0, none)
        ):  # fmt: skip
            if (found := gaussians.fit(x, own)) < (dim := x.shape[1]):
                what = side if gaussians.tied else "one class's"
                raise UserError(
                    f"head.estimator: gaussians: {what} features vary in {found} directions, expected "
                    f"all {dim}; lower head.rank{'' if gaussians.tied else ' or set head.tied'}."
                )

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the log-ratios in nats, larger = more ID, of points, with shape :math:`(B, 1)`."""
        return (self.classes.log_density(x) - self.reference.log_density(x))[:, None]


def gaussian_ratio(dim: int, classes: int = 1, tied: bool = True) -> DirectRatio:
    r"""Returns the ratio whose backbone is a :class:`GaussianLogRatio`, to be fitted."""
    ratio = DirectRatio(GaussianLogRatio(classes, dim, tied), 1)
    nn.init.ones_(ratio.head.weight)
    return ratio
