r"""Batches, the terms of a training loss, and the objective that evaluates them together.

A training loss is a weighted sum of terms. Each :class:`Term` names the points where it needs
the network, such as a reference image, an ID image or a blend of the two on the path, and turns
the network's outputs there into one loss per sample. The :class:`Objective` gathers the points
of all its terms and runs *one* concatenated forward pass, for two reasons: terms that ask for the
same point share it, and batch normalisation sees reference, data and path points together. (In
separate passes in training mode, the batch statistics would give the classes away, a shortcut
that is gone at inference.)

Equal names of points mean equal tensors:

============================ ==================================================
`x_0`, `x_1`                 the clean reference and ID points
`start`, `end`               the path's own, dequantised, ends
`path`                       :math:`x_t`
`path-`                      :math:`x_t` with the noise's sign flipped
`path+D`, `path-D`           the same path a time :math:`D` later or earlier
`path@T`                     the same path at the fixed time :math:`T`
============================ ==================================================

Nothing here draws random numbers: they arrive in a :class:`Batch`. No gradient flows through the
points, or through a regression target, into the parameters of a learnable path (the path sees to
that); the only term that trains a path is :class:`ood_osdre.objectives.PathVariance`.
"""

__all__ = ["Batch", "DataScore", "Objective", "PathTerm", "Ratio", "Term", "evaluate"]

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..models import Coefficients, Prediction
from ..paths import Constant, GaussianPath, Weight

#: What a model says about points: the coefficients of a one-step ratio, or a prediction.
Outputs: TypeAlias = Coefficients | Prediction
#: A network from points (B, *) and times (B,) to data scores (B, *).
DataScore: TypeAlias = nn.Module | Callable[[Tensor, Tensor], Tensor]


class Batch(NamedTuple):
    r"""A training batch: pairs of reference and ID points, times and noise.

    Attributes:
        x_0: Points of the reference :math:`p_0`, with shape :math:`(B, *)`.
        x_1: ID points, of :math:`p_1`, with shape :math:`(B, *)`.
        t: The times :math:`t \sim p(t)`, with shape :math:`(B)`.
        noise: Standard normal noise :math:`z`, with shape :math:`(B, *)`.
        label: The classes of `x_1`, with shape :math:`(B)`; only class terms need them.
        probe: Standard normal directions :math:`v`, independent of the rest, with shape
            :math:`(B, *)`; only terms that have `needs_probe` read them.
    """

    x_0: Tensor
    x_1: Tensor
    t: Tensor
    noise: Tensor
    label: Tensor | None = None
    probe: Tensor | None = None

    def part(self, rows: slice) -> "Batch":
        r"""Returns some of the pairs."""
        return Batch(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Ratio(Protocol):
    r"""What terms use of a model; :class:`ood_osdre.models.ratio.OneStepRatio` has all of it."""

    def outputs(self, x: Tensor, /) -> Outputs:
        r"""Returns the network's outputs at `x`, with shape :math:`(B, *)`."""

    def time_score(self, x: Tensor, t: Tensor, /) -> Tensor:
        r"""Returns the time score at points, with shape :math:`(B)`."""

    def score(self, h: Tensor, t: Tensor, /) -> Tensor:
        r"""Returns :math:`s = K^{-1/2} \langle h, g(t) \rangle`, with the shape of `h` but its last."""

    def score_derivative(self, h: Tensor, t: Tensor, /) -> Tensor:
        r"""Returns :math:`\partial_t s`, with the shape of `h` but its last."""

    def log_ratio_at(self, outputs: Any, /) -> Tensor:  # noqa: ANN401
        r"""Returns :math:`\log \hat r` in nats, larger is more ID, with shape :math:`(B)`."""


class Term(nn.Module, abc.ABC):
    r"""Abstract term of an objective.

    Attributes:
        needs_probe: Whether the term looks at the batch's `probe`.
    """

    needs_probe = False

    def points(self, batch: Batch) -> dict[str, Tensor]:
        r"""Returns the points where the term needs the network, by name, each :math:`(B, *)`."""
        return {}

    @abc.abstractmethod
    def loss(self, ratio: Ratio, batch: Batch, at: Mapping[str, Any]) -> Tensor:
        r"""Returns the loss of each sample.

        Arguments:
            ratio: The model under training.
            batch: The batch.
            at: The network's outputs at the points, by name.

        Returns:
            The unreduced loss, with shape :math:`(B)`.
        """

    def learnt(self) -> dict[str, Any]:
        r"""Returns what the term trains beside networks, by name, as numbers for records."""
        return {}


class PathTerm(Term):
    r"""Abstract term on a Gaussian path.

    Arguments:
        path: The path from reference to ID data.
        weight: The weight :math:`\lambda(t)`; None for 1.
    """

    def __init__(self, path: GaussianPath, weight: Weight | None = None) -> None:
        super().__init__()
        self.path = path
        self.weight = Constant() if weight is None else weight

    def at_time(self, batch: Batch, t: Tensor, sign: float = 1.0) -> Tensor:
        r"""Returns the batch's path at times `t`, with noise :math:`\pm z`.

        Arguments:
            batch: The batch.
            t: The times, with shape :math:`(B)`.
            sign: The factor on the noise, 1 or -1.
        """
        return self.path.sample(batch.x_0, batch.x_1, t, sign * batch.noise)


class Objective(nn.Module):
    r"""A weighted sum of terms.

    The parameters of the objective are those of its terms: a learnable path, a data-score
    network.

    Arguments:
        terms: The weight and the term under each name. All terms are on the same path.
        separate: Whether each point gets a forward pass of its own, as in the paper's baselines.
            With batch normalisation that is the shortcut described above; it is here to be
            measured, not used.

    Attributes:
        needs_probe: Whether one of the terms looks at the batch's `probe`.

    Example:
        >>> from ood_osdre.objectives import EndPointLoss, Shrinkage
        >>> terms = {"endpoint": (1.0, EndPointLoss(clean=True)),
        ...          "shrinkage": (0.01, Shrinkage(clean=True))}
        >>> list(Objective(terms).weights.items())
        [('endpoint', 1.0), ('shrinkage', 0.01)]
    """

    def __init__(self, terms: Mapping[str, tuple[float, Term]], separate: bool = False) -> None:
        super().__init__()
        assert terms, "no terms"
        assert "total" not in terms, "'total' is the name of the sum"
        paths = {id(p) for _, t in terms.values() if (p := getattr(t, "path", None)) is not None}
        assert len(paths) <= 1, f"{len(paths)} paths in {list(terms)}, expected one"
        self.separate = separate
        self.needs_probe = any(term.needs_probe for _, term in terms.values())
        self.weights = {name: float(weight) for name, (weight, _) in terms.items()}
        self.terms = nn.ModuleDict({name: term for name, (_, term) in terms.items()})

    def learnt(self) -> dict[str, Any]:
        r"""Returns what the terms train beside networks, by name: `path` of a learnable path."""
        return {k: v for t in self.terms.values() for k, v in cast(Term, t).learnt().items()}

    def forward(self, ratio: Ratio, batch: Batch) -> dict[str, Tensor]:
        r"""Returns the loss of each term, unweighted, and their weighted sum `total`.

        Each is unreduced, with shape :math:`(B)`. Under autocast the networks run in half precision,
        but losses do not: outputs are taken to single precision first.

        Arguments:
            ratio: The model under training.
            batch: The batch.
        """
        terms = {name: cast(Term, term) for name, term in self.terms.items()}
        points: dict[str, Tensor] = {}
        for term in terms.values():
            points = {**term.points(batch), **points}
        groups = [{name: x} for name, x in points.items()] if self.separate else [points]
        at = {name: h for group in groups for name, h in evaluate(ratio, group).items()}

        losses = {name: term.loss(ratio, batch, at) for name, term in terms.items()}
        total = sum(
            (self.weights[name] * loss for name, loss in losses.items()),
            start=torch.zeros_like(batch.t),
        )
        return {**losses, "total": total}


def evaluate(ratio: Ratio, points: Mapping[str, Tensor]) -> dict[str, Any]:
    r"""Evaluates the network at all points in one concatenated forward pass.

    Arguments:
        ratio: The model under training.
        points: Named points, each with shape :math:`(B, *)`.

    Returns:
        The network's outputs at each of the points, by name, at least in single precision.
    """
    if not points:
        return {}
    sizes = [len(x) for x in points.values()]
    outputs = ratio.outputs(torch.cat(list(points.values())))
    parts = zip(*(_split(y, sizes) for y in outputs), strict=True)
    kind = type(outputs)
    return {name: kind(*part) for name, part in zip(points, parts, strict=True)}


def _split(y: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    if y is None:
        return (None,) * len(sizes)
    if y.dtype in (torch.float16, torch.bfloat16):
        y = y.float()
    return y.split(sizes)
