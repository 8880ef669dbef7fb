r"""Terms beside the loss of the ratio: for a class head, for small ratios, for a learnable path."""

__all__ = ["ClassLoss", "OutlierExposure", "PathVariance", "Shrinkage"]

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..paths import GaussianPath, Moments
from ..paths.quadrature import composite_rule
from .base import Batch, PathTerm, Ratio
from .endpoint import EndTerm


class ClassLoss(EndTerm):
    r"""Cross-entropy of the class head at the ID points.

    Takes the arguments of :class:`~ood_osdre.objectives.endpoint.EndTerm`, and:

    Arguments:
        smoothing: The share of the target that is spread evenly over all classes.
    """

    ends = slice(1, 2)

    def __init__(
        self, path: GaussianPath | None = None, clean: bool = False, smoothing: float = 0.0
    ) -> None:
        super().__init__(path, clean)
        self.smoothing = smoothing

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        logits = at[self.names[0]].logits
        assert logits is not None, "the network has no class head"
        assert batch.label is not None, "the batch has no labels"
        return F.cross_entropy(
            logits, batch.label, reduction="none", label_smoothing=self.smoothing
        )


class OutlierExposure(EndTerm):
    r"""Cross-entropy of the class head to the uniform distribution at the reference points.

    Beside :class:`ClassLoss` it makes a classifier that is unsure about the reference, to be
    scored by its largest softmax probability: a baseline that sees the same data as a ratio does.

    Takes the arguments of :class:`~ood_osdre.objectives.endpoint.EndTerm`.

    References:
        | Deep anomaly detection with outlier exposure (Hendrycks et al., 2019)
        | https://arxiv.org/abs/1812.04606
    """

    ends = slice(0, 1)

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        logits = at[self.names[0]].logits
        assert logits is not None, "the network has no class head"
        return -F.log_softmax(logits, dim=1).mean(dim=1)


class Shrinkage(EndTerm):
    r"""Shrinks the log-ratio at both ends, :math:`\frac{1}{2} (f_0^2 + f_1^2)`.

    Where the supports of reference and ID data barely meet, the true log-ratios are hundreds of
    nats and an end-point loss alone drives :math:`f` ever further out. A small weight here bounds
    the ratios, at the price of a bias towards zero.

    Takes the arguments of :class:`~ood_osdre.objectives.endpoint.EndTerm`.
    """

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f_0, f_1 = (ratio.log_ratio_at(at[name]) for name in self.names)
        return (f_0**2 + f_1**2) / 2


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

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        nodes = torch.as_tensor(self._nodes).to(batch.t)
        weights = torch.as_tensor(self._weights).to(batch.t)
        # Not a matrix product, which autocast would take to half precision.
        variance = (weights * self.path.moment_variance(nodes, self.moments)).sum()
        return variance.log().expand_as(batch.t)

    def learnt(self) -> dict[str, Any]:  # noqa: D102
        return {"path": self.path.numbers()}
