r"""The head of a frozen network: a one-step ratio of two sets of feature vectors.

The head is trained by the end-point loss, whose minimiser is the log-ratio of the two densities.
Features are standardised to the even mixture of both sets. A part of both sets is held out and
selects the step with the least loss on it.
"""

__all__ = ["FeatureRatioOptions", "build_head", "check_features", "train_head"]

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from ..data.transforms import Standardise, check_statistics
from ..models import MLP, CoefficientNetwork, OneStepRatio, RatioModel, RBFBasis, check_inputs
from ..objectives import EndPointLoss, Objective, Shrinkage, Term
from ..options import BatchSize, Count, Options, Positive, Weight
from ..paths import UniformTimes
from ..sections import Seed, TrainingConfig
from ..training.batches import Stream, VectorBatches, step_generator
from ..training.fit import Fit, fit
from .fitting import check_finished

# With fewer vectors than this on a side, none are held out.
SMALLEST = 50


class FeatureRatioOptions(Options):
    r"""The head and its training.

    Attributes:
        backbone: What stands between the features and the coefficients: a residual MLP, or
            nothing, which makes the log-ratio affine in the features.
        width: The width of the MLP.
        depth: The number of its residual layers.
        size: The number of atoms of the temporal basis.
        steps: The number of steps.
        batch_size: The number of (reference, ID) pairs in a batch.
        lr: The peak learning rate.
        weight_decay: The weight decay of matrices.
        shrinkage: The weight of the squared log-ratio, which bounds it where the two sets do not
            overlap.
        held_out: The share of both sets that selects the step.
        seed: The seed of weights, batches and the held-out share.
    """

    backbone: Literal["mlp", "linear"] = "mlp"
    width: Count = 256
    depth: Count = 2
    size: Count = 16
    steps: Count = 1000
    batch_size: BatchSize = 256
    lr: Positive = 1e-3
    weight_decay: Weight = 0.05
    shrinkage: Weight = 0.003
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    seed: Seed = 0


def build_head(options: FeatureRatioOptions, features: int) -> OneStepRatio:
    r"""Builds an untrained head for :math:`F` features, in single precision."""
    o = options
    with torch.random.fork_rng():
        torch.manual_seed(o.seed)
        backbone: nn.Module = nn.Identity()
        width = features
        if o.backbone == "mlp":
            backbone, width = MLP(features, o.width, o.depth), o.width
        network = CoefficientNetwork(backbone, width, o.size)
        return OneStepRatio(network, RBFBasis(size=o.size, learnable=False)).float()


def check_features(features: object, count: int | None, what: str = "features") -> Tensor:
    r"""Refuses features that no head can be trained or evaluated on.

    Arguments:
        features: The features, real numbers with shape :math:`(N, F)`.
        count: The number of features :math:`F`; None for any.
        what: What to call the features in errors.

    Returns:
        The features in single precision, with shape :math:`(N, F)`.

    Raises:
        TypeError: If they are no tensor.
        UserError: If they are empty, of another shape, complex, or not finite in single precision.
    """
    if isinstance(features, Tensor):
        count = count or max(features.shape[-1:].numel(), 1)
        features = features if features.is_complex() else features.detach().float()
    return check_inputs(features, (count or 1,), what)


def train_head(
    id_features: Tensor,
    reference_features: Tensor,
    options: FeatureRatioOptions,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> tuple[Fit, Standardise]:
    r"""Trains a head, and returns it with the standardisation of its features.

    Arguments and errors are those of
    :meth:`~ood_osdre.detectors.feature_ratio.FeatureRatio.fit_features`.
    """
    o = options
    x_1 = check_features(id_features, None, "ID features").cpu()
    x_0 = check_features(reference_features, x_1.shape[1], "reference features").cpu()
    standardise = _pooled(x_1, x_0, device)
    id_train, id_held = _split(x_1, o.held_out, o.seed, 0)
    reference_train, reference_held = _split(x_0, o.held_out, o.seed, 1)
    labels = torch.zeros(len(id_train), dtype=torch.long)
    validate = None
    if len(id_held) and len(reference_held):
        validate = _held_out_score(standardise(id_held), standardise(reference_held))
    fitted = fit(
        build_head(o, x_1.shape[1]).to(device),
        lambda moments, model: (UniformTimes(), _objective(o)),
        VectorBatches(id_train, labels, reference_train, standardise, o.batch_size, o.seed),
        TrainingConfig.short(o.steps).replace(
            batch_size=o.batch_size, lr=o.lr, weight_decay=o.weight_decay, ema=0.99, seed=o.seed
        ),
        validate,
        select=None if validate is None else "held_out",
        progress=progress,
    )
    check_finished(fitted.outcome, o.steps)
    return fitted, standardise


def _pooled(x_1: Tensor, x_0: Tensor, device: torch.device | str) -> Standardise:
    r"""Standardises to the even mixture of both sets, whatever their sizes."""
    mean = (x_0.mean(dim=0) + x_1.mean(dim=0)) / 2
    variance = sum(((x - mean) ** 2).mean(dim=0) for x in (x_0, x_1)) / 2
    std = torch.as_tensor(variance).sqrt()
    # A feature that is silent on both sets says nothing; one that wakes up elsewhere should not
    # be blown up.
    alive = std[std > 0]
    typical = alive.median() if len(alive) else torch.ones(())
    std = torch.where(std > 1e-3 * typical, std, typical)
    return Standardise(*check_statistics(mean, std, len(mean), "features"), device)


def _split(x: Tensor, share: float, seed: int, which: int) -> tuple[Tensor, Tensor]:
    count = math.ceil(share * len(x)) if len(x) >= SMALLEST else 0
    order = torch.randperm(len(x), generator=step_generator(seed, Stream.SPLIT, which, "cpu"))
    return x[order[count:]], x[order[:count]]


def _objective(options: FeatureRatioOptions) -> Objective:
    terms: dict[str, tuple[float, Term]] = {"endpoint": (1.0, EndPointLoss(clean=True))}
    if options.shrinkage:
        terms["shrinkage"] = options.shrinkage, Shrinkage(clean=True)
    return Objective(terms)


def _held_out_score(x_1: Tensor, x_0: Tensor) -> Callable[[RatioModel], dict[str, float]]:
    r"""Returns minus the end-point loss on held-out features, each side with equal weight."""

    @torch.no_grad()
    def validate(ratio: RatioModel) -> dict[str, float]:
        f_1, f_0 = ratio.log_ratio(x_1), ratio.log_ratio(x_0)
        softplus = nn.functional.softplus
        return {"held_out": -(softplus(-f_1).mean() + softplus(f_0).mean()).item()}

    return validate
