r"""What is read off a user's items: their classes, names and likeness to others, and a part held out."""

__all__ = [
    "as_input",
    "check_columns",
    "check_like",
    "check_unseen",
    "class_labels",
    "count_classes",
    "fingerprints_of",
    "for_calibration",
    "names_of",
    "remarks_on",
    "rows_of",
    "seen_in",
]

import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from ..data import ImageSet
from ..data.image_files import fingerprints
from ..data.images import DAMAGE
from ..data.inputs import read
from ..data.lists import first, image_suffixes, read_list, stream_folder
from ..data.sets import Samples, are_likely, count_shared, cut_apart, draws_of, group_of
from ..errors import UserError
from ..evaluation.calibration import check_alpha
from ..files import ARRAYS, is_folder, local
from ..options import shown

# Items whose fingerprints are taken together: those of images in files, decoded for it.
PIECE = 512
# The files of a set whose headers are looked at, how many of them say something of the set, and the
# share of them that makes a rule.
SAMPLE, LEAST_FILES, RULE = 200, 10, 0.95
# What tells the split for a calibration from that for validation, which has the same seed.
CALIBRATION = 1

log = logging.getLogger(__name__)


def class_labels(labels: ArrayLike | Tensor) -> NDArray[np.int64]:
    r"""Returns class labels as integers, none of them rounded.

    Arguments:
        labels: The labels, whole numbers from 0, or -1 for none, with shape :math:`(N)`.

    Raises:
        UserError: If they are something else.
    """
    try:
        array = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    except ValueError:  # lists of different lengths
        array = np.asarray(shown(labels))
    wrong = array.ravel()
    if array.dtype.kind in "biuf":
        # Floats hold whole numbers exactly up to here; NaN is not one.
        wrong = array[~((array >= -1) & (array < 2**53) & (array == np.floor(array)))]
    if wrong.size:
        raise UserError(
            f"labels: {wrong.size} of {array.size} are no class index, the first is "
            f"{shown(wrong.tolist()[0])}; expected class indices from 0, or -1 for none."
        )
    # As medical sets have it, a column of indices is one for each item.
    return array.reshape(-1 if array.shape[1:] == (1,) else array.shape).astype(np.int64)


def count_classes(id_data: Samples) -> int:
    r"""Returns the number of ID classes, 0 without labels."""
    labels, count = id_data.labels, len(id_data.values)
    found, unlabelled = None, int((labels < 0).sum())
    if labels.shape != (count,):
        found = f"labels of shape {labels.shape}"
    elif unlabelled not in (0, count):
        found = f"{unlabelled} negative labels"
    elif labels.max() >= count:
        found = f"a label {labels.max()}"
    if found:
        raise UserError(
            f"ID data: got {count} items and {found}, expected a class index from 0 for all, or "
            "for none."
        )
    return int(labels.max()) + 1


def names_of(given: Samples, classes: int) -> dict[str, list[str]]:
    r"""Returns what names are stored of the ID items.

    Arguments:
        given: The ID items.
        classes: The number of classes.

    Returns:
        `class_names`, those of the classes' folders, if each class has one of its own; `columns`,
        those of a table's columns, if it names them.
    """
    folders: dict[int, set[str]] = {}
    for name, label in zip(given.names, given.labels.tolist(), strict=True):
        folders.setdefault(label, set()).add(group_of(name))
    found = [min(folders.get(i, {""})) for i in range(classes)]
    one_each = all(len(group) == 1 for group in folders.values())
    are_names = one_each and all(found) and len(set(found)) == classes > 0
    names = {"class_names": found if are_names else [], "columns": list(given.columns)}
    return {key: value for key, value in names.items() if value}


def check_like(what: str, given: Samples, shape: Sequence[int], columns: Sequence[str]) -> None:
    r"""Refuses items that are not like the ID data of fit.

    Arguments:
        what: What to call the items.
        given: The items.
        shape: The shape of an ID item.
        columns: The names of its columns, see :func:`check_columns`.
    """
    check_columns(what, given.columns, columns)
    if (found := given.values.shape[1:]) != tuple(shape):
        raise UserError(f"{what}: items of shape {found}, expected {tuple(shape)} as in fit.")


def check_columns(what: str, found: Sequence[str], expected: Sequence[str]) -> None:
    r"""Refuses a table whose columns have other names than in fit, or another order.

    Arguments:
        what: What to call the table.
        found: The names of its columns; none if it names none, and then nothing is compared.
        expected: Those of the ID data of fit, likewise.
    """
    if not found or not expected or list(found) == list(expected):
        return
    lacking = [name for name in expected if name not in found]
    others = [name for name in found if name not in expected]
    told = [("lacks", lacking), ("has in addition", others)]
    problem = ", ".join(f"{verb} {first(names, 'column')}" for verb, names in told if names)
    problem = problem or f"has another order, {first(found, 'column')}"
    raise UserError(f"{what}: {problem}; expected {first(expected, 'column')}, as in fit.")


def check_unseen(marks: NDArray[np.int64], seen: NDArray[Any] | None, rule: str) -> None:
    r"""Refuses, or warns of, calibration items that fit has read.

    Arguments:
        marks: Their fingerprints, with shape :math:`(N)`.
        seen: Those of what fit has read; None if that is not recorded.
        rule: `"refuse"` or `"warn"`.
    """
    if seen is None:
        log.warning("calibration: what trained this model is not recorded, so not compared.")
    elif shared := count_shared(marks, seen):
        message = f"calibration data: {shared} of {len(marks)} items were read in fit, "
        message += "which voids the guarantee"
        if rule == "refuse":
            raise UserError(
                f"{message}; hold data out for it. Where items repeat by nature, as in a coarse "
                "table, `ood-osdre fit` without --calibrate holds out a tenth, and Python takes "
                "seen='warn'."
            )
        log.warning("%s", message)


def seen_in(*marks: NDArray[np.int64]) -> NDArray[np.int64]:
    r"""Returns the fingerprints by which items of sets are known again, of those of each set.

    What is likely by itself says nothing: fresh items are equal to it, too.
    """
    return np.unique(np.concatenate([m[~are_likely(m)] for m in marks]))


def fingerprints_of(values: Any) -> NDArray[np.int64]:  # noqa: ANN401
    r"""Returns the fingerprints of images or vectors, :math:`(N, *)`, few of them at a time."""
    starts = range(0, len(values), PIECE)
    parts = [fingerprints(np.ascontiguousarray(values[i : i + PIECE])) for i in starts]
    return np.concatenate(parts)


def for_calibration(
    given: Samples, own: object, alpha: float | None, size: int, share: float, seed: int
) -> tuple[Samples, Samples | None, NDArray[np.int64] | None]:
    r"""Returns the ID items that train, and those that calibrate, of which copies are on one side.

    Fingerprints of what calibrates come with other data, of which none may train. A part of the items may
    be in the reference by chance, which is warned of as of any ID item.

    Arguments:
        given: The ID items.
        own: Other data that calibrate; None for a part of the items, drawn at random.
        alpha: The rate of the calibration; None for none, so that all items train.
        size: The side of images.
        share: The share of the items that calibrates, of one item at least.
        seed: The seed of the draw.

    Raises:
        UserError: If nothing would be left to train on, data cannot be read or are not like the ID
            items, or `alpha` is no rate.
    """
    if alpha is None and own is None:
        return given, None, None
    check_alpha(alpha)
    if own is not None:
        held = read(own, size, "calibration data", labelled=False)
        check_like("calibration data", held, given.values.shape[1:], given.columns)
        return given, held, fingerprints_of(held.values)
    count = len(given.values)
    order = np.random.default_rng((seed, CALIBRATION)).permutation(count)
    draws = draws_of(fingerprints_of(given.values))
    part, rest = cut_apart(order, draws, [max(1, round(share * count))])
    if not len(rest):
        raise UserError(
            f"fit: got {count} ID items, or copies of one, expected more: some train, some "
            "calibrate."
        )
    return rows_of(given, np.sort(rest)), rows_of(given, np.sort(part)), None


def remarks_on(id_data: object, reference: object) -> list[str]:
    r"""Warns if the image files of two folders or lists differ by a rule, and returns the warning.

    A network from pixels may then learn the file. Only a clear case is told: nearly all files of the
    first have one size, mode or format, and nearly all of the second another. What is no path has none.
    """
    found = (_traits(x) if isinstance(x, str | os.PathLike) else {} for x in (id_data, reference))
    of_id, of_reference = found
    if not any(of_id[key] != of_reference[key] for key in of_id.keys() & of_reference.keys()):
        return []
    remark = (
        f"ID files are {' '.join(of_id.values())}, reference files {' '.join(of_reference.values())}: "
        "the ratio may learn the file, not the content; bring both to one size and format before"
    )
    log.warning("%s", remark)
    return [remark]


def _traits(source: str | os.PathLike[str]) -> dict[str, str]:
    r"""Returns what nearly all images of a folder or list have in common: size, format, mode.

    It is read off the headers of a sample; of too few files, or of what is no image file, nothing is.
    """
    path, seen = local(source), list[tuple[str, str, str]]()
    try:
        if is_folder(path):
            names = [path / name for name in stream_folder(path, told=False)]
        elif path.suffix.lower() in ARRAYS or path.suffix.lower() in image_suffixes():
            return {}
        else:
            names = [path.parent / name for name in read_list(path).names]
        for name in names[:: max(1, len(names) // SAMPLE)]:
            with Image.open(name) as image:
                kind = "JPEG" if image.format == "MPO" else str(image.format)
                seen.append((f"{image.width}x{image.height}", kind, image.mode))
    except (UserError, *DAMAGE):  # it is told, with its name, where files are decoded
        return {}
    if len(seen) < LEAST_FILES:
        return {}
    traits: dict[str, str] = {}
    for key, values in zip(("size", "format", "mode"), zip(*seen, strict=True), strict=True):
        ((value, times),) = Counter(values).most_common(1)
        traits |= {key: value} if times >= RULE * len(seen) else {}
    return traits


def rows_of(given: Samples, rows: NDArray[np.intp]) -> Samples:
    r"""Returns some of the items, in the order given."""
    if given.has_images:
        part = ImageSet(*given[:3]).subset(rows)
        return given._replace(values=part.images, labels=part.labels, names=part.names)
    names = [given.names[i] for i in rows]
    return given._replace(values=given.values[rows], labels=given.labels[rows], names=names)


def as_input(given: Samples) -> object:
    r"""Returns items in a form that a detector reads."""
    return ImageSet(*given[:3]) if given.has_images else given.values
