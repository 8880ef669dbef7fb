r"""Parts that suit ratios of vectors: normal scores, a better basis, and a head of the time.

Increasing maps of single coordinates leave a mutual information as it is; :class:`NormalScores`
takes away what makes heavy tails hard.

A linear head on :class:`~ood_osdre.models.QuadraticFeatures` can represent the time score between
two Gaussians exactly. What is left is the conditioning of the regression: those features have unit
variance under a standard normal, and :class:`OrthonormalBasis` does the same for the functions of
the time.
"""

__all__ = ["NormalScores", "OrthonormalBasis", "TimeConditionedFeatures"]

import math

import torch
from torch import Tensor, nn

from ..models import RBFBasis, TemporalBasis, gram_matrix

# The largest number in double precision, and the least above zero.
LARGEST, LEAST = torch.finfo(torch.float64).max, 5e-324
# The largest number of quantiles of normal scores.
KNOTS = 257


class NormalScores:
    r"""Maps each coordinate so that its distribution is about :math:`\mathcal{N}(0, 1)`.

    The map of a coordinate is increasing: piecewise linear between quantiles of a sample, and
    logarithmic beyond them.

    Arguments:
        sample: The sample, with shape :math:`(N, d)`.
    """

    def __init__(self, sample: Tensor) -> None:
        assert sample.ndim == 2, "'sample' should have shape (N, d)"
        assert len(sample) >= 2, "'sample' should have at least 2 rows"
        size = min(KNOTS, len(sample))
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


class OrthonormalBasis(TemporalBasis):
    r"""A linear recombination of a basis that is nearly orthonormal on :math:`[0, 1]`.

    With :math:`G = \int_0^1 g(t) \, g(t)^\top dt` at construction, the functions are
    :math:`\sqrt{K} \, (G + \delta I)^{-1/2} g(t)`; the factor meets the :math:`K^{-1/2}` of
    :class:`ood_osdre.models.ratio.OneStepRatio`. They span the same functions, so the model is the
    same; but a gradient step now moves all of them alike, where the wide atoms of the basis itself
    are nearly equal and their differences learn thousands of times more slowly. Directions with
    eigenvalues far below :math:`\delta` stay small.

    Arguments:
        basis: The basis. Its shapes may be learnt on; the recombination stays.
        ridge: The ridge :math:`\delta > 0`, relative to the largest eigenvalue of :math:`G`.
    """

    mix: Tensor

    def __init__(self, basis: RBFBasis, ridge: float = 1e-5) -> None:
        super().__init__()
        assert ridge > 0, "'ridge' should be positive"
        values, vectors = torch.linalg.eigh(gram_matrix(basis))
        root = vectors / (values + ridge * values[-1]).sqrt() @ vectors.T
        self.basis = basis
        self.size = basis.size
        self.register_buffer("mix", math.sqrt(basis.size) * root.to(basis.centers))

    def forward(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.basis(t) @ self.mix

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.basis.derivative(t) @ self.mix

    def integral(self, a: float | Tensor = 0.0, b: float | Tensor = 1.0) -> Tensor:  # noqa: D102
        return self.basis.integral(a, b) @ self.mix


class TimeConditionedFeatures(nn.Module):
    r"""The baseline of a linear head on fixed features: weights that are a network of the time.

    .. math:: s(x, t) = \langle f(x), w(t) \rangle + b(t)

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
    """

    def __init__(self, backbone: nn.Module, features: int) -> None:
        super().__init__()
        width = 64  # of the network of the time
        self.backbone = backbone
        self.weights = nn.Sequential(
            nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.head = nn.Linear(width, features + 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the scores at `x`, with shape :math:`(B, *)`, and `t`, both :math:`(B)`."""
        weights = self.head(self.weights(2 * t[:, None] - 1))
        return (self.backbone(x) * weights[:, :-1]).sum(dim=1) + weights[:, -1]
