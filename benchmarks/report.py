r"""Writes the tables and figures of the pages from the committed run records.

    python benchmarks/report.py          rewrites them
    python benchmarks/report.py --check  fails if one does not match (CI runs this)

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between is generated. The
figures are those of `figures.py`.
"""

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ablations
import bench_tables
import comparison
import figures
import path_terms
import study
import task_tables
from runs import read_run, record_of

from ood_osdre.errors import UserError, exit_status, one_line
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.files import write_text_atomic

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (
    HERE / "RESULTS.md",
    *(HERE.parent / name for name in ("README.md", "docs/density.md", "docs/divergences.md")),
)
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Whatever somebody may have meant as the start of a table.
MARK = re.compile(r"<!--\s*(table|end)\b", re.IGNORECASE)


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


def finalists() -> str:
    r"""Returns the table of the longer runs."""
    default = {"end-point + class + broad": [read_run(RESULTS / "finalists" / "default")]}
    return study.table(study.read(RESULTS / "finalists") | default)


def short() -> str:
    r"""Returns the table of runs that are hardly trained."""
    return study.table(
        {
            f"{title}, {steps} step{'s' if steps > 1 else ''}": runs
            for steps in (1, 60)
            for title, runs in study.read(RESULTS / "short" / str(steps)).items()
        }
    )


def paths(stage: str) -> str:
    r"""Returns the table of a stage of the question what path terms add."""
    return path_terms.table(path_terms.RESULTS / stage)


TABLES: dict[str, Callable[[], str]] = {
    "study": lambda: study.table(study.read(study.RESULTS)),
    "short": short,
    "finalists": finalists,
    "cifar10-pack": lambda: run_table("cifar10_pack_cpu"),
    "cifar10-pack-long": lambda: run_table("cifar10_pack_long"),
    "compare-ratio": lambda: compared("ratio"),
    "compare-learning": lambda: comparison.learning(RESULTS / "compare"),
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
    "path-terms-scarce": lambda: paths("scarce"),
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
    if len(MARK.findall(page)) != 2 * len(BLOCK.findall(page)):
        raise UserError(
            "a table is not closed or misspelt, expected <!-- table: NAME --> and <!-- end -->"
        )
    return BLOCK.sub(lambda m: f"{m[1]}{_table(m['name'])}{m[3]}", page)


def _table(name: str) -> str:
    if name not in TABLES:
        raise UserError(f"{name}: no such table, expected one of {', '.join(TABLES)}")
    with _told(name):
        return TABLES[name]()


@contextmanager
def _told(name: str) -> Iterator[None]:
    r"""Tells what cannot be made, whatever a damaged record, or another benchmark's, raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise UserError(f"{name}: {type(error).__name__}: {one_line(error, 200)}") from error


def check_pages(change: bool) -> int:
    r"""Compares the pages with the records; returns how many differ.

    Arguments:
        change: Whether to write those that do.
    """
    differing = 0
    for path in PAGES:
        with _told(path.name):
            old = path.read_text()
            new = render(old)
        if new != old:
            differing += 1
            if change:
                write_text_atomic(path, new)
            _tell(path.name, "a table", change)
    return differing


def check_figures(change: bool) -> int:
    r"""Compares the figures with the records; returns how many differ.

    Arguments:
        change: Whether to write those that do.
    """
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "drawn.png"
        for name in figures.FIGURES:
            with _told(name):
                figures.draw(name, drawn)
                same = figures.alike(drawn, RESULTS / name)
            if not same:
                differing += 1
                if change:
                    shutil.copyfile(drawn, RESULTS / name)
                _tell(name, "the figure", change)
    return differing


def _tell(name: str, what: str, change: bool) -> None:
    if change:
        print(f"{name}: rewritten")
    else:
        print(f"{name}: {what} does not match the run records", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Rewrites or checks the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail on a difference"
    )
    args = parser.parse_args(argv)

    return exit_status(lambda: run(change=not args.check))


def run(change: bool) -> int:
    r"""Rewrites or checks pages and figures."""
    differing = check_pages(change) + check_figures(change)
    return 1 if differing and not change else 0


if __name__ == "__main__":
    sys.exit(main())
