r"""The tabular suite: held-out likelihoods of tables, with the total mass of every density.

All rows start from :math:`p_0 = \mathcal{N}(0, I)` in standardised coordinates. With `whiten`, the
coordinates are first turned and scaled by the covariance of the training part; likelihoods are
given in standardised coordinates all the same, so that both are comparable.

A likelihood as it comes is no likelihood unless :math:`\hat Z = 1`. Each row has
:math:`\log \hat Z` by importance sampling, from a mixture of Gaussians fitted to the training
part, with its standard error and effective number of draws, and one-pass rows have it by annealing
too. The normalised likelihood takes the first if it has enough effective draws and the second did
not find clearly more, else the larger: both miss mass sooner than invent it. Rows of solvers have
only the first and are flattered, if anything. The step that is kept is the one with the least
*training objective* on the validation part. That is a proper loss; the NLL as it comes is not, and
would select the step that overestimates most.
"""

__all__ = ["NAMES", "TableJob", "estimate_table", "fit_and_judge", "table_jobs"]

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator

from ...errors import UserError
from ...models.time_conditioned import TimeConditionedRatio
from ...training.batches import Stream, step_generator
from ..density import (
    OPTIONS,
    draw_pairs_of,
    likelihood_or,
    log_density,
    masses,
    proposal_of,
    trusted,
)
from ..fit import FitOptions, RatioFit, fit_ratio
from ..methods import METHODS
from ..partition import GaussianMixture
from ..rows import Parts
from .reports import Row, refuse_unknown
from .table_files import is_file_name
from .tables import load_table, table_names

FULL = OPTIONS.replace(steps=40_000, batch_size=9600, features=256, depth=5)
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
            name, method, options.replace(seed=seed, kernel=kernel), args.data_root, args.whiten
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
    data = Parts(train, val, test)
    data = data.whitened() if job.whiten else data
    common = {"table": table.name, "p0": "whitened" if job.whiten else "standard"}
    return [{**common, **row} for row in fit_and_judge(job.method, data, job.options)]


def fit_and_judge(name: str, data: Parts, options: FitOptions, proposed: bool = True) -> list[Row]:
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
    generator = step_generator(options.seed, Stream.TEST, 0, options.device)
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


def _judge(
    fit: RatioFit,
    data: Parts,
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
