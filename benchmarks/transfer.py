r"""How well the mirrored problem and the validation order families of methods on the test sets.

    python benchmarks/transfer.py [--runs runs] [--out benchmarks/records]

A family is a method of the main study and its like on `mirror0` and `mirror1`. Three numbers of it are
compared, AUROCs in percent: *mirror*, the mean of near and far over both draws and all seeds, with the
reference that stands for the main one; *validation*, the main runs' `val_auroc`; *test*, their mean of
near (`near_held` where there is one) and far. A scatter and Spearman's rho say how well either of the
first two orders the families by the third, for each ID data set and reference.

Intervals are of 95 %, by bootstrap over seeds and test images: a replicate draws seeds anew, the same for
all families, and adds what drawing the images of each test set anew, the same for all families, changes in
the AUROC of the first seed whose scores are in its run's folder. Intervals of the mirrored and validation
numbers are over seeds alone, and one seed has none; of two or three seeds they are too short, and the
families are taken as given. What is found is a finding: nothing is chosen by it.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import bench_tables
import numpy as np
from bench_tables import GUIDES, TEST, Panel
from jobs import run_folder
from numpy.typing import NDArray
from outputs import require_writable
from records import RECORDS, Run, read_runs
from scipy import stats
from studies import slug

from ood_osdre.data.manifests import load_manifest
from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.evaluation.scores import Scores, read_scores
from ood_osdre.evaluation.tables import HELD
from ood_osdre.files import local

MAIN = "main"
MIRRORED = ("mirror_pixels", "mirror_heads")
# The mirrored method, where it has another name than the main one, and the mirrored reference.
LIKE = {
    "Logistic, pixels": ("mirror_pixels", "Logistic"),
    "OS-DRE, pixels": ("mirror_pixels", "OS-DRE, end-point"),
    "Logistic, representation": ("mirror_heads", "Logistic"),
    "plug-in Gaussians, representation": ("mirror_heads", "plug-in Gaussians"),
    "OS-DRE, representation, time score matching": ("mirror_heads", "time score matching"),
    "OS-DRE, representation, conditional": ("mirror_heads", "conditional"),
}
STANDS_FOR = {"tiny_reference": "reference_mixed", "tin_reference": "reference_other"}

Array: TypeAlias = NDArray[np.float64]


class Family(NamedTuple):
    r"""A family of methods; of each number the estimate and its replicates, with shape (1 + R)."""

    name: str
    mirror: Array
    validation: Array
    test: Array


def quality(run: Run) -> float:
    r"""Returns the mean of near and far AUROC, near without what references hold classes of."""
    return (run.metric(run.near) + run.metric("farood")) / 2


def resampled(groups: Sequence[Sequence[float]], replicates: int) -> Array:
    r"""Returns the mean over groups of their means, and replicates with seeds drawn anew.

    Groups of one size have the same draws, whatever the family.
    """
    means = []
    for values in groups:
        given = np.asarray(values, dtype=np.float64)
        drawn = np.random.default_rng(len(given)).integers(
            len(given), size=(replicates, len(given))
        )
        means.append(np.concatenate([[given.mean()], given[drawn].mean(axis=1)]))
    return np.mean(means, axis=0)


@cache
def _weights(name: str, size: int, replicates: int) -> NDArray[np.uint8]:
    r"""Returns how often each image of a set is drawn, for each replicate, the first once each."""
    rng = np.random.default_rng([size, *name.encode()])
    drawn = rng.multinomial(size, np.full(size, 1 / size), replicates)
    return np.concatenate([np.ones((1, size)), drawn]).astype(np.uint8)


def image_aurocs(scores: Scores, sets: Sequence[str], replicates: int) -> dict[str, Array]:
    r"""Returns the AUROC in percent of OOD sets, and replicates with images drawn anew.

    Arguments:
        scores: The scores of a run.
        sets: The names of the sets.
        replicates: The number of replicates.
    """
    ((id_name, ids),) = scores.of("id").items()
    order = ids.score.argsort()
    weights = _weights(id_name, ids.score.size, replicates)[:, order]
    # The weight of the ID scores below each place among them.
    below = np.pad(weights.cumsum(axis=1, dtype=np.float64), ((0, 0), (1, 0)))
    found = {}
    for name, other in {**scores.of("near"), **scores.of("far")}.items():
        if name in sets:
            own = _weights(name, other.score.size, replicates)
            low, high = (
                np.searchsorted(ids.score[order], other.score, s) for s in ("left", "right")
            )
            less = [row[low] + row[high] for row in below]
            pairs = ids.score.size * other.score.size
            found[name] = 100 * (1 - np.einsum("rn,rn->r", own, less) / 2 / pairs)
    return found


def image_changes(run: Run, scores: Scores, replicates: int) -> Array:
    r"""Returns what drawing images anew changes in :func:`quality`, with shape (1 + R)."""
    near, far = list(scores.of("near")), list(scores.of("far"))
    if HELD in run.metrics:
        wholes = set(load_manifest(run.benchmark, run.id).parts.values())
        near = [name for name in near if name not in wholes]
    found = image_aurocs(scores, [*near, *far], replicates)
    total = sum(np.mean([found[n] for n in names], axis=0) for names in (near, far)) / 2
    return np.asarray(total - total[0])


def families(
    reference: str, runs: Sequence[Run], mirrored: Mapping[str, Sequence[Run]],
    out: Path, replicates: int,
) -> list[Family]:  # fmt: skip
    r"""Returns the families of a reference that the main and a mirrored study have lines of.

    Arguments:
        reference: The main study's reference.
        runs: Its runs of an ID data set.
        mirrored: Those of the mirrored studies, by name.
        out: The scratch folder of the main study.
        replicates: The number of replicates.
    """
    found = []
    for method, variant in dict.fromkeys((run.method, run.variant) for run in runs):
        home, like = LIKE.get(method, ("mirror_pixels", method))
        own = _of(runs, method, variant, reference)
        same = _of(mirrored[home], like, variant, STANDS_FOR[reference])
        if not own or not same:
            continue
        by_draw: dict[str, list[float]] = {}
        for run in same:
            by_draw.setdefault(run.benchmark, []).append(quality(run))
        test = resampled([[quality(run) for run in own]], replicates)
        first, path = _kept(own, out)
        test = test + image_changes(first, read_scores(path), replicates)
        found.append(
            Family(
                ", ".join(filter(None, [method, variant])),
                resampled([*by_draw.values()], replicates),
                resampled([[run.value("val_auroc") for run in own]], replicates),
                test,
            )
        )
    return found


def _kept(own: Sequence[Run], out: Path) -> tuple[Run, Path]:
    r"""Returns the first seed's run whose scores are there, and their file; else the first and none."""

    def scores(run: Run) -> Path:
        setting = run.id, run.benchmark, run.reference
        return run_folder(out, setting, run.method, run.seed) / slug(run.variant) / "scores.npz"

    ordered = sorted(own, key=lambda run: run.seed)
    first = next((run for run in ordered if scores(run).is_file()), ordered[0])
    return first, scores(first)


def _of(runs: Sequence[Run], method: str, variant: str, reference: str) -> list[Run]:
    r"""Returns the runs of a method with a reference; what sees none is trained with any of them."""
    own = [run for run in runs if (run.method, run.variant) == (method, variant)]
    return [run for run in own if run.stands_for(reference)]


def interval(values: Array) -> tuple[float, float]:
    r"""Returns the 95 % interval of replicates, the first of which is the estimate."""
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return float(low), float(high)


def spearman(found: Sequence[Family], guide: str) -> Array:
    r"""Returns Spearman's rho of a guide and the test, over families that have both, with replicates."""
    pairs = [(getattr(f, guide), f.test) for f in found]
    x, y = (
        np.array(side) for side in zip(*[p for p in pairs if np.isfinite(p[0][0])], strict=True)
    )
    a, b = (stats.rankdata(side, axis=0) for side in (x, y))
    a, b = a - a.mean(axis=0), b - b.mean(axis=0)
    with np.errstate(invalid="ignore"):
        return np.asarray((a * b).sum(axis=0) / np.sqrt((a**2).sum(axis=0) * (b**2).sum(axis=0)))


def record_of_panel(found: Sequence[Family]) -> Panel:
    r"""Returns each family's numbers, best on the test sets first, and how either guide orders them."""

    def cell(values: Array) -> list[float | None]:
        known = np.isfinite(values[0])
        return (
            [round(float(v), 4) for v in (values[0], *interval(values))] if known else [None] * 3
        )

    ordered = sorted(found, key=lambda f: -f.test[0])
    numbers = {f.name: {name: cell(getattr(f, name)) for name in (*GUIDES, TEST)} for f in ordered}
    return {"families": numbers, "rho": {guide: cell(spearman(found, guide)) for guide in GUIDES}}


def run(args: argparse.Namespace) -> int:
    r"""Measures all families, prints the tables and writes the record."""
    require_writable(args.out)
    mirrored = {name: read_runs(args.records / f"{name}.jsonl") for name in MIRRORED}
    panels = {}
    runs = read_runs(args.records / f"{MAIN}.jsonl")
    for id_name in dict.fromkeys(run.id for run in runs):
        own = [run for run in runs if run.id == id_name]
        for reference in STANDS_FOR:
            found = families(reference, own, mirrored, args.runs / MAIN, args.replicates)
            # Of two families an order says nothing.
            if len(found) > 2:
                panels[f"{id_name}, {reference}"] = record_of_panel(found)
    if not panels:
        raise UserError(
            f"{args.records}: no three families have lines in the main and a mirrored study; run "
            f"{MAIN}, and {' and '.join(MIRRORED)}, first."
        )
    print(bench_tables.transfer(panels))
    RunRecord(
        config={"replicates": args.replicates, "studies": [MAIN, *MIRRORED]},
        seed=0,
        device="cpu",
        results=panels,
    ).write(args.out / "transfer.json")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures all families, prints the tables and writes the record."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--records", type=local, default=RECORDS, metavar="DIR", help="of the studies")
    add(
        "--runs", type=local, default=Path("runs"), metavar="DIR", help="the scratch of `study.py`"
    )
    add("--out", type=local, default=RECORDS, metavar="DIR", help="for transfer.json")
    add("--replicates", type=count(1), default=1000)
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
