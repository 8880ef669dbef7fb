r"""A Gaussian problem where everything is known: helpers for the tests of the objectives.

With x_0 ~ N(0, I) and x_1 ~ N(m, s^2 I), the marginals of a Gaussian path are Gaussian. Losses on
quadratic models are then polynomials of degree four in (x_0, x_1, z), and a 3-node Gauss-Hermite
rule a variable gives their *exact* expectation: no Monte Carlo noise to hide an error behind.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

from ood_osdre.models.networks import Coefficients
from ood_osdre.models.ratio import OneStepRatio
from ood_osdre.objectives import Batch, Objective, Term
from ood_osdre.paths.gaussian import GaussianPath, Moments
from ood_osdre.paths.times import Times


class GaussianProblem:
    def __init__(
        self, path: GaussianPath, mean: float = 0.7, std: float = 0.6, dim: int = 1
    ) -> None:
        self.path, self.mean, self.std, self.dim = path, mean, std, dim
        self.moments = Moments(dim, dim, 0.0, dim * (mean**2 + std**2))

    def log_density(self, x: Tensor, t: Tensor) -> Tensor:
        r = self.path.rates(t)
        scale = (r.alpha**2 + r.beta**2 * self.std**2 + r.v).sqrt()
        return Normal(r.beta[:, None] * self.mean, scale[:, None]).log_prob(x).sum(dim=1)

    def time_score(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.enable_grad():
            t = t if t.requires_grad else t.detach().requires_grad_()
            log_p = self.log_density(x, t).sum()
            return torch.autograd.grad(log_p, t, create_graph=True)[0]

    def log_ratio(self, x: Tensor, eps: float) -> Tensor:
        p_0 = Normal(0.0, (1 + eps) ** 0.5)
        p_1 = Normal(self.mean, (self.std**2 + eps) ** 0.5)
        return (p_1.log_prob(x) - p_0.log_prob(x)).flatten(1).sum(dim=1)

    def quadrature(
        self,
        times: Times,
        size: int = 24,
        nodes: int = 3,
        breaks: Sequence[float] = (),
        probe: bool = False,
    ) -> tuple[Batch, Tensor]:
        r"""Returns all nodes of a rule over (t, x_0, x_1, z), as one batch, and their weights."""
        t, w_t = legendre([times.low, *breaks, times.high], size)
        w_t = w_t * times.density(t)
        u, w = _hermite(nodes, (3 + probe) * self.dim)

        t, w = t.repeat_interleave(len(u)), torch.outer(w_t, w).flatten()
        parts = u.repeat(len(w_t), 1).split(self.dim, dim=1)
        batch = Batch(parts[0], self.mean + self.std * parts[1], t, parts[2])
        return (batch._replace(probe=parts[3]) if probe else batch), w

    def ends(self, nodes: int = 48) -> tuple[Batch, Tensor]:
        r"""Returns a fine rule over both ends with noise, for dim = 1. Times are idle."""
        u, w = _hermite(nodes, 2)
        x, z = u.split(1, dim=1)
        return Batch(x, self.mean + self.std * x, torch.full_like(w, 0.5), z), w


class ExactRatio(nn.Module):
    r"""The exact time score and log-ratio, plus a perturbation that is zero at its start.

    s(x, t) = <phi(x), c(t)> + <phi(x), theta [1, t, t^2]> with phi(x) = [1, x, x^2].
    """

    def __init__(
        self, problem: GaussianProblem, eps: float | None = None, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.problem = problem
        self.eps = problem.path.noise.eps if eps is None else eps
        self.scale = scale
        self.theta = nn.Parameter(torch.zeros(3, 3))

    def outputs(self, x: Tensor) -> Coefficients:
        return Coefficients(self.features(x))

    def score(self, h: Tensor, t: Tensor) -> Tensor:
        return self._contract(h, self.scale * self._exact(t) + self._powers(t) @ self.theta.T)

    def score_derivative(self, h: Tensor, t: Tensor) -> Tensor:
        d_exact = self._exact(t, derivative=True)
        d_powers = torch.stack([torch.zeros_like(t), torch.ones_like(t), 2 * t], dim=-1)
        return self._contract(h, self.scale * d_exact + d_powers @ self.theta.T)

    def log_ratio_at(self, outputs: Coefficients) -> Tensor:
        h = outputs.total
        exact = self.problem.log_ratio(h[:, 1:2], self.eps)
        return exact + h @ self.theta @ torch.tensor([1, 1 / 2, 1 / 3])

    @staticmethod
    def features(x: Tensor) -> Tensor:
        return torch.cat([torch.ones_like(x), x, x**2], dim=1)

    @staticmethod
    def _powers(t: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(t), t, t**2], dim=-1)

    @torch.enable_grad()
    def _exact(self, t: Tensor, derivative: bool = False) -> Tensor:
        # A rule repeats each of its times, and a quadratic in x is known from three values.
        t, index = t.unique(return_inverse=True)
        t = t.requires_grad_()
        x = torch.tensor([[-1.0], [0.0], [1.0]])
        values = torch.stack([self.problem.time_score(y.expand(len(t), 1), t) for y in x])
        w = torch.ones_like(t)
        if derivative:
            values = torch.stack(
                [torch.autograd.grad(v, t, w, retain_graph=True)[0] for v in values]
            )
        return (torch.linalg.inv(self.features(x)) @ values.detach()).T[index]

    @staticmethod
    def _contract(h: Tensor, g: Tensor) -> Tensor:
        return (h * (g[:, None] if h.ndim == 3 else g)).sum(dim=-1)


class Quadratic(nn.Module):
    r"""The features [x, x^2] of a point, with shape (B, 2d)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x**2], dim=1)


class QuadraticCells(nn.Module):
    r"""Maps (B, d) to coefficients of d cells, each quadratic in all of x."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(2 * dim, dim * size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.dim = dim

    def forward(self, x: Tensor) -> Coefficients:
        cells = self.head(Quadratic()(x)).unflatten(1, (self.dim, -1))
        return Coefficients(cells.sum(dim=1), cells)


def minimise(
    ratio: OneStepRatio,
    term: Term,
    batch: Batch,
    weights: Tensor,
    steps: int = 1,
    ridge: float = 1e-12,
) -> None:
    r"""Minimises the expected loss over the network's head, and the term, by Newton steps."""
    objective = Objective({"term": (1.0, term)})
    params = [p for p in (*ratio.parameters(), *term.parameters()) if p.requires_grad]

    for _ in range(steps):
        loss = weights @ objective(ratio, batch)["term"]
        grad = _flat(torch.autograd.grad(loss, params, create_graph=True))
        rows = [torch.autograd.grad(g, params, retain_graph=True) for g in grad]
        hessian = torch.stack([_flat(row) for row in rows])
        hessian = hessian + ridge * hessian.diagonal().max() * torch.eye(len(grad))
        step = torch.linalg.solve(hessian, grad.detach())
        with torch.no_grad():
            for p, s in zip(params, step.split([p.numel() for p in params]), strict=True):
                p.sub_(s.view_as(p))


def gradient(ratio: nn.Module, term: Term, batch: Batch, weights: Tensor) -> Tensor:
    r"""Returns the expected gradient with respect to the ratio's parameters."""
    loss = weights @ Objective({"term": (1.0, term)})(ratio, batch)["term"]
    return _flat(torch.autograd.grad(loss, list(ratio.parameters())))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def legendre(breaks: Sequence[float], size: int) -> tuple[Tensor, Tensor]:
    r"""Returns the nodes and weights of a rule with `size` nodes between each two breaks."""
    x, w = map(torch.as_tensor, np.polynomial.legendre.leggauss(size))
    pairs = list(itertools.pairwise(breaks))
    t = torch.cat([a + (b - a) * (x + 1) / 2 for a, b in pairs])
    return t, torch.cat([(b - a) / 2 * w for a, b in pairs])


def _hermite(nodes: int, dim: int) -> tuple[Tensor, Tensor]:
    x, w = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(nodes))
    w = w / w.sum()
    grids = torch.meshgrid(*[x] * dim, indexing="ij")
    weights = torch.meshgrid(*[w] * dim, indexing="ij")
    return (
        torch.stack([g.flatten() for g in grids], dim=1),
        torch.stack([g.flatten() for g in weights]).prod(dim=0),
    )
