r"""Outlier detection on tables, with the manners of scikit-learn.

:class:`OneStepOutlierDetector` is fitted to rows that are taken for inliers, the ID data
:math:`p_1`, and to a reference :math:`p_0`: rows of one's own, or rows that a program draws from the
inliers (:data:`REFERENCES`). Its score is the log-ratio :math:`\log p_1(x) / p_0(x)` in nats, of a
one-step ratio of whitened columns (:func:`~ood_osdre.detectors.feature_head.fit_head`); larger means
more like an inlier. A part of the rows trains nothing: the threshold is that of
:class:`~ood_osdre.evaluation.calibration.SplitConformal`.

What a reference does not cover, nothing was learnt about, and what it shares with the inliers does
not count against a row. `docs/outliers.md` compares the three that are drawn.
"""

__all__ = ["REFERENCES", "OneStepOutlierDetector"]

import logging
import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import Field
from sklearn.base import BaseEstimator, OutlierMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from ..config import HeadConfig
from ..data.image_files import fingerprints
from ..data.sets import cut_apart, draws_of
from ..errors import UserError
from ..evaluation.calibration import SplitConformal
from ..options import BatchSize, Count, Options, Positive
from ..training.distributed import find_device
from ..training.run import check_finished
from ..training.surroundings import own_surroundings
from .feature_head import fit_head

if TYPE_CHECKING:
    import pandas as pd

    Rows: TypeAlias = ArrayLike | pd.DataFrame

Array = NDArray[np.float64]

# A box is wider than the rows by this share of their range on every side, a Gaussian by this factor:
# where the reference ended with the inliers, nothing would be learnt about rows just outside.
MARGIN, WIDER = 0.1, 2.0
# The least number of reference rows that are drawn.
DRAWN = 2000
# Rows that are scored at once, and the digits of a score, in nats, after the point.
TOGETHER, DIGITS = 8192, 9
# From this size on, in nats, a score in double precision has no digits to round.
LARGE = 1e7
# Training is in single precision: the size that a number may have, and the least range of a column
# that whitening takes to one of about 1, with room for columns of far smaller ranges beside it.
LARGEST, LEAST_SPREAD = float(np.finfo(np.float32).max), 1e-30

# Weights are drawn from PyTorch's global generator, which the threads of a process share: a fit holds
# it from the seed to the end, when the generator is again as the caller left it.
ALONE = threading.Lock()

log = logging.getLogger(__name__)


def _uniform(x: Array, n: int, rng: np.random.Generator) -> Array:
    low, high = x.min(axis=0), x.max(axis=0)
    margin = MARGIN * (high - low)
    return rng.uniform(low - margin, high + margin, (n, x.shape[1]))


def _shuffled(x: Array, n: int, rng: np.random.Generator) -> Array:
    return np.take_along_axis(x, rng.integers(len(x), size=(n, x.shape[1])), axis=0)


def _gaussian(x: Array, n: int, rng: np.random.Generator) -> Array:
    # A root of the covariance, of whatever rank.
    centre = x.mean(axis=0)
    root: Array = np.asarray(np.linalg.qr(x - centre, mode="r")) / math.sqrt(len(x))
    return np.asarray(centre + WIDER * rng.normal(size=(n, len(root))) @ root)


#: How reference rows are drawn, given the inliers, how many, and the source of randomness: evenly
#: from the box that holds the inliers and a tenth of their range on every side; from every column on
#: its own; or from a Gaussian of their mean and correlations and twice their deviations.
REFERENCES: dict[str, Callable[[Array, int, np.random.Generator], Array]] = {
    "uniform": _uniform,
    "shuffled": _shuffled,
    "gaussian": _gaussian,
}


class _Parameters(Options):
    r"""The parameters of an estimator, but for those that scikit-learn checks."""

    reference: Literal["uniform", "shuffled", "gaussian"] | None
    alpha: Annotated[float, Field(gt=0, lt=1)]
    calibration: Annotated[float, Field(gt=0, le=0.5)]
    max_iter: Count
    max_epochs: Count
    batch_size: BatchSize
    learning_rate: Positive
    width: Count
    depth: Count


class OneStepOutlierDetector(OutlierMixin, BaseEstimator):
    r"""An outlier detector for arrays and data frames of numbers.

    Arguments:
        reference: What inliers are told apart from: rows, with shape :math:`(M, d)`, or the name of
            one that is drawn from the inliers, see :data:`REFERENCES`.
        alpha: The rate at which new inliers may be taken for outliers, in expectation over the rows
            that calibrate.
        calibration: The share of the rows that calibrates and does not train; more of few rows, at
            most half of them, as it takes 1 / `alpha` - 1 for any row to be an outlier.
        max_iter: The largest number of training steps.
        max_epochs: The largest number of times that training passes all rows.
        batch_size: The number of rows of either kind in a batch; that of the rows if it is less.
        learning_rate: The peak learning rate.
        width: The width of the network.
        depth: The number of its residual layers.
        device: Where to train and score.
        random_state: The seed of what is drawn, the split, weights and batches: a whole number, a
            `numpy.random.RandomState`, or None for another at every fit.

    Attributes:
        conformal_: The threshold and the p-values, from the scores of the rows that calibrate.
        offset_: The threshold, in nats; rows of a smaller log-ratio are outliers.
        ratio_: The log-ratio as a module, folded, in double precision.
        n_iter_: The number of training steps.
        n_features_in_: The number of columns :math:`d`.
        feature_names_in_: Their names, if they have names.

    A column that varies neither in the rows nor in the reference is not looked at.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(200, 2))
        >>> detector = OneStepOutlierDetector(max_iter=50, random_state=0).fit(x)
        >>> detector.predict([[0.0, 0.0], [9.0, 9.0]])
        array([ 1, -1])
    """

    def __init__(
        self,
        reference: "Rows | str" = "gaussian",
        *,
        alpha: float = 0.05,
        calibration: float = 0.2,
        max_iter: int = 400,
        max_epochs: int = 100,
        batch_size: int = 256,
        learning_rate: float = 2e-3,
        width: int = 64,
        depth: int = 2,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.reference = reference
        self.alpha = alpha
        self.calibration = calibration
        self.max_iter = max_iter
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.width = width
        self.depth = depth
        self.device = device
        self.random_state = random_state

    def fit(self, X: "Rows", y: object = None) -> "OneStepOutlierDetector":
        r"""Fits to rows that are taken for inliers.

        Arguments:
            X: The rows, finite numbers with shape :math:`(N, d)`, :math:`N` at least 2.
            y: Not looked at.

        Returns:
            The detector itself; where fitting fails, it stays as it was.

        Raises:
            ValueError: If the rows or the reference are not as described.
            UserError: If a parameter is out of range, all rows are copies of one, or no column
                varies. It is a :class:`ValueError`, too.
        """
        before = dict(vars(self))
        try:
            self._fit(X)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def _fit(self, X: "Rows") -> None:
        given = self._parameters()
        _check_unmasked(X, "X")
        rows = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        reference = None
        if given.reference is None:
            _check_unmasked(self.reference, "reference")
            reference = validate_data(
                self, self.reference, reset=False, dtype=np.float64, ensure_min_samples=2
            )
        seed = int(check_random_state(self.random_state).randint(10**9))
        rng = np.random.default_rng(seed)
        draws = draws_of(fingerprints(rows))
        train, held = _split(draws, given, rng)
        if reference is None:
            assert given.reference is not None
            draw = REFERENCES[given.reference]
            reference = draw(rows[train], max(DRAWN, len(train)), rng)
        _check_range(rows, reference, train)
        head = _head(given, len(train), seed)
        x_1, x_0 = (_tensor(x) for x in (rows[train], reference))
        with ALONE, own_surroundings():
            fitted = fit_head(head, x_1, x_0, find_device(self.device))
            check_finished(fitted.outcome, head.training.steps)
            # In single precision a row's score would depend on the rows that are scored with it.
            self.ratio_ = fitted.model.fold().double().requires_grad_(False)
        self.n_iter_ = head.training.steps
        self.conformal_ = _calibrated(self._log_ratio(rows[held]), given.alpha, draws[held])
        self.offset_ = self.conformal_.threshold

    def score_samples(self, X: "Rows") -> Array:
        r"""Returns the log-ratios in nats (larger = more like an inlier), with shape :math:`(N)`.

        A row so far away that its log-ratio overflows has the least number there is, and is an outlier.

        Arguments:
            X: The rows, with shape :math:`(N, d)`.

        Raises:
            ValueError: If nothing is fitted, or the rows are not finite or of other columns.
        """
        check_is_fitted(self)
        _check_unmasked(X, "X")
        scores = self._log_ratio(validate_data(self, X, reset=False, dtype=np.float64))
        # Not infinite, as neither p-values nor the metrics of scikit-learn take infinite scores.
        return np.where(np.isfinite(scores), scores, np.finfo(scores.dtype).min)

    def decision_function(self, X: "Rows") -> Array:
        r"""Returns by how much :meth:`score_samples` exceeds the threshold; outliers are below 0."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: "Rows") -> NDArray[np.int64]:
        r"""Returns +1 for inliers, -1 for outliers, with shape :math:`(N)`."""
        return np.where(self.decision_function(X) < 0, -1, 1)

    def pvalue(self, X: "Rows") -> Array:
        r"""Returns the conformal p-values of the hypothesis that a row is an inlier, :math:`(N)`."""
        scores = self.score_samples(X)
        return self.conformal_.pvalue(scores)

    def _parameters(self) -> _Parameters:
        r"""Returns the parameters, checked; scikit-learn wants them unchecked until fit."""
        values: dict[str, Any] = {
            name: value.item() if isinstance(value, np.generic) else value
            for name in _Parameters.model_fields
            for value in [getattr(self, name)]
        }
        if not isinstance(self.reference, str):
            values["reference"] = None
        return _Parameters.of(values, type(self).__name__)

    @torch.no_grad()
    def _log_ratio(self, rows: Array) -> Array:
        device = next(self.ratio_.parameters()).device
        parts = _tensor(rows).split(TOGETHER)
        scores = [self.ratio_.log_ratio(part.to(device)).cpu() for part in parts]
        found = torch.cat(scores).numpy()
        # A sum's last digits depend on the rows beside it, and so would the side of the threshold
        # that a row is on which is at it. Large scores have no such digits, and rounding overflows.
        return np.where(np.abs(found) < LARGE, np.clip(found, -LARGE, LARGE).round(DIGITS), found)


def _check_unmasked(values: object, what: str) -> None:
    r"""Refuses masked values, which scikit-learn takes for the numbers under the mask."""
    if np.ma.is_masked(values):
        raise UserError(f"{what}: got masked values, expected rows without them.")


def _check_range(rows: Array, reference: Array, train: NDArray[np.intp]) -> None:
    r"""Refuses numbers that single precision does not hold, and rows that do not vary in it."""
    for what, values in (("X", rows), ("reference", reference)):
        if (size := np.abs(values).max()) > LARGEST:
            raise UserError(
                f"{what}: got {size:.3g}, expected numbers up to {LARGEST:.3g} in size."
            )
    spread = np.ptp(np.concatenate([rows[train], reference]), axis=0).max()
    if not spread and np.ptp(rows, axis=0).any():
        raise UserError(
            f"X: {len(train)} of {len(rows)} rows train and are equal, expected more distinct rows."
        )
    if not spread:
        raise UserError("X: no column varies, expected one that does.")
    if spread < LEAST_SPREAD:
        raise UserError(
            f"X: no column varies by more than {spread:.3g}, expected one by {LEAST_SPREAD:g} or more."
        )


def _tensor(rows: Array) -> torch.Tensor:
    # A copy, as rows may be read-only; in order, as PyTorch takes no rows that run backwards.
    return torch.tensor(np.ascontiguousarray(rows), dtype=torch.float64)


def _split(
    draws: NDArray[np.int64], given: _Parameters, rng: np.random.Generator
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    r"""Returns the rows that train and those that calibrate, copies in one part."""
    n = len(draws)
    least = math.ceil(1 / given.alpha) - 1
    count = max(1, min(max(round(given.calibration * n), least), n // 2))
    held, train = cut_apart(rng.permutation(n), draws, [count])
    if not len(train):
        raise UserError(f"X: all {n} rows are copies of one, expected at least 2 distinct ones.")
    return train, held


def _head(given: _Parameters, rows: int, seed: int) -> HeadConfig:
    batch_size = min(given.batch_size, rows)
    steps = min(given.max_iter, math.ceil(given.max_epochs * rows / batch_size))
    training = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": given.learning_rate,
        "warmup": max(steps // 20, 1),
        "eval_every": steps,
        "checkpoint_every": steps,
        "seed": seed,
    }
    shape = {"width": given.width, "depth": given.depth}
    return HeadConfig.of({**shape, "held_out": 0.0, "training": training}, "head")


def _calibrated(scores: Array, alpha: float, draws: NDArray[np.int64]) -> SplitConformal:
    r"""Returns the threshold of the rate, or of the least rate above it that there is."""
    least = 1 / (np.unique(draws).size + 1)
    if alpha < least:
        log.warning(
            "fit: %d rows calibrate, too few for a rate of %g; inliers are flagged at one of %.3g.",
            *(round(1 / least) - 1, alpha, least),
        )
    return SplitConformal(scores, max(alpha, least), draws)
