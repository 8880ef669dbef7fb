r"""A ratio head on a frozen network: log-ratios of features, without retraining the network.

A classifier that somebody trained, for ID classes alone, is kept as it is. Its features of ID and
of reference images are computed once, and a small one-step ratio is trained on them, which takes
a minute or so on a CPU:

.. math:: \log \hat{r}(x) = K^{-1/2} \langle h(w(x)), \bar{g} \rangle
    \approx \log \frac{q_1(w(x))}{q_0(w(x))} \, ,

with :math:`w` the whitened features (:mod:`ood_osdre.models.representation`) and :math:`q_1, q_0`
their densities over ID and reference images. Scoring costs one pass of the network and a small MLP.
The log-ratio is in nats, and larger means more ID. What the features do not tell apart, no head can.

A head keeps a digest of the network that it was fitted to and refuses others, see
:class:`~ood_osdre.models.representation.NetworkDigest`. The main command fits the same head to a
classifier of its own and deploys both as one model.
"""

__all__ = ["FeatureRatio"]

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import HeadConfig
from ..errors import UserError
from ..evaluation.metrics import check_scores
from ..files import local
from ..models import (
    Features,
    NetworkDigest,
    RatioModel,
    WhitenedRatio,
    Whitening,
    collect_features,
    device_of,
    extract_features,
)
from ..training import checkpoint
from ..training.build import build_head
from ..training.run import check_finished
from ..training.surroundings import own_surroundings, same_random_numbers
from .feature_head import check_features, fit_head

NAME = "feature_ratio"


class FeatureRatio:
    r"""The log-ratio of a frozen network's features.

    Arguments:
        options: The head and its training: options by name that differ from the defaults, or
            :class:`~ood_osdre.config.HeadConfig`. Its `layers` are those of the network, none for
            the ways of :mod:`ood_osdre.models.frozen` that the network offers itself. The ID images
            are those of :meth:`fit`, so `id_from` is not to be changed.

    Raises:
        UserError: If an option is unknown or out of range, or has no effect here.

    Example:
        >>> shift = torch.tensor([1.0, 0.0]).view(2, 1, 1)
        >>> id_features, reference_features = torch.randn(2, 200, 8) + shift
        >>> ratio = FeatureRatio(HeadConfig.of({"rank": 4, "training": {"steps": 20}}, "head"))
        >>> ratio.fit_features(id_features, reference_features).log_ratio_of_features(
        ...     torch.zeros(5, 8)
        ... ).shape
        torch.Size([5])
    """

    def __init__(self, options: HeadConfig | Mapping[str, Any] | None = None) -> None:
        self.options = HeadConfig.of({} if options is None else options, "options")
        if self.options.id_from != "train":
            expected = "expected train: ID images are those that a fit is given"
            raise UserError(f"options: id_from: got {self.options.id_from}, {expected}.")
        self.net: nn.Module | None = None
        #: The network that the features came from; None if that is not recorded.
        self.known: NetworkDigest | None = None
        #: The folded ratio of features, which scores, and the one that was trained, which is saved.
        self.ratio: RatioModel | None = None
        self.trained: WhitenedRatio | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        state = f"of {self.features} features" if self.features else "not fitted"
        return f"FeatureRatio({self.options.estimator}, {state})"

    @property
    def features(self) -> int:
        r"""The number of features :math:`F`; 0 before fitting."""
        return 0 if self.trained is None else len(self.trained.whitening.mean)

    @same_random_numbers()
    def fit(
        self,
        net: nn.Module,
        id_images: Tensor | Iterable[Any],
        reference_images: Tensor | Iterable[Any],
        batch_size: int = 256,
        progress: bool = False,
    ) -> "FeatureRatio":
        r"""Computes the features of ID and reference images and trains the head on them.

        Arguments:
            net: The network, which is evaluated in evaluation mode and left as it is.
            id_images: Inputs of the network, preprocessed as it expects: one tensor with shape
                :math:`(N, *)`, or a data loader of tensors, of tuples that start with them, or of
                mappings with a key `data` or `image`.
            reference_images: The same of the reference, best with a share of it
                :func:`~ood_osdre.training.batches.broadened`: far-OOD images then lie within the
                head's reach.
            batch_size: The number of images evaluated at once, if they come in one tensor.
            progress: Whether to show a progress bar.

        Returns:
            The ratio itself, with :meth:`log_ratio` ready.

        Raises:
            UserError: If the network offers no features, or as :meth:`fit_features`.
        """
        id_features, reference_features = (
            collect_features(net, images, self.options.layers, batch_size)
            for images in (id_images, reference_images)
        )
        self.fit_features(id_features, reference_features, device_of(net), progress)
        return self.attach(net)

    def fit_features(
        self,
        id_features: Tensor,
        reference_features: Tensor,
        device: torch.device | str = "cpu",
        progress: bool = False,
    ) -> "FeatureRatio":
        r"""Trains the head on features.

        Arguments:
            id_features: The features of ID data, with shape :math:`(N, F)`.
            reference_features: The features of reference data, with shape :math:`(M, F)`.
            device: Where the head is trained and evaluated.
            progress: Whether to show a progress bar.

        Returns:
            The ratio itself.

        Raises:
            TypeError: If the features are no tensors.
            UserError: If a signal stopped the training, or as
                :func:`~ood_osdre.detectors.feature_head.fit_head`.
        """
        fitted = fit_head(self.options, id_features, reference_features, device, progress=progress)
        check_finished(fitted.outcome, self.options.training.steps)
        self._take(fitted.model)
        self.known = None
        self.seconds = fitted.outcome.seconds
        return self

    @torch.no_grad()
    def log_ratio_of_features(self, features: Tensor, batch_size: int = 8192) -> Tensor:
        r"""Returns the log-ratio of features.

        Arguments:
            features: The features, with shape :math:`(N, F)`.
            batch_size: The number of them evaluated at once.

        Returns:
            The log-ratios in nats (larger = more ID), with shape :math:`(N)`, on the device of
            the features.

        Raises:
            TypeError: If the features are no tensor.
            UserError: If nothing is fitted, or features or log-ratios are not finite, or of
                another number.
        """
        self._fitted()
        assert self.ratio is not None
        single = check_features(features, self.features)
        own = single.to(device_of(self.ratio))
        scores = torch.cat([self.ratio.log_ratio(x) for x in own.split(batch_size)])
        check_scores("features", scores.float().cpu().numpy())
        return scores.to(features.device)

    def attach(self, net: nn.Module) -> "FeatureRatio":
        r"""Sets the network whose features :meth:`log_ratio` takes; it is not copied or saved.

        Arguments:
            net: The network that the features of the fit came from. A head that was fitted to
                features alone takes the first network for it.

        Returns:
            The ratio itself, on the network's device.

        Raises:
            UserError: If the head was fitted to another network.
        """
        device = device_of(net)
        self.check_network(net)
        if self.known is None:
            self.known = NetworkDigest.of(net)
        self.net = net
        return self.to(device)

    def check_network(self, net: nn.Module) -> None:
        r"""Raises a :class:`UserError` if the head is known to belong to another network."""
        if self.known is not None:
            self.known.check(net)

    def evaluate(self, net: nn.Module, x: Tensor) -> tuple[Tensor, Features]:
        r"""Returns the log-ratios of inputs, with the features and logits of the same pass.

        Arguments:
            net: The network that the features of the fit came from.
            x: Its inputs, with shape :math:`(B, *)`.

        Raises:
            UserError: If the head was fitted to another network, or to other weights of it; or as
                :meth:`log_ratio_of_features`.
        """
        self.check_network(net)
        given = extract_features(net, x, self.options.layers)
        return self.log_ratio_of_features(given.features), given

    def log_ratio(self, x: Tensor) -> Tensor:
        r"""Returns the log-ratios of inputs, in one pass of the network that is attached.

        Arguments:
            x: Inputs of the network, preprocessed as it expects, with shape :math:`(B, *)`.

        Returns:
            The log-ratios in nats (larger = more ID), with shape :math:`(B)`.

        Raises:
            UserError: If there is no network, or as :meth:`evaluate`.
        """
        if self.net is None:
            raise UserError("FeatureRatio: has no network; call fit, or attach(net) after load.")
        return self.evaluate(self.net, x)[0]

    def to(self, device: torch.device | str) -> "FeatureRatio":
        r"""Moves the head to a device."""
        if self.ratio is not None:
            self.ratio.to(device)
        return self

    def save(self, folder: str | Path) -> None:
        r"""Writes the head, not the network, into a folder; refuses one that is not fitted."""
        trained = self._fitted()
        metadata = {
            "options": self.options.to_dict(),
            "network": None if self.known is None else self.known.digest,
            "seconds": self.seconds,
        }
        checkpoint.write_checkpoint(local(folder), NAME, trained.state_dict(), metadata)

    @classmethod
    @own_surroundings()
    def load(cls, folder: str | Path, net: nn.Module | None = None) -> "FeatureRatio":
        r"""Reads a head that :meth:`save` wrote.

        Arguments:
            folder: The folder.
            net: The network that it was fitted to; None to :meth:`attach` it later.

        Raises:
            UserError: If the folder holds none, it is damaged, or the network is another one.
        """
        tensors, metadata, _ = checkpoint.read_checkpoint(local(folder), NAME)
        source = checkpoint.checkpoint_path(local(folder), NAME)
        try:
            self = cls(HeadConfig.of(metadata["options"], str(source)))
            self.seconds = metadata["seconds"]
            digest = metadata["network"]  # null for a head fitted to features alone
            features, rank = tensors["whitening.matrix"].shape
            whitening = Whitening.empty(features, rank, far="whitening.rest" in tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{source}: not a ratio of features ({error}).") from None
        ratio = WhitenedRatio(whitening, build_head(self.options, rank))
        checkpoint.restore(ratio, tensors, source)
        self._take(ratio)
        self.known = None if digest is None else NetworkDigest(digest)
        return self if net is None else self.attach(net)

    def _fitted(self) -> WhitenedRatio:
        if self.trained is None:
            raise UserError("FeatureRatio: not fitted; call fit or fit_features, or load one.")
        return self.trained

    def _take(self, trained: WhitenedRatio) -> None:
        # Folding draws the weights of a layer, only to replace them.
        with same_random_numbers():
            self.trained, self.ratio = trained.eval(), trained.fold()

    def __getstate__(self) -> dict[str, Any]:
        # The network is its owner's to keep.
        return {**self.__dict__, "net": None}
