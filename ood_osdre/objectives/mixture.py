r"""Score matching along mixtures of the two ends, which needs no points between them."""

__all__ = ["MixtureScoreMatching"]

from collections.abc import Mapping

import torch
from torch import Tensor

from ..networks import Coefficients
from ..paths import GaussianPath
from .base import Draw, Ratio
from .endpoint import EndTerm
from .marginal import time_score_loss
from .times import Times, UniformTimes
from .weights import BridgeWeight, Weight


class MixtureScoreMatching(EndTerm):
    r"""Time score matching on the path :math:`p_t = (1 - t) \, p_0 + t \, p_1`.

    Blends of two images are images of neither kind; a draw of this mixture is a reference point
    or an ID point. Its time score,

    .. math:: \partial_t \log p_t = \frac{r - 1}{1 - t + t r} \, ,

    integrates to the same :math:`\log r`, though it is another function of the time than that of a
    Gaussian path. The loss is that of :class:`ood_osdre.objectives.TimeScoreMatching`, which asks
    only for draws of :math:`p_t`; the choice between the ends is averaged over instead of drawn,
    :math:`\mathbb{E}_{p_t}[f] = (1 - t) \, \mathbb{E}_{p_0}[f] + t \, \mathbb{E}_{p_1}[f]`. So no
    forward pass is needed beyond the end-point loss's own.

    Where the ends hardly overlap the score of ID points is close to :math:`1 / t`, that of
    reference points to :math:`-1 / (1 - t)`: steep functions that a few wide atoms do not follow.
    The default weight :math:`t (1 - t)` takes the ends out.

    Arguments:
        path: The path, whose dequantised ends are used; None only for clean ends.
        weight: The weight :math:`\lambda`.
        times: The distribution of the draws' times; by default uniform on :math:`[0, 1]`.
        clean: Whether to use the clean ends in place of the dequantised ones.
    """

    def __init__(
        self,
        path: GaussianPath | None = None,
        weight: Weight | None = None,
        times: Times | None = None,
        clean: bool = False,
    ) -> None:
        # No spread: it would tie the ends to the draw's time, which is the mixture's here.
        super().__init__(path, clean)
        self.weight = BridgeWeight() if weight is None else weight
        self.times = UniformTimes() if times is None else times

    def loss(self, ratio: Ratio, draw: Draw, at: Mapping[str, Coefficients]) -> Tensor:  # noqa: D102
        h_0, h_1 = (at[name].total for name in self.names)
        t = draw.t

        def mixed(bound: float) -> Tensor:
            time = torch.full_like(t, bound)
            return (1 - bound) * ratio.score(h_0, time) + bound * ratio.score(h_1, time)

        low, high = mixed(self.times.low), mixed(self.times.high)
        # The boundary terms stand in both, with shares that sum to one.
        from_0, from_1 = (
            time_score_loss(
                self.weight,
                self.times,
                t,
                s=ratio.score(h, t),
                derivative=ratio.score_derivative(h, t),
                s_low=low,
                s_high=high,
            )
            for h in (h_0, h_1)
        )
        return (1 - t) * from_0 + t * from_1
