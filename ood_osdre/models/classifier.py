r"""Baselines: OOD scores of a classifier.

Such a score is larger for inputs that look more like ID data, as a log-ratio is, but it is no
log-ratio and has no unit. Softmax and energy see the logits alone; nearest neighbours needs the
features of ID training images.

References:
    | A baseline for detecting misclassified and out-of-distribution examples (Hendrycks and
      Gimpel, 2017)
    | https://arxiv.org/abs/1610.02136

    | Energy-based out-of-distribution detection (Liu et al., 2020)
    | https://arxiv.org/abs/2010.03759

    | Out-of-distribution detection with deep nearest neighbors (Sun et al., 2022)
    | https://arxiv.org/abs/2204.06507
"""

__all__ = ["SCORES", "Classifier"]

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ratio import Prediction, RatioModel

#: The scores by name.
SCORES = ("msp", "energy", "knn")


class Classifier(RatioModel):
    r"""A classifier with a score in the place of the log-ratio.

    - `"msp"`: the largest softmax probability, as its log-odds, which keep the order and do not
      saturate in single precision,
    - `"energy"`: the log-sum-exp of the logits,
    - `"knn"`: minus the distance to the :math:`k`-th nearest of the ID training features, all of
      unit length; after :meth:`fit`.

    Arguments:
        backbone: A module from :math:`(B, *)` to features :math:`(B, F)`.
        features: The number of features :math:`F`.
        classes: The number of classes :math:`C`.
        score: One of :data:`SCORES`.
        neighbours: The :math:`k` of `"knn"`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        features: int,
        classes: int,
        score: str = "msp",
        neighbours: int = 50,
    ) -> None:
        super().__init__()
        assert score in SCORES, f"score: got {score!r}, expected one of {SCORES}."
        self.backbone = backbone
        self.class_head = nn.Linear(features, classes)
        self.score, self.neighbours = score, neighbours
        self.bank: Tensor | None = None

    @torch.no_grad()
    def fit(self, batches: Iterable[Tensor]) -> "Classifier":
        r"""Keeps the features of ID training inputs, for `"knn"`.

        Arguments:
            batches: Batches of inputs, each with shape :math:`(B, *)`, at least `neighbours` in
                all.

        Returns:
            The classifier itself, in evaluation mode.
        """
        self.eval()
        self.bank = torch.cat([_unit(self.backbone(x)) for x in batches])
        return self

    def outputs(self, x: Tensor) -> Prediction:
        r"""Returns the scores and the class logits.

        Arguments:
            x: The inputs, with shape :math:`(B, *)`.
        """
        features = self.backbone(x)
        logits = self.class_head(features)
        # While it is being trained, a classifier has no neighbours yet.
        if self.score == "knn" and not self.training:
            assert self.bank is not None, "The score 'knn' needs 'fit' first."
            distances = torch.cdist(_unit(features), self.bank)
            score = -distances.kthvalue(self.neighbours, dim=1).values
        elif self.score == "energy":
            score = _single(logits).logsumexp(dim=1)
        else:
            score = _log_odds(_single(logits))
        return Prediction(score, logits)

    def log_ratio_at(self, outputs: Prediction) -> Tensor:
        r"""Returns the scores (larger = more ID), with shape :math:`(B)`; no log-ratios."""
        return outputs.score


def _log_odds(logits: Tensor) -> Tensor:
    top, index = logits.max(dim=1, keepdim=True)
    others = logits.scatter(1, index, -torch.inf).logsumexp(dim=1)
    return top.squeeze(1) - others


def _unit(features: Tensor) -> Tensor:
    return F.normalize(_single(features), dim=1)


def _single(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
