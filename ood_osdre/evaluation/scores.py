r"""The scores of an evaluation, image by image.

A :class:`Scores` holds the detector's score of every image of the ID set and of the near and far
OOD sets. Metrics, tables and plots are functions of it alone, so a run keeps it as a file
(:func:`write_scores`, :func:`read_scores`) and any of them can be made again without the model.
"""

__all__ = ["OOD_ROLES", "ROLES", "ScoredSet", "Scores", "read_scores", "write_scores"]

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError, one_line
from ..files import atomic_path
from .metrics import OODMetrics, check_scores, ood_metrics

OOD_ROLES = ("near", "far")
ROLES = ("id", *OOD_ROLES)
BINS = 40


class ScoredSet(NamedTuple):
    r"""The scores of a set of :math:`N` images.

    Attributes:
        score: The scores, larger = more ID, with shape :math:`(N)`: log-ratios in nats, unless the
            detector is a classifier or a sum.
        label: The class labels, -1 for OOD, with shape :math:`(N)`.
        name: The file names.
        parts: The parts of a summed score, with shape :math:`(N, P)`; of any other P is 0.
    """

    score: NDArray[np.float64]
    label: NDArray[np.int64]
    name: list[str]
    parts: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"ScoredSet({len(self.score)} scores)"


class Scores:
    r"""The scores of the ID set and of the near and far OOD sets, checked as they are added.

    Arguments:
        parts: The names of the parts of a summed score (:class:`ood_osdre.models.SummedScore`).

    Example:
        >>> scores = Scores()
        >>> scores.add("id", "cifar10", [1.5, 2.5], [3, 7], ["a.png", "b.png"])
        >>> scores.add("near", "tin", [0.5], [-1], ["c.png"])
        >>> scores.metrics()["near"]["tin"].auroc
        1.0
    """

    def __init__(self, parts: Sequence[str] = ()) -> None:
        self.parts = tuple(parts)
        self._sets: dict[str, dict[str, ScoredSet]] = {role: {} for role in ROLES}

    def __repr__(self) -> str:
        sets = [f"{n}: {len(s.score)}" for own in self._sets.values() for n, s in own.items()]
        return f"Scores({', '.join(sets)})"

    def plot(self, ax: Any = None, what: str | None = None) -> Any:  # noqa: ANN401
        r"""Draws the histogram of every set over the central 98 % of all, and returns the axes.

        Arguments:
            ax: Axes of matplotlib's; None for new ones.
            what: What the scores are, with their unit, such as `"log-ratio (nats)"`, which their
                numbers do not say; None for what is known of them.

        Raises:
            UserError: If there are no scores.
        """
        import matplotlib.pyplot as plt

        from .plots import legend_name

        sets = {name: s.score for own in self._sets.values() for name, s in own.items()}
        if not sets:
            raise UserError("plot: got no scores, expected a set; add one.")
        ends = [np.quantile(score, (0.01, 0.99)) for score in sets.values()]
        edges = np.histogram_bin_edges([], BINS, (np.min(ends), np.max(ends)))
        ax = plt.subplots()[1] if ax is None else ax
        for name, score in sets.items():
            # Of all scores of the set, also those that lie outside.
            heights = np.histogram(score, edges)[0] / (len(score) * np.diff(edges))
            ax.stairs(heights, edges, label=legend_name(f"{name} (n = {len(score)})"))
        what = what or ("sum of standardised parts" if self.parts else "score")
        ax.set(xlabel=f"{what}, larger = more ID", ylabel="density")
        ax.legend()
        return ax

    def add(
        self,
        role: str,
        name: str,
        score: ArrayLike,
        label: ArrayLike,
        names: Sequence[str],
        parts: ArrayLike | None = None,
    ) -> None:
        r"""Adds a set.

        Arguments:
            role: Either `"id"`, `"near"` or `"far"`.
            name: The name of the set.
            score: The scores, larger = more ID, with shape :math:`(N)`, see :class:`ScoredSet`.
            label: The class labels, -1 for OOD, with shape :math:`(N)`.
            names: The file names of the :math:`N` images.
            parts: The parts of a summed score, with shape :math:`(N, P)`.

        Raises:
            UserError: If the set is empty, a score is NaN or infinite, there are not as many labels
                and names, or there is a set of that name, or an ID set, already; or if there are
                not as many parts as names of such.
        """
        names = [str(n) for n in names]
        score = check_scores(name, score, names)
        label = np.asarray(label, dtype=np.int64)
        taken = name in self.counts() or (role == "id" and self.of("id"))
        if role not in ROLES or taken or label.shape != score.shape:
            raise UserError(
                f"{name} scores: got the role {role!r} and labels of shape {label.shape} beside "
                f"the sets {list(self.counts())}, expected one of {', '.join(ROLES)}, "
                f"{score.shape} and a new name, one ID set in all"
            )
        given = np.asarray([] if parts is None else parts, dtype=np.float64)
        columns = np.reshape(given, (len(score), -1))
        if columns.shape[1] != len(self.parts):
            raise UserError(
                f"{name} scores: got {columns.shape[1]} parts, expected {len(self.parts)}"
            )
        self._sets[role][name] = ScoredSet(score, label, names, columns)

    def of(self, role: str) -> Mapping[str, ScoredSet]:
        r"""Returns the sets that have a role, by name."""
        return self._sets[role]

    def counts(self) -> dict[str, int]:
        r"""Counts the images of each set."""
        return {name: s.score.size for role in ROLES for name, s in self.of(role).items()}

    def part(self, index: int) -> "Scores":
        r"""Returns the scores that one of the parts is, that of an index."""
        alone = Scores()
        for role in ROLES:
            for name, s in self.of(role).items():
                alone.add(role, name, s.parts[:, index], s.label, s.name)
        return alone

    def metrics(self) -> dict[str, dict[str, OODMetrics]]:
        r"""Compares the ID set, which has to be there, with each near and far set."""
        (reference,) = self.of("id").values()
        return {
            role: {
                name: ood_metrics(reference.score, s.score) for name, s in self.of(role).items()
            }
            for role in OOD_ROLES
        }


def write_scores(path: str | os.PathLike[str], scores: Scores) -> None:
    r"""Writes the scores as five arrays of one entry an image, in an `.npz` without pickles.

    The arrays are `score`, `label`, `name`, `set` and `role`, each with shape :math:`(N)`. Those
    of a summed score have its parts beside them: `parts`, with shape :math:`(N, P)`, as they were
    before they were standardised, and `part_names`.
    """
    sets = [(role, name, s) for role in ROLES for name, s in scores.of(role).items()]
    sizes = [s.score.size for _, _, s in sets]
    parts: Any = {
        "parts": np.concatenate([s.parts for _, _, s in sets]),
        "part_names": np.array(scores.parts, dtype=np.str_),
    }
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            score=np.concatenate([s.score for _, _, s in sets]),
            label=np.concatenate([s.label for _, _, s in sets]),
            name=np.array([n for _, _, s in sets for n in s.name], dtype=np.str_),
            set=np.repeat([name for _, name, _ in sets], sizes),
            role=np.repeat([role for role, _, _ in sets], sizes),
            **(parts if scores.parts else {}),
        )


def read_scores(path: str | os.PathLike[str]) -> Scores:
    r"""Reads the scores that :func:`write_scores` wrote.

    Raises:
        UserError: If the file is missing, corrupt or not such a file.
    """
    scores = Scores()
    try:
        with np.load(path, allow_pickle=False) as file:
            keys = ("score", "label", "name", "set", "role")
            # Raises an error if the arrays are not of one length; scalars would be repeated.
            rows = pd.DataFrame({key: np.atleast_1d(file[key]) for key in keys})
            if "parts" in file:
                scores, parts = Scores(file["part_names"].tolist()), file["parts"]
            else:
                parts = np.zeros((len(rows), 0))
        for (role, name), group in rows.groupby(["role", "set"], sort=False, dropna=False):
            columns = group["score"], group["label"], group["name"].tolist()
            scores.add(role, name, *columns, parts[group.index])
        if lacking := [r for r in (("id",), OOD_ROLES) if not any(map(scores.of, r))]:
            raise ValueError(f"no set of role {' or '.join(lacking[0])}")
    except Exception as error:  # noqa: BLE001 - what a damaged archive raises depends on the byte
        reason = one_line(error, 200)
        raise UserError(f"{path}: not a readable scores file of a run ({reason})") from None
    return scores
