r"""Joint objectives: the time score together with the data score.

A second network learns the data score :math:`s^x = \nabla_x \log p_t(x)`. It helps the time score
only as far as the two share weights, by shaping what they share; the ratio never uses it.
"""

__all__ = ["ConditionalJointScoreMatching", "DataScore", "JointScoreMatching"]

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..paths.gaussian import GaussianPath
from ..paths.times import Times
from ..paths.weights import Weight
from .base import Batch, Ratio
from .conditional import ConditionalScoreMatching
from .marginal import TimeScoreMatching

#: A network from points (B, *) and times (B,) to data scores (B, *).
DataScore: TypeAlias = nn.Module | Callable[[Tensor, Tensor], Tensor]


class JointScoreMatching(TimeScoreMatching):
    r"""Time score matching plus sliced score matching.

    Adds to :class:`TimeScoreMatching`, with the same weight and times and for a standard normal
    probe :math:`v`, the sliced (Hutchinson) form of
    :math:`\lambda \| s^x - \nabla_x \log p_t \|^2`,

    .. math:: \lambda \| s^x \|^2 + 2 \lambda \, v^\top (\nabla_x s^x) \, v \, .

    Note:
        The loss printed in the one-step paper lacks :math:`\lambda s^2`: it is linear in the time
        score and has no minimum. The norm in its source is over the joint vector of data *and*
        time score, so the square belongs there. For times that are not uniform, the printed
        :math:`2 \dot\lambda s` is wrong as well, see :class:`TimeScoreMatching`.

    Arguments:
        path: The path.
        data_score: The network :math:`s^x(x, t)`.
        weight: The weight :math:`\lambda`.
        times: The distribution of times.
        balance: The factor on the data part.

    References:
        | Sliced Score Matching (Song et al., 2019)
        | https://arxiv.org/abs/1905.07088
    """

    needs_probe = True

    def __init__(
        self,
        path: GaussianPath,
        data_score: DataScore,
        weight: Weight | None = None,
        times: Times | None = None,
        balance: float = 1.0,
    ) -> None:
        super().__init__(path, weight, times)
        self.data_score = data_score
        self.balance = balance

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        if batch.probe is None:
            raise ValueError("Sliced score matching needs 'probe' in the batch, got None.")

        with torch.enable_grad():
            x_t = self.at_time(batch, batch.t).detach().requires_grad_()
            score = self.data_score(x_t, batch.t).to(x_t)
            # grad(v . s) = J^T v, and (J^T v) . v = v^T J v: one backward pass for the slice.
            (slope,) = torch.autograd.grad((batch.probe * score).sum(), x_t, create_graph=True)

        data = score.square() + 2 * batch.probe * slope
        weight = self.balance * self.weight.value(batch.t)
        return super().loss(ratio, batch, at) + weight * data.flatten(1).sum(dim=1)


class ConditionalJointScoreMatching(ConditionalScoreMatching):
    r"""Conditional score matching plus denoising score matching.

    Adds to :class:`ConditionalScoreMatching` the mean over dimensions of
    :math:`(\sqrt{v} \, s^x + z)^2`, whose minimiser is the data score of the path.

    Arguments:
        path: The path.
        data_score: The network :math:`s^x(x, t)`.
        weight: The weight :math:`\lambda` of the time part.
        form: The form of the time part.
        balance: The factor on the data part.
    """

    def __init__(
        self,
        path: GaussianPath,
        data_score: DataScore,
        weight: Weight | None = None,
        form: str = "scalar",
        balance: float = 1.0,
    ) -> None:
        super().__init__(path, weight, form)
        self.data_score = data_score
        self.balance = balance

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        x_t = self.at_time(batch, batch.t)
        sigma = self.path.rates(batch.t).v.detach().sqrt()
        score = self.data_score(x_t, batch.t).flatten(1)
        data = (sigma[:, None] * score + batch.noise.flatten(1)).square().mean(dim=1)
        return super().loss(ratio, batch, at) + self.balance * data
