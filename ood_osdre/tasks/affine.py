r"""Affine maps that standardise points, which leaves their density ratios as they are."""

__all__ = ["Affine", "pooled_affine"]

from typing import NamedTuple

import torch
from torch import Tensor

from .methods import FitOptions


class Affine(NamedTuple):
    r"""An affine map of vectors, :math:`A (x - m)`.

    Attributes:
        mean: The vector :math:`m`, with shape :math:`(d)`.
        matrix: The matrix :math:`A`, with shape :math:`(d, d)`, or its diagonal, :math:`(d)`.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps points, with shape :math:`(B, d)`.

        Raises:
            ValueError: If they have another shape.
            TypeError: If they are no tensor.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"Points should be a tensor, got {type(x).__name__}.")
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise ValueError(
                f"Points should have shape (N, {len(self.mean)}), got {tuple(x.shape)}."
            )
        x = x.to(self.mean) - self.mean
        return x * self.matrix if self.matrix.ndim == 1 else x @ self.matrix.T


def pooled_affine(pairs: tuple[Tensor, Tensor], options: FitOptions) -> Affine:
    r"""Returns the map that standardises points of both sources together.

    Arguments:
        pairs: Points of :math:`p_0` and of :math:`p_1`, each with shape :math:`(B, d)`.
        options: Which map it is, `standardise`, and for what features.
    """
    x = torch.cat(pairs)
    dim = x.shape[1]
    if options.standardise == "no":
        return Affine(torch.zeros_like(x[0]), torch.ones_like(x[0]))
    scale = x.std(dim=0)
    # A coordinate that does not vary says nothing about the ratio.
    scale = torch.where(scale > 0, scale, 1.0)
    if options.standardise == "scale":
        return Affine(x.mean(dim=0), 1 / scale)

    correlation = torch.cov((x / scale).T.double()).reshape(dim, dim)
    if options.backbone == "block_quadratic":
        block = torch.arange(dim, device=x.device) // options.block
        correlation = torch.where(block == block[:, None], correlation, 0.0)
    values, vectors = torch.linalg.eigh(correlation)
    root = vectors / values.clamp(min=1e-6).sqrt() @ vectors.T
    return Affine(x.mean(dim=0), (root / scale).to(x))
