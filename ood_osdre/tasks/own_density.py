r"""The density of a user's own rows of numbers, normalised as far as its mass is known.

A one-step ratio to :math:`p_0 = \mathcal{N}(0, I)` in coordinates without correlations is a
density there, :math:`\log \hat p(x) = \log \hat r(z) + \log p_0(z) - \log |L| - \log \hat Z`, with
:math:`z = L^{-1} (x - m)`: one forward pass a row, but for the solver methods. What
:math:`\log \hat Z` is worth is said in
:mod:`ood_osdre.tasks.normal_reference`.
"""

__all__ = ["DEFAULTS", "Density", "fit_density"]

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..data.batches import step_generator
from ..errors import UserError
from .dependence import finite_rows, repetition
from .estimators import METHODS, TEST, RatioFit, fit_ratio
from .methods import Options, settled
from .normal_reference import (
    OPTIONS,
    PROPOSED,
    draw_pairs_of,
    likelihood_or,
    log_density,
    masses,
    proposal_of,
    trusted,
)
from .partition import LogMass
from .shipped_tables import check_rows
from .whitening import Whitening

log = logging.getLogger(__name__)

DEFAULTS = replace(OPTIONS, steps=1000)
# The parts of the rows that select the step and that measure the likelihood.
HELD_OUT = 0.1


@dataclass(frozen=True)
class Density:
    r"""A fitted density.

    Attributes:
        fit: The ratio, of whitened rows.
        whitening: The map to them.
        log_mass: What was divided by, :math:`\log \hat Z`, in nats.
        importance: Its estimate by importance sampling, with error and effective draws.
        annealed: Its estimate by annealing, None for solvers. Both miss mass sooner than invent
            it: where they differ by more than their errors, the likelihoods below are too high,
            if anything.
        log_likelihood: The mean normalised log-density of rows that were not fitted to, in nats.
        standard_error: That of this mean, without the error of :math:`\log \hat Z`.
    """

    fit: RatioFit
    whitening: Whitening
    log_mass: float
    importance: LogMass | None
    annealed: LogMass | None
    log_likelihood: float
    standard_error: float

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        r"""Returns the normalised log-density of rows, in nats and the units of the data.

        Arguments:
            x: The rows, with shape :math:`(N, d)`, or :math:`(N)` if they have one column.

        Returns:
            The log-densities, with shape :math:`(N)`.

        Raises:
            UserError: If the rows are no finite numbers, or of another dimension.
        """
        rows = finite_rows("x", x)
        dim = len(self.whitening.mean)
        if rows.shape[1] != dim:
            raise UserError(f"x: got shape {rows.shape}, expected (N, {dim}).")
        mean = self.whitening.mean
        z = self.whitening(torch.as_tensor(rows).to(mean)).to(self.fit.standardise.mean)
        value = log_density(self.fit, z) + self.whitening.log_volume - self.log_mass
        return value.cpu().numpy()


def fit_density(
    x: ArrayLike, method: str = "os-dre", options: Options = None, progress: bool = False
) -> Density:
    r"""Fits a density to rows of numbers.

    A tenth of the rows selects the step, another the likelihood that is told.

    Arguments:
        x: The rows, continuous numbers with shape :math:`(N, d)`, or :math:`(N)` for one column.
        method: One of those of the tabular suite: `os-dre` (along the path), `os-dre-likelihood`
            (better in a few dimensions, not to be trusted in many), `dre-inf`, `d3re`,
            `direct-likelihood`; or one of :data:`ood_osdre.tasks.methods.METHODS`.
        options: How the ratio is fitted: options by name that differ from :data:`DEFAULTS`, such
            as `{"steps": 3000}`, or :class:`ood_osdre.tasks.methods.FitOptions`.
        progress: Whether to show a progress bar.

    Raises:
        UserError: If the rows are no finite numbers, too few, or do not span their dimensions, or
            the method or an option is unknown.
        TypeError: If `options` is neither a mapping nor options.

    Example:
        >>> x = np.random.default_rng(0).normal(3.0, 2.0, size=(500, 2))
        >>> density = fit_density(x, options={"steps": 20})
        >>> density.log_density(x[:5]).shape
        (5,)
    """
    if method not in (known := tuple(dict.fromkeys(("os-dre", *PROPOSED, *METHODS)))):
        raise UserError(f"method: got {method!r}, expected one of {', '.join(known)}.")
    options = settled(options, DEFAULTS)
    rows = finite_rows("x", x)
    check_rows("x", rows)
    for i, column in enumerate(rows.T):
        if found := repetition(column):
            log.warning(
                "density: column %d %s; the density of rounded values has no bound. Add uniform "
                "noise as wide as the rounding.",
                *(i, found),
            )
    rows = np.random.default_rng(options.seed).permutation(rows)
    cut = max(round(HELD_OUT * len(rows)), 10)
    check_rows("x, its training part", rows[2 * cut :], least=0)
    whitening = Whitening.of(torch.as_tensor(rows[2 * cut :], device=options.device))
    dtype = torch.get_default_dtype()
    test, val, train = (
        whitening(torch.as_tensor(part, device=options.device)).to(dtype)
        for part in (rows[:cut], rows[cut : 2 * cut], rows[2 * cut :])
    )
    proposal = proposal_of(train)
    generator = step_generator(options.seed, TEST, 0, options.device)
    x_0 = torch.randn(val.shape, generator=generator, device=generator.device, dtype=dtype)
    fit = fit_ratio(
        likelihood_or(method, proposal),
        draw_pairs_of(train),
        rows.shape[1],
        options,
        held_out=(x_0, val),
        progress=progress,
    )
    importance, annealed = masses(fit, proposal, rows.shape[1], generator)
    log_mass = trusted(importance, annealed)
    value = log_density(fit, test) + whitening.log_volume - log_mass
    error = (value.std() / len(value) ** 0.5).item()
    return Density(fit, whitening, log_mass, importance, annealed, value.mean().item(), error)
