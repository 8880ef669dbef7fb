r"""Networks for joint objectives: a backbone without time under a decoder with time.

A joint objective (:class:`ood_osdre.objectives.JointScoreMatching`) learns the data score
:math:`s^x(x, t) = \nabla_x \log p_t(x)` beside the time score. Both share the encoder, which takes
no time: the coefficients :math:`h(x)` sit on its bottleneck, and one pass has to do. The decoder
takes the bottleneck, the skips and the time. It is thrown away after training, and is no part of
the ratio, of its checkpoint or of its cost.

A decoder therefore *refers* to its encoder without owning it. Its parameters are its own, the
encoder's belong to the ratio, and the trainer, which optimises both, sees each once. The decoder
looks at the weights that the encoder has at the moment; a copy of the ratio leaves it with the
original.

The decoder's outputs are multiplied by `scale(t)`. With :math:`v_t^{-1/2}` the network itself
learns the noise :math:`-z`, of order one at every time, where the data score is as large as
:math:`\varepsilon^{-1/2}`.

References:
    | U-Net: Convolutional networks for biomedical image segmentation (Ronneberger et al., 2015)
    | https://arxiv.org/abs/1505.04597
"""

__all__ = ["CHANNELS", "UNetDecoder", "UNetEncoder", "VectorDecoder", "inverse_noise"]

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..paths import GaussianPath
from .baselines import FiLM, TimeEmbedding
from .networks import MLP, zeroed

Scale = Callable[[Tensor], Tensor]

GROUP = 8
#: The channels of a U-Net of width 1.
CHANNELS = (128, 256, 512)


def inverse_noise(path: GaussianPath) -> Scale:
    r"""Returns :math:`t \mapsto v_t^{-1/2}`, without gradient to the path."""

    def scale(t: Tensor) -> Tensor:
        return path.rates(t).v.detach().rsqrt()

    return scale


class _Block(nn.Module):
    r"""Two 3x3 convolutions with group normalisation, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(inputs // GROUP, inputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm_2 = nn.GroupNorm(outputs // GROUP, outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv_1(F.silu(self.norm_1(x)))
        return self.shortcut(x) + self.conv_2(F.silu(self.norm_2(y)))


class UNetEncoder(nn.Module):
    r"""The contracting half of a U-Net, a backbone for images :math:`(B, 3, H, W)`.

    Every level after the first halves the sides. Normalisation is by groups of 8 channels.

    Arguments:
        channels: The channels of each level, multiples of 8; the last are the features.
    """

    def __init__(self, channels: Sequence[int] = CHANNELS) -> None:
        super().__init__()
        multiples = all(c >= GROUP and c % GROUP == 0 for c in channels)
        assert multiples, f"channels: got {tuple(channels)}, expected multiples of {GROUP}."
        self.channels = tuple(channels)
        self.features = self.channels[-1]
        self.stem = nn.Conv2d(3, self.channels[0], 3, padding=1)
        befores = (self.channels[0], *self.channels[:-1])
        self.blocks = nn.ModuleList(
            _Block(before, after, stride=1 if level == 0 else 2)
            for level, (before, after) in enumerate(zip(befores, self.channels, strict=True))
        )
        self.norm = nn.GroupNorm(self.features // GROUP, self.features)

    def levels(self, x: Tensor) -> list[Tensor]:
        r"""Returns the maps of every level, with shapes :math:`(B, C_l, H_l, W_l)`.

        Arguments:
            x: The images, with shape :math:`(B, 3, H, W)`; the sides divide by
                :math:`2^{L - 1}` for :math:`L` levels.
        """
        divisor = 2 ** (len(self.channels) - 1)
        fits = x.ndim == 4 and x.shape[2] % divisor == x.shape[3] % divisor == 0
        assert fits, f"images: got {tuple(x.shape)}, expected sides that divide by {divisor}."
        maps, x = [], self.stem(x)
        for block in self.blocks:
            x = block(x)
            maps.append(x)
        maps[-1] = F.silu(self.norm(x))
        return maps

    def feature_map(self, x: Tensor) -> Tensor:
        r"""Returns the bottleneck, with shape :math:`(B, F, H', W')`."""
        return self.levels(x)[-1]

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`."""
        return self.feature_map(x).mean(dim=(2, 3))


class _Decoder(nn.Module):
    r"""Base of the decoders: a reference to the encoder, the embedded time and the scale."""

    def __init__(self, encoder: nn.Module, features: int, scale: Scale | None) -> None:
        super().__init__()
        # In a tuple, so that its parameters are not the decoder's.
        self._encoder = (encoder,)
        self.scale = scale
        self.embedding = TimeEmbedding(features)

    def _scaled(self, y: Tensor, t: Tensor) -> Tensor:
        if self.scale is None:
            return y
        return y * self.scale(t).reshape(-1, *(1,) * (y.ndim - 1))


class UNetDecoder(_Decoder):
    r"""The data score of images: the expanding half of a U-Net, conditioned on the time.

    Arguments:
        encoder: The contracting half, the backbone of the ratio.
        scale: A factor on the outputs, a function of the time; None for 1.

    Example:
        >>> encoder = UNetEncoder((8, 16))
        >>> decoder = UNetDecoder(encoder)
        >>> decoder(torch.zeros(2, 3, 8, 8), torch.rand(2)).shape
        torch.Size([2, 3, 8, 8])
    """

    def __init__(self, encoder: UNetEncoder, scale: Scale | None = None) -> None:
        super().__init__(encoder, encoder.features, scale)
        channels = encoder.channels
        self.first = FiLM(encoder.features, channels[-1])
        self.middle = _Block(channels[-1], channels[-1])
        pairs = list(zip(channels[:0:-1], channels[-2::-1], strict=True))
        self.blocks = nn.ModuleList(_Block(below + skip, skip) for below, skip in pairs)
        self.films = nn.ModuleList(FiLM(encoder.features, skip) for _, skip in pairs)
        self.norm = nn.GroupNorm(channels[0] // GROUP, channels[0])
        self.head = zeroed(nn.Conv2d(channels[0], 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the data scores of images :math:`(B, 3, H, W)` at times :math:`(B)`."""
        *skips, y = cast(UNetEncoder, self._encoder[0]).levels(x)
        embedding = self.embedding(t)
        y = self.middle(self.first(y, embedding))
        for block, film, skip in zip(self.blocks, self.films, reversed(skips), strict=True):
            y = film(block(torch.cat([F.interpolate(y, scale_factor=2), skip], dim=1)), embedding)
        return self._scaled(self.head(F.silu(self.norm(y))), t)


class VectorDecoder(_Decoder):
    r"""The data score of vectors: layers over the features of an MLP, conditioned on the time.

    The first layer also sees the point itself; two residual ones follow.

    Arguments:
        encoder: The backbone of the ratio.
        dim: The dimension :math:`d` of the vectors.
        scale: A factor on the outputs, a function of the time; None for 1.
    """

    def __init__(self, encoder: MLP, dim: int, scale: Scale | None = None) -> None:
        super().__init__(encoder, encoder.features, scale)
        features = encoder.features
        self.stem = nn.Linear(features + dim, features)
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(2))
        self.films = nn.ModuleList(FiLM(features, features) for _ in range(3))
        self.head = zeroed(nn.Linear(features, dim))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        r"""Returns the data scores of vectors :math:`(B, d)` at times :math:`(B)`."""
        embedding = self.embedding(t)
        first, *others = self.films
        y = first(self.stem(torch.cat([self._encoder[0](x), x], dim=1)), embedding)
        for layer, film in zip(self.layers, others, strict=True):
            y = film(y + layer(F.silu(y)), embedding)
        return self._scaled(self.head(F.silu(y)), t)
