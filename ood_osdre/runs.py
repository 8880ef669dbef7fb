r"""One run of the command: train a model on a benchmark, score the test sets, write the run folder.

A run with a head has two stages, each with its state in the run folder: `classifier/`, unless the
classifier is given, and `head/`. Between them features are computed, in memory. Its model is both.

A finished run folder holds `metrics.csv`, `metrics.md`, `scores.npz`, `score_density.png` and
`run.json`, besides the selected model (`model.safetensors`) and `log.jsonl`. The table of a
finished run is made from its scores, if its configuration and data are those of now.
"""

__all__ = ["evaluate_run", "finished_table", "train_run"]

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .config import Config, HeadConfig
from .data import BenchmarkData
from .data.sets import hold_out_id
from .data.transforms import Preprocess
from .detectors import (
    GivenClassifier,
    HeadData,
    Scorer,
    TrainedModel,
    fit_head,
    model_metadata,
    read_classifier,
)
from .errors import UserError
from .evaluation.evaluate import Validation, check_neighbours, evaluate_benchmark, scoring_model
from .evaluation.plots import draw_scores
from .evaluation.records import RunRecord, differences, identity, read_record
from .evaluation.scores import Scores, read_scores, write_scores
from .evaluation.tables import MetricsTable
from .files import write_text_atomic
from .models import Classifier, NetworkDigest, RepresentationRatio
from .training import distributed
from .training.batches import ImageBatches
from .training.build import build_ratio, prepare_objective
from .training.checkpoint import write_checkpoint
from .training.fit import fit
from .training.run import CLASSIFIER, HEAD, MODEL, RECORD, Outcome, refuse_other_level


def train_run(
    config: Config,
    data: BenchmarkData,
    folder: Path,
    device: torch.device,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = True,
) -> tuple[Scorer, Outcome, str]:
    r"""Trains on the ID and reference sets of a benchmark.

    Arguments:
        config: The configuration.
        data: The benchmark; its test sets are not read.
        folder: The folder of checkpoints and log.
        device: Where to train.
        time_budget: The number of seconds after which to save and stop.
        resume: Whether to go on from the folder's checkpoint, if there is one.
        progress: Whether to show a progress bar.

    Returns:
        The selected scorer, how far the run came, and the selection rule.

    Raises:
        UserError: If options, data, folder or a given classifier do not go together.
    """
    refuse_other_level(folder, head=config.head is not None)
    stage = Stage(folder, time_budget, resume, progress)
    if config.head is None:
        return _train_network(config, data, device, stage)
    return _train_head(config, config.head, data, device, stage)


class Stage(NamedTuple):
    r"""Where and for how long a network is trained, see :func:`train_run`."""

    folder: Path
    time_budget: float | None
    resume: bool
    progress: bool

    def next(self, name: str, started: float) -> "Stage":
        r"""Returns the stage of a name, with what is left of a budget that ran since a time."""
        budget = self.time_budget
        left = None if budget is None else max(budget + started - time.monotonic(), 0.0)
        return self._replace(folder=self.folder / name, time_budget=left)


def _train_network(
    config: Config, data: BenchmarkData, device: torch.device, stage: Stage
) -> tuple[Scorer, Outcome, str]:
    r"""Trains a network from pixels; returns what :func:`train_run` does."""
    options, manifest = config.training, data.manifest
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    validation = _validation(config, data, preprocess)
    torch.manual_seed(options.seed)
    # Batches have one shape, for which the fastest convolution is worth finding.
    torch.backends.cudnn.benchmark = True
    classes = int(data.id_train.labels.max()) + 1
    reference, _ = data.split_reference()
    id_train, _ = hold_out_id(data.id_train, config.data.hold_out_id)
    metadata = _metadata(config, data, classes, preprocess)
    model = build_ratio(config, classes).to(device)
    check_neighbours(model, id_train)
    fitted = fit(
        model,
        partial(prepare_objective, config),
        ImageBatches(
            id_train, reference, config.data, preprocess, options.batch_size, options.seed
        ),
        options,
        validation,
        select=config.evaluation.selected_by,
        metadata=metadata,
        **stage._asdict(),
    )
    scorer = Scorer.of(TrainedModel(fitted.model, preprocess, metadata))
    return scorer, fitted.outcome, validation.describe(config.evaluation.select)


def _validation(config: Config, data: BenchmarkData, preprocess: Preprocess) -> Validation:
    r"""Returns the validation of a run, which sees no test set."""
    options, held = config.evaluation, hold_out_id(data.id_train, config.data.hold_out_id)
    if options.use_ood_val and data.ood_val is None:
        raise UserError(
            f"evaluation.use_ood_val: benchmark {data.manifest.name} has no OOD validation set here."
        )
    return Validation(
        data.id_val,
        data.split_reference()[1],
        preprocess,
        options.batch_size,
        config.data.val_limit,
        data.ood_val if options.use_ood_val else None,
        *held,
    )


def _train_head(
    config: Config, head: HeadConfig, data: BenchmarkData, device: torch.device, stage: Stage
) -> tuple[Scorer, Outcome, str]:
    r"""Trains a classifier, unless one is given, and a head on it; returns as :func:`train_run`."""
    started, classes = time.monotonic(), int(data.id_train.labels.max()) + 1
    manifest = data.manifest
    if config.classifier is None:
        torch.manual_seed(config.training.seed)
        untrained = build_ratio(config, classes)
        assert isinstance(untrained, Classifier)
        given = GivenClassifier(untrained, config.network.to_dict())
    else:
        given = read_classifier(config.classifier, config, classes, manifest.size)
    images = HeadData(config, head, data)
    images.check(given.model)
    rule, outcome = f"given: {config.classifier}", Outcome()
    if config.classifier is None:
        own = config.replace(head=None)
        if not config.objective.outlier_exposure:  # which alone makes it look at the reference
            own = own.replace(data=config.data.replace(broaden=0.0, mixture=0.0))
        scorer, outcome, rule = _train_network(own, data, device, stage.next(CLASSIFIER, started))
        assert isinstance(scorer.ratio, Classifier)
        given = given._replace(model=scorer.ratio)
        if not outcome.finished:
            outcome.reason += ", training the classifier"
            return scorer, outcome, rule

    mean, std = given.statistics or (manifest.mean, manifest.std)
    preprocess = Preprocess(mean, std, device)
    classifier = given.model.to(device).eval()
    metadata = _metadata(config, data, classes, preprocess)
    known = {"run": metadata, "classifier": NetworkDigest.of(classifier).digest}
    before = time.monotonic()
    features, stopped = images.features(classifier, preprocess, stage.progress)
    seconds = outcome.seconds + time.monotonic() - before
    if stopped:
        scorer = Scorer.of(TrainedModel(classifier, preprocess, metadata))
        outcome = Outcome(reason=f"{stopped}, computing features", steps=head.training.steps)
        return scorer, outcome, rule
    final = stage.next(HEAD, started)._asdict()
    fitted = fit_head(head, *features, device, metadata=known, **final)
    model = RepresentationRatio(classifier, fitted.model, head.layers)
    count, rank = fitted.model.whitening.shape
    part = {"network": given.network, "features": count, "rank": rank}
    metadata = {**metadata, "representation": part}
    outcome = replace(fitted.outcome, seconds=seconds + fitted.outcome.seconds)
    scorer = Scorer.of(TrainedModel(model, preprocess, metadata))
    if not outcome.finished:
        outcome.reason += ", training the head"
    else:
        # Beside what was watched on features: the numbers by which any run is known.
        numbers = _validation(config, data, preprocess)(scorer.ratio)
        outcome.best = outcome.best | {k: float(v) for k, v in numbers.items()}
        if distributed.is_first():
            write_checkpoint(stage.folder, MODEL, model.state_dict(), metadata)
    return scorer, outcome, f"head: {fitted.rule}; classifier: {rule}"


def evaluate_run(
    scorer: Scorer,
    data: BenchmarkData,
    config: Config,
    folder: Path,
    selection: str,
    outcome: Outcome | None = None,
    progress: bool = True,
) -> MetricsTable:
    r"""Scores the test sets, once, and writes the run folder.

    Arguments:
        scorer: The scorer.
        data: The benchmark.
        config: The configuration, which the record holds.
        folder: The run folder.
        selection: How the scorer was selected.
        outcome: How it was trained; None if it was loaded.
        progress: Whether to show a progress bar.
    """
    options, preprocess = config.evaluation, scorer.preprocess
    model = scoring_model(scorer.ratio, options, data.id_train, preprocess)
    done = evaluate_benchmark(model, data, preprocess, options.batch_size, progress)
    scores, reference = done.scores, data.reference_name or scorer.metadata.get("reference")
    table = _table(
        scores,
        data,
        config,
        accuracy=done.accuracy,
        seconds=done.seconds,
        parameters=scorer.parameters,
        reference=reference,
    )
    if not distributed.is_first():
        return table
    title = f"{table.title}: {config.title}" if config.title else table.title
    write_scores(folder / "scores.npz", scores)
    draw_scores(folder / "score_density.png", scores, title)
    table.to_csv(folder / "metrics.csv")
    write_text_atomic(folder / "metrics.md", table.to_markdown())
    record = RunRecord(
        config=config.to_dict(),
        seed=config.training.seed,
        benchmark=data.manifest.name,
        device=distributed.device_name(preprocess.device),
        data={
            "reference": reference,
            "counts": scores.counts(),
            "overlaps": table.overlaps,
            "parts": table.parts,
            "remark": table.remark,
            **identity(data),
        },
        absent=data.absent,
        selection=selection,
        validation={} if outcome is None else {"best": outcome.best, "history": outcome.history},
        train_seconds=None if outcome is None else outcome.seconds,
        score_seconds=done.seconds,
        results={
            "accuracy": done.accuracy,
            "parameters": scorer.parameters,
            "evaluations": done.evaluations,
            **({} if outcome is None else outcome.learnt),
            "amp": None if outcome is None else outcome.amp,
        },
    )
    record.write(folder / RECORD)
    return table


def finished_table(folder: Path, config: Config, data: BenchmarkData) -> MetricsTable:
    r"""Makes the table of a finished run from its scores; no image is scored again.

    Arguments:
        folder: The run folder.
        config: The configuration that the run should have had.
        data: The benchmark.

    Raises:
        UserError: If the run had another configuration or other data.
    """
    path = folder / RECORD
    record, scores, current = read_record(path), read_scores(folder / "scores.npz"), identity(data)
    then = {**record.config, "benchmark": record.benchmark, "absent": record.absent}
    then |= {key: record.data.get(key) for key in current}
    now = {**config.to_dict(), "benchmark": data.manifest.name, "absent": data.absent, **current}
    if difference := differences(then, now):
        raise UserError(
            f"{path}: a finished run that differs in {difference}; choose another --out."
        )
    return _table(
        scores,
        data,
        config,
        accuracy=record.accuracy,
        seconds=record.score_seconds,
        parameters=record.parameters,
        reference=record.reference,
    )


def _metadata(
    config: Config, data: BenchmarkData, classes: int, preprocess: Preprocess
) -> dict[str, Any]:
    facts, size = identity(data, trained=True), data.manifest.size
    return model_metadata(config, classes, preprocess, size, data.reference_name, **facts)


def _table(
    scores: Scores,
    data: BenchmarkData,
    config: Config,
    reference: str | None,
    **facts: Any,  # noqa: ANN401
) -> MetricsTable:
    manifest = data.manifest
    return MetricsTable.of(
        scores.metrics(),
        title=manifest.title,
        absent=data.absent_by_role(),
        counts=scores.counts(),
        overlaps=manifest.overlaps(reference),
        parts=manifest.parts,
        steps=config.training.steps,
        reference=reference,
        remark=" ".join(manifest.note.split()),
        **facts,
    )
