r"""Losses of divergences: two variational bounds, and a likelihood whose reference is known.

**The bounds** of Donsker and Varadhan, and of Nguyen, Wainwright and Jordan (NWJ), lie below the
divergence :math:`\mathrm{KL}(p_1 \| p_0)` whatever the log-ratio :math:`f`, and touch it at the
true one.

**The likelihood.** With a known reference :math:`p_0 = \mathcal{N}(0, I)`, a ratio is a density,
:math:`\log \hat p = f + \log p_0`, and a log-ratio in closed form can be trained on the divergence
itself. The KLIEP loss :math:`\mathbb{E}_{p_0}[e^f] - \mathbb{E}_{p_1}[f]` is, up to a constant,
:math:`\mathrm{KL}(p_1 \| \hat p) + \hat Z - 1` with :math:`\hat Z = \int \hat p`: it is least
where :math:`\hat p = p_1`, which has :math:`\hat Z = 1`. What stands in its way is that a batch of
:math:`p_0` hardly ever visits the places where the ratio is large, so the first term is drawn from
a wider proposal of known density instead and weighted. A solver-based model would have to
differentiate through its solver to be trained like this.
"""

__all__ = ["DonskerVaradhan", "NormalisedLikelihood", "Proposal", "VariationalBound", "log_normal"]

import math
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from .base import Batch, Ratio, Term
from .endpoint import EndTerm, capped_exp


class DonskerVaradhan(EndTerm):
    r"""The loss of MINE, :math:`\log \mathbb{E}_{p_0}[e^f] - \mathbb{E}_{p_1}[f]`, over a batch.

    Its minimiser is the log-ratio up to a constant.

    References:
        | Mutual Information Neural Estimation (Belghazi et al., 2018)
        | https://arxiv.org/abs/1801.04062
    """

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f_0, f_1 = (ratio.log_ratio_at(at[name]) for name in self.names)
        return f_0.logsumexp(dim=0) - math.log(len(f_0)) - f_1


class VariationalBound(EndTerm):
    r"""The loss of NWJ, :math:`\mathbb{E}_{p_0}[e^f] - \mathbb{E}_{p_1}[f]`, its gain without end.

    With :math:`f` the log-ratio, the bound's critic is :math:`f + 1`. Where :func:`capped_exp` has
    its cap beyond the log-ratio, the minimiser is the log-ratio.

    Arguments:
        cap: The exponent from which the exponential goes on as its tangent.

    References:
        | Estimating divergence functionals and the likelihood ratio by convex risk minimization
        | (Nguyen et al., 2010) https://arxiv.org/abs/0809.0853
    """

    def __init__(self, cap: float) -> None:
        super().__init__(clean=True)
        self.cap = cap

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f_0, f_1 = (ratio.log_ratio_at(at[name]) for name in self.names)
        return capped_exp(f_0, self.cap) - f_1


class Proposal(Protocol):
    r"""A distribution of known density that random numbers are mapped to."""

    def place(self, u: Tensor, z: Tensor, /) -> Tensor:
        r"""Maps uniform numbers, :math:`(B)`, and normal ones, :math:`(B, d)`, to points."""

    def log_density(self, x: Tensor, /) -> Tensor:
        r"""Returns the log-density of points, in nats, with shape :math:`(B)`."""


class NormalisedLikelihood(Term):
    r"""The KLIEP loss against :math:`\mathcal{N}(0, I)`, its mass by importance sampling.

    .. math:: e^{f(y)} \, \frac{p_0(y)}{q(y)} - f(x_1) \, , \qquad y \sim q

    Its mean is that of the KLIEP loss, whatever the proposal :math:`q`, as long as it covers
    :math:`\hat p` and no weighted ratio is beyond the cap; its variance is small if :math:`q` is
    close to it. The batch's probe and time are what :math:`y` is made of; its reference points are
    not looked at, as the density of :math:`p_0` is known.

    Arguments:
        proposal: The proposal :math:`q`.
        t_range: The interval that the batch's times are uniform on; they choose the component.
        cap: The weighted log-ratio beyond which the exponential goes on linearly; at most 30.

    References:
        | Direct importance estimation with model selection (Sugiyama et al., 2008), KLIEP
        | https://papers.nips.cc/paper/3248
    """

    needs_probe = True

    def __init__(
        self,
        proposal: Proposal,
        t_range: tuple[float, float] = (0.0, 1.0),
        cap: float = 30.0,
    ) -> None:
        super().__init__()
        self.proposal, self.t_range, self.cap = proposal, t_range, cap

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        assert batch.probe is not None, "the likelihood needs the batch's probe"
        low, high = self.t_range
        y = self.proposal.place((batch.t - low) / (high - low), batch.probe)
        return {"proposal": y, "x_1": batch.x_1}

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        f, f_1 = (ratio.log_ratio_at(at[name]) for name in ("proposal", "x_1"))
        y = self.points(batch)["proposal"]
        log_weight = log_normal(y) - self.proposal.log_density(y)
        return capped_exp(f + log_weight.to(f), self.cap) - f_1


def log_normal(x: Tensor) -> Tensor:
    r"""Returns the log-density of :math:`\mathcal{N}(0, I)` in double precision.

    Arguments:
        x: The points, with shape :math:`(N, d)`.

    Returns:
        The log-densities, in nats, with shape :math:`(N)`.
    """
    x = x.double()
    return -x.square().sum(dim=1) / 2 - x.shape[1] / 2 * math.log(2 * math.pi)
