r"""The reference distribution: which images stand for :math:`p_0`, and its validation split.

A manifest names the references it knows, in order of preference. A user may name one of them,
or give a folder of images, a list file, or a `.npy` array of images in uint8.

No test image may choose a model. Validation therefore compares ID images with *reference*
images of classes that training never sees: ten held-out class folders where the reference has
classes, else a held-out tenth.
"""

__all__ = ["find_reference", "hold_out_reference"]

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..spelling import did_you_mean
from .lists import list_folder, read_list
from .manifests import Manifest, SetSpec
from .sets import ImageSet
from .sources import is_folder, is_regular
from .status import SetStatus, inspect, inspect_array, inspect_list


def find_reference(
    manifest: Manifest, data_root: Path, reference: str | Path | None = None
) -> SetStatus:
    r"""Finds the reference of a benchmark.

    Arguments:
        manifest: The benchmark.
        data_root: The folder that holds lists and images.
        reference: The name of a reference of the manifest, or the path of a folder, list or
            array; None for the first of the manifest that is present. One that contains classes
            of an OOD set is never chosen unless named.

    Returns:
        The state of the reference, which need not be present if the manifest names it.
    """
    known = manifest.role("reference")

    if reference is None:
        states = [inspect(manifest, spec, data_root) for spec in known if not spec.overlaps]
        if not states:
            raise UserError(f"benchmark {manifest.name} has no default reference; name one")
        return next((s for s in states if s.present), states[0])

    for spec in known:
        if str(reference) == spec.name:
            return inspect(manifest, spec, data_root)

    path = Path(reference)
    spec = SetSpec(path.stem, "reference", str(path))

    if is_folder(path):
        return inspect_list(spec, path, path, list_folder(path))
    if is_regular(path) and path.suffix == ".npy":
        return inspect_array(spec, path)
    if is_regular(path):
        content = read_list(path)
        # OpenOOD's lists are relative to the images of the data root, other lists to themselves.
        base = data_root / manifest.images
        is_local = bool(content.names) and not is_regular(base / content.names[0])
        return inspect_list(spec, path, path.parent if is_local else base, content)

    names = [s.name for s in known]
    raise UserError(
        f"no reference {str(reference)!r}{did_you_mean(str(reference), names)}: not a folder, "
        f"list or array, and not one of {', '.join(names) or '(none)'}"
    )


def hold_out_reference(
    reference: ImageSet,
    classes: int | Sequence[str] = 10,
    fraction: float = 0.1,
    seed: int = 0,
) -> tuple[ImageSet, ImageSet]:
    r"""Splits a reference into a part for training and a part for validation.

    Classes are held out if there are at least twice as many, else a fraction of the images.

    Arguments:
        reference: The reference.
        classes: How many classes to hold out, or their names.
        fraction: The fraction of images to hold out from a reference without classes.
        seed: The seed of the draw.

    Returns:
        The images for training and for validation, which share no class in the former case.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie in (0, 1), found {fraction}")

    rng = np.random.default_rng(seed)
    held: NDArray[np.str_]
    groups = np.asarray(reference.groups)
    names = sorted(set(groups.tolist()) - {""})

    if isinstance(classes, int):
        count = classes if len(names) >= 2 * classes else 0
        held = rng.choice(np.asarray(names, dtype=np.str_), count, replace=False)
    else:
        held = np.asarray(classes, dtype=np.str_)
        if unknown := sorted(set(held.tolist()) - set(names)):
            raise ValueError(f"no reference class {', '.join(unknown)}")

    if len(held):
        mask = np.isin(groups, held)
    else:
        mask = np.zeros(len(reference), dtype=bool)
        size = round(fraction * len(reference))
        mask[rng.choice(len(reference), size, replace=False)] = True

    if mask.all() or not mask.any():
        raise UserError(
            f"reference: {len(reference)} images with {len(held)} classes held out cannot be split "
            "into a part for training and a part for validation, both with images"
        )

    return reference.subset(~mask), reference.subset(mask)
