r"""The ratio on features of a frozen classifier: whitening, a head, and what recognises the network.

With the features :math:`\phi(x)` of a classifier, their mean :math:`m` and covariance
:math:`C = U \Lambda U^\top` over the even mixture of ID and reference images, a head is given the
whitened principal components

.. math:: w(x) = \Lambda_r^{-1/2} U_r^\top (\phi(x) - m) \, ,

of which the :math:`r` largest have mean zero and covariance :math:`I` over that mixture: the scale
that paths, times and weights of training expect. Its log-ratio is that of the densities of
:math:`w` over ID and reference images, in nats; larger means more ID. What the features do not tell
apart, no head can.

Once trained, whitening and head are one function of the features: :meth:`WhitenedRatio.fold` merges
the matrix into the head's first affine layer. Only the subtraction of the mean stays: merged into a
bias it would cost digits wherever a mean is large beside its deviation.

A head that was trained on the features of one network gives numbers, but no log-ratios, on any other
with as many features. It keeps a :class:`NetworkDigest` of its network therefore: a hash of its modules'
types, of the options of PyTorch's own, and of all parameters and buffers. The device, wrappers for
several devices and compilation do not change the digest; another precision does.
"""

__all__ = [
    "NetworkDigest",
    "RepresentationRatio",
    "WhitenedRatio",
    "Whitening",
    "classifier_features",
    "whitening_of",
]

import copy
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .axes import Known
from .baselines import Classifier, TimeConditionedMLP, TimeConditionedRatio
from .copies import unwrapped
from .frozen import Features, named_layers, read_layers
from .networks import MLP, Prediction
from .ratio import FoldedRatio, RatioModel
from .speed import deployed

# Components with less than this share of the largest variance are taken for rounding: features
# come in single precision.
LEAST_VARIANCE = 1e-10
NEAR = 1e-3  # a shift of components, in deviations, that changes nothing in training
# Features brought to double precision together, and the bytes of those for a mean.
TOGETHER, WHOLE = 8192, 512 * 2**20


class Whitening(nn.Module):
    r"""The affine map from features to whitened principal components.

    Arguments:
        mean: The mean :math:`m`, with shape :math:`(F)`.
        matrix: The components by their deviations, with shape :math:`(F, r)`; None only centres.
        rest: What single precision leaves of the mean, with shape :math:`(F)`; None where it is
            nothing beside the deviations. Features in double precision are centred in it.
    """

    mean: Tensor
    matrix: Tensor | None
    rest: Tensor | None

    def __init__(
        self, mean: Tensor, matrix: Tensor | None = None, rest: Tensor | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        # As a checkpoint has it: the order in memory decides the last bits of products.
        self.register_buffer("matrix", None if matrix is None else matrix.contiguous())
        self.register_buffer("rest", rest)

    @classmethod
    def empty(cls, features: int, rank: int, far: bool = False) -> "Whitening":
        r"""Returns one to put tensors into, with `far` also the rest of the mean."""
        mean, matrix = torch.zeros(features).float(), torch.zeros(features, rank).float()
        return cls(mean, matrix, mean.clone() if far else None)

    @property
    def shape(self) -> tuple[int, int]:
        r"""The numbers of features :math:`F` and of components :math:`r`."""
        return len(self.mean), len(self.mean if self.matrix is None else self.matrix[0])

    def forward(self, features: Tensor) -> Tensor:
        r"""Returns the components, with shape :math:`(B, r)`, of features :math:`(B, F)`."""
        centred = features.to(self.mean.dtype) - self.mean
        if self.rest is not None:
            wide = features.to(torch.promote_types(features.dtype, self.mean.dtype))
            centred = (wide - self.mean - self.rest).to(self.mean.dtype)
        # What is left of a folded one is a difference, which autocast leaves alone.
        if self.matrix is None:
            return centred
        with torch.autocast(features.device.type, enabled=False):
            return centred @ self.matrix


def whitening_of(id_features: Any, reference_features: Any, rank: int | None) -> Whitening:  # noqa: ANN401
    r"""Returns the whitening of the even mixture of two sets, whatever their sizes.

    A component of less than 1e-10 of the largest variance is rounding, and no component.

    Arguments:
        id_features: The features :math:`(N, F)` of ID images, a tensor or what comes in its pieces.
        reference_features: Those of reference images, with shape :math:`(M, F)`.
        rank: The number of components :math:`r`; None for all.

    Raises:
        UserError: If there are fewer components than asked for, or none.
    """
    sets = id_features, reference_features
    mean = torch.stack([_mean(x) for x in sets]).mean(dim=0)
    covariance = torch.zeros(len(mean), len(mean), dtype=mean.dtype)
    for x in sets:
        for part in x.split(TOGETHER):
            centred = part.double() - mean
            covariance += centred.T @ centred / (2 * len(x))
    values, vectors = (x.flip(-1) for x in torch.linalg.eigh(covariance))
    count = int((values > LEAST_VARIANCE * values[0].clamp(min=0)).sum())
    if count < (rank or 1):
        raise UserError(
            f"head.rank: got {'null' if rank is None else rank}, but the {len(mean)} features of "
            f"{sum(map(len, sets))} images vary in {count} directions alone; expected at most "
            "those, and one at least."
        )
    count = rank or count
    # The sign of an eigenvector is anybody's choice; this one is everybody's.
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    matrix = (vectors * largest.sign())[:, :count] / values[:count].sqrt()
    rest = mean - mean.float()
    is_far = any(x.dtype == torch.float64 for x in sets) and (rest @ matrix).abs().max() > NEAR
    return Whitening(mean.float(), matrix.float(), rest.float() if is_far else None)


def _mean(x: Any) -> Tensor:  # noqa: ANN401
    # Whole where it fits: axes of nearly equal variance turn with the last bits of a sum.
    sums = [part.double().sum(dim=0) for part in x.split(max(1, WHOLE // (8 * x.shape[1])))]
    return torch.stack(sums).sum(dim=0) / len(x)


class WhitenedRatio(RatioModel):
    r"""A ratio of features: a head on their whitened components.

    Arguments:
        whitening: The map from features :math:`(B, F)` to components :math:`(B, r)`.
        ratio: The log-ratio of components.
    """

    def __init__(self, whitening: Whitening, ratio: RatioModel) -> None:
        super().__init__()
        self.whitening, self.ratio = whitening, ratio

    def outputs(self, x: Tensor) -> Any:  # noqa: ANN401
        r"""Returns the head's outputs at features :math:`(B, F)`."""
        return self.ratio.outputs(self.whitening(x))

    def log_ratio_at(self, outputs: Any) -> Tensor:  # noqa: ANN401
        r"""Returns the log-ratios of the head's outputs, with shape :math:`(B)`."""
        return self.ratio.log_ratio_at(outputs)

    @torch.no_grad()
    def fold(self) -> RatioModel:
        r"""Returns the ratio of features with the head folded and the whitening merged into it."""
        whitening, ratio = copy.deepcopy(self.whitening), self.ratio.fold()
        if isinstance(ratio, FoldedRatio):
            first = _first_layer(ratio)
            if first is not None:
                parent, name = first
                setattr(parent, name, _merged(whitening, getattr(parent, name)))
                whitening.matrix = None
            ratio.backbone = nn.Sequential(whitening, ratio.backbone)
            return ratio.eval()
        network = ratio.network if isinstance(ratio, TimeConditionedRatio) else None
        if isinstance(network, TimeConditionedMLP) and whitening.matrix is not None:
            network.backbone.stem = _merged(whitening, network.backbone.stem)
            whitening.matrix = None
        return WhitenedRatio(whitening, ratio).eval()


def _first_layer(ratio: FoldedRatio) -> tuple[nn.Module, str] | None:
    r"""Returns what holds the affine layer that a folded head begins with, and under which name."""
    if isinstance(ratio.backbone, MLP):
        return ratio.backbone, "stem"
    return (ratio, "head") if isinstance(ratio.backbone, nn.Identity) else None


def _merged(whitening: Whitening, layer: nn.Linear) -> nn.Linear:
    r"""Returns the affine layer of centred features that equals one of their components."""
    assert whitening.matrix is not None
    merged = nn.Linear(len(whitening.mean), layer.out_features).to(layer.weight)
    merged.weight.copy_(layer.weight.double() @ whitening.matrix.double().T)
    merged.bias.copy_(layer.bias)
    return merged


class RepresentationRatio(RatioModel):
    r"""A frozen classifier and the ratio of its features, as one model from images to log-ratios.

    Arguments:
        classifier: The classifier; it is not copied, and its weights train no more.
        ratio: The ratio of its features, a :class:`WhitenedRatio` or what that folds to.
        layers: The layers to read, by their names in the classifier's backbone; none for the
            features that it classifies by.

    Raises:
        UserError: If there is no layer of a name.
    """

    def __init__(
        self, classifier: Classifier, ratio: RatioModel, layers: Sequence[str] = ()
    ) -> None:
        super().__init__()
        named_layers(classifier.backbone, layers)
        self.classifier = classifier.requires_grad_(False)
        self.ratio, self.layers = ratio, tuple(layers)
        # Kept by copies, too: a program that is exported measures nothing.
        self.axes: Known = {}

    @property
    def backbone(self) -> nn.Module:
        r"""The classifier's network, from images to the features that it classifies by."""
        return self.classifier.backbone

    @property
    def class_head(self) -> nn.Linear:
        r"""The affine map from these features to class logits."""
        return self.classifier.class_head

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns the log-ratios (nats, larger = more ID) and class logits of images, in one pass.

        Arguments:
            x: The images, with shape :math:`(B, C, H, W)`.
        """
        features, logits = classifier_features(self.classifier, x, self.layers, self.axes)
        return Prediction(self.ratio.log_ratio(features), logits)

    @torch.no_grad()
    def fold(self) -> "RepresentationRatio":
        r"""Returns the same with the head folded, and what can be merged: whitening, norms."""
        classifier = deployed(self.classifier, self.layers)
        folded = RepresentationRatio(classifier, self.ratio.fold(), self.layers)
        folded.axes = self.axes
        return folded.eval()


def classifier_features(
    classifier: Classifier, x: Tensor, layers: Sequence[str] = (), known: Known | None = None
) -> Features:
    r"""Returns the features :math:`(B, F)` and class logits of one pass, in the classifier's mode.

    Arguments:
        classifier: The classifier.
        x: The images, with shape :math:`(B, C, H, W)`.
        layers: As for :class:`RepresentationRatio`.
        known: As for :func:`~ood_osdre.models.frozen.read_layers`.
    """
    backbone = classifier.backbone
    if layers:
        modules = {layer: backbone.get_submodule(layer) for layer in layers}
        features, final = read_layers(backbone, modules, x, known)
    else:
        features = final = backbone(x)
    single = torch.promote_types(features.dtype, torch.float32)
    return Features(features.to(single), classifier.class_head(final))


Stamp = tuple[tuple[tuple[str, type[nn.Module]], ...], tuple[tuple[int, int], ...]]


class NetworkDigest:
    r"""Recognises a network by a hash of its modules and tensors, the `digest` of :meth:`of`.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> digest = NetworkDigest.of(net)
        >>> digest.matches(net), digest.matches(nn.Linear(2, 3))
        (True, False)
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self._last: tuple[weakref.ref[nn.Module], Stamp] | None = None

    @classmethod
    def of(cls, net: nn.Module) -> "NetworkDigest":
        r"""Returns the digest of a network as it is now."""
        digest = cls(_hash(net))
        digest._last = weakref.ref(net), _stamp(net)
        return digest

    def matches(self, net: nn.Module) -> bool:
        r"""Returns whether a network is this one.

        A network that has matched is not hashed again as long as its modules are the same and
        PyTorch counts no write to its tensors: one through `.data` is not counted, nor is any to a
        tensor made in inference mode.
        """
        now = _stamp(net)
        if self._last is not None and self._last[0]() is net and self._last[1] == now:
            return True
        if _hash(net) != self.digest:
            return False
        self._last = weakref.ref(net), now
        return True

    def check(self, net: nn.Module) -> None:
        r"""Raises a :class:`UserError` if the modules or the weights of a network are others."""
        if not self.matches(net):
            raise UserError(
                f"{type(unwrapped(net)).__name__}: not the network, or not the weights, that the "
                f"head was fitted to (digest {_hash(net)[:12]}, expected {self.digest[:12]}); "
                "fit a head to it."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A weak reference cannot be pickled.
        return {"digest": self.digest, "_last": None}


def _stamp(net: nn.Module) -> Stamp:
    r"""Returns the modules, where their tensors lie and how often they have been written to."""
    modules = tuple((name, type(module)) for name, module in net.named_modules())
    tensors = tuple(
        # PyTorch does not count writes to tensors made in inference mode.
        (t.data_ptr(), 0 if t.is_inference() else t._version)
        for t in (*net.parameters(), *net.buffers())
    )
    return modules, tensors


def _hash(net: nn.Module) -> str:
    bare, hasher = unwrapped(net), hashlib.sha256()
    for name, module in bare.named_modules():
        # Strides and slopes, which no tensor holds. What other modules print may change with use.
        options = module.extra_repr() if type(module).__module__.startswith("torch.nn.") else ""
        hasher.update(f"{name}={type(module).__name__}({options});".encode())
    for name, tensor in (bare.state_dict() | dict(bare.named_buffers())).items():
        if isinstance(tensor, Tensor):
            hasher.update(f"{name}:{tensor.dtype}{tuple(tensor.shape)};".encode())
            hasher.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
