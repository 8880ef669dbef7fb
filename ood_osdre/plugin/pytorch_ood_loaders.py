r"""What pytorch-ood's detectors share: pairs `(x, y)` and the images in them, options to search."""

__all__ = ["Batches", "HostImages", "Searched", "checked", "encoded", "joined", "share_of"]

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import SLACK
from ..data.transforms import Preprocess, check_statistics, normalisation_within
from ..errors import UserError
from ..models import evaluating
from ..options import Options, Share, flat, shown
from ..training.batches import broadened

#: Batches of inputs, with shape :math:`(B, *)`, and labels, with shape :math:`(B)`.
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]

# Reference inputs that are broadened together, however few of them a batch has.
TOGETHER = 200


class Searched:
    r"""What the host asks about hyper-parameters, which here are options by dotted key."""

    hyperparameter_space: dict[str, list[Any]]
    _options: Any

    def get_hyperparameters(self) -> dict[str, Any]:
        r"""Returns the values of the options in `hyperparameter_space`."""
        values = {} if self._options is None else flat(self._options.to_dict())
        return {name: values[name] for name in self.hyperparameter_space}


class HostImages:
    r"""How the host's images were normalised: as given, or as the transform of its data set shows.

    Arguments:
        mean: The means, of pixels in :math:`[0, 1]`; None to read them off.
        std: The standard deviations, likewise.
    """

    def __init__(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        self.is_given = mean is not None
        self.known: Preprocess | None = None
        if (mean is None) != (std is None):
            raise UserError("mean: give both 'mean' and 'std', or neither.")
        if mean is not None:
            self.known = _preprocess(mean, std, "arguments")

    def look_at(self, loader: object) -> None:
        r"""Reads the statistics off a loader's data sets, where they were not given."""
        if self.is_given:
            return
        found = [_preprocess(*own, "data: the transform") for own in _normalisations(loader)]
        if len({str(own.statistics) for own in found}) > 1:
            raise UserError(
                "data: its sets are normalised by different means or deviations, expected those of "
                "the ID data for all."
            )
        self.known = found[0] if found else None

    def pixels(self, x: Tensor) -> Tensor:
        r"""Returns images as pixels in :math:`[0, 1]`; whatever is no batch of them as it is.

        Arguments:
            x: The images, with shape :math:`(B, C, H, W)`.
        """
        if x.ndim != 4 or not len(x) or not x.is_floating_point():
            return x
        how = "which mean= and std= say, or the transform of the loader's data set"
        if self.known is not None:
            x = self.known.on(x.device).denormalise(x.float())
            how = (
                "normalised by the means and deviations that were given or that fit's data set has"
            )
        low, high = float(x.min()), float(x.max())
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise UserError(
                f"x: got values from {low:.3g} to {high:.3g}, expected pixels in [0, 1], or images "
                f"normalised {how}."
            )
        return x

    def broadened(self, reference: Iterable[Tensor], share: float) -> Iterator[Tensor]:
        r"""Yields reference inputs, more of them together, and of images a share broadened.

        Arguments:
            reference: Batches of inputs, with shape :math:`(B, *)`.
            share: The share.
        """
        together = _together(reference)
        first = next(together, torch.zeros(0))
        every = chain([first] if len(first) else [], together)
        if first.ndim != 4 or not share:
            return every
        if self.known is not None:
            return broadened(every, self.known, share)
        return broadened(map(self.pixels, every), Preprocess([0.0], [1.0]), share)


def _preprocess(mean: object, std: object, source: str) -> Preprocess:
    means, stds = (np.ravel(np.asarray(value)).tolist() for value in (mean, std))
    return Preprocess(*check_statistics(means, stds, len(means), source))


def _normalisations(data: object) -> Iterator[tuple[Any, Any]]:
    r"""Yields means and deviations of a loader's data set, or of all those that it is made of."""
    own = normalisation_within(getattr(data, "transform", None))
    if own is not None:
        yield own
    several = getattr(data, "datasets", ())
    for inner in (getattr(data, "dataset", None), *(several if isinstance(several, list) else ())):
        if inner is not None:
            yield from _normalisations(inner)


class _Broadening(Options):
    broaden: Share


def share_of(broaden: object) -> float:
    r"""Returns a share that is to be broadened; refuses what is none, as a :class:`UserError`."""
    return _Broadening.of({"broaden": broaden}, "arguments").broaden


def checked(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    r"""Yields inputs and labels; refuses what is no such pair."""
    for batch in batches:
        parts, fault = batch if isinstance(batch, tuple | list) else [batch], ""
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            found = ", ".join(type(part).__name__ for part in parts[:3])
            fault = f"a batch has {len(parts)} parts ({found}), expected a pair (x, y) of tensors"
        elif not parts[0].ndim or parts[1].shape != parts[0].shape[:1] or parts[1].isnan().any():
            x_shape, y_shape = (tuple(part.shape) for part in parts)
            fault = (
                f"a batch has inputs with shape {x_shape} and labels with shape {y_shape}, "
                "expected a label for each, none of them NaN"
            )
        if fault:
            raise UserError(f"data: {fault}.")
        yield parts[0], parts[1].to(parts[0].device)


def _together(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    r"""Yields inputs of one shape together, :data:`TOGETHER` or more, the last fewer."""
    held: list[Tensor] = []
    for x in batches:
        if held and (sum(map(len, held)) >= TOGETHER or x.shape[1:] != held[0].shape[1:]):
            yield torch.cat(held)
            held = []
        held += [x] if len(x) else []
    if held:
        yield torch.cat(held)


def encoded(encoder: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    r"""Returns the features of inputs, with shape :math:`(B, F)`; refuses any but one row for each."""
    with evaluating(encoder) if isinstance(encoder, nn.Module) else nullcontext():
        features = encoder(x)
    shape = getattr(features, "shape", ())
    if len(shape) < 2 or len(features) != len(x):
        found = f"of shape {tuple(shape)}" if shape else f"in a {type(features).__name__}"
        raise UserError(
            f"encoder: got features {found} for {len(x)} inputs, expected a row for each."
        )
    return features.flatten(1)


def joined(id_data: list[Tensor], reference: list[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Returns all ID samples and all of the reference; refuses none, and different shapes."""
    counts = [sum(map(len, parts)) for parts in (id_data, reference)]
    shapes, fault = {tuple(x.shape[1:]) for x in id_data + reference}, ""
    if not all(counts):
        fault = (
            f"{counts[1]} of {sum(counts)} labels are below 0, expected both ID samples and samples "
            "of a reference, which labels below 0 mark"
        )
    elif len(shapes) > 1:
        fault = f"batches have samples of shapes {shown(sorted(shapes))}, expected one shape"
    if fault:
        raise UserError(f"data: {fault}.")
    return torch.cat(id_data), torch.cat(reference)
