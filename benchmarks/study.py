r"""The study that chooses the default: which objective, on equal data, network and steps.

    python benchmarks/study.py --data-root DIR [--seeds 3] [--jobs 2] [--only NAME ...]

Trains every method of :data:`METHODS` on CIFAR-10 against the `pack` benchmark's reference with
the configuration `cifar10_cpu`, cut to `--steps`, and keeps each run's record and metrics under
`benchmarks/results/study/METHOD/seed-N`. Runs that are done are skipped, so the command can be
interrupted and given again. Give it from the top of the clone.
Every run uses one thread; `--jobs` run side by side. The choice is
made by *validation* AUROC; `python benchmarks/report.py` writes the tables.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from grid import Method, add_arguments, run_grid
from runs import Run, markdown_rows, mean_deviation, runs_of

from ood_osdre.errors import exit_status

RESULTS = Path(__file__).parent / "results" / "study"

OFF = ["objective.endpoint=0", "objective.class_weight=0", "data.broaden=0"]
# The paper's setting, as nearly as it is known: a learnable DDBI path, logit-normal times.
PAPER = [
    *OFF,
    "basis.size=400",
    "path.schedule=kumaraswamy_spherical",
    "path.noise=ddbi",
    "times.kind=logit_normal",
    "objective.weight=inverse_variance",
    "objective.path_variance=1",
    "objective.conditional=1",
]
PATH = [*OFF, "objective.weight=constant"]
ENDS = ["objective.endpoint=1", "objective.path_difference=0", "objective.time_score=0"]

METHODS: dict[str, list[str]] = {
    "conditional, scalar": [*PAPER, "objective.conditional_form=scalar"],
    "conditional, antithetic": [*PAPER, "objective.conditional_form=antithetic"],
    "conditional, per block": [*PAPER, "objective.conditional_form=per_block"],
    "path difference": [*PATH, "objective.path_difference=1"],
    "time score matching": [*PATH, "objective.time_score=1"],
    "end-point": [*OFF, *ENDS],
    "end-point, clean": [*OFF, *ENDS, "objective.endpoint_clean=true"],
    "end-point + class": [*OFF, *ENDS, "objective.class_weight=0.5"],
    "end-point + broad": [*OFF, *ENDS, "data.broaden=0.33"],
    "end-point + class + broad": [
        *OFF, *ENDS, "objective.class_weight=0.5", "data.broaden=0.33",
    ],
    "end-point + broad + time score matching": [
        *PATH, "objective.endpoint=1", "data.broaden=0.33", "objective.time_score=0.02",
    ],
    "end-point + class + broad + path difference": [
        *PATH, "objective.endpoint=1", "objective.class_weight=0.5", "data.broaden=0.33",
        "objective.path_difference=0.05",
    ],
    "end-point + class + broad + time score matching": [
        *PATH, "objective.endpoint=1", "objective.class_weight=0.5", "data.broaden=0.33",
        "objective.time_score=0.02",
    ],
}  # fmt: skip

# Of the table: what is chosen by, and what of the test sets is shown.
VALIDATION = {"val AUROC": "val_auroc", "val near": "val_near", "val far": "val_far"}
TEST = {
    "near (test)": "nearood", "far (test)": "farood", "mnist": "mnist",
    "fashion_mnist": "fashion_mnist",
}  # fmt: skip


def read(folder: Path) -> dict[str, list[Run]]:
    r"""Returns the runs of a study by the titles of its methods."""
    found = (runs_of(method) for method in sorted(folder.iterdir()))
    return {runs[0].record["config"]["title"]: runs for runs in found if runs}


def table(methods: Mapping[str, Sequence[Run]]) -> str:
    r"""Returns the table of a study: methods by validation AUROC, best first.

    Arguments:
        methods: The runs of each method.
    """
    rows = [
        [
            title,
            str(len(runs)),
            *(mean_deviation([r.validation(key) for r in runs]) for key in VALIDATION.values()),
            *(mean_deviation([r.metric(key) for r in runs]) for key in TEST.values()),
        ]
        for title, runs in sorted(methods.items(), key=lambda item: -_validation(item[1]))
    ]
    return markdown_rows(["method", "seeds", *VALIDATION, *TEST], rows)


def _validation(runs: Sequence[Run]) -> float:
    return float(np.mean([run.validation("val_auroc") for run in runs]))


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the study, seed by seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(METHODS), RESULTS)
    args = parser.parse_args(argv)
    methods = {name: Method(overrides) for name, overrides in METHODS.items()}
    return exit_status(lambda: run_grid(methods, args))


if __name__ == "__main__":
    sys.exit(main())
