r"""Conditional score matching, in forms with one minimiser and very different noise.

Given its ends, the path is Gaussian and its time score
:math:`T = \partial_t \log p_t(x_t \mid x_0, x_1)` is known. Differentiating
:math:`p_t(x) = \mathbb{E}[p_t(x \mid x_0, x_1)]` in time and dividing by :math:`p_t(x)` shows that
:math:`\mathbb{E}[T \mid x_t = x] = \partial_t \log p_t(x)`. The regression

.. math:: \min_s \, \mathbb{E} \, \lambda(t) \, (s(x_t, t) - T)^2

therefore has the marginal time score as its minimiser. Its integral over time is the log-ratio
of the path's own, *dequantised*, ends. The trouble is noise: in :math:`d` dimensions :math:`T` has
a standard deviation of :math:`\sqrt{V} \propto \sqrt{d}` or more, almost all of which is noise
that no function of :math:`x_t` explains.
"""

__all__ = ["FORMS", "ConditionalScoreMatching"]

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.networks import Coefficients
from ..paths.gaussian import GaussianPath
from ..paths.weights import Constant, Weight
from .base import Batch, PathTerm, Ratio

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
        self,
        path: GaussianPath,
        weight: Weight | None = None,
        form: str = "scalar",
    ) -> None:
        super().__init__(path)

        if form not in FORMS:
            raise ValueError(f"'form' should be one of {FORMS}, got {form!r}.")
        self.weight = Constant() if weight is None else weight
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
            h = self._outputs(at[name])
            target = self._target(batch, sign, parts=h.shape[1])
            residual = scale[:, None] * (ratio.score(h, batch.t) - target)
            losses.append(residual.square().sum(dim=1))
        return torch.stack(losses).mean(dim=0)

    def _outputs(self, at: Coefficients) -> Tensor:
        if self.form in ("scalar", "antithetic"):
            return at.total[:, None]
        if at.cells is None:
            raise ValueError(
                f"Form {self.form!r} needs a network that returns cells with shape (B, S, K), "
                "got none: use 'scalar' or 'antithetic', or a backbone with a feature map."
            )
        return at.cells

    def _target(self, batch: Batch, sign: float, parts: int) -> Tensor:
        x_0, x_1, t, noise = batch.x_0, batch.x_1, batch.t, sign * batch.noise

        if self.form in ("scalar", "antithetic"):
            return self.path.time_score(x_0, x_1, t, noise)[:, None]
        if self.form == "per_dimension":
            target = self.path.time_score_per_dimension(x_0, x_1, t, noise).flatten(1)
            if target.shape[1] != parts:
                raise ValueError(
                    f"Form 'per_dimension' needs one cell per dimension, got {parts} cells "
                    f"for {target.shape[1]} dimensions."
                )
            return target
        grid = block_grid(parts, tuple(x_0.shape))
        return self.path.time_score_per_block(x_0, x_1, t, noise, grid=grid)


def block_grid(cells: int, shape: tuple[int, ...]) -> tuple[int, int]:
    r"""Returns the grid of the patches under the cells of a feature map.

    Arguments:
        cells: The number of cells.
        shape: The shape of the images, :math:`(B, C, H, W)`.

    Returns:
        The numbers of rows and columns, in the aspect ratio of the images.
    """
    if len(shape) == 4:
        height, width = shape[2:]
        rows = max(round((cells * height / width) ** 0.5), 1)
        columns = cells // rows
        if rows * columns == cells and height % rows == 0 and width % columns == 0:
            return rows, columns

    raise ValueError(
        f"Block forms need images (B, C, H, W) that {cells} cells tile evenly, got {shape}."
    )
