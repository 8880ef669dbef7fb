r"""From a model, an objective, batches, options and a validation to a fitted model.

This is the one place where a training is put together: the command, the detector, the feature head,
the tasks and OpenOOD's trainer all call :func:`fit`, or :func:`assemble` to take the steps
themselves.
"""

__all__ = ["Fit", "Recipe", "assemble", "fit"]

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..models import RatioModel, SpeedBackbone
from ..objectives import Objective
from ..paths import Moments, Times
from ..sections import TrainingConfig
from .batches import Batches
from .run import Outcome
from .trainer import Trainer, Validate

#: Builds the distribution of training times and the objective of a model, given the second moments
#: of both ends.
Recipe: TypeAlias = Callable[[Moments, RatioModel], tuple[Times, Objective]]


class Fit(NamedTuple):
    r"""A fitted model.

    Attributes:
        model: The model of the selected step, with averaged weights.
        outcome: How far the training came.
    """

    model: RatioModel
    outcome: Outcome


def assemble(
    model: RatioModel,
    objective: Recipe,
    batches: Batches,
    options: TrainingConfig,
    validate: Validate | None = None,
    *,
    select: str | None = None,
    folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trainer:
    r"""Returns the training loop of a model, whose first layer is fixed if it is to whiten images.

    Takes the arguments of :class:`~ood_osdre.training.trainer.Trainer`, but for two.

    Arguments:
        objective: Builds the times and the objective, given the moments of the batches.
        batches: The batches, which get the times.
    """
    for module in model.modules():
        # One that the user brings trained stays what it is.
        if isinstance(module, SpeedBackbone) and not module.is_prepared:
            # By ID images alone: a classifier is to see no reference.
            module.prepare(batches.ends()[1])
    batches.times, loss = objective(batches.moments(), model)
    batches.needs_probe = loss.needs_probe
    loss = loss.to(batches.device)
    return Trainer(model, loss, batches, options, validate, select, folder, metadata)


def fit(
    model: RatioModel,
    objective: Recipe,
    batches: Batches,
    options: TrainingConfig,
    validate: Validate | None = None,
    *,
    select: str | None = None,
    folder: Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Fit:
    r"""Trains a model to the last step, or until the time budget or a signal stops it.

    Takes the arguments of :func:`assemble`, and:

    Arguments:
        time_budget: The number of seconds after which to save and stop.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show a progress bar.

    Raises:
        UserError: If the loss is not finite.
    """
    trainer = assemble(
        model,
        objective,
        batches,
        options,
        validate,
        select=select,
        folder=folder,
        metadata=metadata,
    )
    outcome = trainer.run(time_budget, progress, resume)
    return Fit(trainer.kept, outcome)
