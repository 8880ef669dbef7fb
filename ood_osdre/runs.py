r"""One run: train a ratio on a benchmark, score its test sets, write the run folder.

A finished run folder holds `metrics.csv`, `metrics.md`, `scores.npz`, `score_density.png` and
`run.json`, besides the selected model (`model.safetensors`) and `log.jsonl`. A finished run is
taken at its word only if configuration and data are those of now.
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
from .data.standardise import Preprocess
from .errors import UserError
from .evaluation.evaluate import (
    Evaluation,
    Validation,
    check_neighbours,
    deployed,
    evaluate_benchmark,
)
from .evaluation.plots import draw_scores
from .evaluation.records import RunRecord, read_record
from .evaluation.scorer import Scorer, TrainedModel
from .evaluation.scores import Scores, read_scores, write_scores
from .evaluation.tables import MetricsTable
from .files import write_text_atomic
from .models.build import build_ratio
from .objectives.build import prepare_objective
from .training import distributed
from .training.batches import ImageBatches
from .training.fit import fit
from .training.run import RECORD
from .training.trainer import Outcome


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
    options = config.training
    torch.manual_seed(options.seed)
    # Batches have one shape, for which the fastest convolution is worth finding.
    torch.backends.cudnn.benchmark = True
    preprocess = Preprocess(data.manifest.mean, data.manifest.std, device)
    classes = int(data.id_train.labels.max()) + 1
    reference, near = data.split_reference()
    metadata = _metadata(config, data, classes)
    ratio = build_ratio(config, classes).to(device)
    check_neighbours(ratio, data.id_train)
    validation = _validation(config, data, near, preprocess)
    fitted = fit(
        ratio,
        partial(prepare_objective, config),
        ImageBatches(
            data.id_train, reference, config.data, preprocess, options.batch_size, options.seed
        ),
        options,
        validation,
        select=config.evaluation.select,
        folder=folder,
        metadata=metadata,
        time_budget=time_budget,
        resume=resume,
        progress=progress,
    )
    selection = validation.describe(config.evaluation.select)
    trained = TrainedModel(fitted.model, preprocess, metadata)
    return Scorer.of(trained), fitted.outcome, selection


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
        config: The configuration that the record names.
        folder: The run folder.
        selection: How the scorer was selected.
        outcome: How it was trained; None if it was loaded.
        progress: Whether to show a progress bar.

    Returns:
        The table of the run.
    """
    model = deployed(scorer.ratio, config.evaluation, data.id_train, scorer.preprocess)
    done = evaluate_benchmark(
        model, data, scorer.preprocess, config.evaluation.batch_size, progress
    )
    table = _table(
        done.scores,
        data,
        accuracy=done.accuracy,
        seconds=done.seconds,
        parameters=scorer.parameters,
        reference=data.reference_name or scorer.metadata.get("reference"),
        steps=config.training.steps,
    )
    if distributed.is_first():
        title = data.manifest.title
        _write_results(
            folder, done.scores, table, f"{title}: {config.title}" if config.title else title
        )
        record = _record(config, data, table, done, scorer.preprocess.device, selection, outcome)
        record.write(folder / RECORD)
    return table


def finished_table(folder: Path, config: Config, data: BenchmarkData) -> MetricsTable:
    r"""Makes the table of a finished run from its scores; no image is scored again.

    Arguments:
        folder: The run folder.
        config: The configuration that the run should have had.
        data: The benchmark.

    Raises:
        UserError: If the run was another one.
    """
    path = folder / RECORD
    record = read_record(path)
    then = {**record["config"], "benchmark": record["benchmark"]}
    now = {**config.to_dict(), "benchmark": data.manifest.name}
    if difference := differences(then, now):
        raise UserError(
            f"{path}: a finished run that differs in {difference}; choose another --out."
        )
    scores = read_scores(folder / "scores.npz")
    then = {**record["data"], "absent": record["absent"]}
    now = {**then, **identity(data), "absent": data.absent}
    if difference := differences(then, now):
        raise UserError(
            f"{path}: a finished run on other data: {difference}; choose another --out."
        )
    return _table(
        scores,
        data,
        accuracy=record["results"]["accuracy"],
        seconds=record["score_seconds"],
        parameters=record["results"]["parameters"],
        reference=record["data"]["reference"],
        steps=config.training.steps,
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


def _validation(
    config: Config, data: BenchmarkData, near: ImageSet, preprocess: Preprocess
) -> Validation:
    use_ood = config.evaluation.use_ood_val
    if use_ood and data.ood_val is None:
        raise UserError(
            f"evaluation.use_ood_val: benchmark {data.manifest.name} has no OOD validation set here."
        )
    return Validation(
        data.id_val,
        near,
        preprocess,
        config.evaluation.batch_size,
        config.data.val_limit,
        data.ood_val if use_ood else None,
        data.id_train,
    )


def _metadata(config: Config, data: BenchmarkData, classes: int) -> dict[str, Any]:
    r"""Returns what is stored with the model: how to build it, and on what it was trained."""
    manifest = data.manifest
    return {
        "config": config.to_dict(),
        "classes": classes,
        "mean": list(manifest.mean),
        "std": list(manifest.std),
        "size": manifest.size,
        "reference": data.reference_name,
        **identity(data, trained=True),
    }


def _table(
    scores: Scores,
    data: BenchmarkData,
    accuracy: float | None,
    seconds: float,
    parameters: int,
    reference: str | None,
    steps: int,
) -> MetricsTable:
    return MetricsTable.of(
        scores.metrics(),
        title=data.manifest.title,
        absent=data.absent_by_role(),
        accuracy=accuracy,
        seconds=seconds,
        parameters=parameters,
        counts=scores.counts(),
        reference=reference,
        steps=steps,
    )


def _record(
    config: Config,
    data: BenchmarkData,
    table: MetricsTable,
    done: Evaluation,
    device: torch.device,
    selection: str,
    outcome: Outcome | None,
) -> RunRecord:
    return RunRecord(
        config=config.to_dict(),
        seed=config.training.seed,
        benchmark=data.manifest.name,
        device=distributed.device_name(device),
        data={"reference": table.reference, "counts": done.scores.counts(), **identity(data)},
        absent=data.absent,
        selection=selection,
        validation={} if outcome is None else {"best": outcome.best, "history": outcome.history},
        train_seconds=None if outcome is None else outcome.seconds,
        score_seconds=done.seconds,
        results={
            "accuracy": done.accuracy,
            "parameters": table.parameters,
            "evaluations": done.evaluations,
        },
    )


def _write_results(folder: Path, scores: Scores, table: MetricsTable, title: str) -> None:
    write_scores(folder / "scores.npz", scores)
    draw_scores(folder / "score_density.png", scores, title)
    table.to_csv(folder / "metrics.csv")
    write_text_atomic(folder / "metrics.md", table.to_markdown())


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
