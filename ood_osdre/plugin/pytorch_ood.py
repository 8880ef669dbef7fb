r"""Detectors for pytorch-ood (0.4 or later): **larger = more OOD**, the opposite of our sign.

Both follow its conventions: loaders yield `(x, y)`, and a label below 0 marks OOD. In `fit` and
`fit_features` those samples are the *reference* that the ratio is taken to, as they are the
auxiliary outliers of other objectives. They must not be those of a test set. Both score with a
folded ratio.

:class:`OneStepRatioDetector` scores with a network of ours, trained here or elsewhere, and
:class:`FeatureRatioDetector` puts a ratio head on the features of a frozen `encoder`. Both take
images as the host's other detectors do, normalised for its networks. `mean` and `std` of the
channels, of pixels in :math:`[0, 1]`, say how; without them the transform of the data set that `fit`
gets, and where that shows nothing either, images are pixels as `ToTensor` makes them. Both transform
a share `broaden` of the reference images strongly: without it, far OOD lies outside both sets and
the answer there is arbitrary.
"""

__all__ = ["FeatureRatioDetector", "OneStepRatioDetector"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import Config, HeadConfig
from ..data.transforms import Standardiser
from ..detectors import FeatureRatio, OneStepDetector, Scorer
from ..errors import UserError
from ..evaluation.metrics import check_scores
from ..models import RatioModel, check_inputs, describe_backbone
from ..options import shown
from ..training.batches import SHARE
from ..training.checkpoint import input_shape
from .pytorch_ood_loaders import Batches, HostImages, Searched, checked, encoded, joined, share_of

try:
    from pytorch_ood.api import (
        Detector,
        DetectorInfo,
        FeaturesDetector,
        ModelNotSetException,
        Paper,
        RequiresFittingException,
        Task,
    )

    REASON = None
    INFO = DetectorInfo(
        tasks={Task.CLASSIFICATION},
        paper=Paper(
            title="One-Step Score-Based Density Ratio Estimation",
            venue="arXiv",
            year=2026,
            url="https://arxiv.org/abs/2604.10672",
        ),
    )
except ImportError as error:
    # The module stays importable, for its documentation and for tests; its classes do not work.
    REASON, INFO = error, None
    if not TYPE_CHECKING:
        Detector = FeaturesDetector = object


def _require() -> None:
    if REASON is not None:
        needed = "pytorch-ood 0.4 or later is needed: pip install 'pytorch-ood>=0.4'"
        raise ImportError(f"{needed} ({REASON})")


class OneStepRatioDetector(Searched, Detector):
    r"""The negated log-ratio of a one-step ratio; larger = more OOD.

    Arguments:
        model: A :class:`~ood_osdre.detectors.one_step.OneStepDetector`, fitted or to be fitted, or
            a :class:`~ood_osdre.detectors.scorer.Scorer`: these take images, see `mean`, and apply
            their own statistics. Or a bare ratio, which takes network inputs.
        broaden: The share of the reference images that training transforms strongly; None for what
            the detector's configuration says under `data.broaden`, or a third if that is 0.
        mean: The means that images were normalised with; None for those that :meth:`fit` finds.
        std: The standard deviations, likewise.

    Raises:
        UserError: If the model is none of these, or an argument is out of range.
    """

    info = INFO
    #: Options of the configuration by dotted key, each of which trains a network; none if it is given.
    hyperparameter_space = {"data.broaden": [0.2, SHARE, 0.5]}  # noqa: RUF012

    def __init__(
        self,
        model: OneStepDetector | Scorer | RatioModel,
        broaden: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        _require()
        super().__init__()
        self.ratio: RatioModel | None = None
        self.preprocess: Standardiser | None = None
        self.shape: tuple[int, ...] | None = None
        self._broaden = None if broaden is None else share_of(broaden)
        self._images = HostImages(mean, std)
        self._detector = model if isinstance(model, OneStepDetector) else None
        if self._detector is None:
            self.hyperparameter_space = {}
        if isinstance(model, RatioModel):
            self.ratio = model.fold()
        elif isinstance(model, Scorer):
            self._take(model)
        elif not isinstance(model, OneStepDetector):
            expected = "a OneStepDetector, a ratio or a Scorer, as load_scorer(folder) reads"
            raise UserError(f"model: got {shown(model)}, expected {expected}.")
        elif model.is_fitted:
            self._take(model.scorer)
        self.requires_fit = self.ratio is None

    def fit(self, data_loader: Batches) -> "OneStepRatioDetector":
        r"""Fits the :class:`OneStepDetector` that was given; any other model stays as it is.

        Arguments:
            data_loader: Batches `(x, y)` of images or vectors; labels below 0 mark the reference.

        Raises:
            UserError: If the loader yields no such pairs, no ID samples or no reference, or its
                images are neither pixels nor normalised in a way that is known.
        """
        self._images.look_at(data_loader)
        detector = self._detector
        if detector is not None:
            pairs = [(self._images.pixels(x).cpu(), y.cpu()) for x, y in checked(data_loader)]
            id_data, reference = joined(
                [x[y >= 0] for x, y in pairs], [x[y < 0] for x, y in pairs]
            )
            labels = torch.cat([y[y >= 0] for _, y in pairs]).numpy()
            if id_data.ndim == 4:
                own, given = detector.config.data.broaden, self._broaden
                share = {"data.broaden": own or SHARE if given is None else given}
                detector.config = detector.config.changed(share, "config")
            self._take(detector.fit(id_data, reference, labels=labels).scorer)
            self.requires_fit = False
        return self

    def set_hyperparameters(self, **kwargs: object) -> "OneStepRatioDetector":
        r"""Sets options of the configuration, by dotted key; the detector is then to be fitted.

        Raises:
            UserError: If there is none to change, or an option is unknown or out of range.
        """
        if self._detector is None:
            raise UserError("hyperparameters: a trained ratio has none.")
        self._detector.config = self._detector.config.changed(kwargs, "config")
        if "data.broaden" in kwargs:
            self._broaden = self._detector.config.data.broaden
        self.ratio, self.requires_fit = None, True
        return self

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        r"""Returns the outlier scores.

        Arguments:
            x: The pixels or inputs, with shape :math:`(B, *)`.

        Returns:
            The negated log-ratios in nats, of a sum its scores without a unit, larger = more OOD, with
            shape :math:`(B)`.

        Raises:
            RequiresFittingException: If there is no trained ratio yet.
            TypeError: If the inputs are no tensor.
            UserError: If they are not of the shape in training (which a bare ratio does not know),
                not finite floats, or images as :meth:`fit` refuses; or if a score is not finite.
        """
        if self.ratio is None:
            raise RequiresFittingException
        check_inputs(x, self.shape)
        if self.preprocess is None:
            inputs = x.to(next(self.ratio.parameters()).device)
        elif x.ndim == 4:
            pixels = self._images.pixels(x).to(self.preprocess.device, torch.float32)
            inputs = self.preprocess.normalise(pixels)
        else:
            inputs = self.preprocess(x)
        scores = self.ratio(inputs)
        check_scores("x", scores.float().cpu().numpy())
        return -scores

    def to(self, device: torch.device | str) -> "OneStepRatioDetector":
        r"""Moves the detector to a device."""
        super().to(device)
        if self.preprocess is not None:
            self.preprocess = self.preprocess.on(device)
        return self

    @property
    def _options(self) -> Config | None:
        return None if self._detector is None else self._detector.config

    def _take(self, scorer: Scorer) -> None:
        # A copy, because moving the detector must not move the scorer.
        self.ratio, self.preprocess = scorer.ratio.fold(), scorer.preprocess
        self.shape = input_shape(scorer.metadata)


class FeatureRatioDetector(Searched, FeaturesDetector):
    r"""The negated log-ratio of a frozen encoder's features; larger = more OOD.

    The features of the last reference are kept, and stand in where features come without any: the
    host's `GridSearch` leaves labels below 0 out where it keeps an encoder's features. After a
    :meth:`fit` it trains the head alone for each combination; else it encodes the images again.

    Arguments:
        encoder: A callable from inputs :math:`(B, *)` to features; None for
            :meth:`fit_features` and :meth:`predict_features` alone. A module is evaluated in
            evaluation mode, and left as it is.
        options: The head and its training, see :class:`~ood_osdre.config.HeadConfig`. It has no
            `layers`: the encoder gives the features.
        broaden: The share of the reference images :math:`(B, C, H, W)` that :meth:`fit` transforms
            strongly before they are encoded; inputs of another shape are taken as they are.
        mean: The means that images were normalised with; None for those that :meth:`fit` finds.
        std: The standard deviations, likewise.

    Raises:
        UserError: If an argument or an option is unknown or out of range.
    """

    info = INFO
    requires_fit = True
    #: Options of the head by dotted key; `GridSearch` may be given any others.
    hyperparameter_space = {"training.lr": [5e-4, 2e-3], "training.steps": [1000, 3000]}  # noqa: RUF012

    def __init__(
        self,
        encoder: Callable[[Tensor], Tensor] | None,
        options: HeadConfig | Mapping[str, Any] | None = None,
        broaden: float = SHARE,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        _require()
        super().__init__()
        self._encoder = encoder
        self.head = FeatureRatio(options)
        if layers := self.head.options.layers:
            raise UserError(f"layers: got {list(layers)}, expected none: the encoder has its own.")
        self._broaden = share_of(broaden)
        self._images = HostImages(mean, std)
        # An array, which the host neither moves nor takes for a sign of the detector's device.
        self._reference: Any = None

    @property
    def encoder(self) -> Callable[[Tensor], Tensor] | None:
        r"""The encoder, whose features the host may keep; None as long as no reference is kept."""
        return None if self._reference is None else self._encoder

    def fit(self, data_loader: Batches) -> "FeatureRatioDetector":
        r"""Encodes batches `(x, y)` of inputs and fits the head as :meth:`fit_features` does.

        Raises:
            ModelNotSetException: If there is no encoder.
            UserError: As :meth:`fit_features`, or if images are to be broadened that are neither
                pixels nor normalised in a way that is known; give `mean` and `std` then.
        """
        self._images.look_at(data_loader)
        id_features: list[Tensor] = []
        classes = [0]

        def reference() -> Iterator[Tensor]:
            # A loader is read once, so ID images are encoded on the way.
            for x, y in checked(data_loader):
                if (y >= 0).any():
                    classes.append(int(y.max()) + 1)
                    id_features.append(self._encode(x[y >= 0]).cpu())
                yield x[y < 0]

        broadened = self._images.broadened(reference(), self._broaden)
        id_data, others = joined(id_features, [self._encode(x).cpu() for x in broadened])
        if isinstance(self._encoder, nn.Module):
            describe_backbone(self._encoder, "encoder", id_data.shape[1], max(classes))
        return self._fit(id_data, others)

    def fit_features(self, x: Tensor, y: Tensor) -> "FeatureRatioDetector":
        r"""Fits the head on features.

        Arguments:
            x: The features, with shape :math:`(N, F)`.
            y: The labels, below 0 for the reference, with shape :math:`(N)`. Without any such the
                reference of the last fit is taken.

        Raises:
            UserError: If they are no such pair, or there are no ID samples or no reference.
        """
        for features, labels in checked([(x, y)]):
            id_features, reference = (features[side].cpu() for side in (labels >= 0, labels < 0))
        if self._reference is not None and not len(reference):
            reference = torch.as_tensor(self._reference)
        return self._fit(*joined([id_features], [reference]))

    def predict(self, x: Tensor) -> Tensor:
        r"""Returns negated log-ratios in nats, larger = more OOD, :math:`(B)`, of inputs :math:`(B, *)`.

        Raises:
            ModelNotSetException: If there is no encoder.
            RequiresFittingException: If the head is not fitted.
        """
        return self.predict_features(self._encode(x))

    def predict_features(self, x: Tensor) -> Tensor:
        r"""Returns the outlier scores of features, with shape :math:`(B, F)`, as :meth:`predict`."""
        if self.head.ratio is None:
            raise RequiresFittingException
        return -self.head.log_ratio_of_features(x)

    def set_hyperparameters(self, **kwargs: object) -> "FeatureRatioDetector":
        r"""Sets options of the head, by dotted key; one that changes is then to be fitted.

        Raises:
            UserError: If an option is unknown or out of range.
        """
        options = self.head.options.changed(kwargs, "head")
        if options != self.head.options:
            self.head = FeatureRatio(options)
        return self

    def to(self, device: torch.device | str) -> "FeatureRatioDetector":
        r"""Moves the detector to a device."""
        super().to(device)
        self.head.to(device)
        return self

    @property
    def _options(self) -> HeadConfig:
        return self.head.options

    def __getstate__(self) -> dict[str, Any]:
        # Features are large.
        return {**self.__dict__, "_reference": None}

    def _fit(self, id_features: Tensor, reference: Tensor) -> "FeatureRatioDetector":
        self.head.fit_features(id_features, reference, self.device or "cpu")
        # Numbers far from zero keep their digits; NumPy has no bfloat16.
        self._reference = reference.to(torch.promote_types(reference.dtype, torch.float32)).numpy()
        return self

    @torch.no_grad()
    def _encode(self, x: Tensor) -> Tensor:
        if self._encoder is None:
            raise ModelNotSetException
        return encoded(self._encoder, x if self.device is None else x.to(self.device))
