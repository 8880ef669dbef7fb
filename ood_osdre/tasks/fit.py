r"""Fits a density ratio to two sources of vectors, by any method.

:func:`fit_ratio` is what the tasks share. Given `draw_pairs`, a function that draws a batch of the
reference :math:`p_0` and of the data :math:`p_1`, it builds the model and the objective of a method
(:data:`METHODS` lists them), trains it with :func:`ood_osdre.training.fit.fit` and returns a
:class:`RatioFit`, whose :meth:`RatioFit.log_ratio` estimates :math:`\log p_1(x) / p_0(x)` in nats.
Expectations of that are what tasks are after: :math:`\mathbb{E}_{p_1}[\log r]` is the
Kullback-Leibler divergence of :math:`p_1` from :math:`p_0`, or a mutual information.

All methods see the same batches, standardised alike (a map that leaves ratios unchanged), have
the same backbone and take the same number of steps.
"""

__all__ = ["METHODS", "FitOptions", "Method", "RatioFit", "divergence", "fit_ratio", "log_density"]

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..models import OneStepRatio, RatioModel
from ..objectives import Batch, log_normal
from ..paths import DDBINoise, GaussianPath, UniformTimes
from ..sections import TrainingConfig
from ..training.batches import Batches, Pairs, Stream, step_generator
from ..training.build import SCHEDULES
from ..training.fit import fit
from .methods import METHODS, Context, FitOptions, Method, OptionsLike, check_method, fit_options
from .rows import Affine, check_pairs

DrawPairs: TypeAlias = Callable[[int, Generator], tuple[Tensor, Tensor]]

# The number of pairs that fix the standardisation.
FIRST = 8192
# What a fit that is started from has to share.
ARCHITECTURE = ("backbone", "features", "depth", "block", "kernel", "size")


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
            UserError: If the points are no tensor of this shape.
        """
        dim = len(self.standardise.mean)
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dim:
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UserError(f"x: got {found}, expected a tensor with shape (N, {dim}).")
        parts = [self.model.log_ratio(self.standardise(part)) for part in x.split(batch_size)]
        return torch.cat(parts)


@torch.inference_mode(False)
@torch.enable_grad()
def fit_ratio(
    method: str | Method,
    draw_pairs: DrawPairs,
    dim: int,
    options: OptionsLike = None,
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
            used in the default type of floating point. The first draw alone is checked.
        dim: The dimension :math:`d`.
        options: The options, or those that differ from the defaults by name.
        initial: A fit by the same method and of the same architecture to start from; its
            standardisation stays.
        held_out: Points of :math:`p_0` and of :math:`p_1` that are not drawn in training, as many
            of each. If given, the step with the least loss on them is kept.
        watch: Measures the fit at twenty steps on the way, for its history.
        progress: Whether to show a progress bar.

    Raises:
        UserError: If the method or an option is unknown, points are not as described or not
            finite, `initial` is a fit of another kind, or the loss is not finite.

    Example:
        >>> def draw_pairs(n, generator):
        ...     x_0, x_1 = torch.randn(2, n, 1, generator=generator)
        ...     return x_0, x_1 + 1
        >>> fit = fit_ratio("os-dre", draw_pairs, 1, {"steps": 10, "backbone": "quadratic"})
        >>> fit.log_ratio(torch.zeros(5, 1)).shape
        torch.Size([5])
    """
    if not isinstance(method, Method):
        check_method(method, METHODS)
        method = METHODS[method]
    options = fit_options(options, FitOptions())
    if initial is not None:
        _check_initial(initial, method, dim, options)
    affine = None if initial is None else initial.standardise
    batches = _DrawnBatches(draw_pairs, dim, options, affine)
    path = GaussianPath(SCHEDULES[options.schedule](), DDBINoise(options.gamma2, options.eps))
    batches.times = times = UniformTimes(*path.t_range)
    context = Context(dim, options, path, batches.moments())
    model = copy.deepcopy(initial.model) if initial else _build(method, context)
    model = model.to(options.device).requires_grad_(True)
    if isinstance(model, OneStepRatio):
        model.basis.requires_grad_(options.learnable)
    objective = method.objective(context).to(options.device)

    untrained = RatioFit(method, model, options, batches.affine, 0.0, [])
    validation = None if held_out is None else batches.held_out(held_out, dim)
    measure = _Measure(untrained, objective, validation, watch)
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
    return replace(untrained, model=fitted.model, seconds=seconds, history=outcome.history)


def _check_initial(initial: RatioFit, method: Method, dim: int, options: FitOptions) -> None:
    r"""Refuses a fit of another kind to start from."""
    pairs = [
        ("method", initial.method, method),
        ("dim", len(initial.standardise.mean), dim),
        *((n, getattr(initial.options, n), getattr(options, n)) for n in ARCHITECTURE),
    ]
    for name, found, expected in pairs:
        if found != expected:
            found, expected = (getattr(v, "label", v) for v in (found, expected))
            raise UserError(f"initial: got a fit with {name} {found}, expected {expected}.")


def _build(method: Method, context: Context) -> RatioModel:
    with torch.random.fork_rng():
        torch.manual_seed(context.options.seed)
        return method.model(context)


def _training(options: FitOptions) -> TrainingConfig:
    names = ("batch_size", "lr", "weight_decay", "clip", "ema", "seed")
    shared = {name: getattr(options, name) for name in names}
    return TrainingConfig.short(options.steps).replace(**shared)


class _DrawnBatches(Batches):
    r"""Batches that a function draws, standardised, with a probe beside the noise.

    The first draw is checked, and fixes the standardisation unless there is one already.
    """

    def __init__(
        self, draw_pairs: DrawPairs, dim: int, options: FitOptions, affine: Affine | None
    ) -> None:
        super().__init__(options.batch_size, options.seed, options.device)
        generator = step_generator(options.seed, Stream.MOMENTS, 0, options.device)
        first = draw_pairs(FIRST, generator)
        first = check_pairs("draw_pairs", first, dim, FIRST, generator.device)
        if affine is None:
            block = options.block if options.backbone == "block_quadratic" else None
            affine = Affine.of(torch.cat(first), options.standardise, block)
        self.draw_pairs, self.affine = draw_pairs, affine
        self._ends = affine(first[0]), affine(first[1])

    def ends(self) -> tuple[Tensor, Tensor]:
        return self._ends

    def pairs(self, step: int, generator: Generator) -> Pairs:
        return self._standardised(self.draw_pairs(self.batch_size, generator))

    def held_out(self, pairs: tuple[Tensor, Tensor], dim: int) -> Batch:
        generator = step_generator(self.seed, Stream.HELD_OUT, 0, self.device)
        pairs = check_pairs("held_out", pairs, dim)
        return self.completed(self._standardised(pairs), generator)

    def completed(self, pairs: Pairs, generator: Generator) -> Batch:
        x_0, x_1, _ = pairs
        t = self.times.sample(len(x_0), generator)
        noise, probe = torch.randn(
            (2, *x_0.shape), generator=generator, device=x_0.device, dtype=x_0.dtype
        )
        return Batch(x_0, x_1, t.to(x_0), noise, probe=probe)

    def _standardised(self, pairs: tuple[Tensor, Tensor]) -> Pairs:
        return Pairs(*(self.affine(x.detach()) for x in pairs))


@dataclass
class _Measure:
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
            # Not without gradients: a baseline differentiates its network in the time.
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
        UserError: If there are no points, or they are of another dimension.
    """
    bound = fit.method.bound
    if not len(x_1) or (bound != "mean" and not len(x_0)):
        raise UserError(f"held-out points: got {len(x_0)} and {len(x_1)}, expected some of both.")
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


def log_density(fit: RatioFit, x: Tensor) -> Tensor:
    r"""Returns :math:`\log \hat r + \log p_0` of a ratio to :math:`p_0 = \mathcal{N}(0, I)`.

    It is in nats and double precision, not normalised; `x` has shape :math:`(N, d)`.
    """
    return fit.log_ratio(x).double() + log_normal(x)
