r"""Densities that are ratios to a standard normal, and their total mass.

With :math:`p_0 = \mathcal{N}(0, I)` a log-ratio is a log-density,
:math:`\log \hat p = \log \hat r + \log p_0`, in nats, up to the mass
:math:`\hat Z = \int \hat p`. That is estimated by importance sampling, from a mixture of Gaussians
fitted to training rows, and by annealing; both miss mass sooner than invent it.
"""

__all__ = [
    "OPTIONS",
    "PROPOSED",
    "draw_pairs_of",
    "likelihood_or",
    "log_density",
    "masses",
    "proposal_of",
    "trusted",
]

import math

import torch
from torch import Generator, Tensor

from .density_methods import likelihood
from .estimators import DrawPairs, FitOptions, RatioFit
from .methods import METHODS, Method, direct, one_step
from .mixtures import GaussianMixture
from .partition import LogMass, annealed_mass, importance_mass, log_normal

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
