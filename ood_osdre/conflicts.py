r"""What options of a configuration cannot be meant together.

Nothing here imports torch, as nothing in :mod:`ood_osdre.config` does.
"""

__all__ = ["conflicts", "unread"]

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Config

# Facts of the networks and schedules, kept here because reading those modules costs seconds; the
# tests hold them against each other.
WIDTH_STEP, STAGES = 1 / 8, 4
OPEN_SCHEDULES = ("vp", "follmer")

SCORE_MATCHING = ("conditional", "time_score", "path_difference")
# The terms that train each estimator, and those it can carry besides.
TERMS = {
    "one_step": ("endpoint", *SCORE_MATCHING),
    "direct": ("endpoint",),
    "time_conditioned": ("conditional", "time_score"),
    "classifier": ("class_weight",),
}
EXTRAS = {
    "one_step": ("class_weight", "outlier_exposure", "shrinkage", "path_variance"),
    "direct": ("class_weight", "outlier_exposure", "shrinkage"),
    "time_conditioned": (),
    "classifier": ("outlier_exposure",),
}
# What reads an option of `evaluation` that not everything reads.
READERS = {
    **dict.fromkeys(("select", "use_ood_val"), "training"),
    **dict.fromkeys(("solver", "evaluations", "tolerance"), "time_conditioned"),
    **dict.fromkeys(("score", "neighbours"), "classifier"),
}
# The terms that have a form with a data score.
DATA_SCORED = ("conditional", "time_score")


def conflicts(config: "Config") -> Iterator[str]:
    r"""Yields what cannot be meant together, as ends of messages.

    Arguments:
        config: The configuration, each of whose options is right by itself.
    """
    basis, network, objective = config.basis, config.network, config.objective
    if basis.sigma <= basis.floor:
        yield f"basis.sigma: got {basis.sigma:g}, expected more than basis.floor ({basis.floor:g})."
    for term in ("class_weight", "outlier_exposure"):
        if getattr(objective, term) and not network.classes_head:
            yield f"objective.{term}: is on, but network.classes_head is false."
    yield from _estimator_conflicts(config)
    yield from _network_conflicts(config)
    yield from _path_conflicts(config)
    broaden, mixture = config.data.broaden, config.data.mixture
    if broaden + mixture > 1:
        yield (
            f"data.mixture: got {mixture:g}, expected at most {1 - broaden:g}, what "
            f"data.broaden ({broaden:g}) leaves."
        )


def unread(overrides: Sequence[str], estimator: str) -> Iterator[str]:
    r"""Yields what would change nothing where a trained model is evaluated, as ends of messages.

    Arguments:
        overrides: `"evaluation.NAME=value"` texts.
        estimator: The estimator of the model.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        reader = READERS.get(key.removeprefix("evaluation."), estimator)
        if reader == "training":
            yield f"{key}: is for training, and --checkpoint trains nothing."
        elif reader != estimator:
            yield f"{key}: is for estimator {reader}, this one is {estimator}."


def _estimator_conflicts(config: "Config") -> Iterator[str]:
    estimator, objective = config.estimator, config.objective
    terms, extras = TERMS[estimator], EXTRAS[estimator]
    on = [term for term in terms if getattr(objective, term)]
    if not on:
        yield (
            f"objective: no term trains the {estimator} estimator, set one of {', '.join(terms)} "
            "above 0."
        )
    if estimator == "time_conditioned" and len(on) > 1:
        yield f"objective: got {' and '.join(on)}, expected one for estimator {estimator}."
    every = {term for group in (*TERMS.values(), *EXTRAS.values()) for term in group}
    for term in sorted(every - {*terms, *extras}):
        if getattr(objective, term):
            yield f"objective.{term}: is on, but estimator {estimator} has no use for it."
    if estimator == "time_conditioned" and config.network.norm == "batch":
        yield f"network.norm: got batch, expected group for estimator {estimator}."


def _network_conflicts(config: "Config") -> Iterator[str]:
    network, objective = config.network, config.objective
    if network.kind == "resnet":
        if network.width % WIDTH_STEP:
            yield f"network.width: got {network.width:g}, expected a multiple of {WIDTH_STEP:g}."
        if len(network.depths) != STAGES:
            yield f"network.depths: got {len(network.depths)} entries, expected {STAGES}."
    if network.kind == "unet":
        if network.width % WIDTH_STEP:
            yield f"network.width: got {network.width:g}, expected a multiple of {WIDTH_STEP:g}."
        if network.norm != "group":
            yield f"network.norm: got {network.norm}, expected group for network.kind unet."
        if config.estimator == "time_conditioned":
            yield "network.kind: got unet, expected resnet or mlp for estimator time_conditioned."
    if objective.data_score and network.kind == "resnet":
        yield "objective.data_score: is on, but network.kind resnet has no decoder; unet has one."
    beside = [term for term in DATA_SCORED if getattr(objective, term)]
    if objective.data_score and (config.estimator != "one_step" or len(beside) != 1):
        yield (
            "objective.data_score: is on, expected beside one of "
            f"{' and '.join(f'objective.{term}' for term in DATA_SCORED)} of estimator one_step, "
            f"got {' and '.join(beside) or 'neither'} of estimator {config.estimator}."
        )
    differentiated = objective.data_score or config.estimator == "time_conditioned"
    if config.training.compile and objective.time_score and differentiated:
        yield (
            "training.compile: is on, but this objective.time_score differentiates the network in "
            "its inputs, which a compiled one cannot do twice."
        )
    if (
        network.kind != "resnet"
        and objective.conditional
        and objective.conditional_form.endswith("per_block")
    ):
        yield (
            f"objective.conditional_form: {objective.conditional_form} needs the feature map of "
            f"network.kind resnet, got {network.kind}."
        )


def _path_conflicts(config: "Config") -> Iterator[str]:
    path, learnable = config.path, config.objective.path_variance > 0
    if learnable and not path.schedule.startswith("kumaraswamy"):
        yield (
            f"objective.path_variance: is on, but path.schedule {path.schedule} has no parameters."
        )
    if learnable and path.noise != "dequantisation" and path.gamma2 == 0:
        yield "path.gamma2: got 0, expected more where objective.path_variance is on."
    if path.schedule in OPEN_SCHEDULES and path.t_min == 0:
        yield f"path.t_min: got 0, expected more, or null, with path.schedule {path.schedule}."
