r"""The stages of a run: a network from pixels, a head on a classifier's features, or a sum of such.

A run with a head has two stages, each with its state in the run folder: `classifier/`, unless the
classifier is given, and `head/`. Between them features are computed, and kept. Its model is both.

A run whose score is a sum trains its own model as any run does, and then the configurations that
`evaluation.together` names, in `together-1/`, `together-2/` and so on. Runs that it names are read.
The sum is standardised on the ID validation images of the benchmark, and stored with all models.
"""

__all__ = ["OWN", "add_up", "read_member", "train_run"]

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .config import Config, HeadConfig
from .data import BenchmarkData, ImageSet
from .data.sets import hold_out_id
from .data.transforms import Preprocess
from .detectors import (
    GivenClassifier,
    HeadData,
    Scorer,
    TrainedModel,
    fit_head,
    read_classifier,
    read_model,
)
from .errors import UserError
from .evaluation.evaluate import Validation, check_neighbours, score_parts, set_solver
from .evaluation.records import identity
from .files import local
from .models import Classifier, NetworkDigest, RepresentationRatio, SummedScore
from .sections import FITTED
from .training import distributed
from .training.batches import ImageBatches
from .training.build import build_ratio, prepare_objective
from .training.checkpoint import model_metadata, write_checkpoint
from .training.fit import fit
from .training.run import CLASSIFIER, HEAD, MODEL, Outcome, of_seed, refuse_other_level
from .training.surroundings import own_surroundings

# The source of a run's own model among those that it sums, and the folders of the others.
OWN, TOGETHER = "the run itself", "together"


@own_surroundings()
def train_run(
    config: Config,
    data: BenchmarkData,
    folder: Path,
    device: torch.device,
    time_budget: float | None = None,
    resume: bool = False,
    progress: bool = True,
    members: Mapping[str, Config] | None = None,
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
        members: The configurations that `evaluation.together` names.

    Returns:
        The selected scorer, how far the run came, and the selection rule.

    Raises:
        UserError: If options, data, folder, a given classifier or runs that are summed do not go
            together.
    """
    refuse_other_level(folder, head=config.head is not None)
    stage = Stage(folder, time_budget, resume, progress)
    if config.evaluation.is_sum:
        trained, outcome, rule = _train_sum(config, data, device, stage, members or {})
    else:
        trained, outcome, rule = _train(config, data, device, stage)
    return Scorer.of(trained), outcome, rule


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


Trained = tuple[TrainedModel, Outcome, str]


def _train_sum(
    config: Config,
    data: BenchmarkData,
    device: torch.device,
    stage: Stage,
    members: Mapping[str, Config],
) -> Trained:
    r"""Trains a run's own model and the members of its sum; returns as :func:`train_run`."""
    started, options, manifest = time.monotonic(), config.evaluation, data.manifest
    alone = config.replace(evaluation=options.alone)
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    # Before anything is trained.
    given = {s: read_member(s, config, device) for s in options.together if s not in members}
    check_addends(given, options.parts, _metadata(alone, data, preprocess))
    own, outcome, rule = _train(alone, data, device, stage)
    trained = {OWN: own}
    for i, source in enumerate(options.together if outcome.finished else (), start=1):
        if source not in members:
            trained[source], further = given[source], f"given: {source}"
        else:
            part = stage.next(f"{TOGETHER}-{i}", started)
            trained[source], done, further = _train(members[source], data, device, part)
            if not done.finished:
                reason = f"{done.reason}, training {source}"
                done = replace(done, seconds=done.seconds + outcome.seconds, reason=reason)
                return own, done, rule
            outcome.seconds += done.seconds
        rule += f"; together with {further}"
    if not outcome.finished:
        return own, outcome, rule
    total = add_up(trained, config, data.id_val)
    numbers = Validation.of(config, data, own.preprocess)(total.ratio)
    watched = {k: v for k, v in outcome.best.items() if not k.startswith("val_")}
    outcome.best = watched | {k: float(v) for k, v in numbers.items()}
    if distributed.is_first():
        write_checkpoint(stage.folder, MODEL, total.ratio.state_dict(), total.metadata)
    return total, outcome, rule


def _train(config: Config, data: BenchmarkData, device: torch.device, stage: Stage) -> Trained:
    r"""Trains a network, or a head on one; returns what :func:`train_run` does, unfolded."""
    if config.head is None:
        return _train_network(config, data, device, stage)
    return _train_head(config, config.head, data, device, stage)


def _train_network(
    config: Config, data: BenchmarkData, device: torch.device, stage: Stage
) -> Trained:
    r"""Trains a network from pixels; returns what :func:`train_run` does, unfolded."""
    options, manifest = config.training, data.manifest
    preprocess = Preprocess(manifest.mean, manifest.std, device)
    validation = Validation.of(config, data, preprocess)
    torch.manual_seed(options.seed)
    # Batches have one shape, for which the fastest convolution is worth finding.
    torch.backends.cudnn.benchmark = True
    reference, _ = data.split_reference(config.data.hold_out_reference)
    id_train, _ = hold_out_id(data.id_train, config.data.hold_out_id)
    metadata = _metadata(config, data, preprocess)
    model = build_ratio(config, data.classes).to(device)
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
    trained = TrainedModel(fitted.model, preprocess, metadata)
    return trained, fitted.outcome, validation.describe(config.evaluation.select)


def _train_head(
    config: Config, head: HeadConfig, data: BenchmarkData, device: torch.device, stage: Stage
) -> Trained:
    r"""Trains a classifier, unless one is given, and a head on it; returns as above."""
    started, manifest = time.monotonic(), data.manifest
    if config.classifier is None:
        torch.manual_seed(config.training.seed)
        untrained = build_ratio(config, data.classes)
        assert isinstance(untrained, Classifier)
        given = GivenClassifier(untrained, config.network.to_dict())
    else:
        given = read_classifier(config.classifier, config, data.classes, manifest.size)
    images = HeadData(config, head, data)
    images.check(given.model)
    rule, outcome = f"given: {config.classifier}", Outcome()
    if config.classifier is None:
        own = config.replace(head=None)
        if not config.objective.outlier_exposure:  # which alone makes it look at the reference
            own = own.replace(data=config.data.replace(broaden=0.0, mixture=0.0))
        trained, outcome, rule = _train_network(own, data, device, stage.next(CLASSIFIER, started))
        # As it is stored: folded it would be another network, with other features by their key.
        assert isinstance(trained.ratio, Classifier)
        given = given._replace(model=trained.ratio)
        if not outcome.finished:
            outcome.reason += ", training the classifier"
            return trained, outcome, rule

    mean, std = given.statistics or (manifest.mean, manifest.std)
    preprocess = Preprocess(mean, std, device)
    classifier = given.model.to(device).eval()
    metadata = _metadata(config, data, preprocess)
    known = {"run": metadata, "classifier": NetworkDigest.of(classifier).digest}
    before, left = time.monotonic(), stage.next(HEAD, started).time_budget
    features, stopped = images.features(classifier, preprocess, stage.progress, left)
    seconds = outcome.seconds + time.monotonic() - before
    if stopped:
        trained = TrainedModel(classifier, preprocess, metadata)
        outcome = Outcome(reason=f"{stopped}, computing features", steps=head.training.steps)
        return trained, outcome, rule
    final = stage.next(HEAD, started)._asdict()
    fitted = fit_head(
        head, *features, device, *images.classes, mixed=images.mixed, metadata=known, **final
    )
    whole = RepresentationRatio(classifier, fitted.model, head.layers)
    count, rank = fitted.model.whitening.shape
    metadata["representation"] = {"network": given.network, "features": count, "rank": rank}
    # The precision of a run is that of its network: a head is trained on vectors.
    amp, seconds = outcome.amp or fitted.outcome.amp, seconds + fitted.outcome.seconds
    outcome = replace(fitted.outcome, seconds=seconds, amp=amp)
    trained = TrainedModel(whole, preprocess, metadata)
    if not outcome.finished:
        outcome.reason += ", training the head"
    else:
        # Beside what was watched on features: the numbers by which any run is known.
        folded = Scorer.of(trained).ratio
        set_solver(folded, config.evaluation)
        numbers = Validation.of(config, data, preprocess)(folded)
        outcome.best = outcome.best | {k: float(v) for k, v in numbers.items()}
        if distributed.is_first():
            write_checkpoint(stage.folder, MODEL, whole.state_dict(), metadata)
    return trained, outcome, f"head: {fitted.rule}; classifier: {rule}"


def read_member(source: str, config: Config, device: torch.device) -> TrainedModel:
    r"""Reads a finished run, that of the configuration's seed if the folder has several."""
    return read_model(of_seed(local(source), config.training.seed), device)


def add_up(trained: Mapping[str, TrainedModel], config: Config, id_val: ImageSet) -> TrainedModel:
    r"""Returns the sum of the parts of trained models, standardised on ID validation images.

    Arguments:
        trained: The models by their sources, a run's own first.
        config: The configuration of the run; `evaluation` has the parts.
        id_val: The ID validation images.

    Raises:
        UserError: As :func:`check_addends`, or if a part is not finite or does not vary.
    """
    options, models = config.evaluation, list(trained.values())
    own = models[0]
    check_addends(trained, options.parts, own.metadata)
    total = SummedScore([t.ratio for t in models], _names(models), options.parts)
    total.to(own.preprocess.device).eval()
    # The numbers that are standardised are those that will be summed.
    set_solver(total, options)
    if isinstance(own.ratio, Classifier):
        own.ratio.score = options.score
    found = score_parts(total, id_val.images, own.preprocess, options.batch_size)
    total.standardise(torch.as_tensor(found.parts))
    members = {
        "names": total.names,
        "kinds": total.kinds,
        "members": [dict(t.metadata) for t in models],
        "digests": [t.digest for t in models],
    }
    metadata = {**own.metadata, "config": config.to_dict(), "sum": members}
    return TrainedModel(total, own.preprocess, metadata)


def check_addends(
    trained: Mapping[str, TrainedModel], kinds: Sequence[str], metadata: Mapping[str, Any]
) -> None:
    r"""Refuses models that cannot be summed.

    Arguments:
        trained: The models by their sources.
        kinds: The parts.
        metadata: That of the run, see :func:`model_metadata`.

    Raises:
        UserError: If a model is a sum or has no class head where energies are summed; or if its ID
            data, classes, size, pixel statistics, or the reference that it looks at, are others.
    """
    expected = _facts(metadata)
    for source, model in trained.items():
        fault = ""
        if isinstance(model.ratio, SummedScore):
            fault = "is a sum itself, expected a run that sums nothing"
        elif "energy" in kinds and not _has_classes(model):
            fault = "has no class head and so no energy, expected one, or evaluation.parts without"
        elif isinstance(model.ratio, Classifier) and model.ratio.score in FITTED:
            fault = f"has evaluation.score {model.ratio.score}, expected msp or energy"
        for key, value in _facts(model.metadata).items():
            if None not in (value, expected[key]) and value != expected[key]:
                fault = fault or f"has {key} {value}, expected {expected[key]}"
        if fault:
            raise UserError(f"evaluation.together: {source}: {fault}.")


def _facts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    r"""Returns what models that are summed have to agree in; None for what does not matter."""
    config = Config.from_mapping(metadata["config"])
    alone = config.estimator == "classifier" and config.head is None
    sees_reference = not alone or config.objective.outlier_exposure
    return {
        "id": config.id,
        **{key: metadata[key] for key in ("classes", "size", "mean", "std")},
        "reference": metadata["reference"] if sees_reference else None,
    }


def _has_classes(trained: TrainedModel) -> bool:
    model: Any = trained.ratio
    return getattr(getattr(model, "network", model), "class_head", None) is not None


def _names(trained: Sequence[TrainedModel]) -> list[str]:
    r"""Returns the level of each model, numbered where two have the same."""
    levels: list[str] = []
    for t in trained:
        level = "representation" if isinstance(t.ratio, RepresentationRatio) else "pixels"
        levels.append("classifier" if isinstance(t.ratio, Classifier) else level)
    return [
        level if levels.count(level) == 1 else f"{level} {levels[: i + 1].count(level)}"
        for i, level in enumerate(levels)
    ]


def _metadata(config: Config, data: BenchmarkData, preprocess: Preprocess) -> dict[str, Any]:
    facts, size = identity(data, trained=True), data.manifest.size
    return model_metadata(config, data.classes, preprocess, size, data.reference_name, **facts)
