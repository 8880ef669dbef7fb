r"""The images suite: bits per dimension of an energy model on images, with its total mass.

A pixel has whole levels. Uniform noise on [0, 1) makes them continuous (dequantisation), and by
Jensen's inequality

.. math:: -\log_2 P(k) \leq -\mathbb{E}_u \log_2 p(k + u) \, ,

so the bits per dimension of the density :math:`p` bound those of the discrete images from above, if
:math:`p` integrates to one. The levels are mapped to :math:`z = L^{-1} (y - m)`, with the mean and
covariance :math:`L L^\top` of the training images; :math:`\log p(y) = \log r(z) + \log p_0(z) - \log
|L|` in nats, per pixel of :math:`d` and in bits that is :math:`/ (d \log 2)`. The total mass is
estimated by annealed importance sampling.

The images are scikit-learn's handwritten digits, 8x8 pixels of 17 levels. They are averages of
finer bitmaps. The covariance alone is a density too, and stands in the table as what a ratio has to
beat.
"""

__all__ = ["ImageJob", "estimate_image", "image_jobs"]

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .estimators import FitOptions
from .partition import log_normal
from .reports import Row
from .tables_density import Whitened, fit_and_judge, whitened

# Copies of every training image, with noise of their own.
COPIES = 8

OPTIONS = FitOptions(steps=600, standardise="no", lr=1e-3, features=256)
NAMES = ("os-dre-likelihood", "os-dre", "direct-likelihood")


@dataclass(frozen=True)
class ImageJob:
    r"""One fit, by a method; of `gaussian` nothing but the covariance."""

    method: str
    options: FitOptions


def image_jobs(args: argparse.Namespace) -> list[ImageJob]:
    r"""Lists the fits of the suite.

    Raises:
        UserError: If a set or a method is unknown.
    """
    for option, given, known in (
        ("--sets", args.sets, ("digits",)),
        ("--methods", args.methods, NAMES),
    ):
        for name in given or ():
            if name not in known:
                raise UserError(f"{option}: got {name!r}, expected some of {', '.join(known)}.")
    steps = args.steps or (10_000 if args.full else OPTIONS.steps)
    options = replace(OPTIONS, device=args.device, steps=steps)
    kernels: Any = args.kernels or ["rq"]
    return [ImageJob("gaussian", options)] + [
        ImageJob(method, replace(options, seed=seed, kernel=kernel))
        for method in args.methods or NAMES
        for kernel in (kernels if method.startswith("os-dre") else kernels[:1])
        for seed in range(args.seed, args.seed + (args.seeds or 1))
    ]


def estimate_image(job: ImageJob) -> list[Row]:
    r"""Runs one fit and returns its row."""
    data = dequantised_digits(job.options.device)
    dim = data.test.shape[1]
    if job.method == "gaussian":
        nll = -log_normal(data.test).mean().item() - data.log_volume
        return [_row(dim, "Gaussian", "-", job.options.seed, nll, 0.0, None, 0.0)]
    (row,) = fit_and_judge(job.method, data, job.options)
    return [
        _row(
            dim,
            row["method"],
            row["kernel"],
            row["seed"],
            row["nll"],
            row["log_mass_ais"],
            row["log_mass_ais_error"],
            row["train_seconds"],
        )
    ]


def _row(
    dim: int,
    method: str,
    kernel: str,
    seed: int,
    nll: float,
    log_mass: float,
    error: float | None,
    seconds: float,
) -> Row:
    unit = dim * math.log(2)
    return {
        "images": "digits",
        "dim": dim,
        "method": method,
        "kernel": kernel,
        "seed": seed,
        "bits": nll / unit,
        "log_mass": log_mass,
        "log_mass_error": error,
        "normalised_bits": (nll + log_mass) / unit,
        "train_seconds": seconds,
    }


def dequantised_digits(device: str = "cpu") -> Whitened:
    r"""Returns the digits' levels with noise, in coordinates without correlations."""
    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    levels = rng.permutation(load_digits().data)
    cuts = round(0.8 * len(levels)), round(0.9 * len(levels))
    train, val, test = np.split(levels, cuts)

    def noisy(x: np.ndarray) -> torch.Tensor:
        y = torch.as_tensor(x + rng.random(x.shape))
        return y.to(device, torch.get_default_dtype())

    return whitened(noisy(np.tile(train, (COPIES, 1))), noisy(val), noisy(test))
