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

A network without what its mode needs is refused in one line. It is never scored with something
else. So are, in the modes `network` and `checkpoint`, images of another size, and, as far as it
can be seen (:mod:`~ood_osdre.plugin.openood.statistics`), a host that normalises otherwise.
"""

__all__ = ["MODES", "Mode", "make_mode"]

import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...data.standardise import Preprocess
from ...detectors.feature_ratio import FeatureRatio, FeatureRatioOptions
from ...errors import UserError
from ...evaluation.scorer import Scorer, load_scorer
from ...models.frozen import NetworkDigest, collect_features, device_of, input_batches, unwrapped
from ...models.networks import check_inputs
from ...training.batches import broadened
from .host import Foreign
from .loaders import ReferenceImages, View, images_of, normalisation_of, view_of
from .network import OSDRENet, ratio_of
from .options import PostprocessorOptions
from .statistics import host_statistics, is_close, renormalised

#: What errors call the host's images.
IMAGES = "postprocessor: images"


class Mode(abc.ABC):
    r"""Abstract way to score.

    Arguments:
        options: The options.
    """

    #: The hyper-parameters that a search may change.
    sweepable: tuple[str, ...] = ()

    def __init__(self, options: PostprocessorOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        r"""Prepares for a network.

        Arguments:
            net: The network, in evaluation mode.
            id_loaders: OpenOOD's ID loaders by split.

        Raises:
            UserError: If the network or the host's images are not what the mode needs.
        """

    @abc.abstractmethod
    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        r"""Scores images.

        Arguments:
            net: The network, in evaluation mode.
            data: The images, preprocessed by the host, with shape :math:`(B, C, H, W)`.

        Returns:
            The class logits, with shape :math:`(B, C)`, and the log-ratios in nats (larger = more
            ID), with shape :math:`(B)`.

        Raises:
            UserError: If the network or the images are not what the mode needs.
        """

    def set(self, values: Mapping[str, Any]) -> None:
        r"""Sets hyper-parameters, and recomputes whatever depends on them."""
        if values:
            raise ValueError(f"Got {list(values)}, but this mode has no hyper-parameters.")


class NetworkMode(Mode):
    r"""The network is an OS-DRE network.

    Its images are the host's, whose accuracy comes from them, too. If the host normalises them
    otherwise than in training, it is the host that has to change.
    """

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        own = self._of(net).normalisation
        if own is None:
            return
        host = host_statistics(self.options, id_loaders)
        if host is not None and not is_close(own, host):
            raise UserError(
                f"postprocessor: the host normalises images by mean {_rounded(host[0])} and std "
                f"{_rounded(host[1])}, the network was trained with {_rounded(own[0])} and "
                f"{_rounded(own[1])}; pass the evaluator a preprocessor with these."
            )

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        own = self._of(net)
        return own.evaluate(check_inputs(data, _shape(own.size), IMAGES))

    def _of(self, net: nn.Module) -> OSDRENet:
        found = ratio_of(net)
        if found is None:
            raise UserError(
                f"postprocessor: {type(unwrapped(net)).__name__} is no OS-DRE network; load one "
                "with OSDRENet.load(folder), or use the mode 'checkpoint' or 'features'."
            )
        return found


class CheckpointMode(Mode):
    r"""A trained scorer scores beside any classifier.

    The host's images are normalised again where the scorer was trained with other statistics.
    """

    def __init__(self, options: PostprocessorOptions) -> None:
        super().__init__(options)
        if options.checkpoint is None:
            raise UserError("postprocessor_args.checkpoint: the mode 'checkpoint' needs a folder.")
        self.scorer = load_scorer(Path(options.checkpoint))
        self.host = host_statistics(options, {})

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        self.host = host_statistics(self.options, id_loaders)

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        check_inputs(data, _shape(self.scorer.metadata.get("size")), IMAGES)
        scorer = self._on(data.device)
        x = data if self.host is None else renormalised(data, self.host, scorer.preprocess)
        return net(data), scorer.ratio.log_ratio(x)

    def _on(self, device: torch.device) -> Scorer:
        if self.scorer.preprocess.device != device:
            self.scorer = replace(
                self.scorer,
                ratio=self.scorer.ratio.to(device),
                preprocess=self.scorer.preprocess.on(device),
            )
        return self.scorer


class FeaturesMode(Mode):
    r"""A ratio head on the frozen network's own features.

    Arguments:
        options: The options.
        head: The head's options.
        reference: Batches of reference images, preprocessed as the network expects; None for the
            files that the options name.
    """

    sweepable = tuple(FeatureRatioOptions().to_dict())

    def __init__(
        self,
        options: PostprocessorOptions,
        head: FeatureRatioOptions | None = None,
        reference: Foreign = None,
    ) -> None:
        super().__init__(options)
        self.reference = reference
        self.ratio = FeatureRatio(head, options.layer)
        self.is_trained = options.checkpoint is not None
        if options.checkpoint is not None:
            self.ratio = FeatureRatio.load(options.checkpoint)
        elif reference is None and options.reference is None:
            raise UserError(
                "postprocessor_args.reference: the mode 'features' needs reference images, a "
                "folder or a list file (or a checkpoint of a head)."
            )
        self._features: tuple[Tensor, Tensor] | None = None

    def setup(self, net: nn.Module, id_loaders: Mapping[str, Any]) -> None:
        if self.is_trained:
            self.ratio.check_network(net)
            return
        known = self.ratio.known
        if self.ratio.ratio is not None and known is not None and known.matches(net):
            return
        view = view_of(id_loaders, self.options.id_split)
        loader = id_loaders[self.options.id_split]
        layer = self.ratio.layer
        self._features = (
            collect_features(net, images_of(loader, view.key), layer),
            collect_features(net, self._broadened(view, loader), layer),
        )
        self._fit(device_of(net), NetworkDigest.of(net))

    def evaluate(self, net: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio, given = self.ratio.evaluate(net, data)
        if given.logits is None:
            raise UserError(
                f"postprocessor: {type(unwrapped(net)).__name__} gives no class logits, which "
                "OpenOOD's accuracy needs."
            )
        return given.logits, log_ratio

    def set(self, values: Mapping[str, Any]) -> None:
        r"""Changes options of the head, and trains it anew if it was trained."""
        if self.is_trained:
            raise UserError("postprocessor_args.checkpoint: a saved head has nothing to search.")
        options = self.ratio.options.replace(**values)
        if options == self.ratio.options:
            return
        device = "cpu" if self.ratio.standardise is None else self.ratio.standardise.device
        was_fitted = self.ratio.ratio is not None
        if was_fitted and self._features is None:
            raise UserError(
                "postprocessor: the features were not kept with the file; set up anew."
            )
        known, self.ratio = self.ratio.known, FeatureRatio(options, self.ratio.layer)
        if was_fitted:
            self._fit(device, known)

    def _fit(self, device: torch.device | str, known: NetworkDigest | None) -> None:
        if self._features is not None:
            self.ratio.fit_features(*self._features, device)
            self.ratio.known = known

    def _broadened(self, view: View, like: object) -> Iterator[Tensor]:
        batches = input_batches(self._reference_images(view, like))
        if not self.options.broaden:
            return batches
        statistics = self.options.statistics() or normalisation_of(view.transform)
        if statistics is None:
            raise UserError(
                "postprocessor_args.broaden: the ID loader does not show how it normalises; give "
                "'mean' and 'std', or set it to 0."
            )
        return broadened(batches, Preprocess(*statistics), self.options.broaden)

    def _reference_images(self, view: View, like: object) -> Foreign:
        if self.reference is not None:
            return self.reference
        if view.transform is None:
            raise UserError(
                "postprocessor: the ID loader does not show its transform, so the reference "
                "images cannot be preprocessed alike; pass batches of them, reference=loader."
            )
        o = self.options
        root = None if o.reference_root is None else Path(o.reference_root)
        return ReferenceImages(Path(str(o.reference)), root, view.transform).loader(like)

    def __getstate__(self) -> dict[str, Any]:
        # Features are large, and loaders need not be picklable.
        return {**self.__dict__, "_features": None, "reference": None}


#: The modes by name.
MODES: dict[str, Callable[..., Mode]] = {
    "network": NetworkMode,
    "checkpoint": CheckpointMode,
    "features": FeaturesMode,
}


def make_mode(
    options: PostprocessorOptions, head: FeatureRatioOptions | None, reference: Foreign
) -> Mode:
    r"""Builds the mode of the options, refusing what only another mode would use."""
    if options.mode == "features":
        return FeaturesMode(options, head, reference)
    unused = {"head": head, "reference": reference or options.reference, "layer": options.layer}
    for name, value in unused.items():
        if value is not None:
            raise UserError(
                f"postprocessor_args.{name}: belongs to the mode 'features', got {options.mode!r}."
            )
    return MODES[options.mode](options)


def _shape(size: int | None) -> tuple[int, ...] | None:
    r"""Returns the shape of an image in training; None if it is not known."""
    return None if size is None else (3, size, size)


def _rounded(values: list[float]) -> list[float]:
    return [round(v, 4) for v in values]
