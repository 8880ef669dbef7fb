r"""How the host normalises its images, and whether that is how a model was trained.

The host's normalisation is the host's business. What its options or its transform say is compared
with the model's own; where nothing says it, the host's ID images must look as ID images normalised
by ID statistics do. An OOD image may have any statistics, so that a single loader which
normalises otherwise cannot be noticed.
"""

__all__ = ["host_statistics", "is_close", "renormalised"]

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...data.standardise import Standardiser
from ...errors import UserError
from .loaders import images_of, normalisation_of, view_of
from .options import PostprocessorOptions, Statistics

CHANNELS = 3
# Means and deviations of ID images that were normalised by their own statistics, generously.
MEAN_WITHIN, STD_WITHIN = 0.5, (0.5, 2.0)
# Images that show them.
ENOUGH = 256


def host_statistics(
    options: PostprocessorOptions, id_loaders: Mapping[str, Any]
) -> Statistics | None:
    r"""Returns the means and standard deviations that the host normalises its images with.

    Arguments:
        options: The options, which have the first word.
        id_loaders: OpenOOD's ID loaders by split, whose transform has the second.

    Returns:
        The statistics of each channel; None if nothing says them.

    Raises:
        UserError: If they are not those of three channels, or nothing says them and the ID images
            do not look normalised by ID statistics.
    """
    given, source = options.statistics(), "postprocessor_args"
    split = next((k for k in ("test", "val", "train") if k in id_loaders), None)
    if given is None and split is not None:
        view = view_of(id_loaders, split)
        given, source = normalisation_of(view.transform), "postprocessor: the host's transform"
        if given is None:
            _check_normalised(images_of(id_loaders[split], view.key))
    if given is None:
        return None
    # torchvision's Normalize takes one number for all channels.
    mean, std = (values * CHANNELS if len(values) == 1 else values for values in given)
    if len(mean) != CHANNELS or len(std) != CHANNELS:
        raise UserError(
            f"{source}: mean and std of {len(mean)} and {len(std)} channels, expected {CHANNELS}."
        )
    return mean, std


def is_close(a: Statistics, b: Statistics) -> bool:
    r"""Returns whether two statistics are the same but for rounding."""
    return all(
        math.isclose(x, y, abs_tol=1e-5)
        for xs, ys in zip(a, b, strict=True)
        for x, y in zip(xs, ys, strict=True)
    )


def renormalised(x: Tensor, host: Statistics, own: Standardiser) -> Tensor:
    r"""Normalises the host's images again, with the statistics of a model.

    Arguments:
        x: The images, with shape :math:`(B, 3, H, W)`.
        host: The statistics that they are normalised with.
        own: The model's preprocessing.
    """
    if is_close(host, (own.mean.tolist(), own.std.tolist())):
        return x
    mean, std = (x.new_tensor(values)[:, None, None] for values in host)
    return own.normalise(x * std + mean)


def _check_normalised(batches: Iterable[Tensor]) -> None:
    parts: list[Tensor] = []
    for batch in batches:
        parts.append(batch)
        if sum(map(len, parts)) >= ENOUGH:
            break
    if not parts:
        raise UserError("postprocessor: the ID loader is empty, expected at least one batch.")
    images = torch.cat(parts)
    mean, std = images.mean(dim=(0, 2, 3)), images.std(dim=(0, 2, 3))
    low, high = STD_WITHIN
    # Negated, so that NaN is refused, too.
    if not (mean.abs().max() <= MEAN_WITHIN and std.min() >= low and std.max() <= high):
        found = ", ".join(f"{m:.2f} ± {s:.2f}" for m, s in zip(mean, std, strict=True))
        raise UserError(
            f"postprocessor: the ID images have channels of {found}, so they are not normalised "
            "by ID statistics; say how with postprocessor_args 'mean' and 'std'."
        )
