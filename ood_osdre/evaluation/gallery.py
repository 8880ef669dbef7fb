r"""The gallery of a run's page: the images that a scorer gets most wrong, by set and by class."""

__all__ = ["Cell", "Wrong", "gallery", "given_images"]

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..data.images import image_files
from ..data.inputs import read
from ..data.sets import ImageSet, LazyImages, group_of
from ..errors import UserError
from ..files import ARRAYS, is_folder, local, read_array
from .metrics import threshold95
from .scores import OOD_ROLES, Scores

# Images of an OOD set; of an ID class, while there are few of them, and with many.
PER_SET, PER_CLASS, PER_CLASS_OF_MANY, FEW = 12, 6, 3, 20
# The side of an image in pixels, and the bytes that all of them may take.
SIDE, SIDE_OF_MANY, BYTES = 64, 32, 800_000


class Cell(NamedTuple):
    r"""An image of the gallery: its name, its score and, if it is at hand, its data URL."""

    name: str
    score: float
    source: str | None


class Wrong(NamedTuple):
    r"""A row of the gallery: what it is of, how often that goes wrong, and the worst images."""

    title: str
    note: str
    cells: list[Cell]


def given_images(record: Mapping[str, Any], scores: Scores) -> dict[str, ImageSet]:
    r"""Returns the images of what a fit held out, by set; of files, whether or not they are still there."""
    given = {entry["set"]: entry["given"] for entry in record.get("data", {}).get("given", [])}
    found = {}
    for role, what in (("id", "ID"), ("near", "reference")):
        for name, held in scores.of(role).items() if what in given else ():
            path = local(given[what])
            images: NDArray[Any] | LazyImages | None
            if path.suffix.lower() in ARRAYS and not is_folder(path):
                images = _array_images(path, held.name, name)
            else:  # a folder, or a list in one
                folder = path if is_folder(path) else path.parent
                images = image_files(folder, held.name, SIDE, name)
            if images is not None:
                found["" if role == "id" else name] = ImageSet(images, held.label, held.name)
    return found


def _array_images(path: Path, names: Sequence[str], what: str) -> NDArray[Any] | None:
    r"""Returns rows of an array of images, with shape :math:`(N, S, S, 3)`, by their numbers.

    None if it has gone, holds vectors, or what was scored were transforms of its images.
    """
    try:
        rows = read_array(path)[0][[int(name) for name in names]]
        # Three grey images by themselves could be one in colour.
        rows = rows[..., None] if rows.ndim == 3 else rows
        values = read(rows, rows.shape[1], what, False).values
    except (ValueError, IndexError):
        return None
    return np.asarray(values) if values.ndim == 4 else None


def gallery(
    scores: Scores, images_of: Mapping[str, ImageSet], threshold: float | None = None
) -> Iterator[Wrong]:
    r"""Yields the images of each OOD set most taken for ID, then those of each class most rejected.

    Shares are at a threshold, that which keeps 95 % of ID if none is given that flags anything.
    Images, of which those of the ID set have an empty name, end where all together would take too
    much of the page; the names go on.
    """
    (of_id,) = scores.of("id").values()
    kept = -threshold95(-of_id.score)
    kept, left = threshold if threshold is not None and np.isfinite(threshold) else kept, BYTES
    rows = []
    for role in OOD_ROLES:
        for name, s in scores.of(role).items():
            order = np.argsort(-s.score, kind="stable")[:PER_SET]
            share = float(np.mean(s.score >= kept))
            note = f"{100 * share:.1f} % of {s.score.size:,} score at least {kept:.4g}"
            rows.append((f"{name}: most taken for ID", note, s, order, images_of.get(name)))
    classes = np.unique(of_id.label)
    each = PER_CLASS if len(classes) <= FEW else PER_CLASS_OF_MANY
    each = each if classes[-1] >= 0 else PER_SET
    for label in classes:
        own = np.flatnonzero(of_id.label == label)
        order = own[np.argsort(of_id.score[own], kind="stable")][:each]
        share = float(np.mean(of_id.score[own] < kept))
        groups = {group_of(of_id.name[i]) for i in own} - {str(label), ""}
        title = f"ID class {label}" if label >= 0 else "ID"
        title += f" ({groups.pop()})" if len(groups) == 1 else ""
        note = f"{100 * share:.1f} % of {own.size:,} score less than {kept:.4g}"
        rows.append((f"{title}: most rejected", note, of_id, order, images_of.get("")))
    side = SIDE if len(rows) <= FEW else SIDE_OF_MANY
    for title, note, s, order, images in rows:
        # Scores of other images than these, of an old run, say.
        known = images if images is not None and list(images.names) == s.name else None
        cells = []
        for i in order:
            source = _thumbnail(known, int(i), side) if known and left > 0 else None
            left -= len(source or "")
            cells.append(Cell(s.name[i], float(s.score[i]), source))
        yield Wrong(title, note, cells)


def _thumbnail(images: ImageSet, index: int, side: int) -> str | None:
    r"""Returns the data URL of an image, made smaller if it is larger than a side; None without."""
    try:
        image, file = Image.fromarray(np.asarray(images.images[index])), io.BytesIO()
    except UserError:  # a file that has gone
        return None
    image.thumbnail((side, side))
    image.save(file, "JPEG", quality=85, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
