r"""The planar suite: nine densities from ratios to a standard normal, each beside its truth.

Every method is fitted to fresh samples of :math:`p_1` and :math:`p_0 = \mathcal{N}(0, I)`, without
any scaling, by the same number of updates, and judged by

- :math:`\log \hat Z`, the log of the total mass, by a grid (0 for a density);
- the held-out negative log-likelihood as it comes, :math:`-\log \hat r - \log p_0`, and that of
  the normalised density, which adds :math:`\log \hat Z`;
- :math:`\mathrm{KL}(p_1 \| \hat p / \hat Z)`, from the exact density of the set.

A multi-layer perceptron on plane coordinates learns coarse structure long before fine one,
whatever its objective. The networks of all methods therefore see sines and cosines along random
directions as well. The likelihood draws from a Gaussian that is wider than the data, as a batch
of :math:`p_0` hardly ever visits the places where the ratio is large.

References:
    | Fourier features let networks learn high frequency functions (Tancik et al., 2020)
    | https://arxiv.org/abs/2006.10739
"""

__all__ = [
    "PLANAR_METHODS",
    "SUITE",
    "DensityJob",
    "FourierFeatures",
    "draw_pairs_of",
    "estimate_planar",
    "planar_jobs",
    "plot_planar",
]

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from ...models import (
    MLP,
    RatioModel,
    TimeConditionedMLP,
    TimeConditionedRatio,
)
from ...objectives import Objective
from ...training.batches import Stream, step_generator
from ..fit import DrawPairs, FitOptions, RatioFit, fit_ratio, log_density
from ..methods import METHODS, Context, Method, direct, likelihood, one_step
from ..partition import grid_mass, grid_points, isotropic
from .jobs import Row
from .reports import Suite, average, check_names, list_fits
from .toy import PLANAR_SETS, PlanarSet, planar_set

HELD_OUT = 10_000

# The square of the grid; all sets lie within 4.5.
HALF_WIDTH, SIZE = 6.0, 241

# The square and the points of a panel of the figure.
VIEW, PIXELS = 4.2, 96
SIDE = 1.25  # of a panel, in inches
CAPTION = "Densities as they come, not normalised; colours of a line are those of its exact one."

OPTIONS = FitOptions(steps=600, standardise="no")
FULL = OPTIONS.replace(steps=10_000, batch_size=2048, features=256)
EVALUATIONS = (2, 5, 10)

# The variance of the likelihood's proposal, relative to the mean square of a coordinate.
WIDENING = 1.3

# Fourier features: their number, and their angular frequencies for sets a few units across.
FREQUENCIES, LOWEST, HIGHEST = 64, 0.5, 16.0


class FourierFeatures(nn.Module):
    r"""The point itself, and sines and cosines of it along random directions.

    The frequencies are evenly spaced on a logarithmic scale, from `LOWEST` to `HIGHEST`.

    Arguments:
        dim: The dimension :math:`d` of the points.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        directions = nn.functional.normalize(torch.randn(FREQUENCIES, dim), dim=1)
        scale = torch.logspace(math.log10(LOWEST), math.log10(HIGHEST), FREQUENCIES)
        self.waves: Tensor
        self.register_buffer("waves", scale[:, None] * directions)
        self.features = dim + 2 * FREQUENCIES

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`, of `x`, with shape :math:`(B, d)`."""
        phase = x @ self.waves.T
        return torch.cat([x, phase.sin(), phase.cos()], dim=1)


class _FourierTimeNetwork(nn.Module):
    r"""A time-conditioned network on Fourier features."""

    def __init__(self, dim: int, features: int, depth: int) -> None:
        super().__init__()
        self.fourier = FourierFeatures(dim)
        self.network = TimeConditionedMLP(self.fourier.features, features, depth)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.network(self.fourier(x), t)


def _backbone(context: Context) -> tuple[nn.Module, int]:
    o = context.options
    fourier = FourierFeatures(context.dim)
    return nn.Sequential(fourier, MLP(fourier.features, o.features, o.depth)), o.features


_one_step, _direct = partial(one_step, build=_backbone), partial(direct, build=_backbone)


def _time_conditioned(context: Context) -> RatioModel:
    o = context.options
    network = _FourierTimeNetwork(context.dim, o.features, o.depth)
    return TimeConditionedRatio(network, o.evaluations, context.path.t_range)


def _wide_likelihood(context: Context) -> Objective:
    sigma = math.sqrt(max(WIDENING * context.moments.square_1 / context.dim, 1.0))
    return likelihood(context, isotropic(context.dim, sigma))


#: The rows of the planar suite; they differ in what the label says.
PLANAR_METHODS: dict[str, Method] = {
    "os-dre-likelihood": Method("OS-DRE (likelihood)", _one_step, _wide_likelihood, kernel=True),
    "os-dre": replace(METHODS["os-dre"], label="OS-DRE (path difference)", model=_one_step),
    "dre-inf": replace(METHODS["dre-inf"], model=_time_conditioned),
    "d3re": replace(METHODS["d3re"], model=_time_conditioned),
    "direct-likelihood": Method("Direct (likelihood)", _direct, _wide_likelihood),
}


class DensityJob(NamedTuple):
    r"""One fit, by a method: of a planar set, a table or a set of images.

    Attributes:
        name: The name of the set or table.
        method: The name of the method.
        options: How it is fitted.
        root: The folder of the files, if there are any.
        whiten: Whether coordinates are whitened first.
    """

    name: str
    method: str
    options: FitOptions
    root: Path | None = None
    whiten: bool = False


def planar_jobs(args: argparse.Namespace) -> list[DensityJob]:
    r"""Lists the fits of the suite.

    Raises:
        UserError: If a set or a method is unknown.
    """
    names, methods = args.sets or PLANAR_SETS, args.methods or list(PLANAR_METHODS)
    check_names("--sets", names, PLANAR_SETS)
    check_names("--methods", methods, PLANAR_METHODS, " with --suite planar")
    with_kernel = [name for name, method in PLANAR_METHODS.items() if method.kernel]
    fits = list_fits(
        args, methods, FULL if args.full else OPTIONS, args.kernels or ["rq"], with_kernel
    )
    return [DensityJob(name, *fit) for name in names for fit in fits]


def draw_pairs_of(planar: PlanarSet) -> DrawPairs:
    r"""Returns the sampler of batches of the reference and of a set."""

    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0 = torch.randn(n, 2, generator=generator, device=generator.device)
        return x_0, planar.sample(n, generator)

    return draw_pairs


def estimate_planar(job: DensityJob) -> list[Row]:
    r"""Runs one fit and returns a row for each number of network evaluations."""
    planar, method, device = planar_set(job.name), PLANAR_METHODS[job.method], job.options.device
    fit = fit_ratio(method, draw_pairs_of(planar), 2, job.options)
    x = planar.sample(HELD_OUT, step_generator(job.options.seed, Stream.TEST, 0, device))
    truth = planar.log_density(x)
    rows = []
    for evaluations in EVALUATIONS if method.solver else (1,):
        if isinstance(fit.model, TimeConditionedRatio):
            fit.model.evaluations = evaluations
        image = log_density(fit, _view().to(device)).exp().cpu().reshape(PIXELS, PIXELS)
        rows.append(
            {
                "set": job.name,
                "method": method.label,
                "kernel": job.options.kernel if method.kernel else "-",
                "evaluations": evaluations,
                "seed": job.options.seed,
                **_judge(fit, x, truth),
                "image": image.numpy().astype(np.float32),
            }
        )
    return rows


def _judge(fit: RatioFit, x: Tensor, truth: Tensor) -> Row:
    mass = grid_mass(lambda y: log_density(fit, y.to(x)), HALF_WIDTH, SIZE)
    started = time.monotonic()
    value = log_density(fit, x)
    seconds = time.monotonic() - started
    kl = truth - value + mass.value
    return {
        "log_mass": mass.value,
        "mass_error": mass.error,
        "nll": -value.mean().item(),
        "normalised_nll": mass.value - value.mean().item(),
        "entropy": -truth.mean().item(),
        "kl": kl.mean().item(),
        "kl_error": kl.std().item() / math.sqrt(len(x)),
        "parameters": fit.parameters,
        "train_seconds": fit.seconds,
        "score_seconds": seconds,
    }


def _view() -> Tensor:
    # Rows of an image are values of y.
    return grid_points(VIEW, PIXELS).flip(1)


def plot_planar(path: Path, rows: Sequence[Row], table: Sequence[Row] = ()) -> None:
    r"""Draws samples, the truth and every method's density, a line a set.

    Densities are as they come, not normalised, all of a set on the scale of its exact one.

    Arguments:
        path: The PNG file.
        rows: Rows with their images; of several seeds the first is shown.
        table: Not drawn.
    """
    from ...evaluation.plots import Figure, save_png

    names = list(dict.fromkeys(row["set"] for row in rows))
    titles = list(dict.fromkeys(_title(row) for row in rows))
    height = SIDE * len(names) + 0.5 + 0.3
    figure = Figure(figsize=(SIDE * (2 + len(titles)) + 0.3, height), dpi=110)
    axes = figure.subplots(len(names), 2 + len(titles), squeeze=False)
    limits = {"xlim": (-VIEW, VIEW), "ylim": (-VIEW, VIEW), "aspect": "equal"}
    for line, name in zip(axes, names, strict=True):
        planar = planar_set(name)
        x = planar.sample(2000, step_generator(0, Stream.TEST, 1, "cpu"))
        line[0].scatter(x[:, 0], x[:, 1], s=0.8, linewidths=0, color="black")
        truth = planar.log_density(_view()).exp().reshape(PIXELS, PIXELS).numpy()
        images = {"exact": truth}
        for row in reversed([r for r in rows if r["set"] == name]):
            images[_title(row)] = row["image"]
        scale = {"vmin": 0, "vmax": np.quantile(truth[truth > 1e-3 * truth.max()], 0.95)}
        for ax, title in zip(line[1:], ["exact", *titles], strict=True):
            if title in images:
                extent = (-VIEW, VIEW, -VIEW, VIEW)
                ax.imshow(images[title], "viridis", origin="lower", extent=extent, **scale)
        line[0].set_ylabel(name, fontsize=10)
        for ax in line:
            ax.set(xticks=[], yticks=[], **limits)
    for ax, title in zip(axes[0], ["samples", "exact", *titles], strict=True):
        ax.set_title(title.replace(" (", "\n("), fontsize=10)
    bottom = 0.3 / height
    figure.subplots_adjust(0.03, bottom + 0.005, 0.998, 1 - 0.55 / height, 0.04, 0.04)
    figure.text(0.5, bottom / 2, CAPTION, ha="center", va="center", fontsize=10)
    save_png(figure, path)


def _title(row: Row) -> str:
    kernel = "" if row["kernel"] in ("-", "rq") else f" {row['kernel']}"
    evaluations = "" if row["evaluations"] == 1 else f" (NFE {row['evaluations']})"
    return f"{row['method']}{kernel}{evaluations}"


SUITE = Suite(
    "density-planar",
    "Densities of planar sets (nats)",
    "`nll` is that of the density as it comes, `normalised_nll` and `kl` after division by its "
    "total mass, by a grid. `entropy` is the least NLL that any density can have.",
    planar_jobs,
    estimate_planar,
    partial(average, keys=("set", "method", "kernel", "evaluations")),
    plot_planar,
)
