r"""The scores of an evaluation, image by image.

A :class:`Scores` holds what the detector said about every image: the ID set, and the near and far
OOD sets. It is all that metrics, tables and plots are made of, so it is kept on the disk
(:func:`write_scores`, :func:`read_scores`) and any of them can be made again without the model.
"""

__all__ = ["ScoredSet", "Scores", "read_scores", "write_scores"]

import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError, one_line
from ..files import atomic_path
from .metrics import OODMetrics, check_scores, ood_metrics

OOD_ROLES = ("near", "far")
ROLES = ("id", *OOD_ROLES)


class ScoredSet(NamedTuple):
    r"""The scores of a set of :math:`N` images.

    Attributes:
        score: The log-ratios in nats, larger = more ID, with shape :math:`(N)`.
        label: The class labels, -1 for OOD, with shape :math:`(N)`.
        name: The file names.
    """

    score: NDArray[np.floating]
    label: NDArray[np.int64]
    name: list[str]


class Scores:
    r"""The scores of the ID set and of the near and far OOD sets, checked as they are added.

    Example:
        >>> scores = Scores()
        >>> scores.add("id", "cifar10", [1.5, 2.5], [3, 7], ["a.png", "b.png"])
        >>> scores.add("near", "tin", [0.5], [-1], ["c.png"])
        >>> scores.metrics()["near"]["tin"].auroc
        1.0
    """

    def __init__(self) -> None:
        self._sets: dict[str, dict[str, ScoredSet]] = {role: {} for role in ROLES}

    def add(
        self,
        role: str,
        name: str,
        score: ArrayLike,
        label: ArrayLike,
        names: Sequence[str],
    ) -> None:
        r"""Adds a set.

        Arguments:
            role: Either `"id"`, `"near"` or `"far"`.
            name: The name of the set.
            score: The log-ratios in nats, larger = more ID, with shape :math:`(N)`.
            label: The class labels, -1 for OOD, with shape :math:`(N)`.
            names: The file names of the :math:`N` images.

        Raises:
            UserError: If the set is empty or a score is NaN or infinite.
        """
        if role not in ROLES:
            raise ValueError(f"unknown role '{role}', expected one of {', '.join(ROLES)}")
        if any(name in self.of(role) for role in ROLES):
            raise ValueError(f"the set '{name}' has been added already")
        if role == "id" and self.of("id"):
            raise ValueError(f"'{name}' is a second ID set, expected one")

        names = [str(n) for n in names]
        score = check_scores(name, score, names)
        label = np.asarray(label, dtype=np.int64)

        if label.shape != score.shape:
            raise ValueError(f"{name}: {score.size} scores but labels of shape {label.shape}")

        self._sets[role][name] = ScoredSet(score, label, names)

    def of(self, role: str) -> Mapping[str, ScoredSet]:
        r"""Returns the sets that have a role, by name."""
        return self._sets[role]

    def counts(self) -> dict[str, int]:
        r"""Counts the images of each set."""
        return {name: s.score.size for role in ROLES for name, s in self.of(role).items()}

    def metrics(self) -> dict[str, dict[str, OODMetrics]]:
        r"""Compares the ID set with each near and far set."""
        if not self.of("id"):
            raise ValueError("the ID set has not been added")

        (reference,) = self.of("id").values()

        return {
            role: {
                name: ood_metrics(reference.score, s.score) for name, s in self.of(role).items()
            }
            for role in OOD_ROLES
        }


def write_scores(path: str | os.PathLike[str], scores: Scores) -> None:
    r"""Writes the scores as five arrays of one entry an image, in an `.npz` without pickles.

    The arrays are `score`, `label`, `name`, `set` and `role`, each with shape :math:`(N)`.
    """
    sets = [(role, name, s) for role in ROLES for name, s in scores.of(role).items()]

    if not sets:
        raise ValueError(f"{path}: there are no scores to write")

    sizes = [s.score.size for _, _, s in sets]

    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            score=np.concatenate([s.score for _, _, s in sets]),
            label=np.concatenate([s.label for _, _, s in sets]),
            name=np.array([n for _, _, s in sets for n in s.name], dtype=np.str_),
            set=np.repeat([name for _, name, _ in sets], sizes),
            role=np.repeat([role for role, _, _ in sets], sizes),
        )


# What NumPy raises on a damaged archive depends on the byte.
UNREADABLE = (
    OSError,
    EOFError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    SyntaxError,
    AttributeError,
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)


def read_scores(path: str | os.PathLike[str]) -> Scores:
    r"""Reads the scores that :func:`write_scores` wrote.

    Raises:
        UserError: If the file is missing, corrupt or not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            score, label, name = file["score"], file["label"], file["name"]
            set_name, role = file["set"], file["role"]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, expected the scores of a run") from None
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]}, expected the scores of a run") from None
    except UNREADABLE as error:
        reason = one_line(error, 80)
        raise UserError(f"{path}: not a readable scores file ({reason})") from None
    sizes = {array.shape for array in (score, label, name, set_name, role)}
    odd = set(np.unique(role).tolist()) - set(ROLES)
    if len(sizes) > 1 or len(score.shape) != 1 or odd:
        found = f"the role {min(odd)!r}" if odd else f"arrays of shapes {sorted(sizes)}"
        raise UserError(f"{path}: holds {found}, expected the scores of a run")

    _, first = np.unique(set_name, return_index=True)
    scores = Scores()

    for i in np.sort(first):
        mask = set_name == set_name[i]
        scores.add(str(role[i]), str(set_name[i]), score[mask], label[mask], name[mask].tolist())

    return scores
