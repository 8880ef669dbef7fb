r"""Distributions of the training time :math:`t`, and weights :math:`\lambda(t)` of the losses.

A non-uniform :math:`p(t)` spends samples where they teach most. It also re-weights every loss:
the effective weight of an expectation over :math:`t \sim p` is :math:`p(t) \lambda(t)`. Losses
that come from an integration by parts differentiate that product, so both factors have a
derivative, see :class:`ood_osdre.objectives.TimeScoreMatching`.

The times of a batch are independent, or *stratified*: evenly spaced in probability from a random
offset (systematic sampling), in random order. Each time alone is distributed as before, so the
expectation of a loss that is a mean over samples stays the same. What a function of the time alone
adds to the noise of a batch all but vanishes. In time score matching that can be the most: its loss
has :math:`\partial_t s`, whose mean over the times cancels against the ends in expectation only.
`benchmarks/speed/gradient_snr.py` measures how much it is at the start of training.

A weight is a function of the time *only*. A weight that also looks at the sample, such as one
over the variance of the target given :math:`(x_0, x_1)`, moves the minimiser away from the time
score: the regression then averages targets with weights that depend on what is averaged over.

References:
    | Variational diffusion models (Kingma et al., 2021)
    | https://arxiv.org/abs/2107.00630
"""

__all__ = [
    "BridgeWeight",
    "Constant",
    "InverseVarianceTimes",
    "InverseVarianceWeight",
    "LogitNormalTimes",
    "NoiseVarianceWeight",
    "Times",
    "UniformTimes",
    "Weight",
]

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .gaussian import GaussianPath, Moments


class Times(abc.ABC):
    r"""Abstract distribution of times on an interval within :math:`[0, 1]`.

    Arguments:
        low: The earliest time.
        high: The latest time.
        stratified: Whether the times of a batch are spread evenly.
    """

    def __init__(self, low: float = 0.0, high: float = 1.0, *, stratified: bool = False) -> None:
        assert 0 <= low < high <= 1, f"times in [{low}, {high}], expected 0 <= low < high <= 1"
        self.low, self.high, self.stratified = low, high, stratified

    @abc.abstractmethod
    def sample(self, n: int, generator: Generator | None = None) -> Tensor:
        r"""Draws the times of a batch, on the device of `generator`.

        Arguments:
            n: The number of times.
            generator: The source of randomness; None for the global one, on the CPU.

        Returns:
            The times, with shape :math:`(n)`.
        """

    @abc.abstractmethod
    def density(self, t: Tensor) -> Tensor:
        r"""Returns :math:`p(t)` within [low, high], with the shape of `t`, :math:`(*)`."""

    @abc.abstractmethod
    def log_derivative(self, t: Tensor) -> Tensor:
        r"""Returns :math:`\frac{d}{dt} \log p(t)`, with the shape of `t`, :math:`(*)`."""

    def _uniform(self, n: int, generator: Generator | None) -> Tensor:
        r"""Returns the uniform variables that become times, with shape :math:`(n)`."""
        device = None if generator is None else generator.device
        if not self.stratified:
            return torch.rand(n, generator=generator, device=device)
        offset = torch.rand(1, generator=generator, device=device)
        # In random order, as a batch has one: its first reference images may be broadened ones.
        order = torch.randperm(n, generator=generator, device=device)
        return (offset + order / n) % 1


class UniformTimes(Times):
    r"""The uniform distribution on [low, high]."""

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:  # noqa: D102
        return self.low + (self.high - self.low) * self._uniform(n, generator)

    def density(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.full_like(t, 1 / (self.high - self.low))

    def log_derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros_like(t)


class LogitNormalTimes(Times):
    r"""The logistic function of a normal variable, truncated to [low, high].

    Its density vanishes at 0 and 1, and with it the boundary terms of time score matching on
    the whole of :math:`[0, 1]`.

    Arguments:
        mean: The mean of the logit.
        std: The standard deviation of the logit.
        low: The earliest time.
        high: The latest time.
        stratified: Whether the times of a batch are spread evenly.
    """

    def __init__(
        self,
        mean: float = -0.4,
        std: float = 1.0,
        low: float = 0.0,
        high: float = 1.0,
        *,
        stratified: bool = False,
    ) -> None:
        super().__init__(low, high, stratified=stratified)
        assert std > 0, f"std is {std}, expected more than 0"
        self.mean, self.std = mean, std
        ends = torch.tensor([low, high], dtype=torch.float64)
        cdf = torch.special.ndtr((torch.logit(ends) - mean) / std)
        self._cdf_low, self._cdf_high = cdf.tolist()

    def sample(self, n: int, generator: Generator | None = None) -> Tensor:  # noqa: D102
        u = self._cdf_low + (self._cdf_high - self._cdf_low) * self._uniform(n, generator)
        # An exact 0 would give t = 0, where the log-derivative is infinite.
        eps = torch.finfo(u.dtype).eps
        z = torch.special.ndtri(u.clamp(eps, 1 - eps))
        t = torch.sigmoid(self.mean + self.std * z)
        # Nor may it round to 0 or 1.
        return t.clamp(max(self.low, torch.finfo(t.dtype).tiny), min(self.high, 1 - eps))

    def density(self, t: Tensor) -> Tensor:  # noqa: D102
        inside = (t > 0) & (t < 1)
        t = torch.where(inside, t, 0.5)
        z = (torch.logit(t) - self.mean) / self.std
        mass = math.sqrt(2 * math.pi) * self.std * (self._cdf_high - self._cdf_low)
        return torch.where(inside, torch.exp(-(z**2) / 2) / (mass * t * (1 - t)), 0.0)

    def log_derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        z = (torch.logit(t) - self.mean) / self.std
        return (2 * t - 1 - z / self.std) / (t * (1 - t))


class InverseVarianceTimes(Times):
    r"""The density :math:`p(t) \propto 1 / V(t)` on the path's own interval.

    :math:`V(t)` is the variance of the conditional time score, see
    :meth:`ood_osdre.paths.gaussian.GaussianPath.moment_variance`. A loss with a constant weight
    then has the same effective weight as with uniform times and :math:`\lambda = 1 / V`. The
    density follows a learnable path as it changes; it is normalised and sampled through a table
    with `size` cells, which is second-order accurate in the width of a cell.

    Arguments:
        path: The path.
        moments: The second moments of both ends.
        size: The number of cells of the table.
        stratified: Whether the times of a batch are spread evenly.
    """

    def __init__(
        self,
        path: GaussianPath,
        moments: Moments,
        size: int = 2048,
        *,
        stratified: bool = False,
    ) -> None:
        super().__init__(*path.t_range, stratified=stratified)
        self.path, self.moments, self.size = path, moments, size

    @torch.no_grad()
    def sample(self, n: int, generator: Generator | None = None) -> Tensor:  # noqa: D102
        u = self._uniform(n, generator)
        cdf = self._mass(u).cumsum(dim=0)
        cdf = cdf / cdf[-1]

        cell = torch.searchsorted(cdf, u, right=True).clamp(max=self.size - 1)
        below = torch.where(cell > 0, cdf[cell - 1], 0.0)
        share = (u - below) / (cdf[cell] - below)
        return self.low + (self.high - self.low) * (cell + share) / self.size

    @torch.no_grad()
    def density(self, t: Tensor) -> Tensor:  # noqa: D102
        return 1 / self.path.moment_variance(t, self.moments) / self._mass(t).sum()

    def log_derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        variance, slope = _variance_and_slope(self.path, self.moments, t)
        return -slope / variance

    def _mass(self, like: Tensor) -> Tensor:
        width = (self.high - self.low) / self.size
        cells = torch.arange(self.size, dtype=like.dtype, device=like.device)
        middle = self.low + width * (cells + 0.5)
        return width / self.path.moment_variance(middle, self.moments)


class Weight(abc.ABC):
    r"""Abstract non-negative weight. No gradient flows into the parameters of a path."""

    @abc.abstractmethod
    def value(self, t: Tensor) -> Tensor:
        r"""Returns :math:`\lambda(t)`, with the shape of `t`, :math:`(*)`."""

    def derivative(self, t: Tensor) -> Tensor:
        r"""Returns :math:`\lambda'(t)`, by default through autograd, with shape :math:`(*)`."""
        return _value_and_slope(self.value, t)[1]


@dataclass(frozen=True)
class Constant(Weight):
    r"""The constant weight :math:`\lambda(t) = c`, with :math:`c` the `scale`."""

    scale: float = 1.0

    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.full_like(t, self.scale)

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros_like(t)


class BridgeWeight(Weight):
    r"""The weight :math:`\lambda(t) = t (1 - t)`, which vanishes at both ends."""

    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return t * (1 - t)

    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return 1 - 2 * t


@dataclass(frozen=True)
class InverseVarianceWeight(Weight):
    r"""The weight :math:`\lambda(t) = 1 / V(t)`, which brings conditional losses to order one.

    On a learnable path :math:`\lambda'(t)` grows like a negative power of :math:`t` at 0. Time
    score matching, which needs it, is then unbiased but may have infinite variance; use another
    weight with it.

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
        variance, slope = _variance_and_slope(self.path, self.moments, t)
        return -slope / variance**2


@dataclass(frozen=True)
class NoiseVarianceWeight(Weight):
    r"""The weight :math:`\lambda(t) = v(t)`, the variance of the path's noise."""

    path: GaussianPath

    @torch.no_grad()
    def value(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.path.rates(t).v

    @torch.no_grad()
    def derivative(self, t: Tensor) -> Tensor:  # noqa: D102
        return self.path.rates(t).d_v


def _variance_and_slope(path: GaussianPath, moments: Moments, t: Tensor) -> tuple[Tensor, Tensor]:
    return _value_and_slope(lambda t: path.moment_variance(t, moments), t)


@torch.enable_grad()
def _value_and_slope(f: Callable[[Tensor], Tensor], t: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns an elementwise function of the time and its derivative, without gradient."""
    # Reverse mode: elementwise, it gives the same as forward mode, which costs seconds to start.
    t = t.detach().requires_grad_()
    value = f(t)
    (slope,) = torch.autograd.grad(value.sum(), t)
    return value.detach(), slope
