r"""The planar suite: nine densities from ratios to a standard normal, each beside its truth.

Every method is fitted to fresh samples of :math:`p_1` and :math:`p_0 = \mathcal{N}(0, I)`, without
any scaling, by the same number of updates, and judged by

- :math:`\log \hat Z`, the log of the total mass, by a grid (0 for a density);
- the held-out negative log-likelihood as it comes, :math:`-\log \hat r - \log p_0`, and that of
  the normalised density, which adds :math:`\log \hat Z`;
- :math:`\mathrm{KL}(p_1 \| \hat p / \hat Z)`, from the exact density of the set.
"""

__all__ = ["PlanarJob", "estimate_planar", "planar_jobs", "plot_planar"]

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ...files import atomic_path
from ...models.time_conditioned import TimeConditionedRatio
from ...training.batches import Stream, step_generator
from ..density import log_density
from ..fit import DrawPairs, FitOptions, RatioFit, fit_ratio
from ..partition import grid_mass
from .density_methods import PLANAR_METHODS
from .reports import Row, refuse_unknown
from .toy import PLANAR_SETS, PlanarSet, planar_set

HELD_OUT = 10_000

# The square of the grid; all sets lie within 4.5.
HALF_WIDTH, SIZE = 6.0, 241

# The square and the points of a panel of the figure.
VIEW, PIXELS = 4.2, 96
CAPTION = "Densities as they come, not normalised; colours of a line are those of its exact one."

OPTIONS = FitOptions(steps=600, standardise="no")
FULL = OPTIONS.replace(steps=10_000, batch_size=2048, features=256)
EVALUATIONS = (2, 5, 10)


@dataclass(frozen=True)
class PlanarJob:
    r"""One fit: of a set, by a method."""

    name: str
    method: str
    options: FitOptions


def planar_jobs(args: argparse.Namespace) -> list[PlanarJob]:
    r"""Lists the fits of the suite.

    Raises:
        UserError: If a set or a method is unknown.
    """
    names, methods = args.sets or PLANAR_SETS, args.methods or list(PLANAR_METHODS)
    refuse_unknown("--sets", names, PLANAR_SETS)
    refuse_unknown("--methods", methods, PLANAR_METHODS)
    options = (FULL if args.full else OPTIONS).given(args.device, args.steps, args.lr)
    kernels: Any = args.kernels or ["rq"]
    return [
        PlanarJob(name, method, options.replace(seed=seed, kernel=kernel))
        for name in names
        for method in methods
        for kernel in (kernels if PLANAR_METHODS[method].kernel else kernels[:1])
        for seed in range(args.seed, args.seed + (args.seeds or 1))
    ]


def draw_pairs_of(planar: PlanarSet) -> DrawPairs:
    r"""Returns the sampler of batches of the reference and of a set."""

    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x_0 = torch.randn(n, 2, generator=generator, device=generator.device)
        return x_0, planar.sample(n, generator)

    return draw_pairs


def estimate_planar(job: PlanarJob) -> list[Row]:
    r"""Runs one fit and returns a row for each number of network evaluations."""
    planar, method = planar_set(job.name), PLANAR_METHODS[job.method]
    fit = fit_ratio(method, draw_pairs_of(planar), 2, job.options)
    x = planar.sample(
        HELD_OUT, step_generator(job.options.seed, Stream.TEST, 0, job.options.device)
    )
    truth = planar.log_density(x)
    rows = []
    for evaluations in EVALUATIONS if method.solver else (1,):
        if isinstance(fit.model, TimeConditionedRatio):
            fit.model.evaluations = evaluations
        common = {
            "set": job.name,
            "method": method.label,
            "kernel": job.options.kernel if method.kernel else "-",
            "evaluations": evaluations,
            "seed": job.options.seed,
        }
        rows.append({**common, **_judge(fit, x, truth), "image": _image(fit, job.options.device)})
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
    axis = torch.linspace(-VIEW, VIEW, PIXELS)
    x, y = torch.meshgrid(axis, axis, indexing="xy")
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def _image(fit: RatioFit, device: str) -> np.ndarray:
    values = log_density(fit, _view().to(device)).exp().cpu()
    return values.reshape(PIXELS, PIXELS).numpy().astype(np.float32)


def plot_planar(path: Path, rows: Sequence[Row]) -> None:
    r"""Draws samples, the truth and every method's density, a line a set.

    Densities are as they come, not normalised, all of a set on the scale of its exact one.

    Arguments:
        path: The PNG file.
        rows: Rows with their images; of several seeds the first is shown.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["set"] for row in rows))
    titles = list(dict.fromkeys(_title(row) for row in rows))
    height = 1.05 * len(names) + 0.4 + 0.2
    figure = Figure(figsize=(1.05 * (2 + len(titles)), height), dpi=90)
    axes = figure.subplots(len(names), 2 + len(titles), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        planar = planar_set(name)
        x = planar.sample(2000, step_generator(0, Stream.TEST, 1, "cpu"))
        line[0].scatter(x[:, 0], x[:, 1], s=0.4, linewidths=0, color="black")
        truth = planar.log_density(_view()).exp().reshape(PIXELS, PIXELS).numpy()
        images = {"exact": truth}
        for row in reversed([r for r in rows if r["set"] == name]):
            images[_title(row)] = row["image"]
        top = np.quantile(truth[truth > 1e-3 * truth.max()], 0.95)
        for ax, title in zip(line[1:], ["exact", *titles], strict=True):
            if title in images:
                ax.imshow(
                    images[title],
                    origin="lower",
                    extent=(-VIEW, VIEW, -VIEW, VIEW),
                    vmin=0,
                    vmax=top,
                    cmap="viridis",
                )
        line[0].set_ylabel(name, fontsize=8)
        for ax in line:
            ax.set(xticks=[], yticks=[], xlim=(-VIEW, VIEW), ylim=(-VIEW, VIEW), aspect="equal")
    for ax, title in zip(axes[0], ["samples", "exact", *titles], strict=True):
        ax.set_title(title.replace(" (", "\n("), fontsize=6.5)
    bottom = 0.2 / height
    figure.subplots_adjust(0.03, bottom + 0.005, 0.998, 1 - 0.45 / height, 0.04, 0.04)
    figure.text(0.5, bottom / 2, CAPTION, ha="center", va="center", fontsize=6.5)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")
        _reduce_colours(temporary)


def _title(row: Row) -> str:
    kernel = "" if row["kernel"] in ("-", "rq") else f" {row['kernel']}"
    evaluations = "" if row["evaluations"] == 1 else f" (NFE {row['evaluations']})"
    return f"{row['method']}{kernel}{evaluations}"


def _reduce_colours(path: Path) -> None:
    r"""Rewrites an image with a palette of 64 colours, at a third of the size."""
    from PIL import Image

    with Image.open(path) as image:
        reduced = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    reduced.save(path, format="PNG", optimize=True)
