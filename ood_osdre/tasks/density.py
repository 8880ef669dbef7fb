r"""The density of a user's own rows of numbers, normalised as far as its mass is known.

A one-step ratio to :math:`p_0 = \mathcal{N}(0, I)` in coordinates without correlations,
:math:`z = L^{-1} (x - m)`, is a density there, :math:`\log \hat p(x) = \log \hat r(z) +
\log p_0(z) - \log |L| - \log \hat Z`, in nats: one forward pass a row, but for the solver methods.

The mass :math:`\hat Z` is estimated by importance sampling, from a mixture of Gaussians fitted to
training rows, and by annealing (:mod:`ood_osdre.tasks.partition`); both miss mass sooner than
invent it.
"""

__all__ = [
    "DEFAULTS",
    "OPTIONS",
    "PROPOSED",
    "Density",
    "draw_pairs_of",
    "fit_density",
    "likelihood_or",
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

from ..data.sets import cut_apart
from ..errors import UserError
from ..training.batches import Stream, step_generator
from .draws import error_of_mean, firsts, marks_of, warn_of_order
from .fit import DrawPairs, RatioFit, fit_ratio, log_density
from .methods import (
    METHODS,
    FitOptions,
    Method,
    OptionsLike,
    check_method,
    direct,
    fit_options,
    likelihood,
    one_step,
)
from .partition import GaussianMixture, LogMass, annealed_mass, importance_mass
from .rows import Whitening, check_rows, read_rows, repetition

log = logging.getLogger(__name__)

#: How a ratio to :math:`p_0` is fitted: to points as they are, of which its density is known.
OPTIONS = FitOptions(steps=600, standardise="no", lr=1e-3)
#: The same for a user's own rows.
DEFAULTS = OPTIONS.replace(steps=1000)

# The parts of the rows that select the step and that measure the likelihood.
HELD_OUT = 0.1
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
            UserError: If the rows are no finite numbers, of another dimension, or too far from the
                data for single precision.
        """
        mean = self.whitening.mean
        rows = torch.as_tensor(read_rows("x", x, len(mean))).to(mean)
        z = self.whitening(rows).to(self.fit.standardise.mean)
        value = log_density(self.fit, z) + self.whitening.log_volume - self.log_mass
        if bad := int((~torch.isfinite(value)).sum()):
            raise UserError(f"x: {bad} of {len(rows)} rows are too far from the data of the fit.")
        return value.cpu().numpy()


def fit_density(
    x: ArrayLike, method: str = "os-dre", options: OptionsLike = None, progress: bool = False
) -> Density:
    r"""Fits a density to rows of numbers.

    A tenth of the rows selects the step, another the likelihood that is told. Copies of a row are
    all in one of these parts, and count as often as they occur; a warning says that there are
    some, and another that rows depend on their neighbours, as those of a time series do.

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

    Example:
        >>> x = np.random.default_rng(0).normal(3.0, 2.0, size=(500, 2))
        >>> density = fit_density(x, options={"steps": 20})
        >>> density.log_density(x[:5]).shape
        (5,)
    """
    check_method(method, dict.fromkeys(("os-dre", *PROPOSED, *METHODS)))
    options = fit_options(options, DEFAULTS)
    whitening, marks, (test, val, train) = _whitened_parts(read_rows("x", x), options)
    proposal = proposal_of(train)
    generator = step_generator(options.seed, Stream.TEST, 0, options.device)
    x_0 = torch.randn(val.shape, generator=generator, device=generator.device, dtype=val.dtype)
    fit = fit_ratio(
        likelihood_or(method, proposal),
        draw_pairs_of(train),
        train.shape[1],
        options,
        held_out=(x_0, val),
        progress=progress,
    )
    importance, annealed = masses(fit, proposal, train.shape[1], generator)
    log_mass = trusted(importance, annealed)
    value = log_density(fit, test) + whitening.log_volume - log_mass
    error = error_of_mean(value.cpu().numpy(), marks)
    return Density(fit, whitening, log_mass, importance, annealed, value.mean().item(), error)


def _whitened_parts(
    rows: NDArray[np.float64], options: FitOptions
) -> tuple[Whitening, NDArray[np.int64], list[Tensor]]:
    r"""Returns the map that whitens rows, which test rows are copies, and the parts of the rows.

    The parts are test, validation and training rows, whitened.
    """
    marks = marks_of("density", rows)
    distinct = rows[firsts(marks)]
    check_rows("x", distinct)
    warn_of_order("density", distinct)
    for i, column in enumerate(rows.T):
        if found := repetition(column):
            log.warning(
                "density: column %d %s; the density of rounded values has no bound. Add uniform "
                "noise as wide as the rounding.",
                *(i, found),
            )
    order = np.random.default_rng(options.seed).permutation(len(rows))
    cut = max(round(HELD_OUT * len(rows)), 10)
    picked = cut_apart(order, marks, [cut, 2 * cut])
    check_rows("x, its training part", rows[picked[2]][firsts(marks[picked[2]])], least=0)
    parts = [torch.as_tensor(rows[part], device=options.device) for part in picked]
    whitening = Whitening.of(parts[-1])
    dtype = torch.get_default_dtype()
    return whitening, marks[picked[0]], [whitening(part).to(dtype) for part in parts]


def draw_pairs_of(train: Tensor) -> DrawPairs:
    r"""Returns the sampler of batches of the reference and of a table's rows."""

    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        device = generator.device
        x_0 = torch.randn(n, train.shape[1], generator=generator, device=device)
        i = torch.randint(len(train), (n,), generator=generator, device=device)
        return x_0, train[i]

    return draw_pairs


def proposal_of(train: Tensor) -> GaussianMixture:
    r"""Returns a mixture of Gaussians, wider than the rows it is fitted to, :math:`(N, d)`."""
    components = max(1, min(COMPONENTS, len(train) // 500))
    return GaussianMixture.fit(train[:50_000], components, DEFENSIVE, INFLATION)


def likelihood_or(name: str, proposal: GaussianMixture | None) -> Method:
    r"""Returns one of :data:`METHODS`, or of :data:`PROPOSED`, which need a proposal."""
    if name not in PROPOSED:
        return METHODS[name]
    assert proposal is not None, f"the method {name!r} needs a proposal"
    label, model = PROPOSED[name]
    return Method(
        label, model, lambda context: likelihood(context, proposal), kernel=model is one_step
    )


def masses(
    fit: RatioFit, proposal: GaussianMixture | None, dim: int, generator: Generator
) -> tuple[LogMass | None, LogMass | None]:
    r"""Returns estimates of a density's log-mass by importance sampling and by annealing.

    The first is None without a proposal, the second for solvers, whose gradients cost too much.
    """
    importance = annealed = None
    if proposal is not None:
        importance = importance_mass(lambda y: log_density(fit, y), proposal, DRAWS, generator)
    if not fit.method.solver:
        # With gradients, hence not by the fit's own method.
        annealed = annealed_mass(lambda z: fit.model.log_ratio(fit.standardise(z)), dim, generator)
    return importance, annealed


def trusted(importance: LogMass | None, annealed: LogMass | None) -> float:
    r"""Returns the log-mass to normalise by, of estimates that miss mass sooner than invent it.

    That of importance sampling is taken if it has draws enough and annealing did not find clearly
    more, else the larger.
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
