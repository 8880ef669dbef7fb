r"""Parts that suit ratios of vectors: quadratic features and a well-conditioned basis.

Between two Gaussians every time score of a Gaussian path is a quadratic function of the point, so
a network with a linear head on quadratic features can represent it exactly. What is left is the
conditioning of the regression: features have unit variance under a standard normal, and
:class:`OrthonormalBasis` does the same for the functions of the time.
"""

__all__ = ["OrthonormalBasis", "QuadraticFeatures", "TimeConditionedFeatures"]

import math

import torch
from torch import Tensor, nn

from ..models.bases import RBFBasis, TemporalBasis, gram_matrix


class QuadraticFeatures(nn.Module):
    r"""The features :math:`x_i`, :math:`(x_i^2 - 1) / \sqrt{2}` and :math:`x_i x_j`.

    They are orthonormal under :math:`\mathcal{N}(0, I)`. An affine head on them is any quadratic
    function, or with `block`, one that couples coordinates of the same block only.

    Arguments:
        dim: The dimension :math:`d` of the inputs.
        block: The size of the blocks of consecutive coordinates; None for one block.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, dim: int, block: int | None = None) -> None:
        super().__init__()
        i, j = torch.triu_indices(dim, dim, offset=1)
        if block is not None:
            same = i // block == j // block
            i, j = i[same], j[same]
        self.register_buffer("rows", i)
        self.register_buffer("columns", j)
        self.features = 2 * dim + len(i)

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`, of `x`, with shape :math:`(B, d)`."""
        squares = (x**2 - 1) / math.sqrt(2)
        return torch.cat([x, squares, x[:, self.rows] * x[:, self.columns]], dim=1)


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
        width: The width of the network of the time.
    """

    def __init__(self, backbone: nn.Module, features: int, width: int = 64) -> None:
        super().__init__()
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
