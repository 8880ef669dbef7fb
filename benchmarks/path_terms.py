r"""What does score matching along the path add to a ratio that is supervised at its end points?

    python benchmarks/path_terms.py screen --data-root DIR
    python benchmarks/path_terms.py confirm --data-root DIR --only "NAME OF A CANDIDATE"
    python benchmarks/path_terms.py few --data-root DIR --only "NAME OF A CANDIDATE"
    python benchmarks/path_terms.py mixed --data-root DIR --only "NAME OF A CANDIDATE"
    python benchmarks/path_terms.py finalists --data-root DIR --only "NAME OF A CANDIDATE"
    python benchmarks/path_terms.py scarce --data-root DIR --only "NAME OF A CANDIDATE"

The protocol, fixed before the first run but for what is said of further rounds and of `scarce`:

- The base is the shipped default (end-point + class + broad). A candidate is the base and one
  thing more, with the same seed, data, network and number of steps.
- `screen` tries every candidate with two seeds. The one with the largest mean paired difference of
  validation AUROC goes on, whatever its sign.
- A second round of six candidates found nothing either; their code is gone, and the commit that had
  it is named on the page. The candidates of `STRATIFIED` are a third round, added when the gradient
  noise of score matching had turned out to be mostly that of the times; the best of them goes on
  too. (Intervals are not corrected for the rounds.)
- `confirm` trains it and the base with five fresh seeds. It *helps*, or harms, if the 95 %
  t-interval of the paired difference lies on one side of 0; else the answer is that nothing is
  seen at this budget, and how large a difference would have been seen is the interval's width.
- `few` does the same with 2,000 training images of each set, `mixed` with a reference of which
  30 % are ID images, for the best of the first round, whether or not `confirm` found anything.
- `finalists` does the same with five times the steps of `confirm` and five more seeds, for
  whichever candidate `confirm` left with the largest mean difference: a quarter of an hour a run.
- `scarce` was added, before its first run, because 2,000 images cost the base nothing: `few` with
  250 images of each set and five more seeds.
- Everything is decided on validation. Test sets are scored, as the main command does, and not
  looked at; the table has no column for them.

Calibration is that of the log-ratio on ID validation images and reference classes held out of
training. Other classes are another p_0, so the numbers of the reference need not be 0 even at the
truth: compare them between methods, see `ood_osdre/evaluation/calibration.py`. Runs that are done
are skipped.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from grid import Method, add_arguments, run_grid, slug
from runs import markdown_rows, runs_of
from scipy import stats

from ood_osdre.errors import exit_status

RESULTS = Path(__file__).parent / "results" / "path_terms"

BASE = "base"
ENDS = ["objective.endpoint=1", "objective.class_weight=0.5", "data.broaden=0.33"]
CONSTANT = [*ENDS, "objective.weight=constant"]
CANDIDATES = {
    "time score matching, 0.02": [*CONSTANT, "objective.time_score=0.02"],
    "time score matching, 0.1": [*CONSTANT, "objective.time_score=0.1"],
    "time score matching, weight of the noise": [
        *ENDS, "objective.weight=noise_variance", "objective.time_score=1",
    ],
    "path difference, 0.02": [*CONSTANT, "objective.path_difference=0.02"],
    "conditional, antithetic per block": [
        *ENDS, "objective.conditional=0.1", "objective.conditional_form=antithetic_per_block",
    ],
    # No term, but what a path brings along: noise at the ends, ten times the default's.
    "end points with ten times the noise": [*ENDS, "path.eps=0.05"],
}  # fmt: skip
# Without the noise of the times, see `gradient_snr.py`.
STRATIFIED = {
    f"{name}, stratified times": [*CANDIDATES[name], "times.stratified=true"]
    for name in (
        "time score matching, 0.02",
        "time score matching, 0.1",
        "time score matching, weight of the noise",
    )
}
CANDIDATES |= STRATIFIED
METHODS = {BASE: ENDS, **CANDIDATES}

# Seeds, steps and further options of each stage.
STAGES: dict[str, tuple[range, int, list[str]]] = {
    "screen": (range(2), 600, []),
    "confirm": (range(10, 15), 1000, []),
    "few": (range(10, 15), 600, ["data.train_limit=2000"]),
    "mixed": (range(10, 15), 600, ["data.mixture=0.3"]),
    "finalists": (range(20, 25), 5000, []),
    "scarce": (range(30, 35), 600, ["data.train_limit=250"]),
}

# Validation numbers: their names in the records.
COLUMNS = {
    "val AUROC": "val_auroc",
    "near": "val_near",
    "far": "val_far",
    "log E_0[r]": "val_log_mass_0",
    "log E_1[1/r]": "val_log_mass_1",
    "posterior error": "val_posterior_error",
}


def read(folder: Path, name: str) -> dict[int, list[float]]:
    r"""Returns the validation numbers of a method's runs, as :data:`COLUMNS` has them, by seed."""
    runs = runs_of(folder / slug(name))
    return {run.seed: [run.validation(key) for key in COLUMNS.values()] for run in runs}


def paired(values: Sequence[float]) -> str:
    r"""Returns a mean difference, with its 95 % t-interval from three pairs on."""
    mean, n = float(np.mean(values)), len(values)
    if n < 3:
        return f"{mean:+.2f}"
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return f"{mean:+.2f} ± {half:.2f}"


def table(folder: Path) -> str:
    r"""Returns the table of a stage: the base, then differences of each candidate from it.

    Arguments:
        folder: The folder of the stage.
    """
    base = read(folder, BASE)
    rows = []
    if base:
        means = np.mean(list(base.values()), axis=0)
        rows.append([BASE, str(len(base)), *(f"{mean:.2f}" for mean in means)])
    for name in CANDIDATES:
        runs = read(folder, name)
        if seeds := sorted(base.keys() & runs.keys()):
            differences = np.array([np.subtract(runs[seed], base[seed]) for seed in seeds])
            rows.append([name, str(len(seeds)), *(paired(d.tolist()) for d in differences.T)])
    return markdown_rows(["method", "seeds", *COLUMNS], rows)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs a stage and prints its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=list(STAGES))
    add_arguments(parser, list(METHODS), RESULTS, protocol=True)
    args = parser.parse_args(argv)
    if args.stage != "screen" and len(set(args.only) - {BASE}) != 1:
        parser.error(f"{args.stage} takes one candidate, give it by --only")
    seeds, args.steps, further = STAGES[args.stage]
    args.first_seed, args.seeds = seeds.start, len(seeds)
    args.out = args.out / args.stage
    args.only = list(dict.fromkeys([BASE, *args.only]))
    methods = {name: Method([*o, *further]) for name, o in METHODS.items()}
    return exit_status(lambda: run(methods, args))


def run(methods: Mapping[str, Method], args: argparse.Namespace) -> int:
    r"""Runs what is not done yet and prints the table of what is."""
    status = run_grid(methods, args)
    print(table(args.out))
    return status


if __name__ == "__main__":
    sys.exit(main())
