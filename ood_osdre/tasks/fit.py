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

__all__ = [
    "METHODS",
    "DrawPairs",
    "FitOptions",
    "Method",
    "RatioFit",
    "divergence",
    "empty_model",
    "fit_ratio",
    "log_density",
]

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..models import OneStepRatio, RatioModel
from ..objectives import Batch, log_normal
from ..paths import DDBINoise, GaussianPath, Moments, UniformTimes
from ..sections import TrainingConfig
from ..training.build import SCHEDULES
from ..training.fit import fit
from .draws import DrawnBatches, DrawPairs
from .methods import (
    METHODS,
    RATES,
    Context,
    FitOptions,
    Method,
    OptionsLike,
    check_method,
    fit_options,
)
from .rows import Affine

log = logging.getLogger(__name__)

# Points of each source that say how a fit ends. One whose log-ratio varies less than FLAT nats has
# collapsed; one that moved by more than the share MOVING of what it tells apart, or of half a nat,
# in the second half of its steps has not arrived: rates fall, so that little moves later.
PROBED, FLAT, MOVING = 512, 1e-3, 0.1
# Of fewer steps no fit is expected to arrive.
LEAST_STEPS = 50
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

    def __repr__(self) -> str:
        return f"RatioFit({self.method.label}, {len(self.standardise.mean)} columns)"

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

    A fit whose log-ratio is a constant, or still moves when its steps end, is warned of.

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
    batches = DrawnBatches(draw_pairs, dim, options, affine)
    path = _path(options)
    batches.times = times = UniformTimes(*path.t_range)
    context = Context(dim, options, path, batches.moments())
    model = copy.deepcopy(initial.model) if initial else _build(method, context)
    model = model.to(options.device).requires_grad_(True)
    if isinstance(model, OneStepRatio):
        model.basis.requires_grad_(options.learnable)
    objective = method.objective(context).to(options.device)

    untrained = RatioFit(method, model, options, batches.affine, 0.0, [])
    validation = None if held_out is None else batches.held_out(held_out, dim)
    ends = torch.stack([x[:PROBED] for x in batches.ends()])
    measure = _Measure(untrained, objective, validation, watch, ends)
    fitted = fit(
        model,
        lambda moments, model: (times, objective),
        batches,
        _training(options),
        measure,
        select=None if validation is None else "held_out",
        progress=progress,
        rehearsed=False,
    )
    outcome = fitted.outcome
    if not outcome.finished:
        raise KeyboardInterrupt(outcome.reason)
    seconds = outcome.seconds - measure.watching
    _warn_of_end(fitted.model, ends, options, outcome.history, outcome.best)
    watched = validation is not None or watch is not None
    history = outcome.history if watched else []
    return replace(untrained, model=fitted.model, seconds=seconds, history=history)


@torch.no_grad()
def _warn_of_end(
    model: RatioModel,
    ends: Tensor,
    options: FitOptions,
    history: list[dict[str, float]],
    best: Mapping[str, float] | None,
) -> None:
    r"""Warns of a log-ratio that is a constant, or that the last steps still moved.

    Arguments:
        model: The model that is kept.
        ends: Standardised points of either source, with shape :math:`(2, N, d)`.
        options: The options.
        history: The validations.
        best: The one whose model is kept.
    """
    spread = model.log_ratio(ends.flatten(0, 1)).std().item()
    if spread < FLAT and options.steps >= LEAST_STEPS:
        log.warning(
            "fit: the log-ratio is a constant up to %.1g nats: nothing was learnt. If the sources "
            "do differ, the rate %g does not suit the backbone %s (%g does, as a rule), or the "
            "%d steps are too few.",
            *(spread, options.lr, options.backbone, RATES[options.backbone], options.steps),
        )
        return
    steps = options.steps
    before = [h["apart"] for h in history if h["step"] <= steps / 2]
    if steps < LEAST_STEPS or not before or (best or history[-1])["step"] < steps:
        return
    first, last = before[-1], history[-1]["apart"]
    if abs(last - first) > MOVING * max(abs(last), 0.5):
        log.warning(
            "fit: still moving when its %d steps ended: the log-ratio told the sources apart by "
            "%.2f nats half-way, by %.2f at the end; try more steps.",
            *(steps, first, last),
        )


def _check_initial(initial: RatioFit, method: Method, dim: int, options: FitOptions) -> None:
    r"""Refuses a fit of another kind to start from."""
    pairs = [("method", initial.method, method), ("dim", len(initial.standardise.mean), dim)]
    pairs += [(n, getattr(initial.options, n), getattr(options, n)) for n in ARCHITECTURE]
    for name, found, expected in pairs:
        if found != expected:
            found, expected = (getattr(v, "label", v) for v in (found, expected))
            raise UserError(f"initial: got a fit with {name} {found}, expected {expected}.")


def _path(options: FitOptions) -> GaussianPath:
    return GaussianPath(SCHEDULES[options.schedule](), DDBINoise(options.gamma2, options.eps))


def empty_model(method: Method, dim: int, options: FitOptions) -> RatioModel:
    r"""Returns the untrained model of a method, to put weights into."""
    # Objectives alone look at moments.
    return _build(method, Context(dim, options, _path(options), Moments(dim, 1.0, 0.0, 1.0)))


def _build(method: Method, context: Context) -> RatioModel:
    with torch.random.fork_rng():
        torch.manual_seed(context.options.seed)
        return method.model(context)


def _training(options: FitOptions) -> TrainingConfig:
    names = ("batch_size", "lr", "weight_decay", "clip", "ema", "seed")
    shared = {name: getattr(options, name) for name in names}
    return TrainingConfig.short(options.steps).replace(**shared)


@dataclass
class _Measure:
    r"""What a fit measures on the way: its loss on held-out pairs, and what a caller watches.

    `apart` is by how much the log-ratio differs between the means of both sources, in nats, on
    `ends`. `watching` counts the seconds of that and of the caller, which are none of training's.
    """

    fit: RatioFit
    objective: nn.Module
    held_out: Batch | None
    watch: Callable[[RatioFit], Mapping[str, float]] | None
    ends: Tensor
    watching: float = 0.0

    def __call__(self, model: RatioModel) -> dict[str, float]:
        numbers = {}
        if self.held_out is not None:
            # Not without gradients: a baseline differentiates its network in the time.
            loss = self.objective(model, self.held_out)["total"]
            numbers["held_out"] = -loss.detach().mean().item()
        started = time.monotonic()
        with torch.no_grad():
            low, high = (model.log_ratio(x).mean().item() for x in self.ends)
        numbers["apart"] = high - low
        if self.watch is not None:
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
