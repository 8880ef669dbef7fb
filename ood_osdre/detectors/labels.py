r"""Class labels that a user gives: read without rounding, and counted."""

__all__ = ["class_labels", "count_classes"]

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..data.sets import Samples
from ..errors import UserError
from ..options import shown


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
