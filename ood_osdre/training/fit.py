r"""From a model, an objective, batches, options and a validation to a fitted model.

This is the one place where a training is put together: the command, the detector, the feature head,
the tasks and OpenOOD's trainer all call :func:`fit`, or :func:`assemble` to take the steps
themselves.
"""

__all__ = ["Fit", "Recipe", "assemble", "fit", "rehearse"]

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import UserError, one_line
from ..models import Classifier, RatioModel, SpeedBackbone, copied
from ..objectives import Objective
from ..paths import Moments, Times
from ..sections import TrainingConfig
from .batches import Batches
from .checkpoint import STATE, checkpoint_path, restore, through_bytes, unpack_state
from .distributed import world_size
from .optimisation import Losses
from .run import Outcome
from .surroundings import same_random_numbers
from .trainer import Trainer, Validate

#: Builds the distribution of training times and the objective of a model, given the second moments
#: of both ends.
Recipe: TypeAlias = Callable[[Moments, RatioModel], tuple[Times, Objective]]

# The steps of a rehearsal, and the pairs of each in a process: what fails, fails with few.
REHEARSED, PAIRS = 2, 32
# By how much a model may score otherwise once it is read, as a share of the largest score: sums on a
# GPU come in any order.
TOLERANCE = 0.01


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


def rehearse(trainer: Trainer) -> None:
    r"""Takes two steps, a validation, a save and a load on copies of a trainer's parts.

    A backbone may be anything, and steps are not all that it goes through: its average is validated,
    written, and read again. What of this fails then fails at once, not after hours. Model, optimiser,
    statistics and random numbers are left as if it had not been.

    Arguments:
        trainer: The trainer. A precision that is still to be timed is taken for single.

    Raises:
        UserError: If one of them fails, or the model that was read scores otherwise.
    """
    options = trainer.options.replace(compile=False, amp=trainer.outcome.amp or "none")
    doing = "copying the model"
    try:
        with same_random_numbers():
            losses = copied(Losses(trainer.ratio, trainer.objective))
            twin = Trainer(
                losses.ratio,
                losses.objective,
                trainer.batches,
                options,
                trainer.validate,
                trainer.select,
                metadata=trainer.metadata,
            )
            for step in range(REHEARSED):
                doing = f"step {step + 1}"
                batch = twin.batches(step).part(slice(PAIRS * world_size()))
                twin.step(batch)
            doing = "the validation"
            if (validate := twin.validate) is not None:
                brief = getattr(validate, "brief", None)
                numbers = (validate if brief is None else brief(twin.averaged))(
                    twin.averaged.eval()
                )
                twin.keep({name: float(value) for name, value in numbers.items()})
            doing = "saving and loading"
            source = checkpoint_path(trainer.folder, STATE) if trainer.folder else "the rehearsal"
            unpack_state(through_bytes(*twin.state()), twin.modules(), twin.optimizer, source)
            restore(
                copied(trainer.averaged),
                through_bytes(twin.kept.state_dict(), twin.metadata),
                source,
            )
            # Of the model that took the steps: its average knows of them by its state alone.
            read = copied(trainer.ratio)
            restore(read, through_bytes(twin.ratio.state_dict(), {}), source)
            x = batch.x_1[:REHEARSED]
            with torch.no_grad():
                torch.manual_seed(0)
                trained = _answers(twin.ratio.eval(), x)
                alone = torch.cat([_answers(twin.ratio, one) for one in x.split(1)])
                torch.manual_seed(0)
                loaded = _answers(read.eval(), x)
    except UserError:
        raise
    # Whatever a module of the user's raises.
    except Exception as error:
        raise UserError(
            f"training: {doing} fails, in a rehearsal before the first step "
            f"({type(error).__name__}: {one_line(error, 200)})."
        ) from error
    largest = float(trained.abs().max())
    if not torch.allclose(trained, loaded, rtol=0, atol=TOLERANCE * largest):
        raise UserError(
            "training: the model scores otherwise once it is saved and loaded, in a rehearsal "
            "before the first step; what its output depends on is to be a parameter or a buffer."
        )
    if not torch.allclose(trained, alone, rtol=0, atol=TOLERANCE * largest):
        raise UserError(
            "training: the model scores inputs otherwise one by one than together, in a rehearsal "
            "before the first step; in evaluation mode, an output is to depend on its input alone, "
            "not on chance or on the batch (is dropout always on, or a BatchNorm without statistics?)."
        )


def _answers(model: RatioModel, x: Tensor) -> Tensor:
    r"""Returns log-ratios or, of a classifier, logits: it may have no neighbours to score by yet."""
    if isinstance(model, Classifier):
        logits: Tensor = model.class_head(model.backbone(x))
        return logits
    return model.log_ratio(x)


@torch.inference_mode(False)
@torch.enable_grad()
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
    rehearsed: bool = True,
) -> Fit:
    r"""Trains a model to the last step, or until the time budget or a signal stops it.

    There are gradients whatever the caller's mode.

    Takes the arguments of :func:`assemble`, and:

    Arguments:
        time_budget: The number of seconds after which to save and stop.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show a progress bar.
        rehearsed: Whether to go through everything once before (:func:`rehearse`); the tasks, whose
            networks are ours and whose samplers may be anybody's, do not.

    Raises:
        UserError: If the loss is not finite, or the rehearsal fails.
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
    with closing(batches):
        if rehearsed:
            rehearse(trainer)
        outcome = trainer.run(time_budget, progress, resume)
    return Fit(trainer.kept, outcome)
