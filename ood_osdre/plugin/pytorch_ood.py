r"""Detectors for pytorch-ood (0.4 or later): **larger = more OOD**, the opposite of our sign.

Both follow its conventions: loaders yield `(x, y)`, and a label below 0 marks OOD. In `fit` and
`fit_features` those samples are the *reference* that the ratio is taken to, as they are the
auxiliary outliers of other objectives. They must not be those of a test set.

- :class:`OneStepRatioDetector` scores with a network of ours, trained here or elsewhere.
- :class:`FeatureRatioDetector` puts a ratio head on the features of a frozen `encoder`.

Install with `pip install 'ood-osdre[pytorch-ood]'`.
"""

__all__ = ["FeatureRatioDetector", "OneStepRatioDetector"]

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..data.images import SLACK
from ..data.standardise import Standardiser
from ..detectors.feature_ratio import FeatureRatio, FeatureRatioOptions
from ..detectors.one_step import OneStepDetector
from ..errors import UserError
from ..evaluation.metrics import check_scores
from ..evaluation.scorer import Scorer
from ..models.frozen import evaluating
from ..models.networks import check_inputs
from ..models.ratio import RatioModel

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
except ImportError as error:
    # The module stays importable, for its documentation and for tests; its classes do not work.
    REASON = error
    if not TYPE_CHECKING:
        Detector = FeaturesDetector = object

Batches = Iterable[tuple[Tensor, Tensor]]


def _info() -> "DetectorInfo | None":
    if REASON is not None:
        return None
    paper = Paper(
        title="One-Step Score-Based Density Ratio Estimation",
        venue="arXiv",
        year=2026,
        url="https://arxiv.org/abs/2604.10672",
    )
    return DetectorInfo(tasks={Task.CLASSIFICATION}, paper=paper)


def _require() -> None:
    if REASON is not None:
        raise ImportError(
            f"pytorch-ood 0.4 or later is needed: pip install 'ood-osdre[pytorch-ood]' ({REASON})"
        )


class OneStepRatioDetector(Detector):
    r"""The negated log-ratio of a one-step ratio; larger = more OOD.

    Arguments:
        model: A :class:`~ood_osdre.detectors.one_step.OneStepDetector`, fitted or to be fitted, or a
            :class:`~ood_osdre.evaluation.scorer.Scorer`: these take *pixels*, floats in
            :math:`[0, 1]` as `ToTensor` makes them, and apply their own statistics. Or a bare
            ratio, which takes network inputs.

    Example:
        >>> from ood_osdre import load_scorer
        >>> detector = OneStepRatioDetector(load_scorer("runs/digits"))  # doctest: +SKIP
        >>> metrics.update(detector(x), y)  # doctest: +SKIP
    """

    info = _info()

    def __init__(self, model: OneStepDetector | Scorer | RatioModel) -> None:
        _require()
        super().__init__()
        self.ratio: nn.Module | None = None
        self.preprocess: Standardiser | None = None
        self.shape: tuple[int, ...] | None = None
        self._detector: OneStepDetector | None = None
        if isinstance(model, OneStepDetector):
            self._detector = model
            if model.is_fitted:
                self._take(model.scorer)
        elif isinstance(model, Scorer):
            self._take(model)
        elif isinstance(model, RatioModel):
            self.ratio = model.fold()
        else:
            raise TypeError(
                "'model' should be a OneStepDetector, a Scorer or a ratio, "
                f"got {type(model).__name__}."
            )
        self.requires_fit = self.ratio is None

    def fit(self, data_loader: Batches) -> "OneStepRatioDetector":
        r"""Fits the :class:`OneStepDetector` that was given; with anything else, does nothing.

        Arguments:
            data_loader: Batches `(x, y)` of pixels; labels below 0 mark the reference.

        Returns:
            The detector itself.

        Raises:
            ValueError: If the loader yields no ID samples or no reference.
        """
        if self._detector is None:
            return self
        x, y = _collect(data_loader, lambda batch: batch)
        reference = _reference(x, y)
        self._take(
            self._detector.fit(x[~reference], x[reference], labels=y[~reference].numpy()).scorer
        )
        self.requires_fit = False
        return self

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        r"""Returns the outlier scores.

        Arguments:
            x: The pixels or inputs, with shape :math:`(B, *)`.

        Returns:
            The negated log-ratios in nats, larger = more OOD, with shape :math:`(B)`.

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
            _check_pixels(x)
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
        self.ratio, self.preprocess = scorer.ratio.fold(), scorer.preprocess
        size, dim = (scorer.metadata.get(key) for key in ("size", "dim"))
        if dim is not None:
            self.shape = (dim,)
        elif size is not None:
            self.shape = (3, size, size)


class FeatureRatioDetector(FeaturesDetector):
    r"""The negated log-ratio of a frozen encoder's features; larger = more OOD.

    Arguments:
        encoder: A callable from inputs :math:`(B, *)` to features; None for
            :meth:`fit_features` and :meth:`predict_features` alone. A module is evaluated in
            evaluation mode, and left as it is.
        options: The head and its training, see
            :class:`~ood_osdre.detectors.feature_ratio.FeatureRatioOptions`.
    """

    info = _info()
    requires_fit = True

    def __init__(
        self,
        encoder: Callable[[Tensor], Tensor] | None,
        options: FeatureRatioOptions | None = None,
    ) -> None:
        _require()
        super().__init__()
        self.encoder = encoder
        self.head = FeatureRatio(options)

    def fit(self, data_loader: Batches) -> "FeatureRatioDetector":
        r"""Encodes the data and fits the head on the features.

        Arguments:
            data_loader: Batches `(x, y)` of inputs; labels below 0 mark the reference.

        Returns:
            The detector itself.

        Raises:
            ValueError: If the loader yields no ID samples or no reference.
        """
        return self.fit_features(*_collect(data_loader, self._encode))

    def fit_features(self, x: Tensor, y: Tensor) -> "FeatureRatioDetector":
        r"""Fits the head on features.

        Arguments:
            x: The features, with shape :math:`(N, F)`.
            y: The labels, below 0 for the reference, with shape :math:`(N)`.

        Returns:
            The detector itself.

        Raises:
            ValueError: If there are no ID samples or no reference.
        """
        reference = _reference(x, y)
        self.head.fit_features(x[~reference], x[reference], self.device or "cpu")
        return self

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
        r"""Returns the outlier scores of features.

        Arguments:
            x: The features, with shape :math:`(B, F)`.

        Returns:
            The negated log-ratios in nats, larger = more OOD, with shape :math:`(B)`.

        Raises:
            RequiresFittingException: If the head is not fitted.
        """
        if self.head.ratio is None:
            raise RequiresFittingException
        return -self.head.log_ratio_of_features(x)

    def to(self, device: torch.device | str) -> "FeatureRatioDetector":
        r"""Moves the detector to a device."""
        super().to(device)
        self.head.to(device)
        return self

    @torch.no_grad()
    def _encode(self, x: Tensor) -> Tensor:
        if self.encoder is None:
            raise ModelNotSetException
        if not isinstance(x, Tensor):
            raise TypeError(f"x: got {type(x).__name__}, expected a tensor.")
        moved = x if self.device is None else x.to(self.device)
        if not isinstance(self.encoder, nn.Module):
            return self.encoder(moved).flatten(1)
        with evaluating(self.encoder):
            return self.encoder(moved).flatten(1)


def _collect(batches: Batches, transform: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    pairs = []
    for batch in batches:
        parts = list(batch) if isinstance(batch, tuple | list) else [batch]
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            found = ", ".join(type(part).__name__ for part in parts[:3])
            raise UserError(
                f"data_loader: a batch has {len(parts)} parts ({found}), expected a pair (x, y) of "
                "tensors."
            )
        x, y = parts
        if x.ndim == 0 or y.shape != x.shape[:1]:
            raise UserError(
                f"data_loader: a batch of inputs with shape {tuple(x.shape)} and labels with shape "
                f"{tuple(y.shape)}, expected a label for each."
            )
        pairs.append((transform(x).cpu(), y.cpu()))
    if not pairs:
        raise ValueError("The data loader is empty, expected ID samples and a reference.")
    shapes = sorted({tuple(x.shape[1:]) for x, _ in pairs})
    if len(shapes) > 1:
        raise UserError(f"data_loader: inputs of different shapes, {shapes[0]} and {shapes[1]}.")
    xs, ys = zip(*pairs, strict=True)
    return torch.cat(xs), torch.cat(ys)


def _reference(x: Tensor, labels: Tensor) -> Tensor:
    r"""Returns which samples are the reference, those with a label below 0."""
    if not isinstance(x, Tensor) or not isinstance(labels, Tensor):
        raise TypeError(
            f"x, y: got {type(x).__name__} and {type(labels).__name__}, expected tensors."
        )
    if labels.shape != x.shape[:1] or labels.isnan().any():
        raise UserError(
            f"labels: got shape {tuple(labels.shape)} for inputs with shape {tuple(x.shape)}, "
            "expected a label for each, none of them NaN."
        )
    reference = labels < 0
    count = int(reference.sum())
    if count in (0, len(labels)):
        raise ValueError(
            f"{count} of {len(labels)} labels are below 0, expected both ID samples and samples "
            "of a reference, which labels below 0 mark."
        )
    return reference


def _check_pixels(x: Tensor) -> None:
    if not (x.min() >= -SLACK and x.max() <= 1 + SLACK):
        raise UserError(
            f"x: got values from {float(x.min()):.3g} to {float(x.max()):.3g}, expected pixels in "
            "[0, 1]; leave normalisation to the detector."
        )
