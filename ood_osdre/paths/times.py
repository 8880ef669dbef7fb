r"""Distributions of the training time :math:`t`.

A non-uniform :math:`p(t)` spends samples where they teach most. It also re-weights every loss:
the effective weight of an expectation over :math:`t \sim p` is :math:`p(t) \lambda(t)`. Losses
that come from an integration by parts differentiate that product, which is why a distribution
also knows its log-derivative, see :class:`ood_osdre.objectives.TimeScoreMatching`.

The times of a batch are independent, or *stratified*: evenly spaced in probability from a random
offset (systematic sampling), in random order. Each time alone is distributed as before, so no loss
that is a mean over samples has another expectation; what a function of the time alone adds to the
noise of a batch, all but vanishes. In time score matching that can be the most: its loss has
:math:`\partial_t s`, whose mean over the times cancels against the ends in expectation only. How
much it is at the start of training, on synthetic images, measures `benchmarks/gradient_snr.py`.

References:
    | Variational diffusion models (Kingma et al., 2021)
    | https://arxiv.org/abs/2107.00630
"""

__all__ = ["InverseVarianceTimes", "LogitNormalTimes", "Times", "UniformTimes"]

import abc
import math

import torch
from torch import Generator, Tensor

from .gaussian import GaussianPath, Moments
from .weights import value_and_derivative


class Times(abc.ABC):
    r"""Abstract distribution of times on an interval within :math:`[0, 1]`.

    Arguments:
        low: The earliest time.
        high: The latest time.
        stratified: Whether the times of a batch are spread evenly.
    """

    def __init__(self, low: float = 0.0, high: float = 1.0, *, stratified: bool = False) -> None:
        if not 0 <= low < high <= 1:
            raise ValueError(f"Times should have 0 <= low < high <= 1, got {low} and {high}.")
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
        r"""Returns what becomes times: uniform variables, with shape :math:`(n)`."""
        device = None if generator is None else generator.device
        if not self.stratified:
            return torch.rand(n, generator=generator, device=device)
        offset = torch.rand(1, generator=generator, device=device)
        # In random order, as a batch has one: its first reference images may be broadened ones.
        order = torch.randperm(n, generator=generator, device=device)
        return (offset + order / n) % 1

    def __repr__(self) -> str:
        stratified = ", stratified=True" if self.stratified else ""
        return f"{type(self).__name__}(low={self.low}, high={self.high}{stratified})"


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

        if std <= 0:
            raise ValueError(f"'std' should be positive, got {std}.")
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

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(mean={self.mean}, std={self.std}, ", 1)


class InverseVarianceTimes(Times):
    r"""The density :math:`p(t) \propto 1 / V(t)` on the path's own interval.

    :math:`V(t)` is the variance of the conditional time score (see
    :meth:`ood_osdre.paths.gaussian.GaussianPath.moment_variance`), so that a loss with a constant weight
    has the same effective weight as with uniform times and :math:`\lambda = 1 / V`. The density
    follows a learnable path as it changes; it is normalised and sampled through a table with
    `size` cells, which is second-order accurate in the width of a cell.

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
        variance, slope = value_and_derivative(
            lambda t: self.path.moment_variance(t, self.moments), t
        )
        return -slope / variance

    def _mass(self, like: Tensor) -> Tensor:
        width = (self.high - self.low) / self.size
        cells = torch.arange(self.size, dtype=like.dtype, device=like.device)
        middle = self.low + width * (cells + 0.5)
        return width / self.path.moment_variance(middle, self.moments)
