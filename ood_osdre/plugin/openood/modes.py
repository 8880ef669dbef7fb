r"""The three ways to get a log-ratio inside OpenOOD, given its network and its images.

=============  ========================================================  =====================
Mode           What scores                                               Passes
=============  ========================================================  =====================
`network`      the network itself, an OS-DRE network: one head gives     one
               the class, the other the ratio
`checkpoint`   a trained scorer of a run folder, beside any classifier   one of each
`features`     a ratio head on the classifier's own frozen features,     one of the classifier
               trained in `setup` on ID and reference images
=============  ========================================================  =====================

All of them score with a folded ratio. A network without what its mode needs is refused, and so are
images of another size than in training and, as far as it can be seen
(:mod:`~ood_osdre.plugin.openood.loaders`), a host that normalises otherwise.
"""

__all__ = ["MODES", "Mode", "PostprocessorOptions"]

import abc
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import Self

from ...config import HeadConfig
from ...data.transforms import Preprocess
from ...detectors import FeatureRatio, load_scorer
from ...errors import UserError
from ...files import local
from ...models import (
    NetworkDigest,
    OneStepRatio,
    RepresentationRatio,
    SummedScore,
    check_inputs,
    collect_features,
    device_of,
    input_batches,
)
from ...options import Options, Positive, Share, flat
from ...training.batches import SHARE, broadened
from ...training.checkpoint import input_shape
from .loaders import (
    ReferenceImages,
    Statistics,
    View,
    host_statistics,
    is_close,
    normalisation_of,
    per_channel,
    view_of,
)
from .network import OSDRENet

#: What errors call the host's images.
IMAGES = "postprocessor: images"


class PostprocessorOptions(Options):
    r"""The `postprocessor_args` of OpenOOD's YAML file.

    Attributes:
        mode: One of :data:`MODES`.
        checkpoint: The run folder of a trained scorer, for the mode `checkpoint`; or the folder
            of a saved :class:`~ood_osdre.detectors.feature_ratio.FeatureRatio`, for `features`,
            which then trains nothing.
        reference: The reference of the mode `features`: a folder, a list file, or (in Python)
            batches of images, preprocessed as the network expects.
        reference_root: The folder that a list's paths are relative to; null for its own.
        head: The head of the mode `features`, its training, and the layers of the network to read;
            without layers the ways that networks offer features (:mod:`ood_osdre.models.frozen`).
        id_split: The ID split that the mode `features` trains on.
        broaden: The share of the reference that the mode `features` transforms strongly, so that
            far-OOD images lie within its reach (:mod:`ood_osdre.training.batches`).
        mean: The means, of pixels in [0, 1], that the host's images were normalised with; null to
            read them off its transform.
        std: The standard deviations, likewise.
    """

    mode: Literal["network", "checkpoint", "features"] = "network"
    checkpoint: str | None = None
    reference: Any = None
    reference_root: str | None = None
    head: HeadConfig | None = None
    id_split: str = "train"
    broaden: Share = SHARE
    mean: Annotated[tuple[Share, ...], Field(strict=False)] | None = None
    std: Annotated[tuple[Positive, ...], Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        fault = None
        if (self.mean is None) != (self.std is None):
            fault = "mean: give both 'mean' and 'std', or neither."
        elif self.mode != "features":
            if self.mode == "checkpoint" and self.checkpoint is None:
                fault = "checkpoint: the mode 'checkpoint' needs a run folder."
            for name in ("head", "reference"):
                if getattr(self, name) is not None:
                    fault = f"{name}: belongs to the mode 'features', got {self.mode!r}."
        elif not isinstance(self.reference, Iterable | os.PathLike) and self.checkpoint is None:
            fault = (
                "reference: the mode 'features' needs reference images, a folder, a list file or "
                "batches (or the checkpoint of a head)."
            )
        if fault is not None:
            raise ValueError(fault)
        return self

    def statistics(self) -> Statistics | None:
        r"""Returns the means and the standard deviations of the channels; None if not given."""
        given = self.mean is not None
        return per_channel(self.mean, self.std, "postprocessor_args") if given else None


class Mode(abc.ABC):
    r"""Abstract way to score; networks are in evaluation mode whenever they come."""

    def __init__(self, options: PostprocessorOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        r"""Prepares for a network and for the images of OpenOOD's ID loaders, by split."""

    @abc.abstractmethod
    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor | None, Tensor]:
        r"""Returns the class logits and the log-ratios of images.

        Arguments:
            net: The network.
            data: The images, preprocessed by the host, with shape :math:`(B, C, H, W)`.

        Returns:
            The logits, with shape :math:`(B, C)`, None from a network without any, and the
            log-ratios in nats, of a sum its scores without a unit (larger = more ID), with shape
            :math:`(B)`.
        """

    def get(self) -> Mapping[str, Any]:
        r"""Returns the hyper-parameters that a search may change, by name."""
        return {}

    def set(self, values: Mapping[str, Any]) -> None:
        r"""Sets hyper-parameters, and recomputes whatever depends on them."""
        assert not values, "a mode without hyper-parameters"


class NetworkMode(Mode):
    r"""The network is an OS-DRE network.

    Its images are the host's, whose accuracy comes from them, too. If the host normalises them
    otherwise than in training, it is the host that has to change.

    A network that is not folded, as the trainer returns it, is folded in `setup`, and again when
    its weights have changed.
    """

    def __init__(self, options: PostprocessorOptions) -> None:
        super().__init__(options)
        self._source: NetworkDigest | None = None
        self._folded: OSDRENet | None = None

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        own = OSDRENet.wrap(net)
        self._source = None  # folds anew, also after a write that PyTorch did not count
        self._scorer(own, device_of(net))
        if own.normalisation is None:
            return
        host = host_statistics(self.options.statistics(), id_loaders)
        if host is not None and not is_close(own.normalisation, host):
            found, trained = (
                " and std ".join(str([round(v, 4) for v in values]) for values in statistics)
                for statistics in (host, own.normalisation)
            )
            raise UserError(
                f"postprocessor: the host normalises images by mean {found}, the network was "
                f"trained with {trained}; pass the evaluator a preprocessor with these."
            )

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor | None, Tensor]:
        own = OSDRENet.wrap(net)
        check_inputs(data, own.shape, IMAGES)
        return self._scorer(own, data.device).evaluate(data)

    def _scorer(self, own: OSDRENet, device: torch.device) -> OSDRENet:
        r"""Returns the network with its ratio folded, on a device."""
        if not isinstance(own.ratio, OneStepRatio | RepresentationRatio | SummedScore):
            return own
        if self._folded is None or self._source is None or not self._source.matches(own.ratio):
            self._folded, self._source = own.fold(), NetworkDigest.of(own.ratio)
        return self._folded.to(device)

    def __getstate__(self) -> dict[str, Any]:
        # The network is its owner's to keep.
        return {**self.__dict__, "_source": None, "_folded": None}


class CheckpointMode(Mode):
    r"""A trained scorer scores beside any classifier.

    The host's images are normalised again where the scorer was trained with other statistics.
    """

    def __init__(self, options: PostprocessorOptions) -> None:
        super().__init__(options)
        self.scorer = load_scorer(str(options.checkpoint))
        self.host = options.statistics()

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        self.host = host_statistics(self.options.statistics(), id_loaders)

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor | None, Tensor]:
        check_inputs(data, input_shape(self.scorer.metadata), IMAGES)
        if self.scorer.preprocess.device != data.device:
            self.scorer = self.scorer.on(data.device)
        own, x = self.scorer.preprocess, data
        if self.host is not None and not is_close(
            self.host, (own.mean.tolist(), own.std.tolist())
        ):
            mean, std = (data.new_tensor(values)[:, None, None] for values in self.host)
            x = own.normalise(data * std + mean)
        return net(data), self.scorer.ratio.log_ratio(x)


class FeaturesMode(Mode):
    r"""A ratio head on the frozen network's own features."""

    def __init__(self, options: PostprocessorOptions) -> None:
        super().__init__(options)
        self.ratio = FeatureRatio(options.head)
        if options.checkpoint is not None:
            self.ratio = FeatureRatio.load(options.checkpoint)
        self.is_saved = options.checkpoint is not None
        self._features: tuple[Tensor, Tensor] | None = None

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        if self.is_saved:
            self.ratio.check_network(net)
            return
        known = self.ratio.known
        if self.ratio.ratio is not None and known is not None and known.matches(net):
            return
        view = view_of(id_loaders, self.options.id_split)
        self._features = (
            collect_features(net, view.images(), self.ratio.options.layers),
            collect_features(net, self._reference(view), self.ratio.options.layers),
        )
        self._fit(device_of(net), NetworkDigest.of(net))

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor | None, Tensor]:
        log_ratio, given = self.ratio.evaluate(net, data)
        return given.logits, log_ratio

    def get(self) -> Mapping[str, Any]:
        r"""Returns the options of the head by dotted key, none of a saved one."""
        return {} if self.is_saved else flat(self.ratio.options.to_dict())

    def set(self, values: Mapping[str, Any]) -> None:
        r"""Changes options of the head, and trains it anew if it was trained."""
        old = self.ratio
        options = old.options.changed(values, "head")
        if options == old.options:
            return
        self.ratio = FeatureRatio(options)
        if old.trained is not None:
            self._fit(device_of(old.trained), old.known)

    def _fit(self, device: torch.device, known: NetworkDigest | None) -> None:
        assert self._features is not None, "features are not kept in a file; call setup again"
        self.ratio.fit_features(*self._features, device)
        self.ratio.known = known

    def _reference(self, view: View) -> Iterator[Tensor]:
        r"""Returns the reference images, some of them broadened, read as the ID images are."""
        o = self.options
        is_read = isinstance(o.reference, str | os.PathLike)
        statistics = o.statistics() or normalisation_of(view.transform)
        if is_read and view.transform is None:
            raise UserError(
                "postprocessor_args.reference: the ID loader does not show its transform, by "
                "which files are read; pass batches of images."
            )
        if o.broaden and statistics is None:
            raise UserError(
                "postprocessor_args.broaden: the ID loader does not show how it normalises; give "
                "'mean' and 'std', or set it to 0."
            )
        images = o.reference
        if is_read:
            root = None if o.reference_root is None else local(o.reference_root)
            images = ReferenceImages(local(images), root, view.transform).loader(view.loader)
        batches = input_batches(images)
        if statistics is None or not o.broaden:
            return batches
        return broadened(batches, Preprocess(*statistics), o.broaden)

    def __getstate__(self) -> dict[str, Any]:
        # Features are large, and loaders need not be picklable.
        options = self.options.model_copy(update={"reference": None})
        return {**self.__dict__, "options": options, "_features": None}


#: The modes by name.
MODES: dict[str, type[Mode]] = {
    "network": NetworkMode,
    "checkpoint": CheckpointMode,
    "features": FeaturesMode,
}
