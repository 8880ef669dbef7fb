r"""The one training loop, for the command, the plugin and the tasks.

The loop knows neither images nor files of data: it is given `batches`, a function from the step
to a :class:`Batch`, and `validate`, a function from a model to named numbers. As a batch, and the
random numbers of a network with dropout, depend on the step alone, the state of a run is its weights,
the optimiser and the step, and a resumed run ends with the same weights as an uninterrupted one (bit
for bit on a CPU).

Every length is in steps: warm-up, decay, validation and checkpoint. A time budget only
stops a run, which can then be resumed; it never changes the schedule.

The model that is validated, kept and deployed has exponentially averaged weights, its basis
included, so that its :math:`\bar g` belongs to the averaged shapes.
"""

__all__ = ["Trainer"]

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..models import RatioModel, copied
from ..objectives import Batch, Objective
from ..progress import Bar
from ..sections import TrainingConfig
from . import checkpoint, distributed
from .optimisation import (
    DTYPES,
    Losses,
    average_into,
    build_optimizer,
    faster_precision,
    learning_rate_factor,
    settled_precision,
)
from .run import Outcome, RunLog, caught_signals
from .surroundings import reseed, same_random_numbers

# Steps between two looks at the loss, which wait for the device, and between lines of the log.
REPORT_EVERY, LOG_EVERY = 20, 100

# What of an outcome the checkpoint holds.
PROGRESS = ("step", "seconds", "best", "history", "amp")

Validate = Callable[[RatioModel], Mapping[str, float]]


class Trainer:
    r"""Trains a model.

    Arguments:
        ratio: The untrained model, on the device to train on.
        objective: From the model and a batch to the losses of terms and their `total`.
        batches: A function from the step to a batch.
        options: Steps, optimiser, averaging and precision.
        validate: A function from the averaged model to named numbers.
        select: The number whose largest value selects the step that is kept; None keeps the last.
        folder: The folder of checkpoints and `log.jsonl`; None writes nothing.
        metadata: What is stored with the selected model, to rebuild it.

    Attributes:
        averaged: The model with averaged weights.
        kept: The averaged model of the selected step.
        outcome: How far the run came.
    """

    def __init__(
        self,
        ratio: RatioModel,
        objective: Objective,
        batches: Callable[[int], Batch],
        options: TrainingConfig,
        validate: Validate | None = None,
        select: str | None = None,
        folder: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.ratio, self.objective = ratio, objective
        self.batches, self.options = batches, options
        self.validate, self.select, self.folder = validate, select, folder
        self.output = folder if distributed.is_first() else None
        self.log = None if self.output is None else RunLog(self.output)
        self.metadata = dict(metadata or {})
        self.device = next(ratio.parameters()).device
        if options.channels_last:
            ratio.to(memory_format=torch.channels_last)
        self.averaged = copied(ratio).eval().requires_grad_(False)
        self.kept = self.averaged
        self.optimizer = build_optimizer(ratio, objective, options)
        losses: nn.Module = Losses(ratio, objective)
        if options.compile:
            losses = torch.compile(losses)  # type: ignore[assignment]
        self.losses = distributed.parallel(losses, self.device)
        if options.batch_size % (processes := distributed.world_size()):
            raise UserError(
                f"training.batch_size: got {options.batch_size}, expected a multiple of the "
                f"{processes} processes."
            )
        self.outcome = Outcome()
        self._use(settled_precision(options.amp, self.device))
        self._began = 0, time.monotonic()

    def step(self, batch: Batch) -> dict[str, Tensor]:
        r"""Takes one optimiser step and returns the mean losses, detached, on the device."""
        step = self.outcome.step
        self.ratio.train()
        rows = distributed.share(len(batch.t))
        batch = batch.part(rows)
        if not self.outcome.amp:
            self._use(
                distributed.from_first(self._faster(batch) if distributed.is_first() else "")
            )
        # What a network of the user's draws, such as dropout, has to be the same in a resumed run.
        reseed((self.options.seed, step, rows.start), self.device)
        losses = self._descend(self.losses, self.optimizer, batch)
        # Early on, the average follows the weights more closely than its final decay would.
        average_into(self.averaged, self.ratio, min(self.options.ema, (1 + step) / (10 + step)))
        self.outcome.step += 1
        return {k: v.detach() for k, v in losses.items()}

    def _descend(
        self, losses_of: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
    ) -> dict[str, Tensor]:
        r"""Moves the parameters of an optimiser down the gradient; returns the mean losses."""
        options = self.options
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_factor(self.outcome.step, options)
        with self.autocast:
            losses = {k: v.mean() for k, v in losses_of(batch).items()}

        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(losses["total"]).backward()
        self.scaler.unscale_(optimizer)
        if options.clip:
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
            nn.utils.clip_grad_norm_(parameters, options.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        return losses

    def _use(self, amp: str) -> None:
        r"""Trains in a precision from now on."""
        dtype, kind = DTYPES[amp], self.device.type
        self.outcome.amp = amp
        self.autocast = torch.autocast(kind, dtype, enabled=dtype is not None)
        self.scaler = torch.amp.GradScaler(kind, enabled=dtype is torch.float16 and kind == "cuda")

    def _faster(self, batch: Batch) -> str:
        r"""Returns the faster precision on the CPU, by steps of copies on a batch.

        Vectors stay in single precision: their steps are too short to gain anything.
        """
        if batch.x_1.ndim != 4:
            return "none"
        losses = copied(Losses(self.ratio, self.objective))
        optimizer = build_optimizer(losses.ratio, losses.objective, self.options)

        def step(amp: str) -> None:
            self._use(amp)
            self._descend(losses, optimizer, batch)

        return faster_precision(step)

    def run(
        self, time_budget: float | None = None, progress: bool = True, resume: bool = False
    ) -> Outcome:
        r"""Trains to the last step, or until the time budget or a signal stops it.

        Arguments:
            time_budget: The number of seconds after which to save and stop.
            progress: Whether to show a progress bar.
            resume: Whether to go on from the folder's checkpoint, if there is one.

        Raises:
            UserError: If the loss is not finite. The last checkpoint stays as it was.
        """
        if resume:
            self._resume()
        if self.log is not None:
            self.log.start(self.outcome.step)
        started, before = time.monotonic(), self.outcome.seconds
        self._began = self.outcome.step, started
        options, out, look = self.options, self.outcome, 0
        out.steps = options.steps
        shown = {"disable": not progress, "desc": "training", "unit": "step"}
        bar = Bar(total=options.steps, initial=out.step, **shown)
        with caught_signals() as received, bar, same_random_numbers():
            while out.step < options.steps:
                losses = self.step(self.batches(out.step))
                out.seconds = before + time.monotonic() - started
                bar.update()
                validated = self._due(options.eval_every)
                if validated or out.step % REPORT_EVERY == 0:
                    self._report(bar, losses, validated)
                # Nothing is left to resume after the last.
                if look <= out.step < options.steps:
                    elapsed = time.monotonic() - started
                    reason = _stop_reason(received, time_budget, elapsed)
                    look = out.step + self._stride(elapsed)
                    out.reason, look = distributed.from_first((reason, look))
                if out.reason or self._due(options.checkpoint_every):
                    self._check_finite(losses)
                    self._save()
                if out.reason:
                    return out
        out.finished, out.reason = True, "finished"
        self._finish()
        return out

    def _stride(self, elapsed: float) -> int:
        r"""Returns the number of steps to the next look at the signals and the time budget.

        Processes wait for each other and for the device to agree on it, so that several of them
        look about once a second.
        """
        if distributed.world_size() == 1:
            return 1
        steps = self.outcome.step - self._began[0]
        return max(1, min(REPORT_EVERY, int(steps / max(elapsed, 1e-9))))

    def _due(self, every: int) -> bool:
        return self.outcome.step % every == 0 or self.outcome.step == self.options.steps

    def _report(self, bar: Bar, losses: Mapping[str, Tensor], validate: bool) -> None:
        out = self.outcome
        losses = self._check_finite(losses)
        first, started = self._began
        elapsed = max(time.monotonic() - started, 1e-9)
        images = 2 * self.options.batch_size * (out.step - first) / elapsed
        now = {"step": out.step, "seconds": round(out.seconds, 3)}
        entry = now | {"images_per_second": round(images, 1)}
        entry |= {f"loss_{name}": float(value) for name, value in losses.items()}
        if validate and self.validate is not None:
            self.averaged.eval()
            numbers = {k: float(v) for k, v in self.validate(self.averaged).items()}
            entry |= numbers
            self.keep(now | numbers)
        last = out.history[-1] if out.history else {}
        watched = self.select or next((name for name in last if name.endswith("_auroc")), "")
        told = {"loss": f"{entry['loss_total']:.3f}", "img_s": f"{images:.0f}"}
        told |= {"val": f"{last[watched]:.4f}"} if watched in last else {}
        bar.set_postfix(told)
        if self.log is not None and (validate or out.step % LOG_EVERY == 0):
            self.log.write(entry | self.objective.learnt())

    def keep(self, numbers: dict[str, float]) -> None:
        r"""Records a validation and keeps the averaged model if it is the best so far."""
        out = self.outcome
        out.history.append(numbers)
        scores = getattr(self.validate, "scores", {})
        if self.select is None:
            out.best, out.scores = numbers, scores
            return
        if self.select not in numbers:
            names = ", ".join(sorted(numbers.keys() - {"step", "seconds"}))
            raise UserError(f"evaluation.select: no {self.select!r} among {names}.")
        if not out.best or numbers[self.select] > out.best[self.select]:
            out.best, out.scores = numbers, scores
            self.kept = copied(self.averaged)

    def _finish(self) -> None:
        out = self.outcome
        if self.select is None or not out.best:
            self.kept = self.averaged
        if self._began[0] and out.best and not out.scores and self.validate is not None:
            # The model was validated before the run was resumed, and a checkpoint has no scores.
            self.validate(self.kept.eval())
            out.scores = getattr(self.validate, "scores", {})
        out.learnt = self.objective.learnt()
        if self.output is not None:
            checkpoint.write_checkpoint(
                self.output, checkpoint.MODEL, self.kept.state_dict(), self.metadata
            )

    def modules(self) -> dict[str, nn.Module]:
        r"""Returns all that is trained, averaged or kept, by name."""
        own = {"ratio": self.ratio, "averaged": self.averaged, "kept": self.kept}
        # Learnable paths, data scores: whatever else the optimiser trains.
        return {**own, "objective": self.objective}

    def _save(self) -> None:
        if self.output is None:
            return
        checkpoint.write_checkpoint(self.output, checkpoint.STATE, *self.state())

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        r"""Returns the tensors and the metadata with which a run goes on."""
        metadata = {key: getattr(self.outcome, key) for key in PROGRESS}
        metadata |= {"scaler": self.scaler.state_dict(), "run": self.metadata}
        return checkpoint.pack_state(self.modules(), self.optimizer), metadata

    def _resume(self) -> None:
        source = checkpoint.checkpoint_path(self.folder or Path(), checkpoint.STATE)
        if self.folder is None or not source.is_file():
            return
        tensors, metadata, _ = checkpoint.read_checkpoint(self.folder, checkpoint.STATE)
        checkpoint.refuse_other_run(source, metadata.get("run"), self.metadata)
        self.kept = copied(self.averaged)
        checkpoint.unpack_state(tensors, self.modules(), self.optimizer, source)
        try:
            self.outcome = Outcome(**{key: metadata[key] for key in PROGRESS})
            self._use(self.outcome.amp)
            self.scaler.load_state_dict(metadata["scaler"])
        except KeyError as error:
            raise UserError(f"{source}: {error.args[0]} is missing, start anew.") from None

    def _check_finite(self, losses: Mapping[str, Tensor]) -> dict[str, Tensor]:
        r"""Returns the losses over all processes, which are to be finite."""
        losses = {k: distributed.mean_over_processes(v) for k, v in losses.items()}
        bad = [name for name, value in losses.items() if not torch.isfinite(value)]
        if bad:
            raise UserError(
                f"training: the loss {bad[0]!r} is not finite at step {self.outcome.step}; "
                "lower training.lr or objective.delta, or switch training.amp to none."
            )
        return losses


def _stop_reason(received: list[int], budget: float | None, elapsed: float) -> str:
    if received:
        return signal.Signals(received[0]).name
    if budget is not None and elapsed >= budget:
        return "time budget"
    return ""
