r"""Networks that take the time: :math:`(x, t) \mapsto s(x, t)`, one output.

They are the one-step networks' backbones with the time let in, by a scale and a shift of every
channel (FiLM) after the stem and after each stage or layer. Normalisation is by groups: with batch
normalisation the score of an image would depend on the times of the others in its batch, and
:math:`\partial_t s` with it.
"""

__all__ = ["TimeConditionedMLP", "TimeConditionedResNet"]

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..networks import MLP, ResNetBackbone


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
    r"""The ResNet of :class:`ood_osdre.networks.ResNetBackbone` with the time let in.

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
    r"""The MLP of :class:`ood_osdre.networks.MLP` with the time let in.

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
