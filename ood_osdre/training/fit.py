r"""From a model, an objective, batches, options and a validation to a fitted model.

This is the one place where a training is put together: the command, the detector, the feature head,
the tasks and OpenOOD's trainer all call :func:`fit`, or :func:`assemble` to take the steps
themselves.
"""

__all__ = ["Fit", "Recipe", "assemble", "fit"]

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from ..models.ratio import RatioModel
from ..paths.gaussian import Moments
from ..paths.times import Times
from ..sections import TrainingConfig
from .batches import Batches
from .trainer import Outcome, Trainer, Validate

#: Builds the distribution of training times and the objective of a model, given the second moments
#: of both ends.
Recipe: TypeAlias = Callable[[Moments, RatioModel], tuple[Times, nn.Module]]


@dataclass(frozen=True)
class Fit:
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
    r"""Returns the training loop of a model.

    Arguments:
        model: The untrained model, on the device to train on.
        objective: Builds the times and the objective, given the moments of the batches.
        batches: The batches, whose times are set.
        options: Steps, optimiser, averaging and precision.
        validate: A function from the averaged model to named numbers.
        select: The number whose largest value selects the step that is kept; None keeps the last.
        folder: The folder of checkpoints and log; None writes nothing.
        metadata: What is stored with the selected model, to rebuild it.
    """
    batches.times, loss = objective(batches.moments(), model)
    return Trainer(
        model, loss.to(batches.device), batches, options, validate, select, folder, metadata
    )


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

    Arguments:
        model: As for :func:`assemble`, as are the following.
        objective: Builds the times and the objective.
        batches: The batches.
        options: Steps, optimiser, averaging and precision.
        validate: A function from the averaged model to named numbers.
        select: The number that selects the step that is kept; None keeps the last.
        folder: The folder of checkpoints and log.
        metadata: What is stored with the selected model.
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
