r"""The objective of a learnable path: its own variance, in closed form."""

__all__ = ["PathVariance"]

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..paths.gaussian import GaussianPath, Moments
from ..paths.quadrature import composite_rule
from .base import Batch, PathTerm, Ratio


class PathVariance(PathTerm):
    r"""Minimises the variance of the conditional time score, averaged over the path's interval.

    The loss is its logarithm, :math:`\log \frac{1}{b - a} \int_a^b V(t) \, dt`. Conditional score
    matching at the optimum leaves the noise of its target, which :math:`V` bounds. The term looks
    at the path's rates and the moments of the data, not at the batch: the integral is a
    Gauss--Legendre rule, the same for all samples, and its gradient is exact. The logarithm keeps
    the gradient at order one where :math:`V` is in the millions, and moves no minimum.

    Arguments:
        path: The learnable path.
        moments: The second moments of both ends, over the data set.
        size: The number of nodes.

    See Also:
        :class:`ood_osdre.paths.schedules.KumaraswamySchedule`
    """

    def __init__(self, path: GaussianPath, moments: Moments, size: int = 128) -> None:
        super().__init__(path)

        self.moments, self.size = moments, size
        # The rule of the unit interval: its weights are those of a mean over any other.
        nodes, self._weights = composite_rule(np.array([0.0, 1.0]), size)
        low, high = path.t_range
        self._nodes = low + (high - low) * nodes

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        return {}

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        nodes = torch.as_tensor(self._nodes).to(batch.t)
        weights = torch.as_tensor(self._weights).to(batch.t)
        # Not a matrix product, which autocast would take to half precision.
        variance = (weights * self.path.moment_variance(nodes, self.moments)).sum()
        return variance.log().expand_as(batch.t)
