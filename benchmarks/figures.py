r"""The figures of the pages, drawn anew from the committed run records.

Two versions of a drawing library need not agree to the last pixel, so an image matches if few of
its pixels differ visibly. What is drawn from a trained model instead of a record, densities over
the plane and a field of scores, is not here.
"""

from collections.abc import Callable
from pathlib import Path

import comparison
import numpy as np
from matplotlib import image
from runs import read_run, record_of

from ood_osdre.evaluation.plots import draw_scores
from ood_osdre.evaluation.scores import read_scores

RESULTS = Path(__file__).parent / "results"

# How much of a channel's range is visible, and the share of pixels that may differ so.
VISIBLE, SHARE = 0.1, 0.005


def score_densities(folder: Path, path: Path) -> None:
    r"""Draws the densities of a run's scores.

    Arguments:
        folder: The run.
        path: The image to write.
    """
    run = read_run(folder)
    benchmark, title = run.metrics["benchmark"].iloc[0], run.record["config"]["title"]
    scores = read_scores(folder / "scores.npz")
    draw_scores(path, scores, f"{benchmark}: {title}" if title else benchmark)


def tracking(folder: Path, path: Path) -> None:
    r"""Draws the divergences of a stream.

    Arguments:
        folder: The results of the task.
        path: The image to write.
    """
    # Imported here, as it imports torch, which the tables do without.
    from ood_osdre.tasks.suites import kl

    kl.plot(path, record_of(folder, "kl.json")["results"]["rows"])


def quality(folder: Path, path: Path) -> None:
    r"""Draws a comparison's quality by evaluations.

    Arguments:
        folder: The comparison.
        path: The image to write.
    """
    comparison.nfe_plot(comparison.collect(folder), path)


#: How each is drawn from the folder that it is in.
FIGURES: dict[str, Callable[[Path, Path], None]] = {
    "cifar10_pack_cpu/score_density.png": score_densities,
    "cifar10_pack_long/score_density.png": score_densities,
    "digits/score_density.png": score_densities,
    "compare/nfe.png": quality,
    "compare/densities.png": comparison.densities,
    "tasks/kl/kl.png": tracking,
    "tasks/kl-d20/kl.png": tracking,
}


def draw(name: str, path: Path) -> None:
    r"""Draws a figure.

    Arguments:
        name: Its name in :data:`FIGURES`.
        path: The image to write.
    """
    FIGURES[name]((RESULTS / name).parent, path)


def alike(one: Path, other: Path) -> bool:
    r"""Returns whether two images show the same.

    Arguments:
        one: An image.
        other: Another image; false if there is none.
    """
    if not other.is_file():
        return False
    a, b = image.imread(one), image.imread(other)
    if a.shape != b.shape:
        return False
    return bool((np.abs(a - b).max(axis=-1) > VISIBLE).mean() <= SHARE)
