r"""Run folders: what a folder holds, whether a run may write there, and what a finished one says.

Nothing here imports torch. A run may not write over another's results, and a finished run is
taken at its word only if configuration and data are those of now.
"""

__all__ = [
    "RESULTS",
    "differences",
    "finished_table",
    "holds",
    "identity",
    "is_evaluation_of",
    "refuse_existing",
    "run_table",
]

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .records import read_record
from .scores import Scores, read_scores
from .tables import MetricsTable

if TYPE_CHECKING:
    from ..config import Config
    from ..data import BenchmarkData, ImageSet

# What says that a folder holds a run to go on with, a trained model, the results of a run.
STATE, MODEL, RECORD = "state.json", "model.json", "run.json"
RESULTS = (STATE, MODEL, RECORD, "metrics.csv", "scores.npz")


def refuse_existing(out: Path, folders: Mapping[int, Path], resume: bool) -> None:
    r"""Raises an error if results would be written over others.

    Arguments:
        out: The folder of all seeds.
        folders: The folder of each seed.
        resume: Whether runs are to go on.
    """
    several = len(folders) > 1
    others = [out] if several else sorted(out.glob("seed-*") if os.path.isdir(out) else ())
    if found := [f for f in others if holds(f, STATE)]:
        expected = "one seed's" if several else "several seeds'"
        raise UserError(f"{found[0]}: holds {expected} run; choose another --out.")
    for folder in folders.values():
        if not resume and holds(folder, *RESULTS):
            raise UserError(
                f"{folder}: holds a run already; go on with --resume or choose another --out."
            )
        if resume and holds(folder, RECORD) and not holds(folder, STATE):
            raise UserError(f"{folder}: holds an evaluation, no training; choose another --out.")


def holds(folder: Path, *names: str) -> bool:
    r"""Returns whether a folder has one of some files; false for names no file can have."""
    return any(os.path.exists(folder / name) for name in names)


def is_evaluation_of(folder: Path, selection: str) -> bool:
    r"""Returns whether a folder holds the evaluation of a checkpoint, and nothing else's."""
    return (
        holds(folder, RECORD)
        and not holds(folder, STATE, MODEL)
        and read_record(folder / RECORD).get("selection") == selection
    )


def finished_table(folder: Path, config: "Config", data: "BenchmarkData") -> MetricsTable:
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
    return run_table(
        scores,
        data,
        accuracy=record["results"]["accuracy"],
        seconds=record["score_seconds"],
        parameters=record["results"]["parameters"],
        reference=record["data"]["reference"],
        steps=config.training.steps,
    )


def identity(data: "BenchmarkData", trained: bool = False) -> dict[str, dict[str, str]]:
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


def _pixels(images: "ImageSet") -> str:
    r"""Returns a SHA-256 of evenly spaced images, enough to notice another folder of files."""
    step = max(1, len(images) // 500)
    return hashlib.sha256(np.ascontiguousarray(images.images[::step]).data).hexdigest()


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
    from ..data.lists import first

    return first(differing, "key") if differing else None


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns a configuration as a mapping from `section.key`."""
    sections = {k: v if isinstance(v, Mapping) else {"": v} for k, v in config.items()}
    return {f"{s}.{k}".rstrip("."): v for s, keys in sections.items() for k, v in keys.items()}


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def run_table(
    scores: Scores,
    data: "BenchmarkData",
    accuracy: float | None,
    seconds: float,
    parameters: int,
    reference: str | None,
    steps: int,
) -> MetricsTable:
    r"""Returns the table of a run, whether it was just scored or read from its files."""
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
