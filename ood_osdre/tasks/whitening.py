r"""Coordinates without correlations, in which a standard normal is a closer reference."""

__all__ = ["Parts", "Whitening"]

from typing import NamedTuple

import torch
from torch import Tensor


class Whitening(NamedTuple):
    r"""The map to coordinates without correlations, :math:`z = L^{-1} (x - m)`.

    Attributes:
        mean: The mean :math:`m`, with shape :math:`(d)`, in double precision.
        root: The Cholesky factor :math:`L` of the covariance, with shape :math:`(d, d)`.
    """

    mean: Tensor
    root: Tensor

    @classmethod
    def of(cls, train: Tensor) -> "Whitening":
        r"""Returns the map of some rows, with shape :math:`(N, d)`."""
        mean = train.double().mean(dim=0)
        return cls(
            mean, torch.linalg.cholesky((train.double() - mean).T.cov().reshape(mean.shape * 2))
        )

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps rows, with shape :math:`(N, d)`."""
        z = torch.linalg.solve_triangular(self.root, (x.double() - self.mean).T, upper=False)
        return z.T.to(x)

    @property
    def log_volume(self) -> float:
        r"""What the map adds to a log-density, :math:`-\log |L|`."""
        return -self.root.diagonal().log().sum().item()


class Parts(NamedTuple):
    r"""The parts of a table, in coordinates of some kind.

    Attributes:
        train: The training rows, with shape :math:`(N, d)`.
        val: The validation rows.
        test: The test rows.
        log_volume: What the map to the coordinates adds to a log-density.
    """

    train: Tensor
    val: Tensor
    test: Tensor
    log_volume: float = 0.0

    def whitened(self) -> "Parts":
        r"""Returns the parts in coordinates in which the training part has no correlations."""
        forward = Whitening.of(self.train)
        train, val, test = (forward(x) for x in (self.train, self.val, self.test))
        return Parts(train, val, test, self.log_volume + forward.log_volume)
