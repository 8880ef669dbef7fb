r"""The density of a user's own rows of numbers, normalised as far as its mass is known.

A one-step ratio to :math:`p_0 = \mathcal{N}(0, I)` in coordinates without correlations is a
density there, :math:`\log \hat p(x) = \log \hat r(z) + \log p_0(z) - \log |L| - \log \hat Z`, with
:math:`z = L^{-1} (x - m)`: one forward pass a row, but for the solver methods. What
:math:`\log \hat Z` is worth is said in
:mod:`ood_osdre.tasks.density`.

Densities that are ratios to a standard normal, and their total mass.

With :math:`p_0 = \mathcal{N}(0, I)` a log-ratio is a log-density,
:math:`\log \hat p = \log \hat r + \log p_0`, in nats, up to the mass
:math:`\hat Z = \int \hat p`. That is estimated by importance sampling, from a mixture of Gaussians
fitted to training rows, and by annealing; both miss mass sooner than invent it.
"""

__all__ = [
    "DEFAULTS",
    "OPTIONS",
    "PROPOSED",
    "Density",
    "draw_pairs_of",
    "fit_density",
    "likelihood_or",
    "log_density",
    "masses",
    "proposal_of",
    "trusted",
]

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Generator, Tensor

from ..errors import UserError
from ..training.batches import Stream, step_generator
from .fit import DrawPairs, FitOptions, RatioFit, fit_ratio
from .gaussians import GaussianMixture
from .methods import METHODS, Method, Options, direct, one_step, settled
from .partition import LogMass, Whitening, annealed_mass, importance_mass, log_normal
from .rows import check_rows, finite_rows, repetition
from .suites.density_methods import likelihood

log = logging.getLogger(__name__)

#: How a ratio to it is fitted: to points as they are, of which its density is known.
OPTIONS = FitOptions(steps=600, standardise="no", lr=1e-3)

# Draws of importance sampling, and the mixture they come from.
DRAWS = 20_000
COMPONENTS, DEFENSIVE, INFLATION = 10, 0.05, 1.3

# Effective draws from which importance sampling is trusted.
ENOUGH = 100

#: Labels and models of the methods that are trained on a likelihood, and need a proposal for it.
PROPOSED = {
    "os-dre-likelihood": ("OS-DRE (likelihood)", one_step),
    "direct-likelihood": ("Direct (likelihood)", direct),
}


def log_density(fit: RatioFit, x: Tensor) -> Tensor:
    r"""Returns :math:`\log \hat r + \log p_0`, in nats and double precision, not normalised.

    Arguments:
        fit: A ratio to :math:`p_0 = \mathcal{N}(0, I)`.
        x: The points, with shape :math:`(N, d)`.
    """
    return fit.log_ratio(x).double() + log_normal(x)


def draw_pairs_of(train: Tensor) -> DrawPairs:
    r"""Returns the sampler of batches of the reference and of a table's rows."""

    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        x_0 = torch.randn(n, train.shape[1], generator=generator, device=device)
        i = torch.randint(len(train), (n,), generator=generator, device=device)
        return x_0, train[i]

    return draw_pairs


def proposal_of(train: Tensor) -> GaussianMixture:
    r"""Returns a mixture of Gaussians, wider than the rows it is fitted to.

    Arguments:
        train: The rows, with shape :math:`(N, d)`.
    """
    components = max(1, min(COMPONENTS, len(train) // 500))
    return GaussianMixture.fit(train[:50_000], components, DEFENSIVE, INFLATION)


def likelihood_or(name: str, proposal: GaussianMixture | None) -> Method:
    r"""Returns a method, the likelihoods being made for a proposal.

    Arguments:
        name: One of :data:`PROPOSED`, or of :data:`ood_osdre.tasks.methods.METHODS`.
        proposal: The proposal, which likelihoods need.

    Raises:
        ValueError: If it is missing.
    """
    if name not in PROPOSED:
        return METHODS[name]
    if proposal is None:
        raise ValueError(f"The method {name!r} needs a proposal, got None.")
    label, model = PROPOSED[name]
    return Method(
        label, model, lambda context: likelihood(context, proposal), kernel=model is one_step
    )


def masses(
    fit: RatioFit, proposal: GaussianMixture | None, dim: int, generator: Generator
) -> tuple[LogMass | None, LogMass | None]:
    r"""Returns estimates of a density's log-mass by importance sampling and by annealing.

    Arguments:
        fit: A ratio to :math:`\mathcal{N}(0, I)`.
        proposal: The proposal of importance sampling; None for none of the first.
        dim: The dimension :math:`d`.
        generator: The source of randomness.

    Returns:
        Both, the second None for solvers, whose gradients cost too much.
    """
    importance = annealed = None
    if proposal is not None:
        importance = importance_mass(lambda y: log_density(fit, y), proposal, DRAWS, generator)
    if not fit.method.solver:
        # With gradients, hence not by the fit's own method.
        annealed = annealed_mass(lambda z: fit.model.log_ratio(fit.standardise(z)), dim, generator)
    return importance, annealed


def trusted(importance: LogMass | None, annealed: LogMass | None) -> float:
    r"""Returns the log-mass to normalise by.

    Both estimates miss mass sooner than invent it. That of importance sampling is taken if it has
    draws enough and annealing did not find clearly more, else the larger.

    Arguments:
        importance: The estimate by importance sampling, if there is one.
        annealed: The estimate by annealing, if there is one.
    """
    if importance is None or not math.isfinite(importance.value):
        return math.nan if annealed is None else annealed.value
    if annealed is None:
        return importance.value
    error = math.hypot(importance.error, annealed.error)
    more = annealed.value > importance.value + 3 * error
    if importance.effective >= ENOUGH and not more:
        return importance.value
    return max(importance.value, annealed.value)


DEFAULTS = OPTIONS.replace(steps=1000)
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
    generator = step_generator(options.seed, Stream.TEST, 0, options.device)
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
