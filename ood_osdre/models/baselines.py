r"""Baselines of the one-step ratio: a network that takes the time, and the scores of a classifier.

**Time-conditioned ratio.** The network is a time score :math:`s(x, t)`, with one output. The
log-ratio is its integral over :math:`t`, which costs one network evaluation for each time that a
quadrature rule visits. A one-step ratio needs one evaluation whatever the rule, as its coefficients
:math:`h(x)` have no time.

The networks are the one-step networks' backbones with the time let in, by a scale and a shift of
every channel (FiLM) after the stem and after each stage or layer. Normalisation is by groups: with
batch normalisation the score of an image would depend on the times of the others in its batch, and
:math:`\partial_t s` with it.

**Classifier.** Its score is larger for inputs that look more like ID data, as a log-ratio is, but
it is no log-ratio and has no unit. Softmax and energy see the logits alone; nearest neighbours and
relative Mahalanobis need the features of ID training images.

References:
    | A baseline for detecting misclassified and out-of-distribution examples (Hendrycks and
      Gimpel, 2017)
    | https://arxiv.org/abs/1610.02136

    | Energy-based out-of-distribution detection (Liu et al., 2020)
    | https://arxiv.org/abs/2010.03759

    | Out-of-distribution detection with deep nearest neighbors (Sun et al., 2022)
    | https://arxiv.org/abs/2204.06507
"""

__all__ = [
    "SCORES",
    "Classifier",
    "FiLM",
    "NetworkEvaluations",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
    "TimeEmbedding",
]

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import UserError
from ..paths.quadrature import Quadrature, ode, trapezoid
from ..sections import FITTED
from .gaussians import Gaussians
from .networks import MLP, Prediction, ResNetBackbone, zeroed
from .ratio import RatioModel

SOLVERS = ("trapezoid", "ode")


class NetworkEvaluations(NamedTuple):
    r"""The inputs that were integrated, and the network evaluations that all of them took."""

    inputs: int
    evaluations: int


class TimeConditionedRatio(RatioModel):
    r"""The integral of a network's time score over the time, by a quadrature rule.

    Arguments:
        network: A module from inputs :math:`(B, *)` and times :math:`(B)` to scores :math:`(B)`.
        evaluations: The number of network evaluations of the trapezoidal rule, at least 2.
        t_range: The interval that was trained on and is integrated over.
        solver: `"trapezoid"`, or `"ode"` for an adaptive Runge-Kutta method.
        tolerance: The relative and absolute tolerance of the adaptive method, above 0.

    Attributes:
        cost: The inputs integrated so far, and their network evaluations.
    """

    def __init__(
        self,
        network: nn.Module,
        evaluations: int = 10,
        t_range: tuple[float, float] = (0.0, 1.0),
        solver: str = "trapezoid",
        tolerance: float = 1e-3,
    ) -> None:
        super().__init__()
        assert evaluations >= 2, f"evaluations: got {evaluations}, expected at least 2."
        assert solver in SOLVERS, f"solver: got {solver!r}, expected one of {SOLVERS}."
        self.network = network
        self.evaluations, self.t_range = evaluations, t_range
        self.solver, self.tolerance = solver, tolerance
        self.cost = NetworkEvaluations(0, 0)

    def time_score(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the time scores :math:`s(x, t)`, at least in single precision.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
            t: The times, with shape :math:`(B)`, as the scores have.
        """
        return _single(self.network(x, t))

    def integrate(self, x: Tensor) -> Quadrature:
        r"""Returns the log-ratios of inputs :math:`(B, *)`, and how many evaluations each took."""
        low, high = self.t_range
        if self.solver == "ode":
            return ode(self.time_score, x, self.tolerance, self.tolerance, low, high)
        return trapezoid(self.time_score, x, self.evaluations - 1, low, high)

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns the log-ratios, without class logits."""
        log_ratio, evaluations = self.integrate(x)
        inputs, before = self.cost
        self.cost = NetworkEvaluations(inputs + len(x), before + len(x) * evaluations)
        return Prediction(log_ratio)


class TimeEmbedding(nn.Module):
    r"""Smooth features of the time: sines and cosines of up to `octaves` octaves, and a layer.

    Arguments:
        features: The number of features :math:`F`.
        octaves: The number of frequencies :math:`\pi, 2 \pi, 4 \pi, \ldots`
    """

    def __init__(self, features: int, octaves: int = 5) -> None:
        super().__init__()
        self.frequencies: Tensor
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(octaves))
        self.layers = nn.Sequential(nn.Linear(2 * octaves + 1, features), nn.SiLU())

    def forward(self, t: Tensor) -> Tensor:
        r"""Returns the features of times :math:`(B)`, with shape :math:`(B, F)`."""
        phase = t[:, None] * self.frequencies
        return self.layers(torch.cat([t[:, None], phase.sin(), phase.cos()], dim=1))


class FiLM(nn.Module):
    r"""A scale and a shift of every channel, functions of the time; the identity at first.

    Arguments:
        features: The number of features of the time's embedding.
        channels: The number of channels :math:`C`.

    References:
        | FiLM: Visual reasoning with a general conditioning layer (Perez et al., 2018)
        | https://arxiv.org/abs/1709.07871
    """

    def __init__(self, features: int, channels: int) -> None:
        super().__init__()
        self.layer = zeroed(nn.Linear(features, 2 * channels))

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        r"""Returns `x`, with shape :math:`(B, C, *)`, scaled and shifted."""
        scale, shift = self.layer(embedding).chunk(2, dim=1)
        shape = scale.shape + (1,) * (x.ndim - 2)
        return x * (1 + scale.reshape(shape)) + shift.reshape(shape)


class TimeConditionedResNet(nn.Module):
    r"""The ResNet of :class:`ood_osdre.models.networks.ResNetBackbone` with the time let in.

    Arguments are those of the backbone, and `octaves`, the number of frequencies of the time's
    embedding.
    """

    def __init__(
        self,
        width: float = 1.0,
        depths: Sequence[int] = (2, 2, 2, 2),
        stem_stride: int = 1,
        octaves: int = 5,
    ) -> None:
        super().__init__()
        self.backbone = ResNetBackbone(width, depths, stem_stride, norm="group")
        net = self.backbone.net
        channels = [net.conv1.out_channels, *(c["num_chs"] for c in net.feature_info[1:])]
        self.embedding = TimeEmbedding(self.backbone.features, octaves)
        self.films = nn.ModuleList(FiLM(self.backbone.features, c) for c in channels)
        self.head = zeroed(nn.Linear(self.backbone.features, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the scores :math:`(B)` of images :math:`(B, 3, H, W)` at times :math:`(B)`."""
        net, embedding = self.backbone.net, self.embedding(t)
        stem, *stages = self.films
        x = stem(net.act1(net.bn1(net.conv1(x))), embedding)
        layers = net.layer1, net.layer2, net.layer3, net.layer4
        for layer, film in zip(layers, stages, strict=True):
            x = film(layer(x), embedding)
        return self.head(x.mean(dim=(2, 3))).squeeze(1)


class TimeConditionedMLP(nn.Module):
    r"""The MLP of :class:`ood_osdre.models.networks.MLP` with the time let in.

    Arguments are those of the backbone, and `octaves`, the number of frequencies of the time's
    embedding.
    """

    def __init__(self, dim: int, features: int, depth: int = 3, octaves: int = 5) -> None:
        super().__init__()
        self.backbone = MLP(dim, features, depth)
        self.embedding = TimeEmbedding(features, octaves)
        self.films = nn.ModuleList(FiLM(features, features) for _ in range(depth + 1))
        self.head = zeroed(nn.Linear(features, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the scores :math:`(B)` of vectors :math:`(B, d)` at times :math:`(B)`."""
        mlp, embedding = self.backbone, self.embedding(t)
        stem, *layers = self.films
        x = stem(mlp.stem(x), embedding)
        for layer, film in zip(mlp.layers, layers, strict=True):
            x = film(x + layer(x), embedding)
        return self.head(mlp.activation(x)).squeeze(1)


#: The scores by name.
SCORES = ("msp", "energy", *FITTED)


class Classifier(RatioModel):
    r"""A classifier with a score in the place of the log-ratio.

    - `"msp"`: the largest softmax probability, as its log-odds, which keep the order and do not
      saturate in single precision,
    - `"energy"`: the log-sum-exp of the logits,
    - `"knn"`: minus the distance to the :math:`k`-th nearest of the ID training features, all of
      unit length; after :meth:`fit`,
    - `"relative_mahalanobis"`: how much closer a feature is to the nearest class than to all ID
      training features (:mod:`ood_osdre.models.gaussians`); after :meth:`fit`.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
        classes: The number of classes :math:`C`.
        score: One of :data:`SCORES`.
        neighbours: The :math:`k` of `"knn"`.
    """

    in_nats = False

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        classes: int,
        score: str = "msp",
        neighbours: int = 50,
    ) -> None:
        super().__init__()
        assert score in SCORES, f"score: got {score!r}, expected one of {SCORES}."
        self.backbone = backbone
        self.class_head = nn.Linear(features, classes)
        self.score, self.neighbours = score, neighbours
        self.bank: Tensor | None = None
        # In a tuple, as they are no part of the state that is trained and stored.
        self.gaussians: tuple[Gaussians, Gaussians] | None = None

    @classmethod
    def of(cls, backbone: nn.Module, head: nn.Linear) -> "Classifier":
        r"""Returns the classifier of a backbone and a class head, which are not copied."""
        self = cls(backbone, head.in_features, head.out_features)
        self.class_head = head
        return self

    @classmethod
    def of_timm(cls, net: nn.Module) -> "Classifier":
        r"""Returns the classifier that a network of timm is, which is taken apart.

        Raises:
            UserError: If it ends in something else than an affine layer.
        """
        head = net.get_classifier()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            raise UserError(f"classifier: timm's {type(net).__name__} ends in no affine layer.")
        net.reset_classifier(0)  # type: ignore[operator]
        return cls.of(net, head)

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor], labels: Tensor) -> "Classifier":
        r"""Looks at the features of ID training inputs, for a score of :data:`FITTED`.

        Arguments:
            batches: Batches of inputs, each with shape :math:`(B, *)`, at least `neighbours` in
                all.
            labels: The classes of all of them, with shape :math:`(N)`.

        Returns:
            The classifier itself, in evaluation mode.

        Raises:
            UserError: If Gaussians are fitted to features that are not finite.
        """
        self.eval()
        if self.score == "knn":
            self.bank = torch.cat([_unit(self.backbone(x)) for x in batches])
            return self
        features = torch.cat([_single(self.backbone(x)) for x in batches])
        known, own = labels.to(features.device).unique(return_inverse=True)
        dim, device = features.shape[1], features.device
        of_classes, of_all = Gaussians(len(known), dim).to(device), Gaussians(1, dim).to(device)
        of_classes.fit(features, own)
        of_all.fit(features, torch.zeros_like(own))
        self.gaussians = of_classes, of_all
        return self

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns the scores and the class logits.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
        """
        features = self.backbone(x)
        logits = self.class_head(features)
        # While it is being trained, a classifier has no neighbours and no Gaussians yet.
        if self.score in FITTED and not self.training:
            score = self._fitted_score(features)
        elif self.score == "energy":
            score = _single(logits).logsumexp(dim=1)
        else:
            score = _log_odds(_single(logits))
        return Prediction(score, logits)

    def _fitted_score(self, features: Tensor) -> Tensor:
        if self.score == "knn" and self.bank is not None:
            distances = torch.cdist(_unit(features), self.bank)
            return -distances.kthvalue(self.neighbours, dim=1).values
        if self.score != "knn" and self.gaussians is not None:
            nearest, all_together = (g.distances(features).amin(dim=1) for g in self.gaussians)
            return ((all_together - nearest) / 2).to(features.dtype)
        raise UserError(
            f"evaluation.score: {self.score} is fitted to ID training images, which no file of a run "
            "holds; evaluate the run with --checkpoint."
        )


def _log_odds(logits: Tensor) -> Tensor:
    top, index = logits.max(dim=1, keepdim=True)
    others = logits.scatter(1, index, -torch.inf).logsumexp(dim=1)
    return top.squeeze(1) - others


def _unit(features: Tensor) -> Tensor:
    return F.normalize(_single(features), dim=1)


def _single(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
