r"""Conditional score matching: regressions of the time score given the ends of a path.

Given its ends, the path is Gaussian and its time score
:math:`T = \partial_t \log p_t(x_t \mid x_0, x_1)` is known. Differentiating
:math:`p_t(x) = \mathbb{E}[p_t(x \mid x_0, x_1)]` in time and dividing by :math:`p_t(x)` shows that
:math:`\mathbb{E}[T \mid x_t = x] = \partial_t \log p_t(x)`. The regression

.. math:: \min_s \, \mathbb{E} \, \lambda(t) \, (s(x_t, t) - T)^2

therefore has the marginal time score as its minimiser. Its integral over time is the log-ratio
of the path's own, *dequantised*, ends. The trouble is noise: in :math:`d` dimensions :math:`T` has
a standard deviation of :math:`\sqrt{V} \propto \sqrt{d}` or more, almost all of which is noise
that no function of :math:`x_t` explains. The forms of the regression differ in how much of that
noise enters their gradients.
"""

__all__ = [
    "FORMS",
    "ConditionalJointScoreMatching",
    "ConditionalScoreMatching",
    "TimeConditionedConditionalMatching",
]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..models import Coefficients
from ..paths import GaussianPath, Weight
from .base import Batch, DataScore, PathTerm, Ratio

#: The forms of conditional score matching.
FORMS = ("scalar", "antithetic", "per_dimension", "per_block", "antithetic_per_block")


class ConditionalScoreMatching(PathTerm):
    r"""Regresses the conditional time score.

    All forms have the same minimiser :math:`\sum_b s_b = \partial_t \log p_t`.

    - `"scalar"`: :math:`\lambda (s - T)^2`.
    - `"antithetic"`: the mean of the scalar loss at :math:`z` and at :math:`-z`, with the same
      ends and time. The target is a part that changes sign with :math:`z` and a part that does
      not (zero where :math:`\dot{v} = 0`), and the noise of the odd part now multiplies the
      *difference* of two gradients at nearby points.
    - `"per_dimension"`, for vectors, and `"per_block"`, for images: the target is a sum over
      dimensions, :math:`T = \sum_b T_b`, and each of the network's :math:`S` cells regresses its
      own part, :math:`\lambda \sum_b (s_b - T_b)^2`. As every cell may look at all of
      :math:`x_t`, :math:`s_b \to \mathbb{E}[T_b \mid x_t]` and the sum is the time score; but the
      noise of one part no longer enters the gradients of the others.
    - `"antithetic_per_block"`: both.

    For :math:`\lambda = 1 / V(t)` every form is of order one at :math:`s = 0`. Residuals are
    multiplied by :math:`\sqrt{\lambda}` before they are squared.

    Arguments:
        path: The path.
        weight: The weight :math:`\lambda`.
        form: One of :data:`FORMS`. The last three need a network that returns cells: one for each
            dimension of :math:`x` in row-major order, or one for each patch of the image.

    References:
        | Density Ratio Estimation with Conditional Probability Paths (Yu et al., 2025)
        | https://arxiv.org/abs/2502.02300
    """

    def __init__(
        self, path: GaussianPath, weight: Weight | None = None, form: str = "scalar"
    ) -> None:
        super().__init__(path, weight)
        assert form in FORMS, f"form is {form!r}, expected one of {FORMS}"
        self.form = form
        self.signs = {"path": 1.0}
        if form.startswith("antithetic"):
            self.signs["path-"] = -1.0

    def points(self, batch: Batch) -> dict[str, Tensor]:  # noqa: D102
        return {name: self.at_time(batch, batch.t, sign) for name, sign in self.signs.items()}

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        scale = self.weight.value(batch.t).sqrt()
        losses = []
        for name, sign in self.signs.items():
            h, target = self._regression(batch, sign, at[name])
            residual = scale[:, None] * (ratio.score(h, batch.t) - target)
            losses.append(residual.square().sum(dim=1))
        return torch.stack(losses).mean(dim=0)

    def _regression(self, batch: Batch, sign: float, at: Coefficients) -> tuple[Tensor, Tensor]:
        r"""Returns coefficients, with shape (B, S, K), and the targets of their scores, (B, S)."""
        given = batch.x_0, batch.x_1, batch.t, sign * batch.noise
        if self.form in ("scalar", "antithetic"):
            return at.total[:, None], self.path.time_score(*given)[:, None]
        if at.cells is None:
            raise UserError(
                f"objective.conditional_form: {self.form} needs a backbone with a feature map, "
                "expected scalar or antithetic with this one."
            )
        cells = at.cells.shape[1]
        if self.form == "per_dimension":
            target = self.path.time_score_per_dimension(*given).flatten(1)
            # One cell would broadcast.
            assert target.shape[1] == cells, f"{cells} cells for {target.shape[1]} dimensions"
        else:
            grid = block_grid(cells, tuple(batch.x_0.shape))
            target = self.path.time_score_per_block(*given, grid=grid)
        return at.cells, target


class ConditionalJointScoreMatching(ConditionalScoreMatching):
    r"""Conditional score matching plus denoising score matching.

    Adds to :class:`ConditionalScoreMatching` the mean over dimensions of
    :math:`(\sqrt{v} \, s^x + z)^2`, whose minimiser is the data score of the path,
    :math:`\nabla_x \log p_t`. It helps the time score only as far as the two networks share
    weights; the ratio never uses it.

    Takes the arguments of :class:`ConditionalScoreMatching`, for the time part, and:

    Arguments:
        data_score: The network :math:`s^x(x, t)`.
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
        self.data_score, self.balance = data_score, balance

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        x_t = self.at_time(batch, batch.t)
        sigma = self.path.rates(batch.t).v.detach().sqrt()
        score = self.data_score(x_t, batch.t).flatten(1)
        data = (sigma[:, None] * score + batch.noise.flatten(1)).square().mean(dim=1)
        return super().loss(ratio, batch, at) + self.balance * data


class TimeConditionedConditionalMatching(PathTerm):
    r"""Conditional score matching of a network :math:`s(x, t)` that takes the time.

    .. math:: \lambda \, (s(x_t, t) - \partial_t \log p_t(x_t \mid x_0, x_1))^2

    On the dequantised diffusion bridge this is the baseline D³RE.

    References:
        | Dequantified Diffusion-Schrödinger Bridge for Density Ratio Estimation
        | (Chen et al., 2025)
        | https://arxiv.org/abs/2505.05034
    """

    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:  # noqa: D102
        t = batch.t
        target = self.path.time_score(batch.x_0, batch.x_1, t, batch.noise)
        s = ratio.time_score(self.at_time(batch, t), t)
        # The target's deviation is about a thousand on images: weighted before it is squared.
        return (self.weight.value(t).sqrt() * (s - target)).square()


def block_grid(cells: int, shape: tuple[int, ...]) -> tuple[int, int]:
    r"""Returns the numbers of rows and columns of the patches under the cells of a feature map.

    Arguments:
        cells: The number of cells, laid out in the aspect ratio of the images.
        shape: The shape of the images, :math:`(B, C, H, W)`.

    Raises:
        UserError: If the cells do not tile the images.
    """
    if len(shape) == 4:
        height, width = shape[2:]
        rows = max(round((cells * height / width) ** 0.5), 1)
        columns = cells // rows
        if rows * columns == cells and height % rows == 0 and width % columns == 0:
            return rows, columns
    raise UserError(
        f"objective.conditional_form: got inputs of shape {shape[1:]}, expected images that the "
        f"{cells} cells of the feature map tile evenly for a form per block."
    )
