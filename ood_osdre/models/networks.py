r"""Networks that map an input to the spatial coefficients :math:`h(x)` of a time score.

No network here takes the time: the score is :math:`s(x, t) = \langle h(x), g(t) \rangle` and all
of its time dependence sits in the temporal basis :math:`g` (:mod:`ood_osdre.models.bases`). That is
why one forward pass gives the whole path integral.

A :class:`CoefficientNetwork` is a backbone, any module from :math:`(B, *)` to features
:math:`(B, F)`, under two affine heads: :math:`K` coefficients and, optionally, :math:`C`
classes. For image backbones that end in global average pooling, the coefficient head may also
be read *before* pooling: every cell of the last feature map then carries a share of the
coefficients, and the shares add up to the pooled output. Block-wise objectives train the shares,
inference uses the sum.
"""

__all__ = [
    "MLP",
    "CoefficientNetwork",
    "Coefficients",
    "Prediction",
    "QuadraticFeatures",
    "ResNetBackbone",
    "check_inputs",
    "describe_backbone",
    "timm_network",
    "zeroed",
]

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import timm
import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from ..errors import UserError, did_you_mean

NORMS = ("batch", "group")
# The classes of ImageNet, by which a head is known whatever library built the network.
IMAGENET = 1000

log = logging.getLogger(__name__)

Affine = TypeVar("Affine", nn.Linear, nn.Conv2d)


class Coefficients(NamedTuple):
    r"""The outputs of a coefficient network for a batch.

    Attributes:
        total: The coefficients :math:`h(x)`, with shape :math:`(B, K)`.
        cells: Each feature-map cell's share of them, with shape :math:`(B, S, K)`, summing over
            :math:`S` to `total`; None for a backbone without a feature map.
        logits: Class logits, with shape :math:`(B, C)`; None without a class head.
    """

    total: Tensor
    cells: Tensor | None = None
    logits: Tensor | None = None


class Prediction(NamedTuple):
    r"""The outputs of a model for a batch.

    Attributes:
        score: The log-ratios in nats, larger = more ID, with shape :math:`(B)`; of a classifier
            its score, which has no unit.
        logits: Class logits, with shape :math:`(B, C)`; None without a class head.
        parts: The parts of a summed score before they are standardised, with shape :math:`(B, P)`;
            None of any other model.
    """

    score: Tensor
    logits: Tensor | None = None
    parts: Tensor | None = None


class CoefficientNetwork(nn.Module):
    r"""A backbone under an affine coefficient head and an optional class head.

    The coefficient head starts at zero, so training starts from :math:`\log \hat r = 0`.

    Arguments:
        backbone: A module from :math:`(B, *)` to :math:`(B, F)`. If it has a method
            `feature_map` from :math:`(B, *)` to :math:`(B, F, H, W)` whose spatial mean is the
            feature vector, the network can also return the coefficients of each cell.
        features: The number of features :math:`F`.
        size: The number of coefficients :math:`K`.
        classes: The number of classes :math:`C`; 0 for no class head.
        cells: Whether the output holds the coefficients of each cell, at the cost of applying
            the head to every one. Only block-wise objectives need them.

    Example:
        >>> import torch
        >>> network = CoefficientNetwork(MLP(2, 16), features=16, size=8)
        >>> network(torch.zeros(5, 2)).total.shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        size: int,
        classes: int = 0,
        cells: bool = True,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.cells = cells and hasattr(backbone, "feature_map")
        self.head = zeroed(nn.Linear(features, size))
        self.class_head = nn.Linear(features, classes) if classes else None

    def forward(self, x: Tensor) -> Coefficients:
        r"""Returns the :class:`Coefficients` of `x`, with shape :math:`(B, *)`."""
        if not self.cells:
            return self._heads(self.backbone(x), cells=None)

        # To a type checker, an attribute of a module is a tensor or a module.
        feature_map = cast(Callable[[Tensor], Tensor], self.backbone.feature_map)
        maps = feature_map(x).flatten(2).transpose(1, 2)
        cells = self.head(maps) / maps.shape[1]
        return self._heads(maps.mean(dim=1), cells)

    def _heads(self, features: Tensor, cells: Tensor | None) -> Coefficients:
        features = features.to(torch.promote_types(features.dtype, torch.float32))  # if in half
        logits = None if self.class_head is None else self.class_head(features)
        return Coefficients(self.head(features), cells, logits)


class ResNetBackbone(nn.Module):
    r"""A ResNet of basic blocks for small images, with shape :math:`(B, 3, H, W)`.

    timm's ResNet with the CIFAR stem: its 7x7 stride-2 convolution, the norm behind it and the
    max-pooling are replaced together by a 3x3 convolution, a norm of the same width, and
    nothing. The default is the ResNet-18 of CIFAR work (11.17 M parameters).

    Arguments:
        width: A factor on the channels 64, 128, 256, 512 of the four stages.
        depths: The number of basic blocks in each stage.
        stem_stride: The stride of the stem; 2 trades detail for a fourfold speed-up.
        norm: `"batch"` or `"group"` (groups of 8 channels; independent of batch composition).

    References:
        | Deep residual learning for image recognition (He et al., 2016)
        | https://arxiv.org/abs/1512.03385
    """

    def __init__(
        self,
        width: float = 1.0,
        depths: Sequence[int] = (2, 2, 2, 2),
        stem_stride: int = 1,
        norm: str = "batch",
    ) -> None:
        super().__init__()
        channels = [round(c * width) for c in (64, 128, 256, 512)]
        assert norm in NORMS, f"norm: got {norm!r}, expected one of {NORMS}."
        multiples = all(c >= 8 and c % 8 == 0 for c in channels)
        assert multiples, f"channels: got {channels}, expected multiples of 8."

        norm_layer = nn.BatchNorm2d if norm == "batch" else _GroupNorm
        net = ResNet(
            BasicBlock,
            layers=list(depths),
            num_classes=0,
            channels=tuple(channels),
            norm_layer=norm_layer,
        )
        stem = channels[0]
        net.conv1 = nn.Conv2d(3, stem, 3, stride=stem_stride, padding=1, bias=False)
        nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        net.bn1, net.maxpool = norm_layer(stem), nn.Identity()
        # timm wires the first block for a 64-channel stem, whatever the stages' widths.
        net.layer1[0] = BasicBlock(stem, stem, norm_layer=norm_layer)
        self.net = net
        self.features = channels[-1]

    def feature_map(self, x: Tensor) -> Tensor:
        r"""Returns the last feature map, with shape :math:`(B, F, H', W')`."""
        return self.net.forward_features(x)

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`."""
        return self.feature_map(x).mean(dim=(2, 3))


class MLP(nn.Module):
    r"""A residual multi-layer perceptron from vectors :math:`(B, d)` to features :math:`(B, F)`.

    Arguments:
        dim: The dimension :math:`d` of the inputs.
        features: The number of features :math:`F`, the width of every layer.
        depth: The number of residual layers.
    """

    def __init__(self, dim: int, features: int, depth: int = 3) -> None:
        super().__init__()
        self.features = features
        self.stem = nn.Linear(dim, features)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.SiLU(), nn.Linear(features, features)) for _ in range(depth)
        )
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`."""
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.activation(x)


class QuadraticFeatures(nn.Module):
    r"""The features :math:`x_i`, :math:`(x_i^2 - 1) / \sqrt{2}` and :math:`x_i x_j`.

    They are orthonormal under :math:`\mathcal{N}(0, I)`. An affine head on them is any quadratic
    function, or with `block`, one that couples coordinates of the same block only. Between two
    Gaussians every time score of a Gaussian path is a quadratic function of the point.

    Arguments:
        dim: The dimension :math:`d` of the inputs.
        block: The size of the blocks of consecutive coordinates; None for one block.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, dim: int, block: int | None = None) -> None:
        super().__init__()
        i, j = torch.triu_indices(dim, dim, offset=1)
        if block is not None:
            same = i // block == j // block
            i, j = i[same], j[same]
        self.register_buffer("rows", i)
        self.register_buffer("columns", j)
        self.features = 2 * dim + len(i)

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`, of `x`, with shape :math:`(B, d)`."""
        squares = (x**2 - 1) / math.sqrt(2)
        return torch.cat([x, squares, x[:, self.rows] * x[:, self.columns]], dim=1)


def zeroed(layer: Affine) -> Affine:
    r"""Returns an affine layer whose weights and biases are set to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def check_inputs(x: object, shape: tuple[int, ...] | None, what: str = "x") -> Tensor:
    r"""Refuses a batch that is not like those a network was trained on.

    Broadcasting and global pooling let a network score nearly anything: images of another size,
    one channel for three. Such scores are numbers, but no log-ratios.

    Arguments:
        x: The batch, floats with shape :math:`(B, *)`.
        shape: The shape :math:`*` of one input in training; None if it is not known.
        what: What to call the batch in errors.

    Returns:
        The batch.

    Raises:
        TypeError: If it is no tensor.
        UserError: If it is empty, of another shape, not of floats, or holds NaN or infinity.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{what}: got {type(x).__name__}, expected a tensor.")
    fits = x.ndim > 1 and x.numel() > 0 and (shape is None or x.shape[1:] == shape)
    bad = int((~torch.isfinite(x.flatten(1)).all(dim=1)).sum()) if fits else 0
    if not fits or bad or not x.is_floating_point():
        found = f"got {str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
        if bad:
            found = f"{bad} of {len(x)} inputs hold NaN or infinity"
        one = "..." if shape is None else ", ".join(map(str, shape))
        raise UserError(f"{what}: {found}, expected finite floats of shape (B, {one}), not empty.")
    return x


class _GroupNorm(nn.GroupNorm):
    r"""A group norm with groups of 8 channels, built as timm builds its norms."""

    def __init__(
        self,
        channels: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels // 8, channels, device=device, dtype=dtype)


def timm_network(name: str, classes: int) -> nn.Module:
    r"""Builds a network of timm without weights; the caller's random numbers stay as they are.

    Raises:
        UserError: If timm has no network of the name.
    """
    if not timm.is_model(name):
        near = did_you_mean(name, timm.list_models())
        raise UserError(f"timm has no model {name!r}{near}.")
    with torch.random.fork_rng(devices=[]):
        return timm.create_model(name, num_classes=classes).float()


def describe_backbone(
    net: nn.Module, what: str = "backbone", features: int | None = None, classes: int = IMAGENET
) -> str:
    r"""Returns the class of a network that gives features, and of one of timm the call that builds it.

    A class head left on it, whose logits would be the features, is told in a warning: of timm's any
    head, of others a last linear layer to ImageNet's classes or the user's.

    Arguments:
        net: The network.
        what: What the warning calls it.
        features: How many features it gives; None if that is not known.
        classes: The number of the user's classes, if it is known.
    """
    name = type(net).__qualname__
    built = (getattr(net, "pretrained_cfg", None) or {}).get("architecture")
    head = getattr(net, "get_classifier", None)
    if built is None or head is None:
        last = [module for module in net.modules() if not any(True for _ in module.children())][-1]
        count, advice = getattr(last, "out_features", 0), "put nn.Identity() in its place"
        # Features of another number come from below it.
        if count not in (IMAGENET, classes) or features not in (None, count):
            count = 0
    else:
        # Somebody may have taken the head off by hand, which `num_classes` does not say.
        count = 0 if isinstance(head(), nn.Identity) else int(cast(int, net.num_classes))
        advice = "create it with num_classes=0"
        name = f"{name} (timm.create_model({built!r}, num_classes={count}))"
    if count:
        log.warning(
            "%s: the features are the logits of its class head of %d; %s for those below",
            *(what, count, advice),
        )
    return name
