r"""The baseline of a one-step ratio: a network that takes the time, integrated numerically.

The network is a time score :math:`s(x, t)`, with one output. The log-ratio is its integral over
:math:`t`, which costs one network evaluation for each time that a quadrature rule visits. A
one-step ratio needs one evaluation whatever the rule, as its coefficients :math:`h(x)` have no
time.

The networks are the one-step networks' backbones with the time let in, by a scale and a shift of
every channel (FiLM) after the stem and after each stage or layer. Normalisation is by groups: with
batch normalisation the score of an image would depend on the times of the others in its batch, and
:math:`\partial_t s` with it.
"""

__all__ = [
    "FiLM",
    "NetworkEvaluations",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
    "TimeEmbedding",
]

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..paths.quadrature import Quadrature, ode, trapezoid
from .networks import MLP, ResNetBackbone, zeroed
from .ratio import Prediction, RatioModel

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
        s = self.network(x, t)
        return s.to(torch.promote_types(s.dtype, torch.float32))

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

    def log_ratio_at(self, outputs: Prediction) -> Tensor:
        r"""Returns the log-ratios in nats of a prediction, with shape :math:`(B)`."""
        return outputs.score


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
