r"""The fits of the mutual-information command: which there are, and their options.

Without `--full` they take minutes; with it, they are the paper's grid and more.
"""

__all__ = ["JOBS", "QUADRATIC", "Job", "gaussian_jobs", "pathological_jobs"]

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ..bases import KERNELS
from ..errors import UserError
from .methods import METHODS, FitOptions

Backbone: TypeAlias = Literal["mlp", "quadratic", "block_quadratic"]

# Dimensions and mutual information of the Gaussian tasks.
GAUSSIANS = ((40, 10.0), (80, 20.0), (120, 30.0), (160, 40.0))
LARGE = ((320, 80.0), (640, 160.0))
# Those of the default, which takes minutes.
FEW = (40, 160)
# A thin floor: both ends are full-dimensional Gaussians, so that nothing diverges without one.
QUADRATIC = FitOptions(
    backbone="block_quadratic", standardise="whiten", lr=1.0, steps=2000, batch_size=512, eps=1e-4
)
# Stochastic gradients on as many coefficients as there are features times atoms: the error falls
# with the number of steps, and needs more of them than in proportion to the dimension.
LARGE_STEPS = {320: 4000, 640: 12_000}
# Peak learning rates on quadratic features, each the best of a grid on a seed of its own.
RATES = {"dre-inf": 3e-3, "d3re": 3e-3, "logistic": 0.03, "nwj": 0.01, "infonce": 0.03}
PERCEPTRON = FitOptions(features=256, depth=3, lr=2e-3, standardise="whiten", steps=2000)

GAUSSIAN_METHODS = ("os-dre", "dre-inf", "d3re", "logistic", "nwj", "infonce")

SCALARS = FitOptions(features=64, depth=3, lr=2e-3, steps=1000, batch_size=512, eps=1e-4)
LEVELS = {
    "gauss": (0.0, 0.5, 0.9),
    "half-cube": (0.5, 0.9),
    "asinh": (0.5, 0.9),
    "additive-noise": (0.2, 0.9),
    "gamma-exp": (0.5, 1.8),
}
FULL_LEVELS = {
    "gauss": (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95),
    "half-cube": (0.2, 0.4, 0.6, 0.8, 0.9),
    "half-cube-both": (0.2, 0.4, 0.6, 0.8, 0.9),
    "asinh": (0.2, 0.4, 0.6, 0.8, 0.9),
    "additive-noise": (0.1, 0.2, 0.4, 0.6, 0.9),
    "gamma-exp": (0.5, 1.0, 1.8, 3.0, 5.0),
}
SCALAR_METHODS = ("os-dre", "os-dre-logistic", "logistic", "nwj", "infonce", "mine", "ksg")


@dataclass(frozen=True)
class Job:
    r"""One fit: of `gaussian-pairs` (`dim`, `level` nats) or of a family of scalars at a level."""

    family: str
    dim: int
    level: float
    method: str
    options: FitOptions
    held_out: int


def gaussian_jobs(args: argparse.Namespace) -> list[Job]:
    r"""Lists the fits of the Gaussian suite.

    Raises:
        UserError: If a dimension is not among its tasks.
    """
    known = dict(GAUSSIANS + LARGE)
    dims = args.dims or list(known if args.full else FEW)
    unknown = [d for d in dims if d not in known]
    if unknown:
        raise UserError(
            f"--dims: got {unknown[0]}, expected some of {', '.join(map(str, known))}."
        )
    seeds = args.seeds or (3 if args.full else 1)
    methods = args.methods or GAUSSIAN_METHODS
    jobs = []
    for dim in dims:
        for backbone in args.backbones or ("block_quadratic", "mlp"):
            few = backbone == "mlp" and not (args.backbones or args.full)
            for method in (m for m in methods if m != "ksg" and (m == "os-dre" or not few)):
                # An MLP says nothing about kernels that the features that can fit do not.
                kernels = args.kernels or (["rq"] if backbone == "mlp" else list(KERNELS))
                single = backbone == "mlp" or not METHODS[method].kernel
                for kernel in kernels[:1] if single else kernels:
                    for seed in range(args.seed, args.seed + seeds):
                        options = _gaussian_options(args, method, backbone, dim)
                        options = replace(options, seed=seed, kernel=kernel)
                        jobs.append(
                            Job("gaussian-pairs", dim, known[dim], method, options, 100_000)
                        )
    return jobs


def _gaussian_options(
    args: argparse.Namespace, method: str, backbone: Backbone, dim: int
) -> FitOptions:
    if backbone == "mlp":
        base = replace(PERCEPTRON, steps=20_000) if args.full else PERCEPTRON
    else:
        rate, steps = RATES.get(method, QUADRATIC.lr), LARGE_STEPS.get(dim, QUADRATIC.steps)
        base = replace(QUADRATIC, backbone=backbone, lr=rate, steps=steps)
    return base.given(args.device, args.steps, args.lr)


def pathological_jobs(args: argparse.Namespace) -> list[Job]:
    r"""Lists the fits of the pathological suite.

    Raises:
        UserError: If it is asked for alone, with options that only Gaussians have.
    """
    for option in ("dims", "backbones"):
        if args.suite == "pathological" and getattr(args, option):
            raise UserError(
                f"--{option}: the pathological pairs are scalars on an MLP; expected it with "
                "--suite gaussian or all."
            )
    seeds = args.seeds or (5 if args.full else 1)
    methods = args.methods or [*SCALAR_METHODS, *(["dre-inf", "d3re"] if args.full else [])]
    options = replace(SCALARS, steps=4000) if args.full else SCALARS
    options = options.given(args.device, args.steps, args.lr)
    kernels = args.kernels or (list(KERNELS) if args.full else ["rq"])
    with_kernel = [m for m in methods if m != "ksg" and METHODS[m].kernel]
    return [
        Job(family, 2, level, method, replace(options, seed=seed, kernel=kernel), 20_000)
        for family, levels in (FULL_LEVELS if args.full else LEVELS).items()
        for level in levels
        for method in methods
        for kernel in (kernels if method in with_kernel else kernels[:1])
        for seed in range(args.seed, args.seed + seeds)
    ]


#: The fits of a suite, of the arguments.
JOBS: dict[str, Callable[[argparse.Namespace], list[Job]]] = {
    "gaussian": gaussian_jobs,
    "pathological": pathological_jobs,
}
