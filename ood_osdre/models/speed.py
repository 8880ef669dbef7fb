r"""A network for small images that trains in minutes on a few cores.

Its first layer is not learnt. A 2x2 convolution maps patches of the images to their principal
components, each of variance 1, and to their negatives. With patches :math:`p` of the ID training
images, whose covariance has the eigenvectors :math:`u_i` and the eigenvalues :math:`\lambda_i`, the
outputs are

.. math:: \pm \, (\lambda_i + \varepsilon)^{-1/2} \langle u_i, p \rangle .

Behind it are three groups of two 3x3 convolutions. A convolution starts as the identity on its first
channels, so that the whole network passes images on from the first step. The map that is left is
pooled by its maximum, which keeps a detail wherever it is; there is no feature map whose mean is the
features, so block-wise objectives have nothing to work on.

References:
    | 94% on CIFAR-10 in 3.29 seconds on a single GPU (Jordan, 2024)
    | https://arxiv.org/abs/2404.00498
"""

__all__ = ["SpeedBackbone", "deployed"]

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..errors import UserError
from .copies import copied

#: The channels of the three groups of width 1.
CHANNELS = (32, 128, 128)
# The side of the patches that are whitened, and the number of their values in colour.
PATCH, VALUES = 2, 12
# Added to the eigenvalues. Those of patches of standardised pixels sum to 12; the least is about
# 1e-3 in photographs and exactly 0 in grey images.
EPS = 5e-4
# Three poolings by 2 leave one cell of an image of this side.
LEAST_SIDE = 16
# Images whose patches are in memory at once.
PIECE = 64

M = TypeVar("M", bound=nn.Module)


class SpeedBackbone(nn.Module):
    r"""A backbone for images :math:`(B, 3, H, W)` of sides from 16, in batch normalisation.

    The groups are modules of their own, `groups.0` to `groups.2`, for those who read features
    from several layers (:func:`ood_osdre.models.extract_features`).

    Arguments:
        width: A factor on the channels 32, 128, 128 of the groups, a multiple of 1/32.

    Attributes:
        whitening: The fixed kernels of the first layer, with shape :math:`(24, 3, 2, 2)`. Until
            :meth:`prepare` they are those for white noise, which leave patches as they are.

    Example:
        >>> backbone = SpeedBackbone(width=0.25)
        >>> backbone.prepare(torch.randn(8, 3, 32, 32))
        >>> backbone(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 32])
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        channels = [round(c * width) for c in CHANNELS]
        assert channels[0] == CHANNELS[0] * width > 0, f"width: got {width}"
        self.features = channels[-1]
        self.whitening: Tensor
        # A buffer: neither gradients nor weight decay move it, and checkpoints hold it.
        self.register_buffer("whitening", _unwhitened())
        self.groups = nn.Sequential(
            *(
                _group(before, after)
                for before, after in zip([2 * VALUES, *channels[:-1]], channels, strict=True)
            )
        )

    @property
    def is_prepared(self) -> bool:
        r"""Whether the first layer has been fixed, by :meth:`prepare` or a checkpoint."""
        return not torch.equal(self.whitening, _unwhitened().to(self.whitening))

    @torch.no_grad()
    def prepare(self, x: Tensor | Iterable[Tensor]) -> None:
        r"""Fixes the first layer to whiten the patches of images.

        Arguments:
            x: Images as the network will see them, with shape :math:`(N, 3, H, W)`, or pieces of
                them.

        Raises:
            UserError: If they are too small for the network.
        """
        total = torch.zeros(VALUES, dtype=torch.float64)
        count, squares = 0, torch.outer(total, total)
        pieces = [x] if isinstance(x, Tensor) else x
        for piece in chain.from_iterable(p.split(PIECE) for p in pieces):
            if min(piece.shape[2:]) < LEAST_SIDE:
                raise UserError(
                    f"network.kind: speed takes images of at least {LEAST_SIDE} pixels a side, got "
                    f"{piece.shape[2]} x {piece.shape[3]}."
                )
            patches = F.unfold(piece, PATCH)
            count += patches.shape[0] * patches.shape[2]
            total += patches.sum(dim=2).double().sum(dim=0).cpu()
            squares += (patches @ patches.mT).double().sum(dim=0).cpu()
        mean = total / count
        values, vectors = torch.linalg.eigh(squares / count - torch.outer(mean, mean))
        # Rounding may leave an eigenvalue of grey images just below 0.
        scaled = vectors * (values.clamp(min=0) + EPS).rsqrt()
        self.whitening.copy_(_kernels(scaled.mT))

    def forward(self, x: Tensor) -> Tensor:
        r"""Returns the features, with shape :math:`(B, F)`."""
        maps = self.groups(F.gelu(F.conv2d(x, self.whitening)))
        return F.max_pool2d(maps, maps.shape[2:]).flatten(1)

    def merge(self) -> None:
        r"""Merges what normalises into the convolutions before it, in evaluation mode, for good."""
        for group in self.groups:
            assert isinstance(group, nn.Sequential)
            _merge_norms(group)


@torch.no_grad()
def deployed(module: M, layers: Sequence[str] = ()) -> M:
    r"""Returns a copy in evaluation mode, with norms merged into the layers before them.

    It agrees up to rounding. Networks other than those of this module are copied as they are.

    Arguments:
        module: A module that may hold such networks.
        layers: Names of layers that are read. Where one is within a group of layers, nothing is
            merged: its outputs would be others.
    """
    twin = copied(module).eval()
    if any(layer.count(".") > 1 for layer in layers):
        return twin
    for part in list(twin.modules()):
        if isinstance(part, SpeedBackbone):
            part.merge()
    return twin


def _merge_norms(layers: nn.Sequential) -> None:
    r"""Merges norms into convolutions that they follow, at once or after a pooling by the largest."""
    for i, norm in enumerate(layers):
        if not isinstance(norm, nn.BatchNorm2d):
            continue
        pooled = i > 0 and isinstance(layers[i - 1], nn.MaxPool2d)
        at = i - 1 - pooled
        before = layers[at] if at >= 0 else None
        # Scales that are positive, and they alone, leave the largest of a cell the largest.
        if isinstance(before, nn.Conv2d) and not (pooled and (norm.weight <= 0).any()):
            layers[at] = fuse_conv_bn_eval(before, norm)
            layers[i] = nn.Identity()


def _kernels(rows: Tensor) -> Tensor:
    r"""Returns functionals of patches, and their negatives, as kernels of a convolution."""
    return torch.cat([rows, -rows]).reshape(2 * VALUES, 3, PATCH, PATCH)


def _unwhitened() -> Tensor:
    return _kernels(torch.eye(VALUES))


def _group(inputs: int, outputs: int) -> nn.Sequential:
    r"""Returns two convolutions, the first followed by pooling, in normalisation and GELU."""
    return nn.Sequential(
        _convolution(inputs, outputs),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(outputs),
        nn.GELU(),
        _convolution(outputs, outputs),
        nn.BatchNorm2d(outputs),
        nn.GELU(),
    )


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    r"""Returns a 3x3 convolution whose first outputs are its inputs; the others start at random."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:inputs])
    return convolution
