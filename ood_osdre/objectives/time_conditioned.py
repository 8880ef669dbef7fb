r"""Solver-based estimators: a time score that takes the time, integrated numerically.

The network is :math:`s(x, t)`, and the log-ratio is an integral over :math:`t` that costs one
network evaluation for each time a rule visits (the number of function evaluations, NFE). That is
the comparison that a one-step ratio is made for. Quadrature over *our* model would be no rival: as
:math:`h(x)` has no time, it needs one evaluation whatever the rule.

- DRE-∞: :class:`TimeConditionedScoreMatching`, time score matching with :math:`\partial_t s` by
  automatic differentiation, on a path of interpolation.
- D³RE: :class:`TimeConditionedConditionalMatching`, conditional score matching on the dequantised
  diffusion bridge.

References:
    | Density Ratio Estimation via Infinitesimal Classification (Choi et al., 2022)
    | https://arxiv.org/abs/2111.11010

    | Dequantified Diffusion-Schrödinger Bridge for Density Ratio Estimation (Chen et al., 2025)
    | https://arxiv.org/abs/2505.05034
"""

__all__ = [
    "TimeConditionedConditionalMatching",
    "TimeConditionedScoreMatching",
]

import torch
from torch import Tensor, nn

from ..models.time_conditioned import TimeConditionedRatio
from ..paths.gaussian import GaussianPath
from ..paths.times import Times, UniformTimes
from ..paths.weights import Constant, Weight
from .base import Batch
from .marginal import time_score_loss


class TimeConditionedConditionalMatching(nn.Module):
    r"""Conditional score matching, :math:`\lambda (s(x_t, t) - \partial_t \log p_t(x_t | x_0, x_1))^2`.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
    """

    def __init__(self, path: GaussianPath, weight: Weight | None = None) -> None:
        super().__init__()
        self.path = path
        self.weight = Constant() if weight is None else weight

    def forward(self, ratio: TimeConditionedRatio, batch: Batch) -> dict[str, Tensor]:
        r"""Returns the unreduced loss, with shape :math:`(B)`, as `conditional` and `total`."""
        x_0, x_1, t, noise = batch.x_0, batch.x_1, batch.t, batch.noise
        target = self.path.time_score(x_0, x_1, t, noise)
        s = ratio.time_score(self.path.sample(x_0, x_1, t, noise), t)
        # The target's deviation is about a thousand on images: weighted before it is squared.
        loss = (self.weight.value(t).sqrt() * (s - target)).square()
        return {"conditional": loss, "total": loss}


class TimeConditionedScoreMatching(nn.Module):
    r"""Time score matching (:class:`ood_osdre.objectives.TimeScoreMatching`) of a network with time.

    :math:`\partial_t s` is the gradient of the network in its time argument, which doubles the
    backward pass.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
        times: The distribution that the draws' times come from; by default uniform on the path's
            interval.
    """

    def __init__(
        self, path: GaussianPath, weight: Weight | None = None, times: Times | None = None
    ) -> None:
        super().__init__()
        self.path = path
        self.weight = Constant() if weight is None else weight
        self.times = UniformTimes(*path.t_range) if times is None else times

    def forward(self, ratio: TimeConditionedRatio, batch: Batch) -> dict[str, Tensor]:
        r"""Returns the unreduced loss, with shape :math:`(B)`, as `time_score` and `total`."""
        t = batch.t
        size = len(t)
        bounds = [torch.full_like(t, bound) for bound in (self.times.low, self.times.high)]
        at = torch.cat([t, *bounds]).requires_grad_()
        x = torch.cat(
            [self.path.sample(batch.x_0, batch.x_1, u, batch.noise) for u in (t, *bounds)]
        )

        scores = ratio.time_score(x, at)
        (derivative,) = torch.autograd.grad(scores[:size].sum(), at, create_graph=True)
        s, s_low, s_high = scores.split(size)
        loss = time_score_loss(
            self.weight,
            self.times,
            t,
            s=s,
            derivative=derivative[:size],
            s_low=s_low,
            s_high=s_high,
        )
        return {"time_score": loss, "total": loss}
