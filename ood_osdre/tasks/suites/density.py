r"""Densities from ratios: log p1 = log r + log p0 in one pass, p0 = N(0, I), with their total mass.

Suites:

planar    nine two-dimensional sets with exact densities
tabular   tables of numbers; those that scikit-learn ships need no files
images    bits per dimension of handwritten digits, as an energy model

A likelihood as it comes is no likelihood unless the total mass is 1; `ood_osdre.tasks.density` says
how far to trust its estimates. A fit keeps the step with the least training objective on the
validation part: the step with the least NLL as it comes would overestimate most.

Tables: with --whiten the reference is N(0, I) in coordinates that are turned and scaled by the
covariance of the training part, else in standardised ones, which all likelihoods are given in.
Rows of solvers have the mass by importance sampling alone and are flattered, if anything.

Images: a pixel has whole levels k. Uniform noise u on [0, 1) makes them continuous, and by
Jensen's inequality -log2 P(k) <= -E[log2 p(k + u)]: the bits per dimension of a density p bound
those of the discrete images from above, if p integrates to one. Annealing finds too little mass
sooner than too much: with its mass the bits are optimistic, and bound nothing. Coordinates are
whitened; the covariance alone is a density, too, and the row that a ratio has to beat. `digits`
are scikit-learn's, 8x8 pixels of 17 levels; `mnist` and `cifar10` are read from a data root in
OpenOOD's layout, at their own size. Of files compressed as JPEG, as those of the data pack are,
the numbers are of *those* files and compare with nobody's.
"""

__all__ = ["SUITES", "add_arguments", "estimate_image", "estimate_table", "run"]

import argparse
import hashlib
import math
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...data.lists import read_list
from ...errors import UserError, one_line
from ...files import local
from ...models import KERNELS, TimeConditionedRatio
from ...training.batches import Stream, step_generator
from ..density import OPTIONS, draw_pairs_of, likelihood_or, masses
from ..fit import FitOptions, fit_ratio, log_density
from ..methods import METHODS
from ..partition import log_normal, proposal_of, trusted
from ..rows import Parts
from . import planar
from .jobs import Row
from .planar import DensityJob
from .reports import (
    Suite,
    add_common_arguments,
    average,
    check_arguments,
    check_distinct,
    check_names,
    list_fits,
    run_suites,
)
from .tables import is_file_name, load_table, table_names

FULL = OPTIONS.replace(steps=40_000, batch_size=9600, features=256, depth=5)
EVALUATIONS = (10, 50)
TABLE_METHODS = ("os-dre-likelihood", "os-dre", "dre-inf", "d3re", "direct-likelihood")
IMAGE_OPTIONS = OPTIONS.replace(features=256)
IMAGE_METHODS = ("os-dre-likelihood", "os-dre", "direct-likelihood")
# Lists of a data root, for CIFAR-10 of its training images, and the channels of their files.
FILES = {"mnist": ("cifar10/test_mnist.txt", "L"), "cifar10": ("cifar10/train_cifar10.txt", "RGB")}
# Copies of every training image of a small set, with noise of their own; of many images so many,
# at random, as their covariance takes gigabytes and minutes otherwise; and the training part.
COPIES, MOST, TRAIN = 8, 20_000, 0.8


def table_jobs(args: argparse.Namespace) -> list[DensityJob]:
    r"""Lists the fits of the tabular suite.

    Raises:
        UserError: If a table or a method is unknown, or two tables have one name.
    """
    names, methods = args.sets or ("colours", "breast_cancer"), args.methods or TABLE_METHODS
    check_names("--sets", [n for n in names if not is_file_name(n)], table_names())
    check_names("--methods", methods, (*TABLE_METHODS, *METHODS), " with --suite tabular")
    check_distinct("--sets", [load_table(name, args.data_root).name for name in names])
    options = FULL if args.full else OPTIONS
    kernels = args.kernels or list(reversed(KERNELS))
    # The likelihood sees nothing of a kernel but its integral.
    with_kernel = [m for m in METHODS if METHODS[m].kernel]
    fits = list_fits(args, methods, options, kernels, with_kernel)
    return [DensityJob(name, *fit, args.data_root, args.whiten) for name in names for fit in fits]


def estimate_table(job: DensityJob) -> list[Row]:
    r"""Runs one fit and returns a row for each number of network evaluations."""
    name, *parts = load_table(job.name, job.root)
    dtype = torch.get_default_dtype()
    train, val, test = (torch.as_tensor(x).to(job.options.device, dtype) for x in parts)
    data = Parts(train, val, test)
    common = {"table": name, "p0": "whitened" if job.whiten else "standard"}
    data = data.whitened() if job.whiten else data
    return [common | row for row in _fit_and_judge(job.method, data, job.options)]


def image_jobs(args: argparse.Namespace) -> list[DensityJob]:
    r"""Lists the fits of the images suite; of `gaussian` nothing is fitted but the covariance.

    Raises:
        UserError: If a set or a method is unknown, a set has no such method, or too few images.
    """
    names = args.sets or ("digits",)
    check_names("--sets", names, ("digits", *FILES))
    # A likelihood needs a proposal, which only the few dimensions of the digits have.
    offered = {name: IMAGE_METHODS if name == "digits" else ("os-dre",) for name in names}
    for name, own in offered.items():
        check_names("--methods", args.methods or (), own, f" for the images {name}")
        levels_of(name, args.data_root)
    options = IMAGE_OPTIONS.replace(steps=10_000) if args.full else IMAGE_OPTIONS
    covariance = "gaussian", options.given(args.device, args.steps, args.lr)
    with_kernel = ("os-dre-likelihood", "os-dre")
    jobs = []
    for name, own in offered.items():
        fits = list_fits(args, args.methods or own, options, args.kernels or ["rq"], with_kernel)
        jobs += [DensityJob(name, *fit, args.data_root) for fit in (covariance, *fits)]
    return jobs


def estimate_image(job: DensityJob) -> list[Row]:
    r"""Runs one fit and returns its row."""
    data = dequantised(levels_of(job.name, job.root), job.options.device)
    dim = data.test.shape[1]
    if job.method == "gaussian":
        nll = -log_normal(data.test).mean().item() - data.log_volume
        row: Row = {"method": "Gaussian", "kernel": "-", "nll": nll}
        row |= {"log_mass_ais": 0.0, "log_mass_ais_error": None, "train_seconds": 0.0}
    else:
        (row,) = _fit_and_judge(job.method, data, job.options, proposed=job.name == "digits")
    unit = dim * math.log(2)
    entry = {
        "images": job.name,
        "dim": dim,
        "seed": job.options.seed,
        "method": row["method"],
        "kernel": row["kernel"],
        "bits": row["nll"] / unit,
        "log_mass": row["log_mass_ais"],
        "log_mass_error": row["log_mass_ais_error"],
        "normalised_bits": (row["nll"] + row["log_mass_ais"]) / unit,
        "train_seconds": row["train_seconds"],
    }
    return [entry]


def levels_of(name: str, root: Path | None = None) -> NDArray[np.float64]:
    r"""Returns the levels of the images of a set, in a random order that is always the same.

    Arguments:
        name: `digits`, or one of those that are read from files.
        root: The data root; None for the current folder.

    Returns:
        The levels, with shape :math:`(N, d)`.

    Raises:
        UserError: If a file is missing or of another size than the first, or there are too few
            distinct images for a covariance.
    """
    rng = np.random.default_rng(0)
    if name == "digits":
        from sklearn.datasets import load_digits

        return rng.permutation(load_digits().data)
    root = local(root or "")
    file, channels = FILES[name]
    source = root / "benchmark_imglist" / file
    names = read_list(source).names
    images: list[NDArray[np.float64]] = []
    size = -1
    for i in rng.permutation(len(names))[:MOST]:
        path = root / "images_classic" / names[i]
        try:
            with Image.open(path) as image:
                levels = np.asarray(image.convert(channels), dtype=np.float64).reshape(size)
        except (OSError, SyntaxError, ValueError) as error:  # the second of a broken PNG
            reason = f"cannot be read as an image of the first one's size: {one_line(error, None)}"
            raise UserError(f"{path}: {reason}.") from None
        images.append(levels)
        size = levels.size
    # The training part has to span all pixels, and the others must not be empty.
    size = max(size, 0)
    needed = max(10, math.ceil((size + 1) / TRAIN))
    distinct = len({hashlib.sha256(image.tobytes()).digest() for image in images})
    if distinct < needed:
        raise UserError(
            f"{source}: got {distinct} distinct images of {name}, expected at least {needed} "
            f"for {size} dimensions."
        )
    return np.stack(images)


def dequantised(levels: NDArray[np.float64], device: str = "cpu") -> Parts:
    r"""Returns the levels with noise, in coordinates without correlations, in three parts.

    Arguments:
        levels: The levels, with shape :math:`(N, d)`.
        device: Where the parts are to be.
    """
    rng = np.random.default_rng(0)
    cuts = round(TRAIN * len(levels)), round(0.9 * len(levels))
    train, val, test = np.split(levels, cuts)
    # Few images get several draws of the noise.
    copies = COPIES if len(levels) < MOST // COPIES else 1

    def noisy(x: NDArray[np.float64]) -> torch.Tensor:
        y = torch.as_tensor(x + rng.random(x.shape))
        return y.to(device, torch.get_default_dtype())

    return Parts(noisy(np.tile(train, (copies, 1))), noisy(val), noisy(test)).whitened()


def _fit_and_judge(
    name: str, data: Parts, options: FitOptions, proposed: bool = True
) -> list[Row]:
    r"""Fits a method and returns a row for each number of network evaluations.

    Without a proposal, as in hundreds of dimensions where none is worth having, there is no mass
    by importance sampling, and no likelihood can be fitted.
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
        started = time.monotonic()
        value = log_density(fit, data.test)
        seconds = time.monotonic() - started
        mass, check = masses(fit, proposal, dim, generator)
        nll = -value.mean().item() - data.log_volume
        rows.append(
            {
                "dim": dim,
                "method": method.label,
                "kernel": options.kernel if method.kernel else "-",
                "evaluations": evaluations,
                "seed": options.seed,
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
        )
    return rows


TABLES = Suite(
    "density-tabular",
    "Densities of tables (nats, standardised coordinates)",
    "`nll` is that of the density as it comes and no likelihood unless `log_mass` is 0. "
    "`normalised_nll` adds `log_mass`, or `log_mass_ais` where that is clearly larger or "
    "`effective` draws are few; it is a likelihood as far as these can be trusted.",
    table_jobs,
    estimate_table,
    partial(average, keys=("table", "dim", "p0", "method", "kernel", "evaluations")),
)
IMAGES = Suite(
    "density-images",
    "Densities of dequantised images (bits per dimension)",
    "`bits` is that of the density as it comes; `normalised_bits` adds `log_mass`, by annealing, "
    "in nats. With the exact mass it would bound the bits of the discrete images from above; "
    "annealing finds too little mass sooner than too much, so these bits are optimistic.",
    image_jobs,
    estimate_image,
    partial(average, keys=("images", "dim", "method", "kernel")),
)
SUITES = {"planar": planar.SUITE, "tabular": TABLES, "images": IMAGES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    r"""Adds the options of the subcommand `density`."""
    add_common_arguments(parser, "density")
    add = parser.add_argument
    add(
        "--suite",
        choices=tuple(SUITES),
        default="planar",
        help="what to run, see above (default: planar, which is 45 fits of 600 updates)",
    )
    add(
        "--sets",
        nargs="+",
        metavar="NAME",
        help="the sets (default: all planar ones, the tables colours and breast_cancer, digits)",
    )
    add(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="os-dre, along the path; os-dre-likelihood; direct-likelihood, without any time; "
        "dre-inf and d3re, solvers, not for images; for tables those of the command kl, too "
        "(default: all but those; for mnist and cifar10 there is os-dre alone)",
    )
    add(
        "--kernels",
        nargs="+",
        choices=tuple(KERNELS),
        help="temporal kernels (default: all for tables, else rq)",
    )
    add("--data-root", type=local, metavar="DIR", help="folder of the files (default: this one)")
    add("--whiten", action="store_true", help="tables: take p0 = N(0, I) in whitened coordinates")


def run(args: argparse.Namespace) -> int:
    r"""Runs a suite, prints its table and writes it.

    Raises:
        UserError: If a set, a table or a method is unknown or listed twice, the files of a table
            are absent, an option is none of the suite's, or other results are in the way.
    """
    check_arguments(args, {"whiten": ("tabular",)})
    suite = SUITES[args.suite]
    name = suite.name + ("-whitened" if args.whiten else "")
    run_suites(args, [(replace(suite, name=name), {})])
    return 0
