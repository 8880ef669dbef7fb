r"""Noise models: the variance of a Gaussian path between its ends.

A noise model gives the variance :math:`v_t` that a path (:mod:`ood_osdre.paths.gaussian`) adds to
the mixture of its end points, with its time derivative. All of them have a floor,
:math:`v_0 = v_1 = \epsilon > 0`: the ends of the path are the two distributions *dequantised*,
convolved with :math:`\mathcal{N}(0, \epsilon I)`, and the time score is finite at both. Without
a floor, a bridge's :math:`v \sim \gamma^2 t` gives a score of variance :math:`d / 2 t^2`, which
is not even integrable.

Parameters named `gamma2` and `eps` are variances, not standard deviations.
"""

__all__ = ["BridgeNoise", "DDBINoise", "DequantisationNoise", "NoiseModel"]

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from .schedules import ScheduleRates


class NoiseModel(nn.Module, abc.ABC):
    r"""Abstract noise model, with :math:`v_0 = v_1 = \epsilon`.

    Arguments:
        eps: The dequantisation floor :math:`\epsilon > 0`, a variance. It is never learnt: it
            defines the dequantised ends, hence the ratio.
    """

    def __init__(self, eps: float) -> None:
        super().__init__()
        assert 0 < eps < math.inf, f"eps is {eps}, expected a positive number"
        self.eps = float(eps)

    @abc.abstractmethod
    def forward(self, t: Tensor, schedule: ScheduleRates) -> tuple[Tensor, Tensor]:
        r"""Returns the variance :math:`v_t` and its derivative, each with shape :math:`(*)`.

        Arguments:
            t: The time :math:`t`, with shape :math:`(*)`.
            schedule: The schedule's rates at :math:`t`.
        """

    def numbers(self) -> dict[str, Any]:
        r"""Returns the variances of the model by name, learnt or not, for records."""
        return {"eps": self.eps}


class DequantisationNoise(NoiseModel):
    r"""Both ends dequantised, nothing added: :math:`v = (\alpha^2 + \beta^2) \epsilon`.

    :math:`x_t` mixes :math:`x_0 + \sqrt{\epsilon} z_0` and :math:`x_1 + \sqrt{\epsilon} z_1`. On
    a spherical schedule the variance is constant.
    """

    def forward(self, t: Tensor, schedule: ScheduleRates) -> tuple[Tensor, Tensor]:  # noqa: D102
        return _dequantisation(self.eps, schedule)


class BridgeNoise(NoiseModel):
    r"""A diffusion bridge on a constant floor: :math:`v = \gamma^2 t (1 - t) + \epsilon`.

    Arguments:
        gamma2: The bridge's variance rate :math:`\gamma^2 \geq 0`; positive if it is learnt.
        eps: The dequantisation floor :math:`\epsilon > 0`, a variance; never learnt.
        learnable: Whether :math:`\gamma^2` is learnt, through its logarithm.
    """

    def __init__(self, gamma2: float, eps: float, learnable: bool = False) -> None:
        super().__init__(eps)
        assert 0 <= gamma2 < math.inf, f"gamma2 is {gamma2}, expected a number from 0"
        assert gamma2 or not learnable, "gamma2 is 0, expected more if it is learnt"
        self.learnable = learnable
        self._gamma2 = float(gamma2)
        if learnable:
            self.log_gamma2 = nn.Parameter(torch.tensor(math.log(gamma2)))

    @property
    def gamma2(self) -> Tensor | float:
        r"""The bridge's variance rate :math:`\gamma^2`."""
        return torch.exp(self.log_gamma2) if self.learnable else self._gamma2

    def forward(self, t: Tensor, schedule: ScheduleRates) -> tuple[Tensor, Tensor]:  # noqa: D102
        gamma2 = self.gamma2
        return gamma2 * t * (1 - t) + self.eps, gamma2 * (1 - 2 * t)

    def numbers(self) -> dict[str, Any]:  # noqa: D102
        return {"gamma2": float(torch.as_tensor(self.gamma2).detach()), **super().numbers()}


class DDBINoise(BridgeNoise):
    r"""The dequantised diffusion bridge interpolant, both ends dequantised and a bridge between.

    .. math:: v = \gamma^2 t (1 - t) + (\alpha^2 + \beta^2) \epsilon

    Arguments are those of :class:`BridgeNoise`.

    References:
        | Dequantified Diffusion-Schrödinger Bridge for Density Ratio Estimation
        | (Chen et al., 2025)
        | https://arxiv.org/abs/2505.05034
    """

    def forward(self, t: Tensor, schedule: ScheduleRates) -> tuple[Tensor, Tensor]:  # noqa: D102
        gamma2 = self.gamma2
        floor, d_floor = _dequantisation(self.eps, schedule)
        return gamma2 * t * (1 - t) + floor, gamma2 * (1 - 2 * t) + d_floor


def _dequantisation(eps: float, s: ScheduleRates) -> tuple[Tensor, Tensor]:
    floor = (s.alpha**2 + s.beta**2) * eps
    return floor, 2 * (s.alpha * s.d_alpha + s.beta * s.d_beta) * eps
