r"""Detectors for pytorch-ood (0.4 or later): **larger = more OOD**, the opposite of our sign.

Both follow its conventions: loaders yield `(x, y)`, and a label below 0 marks OOD. In `fit` and
`fit_features` those samples are the *reference* that the ratio is taken to, as they are the
auxiliary outliers of other objectives. They must not be those of a test set. Both score with a
folded ratio.

- :class:`OneStepRatioDetector` scores with a network of ours, trained here or elsewhere.
- :class:`FeatureRatioDetector` puts a ratio head on the features of a frozen `encoder`.

Install with `pip install 'ood-osdre[pytorch-ood]'`.
"""

__all__ = ["FeatureRatioDetector", "OneStepRatioDetector"]

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import HeadConfig
from ..data.images import SLACK
from ..data.transforms import Standardiser
from ..detectors import FeatureRatio, OneStepDetector, Scorer
from ..errors import UserError
from ..evaluation.metrics import check_scores
from ..models import RatioModel, check_inputs, evaluating
from ..options import shown
from ..training.checkpoint import input_shape

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

Batches = Iterable[tuple[Tensor, Tensor]]


def _require() -> None:
    if REASON is not None:
        raise ImportError(
            f"pytorch-ood 0.4 or later is needed: pip install 'ood-osdre[pytorch-ood]' ({REASON})"
        )


class OneStepRatioDetector(Detector):
    r"""The negated log-ratio of a one-step ratio; larger = more OOD.

    Arguments:
        model: A :class:`~ood_osdre.detectors.one_step.OneStepDetector`, fitted or to be fitted, or
            a :class:`~ood_osdre.detectors.scorer.Scorer`: these take *pixels*, floats in
            :math:`[0, 1]` as `ToTensor` makes them, and apply their own statistics. Or a bare
            ratio, which takes network inputs.

    Raises:
        UserError: If the model is none of these.

    Example:
        >>> from ood_osdre import load_scorer
        >>> detector = OneStepRatioDetector(load_scorer("runs/digits"))  # doctest: +SKIP
        >>> metrics.update(detector(x), y)  # doctest: +SKIP
    """

    info = INFO

    def __init__(self, model: OneStepDetector | Scorer | RatioModel) -> None:
        _require()
        super().__init__()
        self.ratio: RatioModel | None = None
        self.preprocess: Standardiser | None = None
        self.shape: tuple[int, ...] | None = None
        self._detector = model if isinstance(model, OneStepDetector) else None
        if isinstance(model, RatioModel):
            self.ratio = model.fold()
        elif isinstance(model, Scorer):
            self._take(model)
        elif not isinstance(model, OneStepDetector):
            raise UserError(
                f"model: got {shown(model)}, expected a OneStepDetector, a Scorer or a ratio; "
                "load_scorer(folder) reads that of a run folder."
            )
        elif model.is_fitted:
            self._take(model.scorer)
        self.requires_fit = self.ratio is None

    def fit(self, data_loader: Batches) -> "OneStepRatioDetector":
        r"""Fits the :class:`OneStepDetector` that was given; with anything else, does nothing.

        Arguments:
            data_loader: Batches `(x, y)` of pixels; labels below 0 mark the reference.

        Raises:
            UserError: If the loader yields no such pairs, no ID samples or no reference.
        """
        if self._detector is not None:
            x, y, reference = _collect(data_loader, lambda batch: batch)
            labels = y[~reference].numpy()
            self._take(self._detector.fit(x[~reference], x[reference], labels=labels).scorer)
            self.requires_fit = False
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
            UserError: If they are not of the shape of those in training (which a bare ratio does
                not know), not floats or not finite, or if pixels are expected and these are
                normalised; or if a score is not finite.
        """
        if self.ratio is None:
            raise RequiresFittingException
        check_inputs(x, self.shape)
        if self.preprocess is None:
            inputs = x.to(next(self.ratio.parameters()).device)
        elif x.ndim == 4:
            low, high = float(x.min()), float(x.max())
            if low < -SLACK or high > 1 + SLACK:
                raise UserError(
                    f"x: got values from {low:.3g} to {high:.3g}, expected pixels in [0, 1]; leave "
                    "normalisation to the detector."
                )
            inputs = self.preprocess.normalise(x.to(self.preprocess.device, torch.float32))
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

    def _take(self, scorer: Scorer) -> None:
        # A copy, because moving the detector must not move the scorer.
        self.ratio, self.preprocess = scorer.ratio.fold(), scorer.preprocess
        self.shape = input_shape(scorer.metadata)


class FeatureRatioDetector(FeaturesDetector):
    r"""The negated log-ratio of a frozen encoder's features; larger = more OOD.

    Arguments:
        encoder: A callable from inputs :math:`(B, *)` to features; None for
            :meth:`fit_features` and :meth:`predict_features` alone. A module is evaluated in
            evaluation mode, and left as it is.
        options: The head and its training, see :class:`~ood_osdre.config.HeadConfig`. It has no
            `layers`: the encoder gives the features.
    """

    info = INFO
    requires_fit = True

    def __init__(
        self,
        encoder: Callable[[Tensor], Tensor] | None,
        options: HeadConfig | Mapping[str, Any] | None = None,
    ) -> None:
        _require()
        super().__init__()
        self.encoder = encoder
        self.head = FeatureRatio(options)

    def fit(self, data_loader: Batches) -> "FeatureRatioDetector":
        r"""Encodes batches `(x, y)` of inputs and fits the head as :meth:`fit_features` does."""
        return self._fit(*_collect(data_loader, self._encode))

    def fit_features(self, x: Tensor, y: Tensor) -> "FeatureRatioDetector":
        r"""Fits the head on features.

        Arguments:
            x: The features, with shape :math:`(N, F)`.
            y: The labels, below 0 for the reference, with shape :math:`(N)`.

        Raises:
            UserError: If they are no such pair, or there are no ID samples or no reference.
        """
        return self._fit(*_collect([(x, y)], lambda features: features))

    def predict(self, x: Tensor) -> Tensor:
        r"""Returns the outlier scores of inputs.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.

        Returns:
            The negated log-ratios in nats, larger = more OOD, with shape :math:`(B)`.

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

    def to(self, device: torch.device | str) -> "FeatureRatioDetector":
        r"""Moves the detector to a device."""
        super().to(device)
        self.head.to(device)
        return self

    def _fit(self, x: Tensor, y: Tensor, reference: Tensor) -> "FeatureRatioDetector":
        self.head.fit_features(x[~reference], x[reference], self.device or "cpu")
        return self

    @torch.no_grad()
    def _encode(self, x: Tensor) -> Tensor:
        if self.encoder is None:
            raise ModelNotSetException
        moved = x if self.device is None else x.to(self.device)
        with evaluating(self.encoder) if isinstance(self.encoder, nn.Module) else nullcontext():
            features = self.encoder(moved)
        if len(features) != len(x):
            raise UserError(
                f"encoder: got features of shape {tuple(features.shape)} for {len(x)} inputs, "
                "expected a row for each."
            )
        return features.flatten(1)


def _collect(
    batches: Batches, transform: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Returns all inputs, their labels, and which of them are the reference."""
    xs, ys = [], []
    for batch in batches:
        parts, fault = batch if isinstance(batch, tuple | list) else [batch], ""
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            found = ", ".join(type(part).__name__ for part in parts[:3])
            fault = f"a batch has {len(parts)} parts ({found}), expected a pair (x, y) of tensors"
        elif not parts[0].ndim or parts[1].shape != parts[0].shape[:1] or parts[1].isnan().any():
            x_shape, y_shape = (tuple(part.shape) for part in parts)
            fault = (
                f"a batch has inputs with shape {x_shape} and labels with shape {y_shape}, "
                "expected a label for each, none of them NaN"
            )
        if fault:
            raise UserError(f"data: {fault}.")
        xs.append(transform(parts[0]).cpu())
        ys.append(parts[1].cpu())
    y = torch.cat(ys) if ys else torch.zeros(0)
    reference, fault = y < 0, ""
    count, shapes = int(reference.sum()), {tuple(x.shape[1:]) for x in xs}
    if count in (0, len(y)):
        fault = (
            f"{count} of {len(y)} labels are below 0, expected both ID samples and samples of a "
            "reference, which labels below 0 mark"
        )
    elif len(shapes) > 1:
        fault = f"batches have samples of shapes {shown(sorted(shapes))}, expected one shape"
    if fault:
        raise UserError(f"data: {fault}.")
    return torch.cat(xs), y, reference
