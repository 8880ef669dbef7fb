r"""Weights :math:`\lambda(t)` of the score-matching losses.

A weight is a function of the time *only*. A weight that also looks at the sample, such as one
over the variance of the target given :math:`(x_0, x_1)`, moves the minimiser away from the time
score: the regression then averages targets with weights that depend on what is averaged over.
"""

__all__ = [
    "BridgeWeight",
    "Constant",
    "InverseVarianceWeight",
    "NoiseVarianceWeight",
    "Weight",
    "value_and_derivative",
]

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gaussian import GaussianPath, Moments


class Weight(abc.ABC):
    r"""Abstract non-negative weight. No gradient flows into the parameters of a path."""

    @abc.abstractmethod
    def value(self, t: Tensor) -> Tensor:
        r"""Returns :math:`\lambda(t)`, with the shape of `t`, :math:`(*)`."""

    def derivative(self, t: Tensor) -> Tensor:
        r"""Returns :math:`\lambda'(t)`, by default through autograd, with shape :math:`(*)`."""
        return value_and_derivative(self.value, t)[1]


@dataclass(frozen=True)
class Constant(Weight):
    r"""The constant weight :math:`\lambda(t) = c`.

    Arguments:
        scale: The constant :math:`c`.
    """

    scale: float = 1.0

    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.full_like(t, self.scale)

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros_like(t)


@dataclass(frozen=True)
class BridgeWeight(Weight):
    r"""The weight :math:`\lambda(t) = t (1 - t)`, which vanishes at both ends."""

    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return t * (1 - t)

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return 1 - 2 * t


@dataclass(frozen=True)
class InverseVarianceWeight(Weight):
    r"""The weight :math:`\lambda(t) = 1 / V(t)`, which brings conditional losses to order one.

    On a learnable path :math:`\lambda'(t)` grows like a negative power of :math:`t` at 0, so that
    time score matching, which needs it, is unbiased but may have infinite variance there; use
    another weight with it.

    Arguments:
        path: The path.
        moments: The second moments of both ends, over the data set.
    """

    path: GaussianPath
    moments: Moments

    @torch.no_grad()
    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return 1 / self.path.moment_variance(t, self.moments)

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        variance, slope = value_and_derivative(
            lambda t: self.path.moment_variance(t, self.moments), t
        )
        return -slope / variance**2


@dataclass(frozen=True)
class NoiseVarianceWeight(Weight):
    r"""The weight :math:`\lambda(t) = v(t)`, the variance of the path's noise.

    Arguments:
        path: The path.
    """

    path: GaussianPath

    @torch.no_grad()
    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.path.rates(t).v

    @torch.no_grad()
    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.path.rates(t).d_v


@torch.enable_grad()
def value_and_derivative(f: Callable[[Tensor], Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns a function of the time and its derivative, both without gradient.

    Arguments:
        f: An elementwise function, from :math:`(*)` to :math:`(*)`.
        t: The times, with shape :math:`(*)`.

    Returns:
        :math:`f(t)` and :math:`f'(t)`, each with shape :math:`(*)`.
    """
    # Reverse mode: elementwise, it gives the same as forward mode, which costs seconds to start.
    t = t.detach().requires_grad_()
    value = f(t)
    (slope,) = torch.autograd.grad(value.sum(), t)
    return value.detach(), slope
