r"""OpenOOD itself: its import, which often fails, and its evaluator, on any device.

OpenOOD imports every method it has, and with them packages that its own installation does not
declare. This plugin has to be importable all the same, so the exception of that import is kept;
:func:`explain_import` and :func:`require` tell it.

The evaluator computes the ID accuracy on a GPU in any case, though from predictions that the
postprocessor has just returned. Put into its score cache, these make its own code give the table:
:func:`eval_ood` from its loaders, :func:`prefill` from the scores of a run. Its pipelines move every
batch to a GPU, too, and read weights onto the device that they were saved from: :func:`on_cpu` keeps
both where they are.
"""

__all__ = [
    "Foreign",
    "base_postprocessor",
    "eval_ood",
    "explain_import",
    "is_importable",
    "on_cpu",
    "prefill",
    "require",
]

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from ...errors import UserError, one_line
from ...evaluation.scores import ScoredSet, Scores

#: An object of OpenOOD's, which is not annotated.
Foreign: TypeAlias = Any


@cache
def _attempt() -> Exception | None:
    r"""Imports what an evaluation needs, and with it everything else; returns what it raised."""
    try:
        import_module("openood.evaluation_api")
    except Exception as error:  # noqa: BLE001 - whatever it is, it is kept for whoever asks
        return error
    return None


def is_importable() -> bool:
    r"""Returns whether OpenOOD can be imported here. The first call tries."""
    return _attempt() is None


def explain_import() -> str:
    r"""Returns one line on whether OpenOOD can be imported, and if not, why."""
    error = _attempt()
    if error is None:
        return f"OpenOOD: importable, from {import_module('openood').__path__[0]}."
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "openood":
        return "OpenOOD: not installed; it is not on PyPI, clone it and put it on PYTHONPATH."
    message = one_line(error, None)
    return f"OpenOOD: its import failed with {type(error).__name__}: {message}"


def require(name: str) -> ModuleType:
    r"""Imports a module of OpenOOD.

    Arguments:
        name: Its dotted name.

    Raises:
        UserError: If OpenOOD cannot be imported, saying why.
    """
    if not is_importable():
        raise UserError(explain_import())
    return import_module(name)


def base_postprocessor() -> type[Any]:
    r"""Returns OpenOOD's class of postprocessors, or a stand-in of the same constructor."""
    if is_importable():
        return import_module("openood.postprocessors").BasePostprocessor

    class BasePostprocessor:
        def __init__(self, config: Foreign) -> None:
            self.config = config

    return BasePostprocessor


@contextmanager
def on_cpu() -> Iterator[None]:
    r"""Lets code run on the CPU that moves everything to a GPU, which need not be there.

    Within, `cuda` of tensors and modules returns them as they are, and `torch.load` reads onto the
    CPU unless it is told where. This holds for the whole process.
    """
    changes: tuple[tuple[Foreign, str, Foreign], ...] = (
        (torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor),
        (torch.nn.Module, "cuda", lambda module, *args, **kwargs: module),
        (torch, "load", partial(torch.load, map_location="cpu")),
    )
    with ExitStack() as stack:
        for owner, name, replacement in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def eval_ood(evaluator: Foreign, fsood: bool = False, progress: bool = True) -> Foreign:
    r"""Runs OpenOOD's `Evaluator.eval_ood`, with no need of a GPU.

    Arguments:
        evaluator: An evaluator whose postprocessor is an
            :class:`~ood_osdre.plugin.openood.OSDREPostprocessor`.
        fsood: Whether covariate-shifted ID sets count as ID, in the "full-spectrum" benchmark.
        progress: Whether to show progress bars.

    Returns:
        The evaluator's own table, a data frame in percent.

    Raises:
        UserError: If the benchmark has no covariate-shifted ID set.
    """
    scores, loaders, score = evaluator.scores, evaluator.dataloader_dict, evaluator.postprocessor
    if fsood and not loaders["csid"]:
        raise UserError(f"fsood: {evaluator.id_name} has no covariate-shifted ID set.")
    if scores["id"]["test"] is None:
        triple = score.inference(evaluator.net, loaders["id"]["test"], progress)
        scores["id"]["test"] = list(triple)
    if scores["id_preds"] is None and evaluator.metrics["id_acc"] is None:
        scores["id_preds"], _, scores["id_labels"] = scores["id"]["test"]
    for name, loader in loaders["csid"].items() if fsood else ():
        if scores["csid"][name] is None:
            scores["csid"][name] = list(score.inference(evaluator.net, loader, progress))
        scores["csid_preds"][name], _, scores["csid_labels"][name] = scores["csid"][name]
    return evaluator.eval_ood(fsood=fsood, progress=progress)


def prefill(evaluator: Foreign, scores: Scores, accuracy: float | None) -> None:
    r"""Fills an evaluator's score cache, so that it scores nothing itself.

    Arguments:
        evaluator: The evaluator.
        scores: The scores of a run on the same images.
        accuracy: The ID accuracy of the run, as a fraction; None if it is not known, which gives
            NaN.

    Raises:
        UserError: If sets are missing, or their sizes are not those of the evaluator's lists.
    """
    (id_set,) = scores.of("id").values()
    loaders, cache = evaluator.dataloader_dict, evaluator.scores
    groups: dict[str, tuple[Foreign, Foreign, Mapping[str, ScoredSet]]] = {
        "id": ({"test": loaders["id"]["test"]}, cache["id"], {"test": id_set})
    }
    for role in ("near", "far"):
        groups[f"ood/{role}"] = loaders["ood"][role], cache["ood"][role], scores.of(role)
    for group, (own, target, sets) in groups.items():
        for name, loader in own.items():
            count = len(loader.dataset)
            found = sets[name].score.size if name in sets else 0
            if found != count:
                raise UserError(
                    f"scores: {found} of the set {group}/{name}, but OpenOOD's list has {count}."
                )
            # Scores do not say the predictions; the evaluator takes the accuracy on its own.
            unknown = np.full(count, -1, dtype=np.int64)
            target[name] = [unknown, sets[name].score.copy(), sets[name].label.copy()]
    evaluator.metrics["id_acc"] = np.nan if accuracy is None else 100 * accuracy
