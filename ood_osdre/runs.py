r"""What a run leaves: its test scores, once, its table and its record.

A finished run folder holds `metrics.csv`, `metrics.md`, `scores.npz`, `score_density.png`,
`run.json` and, made of these, `report.html`, besides the selected model (`model.safetensors`) and
`log.jsonl`. The table of a finished run is made from its scores, if its configuration and data are
those of now.
"""

__all__ = ["changes_sum", "evaluate_run", "finished_table", "join_seeds", "scorer_of"]

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .data import BenchmarkData, Manifest
from .data.sets import hold_out_id
from .detectors import Scorer, TrainedModel, read_model
from .errors import UserError
from .evaluation.evaluate import evaluate_benchmark, scoring_model
from .evaluation.records import RunRecord, identity, read_record
from .evaluation.report import report_beside
from .evaluation.score_plots import draw_scores, score_label
from .evaluation.scores import Scores, read_scores, write_scores
from .evaluation.tables import HELD, MetricsTable, aggregate
from .files import write_text_atomic
from .models import SummedScore
from .options import differences, flat
from .stages import OWN, add_up, read_member
from .training import distributed
from .training.run import RECORD, Outcome


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
    # Images held out are no neighbours either; where nothing needs ID training images, none are read.
    held = min(config.data.hold_out_id, len(data.id_train))
    id_train, _ = hold_out_id(data.id_train, held)
    model = scoring_model(scorer.ratio, options, id_train, preprocess)
    done = evaluate_benchmark(model, data, preprocess, options.batch_size, progress)
    # What it was trained with, whatever the benchmark would take by itself.
    scores, reference = done.scores, scorer.metadata.get("reference") or data.reference_name
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
    what = score_label(config.to_dict(), scores)
    draw_scores(folder / "score_density.png", scores, title, what)
    _write_table(folder, table)
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
            **({"together": _members(scorer.metadata)} if options.is_sum else {}),
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
    report_beside(folder, data)
    return table


def join_seeds(tables: Sequence[MetricsTable], folder: Path) -> MetricsTable:
    r"""Joins the tables of the seeds of a run and writes what a folder of several holds.

    Arguments:
        tables: The table of each seed, at least one.
        folder: The folder that holds those of the seeds, or is the only one's.
    """
    table = aggregate(tables)
    if len(tables) > 1 and distributed.is_first():
        _write_table(folder, table)
        report_beside(folder)
    return table


def _write_table(folder: Path, table: MetricsTable) -> None:
    table.to_csv(folder / "metrics.csv")
    write_text_atomic(folder / "metrics.md", table.to_markdown())


def changes_sum(metadata: Mapping[str, Any], config: Config) -> bool:
    r"""Returns whether a configuration sums other numbers than the model of some metadata does."""
    then, now = Config.from_mapping(metadata["config"]).evaluation, config.evaluation
    keys = ("parts", "together", "score", "solver", "evaluations", "tolerance")
    differs = any(getattr(then, key) != getattr(now, key) for key in keys)
    return differs and (then.is_sum or now.is_sum)


def scorer_of(folder: Path, config: Config, data: BenchmarkData, device: torch.device) -> Scorer:
    r"""Returns the scorer of a run folder, which sums the parts that options ask for.

    Arguments:
        folder: The run folder.
        config: Its configuration, with changes of `evaluation`.
        data: The benchmark, with its ID validation images.
        device: Where to score.

    Raises:
        UserError: If a part cannot be had.
    """
    whole, options = read_model(folder, device), config.evaluation
    then = Config.from_mapping(whole.metadata["config"]).evaluation
    known = {OWN: whole}
    if isinstance(whole.ratio, SummedScore):
        of_sum = whole.metadata["sum"]
        members = zip(whole.ratio.networks, of_sum["members"], of_sum["digests"], strict=True)
        models = [TrainedModel(net, whole.preprocess, *facts) for net, *facts in members]
        known = dict(zip((OWN, *then.together), models, strict=True))
    if not options.is_sum:
        return Scorer.of(known[OWN])
    for source in options.together:
        known[source] = known.get(source) or read_member(source, config, device)
    chosen = {source: known[source] for source in (OWN, *options.together)}
    return Scorer.of(add_up(chosen, config, data.id_val))


def finished_table(
    folder: Path,
    config: Config,
    data: BenchmarkData,
    members: Mapping[str, Config] | None = None,
) -> MetricsTable:
    r"""Makes the table of a finished run from its scores; no image is scored again.

    Arguments:
        folder: The run folder.
        config: The configuration that the run should have had.
        data: The benchmark.
        members: As for :func:`train_run`.

    Raises:
        UserError: If the run had another configuration or other data.
    """
    path = folder / RECORD
    record, scores, current = read_record(path), read_scores(folder / "scores.npz"), identity(data)
    then = {**record.config, "benchmark": record.benchmark, "absent": record.absent}
    then |= {key: record.data.get(key) for key in current}
    now = {**config.to_dict(), "benchmark": data.manifest.name, "absent": data.absent, **current}
    if members:
        were = record.data.get("together", {})
        then["together"] = {k: flat(v) for k, v in were.items() if k in members}
        now["together"] = {k: flat(member.to_dict()) for k, member in members.items()}
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


def _members(metadata: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns, by source, the configuration of each trained member, and else its checksum."""
    given, sources = metadata["sum"], metadata["config"]["evaluation"]["together"]
    found = zip(sources, given["members"][1:], given["digests"][1:], strict=True)
    return {source: digest or member["config"] for source, member, digest in found}


def _remark(manifest: Manifest, reference: str | None) -> str:
    r"""Returns what a reader has to know of a benchmark, and of a reference that it does not know."""
    remark = " ".join(manifest.note.split())
    if reference is None or reference in {s.name for s in manifest.role("reference")}:
        return remark
    wholes = ", ".join(dict.fromkeys(manifest.parts.values()))
    further = (
        f"What {reference}, a reference given by path, holds of the classes of {wholes} is not "
    )
    further += (
        f"known: nearood counts all of it, {HELD} its part that no reference of the manifest has."
    )
    return f"{remark} {further}".strip() if wholes else remark


def _table(
    scores: Scores,
    data: BenchmarkData,
    config: Config,
    reference: str | None,
    **facts: Any,  # noqa: ANN401
) -> MetricsTable:
    manifest, head = data.manifest, config.head
    # A classifier that is given has been trained elsewhere.
    steps = 0 if config.classifier else config.training.steps
    steps += 0 if head is None or head.estimator == "gaussians" else head.training.steps
    of_sets: Any = {
        "title": manifest.title,
        "absent": data.absent_by_role(),
        "overlaps": manifest.overlaps(reference),
        "parts": manifest.parts,
    }
    addends = {
        name: MetricsTable.of(scores.part(i).metrics(), **of_sets)
        for i, name in enumerate(scores.parts)
    }
    return MetricsTable.of(
        scores.metrics(),
        counts=scores.counts(),
        steps=steps,
        reference=reference,
        remark=_remark(manifest, reference),
        addends=addends,
        seeds=(config.training.seed,),
        **of_sets,
        **facts,
    )
