r"""What the sets of a benchmark must, and should, have in common: classes, and no images."""

__all__ = ["check_classes", "warn_of_copies"]

import logging
from collections.abc import Mapping, Sequence

from ..errors import UserError
from .fingerprints import shared_images
from .sets import ImageSet
from .status import SetStatus


def check_classes(loaded: Mapping[tuple[str, str], ImageSet]) -> None:
    r"""Refuses ID images of a class that training never sees."""
    (largest,) = (s.labels.max() for (role, _), s in loaded.items() if role == "id_train")
    for (role, _), images in loaded.items():
        labels = images.labels
        if count := int((labels > largest).sum()):
            raise UserError(
                f"{role}: {count} of {len(labels)} labels are beyond {largest}, the largest of "
                f"id_train; found {labels.max()}"
            )


def warn_of_copies(
    statuses: Sequence[SetStatus], loaded: Mapping[tuple[str, str], ImageSet]
) -> None:
    r"""Warns of images that a list names twice, and of sets that share images."""
    for status in statuses:
        if status.list is not None:
            copies = len(status.list) - len(set(status.list.names))
            if copies:
                log.warning("%s: %d of its entries repeat others", status.path, copies)
    for one, other, count in shared_images(loaded):
        log.warning(
            "%s %s and %s %s share images: %d of the %d of the latter",
            *one,
            *other,
            count,
            len(loaded[other]),
        )
