r"""Fits a density ratio to two sources of vectors, by any method, with the one trainer.

:func:`fit_ratio` is what the tasks share: given `draw_pairs`, a function that draws a batch of
the reference :math:`p_0` and of the data :math:`p_1`, it builds the model and the objective of a
method, trains it with :class:`ood_osdre.training.trainer.Trainer` and returns a :class:`RatioFit`, whose
:meth:`RatioFit.log_ratio` estimates :math:`\log p_1(x) / p_0(x)` in nats. Expectations of that are
what tasks are after: :math:`\mathbb{E}_{p_1}[\log r]` is the Kullback-Leibler divergence of
:math:`p_1` from :math:`p_0`, or a mutual information.

All methods see the same batches, standardised alike (a map that leaves ratios unchanged), have
the same backbone and take the same number of steps. :data:`METHODS` lists them.

Checks of what a caller's function draws.
"""

__all__ = [
    "METHODS",
    "FitOptions",
    "Method",
    "RatioFit",
    "divergence",
    "fit_ratio",
]

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ..models.ratio import OneStepRatio, RatioModel
from ..objectives import Batch
from ..paths.build import SCHEDULES
from ..paths.gaussian import GaussianPath, Moments
from ..paths.noises import DDBINoise
from ..paths.times import UniformTimes
from ..sections import TrainingConfig
from ..training.batches import Batches, Pairs, Stream, step_generator
from ..training.distributed import find_device
from ..training.fit import fit
from .methods import METHODS, Context, FitOptions, Method
from .rows import checked_pairs

DrawPairs: TypeAlias = Callable[[int, Generator], tuple[Tensor, Tensor]]

# The number of pairs that fix the standardisation.
FIRST = 8192
# What a fit that is started from has to share.
ARCHITECTURE = ("backbone", "features", "depth", "block", "kernel", "size")


class Affine(NamedTuple):
    r"""An affine map of vectors, :math:`A (x - m)`.

    Attributes:
        mean: The vector :math:`m`, with shape :math:`(d)`.
        matrix: The matrix :math:`A`, with shape :math:`(d, d)`, or its diagonal, :math:`(d)`.
    """

    mean: Tensor
    matrix: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        r"""Maps points, with shape :math:`(B, d)`.

        Raises:
            ValueError: If they have another shape.
            TypeError: If they are no tensor.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"Points should be a tensor, got {type(x).__name__}.")
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise ValueError(
                f"Points should have shape (N, {len(self.mean)}), got {tuple(x.shape)}."
            )
        x = x.to(self.mean) - self.mean
        return x * self.matrix if self.matrix.ndim == 1 else x @ self.matrix.T


def pooled_affine(pairs: tuple[Tensor, Tensor], options: FitOptions) -> Affine:
    r"""Returns the map that standardises points of both sources together.

    Arguments:
        pairs: Points of :math:`p_0` and of :math:`p_1`, each with shape :math:`(B, d)`.
        options: Which map it is, `standardise`, and for what features.
    """
    x = torch.cat(pairs)
    dim = x.shape[1]
    if options.standardise == "no":
        return Affine(torch.zeros_like(x[0]), torch.ones_like(x[0]))
    scale = x.std(dim=0)
    # A coordinate that does not vary says nothing about the ratio.
    scale = torch.where(scale > 0, scale, 1.0)
    if options.standardise == "scale":
        return Affine(x.mean(dim=0), 1 / scale)

    correlation = torch.cov((x / scale).T.double()).reshape(dim, dim)
    if options.backbone == "block_quadratic":
        block = torch.arange(dim, device=x.device) // options.block
        correlation = torch.where(block == block[:, None], correlation, 0.0)
    values, vectors = torch.linalg.eigh(correlation)
    root = vectors / values.clamp(min=1e-6).sqrt() @ vectors.T
    return Affine(x.mean(dim=0), (root / scale).to(x))


@dataclass
class RatioFit:
    r"""A fitted ratio.

    Attributes:
        method: The method.
        model: The trained model, of standardised points.
        options: The options it was fitted with.
        standardise: The invertible affine map to the points that the model takes.
        seconds: The training time, without that of `watch`.
        history: The validations, if there were any.
    """

    method: Method
    model: RatioModel
    options: FitOptions
    standardise: Affine
    seconds: float
    history: list[dict[str, float]]

    @property
    def parameters(self) -> int:
        r"""The number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @torch.no_grad()
    def log_ratio(self, x: Tensor, batch_size: int = 8192) -> Tensor:
        r"""Returns the log-ratio :math:`\log p_1(x) / p_0(x)`.

        Arguments:
            x: The points, with shape :math:`(N, d)`.
            batch_size: The number of points evaluated at once.

        Returns:
            The log-ratios, in nats (larger = more like :math:`p_1`), with shape :math:`(N)`.

        Raises:
            ValueError: If the points are of another dimension.
            TypeError: If they are no tensor.
        """
        if not isinstance(x, Tensor):
            raise TypeError(f"Points should be a tensor, got {type(x).__name__}.")
        parts = [self.model.log_ratio(self.standardise(part)) for part in x.split(batch_size)]
        return torch.cat(parts)


@torch.inference_mode(False)
@torch.enable_grad()
def fit_ratio(
    method: str | Method,
    draw_pairs: DrawPairs,
    dim: int,
    options: FitOptions | None = None,
    initial: RatioFit | None = None,
    held_out: tuple[Tensor, Tensor] | None = None,
    watch: Callable[[RatioFit], Mapping[str, float]] | None = None,
    progress: bool = False,
) -> RatioFit:
    r"""Fits a ratio, with gradients whatever the caller's mode.

    Arguments:
        method: One of the keys of :data:`METHODS`, or a method of your own.
        draw_pairs: Draws points :math:`x_0 \sim p_0` and :math:`x_1 \sim p_1`, each with shape
            :math:`(B, d)`, given :math:`B` and a generator, on the generator's device. They are
            used in the default type of floating point.
        dim: The dimension :math:`d`.
        options: The options.
        initial: A fit by the same method and of the same architecture to start from; its
            standardisation stays.
        held_out: Points of :math:`p_0` and of :math:`p_1` that are not drawn in training, as many
            of each. If given, the step with the least loss on them is kept.
        watch: Measures the fit at twenty steps on the way, for its history.
        progress: Whether to show a progress bar.

    Raises:
        UserError: If drawn points or the loss are not finite, or the device is not available.
        ValueError: If the method is unknown, points are not as described, or `initial` is a fit of
            another kind.
        TypeError: If an argument is of another type.

    Example:
        >>> def draw_pairs(n, generator):
        ...     x_0, x_1 = torch.randn(2, n, 1, generator=generator)
        ...     return x_0, x_1 + 1
        >>> fit = fit_ratio("os-dre", draw_pairs, 1, FitOptions(steps=10, backbone="quadratic"))
        >>> fit.log_ratio(torch.zeros(5, 1)).shape
        torch.Size([5])
    """
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"'method' should be one of {tuple(METHODS)}, got {method!r}.")
        method = METHODS[method]
    options = FitOptions() if options is None else options
    _check_kind(method, dim, options, initial)
    device = find_device(options.device)

    generator = step_generator(options.seed, Stream.MOMENTS, 0, device)
    pairs = checked_pairs("draw_pairs", draw_pairs(FIRST, generator), dim, FIRST, generator.device)
    affine = pooled_affine(pairs, options) if initial is None else initial.standardise
    x_0, x_1 = (affine(x) for x in pairs)
    noise = DDBINoise(options.gamma2, options.eps)
    path = GaussianPath(SCHEDULES[options.schedule](), noise)
    context = Context(dim, options, path, Moments.of(x_0, x_1))
    times = UniformTimes(*path.t_range)
    batches = _DrawnBatches(draw_pairs, affine, context.moments, options)
    batches.times = times

    model = copy.deepcopy(initial.model) if initial else _build(method, context)
    model = model.to(device).requires_grad_(True)
    if isinstance(model, OneStepRatio):
        model.basis.requires_grad_(options.learnable)
    objective = method.objective(context).to(device)
    validation = None
    if held_out is not None:
        held_out = checked_pairs("held_out", held_out, dim)
        generator = step_generator(options.seed, Stream.HELD_OUT, 0, device)
        validation = batches.completed(batches.standardised(held_out), generator)

    start = RatioFit(method, model, options, affine, 0.0, [])
    measure = _Validation(start, objective, validation, watch)
    fitted = fit(
        model,
        lambda moments, model: (times, objective),
        batches,
        _training(options),
        measure if validation is not None or watch is not None else None,
        select=None if validation is None else "held_out",
        progress=progress,
    )
    outcome = fitted.outcome
    if not outcome.finished:
        raise KeyboardInterrupt(outcome.reason)
    seconds = outcome.seconds - measure.watching
    return replace(start, model=fitted.model, seconds=seconds, history=outcome.history)


class _DrawnBatches(Batches):
    r"""Batches that a function draws, standardised, with a probe beside the noise."""

    def __init__(
        self, draw_pairs: DrawPairs, affine: Affine, moments: Moments, options: FitOptions
    ) -> None:
        super().__init__(options.batch_size, options.seed, options.device)
        self.draw_pairs, self.affine, self._moments = draw_pairs, affine, moments

    def moments(self) -> Moments:
        return self._moments

    def pairs(self, step: int, generator: Generator) -> Pairs:
        return self.standardised(self.draw_pairs(self.batch_size, generator))

    def standardised(self, pairs: tuple[Tensor, Tensor]) -> Pairs:
        return Pairs(*(self.affine(x.detach()) for x in pairs))

    def completed(self, pairs: Pairs, generator: Generator) -> Batch:
        x_0, x_1, _ = pairs
        t = self.times.sample(len(x_0), generator)
        noise, probe = _normal((2, *x_0.shape), generator, x_0)
        return Batch(x_0, x_1, t.to(x_0), noise, probe=probe)


@dataclass
class _Validation:
    r"""What a fit measures on the way: its loss on held-out pairs, and what a caller watches.

    `watching` counts the seconds of the latter, which are none of training's.
    """

    fit: RatioFit
    objective: nn.Module
    held_out: Batch | None
    watch: Callable[[RatioFit], Mapping[str, float]] | None
    watching: float = 0.0

    def __call__(self, model: RatioModel) -> dict[str, float]:
        numbers = {}
        if self.held_out is not None:
            # Not without gradients: a rival differentiates its network in the time.
            loss = self.objective(model, self.held_out)["total"]
            numbers["held_out"] = -loss.detach().mean().item()
        if self.watch is not None:
            started = time.monotonic()
            numbers |= self.watch(replace(self.fit, model=model))
            self.watching += time.monotonic() - started
        return numbers


def divergence(fit: RatioFit, x_0: Tensor, x_1: Tensor) -> float:
    r"""Estimates the Kullback-Leibler divergence of :math:`p_1` from :math:`p_0`.

    For a method that estimates the log-ratio :math:`f` this is its mean over :math:`p_1`. The
    variational methods are defined by a lower bound, and the bound is what they report:

    - NWJ: :math:`\mathbb{E}_{p_1}[f] - \mathbb{E}_{p_0}[e^f] + 1`,
    - MINE: :math:`\mathbb{E}_{p_1}[f] - \log \mathbb{E}_{p_0}[e^f]` (Donsker and Varadhan),
    - InfoNCE: :math:`\log (B + 1) - \mathbb{E}[\log (1 + e^{-f_1} \sum e^{f_0})]` with the
      :math:`B` reference points of a training batch; at most :math:`\log (B + 1)`.

    Arguments:
        fit: The fitted ratio.
        x_0: Held-out points of :math:`p_0`, with shape :math:`(N, d)`. Only bounds use them.
        x_1: Held-out points of :math:`p_1`, with shape :math:`(N, d)`.

    Returns:
        The divergence, in nats.

    Raises:
        ValueError: If there are no points, or they are of another dimension.
    """
    bound = fit.method.bound
    if not len(x_1) or (bound != "mean" and not len(x_0)):
        raise ValueError(f"Expected held-out points of both, got {len(x_0)} and {len(x_1)}.")
    f_1 = fit.log_ratio(x_1).double()
    if bound == "mean":
        return f_1.mean().item()
    f_0 = fit.log_ratio(x_0).double()
    if bound == "nwj":
        return (f_1.mean() - f_0.exp().mean() + 1).item()
    if bound == "dv":
        return (f_1.mean() - f_0.logsumexp(dim=0) + math.log(len(f_0))).item()
    size = min(fit.options.batch_size, len(f_0), len(f_1))
    batches = zip(f_0.split(size), f_1.split(size), strict=False)
    full = [(b_0, b_1) for b_0, b_1 in batches if len(b_0) == len(b_1) == size]
    losses = [F.softplus(b_0.logsumexp(dim=0) - b_1) for b_0, b_1 in full]
    return math.log(size + 1) - torch.cat(losses).mean().item()


def _check_kind(method: Method, dim: int, options: FitOptions, initial: RatioFit | None) -> None:
    r"""Refuses what is no method, dimension or options, and an `initial` fit of another kind."""
    if not isinstance(method, Method):
        raise TypeError(f"'method' should be a name or a Method, got {method!r}.")
    if not isinstance(options, FitOptions):
        raise TypeError(f"'options' should be FitOptions, got {type(options).__name__}.")
    if not isinstance(dim, int):
        raise TypeError(f"'dim' should be a whole number, got {dim!r}.")
    if dim < 1:
        raise ValueError(f"'dim' should be at least 1, got {dim}.")
    if initial is None:
        return
    if not isinstance(initial, RatioFit):
        raise TypeError(f"'initial' should be a RatioFit, got {type(initial).__name__}.")
    if initial.method != method:
        raise ValueError(f"'initial' is a fit by {initial.method.label}, not by {method.label}.")
    if len(initial.standardise.mean) != dim:
        raise ValueError(
            f"'initial' is a fit in {len(initial.standardise.mean)} dimensions, not in {dim}."
        )
    for name in ARCHITECTURE:
        old, new = getattr(initial.options, name), getattr(options, name)
        if old != new:
            raise ValueError(f"'initial' is a fit with {name} {old!r}, not {new!r}.")


def _build(method: Method, context: Context) -> RatioModel:
    with torch.random.fork_rng():
        torch.manual_seed(context.options.seed)
        return method.model(context)


def _training(options: FitOptions) -> TrainingConfig:
    o = options
    return TrainingConfig.short(o.steps).replace(
        batch_size=o.batch_size,
        lr=o.lr,
        weight_decay=o.weight_decay,
        clip=o.clip,
        ema=o.ema,
        seed=o.seed,
    )


def _normal(shape: tuple[int, ...], generator: Generator, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device, dtype=like.dtype)
