r"""Ratios for planar densities: networks that see fine detail, and the methods on them.

A multi-layer perceptron on plane coordinates learns coarse structure long before
fine one, whatever its objective. All rows of the planar suite, baselines included, look at sines and
cosines of random directions as well.

References:
    | Fourier features let networks learn high frequency functions (Tancik et al., 2020)
    | https://arxiv.org/abs/2006.10739
"""

__all__ = ["PLANAR_METHODS", "FourierFeatures"]

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...models.bases import RBFBasis
from ...models.networks import MLP, CoefficientNetwork
from ...models.ratio import DirectRatio, OneStepRatio, RatioModel
from ...models.time_conditioned import TimeConditionedMLP, TimeConditionedRatio
from ...objectives.base import Objective
from ..features import OrthonormalBasis
from ..methods import METHODS, Context, Method, likelihood
from ..partition import isotropic

# The variance of the proposal, relative to the mean square of a coordinate of the data.
WIDENING = 1.3

# Fourier features: their number, and their angular frequencies for sets a few units across.
FREQUENCIES, LOWEST, HIGHEST = 64, 0.5, 16.0


class FourierFeatures(nn.Module):
    r"""The point itself, and sines and cosines of it along random directions.

    Arguments:
        dim: The dimension :math:`d` of the points.
        size: The number of frequencies, evenly spaced on a logarithmic scale.
        lowest: The lowest angular frequency.
        highest: The highest angular frequency.
    """

    def __init__(
        self,
        dim: int,
        size: int = FREQUENCIES,
        lowest: float = LOWEST,
        highest: float = HIGHEST,
    ) -> None:
        super().__init__()
        directions = nn.functional.normalize(torch.randn(size, dim), dim=1)
        scale = torch.logspace(math.log10(lowest), math.log10(highest), size)
        self.waves: Tensor
        self.register_buffer("waves", scale[:, None] * directions)
        self.features = dim + 2 * size

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`, of `x`, with shape :math:`(B, d)`."""
        phase = x @ self.waves.T
        return torch.cat([x, phase.sin(), phase.cos()], dim=1)


class _FourierTimeNetwork(nn.Module):
    r"""A time-conditioned network on Fourier features."""

    def __init__(self, dim: int, features: int, depth: int) -> None:
        super().__init__()
        self.fourier = FourierFeatures(dim)
        self.network = TimeConditionedMLP(self.fourier.features, features, depth)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.network(self.fourier(x), t)


def _backbone(context: Context) -> nn.Module:
    o = context.options
    fourier = FourierFeatures(context.dim)
    return nn.Sequential(fourier, MLP(fourier.features, o.features, o.depth))


def _one_step(context: Context) -> RatioModel:
    o = context.options
    basis = OrthonormalBasis(RBFBasis(o.kernel, o.size, o.sigma, learnable=o.learnable))
    return OneStepRatio(CoefficientNetwork(_backbone(context), o.features, o.size), basis)


def _direct(context: Context) -> RatioModel:
    return DirectRatio(_backbone(context), context.options.features)


def _time_conditioned(context: Context) -> RatioModel:
    o = context.options
    network = _FourierTimeNetwork(context.dim, o.features, o.depth)
    return TimeConditionedRatio(network, o.evaluations, context.path.t_range)


def _wide_likelihood(context: Context) -> Objective:
    sigma = math.sqrt(max(WIDENING * context.moments.square_1 / context.dim, 1.0))
    return likelihood(context, isotropic(context.dim, sigma))


#: The rows of the planar suite; they differ in what the label says.
PLANAR_METHODS: dict[str, Method] = {
    "os-dre-likelihood": Method("OS-DRE (likelihood)", _one_step, _wide_likelihood, kernel=True),
    "os-dre": replace(METHODS["os-dre"], label="OS-DRE (path difference)", model=_one_step),
    "dre-inf": replace(METHODS["dre-inf"], model=_time_conditioned),
    "d3re": replace(METHODS["d3re"], model=_time_conditioned),
    "direct-likelihood": Method("Direct (likelihood)", _direct, _wide_likelihood),
}
