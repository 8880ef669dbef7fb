r"""How many of a basis' functions of time are told apart in floating point.

Radial atoms are linearly independent for every :math:`K`, but formally so. What counts in
practice are the eigenvalues of their Gram matrix :math:`\int_0^1 g_j(t) g_k(t) \, dt`, which for
atoms wider than the grid fall below the rounding unit.
"""

__all__ = ["Conditioning", "conditioning", "gram_matrix"]

import copy
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .bases import RBFBasis
from .quadrature import composite_rule


class Conditioning(NamedTuple):
    r"""How far a basis is from being linearly dependent on :math:`[0, 1]`.

    Attributes:
        condition_number: The ratio of the extreme eigenvalues of the Gram matrix; infinite if
            the matrix is singular to float64.
        rank: The number of eigenvalues above the relative tolerance.
    """

    condition_number: float
    rank: int


@torch.no_grad()
def gram_matrix(basis: RBFBasis) -> Tensor:
    r"""Returns the inner products :math:`\int_0^1 g_j(t) g_k(t) \, dt`, to about 1e-14.

    The rule is composite Gauss-Legendre with panels no wider than the narrowest atom and with an
    edge at each centre, where the Matérn kernel is not smooth.

    Arguments:
        basis: A basis of :math:`K` atoms.

    Returns:
        The Gram matrix, in float64 and on the CPU, with shape :math:`(K, K)`.
    """
    basis = copy.deepcopy(basis).to(device="cpu", dtype=torch.float64)
    panels = math.ceil(1 / min(1.0, basis.sigma.min().item()))
    edges = np.union1d(np.linspace(0, 1, panels + 1), basis.centers.numpy())
    times, weights = map(torch.from_numpy, composite_rule(edges, nodes=16))

    gram = torch.zeros(basis.size, basis.size, dtype=torch.float64)
    # In chunks: narrow atoms need very many nodes.
    for t, weight in zip(times.split(2**14), weights.split(2**14), strict=True):
        values = basis(t)
        gram += values.T @ (weight[:, None] * values)
    return gram


def conditioning(basis: RBFBasis, rtol: float = 1e-6) -> Conditioning:
    r"""Returns the :class:`Conditioning` of the Gram matrix of a basis.

    Arguments:
        basis: A basis of :math:`K` atoms.
        rtol: The eigenvalue, relative to the largest, below which a direction does not count
            towards the rank. A direction at the default changes the time score, in root mean
            square over the time, a thousand times less than the strongest one does.
    """
    values = torch.linalg.eigvalsh(gram_matrix(basis))
    resolution = basis.size * torch.finfo(values.dtype).eps
    largest, smallest = values[-1].item(), values[0].item()
    singular = smallest <= resolution * largest
    rank = int((values > rtol * largest).sum())
    return Conditioning(math.inf if singular else largest / smallest, rank)
