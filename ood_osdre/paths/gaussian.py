r"""Gaussian paths between the reference and the data, and their conditional time scores.

Every path here is Gaussian given a pair of independent end points :math:`(x_0, x_1)`,

.. math:: p_t(x \mid x_0, x_1) = \mathcal{N}(\mu_t, v_t I), \qquad
    \mu_t = \alpha_t x_0 + \beta_t x_1, \qquad x_t = \mu_t + \sqrt{v_t} z \, ,

with a schedule :math:`(\alpha_t, \beta_t)` (see :mod:`ood_osdre.paths.schedules`) and a noise model
:math:`v_t` (see :mod:`ood_osdre.paths.noises`). Time runs from the reference :math:`p_0` to the data
:math:`p_1`; the integral of the marginal time score :math:`\partial_t \log p_t(x)` over
:math:`[0, 1]` is a log-ratio in nats, larger where :math:`x` is more like the data.

**Which ratio.** Every noise model has a floor: :math:`v_0 = v_1 = \epsilon > 0`. It keeps the
scores finite on the closed interval, and it means that a path does not join :math:`p_0` to
:math:`p_1` but their *dequantised* versions. Losses on a path learn the ratio

.. math:: \log \frac{(p_1 * \mathcal{N}(0, \epsilon I))(x)}{(p_0 * \mathcal{N}(0, \epsilon I))(x)}

and :meth:`GaussianPath.start` and :meth:`GaussianPath.end` draw from these two. The floor is
never learnt, for it defines what is learnt.

**The conditional time score** in :math:`d` dimensions, with :math:`z` the noise of :math:`x_t`,

.. math:: T = \partial_t \log p_t(x_t \mid x_0, x_1) = \sum_{i=1}^d \left[
    \frac{\dot v}{2 v} (z_i^2 - 1) + \frac{\dot\mu_i z_i}{\sqrt{v}} \right] ,

has mean zero and variance :math:`\frac{d}{2} (\dot v / v)^2 + \| \dot\mu \|^2 / v` given the end
points. Its mean given :math:`x_t` is the marginal time score, which is what regressing it learns.

**Learnable paths** minimise :meth:`GaussianPath.moment_variance`, in closed form. They never
receive a gradient through :math:`x_t` or its score: a path that could would lower a regression
loss by making the target easier, whatever that does to the ratio. Their parameters take no
weight decay, as zero means nothing to them.
"""

__all__ = ["GaussianPath", "Moments", "Rates"]

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .noises import NoiseModel
from .schedules import Schedule, ScheduleRates


class Rates(NamedTuple):
    r"""Path coefficients and their time derivatives, each with shape :math:`(*)`."""

    alpha: Tensor
    beta: Tensor
    v: Tensor
    d_alpha: Tensor
    d_beta: Tensor
    d_v: Tensor


class Moments(NamedTuple):
    r"""What the variance of a path needs to know of two data sets.

    Attributes:
        dim: The dimension :math:`d` of a point.
        square_0: :math:`\mathbb{E} \| x_0 \|^2`.
        cross: :math:`\langle \mathbb{E} x_0, \mathbb{E} x_1 \rangle`, which is
            :math:`\mathbb{E} \langle x_0, x_1 \rangle` for independent end points.
        square_1: :math:`\mathbb{E} \| x_1 \|^2`.
    """

    dim: int
    square_0: float
    cross: float
    square_1: float

    @classmethod
    def of(cls, x_0: Tensor | Iterable[Tensor], x_1: Tensor | Iterable[Tensor]) -> "Moments":
        r"""Returns the moments of two samples, accumulated in double precision.

        Arguments:
            x_0: Reference points, with shape :math:`(N, *)`, or pieces of them.
            x_1: Data points, with shape :math:`(M, *)`, or pieces of them.
        """
        (square_0, mean_0), (square_1, mean_1) = map(_first_two, (x_0, x_1))
        shapes = tuple(mean_0.shape), tuple(mean_1.shape)
        assert mean_0.shape == mean_1.shape, f"points of different shapes, {shapes}"
        cross = float(mean_0.flatten() @ mean_1.flatten())
        return cls(mean_0.numel(), square_0, cross, square_1)


def _first_two(x: Tensor | Iterable[Tensor]) -> tuple[float, Tensor]:
    r"""Returns the mean squared norm of points and their mean, with shape :math:`(*)`."""
    norms, total = [], torch.zeros(())
    for piece in [x] if isinstance(x, Tensor) else x:
        flat = piece.flatten(1)
        norms.append(torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64))
        own = flat.sum(dim=0, dtype=torch.float64).view(piece.shape[1:])
        total = own + total.to(flat.device)
    count = sum(map(len, norms))
    assert count > 0, "moments of no points"
    return float(torch.cat(norms).square().mean()), total / count


class GaussianPath(nn.Module):
    r"""A schedule and a noise model, joined into a Gaussian path.

    Arguments:
        schedule: The schedule :math:`(\alpha, \beta)`.
        noise: The noise model :math:`v`.
        t_min: How far from 0 and 1 the times stay. If None, 0 for a closed schedule and
            :math:`10^{-3}` for the others, where it must be positive.

    Example:
        >>> from ood_osdre.paths.noises import DDBINoise
        >>> from ood_osdre.paths.schedules import TrigonometricSchedule
        >>> path = GaussianPath(TrigonometricSchedule(), DDBINoise(gamma2=0.01, eps=0.005))
        >>> x_0, x_1, z = torch.randn(3, 8, 2)
        >>> path.time_score(x_0, x_1, torch.rand(8), z).shape
        torch.Size([8])
    """

    def __init__(self, schedule: Schedule, noise: NoiseModel, t_min: float | None = None) -> None:
        super().__init__()
        if t_min is None:
            t_min = 0.0 if schedule.closed else 1e-3
        assert 0 <= t_min < 0.5, f"t_min is {t_min}, expected in [0, 0.5)"
        assert t_min or schedule.closed, f"t_min is 0, but {type(schedule).__name__} is not closed"
        self.schedule, self.noise = schedule, noise
        self.t_min = float(t_min)

    @property
    def t_range(self) -> tuple[float, float]:
        r"""The times at which the path may be used."""
        return self.t_min, 1 - self.t_min

    def numbers(self) -> dict[str, Any]:
        r"""Returns the numbers of noise and schedule that define the path, by name, for records."""
        return {**self.noise.numbers(), **self.schedule.numbers()}

    def rates(self, t: Tensor) -> Rates:
        r"""Returns the coefficients of the path, differentiable in `t` and in its parameters.

        Arguments:
            t: The time :math:`t`, with shape :math:`(*)`.
        """
        s: ScheduleRates = self.schedule(t)
        v, d_v = self.noise(t, s)
        return Rates(s.alpha, s.beta, v, s.d_alpha, s.d_beta, d_v)

    def sample(self, x_0: Tensor, x_1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        r"""Draws :math:`x_t = \alpha_t x_0 + \beta_t x_1 + \sqrt{v_t} z`.

        No gradient reaches the path's parameters or `t`.

        Arguments:
            x_0: Reference points, with shape :math:`(B, *)`.
            x_1: Data points, with shape :math:`(B, *)`.
            t: The time :math:`t`, with shape :math:`(B)`.
            noise: Standard normal noise :math:`z`, with shape :math:`(B, *)`.

        Returns:
            The points :math:`x_t`, with shape :math:`(B, *)`.
        """
        r = self._fixed_rates(x_0, x_1, t, noise)
        return r.alpha * x_0 + r.beta * x_1 + torch.sqrt(r.v) * noise

    def start(self, x_0: Tensor, noise: Tensor) -> Tensor:
        r"""Draws the path's start from the dequantised reference, :math:`x_0 + \sqrt{\epsilon} z`.

        Arguments and the result have shape :math:`(B, *)`.
        """
        return x_0 + math.sqrt(self.noise.eps) * noise

    def end(self, x_1: Tensor, noise: Tensor) -> Tensor:
        r"""Draws the path's end from the dequantised data, :math:`x_1 + \sqrt{\epsilon} z`.

        Arguments and the result have shape :math:`(B, *)`. This is the end for every schedule with
        :math:`\alpha_1 = 0`; the variance-preserving one keeps 0.0066 of :math:`x_0` there, which
        is left out.
        """
        return x_1 + math.sqrt(self.noise.eps) * noise

    def time_score_per_dimension(
        self, x_0: Tensor, x_1: Tensor, t: Tensor, noise: Tensor
    ) -> Tensor:
        r"""Returns each coordinate's share of the conditional time score at :math:`x_t`.

        .. math:: T_i = \frac{\dot v}{2 v} (z_i^2 - 1) +
            \frac{(\dot\alpha x_0 + \dot\beta x_1)_i z_i}{\sqrt{v}}

        Arguments are those that :meth:`sample` drew :math:`x_t` with. No gradient reaches the
        path's parameters or `t`.

        Returns:
            The shares :math:`T_i`, in nats a unit of time, with shape :math:`(B, *)`.
        """
        r = self._fixed_rates(x_0, x_1, t, noise)
        drift = r.d_alpha * x_0 + r.d_beta * x_1
        return r.d_v / (2 * r.v) * (noise**2 - 1) + drift * noise / torch.sqrt(r.v)

    def time_score(self, x_0: Tensor, x_1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        r"""Returns the conditional time score :math:`\partial_t \log p_t(x_t \mid x_0, x_1)`.

        Arguments are those of :meth:`sample`.

        Returns:
            The scores :math:`T`, in nats a unit of time, with shape :math:`(B)`.
        """
        return self.time_score_per_dimension(x_0, x_1, t, noise).flatten(1).sum(dim=1)

    def time_score_per_block(
        self,
        x_0: Tensor,
        x_1: Tensor,
        t: Tensor,
        noise: Tensor,
        grid: tuple[int, int] = (4, 4),
    ) -> Tensor:
        r"""Returns each image block's share of the conditional time score at :math:`x_t`.

        Arguments are those of :meth:`sample`, for images with shape :math:`(B, C, H, W)`. A block is
        a rectangle of pixels, all channels of it.

        Arguments:
            grid: The numbers of blocks along :math:`H` and :math:`W`, which they divide: those of
                the feature map whose cells learn the shares.

        Returns:
            The shares, with shape :math:`(B, S)`, in the row-major order of a flattened feature
            map.
        """
        shares = self.time_score_per_dimension(x_0, x_1, t, noise)
        rows, columns = grid
        blocks = shares.sum(dim=1).unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
        return blocks.sum(dim=(2, 4)).flatten(1)

    def moment_variance(self, t: Tensor, moments: Moments) -> Tensor:
        r"""Returns the conditional variance, averaged over independent end points.

        .. math:: V(t) = \frac{d}{2} \left( \frac{\dot v}{v} \right)^2 + \frac{1}{v} \left(
            \dot\alpha^2 \, \mathbb{E} \| x_0 \|^2 +
            2 \dot\alpha \dot\beta \, \langle \mathbb{E} x_0, \mathbb{E} x_1 \rangle +
            \dot\beta^2 \, \mathbb{E} \| x_1 \|^2 \right)

        That of a single pair is its variance given the end points. The cross term keeps its sign,
        and :math:`\dot\alpha \dot\beta \leq 0`: ends with a common mean make an easier path.
        Differentiable in the path's parameters.

        Arguments:
            t: The time :math:`t`, with shape :math:`(*)`.
            moments: The moments of the two data sets.

        Returns:
            The variances :math:`V(t)`, with shape :math:`(*)`.
        """
        r = self.rates(t)
        drift = (
            r.d_alpha**2 * moments.square_0
            + 2 * r.d_alpha * r.d_beta * moments.cross
            + r.d_beta**2 * moments.square_1
        )
        return moments.dim / 2 * (r.d_v / r.v) ** 2 + drift / r.v

    def _fixed_rates(self, x_0: Tensor, x_1: Tensor, t: Tensor, noise: Tensor) -> Rates:
        r"""Returns the rates at `t`, detached and shaped to broadcast with `x_0`."""
        # What does not fit may broadcast.
        shapes = [tuple(x.shape) for x in (x_0, x_1, noise, t)]
        assert x_0.shape == x_1.shape == noise.shape, f"x_0, x_1, noise, t have shapes {shapes}"
        assert t.shape == x_0.shape[:1], f"x_0, x_1, noise, t have shapes {shapes}"
        event = (1,) * (x_0.ndim - 1)
        return Rates(*(c.detach().reshape(-1, *event) for c in self.rates(t)))
