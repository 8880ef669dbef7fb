r"""One option at a time: what of the model and of the training matters, on the embedded images.

    python benchmarks/ablations.py [--only NAME ...] [--seeds 3] [--jobs 2]

A row is its base with one thing changed. The end-point loss sees the path only through the noise
at its ends, and the basis only through its integrals; so what is about them is varied beside a
score-matching term: the number of atoms K, the kernel, the shape that atoms start from, the path,
the distribution of times and the weight of score matching. Its base is `score matching`. The
terms, the normalisation and the sizes of both training sets are varied in the digits configuration
as it is, `default`. About a minute a run on one core; runs that are done are skipped. With `--id`,
`--benchmark`, `--config` and `--data-root` the same grid runs on other images.

Digits are easy: near the ceiling differences say little, and with three seeds only large ones are
more than noise. The table is sorted by group, not by result.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grid import Method, add_arguments, run_grid, slug
from runs import markdown_rows, mean_deviation, runs_of

from ood_osdre.errors import exit_status

RESULTS = Path(__file__).parent / "results" / "ablations"

SCORED = ["objective.time_score=0.02", "objective.weight=constant"]


def scored(options: dict[str, str | list[str]]) -> dict[str, list[str]]:
    r"""Returns options beside a score-matching term."""
    return {
        name: [*SCORED, *([option] if isinstance(option, str) else option)]
        for name, option in options.items()
    }


GROUPS: dict[str, dict[str, list[str]]] = {
    "score matching": {"score matching": SCORED},
    "size": {
        **scored({f"K = {k}": f"basis.size={k}" for k in (1, 4, 100, 200, 400, 800)}),
        # All coefficients move together, so a step of log r is larger the more there are.
        **scored(
            {f"K = 400, lr {lr}": ["basis.size=400", f"training.lr={lr}"] for lr in (3e-4, 1e-4)}
        ),
    },
    "rate": scored({"lr 0.0003": "training.lr=0.0003"}),
    "kernel": scored({k: f"basis.kernel={k}" for k in ("matern32", "gaussian", "imq")}),
    "shape": scored({f"sigma = {s}": f"basis.sigma={s}" for s in (0.1, 0.2, 1.0, 2.0)}),
    "path": scored(
        {
            "linear": "path.schedule=linear",
            "no bridge": "path.noise=dequantisation",
            "wide bridge": "path.gamma2=0.25",
            "floor 0.0005": "path.eps=0.0005",
            "floor 0.05": "path.eps=0.05",
            "learnable": ["path.schedule=kumaraswamy_spherical", "objective.path_variance=1"],
        }
    ),
    "times": scored(
        {
            "logit-normal": "times.kind=logit_normal",
            "by 1/V": "times.kind=inverse_variance",
        }
    ),
    "weight": scored(
        {
            "five times": "objective.time_score=0.1",
            "v(t)": ["objective.time_score=1", "objective.weight=noise_variance"],
            "t (1 - t)": ["objective.time_score=0.1", "objective.weight=bridge"],
        }
    ),
    "default": {"default": []},
    "terms": {
        "no class term": ["objective.class_weight=0"],
        "class term 2": ["objective.class_weight=2"],
        "no broadening": ["data.broaden=0"],
        "two thirds broadened": ["data.broaden=0.66"],
        "shrinkage 0.001": ["objective.shrinkage=0.001"],
    },
    "normalisation": {"group normalisation": ["network.norm=group"]},
    "training images": {f"{n} of each set": [f"data.train_limit={n}"] for n in (100, 200, 400)},
    "reference": {f"{n} images": [f"data.reference_limit={n}"] for n in (25, 100, 400)},
}
METHODS = {
    (name if name == group else f"{group}: {name}"): options
    for group, members in GROUPS.items()
    for name, options in members.items()
}
COLUMNS = {"val AUROC": "val_auroc", "val near": "val_near", "val far": "val_far"}


def table(folder: Path) -> str:
    r"""Returns the table: validation and test AUROCs in percent, mean and deviation over seeds.

    Arguments:
        folder: The folder of the runs.
    """
    rows = []
    for name in METHODS:
        if runs := runs_of(folder / slug(name)):
            columns = [[run.validation(key) for run in runs] for key in COLUMNS.values()]
            columns += [[run.metric(key) for run in runs] for key in ("nearood", "farood")]
            rows.append([name, str(len(runs)), *(mean_deviation(c, digits=2) for c in columns)])
    return markdown_rows(["change", "seeds", *COLUMNS, "near (test)", "far (test)"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the grid and prints its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, list(METHODS), RESULTS)
    parser.set_defaults(id="digits", benchmark="digits", config="digits", steps=600, seeds=1)
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Runs what is not done yet and prints the table of what is."""
    status = run_grid({name: Method(options) for name, options in METHODS.items()}, args)
    print(table(args.out))
    return status


if __name__ == "__main__":
    sys.exit(main())
