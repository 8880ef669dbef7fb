r"""`OneStepOutlierDetector` on tables, its references beside scikit-learn's outlier detectors.

    python benchmarks/outliers.py made [--out DIR]      # tables that a program makes
    python benchmarks/outliers.py shipped [--out DIR]   # tables that scikit-learn ships

The default of `reference` is the one of the largest mean AUROC on the made tables, a rule that was
fixed, with everything else of the detector, before it saw a shipped one. The made tables are
mixtures of three Gaussians in 4 and in 16 columns, bent in one of them, with outliers of four kinds.
Of a shipped table every class is the outliers in turn, the others the inliers; of `breast_cancer`
the malignant ones are, of `digits` two a seed. All methods have the same splits, by seed; 70 % of
the inliers train. Prints AUROC and the rate at which inliers of the test part are flagged, in percent.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bench_tables
import numpy as np
from numpy.typing import NDArray
from outputs import require_writable
from sklearn import datasets
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import LocalOutlierFactor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import OneClassSVM

from ood_osdre.detectors.outliers import REFERENCES, OneStepOutlierDetector
from ood_osdre.errors import Parser, exit_status
from ood_osdre.evaluation.metrics import ood_metrics
from ood_osdre.evaluation.records import RunRecord

OUT = Path("runs") / "outliers"
SEEDS = range(5)
TRAINED = 0.7  # of the inliers
SHIPPED = ("breast_cancer", "wine", "iris", "digits")
MALIGNANT = 0
# Of the made tables: columns, components, rows that train, and that test of either kind.
COLUMNS, COMPONENTS, MADE, TESTED = (4, 16), 3, 300, 300

Array = NDArray[np.float64]


def _one_step(reference: str, seed: int) -> OneStepOutlierDetector:
    return OneStepOutlierDetector(reference, random_state=seed)


#: The methods, given a seed. Those of scikit-learn have its own settings; the last two measure
#: distances, so columns are brought to one scale for them.
METHODS: dict[str, Callable[[int], Any]] = {
    **{f"one-step, {name}": partial(_one_step, name) for name in REFERENCES},
    "IsolationForest": lambda seed: IsolationForest(random_state=seed),
    "LocalOutlierFactor": lambda seed: make_pipeline(
        StandardScaler(), LocalOutlierFactor(novelty=True)
    ),
    "OneClassSVM": lambda seed: make_pipeline(StandardScaler(), OneClassSVM()),
}


class Split(NamedTuple):
    r"""Rows that train, inliers that test, and outliers, of one kind or class of a table."""

    table: str
    train: Array
    inliers: Array
    outliers: dict[str, Array]


def made(seed: int) -> Iterator[Split]:
    r"""Yields the made tables of a seed."""
    for columns in COLUMNS:
        rng = np.random.default_rng([seed, columns])
        means = rng.normal(0.0, 2.0, (COMPONENTS, columns))
        roots = rng.normal(0.0, 1.0 / np.sqrt(columns), (COMPONENTS, columns, columns))

        drawn = partial(_drawn, rng, means, roots)
        train, inliers = drawn(MADE), drawn(TESTED)
        low, high, spread = inliers.min(axis=0), inliers.max(axis=0), inliers.std(axis=0)
        direction = rng.normal(size=columns)
        away = 3 * spread * direction / np.sqrt(np.mean(direction**2))
        others = drawn(TESTED)
        outliers = {
            "scattered": rng.uniform(low, high, (TESTED, columns)),
            "wider": drawn(TESTED, 2.0),
            "unrelated columns": rng.permuted(others, axis=0),
            "cluster": inliers.mean(axis=0) + away + 0.1 * (others - others.mean(axis=0)),
        }
        yield Split(f"{columns} columns", train, inliers, outliers)


def _drawn(
    rng: np.random.Generator, means: Array, roots: Array, n: int, wider: float = 1.0
) -> Array:
    r"""Draws rows of a mixture, whose first column is bent; `wider` is a factor on its deviations."""
    k = rng.integers(len(means), size=n)
    z = wider * rng.normal(size=(n, means.shape[1]))
    x = means[k] + np.einsum("nij,nj->ni", roots[k], z)
    x[:, 0] += 0.5 * x[:, 1] ** 2
    return np.asarray(x)


def shipped(seed: int) -> Iterator[Split]:
    r"""Yields the shipped tables of a seed, once for every class that is taken for outliers."""
    for table in SHIPPED:
        x, y = getattr(datasets, f"load_{table}")(return_X_y=True)
        classes = {"breast_cancer": [MALIGNANT], "digits": [seed, seed + 5]}
        for c in classes.get(table, np.unique(y)):
            rows = np.random.default_rng([seed, int(c)]).permutation(np.flatnonzero(y != c))
            cut = round(TRAINED * len(rows))
            yield Split(table, x[rows[:cut]], x[rows[cut:]], {str(c): x[y == c]})


def measure(splits: Callable[[int], Iterator[Split]]) -> dict[str, Any]:
    r"""Returns the results of all methods: lists by method and table, a number a seed and class."""
    results: dict[str, Any] = {}
    for seed in SEEDS:
        for split in splits(seed):
            for name, build in METHODS.items():
                detector = build(seed).fit(split.train)
                scores = detector.score_samples(split.inliers)
                own = results.setdefault(name, {}).setdefault(split.table, {})
                for kind, rows in split.outliers.items():
                    auroc = ood_metrics(scores, detector.score_samples(rows)).auroc
                    own.setdefault("auroc", {}).setdefault(kind, []).append(100 * auroc)
                flagged = 100 * float(np.mean(detector.predict(split.inliers) < 0))
                own.setdefault("flagged", []).append(flagged)
    return results


TABLES = {"made": made, "shipped": shipped}


def main(argv: Sequence[str] | None = None) -> int:
    r"""Measures all methods, prints the table and writes the record."""
    parser = Parser(description=__doc__)
    parser.add_argument("tables", choices=TABLES)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Measures all methods, prints the table and writes the record."""
    require_writable(args.out)
    results = measure(TABLES[args.tables])
    print(bench_tables.outliers(results))
    detector = OneStepOutlierDetector().get_params()
    RunRecord(
        config={"tables": args.tables, "seeds": list(SEEDS), "trained": TRAINED, **detector},
        seed=min(SEEDS),
        device="cpu",
        results=results,
    ).write(args.out / f"outliers_{args.tables}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
