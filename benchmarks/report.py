r"""Writes the tables of RESULTS.md and README.md from the committed run records.

    python benchmarks/report.py          rewrites them
    python benchmarks/report.py --check  fails if one does not match (CI runs this)

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between is generated.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ablations
import bench_tables
import comparison
import numpy as np
import path_terms
import task_tables
from grid import record_of
from scipy import stats

from ood_osdre.errors import UserError, one_line
from ood_osdre.files import write_text_atomic
from ood_osdre.scores import read_scores

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (
    HERE / "RESULTS.md",
    *(HERE.parent / name for name in ("README.md", "docs/density.md", "docs/divergences.md")),
)
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read_run(folder: Path) -> dict[str, float]:
    r"""Returns the validation and test AUROCs of a run, in percent, and its seconds."""
    record = record_of(folder)
    values = {k: 100 * v for k, v in record["validation"]["best"].items() if k.startswith("val_")}
    values["minutes"] = record["train_seconds"] / 60
    with open(folder / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["AUROC"]:
                values[row["set"]] = float(row["AUROC"])
                values[f"{row['set']} FPR"] = float(row["FPR@95"])
    return values


def mean_interval(values: Sequence[float]) -> str:
    r"""Returns a mean with the half-width of its 95 % t-interval, from three values on.

    With two values the half-width is nine times their standard deviation, and says nothing.
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 3:
        return f"{mean:.1f}"
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return f"{mean:.1f} ± {half:.1f}"


def study(name: str, **others: str) -> str:
    r"""Returns the table of a study: methods by validation AUROC, best first.

    Arguments:
        name: The folder of the study.
        others: Further runs, by the folder they are in, under the title to give them.
    """
    columns = {
        "val AUROC": "val_auroc",
        "val near": "val_near",
        "val far": "val_far",
        "near (test)": "nearood",
        "far (test)": "farood",
        "mnist": "mnist",
        "fashion_mnist": "fashion_mnist",
    }
    methods = {title: [read_run(RESULTS / folder)] for folder, title in others.items()}
    for folder in sorted((RESULTS / name).iterdir()):
        runs = sorted(folder.glob("seed-*"))
        if runs:
            title = record_of(runs[0])["config"]["title"]
            methods[title] = [read_run(run) for run in runs]
    order = sorted(methods, key=lambda m: -np.mean([r["val_auroc"] for r in methods[m]]))
    rows = [
        [m, str(len(methods[m]))]
        + [mean_interval([run[key] for run in methods[m]]) for key in columns.values()]
        for m in order
    ]
    return comparison.markdown_rows(["method", "seeds", *columns], rows)


def run_table(name: str) -> str:
    r"""Returns the metrics of one run of the main command, from its scores."""
    scores = read_scores(RESULTS / name / "scores.npz")
    text = bench_tables.run(record_of(RESULTS / name), scores, "title")
    return "\n".join(text.splitlines()[2:]) + "\n"


def results_of(name: str) -> dict[str, Any]:
    r"""Returns the results of a benchmark's record."""
    results: dict[str, Any] = record_of(RESULTS / name)["results"]
    return results


def compared(group: str) -> str:
    r"""Returns the table of a group of the comparison."""
    return comparison.markdown(comparison.summary(comparison.collect(RESULTS / "compare"), group))


def paths(stage: str) -> str:
    r"""Returns the table of a stage of the question what path terms add."""
    return path_terms.table(path_terms.RESULTS / stage)


TABLES: dict[str, Callable[[], str]] = {
    "study": lambda: study("study"),
    "finalists": lambda: study("finalists", **{"finalists/default": "end-point + class + broad"}),
    "cifar10-pack": lambda: run_table("cifar10_pack_cpu"),
    "cifar10-pack-long": lambda: run_table("cifar10_pack_long"),
    "compare-ratio": lambda: compared("ratio"),
    "compare-paper-style": lambda: compared("paper-style"),
    "compare-class": lambda: compared("class"),
    "feature-ratio": lambda: bench_tables.feature_ratio(results_of("feature_ratio")),
    "digits": lambda: run_table("digits"),
    "ablations": lambda: ablations.table(ablations.RESULTS),
    "path-terms-screen": lambda: paths("screen"),
    "path-terms-confirm": lambda: paths("confirm"),
    "path-terms-finalists": lambda: paths("finalists"),
    "path-terms-few": lambda: paths("few"),
    "path-terms-mixed": lambda: paths("mixed"),
    "latency": lambda: bench_tables.latency(results_of("latency")),
    "latency-training": lambda: bench_tables.latency(results_of("latency_training")),
    "latency-memory": lambda: bench_tables.latency(results_of("latency_memory")),
    "throughput": lambda: bench_tables.throughput(results_of("throughput")),
    "int8": lambda: bench_tables.int8(results_of("int8")),
    "joint-score": lambda: bench_tables.joint_score(results_of("joint_score")),
    "density-planar": task_tables.planar,
    "density-images": task_tables.images,
    "density-tabular": task_tables.tabular,
    "kl": lambda: task_tables.divergences("kl/kl.json"),
    "kl-d20": lambda: task_tables.divergences("kl-d20/kl.json"),
    "kl-lag": lambda: task_tables.lags("kl/kl.json"),
    "kl-d20-lag": lambda: task_tables.lags("kl-d20/kl.json"),
    "drift": task_tables.drift,
    "mi-gaussian": lambda: task_tables.information("mi/mi-gaussian.json"),
    "mi-large": lambda: task_tables.information("mi-large/mi-gaussian.json"),
    "mi-perceptron": lambda: task_tables.information(
        "mi-mlp/mi-gaussian.json", "mi-mlp-long/mi-gaussian.json"
    ),
    "mi-rivals": lambda: task_tables.information("mi-rivals/mi-gaussian.json"),
    "bmi": task_tables.benchmark_tasks,
    "mi-pathological": task_tables.pathological,
    "mi-pathological-errors": task_tables.pathological_errors,
    "gradient-snr": lambda: bench_tables.gradient_snr(results_of("gradient_snr")),
}


def render(page: str) -> str:
    r"""Returns a page with its tables generated anew.

    Raises:
        UserError: If a table is not known, not closed, or cannot be made from its record.
    """
    if page.count("<!-- table:") != page.count("<!-- end -->"):
        raise UserError("a table is not closed, expected <!-- end --> after each")
    return BLOCK.sub(lambda m: f"{m[1]}{_table(m['name'])}{m[3]}", page)


def _table(name: str) -> str:
    if name not in TABLES:
        raise UserError(f"{name}: no such table, expected one of {', '.join(TABLES)}")
    try:
        return TABLES[name]()
    # What reading a record raises that is absent, cut short, or another benchmark's.
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{name}: {type(error).__name__}: {one_line(error, 200)}") from error


def main(argv: Sequence[str] | None = None) -> int:
    r"""Rewrites or checks the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail on a difference"
    )
    args = parser.parse_args(argv)

    status = 0
    for path in PAGES:
        old = path.read_text()
        try:
            new = render(old)
        except UserError as error:
            print(f"{path.name}: a table cannot be made: {error}", file=sys.stderr)
            return 1
        if new == old:
            continue
        if args.check:
            print(f"{path.name}: a table does not match the run records", file=sys.stderr)
            status = 1
        else:
            write_text_atomic(path, new)
            print(f"{path.name}: rewritten")
    return status


if __name__ == "__main__":
    sys.exit(main())
