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
from collections.abc import Sequence
from pathlib import Path

from grid import Method, add_arguments, run_grid

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


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the study, seed by seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(METHODS), RESULTS)
    args = parser.parse_args(argv)
    return run_grid({name: Method(overrides) for name, overrides in METHODS.items()}, args)


if __name__ == "__main__":
    sys.exit(main())
