r"""Ratios for densities: a normalised likelihood, and networks that see fine detail.

**The likelihood.** With a known reference :math:`p_0 = \mathcal{N}(0, I)`, a ratio is a density,
:math:`\log \hat p = f + \log p_0`, and a log-ratio in closed form can be trained on the divergence
itself. The KLIEP loss :math:`\mathbb{E}_{p_0}[e^f] - \mathbb{E}_{p_1}[f]` is, up to a constant,
:math:`\mathrm{KL}(p_1 \| \hat p) + \hat Z - 1` with :math:`\hat Z = \int \hat p`: it is least
where :math:`\hat p = p_1`, which has :math:`\hat Z = 1`. What stands in its way is that a batch of
:math:`p_0` hardly ever visits the places where the ratio is large, so the first term is drawn from
a wider Gaussian of known density instead and weighted. A solver-based model would have to
differentiate through its solver to be trained like this.

**The networks.** A multi-layer perceptron on plane coordinates learns coarse structure long before
fine one, whatever its objective. All rows of the planar suite, rivals included, look at sines and
cosines of random directions as well.

References:
    | Direct importance estimation with model selection (Sugiyama et al., 2008), KLIEP
    | https://papers.nips.cc/paper/3248

    | Fourier features let networks learn high frequency functions (Tancik et al., 2020)
    | https://arxiv.org/abs/2006.10739
"""

__all__ = ["PLANAR_METHODS", "FourierFeatures", "NormalisedLikelihood"]

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...models.bases import RBFBasis
from ...models.networks import MLP, CoefficientNetwork
from ...models.ratio import DirectRatio, OneStepRatio, RatioModel
from ...models.time_conditioned import TimeConditionedMLP, TimeConditionedRatio
from ...objectives import Batch, Objective, Ratio, Term
from ...objectives.endpoint import capped_exp
from ..features import OrthonormalBasis
from ..gaussians import GaussianMixture, isotropic
from ..methods import METHODS, Context, Method
from ..partition import log_normal

# The variance of the proposal, relative to the mean square of a coordinate of the data.
WIDENING = 1.3

# Fourier features: their number, and their angular frequencies for sets a few units across.
FREQUENCIES, LOWEST, HIGHEST = 64, 0.5, 16.0


class NormalisedLikelihood(Term):
    r"""The KLIEP loss against :math:`\mathcal{N}(0, I)`, its mass by importance sampling.

    .. math:: e^{f(y)} \, \frac{p_0(y)}{q(y)} - f(x_1) \, , \qquad y \sim q

    Its mean is that of the KLIEP loss, whatever the proposal :math:`q`, as long as it covers
    :math:`\hat p` and no weighted ratio is beyond the cap; its variance is small if :math:`q` is
    close to it. The draw's probe and time are what :math:`y` is made of; the draw's reference
    points are not looked at, as the density of :math:`p_0` is known.

    Arguments:
        proposal: The proposal :math:`q`.
        t_range: The interval that the draw's times are uniform on; they choose the component.
        cap: The weighted log-ratio beyond which the exponential goes on linearly; at most 30.
    """

    def __init__(
        self,
        proposal: GaussianMixture,
        t_range: tuple[float, float] = (0.0, 1.0),
        cap: float = 30.0,
    ) -> None:
        super().__init__()
        self.proposal, self.t_range, self.cap = proposal, t_range, cap

    def points(self, draw: Batch) -> dict[str, Tensor]:  # noqa: D102
        if draw.probe is None:
            raise ValueError("The likelihood needs 'probe' in the draw, got None.")
        low, high = self.t_range
        y = self.proposal.place((draw.t - low) / (high - low), draw.probe)
        return {"proposal": y, "x_1": draw.x_1}

    def loss(self, ratio: Ratio, draw: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f, f_1 = (ratio.log_ratio_at(at[name]) for name in ("proposal", "x_1"))
        y = self.points(draw)["proposal"]
        log_weight = log_normal(y) - self.proposal.log_density(y)
        return capped_exp(f + log_weight.to(f), self.cap) - f_1


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


def likelihood(context: Context, proposal: GaussianMixture) -> Objective:
    r"""Builds the objective of the normalised likelihood.

    Arguments:
        context: What it is built from; its points are those of the reference as they are.
        proposal: The proposal.

    Raises:
        UserError: If the points are standardised, in which :math:`p_0` is another.
    """
    if (found := context.options.standardise) != "no":
        raise UserError(
            f"standardise: got {found!r} with a likelihood, expected 'no'; its reference is "
            "N(0, I) of the points as they are."
        )
    term = NormalisedLikelihood(proposal, context.path.t_range, context.options.cap)
    return Objective({"loss": (1.0, term)})


#: The rows of the planar suite; they differ in what the label says.
PLANAR_METHODS: dict[str, Method] = {
    "os-dre-likelihood": Method("OS-DRE (likelihood)", _one_step, _wide_likelihood, kernel=True),
    "os-dre": replace(METHODS["os-dre"], label="OS-DRE (path difference)", model=_one_step),
    "dre-inf": replace(METHODS["dre-inf"], model=_time_conditioned),
    "d3re": replace(METHODS["d3re"], model=_time_conditioned),
    "direct-likelihood": Method("Direct (likelihood)", _direct, _wide_likelihood),
}
