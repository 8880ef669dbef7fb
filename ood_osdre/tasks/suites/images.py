r"""The images suite: bits per dimension of an energy model on images, with its total mass.

A pixel has whole levels. Uniform noise on [0, 1) makes them continuous (dequantisation), and by
Jensen's inequality

.. math:: -\log_2 P(k) \leq -\mathbb{E}_u \log_2 p(k + u) \, ,

so the bits per dimension of the density :math:`p` bound those of the discrete images from above,
if :math:`p` integrates to one. The levels are mapped to :math:`z = L^{-1} (y - m)`, with the mean
and covariance :math:`L L^\top` of the training images; :math:`\log p(y) = \log r(z) +
\log p_0(z) - \log |L|` in nats, per pixel of :math:`d` and in bits that is :math:`/ (d \log 2)`. The total
mass is estimated by annealed importance sampling, which finds too little of it sooner than too
much: with that mass the bits are optimistic, and bound nothing.

`digits` are scikit-learn's handwritten digits, 8x8 pixels of 17 levels, averages of finer bitmaps.
`mnist` (28x28) and `cifar10` (32x32, three channels) are read from a data root in OpenOOD's
layout, at their own size; of files compressed as JPEG, as those of the data pack are, the numbers
are of *those* files and compare with nobody's. The covariance alone is a density too, and stands
in the table as what a ratio has to beat.
"""

__all__ = ["ImageJob", "estimate_image", "image_jobs"]

import argparse
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ...data.lists import read_list
from ...errors import UserError
from ..density import OPTIONS as REFERENCE_OPTIONS
from ..fit import FitOptions
from ..partition import log_normal
from ..rows import Parts
from .reports import Row, refuse_unknown
from .tabular import fit_and_judge

# Copies of every training image of a small set, with noise of their own.
COPIES = 8

OPTIONS = REFERENCE_OPTIONS.replace(features=256)
NAMES = ("os-dre-likelihood", "os-dre", "direct-likelihood")
# Lists of a data root and the channels of their files; of the ID list the training images are
# read.
FILES = {"mnist": ("cifar10/test_mnist.txt", "L"), "cifar10": ("cifar10/train_cifar10.txt", "RGB")}
SETS = ("digits", *FILES)
# Of many images so many, at random: their covariance takes gigabytes and minutes otherwise.
MOST = 20_000
# The training part; validation and test share the rest.
TRAIN = 0.8


@dataclass(frozen=True)
class ImageJob:
    r"""One fit, by a method; of `gaussian` nothing but the covariance."""

    name: str
    method: str
    options: FitOptions
    root: Path | None


def image_jobs(args: argparse.Namespace) -> list[ImageJob]:
    r"""Lists the fits of the suite.

    Raises:
        UserError: If a set or a method is unknown, a set has no such method, or too few images.
    """
    names = args.sets or ("digits",)
    refuse_unknown("--sets", names, SETS)
    refuse_unknown("--methods", args.methods or (), NAMES)
    for name in names:
        for method in args.methods or ():
            if method not in _offered(name):
                raise UserError(
                    f"--methods: got {method!r} for the images {name}, expected "
                    f"{' '.join(_offered(name))}; a likelihood needs a proposal."
                )
    for name in names:
        if name in FILES:
            if args.data_root is None:
                raise UserError(f"--data-root: needed for the images {name}.")
            levels_of(name, args.data_root)
    options = OPTIONS.replace(steps=10_000) if args.full else OPTIONS
    options = options.given(args.device, args.steps, args.lr)
    kernels: Any = args.kernels or ["rq"]
    jobs = []
    for name in names:
        jobs.append(ImageJob(name, "gaussian", options, args.data_root))
        jobs += [
            ImageJob(name, method, options.replace(seed=seed, kernel=kernel), args.data_root)
            for method in args.methods or _offered(name)
            for kernel in (kernels if method.startswith("os-dre") else kernels[:1])
            for seed in range(args.seed, args.seed + (args.seeds or 1))
        ]
    return jobs


def _offered(name: str) -> tuple[str, ...]:
    # A likelihood needs a proposal, which only the few dimensions of the digits have.
    return NAMES if name == "digits" else ("os-dre",)


def estimate_image(job: ImageJob) -> list[Row]:
    r"""Runs one fit and returns its row."""
    data = dequantised(levels_of(job.name, job.root), job.options.device)
    dim = data.test.shape[1]
    common = {"images": job.name, "dim": dim, "seed": job.options.seed}
    if job.method == "gaussian":
        nll = -log_normal(data.test).mean().item() - data.log_volume
        return [common | _row(dim, "Gaussian", "-", nll, 0.0, None, 0.0)]
    (row,) = fit_and_judge(job.method, data, job.options, proposed=job.name == "digits")
    return [
        common
        | _row(
            dim,
            row["method"],
            row["kernel"],
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
    nll: float,
    log_mass: float,
    error: float | None,
    seconds: float,
) -> Row:
    unit = dim * math.log(2)
    return {
        "method": method,
        "kernel": kernel,
        "bits": nll / unit,
        "log_mass": log_mass,
        "log_mass_error": error,
        "normalised_bits": (nll + log_mass) / unit,
        "train_seconds": seconds,
    }


def levels_of(name: str, root: Path | None = None) -> NDArray[np.float64]:
    r"""Returns the levels of the images of a set, in a random order that is always the same.

    Arguments:
        name: One of :data:`SETS`.
        root: The data root, for those that are read from files.

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
    assert root is not None
    path = _list(root, name)
    names = read_list(path).names
    if not names:
        raise UserError(f"{path}: an empty list, expected images of {name}.")
    chosen = [names[i] for i in rng.permutation(len(names))[:MOST]]
    images = []
    for file in chosen:
        path = root / "images_classic" / file
        try:
            with Image.open(path) as image:
                images.append(np.asarray(image.convert(FILES[name][1]), dtype=np.float64).ravel())
        except (OSError, SyntaxError) as error:  # the second of a broken PNG
            raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}.") from None
        if images[-1].shape != images[0].shape:
            raise UserError(f"{path}: got another size than {chosen[0]}, expected one for all.")
    # The training part has to span all pixels, and the others must not be empty.
    needed = max(10, math.ceil((images[0].size + 1) / TRAIN))
    distinct = len({hashlib.sha256(image.tobytes()).digest() for image in images})
    if distinct < needed:
        raise UserError(
            f"{_list(root, name)}: got {distinct} distinct images of {name}, expected at least "
            f"{needed} for {images[0].size} dimensions."
        )
    return np.stack(images)


def _list(root: Path, name: str) -> Path:
    return root / "benchmark_imglist" / FILES[name][0]


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
