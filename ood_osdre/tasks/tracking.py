r"""Tracks the divergence of a stream from a fixed reference by a ratio that is refitted.

At every step the ratio starts from the last step's weights. What is estimated is
:math:`\mathrm{KL}(p_t \| p_0) = \mathbb{E}_{p_t}[\log p_t / p_0]`, in nats, on points that
training did not draw. A detector that stays fixed tells less, see
:class:`ood_osdre.tasks.drift.DriftMonitor`.
"""

__all__ = ["QUADRATIC", "KLTracker", "Tracked"]

import logging
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from numpy.typing import ArrayLike
from torch import Generator, Tensor

from ..errors import UserError, did_you_mean
from ..training.batches import Stream, step_generator
from .fit import METHODS, DrawPairs, FitOptions, RatioFit, divergence, fit_ratio
from .methods import Options, settled
from .rows import finite_rows

log = logging.getLogger(__name__)

Sampler: TypeAlias = Callable[[int, Generator], Tensor]

HELD_OUT = 50_000
WATCHED = 1_000

# With fewer points a step's estimate would be all noise.
LEAST_WINDOW = 200
# Of a window, and of a reference that is an array, this share is held out for the estimate.
SHARE = 0.25

QUADRATIC = FitOptions(backbone="block_quadratic", block=1, lr=0.3, steps=400)


class Tracked(NamedTuple):
    r"""A divergence at a step of a stream.

    Attributes:
        estimate: The divergence, in nats.
        history: The share of the updates and the estimate, on the way.
        seconds: The training time of the step.
        standard_error: That of the mean over the held-out points, in nats; it knows nothing of
            what the features cannot represent. None for the variational methods, whose bounds
            are no means.
    """

    estimate: float
    history: list[tuple[float, float]]
    seconds: float
    standard_error: float | None = None


class KLTracker:
    r"""Tracks :math:`\mathrm{KL}(p_t \| p_0)` by refitting a ratio from step to step.

    Arguments:
        dim: The dimension :math:`d`.
        method: One of the keys of :data:`ood_osdre.tasks.fit.METHODS`.
        options: How the ratio is fitted at every step: options by name that differ from the
            defaults, such as `{"backbone": "quadratic"}`, or
            :class:`ood_osdre.tasks.methods.FitOptions`; seeds count up from theirs. By default
            features are squares of single coordinates, which see means and variances.
        reference: What windows of a stream are compared to: points of :math:`p_0`, at least 200,
            with shape :math:`(N, d)`, or a function that draws :math:`n` of them, given :math:`n`
            and a generator.

    Raises:
        UserError: If the method or an option is unknown, or the reference is too small, of another
            dimension, masked, or not finite.

    Example:
        >>> tracker = KLTracker(2, options={"steps": 20, "backbone": "quadratic"})
        >>> def draw_pairs(n, generator):
        ...     x_0, x_1 = torch.randn(2, n, 2, generator=generator)
        ...     return x_0, x_1 + 1
        >>> len(tracker.update(draw_pairs).history)
        20
    """

    def __init__(
        self,
        dim: int,
        method: str = "os-dre",
        options: Options = None,
        reference: ArrayLike | Sampler | None = None,
    ) -> None:
        if method not in METHODS:
            raise UserError(
                f"method: got {method!r}{did_you_mean(str(method), METHODS)}, expected one of "
                f"{', '.join(METHODS)}."
            )
        self.dim, self.method = dim, method
        self.options = settled(options, QUADRATIC)
        self.fit: RatioFit | None = None
        self.steps = 0
        self._reference = None if reference is None else self._source("reference", reference)

    def update(self, current: DrawPairs | ArrayLike) -> Tracked:
        r"""Refits to the current distribution and estimates its divergence on held-out points.

        Of a window a random quarter is held out for the estimate, and so is of a reference that is
        an array; training draws from the rest with replacement. The error is that of a mean over
        the held-out points, plus what the features cannot represent. Windows should not overlap:
        the weights that a step starts from have seen the last one's points.

        Arguments:
            current: A window of the stream, points of :math:`p_t` with shape :math:`(N, d)`, at
                least 200; or a function that draws points of :math:`p_0` and of :math:`p_t`, see
                :func:`ood_osdre.tasks.fit.fit_ratio`.

        Returns:
            The divergence with what is known of it.

        Raises:
            UserError: If the window is too small, of another dimension, or not finite.
            ValueError: If a window is given to a tracker without a reference.
        """
        options = self.options.replace(seed=self.options.seed + self.steps)
        generator = step_generator(options.seed, Stream.TEST, 0, options.device)
        many: tuple[Tensor, Tensor] | None = None
        if callable(current):
            draw_pairs = current
            few = draw_pairs(WATCHED, generator)
        else:
            if self._reference is None:
                raise ValueError("A window is compared to a 'reference', which is missing here.")
            window = self._source("window", current)
            draw_pairs = _pairs(self._reference, window)
            few = many = self._reference.held_out(generator), window.held_out(generator)

        def watch(fit: RatioFit) -> dict[str, float]:
            return {"estimate": divergence(fit, *few)}

        self.fit = fit_ratio(
            self.method, draw_pairs, self.dim, options, initial=self.fit, watch=watch
        )
        self.steps += 1
        many = draw_pairs(HELD_OUT, generator) if many is None else many
        value = divergence(self.fit, *many)
        error = None
        if self.fit.method.bound == "mean":
            values = self.fit.log_ratio(many[1]).double()
            error = (values.std() / len(values) ** 0.5).item()
        if value > math.log(len(many[1])):
            log.warning(
                "divergence: %.2f nats is more than the log of the %d held-out points; it rests on "
                "what the features can represent, not on the points.",
                *(value, len(many[1])),
            )
        history = [(h["step"] / options.steps, h["estimate"]) for h in self.fit.history]
        return Tracked(value, history, self.fit.seconds, error)

    def _source(self, name: str, values: ArrayLike | Sampler) -> "_Source":
        if callable(values):
            drawn = values(
                1, step_generator(self.options.seed, Stream.TEST, 2, self.options.device)
            )
            if not isinstance(drawn, Tensor) or drawn.shape != (1, self.dim):
                found = tuple(drawn.shape) if isinstance(drawn, Tensor) else type(drawn).__name__
                raise UserError(
                    f"{name}: its function gives {found} for one point, expected a tensor of shape "
                    f"(1, {self.dim})."
                )
            return _Source(values, None)
        points = _points(name, values, self.dim).to(self.options.device)
        generator = step_generator(
            self.options.seed + self.steps, Stream.TEST, 1, self.options.device
        )
        order = torch.randperm(len(points), generator=generator, device=points.device)
        cut = round(SHARE * len(points))
        held_out, rest = points[order[:cut]], points[order[cut:]]

        def draw(n: int, generator: Generator) -> Tensor:
            return rest[torch.randint(len(rest), (n,), generator=generator, device=rest.device)]

        return _Source(draw, held_out)


class _Source(NamedTuple):
    r"""Where points of one distribution come from; held-out ones of a function are fresh."""

    draw: Sampler
    kept: Tensor | None

    def held_out(self, generator: Generator) -> Tensor:
        return self.draw(HELD_OUT, generator) if self.kept is None else self.kept


def _pairs(reference: _Source, window: _Source) -> DrawPairs:
    def draw_pairs(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        return reference.draw(n, generator), window.draw(n, generator)

    return draw_pairs


def _points(name: str, values: ArrayLike, dim: int) -> Tensor:
    array = finite_rows(name, values)
    if array.shape[1] != dim:
        raise UserError(f"{name}: got shape {array.shape}, expected (N, {dim}).")
    if len(array) < LEAST_WINDOW:
        raise UserError(f"{name}: got {len(array)} points, expected at least {LEAST_WINDOW}.")
    return torch.as_tensor(array, dtype=torch.get_default_dtype())
