r"""One run of the command: train a model on a benchmark, score the test sets, write the run folder.

A finished run folder holds `metrics.csv`, `metrics.md`, `scores.npz`, `score_density.png` and
`run.json`, besides the selected model (`model.safetensors`) and `log.jsonl`. The table of a
finished run is made from its scores, if its configuration and data are those of now.
"""

__all__ = ["differences", "evaluate_run", "finished_table", "identity", "train_run"]

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .config import Config
from .data import BenchmarkData, ImageSet
from .data.lists import first
from .data.sets import hold_out_id
from .data.transforms import Preprocess
from .detectors import Scorer, TrainedModel, model_metadata
from .errors import UserError
from .evaluation.evaluate import Validation, check_neighbours, evaluate_benchmark, scoring_model
from .evaluation.plots import draw_scores
from .evaluation.records import RunRecord, read_record
from .evaluation.scores import Scores, read_scores, write_scores
from .evaluation.tables import MetricsTable
from .files import write_text_atomic
from .training import distributed
from .training.batches import ImageBatches
from .training.build import build_ratio, prepare_objective
from .training.fit import fit
from .training.run import RECORD, Outcome


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
    """
    options, evaluation, manifest = config.training, config.evaluation, data.manifest
    if evaluation.use_ood_val and data.ood_val is None:
        raise UserError(
            f"evaluation.use_ood_val: benchmark {manifest.name} has no OOD validation set here."
        )
    torch.manual_seed(options.seed)
    # Batches have one shape, for which the fastest convolution is worth finding.
    torch.backends.cudnn.benchmark = True
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    classes = int(data.id_train.labels.max()) + 1
    reference, near = data.split_reference()
    id_train, id_held = hold_out_id(data.id_train, config.data.hold_out_id)
    metadata = model_metadata(
        config,
        classes,
        preprocess,
        manifest.size,
        data.reference_name,
        **identity(data, trained=True),
    )
    model = build_ratio(config, classes).to(device)
    check_neighbours(model, id_train)
    validation = Validation(
        data.id_val,
        near,
        preprocess,
        evaluation.batch_size,
        config.data.val_limit,
        data.ood_val if evaluation.use_ood_val else None,
        id_train,
        id_held,
    )
    fitted = fit(
        model,
        partial(prepare_objective, config),
        ImageBatches(
            id_train, reference, config.data, preprocess, options.batch_size, options.seed
        ),
        options,
        validation,
        select=evaluation.selected_by,
        folder=folder,
        metadata=metadata,
        time_budget=time_budget,
        resume=resume,
        progress=progress,
    )
    scorer = Scorer.of(TrainedModel(fitted.model, preprocess, metadata))
    return scorer, fitted.outcome, validation.describe(evaluation.select)


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


def identity(data: BenchmarkData, trained: bool = False) -> dict[str, dict[str, str]]:
    r"""Returns what tells data from other data: checksums of lists, and of some pixels.

    Arguments:
        data: The benchmark.
        trained: Whether only what training sees counts; no near or far set is then read.
    """
    sets = {
        "id_train": data.id_train,
        "id_val": data.id_val,
        "id_test": data.id_test,
        "reference": data.reference,
    }
    checksums = dict(data.checksums)
    if trained:
        checksums = {k: v for k, v in checksums.items() if not k.startswith(("near", "far"))}
    else:
        sets |= {f"near/{name}": images for name, images in data.near.items()}
        sets |= {f"far/{name}": images for name, images in data.far.items()}
    return {
        "checksums": checksums,
        "pixels": {name: _pixels(images) for name, images in sets.items() if len(images)},
    }


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], *, shared: bool = False
) -> str | None:
    r"""Says in what two configurations differ, one key after the other; None if in nothing.

    Arguments:
        then: The one, with sections in it.
        now: The other.
        shared: Whether only keys that both have count.
    """
    old, new = _flat(then), _flat(now)
    keys = old.keys() & new.keys() if shared else old.keys() | new.keys()
    missing = object()
    differing = [
        f"{key}={_short(old.get(key))} (not {_short(new.get(key))})"
        for key in sorted(keys)
        if old.get(key, missing) != new.get(key, missing)
    ]
    return first(differing, "key") if differing else None


def _pixels(images: ImageSet) -> str:
    r"""Returns a SHA-256 of evenly spaced images, enough to notice another folder of files."""
    step = max(1, len(images) // 500)
    return hashlib.sha256(np.ascontiguousarray(images.images[::step]).data).hexdigest()


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns a configuration as a mapping from `section.key`."""
    sections = {k: v if isinstance(v, Mapping) else {"": v} for k, v in config.items()}
    return {f"{s}.{k}".rstrip("."): v for s, keys in sections.items() for k, v in keys.items()}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
