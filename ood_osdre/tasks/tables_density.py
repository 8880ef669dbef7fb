r"""The tabular suite: held-out likelihoods of tables, with the total mass of every density.

All rows start from :math:`p_0 = \mathcal{N}(0, I)` in standardised coordinates. With `whiten`, the
coordinates are first turned and scaled by the covariance of the training part; likelihoods are
given in standardised coordinates all the same, so that both are comparable.

A likelihood as it comes is no likelihood unless :math:`\hat Z = 1`. Each row has
:math:`\log \hat Z` by importance sampling, from a mixture of Gaussians fitted to the training part,
with its standard error and effective number of draws, and one-pass rows have it by annealing too.
The normalised likelihood takes the first if it has enough effective draws and the second did not
find clearly more, else the larger: both miss mass sooner than invent it. Rows of solvers have only
the first and are flattered, if anything. The step that is kept is the one with the least *training
objective* on the validation part. That is a proper loss; the NLL as it comes is not, and would select the step that overestimates most.
"""

__all__ = ["TableJob", "Whitened", "estimate_table", "fit_and_judge", "table_jobs", "whitened"]

import argparse
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from ..baselines import TimeConditionedRatio
from ..data.batches import step_generator
from ..errors import UserError
from .density_methods import likelihood
from .estimators import DrawPairs, FitOptions, RatioFit, fit_ratio
from .methods import METHODS, Method, direct, one_step
from .mixtures import GaussianMixture
from .partition import LogMass, annealed_mass, importance_mass
from .planar import TEST, log_density
from .reports import Row, refuse_unknown
from .tabular import is_file_name, load_table, table_names

# Draws of importance sampling, and the mixture they come from.
DRAWS = 20_000
COMPONENTS, DEFENSIVE, INFLATION = 10, 0.05, 1.3

# Effective draws from which importance sampling is trusted.
ENOUGH = 100

OPTIONS = FitOptions(steps=600, standardise="no", lr=1e-3)
FULL = replace(OPTIONS, steps=40_000, batch_size=9600, features=256, depth=5)
EVALUATIONS = (10, 50)
NAMES = ("os-dre-likelihood", "os-dre", "dre-inf", "d3re", "direct-likelihood")
DEFAULT_TABLES = ("colours", "breast_cancer")


@dataclass(frozen=True)
class TableJob:
    r"""One fit: of a table, by a method."""

    name: str
    method: str
    options: FitOptions
    root: Path | None
    whiten: bool


class Whitened(NamedTuple):
    r"""The parts of a table in other coordinates.

    Attributes:
        train: The training rows, with shape :math:`(N, d)`.
        val: The validation rows.
        test: The test rows.
        log_volume: What the map adds to a log-density.
    """

    train: Tensor
    val: Tensor
    test: Tensor
    log_volume: float


def table_jobs(args: argparse.Namespace) -> list[TableJob]:
    r"""Lists the fits of the suite.

    Raises:
        UserError: If a table or a method is unknown, or two tables have one name.
    """
    names, methods = args.sets or DEFAULT_TABLES, args.methods or NAMES
    refuse_unknown("--sets", [n for n in names if not is_file_name(n)], table_names())
    refuse_unknown("--methods", methods, (*NAMES, *METHODS))
    titles = [load_table(name, args.data_root).name for name in names]
    for title in titles:
        if titles.count(title) > 1:
            raise UserError(
                f"--sets: two tables are called {title}, expected other names of files."
            )
    options = (FULL if args.full else OPTIONS).given(args.device, args.steps, args.lr)
    kernels: Any = args.kernels or ["rq", "gaussian", "imq", "matern32"]
    return [
        TableJob(
            name, method, replace(options, seed=seed, kernel=kernel), args.data_root, args.whiten
        )
        for name in names
        for method in methods
        for kernel in (kernels if _sees_times(method) else kernels[:1])
        for seed in range(args.seed, args.seed + (args.seeds or 1))
    ]


def _sees_times(method: str) -> bool:
    # The likelihood sees nothing of a kernel but its integral.
    return method.startswith("os-dre") and method != "os-dre-likelihood"


def estimate_table(job: TableJob) -> list[Row]:
    r"""Runs one fit and returns a row for each number of network evaluations."""
    table = load_table(job.name, job.root)
    train, val, test = (
        torch.as_tensor(x).to(job.options.device, torch.get_default_dtype())
        for x in (table.train, table.val, table.test)
    )
    data = whitened(train, val, test) if job.whiten else Whitened(train, val, test, 0.0)
    common = {"table": table.name, "p0": "whitened" if job.whiten else "standard"}
    return [{**common, **row} for row in fit_and_judge(job.method, data, job.options)]


def fit_and_judge(
    name: str, data: Whitened, options: FitOptions, proposed: bool = True
) -> list[Row]:
    r"""Fits a method and returns a row for each number of network evaluations.

    Arguments:
        name: The name of the method.
        data: The rows.
        options: How it is fitted.
        proposed: Whether there is a proposal, a mixture fitted to the training rows. In hundreds
            of dimensions there is none worth having; the mass is then that of annealing alone, and
            the likelihoods, which need one, cannot be fitted.
    """
    dim = data.train.shape[1]
    proposal = proposal_of(data.train) if proposed else None
    method = likelihood_or(name, proposal)
    generator = step_generator(options.seed, TEST, 0, options.device)
    x_0 = torch.randn(data.val.shape, generator=generator, device=generator.device)
    fit = fit_ratio(method, draw_pairs_of(data.train), dim, options, held_out=(x_0, data.val))
    rows = []
    for evaluations in EVALUATIONS if method.solver else (1,):
        if isinstance(fit.model, TimeConditionedRatio):
            fit.model.evaluations = evaluations
        rows.append(
            {
                "dim": dim,
                "method": method.label,
                "kernel": options.kernel if method.kernel else "-",
                "evaluations": evaluations,
                "seed": options.seed,
                **_judge(fit, data, proposal, generator),
            }
        )
    return rows


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


def whitened(train: Tensor, val: Tensor, test: Tensor) -> Whitened:
    r"""Maps the parts of a table to coordinates without correlations.

    Arguments:
        train: The training rows, with shape :math:`(N, d)`, whose covariance is used.
        val: The validation rows.
        test: The test rows.
    """
    forward = Whitening.of(train)
    return Whitened(forward(train), forward(val), forward(test), forward.log_volume)


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
        name: One of :data:`NAMES`, or of :data:`ood_osdre.tasks.methods.METHODS`.
        proposal: The proposal, which likelihoods need.
    """
    models = {"os-dre-likelihood": one_step, "direct-likelihood": direct}
    if name not in models:
        return METHODS[name]
    if proposal is None:
        raise ValueError(f"The method {name!r} needs a proposal, got None.")
    ours = name.startswith("os-dre")
    return Method(
        "OS-DRE (likelihood)" if ours else "Direct (likelihood)",
        models[name],
        lambda context: likelihood(context, proposal),
        kernel=ours,
    )


def _judge(
    fit: RatioFit,
    data: Whitened,
    proposal: GaussianMixture | None,
    generator: Generator,
) -> Row:
    started = time.monotonic()
    value = log_density(fit, data.test)
    seconds = time.monotonic() - started
    mass, check = masses(fit, proposal, data.test.shape[1], generator)
    nll = -value.mean().item() - data.log_volume
    return {
        "nll": nll,
        "nll_error": value.std().item() / math.sqrt(len(value)),
        "log_mass": mass and mass.value,
        "log_mass_error": mass and mass.error,
        "effective": mass and mass.effective,
        "log_mass_ais": check and check.value,
        "log_mass_ais_error": check and check.error,
        "normalised_nll": nll + trusted(mass, check),
        "best_step": max(fit.history, key=lambda h: h["held_out"])["step"],
        "parameters": fit.parameters,
        "train_seconds": fit.seconds,
        "score_seconds": seconds,
    }


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
    if importance is None:
        return math.nan if annealed is None else annealed.value
    if annealed is None:
        return importance.value
    error = math.hypot(importance.error, annealed.error)
    more = annealed.value > importance.value + 3 * error
    if importance.effective >= ENOUGH and not more:
        return importance.value
    return max(importance.value, annealed.value)
