r"""The records of studies: one line of JSON for each scored model, in `records/STUDY.jsonl`.

A file is replaced as a whole when a line is added, so a reader, or a writer that was killed, finds
the old lines or the new ones and never half a line. Metrics are in percent, validation numbers as
the run has them, as shares of 1 or in nats, times in seconds.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from studies import RUN

from ood_osdre.errors import UserError, one_line
from ood_osdre.evaluation.scores import ROLES, read_scores
from ood_osdre.evaluation.tables import HELD
from ood_osdre.files import as_json, write_text_atomic
from ood_osdre.options import Natural, Options, Text

RECORDS = Path(__file__).parent / "records"

METRICS = ("AUROC", "FPR@95", "AUPR_IN", "AUPR_OUT", "FPR@95_ID")

# What most lines of a study share: of each but the first stands what differs from the first's.
SHARED = ("config", "checksums")

Key: TypeAlias = tuple[str, str, str | None, str, str, int]


class Run(Options):
    r"""One scored model.

    Attributes:
        method: The method's name in the study.
        variant: How the model is scored, where a method has several ways.
        seed: The training seed.
        id: The in-distribution data set.
        benchmark: The manifest.
        reference: The reference set.
        config: The whole configuration, in which `{run:METHOD}` stands for another run's folder.
            Defaults change, so what differs from them would not be enough: lines but the first
            hold what differs from the first line of their file, of this and of the checksums.
        commit: The commit, with a `+` if code differed from it; null outside of a clone.
        checksums: The first 16 digits of the SHA-256 of each image list and its files.
        device: The name of the device.
        threads: The number of threads, where it is known.
        train_seconds: The training time; null for a variant, which trains nothing.
        classifier_seconds: That of the classifier below a head, where another run trained it; null
            where it is not known.
        score_seconds: The time that scoring all test sets took.
        accuracy: The ID accuracy in percent, of a model that has one.
        parameters: The number of parameters.
        evaluations: How many times the network is evaluated for an image.
        metrics: Metrics in percent, by set or mean and by name.
        validation: The selected checkpoint's validation.
        spread: The standard deviation of the scores over all test images, in the score's unit.
        curve: The logged steps and losses.
    """

    method: Text
    variant: str = ""
    seed: Natural
    id: Text
    benchmark: Text
    reference: str | None
    config: dict[str, Any]
    commit: str | None
    checksums: dict[str, str]
    device: str | None
    threads: int | None = None
    train_seconds: float | None = None
    classifier_seconds: float | None = None
    score_seconds: float
    accuracy: float | None = None
    parameters: int
    evaluations: float = 1.0
    metrics: dict[str, dict[str, float]]
    validation: dict[str, float]
    spread: float | None = None
    curve: dict[str, list[float]] | None = None

    @property
    def key(self) -> Key:
        r"""What tells a line from every other of its study."""
        return self.id, self.benchmark, self.reference, self.method, self.variant, self.seed

    @property
    def label(self) -> str:
        r"""The line's name in messages."""
        return ", ".join(filter(None, [self.method, self.variant, f"seed {self.seed}"]))

    @property
    def is_blind(self) -> bool:
        r"""Whether it sees no reference, and so stands for itself with each of them."""
        exposed = self.config.get("objective", {}).get("outlier_exposure")
        is_classifier = self.config.get("estimator") == "classifier"
        return is_classifier and not self.config.get("head") and not exposed

    def stands_for(self, reference: str | None) -> bool:
        r"""Whether it belongs to a reference; what sees none belongs to each."""
        return self.is_blind or self.reference == reference

    @property
    def near(self) -> str:
        r"""The near mean that compares references: without what they hold classes of, where it is."""
        return HELD if HELD in self.metrics else "nearood"

    def value(self, key: str) -> float:
        r"""Returns a validation number in percent, or in nats; NaN where there is none."""
        value = self.validation.get(key, np.nan)
        return value if "_log_mass_" in key else 100 * value

    def metric(self, row: str, name: str = "AUROC") -> float:
        r"""Returns a metric of a set or of a group's mean, in percent; NaN where there is none."""
        return self.metrics.get(row, {}).get(name, np.nan)


def read_runs(path: Path) -> list[Run]:
    r"""Reads the lines of a study.

    Arguments:
        path: The file; without one there are no lines.

    Raises:
        UserError: If a line is no record, or two are of the same run.
    """
    if not path.exists():
        return []
    runs: dict[Key, Run] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        source = f"{path}:{number}"
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}: not a line of JSON ({one_line(error, 80)}).") from None
        if runs and isinstance(values, dict) and "changes" in values:
            values |= _changed(_shared(next(iter(runs.values()))), values.pop("changes"), source)
        run = Run.of(values, source)
        if run.key in runs:
            raise UserError(f"{source}: {run.label} is there already, expected one line a run.")
        runs[run.key] = run
    return list(runs.values())


def append(path: Path, run: Run) -> None:
    r"""Adds a line. One process at a time may write a file.

    Raises:
        UserError: If the run is there already, is of other data than the lines there, or the file
            cannot be written.
    """
    runs = read_runs(path)
    for other in runs:
        if other.key == run.key:
            raise UserError(f"{path}: {run.label} is there already, expected one line a run.")
        if other.key[:2] == run.key[:2] and not _same_data(run, other):
            raise UserError(f"{path}: {run.label} has other data than {other.label} there.")
    write_runs(path, [*runs, run])


def _same_data(run: Run, other: Run) -> bool:
    r"""Returns whether two runs of a benchmark have the same data; a variant saw no training set."""
    a, b = run.checksums, other.checksums
    both_trained = run.train_seconds is not None and other.train_seconds is not None
    if both_trained and run.reference == other.reference:
        return a == b
    return all(a[name] == b[name] for name in a.keys() & b.keys())


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    r"""Writes the lines of a study, without what may be null and is."""
    needed = {name for name, field in Run.model_fields.items() if field.is_required()}
    text = ""
    for run in runs:
        values = {k: v for k, v in dict(run).items() if v is not None or k in needed}
        if text:
            differing = _differing(_shared(runs[0]), _shared(run))
            values = {k: v for k, v in values.items() if k not in SHARED} | {"changes": differing}
        text += line_of(values)
    write_text_atomic(path, text)


def _shared(run: Run) -> dict[str, Any]:
    r"""Returns a copy of what a run may have in common with others, as JSON has it."""
    values: dict[str, Any] = json.loads(line_of({name: getattr(run, name) for name in SHARED}))
    return values


def _differing(base: Any, own: Any, *path: str) -> list[tuple[list[str], Any]]:  # noqa: ANN401
    r"""Returns the paths of keys, and the values there, in which a value differs from a base."""
    if isinstance(base, dict) and isinstance(own, dict) and base.keys() == own.keys():
        return [found for key in own for found in _differing(base[key], own[key], *path, key)]
    # Of JSON, 1, 1.0 and true are three.
    return [] if json.dumps(base) == json.dumps(own) else [([*path], own)]


def _changed(
    base: dict[str, Any], differing: Sequence[tuple[list[str], Any]], source: str
) -> dict[str, Any]:
    r"""Returns a base with the values of :func:`_differing`; the base is changed itself."""
    try:
        for (*above, key), value in differing:
            at = base
            for name in above:
                at = at[name]
            if key not in at:
                raise KeyError(key)
            at[key] = value
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{source}: changes: not keys of the first line ({one_line(error, 80)})."
        ) from None
    return base


def line_of(values: Mapping[str, Any]) -> str:
    r"""Returns values as a line of JSON."""
    return json.dumps(as_json(values), ensure_ascii=False, separators=(",", ":")) + "\n"


def commit_text(commit: Mapping[str, Any] | None) -> str | None:
    r"""Returns the revision of a commit, with a `+` if code differed from it; null without one."""
    return None if commit is None else commit["revision"] + "+" * commit["dirty"]


def record_of(path: Path) -> dict[str, Any]:
    r"""Returns the record of a run or of a single benchmark.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a run record ({one_line(error, 80)}).") from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UserError(f"{path}: not a run record, expected a mapping with 'config'.")
    return record


def finished_run(folder: Path, **given: Any) -> Run:  # noqa: ANN401
    r"""Returns the line of a finished run of the main command.

    Arguments:
        folder: The run's folder.
        given: Attributes of :class:`Run` that its files do not say, or say otherwise.

    Raises:
        UserError: If a file of the run is absent or damaged.
    """
    record = record_of(folder / "run.json")
    scores = read_scores(folder / "scores.npz")
    tests = np.concatenate([s.score for role in ROLES for s in scores.of(role).values()])
    try:
        results, data, commit = record["results"], record["data"], record["commit"]
        best = record["validation"].get("best") or {}
        values = {
            "reference": data["reference"],
            "commit": commit_text(commit),
            "checksums": {name: text[:16] for name, text in data["checksums"].items()},
            "device": record["device"],
            "train_seconds": record["train_seconds"],
            "classifier_seconds": _classifier_seconds(record),
            "score_seconds": record["score_seconds"],
            "accuracy": None if results["accuracy"] is None else 100 * results["accuracy"],
            "parameters": results["parameters"],
            "evaluations": results["evaluations"],
            "metrics": read_metrics(folder / "metrics.csv"),
            "validation": {k: v for k, v in best.items() if v is not None},
            "spread": round(float(tests.std()), 6),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = one_line(error, 80)
        raise UserError(
            f"{folder}: not a finished run ({type(error).__name__}: {reason})."
        ) from None
    return Run.of({**values, **given}, str(folder))


def _classifier_seconds(record: Mapping[str, Any]) -> float | None:
    r"""Returns the training time of the run that a run's classifier is from, if it is one."""
    path = Path(record["config"].get("classifier") or "") / "run.json"
    if record["train_seconds"] is None or not path.is_file():
        return None
    seconds: float | None = record_of(path).get("train_seconds")
    return seconds


def training_seconds(run: Run, runs: Sequence[Run]) -> float:
    r"""Returns the seconds that everything took to train that a run's score needs.

    A further way to score counts its method's training, a head its classifier's, and a sum that of
    every network in it, each once.

    Arguments:
        run: The run.
        runs: The runs of its study.

    Returns:
        The seconds; NaN where those of a part are not known.
    """
    return sum(_trainings(run, runs).values())


def _trainings(run: Run, runs: Sequence[Run]) -> dict[str, float]:
    r"""Returns the seconds of each training that a run's score needs."""
    same = [r for r in runs if (r.id, r.benchmark, r.seed) == (run.id, run.benchmark, run.seed)]
    # A method that sees no reference has one run, which stands for all references.
    same = sorted(same, key=lambda other: other.reference != run.reference)
    by_method = {r.method: r for r in reversed(same) if r.train_seconds is not None}
    own = by_method.get(run.method, run)
    seconds = {run.method: np.nan if own.train_seconds is None else own.train_seconds}
    classifier = run.config.get("classifier")
    for source in (classifier, *run.config.get("evaluation", {}).get("together", ())):
        needed = by_method.get(RUN.sub(r"\1", source)) if source else None
        if needed:
            seconds |= _trainings(needed, runs)
        elif source:
            known = own.classifier_seconds if source == classifier else None
            seconds[source] = np.nan if known is None else known
    return seconds


def read_metrics(path: Path) -> dict[str, dict[str, float]]:
    r"""Returns the metrics of a run's table in percent, by set or mean and by name."""
    try:
        frame = pd.read_csv(path).set_index("set")
        frame = frame[frame["role"] != "id"][list(METRICS)]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not a run's table ({one_line(error, 80)}).") from None
    return {str(name): row.dropna().to_dict() for name, row in frame.iterrows()}


def read_curve(path: Path) -> dict[str, list[float]]:
    r"""Returns the logged steps and losses of a run, by their names in its log."""
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        entries = [entry for entry in entries if "loss_total" in entry]
        names = [k for k in entries[0] if k == "step" or k.startswith("loss_")] if entries else []
        return {name: [round(float(entry[name]), 6) for entry in entries] for name in names}
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{path}: not a run's log ({one_line(error, 80)}).") from None
