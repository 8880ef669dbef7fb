r"""The log-ratio of a time-conditioned score, integrated numerically.

The network is :math:`s(x, t)`, and the log-ratio is an integral over :math:`t` that costs one
network evaluation for each time a rule visits (the number of function evaluations, NFE). That is
the comparison that a one-step ratio is made for. Quadrature over *our* model would be no baseline: as
:math:`h(x)` has no time, it needs one evaluation whatever the rule.

Networks that take the time: :math:`(x, t) \mapsto s(x, t)`, one output.

They are the one-step networks' backbones with the time let in, by a scale and a shift of every
channel (FiLM) after the stem and after each stage or layer. Normalisation is by groups: with batch
normalisation the score of an image would depend on the times of the others in its batch, and
:math:`\partial_t s` with it.
"""

__all__ = [
    "NetworkEvaluations",
    "TimeConditionedMLP",
    "TimeConditionedRatio",
    "TimeConditionedResNet",
]

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..paths.quadrature import Quadrature, ode, trapezoid
from .networks import MLP, ResNetBackbone
from .ratio import Prediction, RatioModel

SOLVERS = ("trapezoid", "ode")


class NetworkEvaluations(NamedTuple):
    r"""How many inputs were integrated, and the network evaluations of all of them together."""

    inputs: int
    evaluations: int


class TimeConditionedRatio(RatioModel):
    r"""The log-ratio of a time score that a network gives for one time at a go.

    Arguments:
        network: A module from inputs :math:`(B, *)` and times :math:`(B)` to scores :math:`(B)`.
        evaluations: The number of network evaluations of the trapezoidal rule, at least 2.
        t_range: The interval that was trained on, which is what is integrated over.
        solver: `"trapezoid"`, or `"ode"` for an adaptive Runge-Kutta method.
        tolerance: The relative and absolute tolerance of the adaptive method, above 0.
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
        if evaluations < 2:
            raise ValueError(f"'evaluations' should be at least 2, got {evaluations}.")
        if solver not in SOLVERS:
            raise ValueError(f"'solver' should be one of {SOLVERS}, got {solver!r}.")
        assert 0 < tolerance < math.inf, f"tolerance {tolerance}, expected a positive number"
        self.network = network
        self.evaluations, self.t_range = evaluations, t_range
        self.solver, self.tolerance = solver, tolerance
        #: The inputs integrated so far and the network evaluations of all of them together.
        self.cost = NetworkEvaluations(0, 0)

    def time_score(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the time score :math:`s(x, t)`, at least in single precision.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
            t: The times, with shape :math:`(B)`.

        Returns:
            The scores, with shape :math:`(B)`.
        """
        s = self.network(x, t)
        return s.to(torch.promote_types(s.dtype, torch.float32))

    def integrate(self, x: Tensor) -> Quadrature:
        r"""Returns the log-ratio and the number of network evaluations that it took.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
        """
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
        self.layer = nn.Linear(features, 2 * channels)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        r"""Returns `x`, with shape :math:`(B, C, *)`, scaled and shifted."""
        scale, shift = self.layer(embedding).chunk(2, dim=1)
        shape = scale.shape + (1,) * (x.ndim - 2)
        return x * (1 + scale.reshape(shape)) + shift.reshape(shape)


class TimeConditionedResNet(nn.Module):
    r"""The ResNet of :class:`ood_osdre.models.networks.ResNetBackbone` with the time let in.

    Arguments:
        width: A factor on the channels of the four stages.
        depths: The number of basic blocks in each stage.
        stem_stride: The stride of the stem.
        octaves: The number of frequencies of the time's embedding.
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
        self.head = _zero_head(self.backbone.features)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the scores, with shape :math:`(B)`.

        Arguments:
            x: The images, with shape :math:`(B, 3, H, W)`.
            t: The times, with shape :math:`(B)`.
        """
        net, embedding = self.backbone.net, self.embedding(t)
        stem, *stages = self.films
        x = stem(net.act1(net.bn1(net.conv1(x))), embedding)
        for stage, film in zip(
            (net.layer1, net.layer2, net.layer3, net.layer4), stages, strict=True
        ):
            x = film(stage(x), embedding)
        return self.head(x.mean(dim=(2, 3))).squeeze(1)


class TimeConditionedMLP(nn.Module):
    r"""The MLP of :class:`ood_osdre.models.networks.MLP` with the time let in.

    Arguments:
        dim: The dimension :math:`d` of the inputs.
        features: The number of features of every layer.
        depth: The number of residual layers.
        octaves: The number of frequencies of the time's embedding.
    """

    def __init__(self, dim: int, features: int, depth: int = 3, octaves: int = 5) -> None:
        super().__init__()
        self.backbone = MLP(dim, features, depth)
        self.embedding = TimeEmbedding(features, octaves)
        self.films = nn.ModuleList(FiLM(features, features) for _ in range(depth + 1))
        self.head = _zero_head(features)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the scores, with shape :math:`(B)`.

        Arguments:
            x: The vectors, with shape :math:`(B, d)`.
            t: The times, with shape :math:`(B)`.
        """
        mlp, embedding = self.backbone, self.embedding(t)
        stem, *layers = self.films
        x = stem(mlp.stem(x), embedding)
        for layer, film in zip(mlp.layers, layers, strict=True):
            x = film(x + layer(x), embedding)
        return self.head(mlp.activation(x)).squeeze(1)


def _zero_head(features: int) -> nn.Linear:
    head = nn.Linear(features, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
