r"""Writes the tables and figures of the pages from the committed records.

    python benchmarks/report.py                rewrites them
    python benchmarks/report.py --check        fails if one does not match (CI runs this)
    python benchmarks/report.py --latex NAME   prints a table in LaTeX

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between is generated, from the lines
of a study (`records/STUDY.jsonl`) or the record of a single benchmark (`records/NAME.json`). The
figures are those of `figures.py`.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import bench_tables
import figures
import information
import numpy as np
import study_tables
import task_tables
from records import METRICS, RECORDS, Run, read_runs, record_of
from studies import Study, load_study
from study_tables import Column, metric, validation

from ood_osdre.errors import Parser, UserError, exit_status, one_line
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.evaluation.tables import HELD
from ood_osdre.files import write_text_atomic

HERE = Path(__file__).parent
RESULTS = HERE / "results"
BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Whatever somebody may have meant as the start of a table.
MARK = re.compile(r"<!--\s*(table|end)\b", re.IGNORECASE)

VALIDATION: dict[str, Column] = {
    "val AUROC": validation("val_auroc"),
    "val near": validation("val_near"),
    "val far": validation("val_far"),
}
TEST = {"near (test)": metric("nearood"), "far (test)": metric("farood")}
OBJECTIVES = {
    **VALIDATION, **TEST, "mnist": metric("mnist"), "fashion_mnist": metric("fashion_mnist"),
}  # fmt: skip
METHODS: dict[str, Column] = {
    "val AUROC": validation("val_auroc"),
    "near AUROC": metric("nearood"),
    "far AUROC": metric("farood"),
    "all AUROC": metric("all"),
    "near FPR@95": metric("nearood", "FPR@95"),
    "far FPR@95": metric("farood", "FPR@95"),
    "all AUPR_IN": metric("all", "AUPR_IN"),
    "all AUPR_OUT": metric("all", "AUPR_OUT"),
    "parameters": lambda run: run.parameters,
    "seconds": lambda run: run.score_seconds,
}
MIRRORED = {
    "near_same": "near_same", "near_other": "near_other", "near": "nearood", "far": "farood",
}  # fmt: skip
PATH_TERMS = {
    "val AUROC": validation("val_auroc"),
    "near": validation("val_near"),
    "far": validation("val_far"),
    "log E_0[r]": validation("val_log_mass_0"),
    "log E_1[1/r]": validation("val_log_mass_1"),
    "posterior error": validation("val_posterior_error"),
}


def pages() -> list[Path]:
    r"""Returns the pages whose tables are checked.

    Those of theory.md are no measurements and differ between machines where they reach the rounding
    limit; `tests/test_approximation.py` holds them to their script.
    """
    docs = HERE.parent / "docs"
    found = [*sorted(docs.glob("*.md")), *sorted(docs.glob("experiments/*.md"))]
    found = [page for page in found if page.name != "theory.md"]
    return [HERE / "RESULTS.md", HERE.parent / "README.md", *found]


def run_table(name: str) -> str:
    r"""Returns the metrics of one run of the main command, from its scores."""
    scores = read_scores(RESULTS / name / "scores.npz")
    text = bench_tables.run(record_of(RESULTS / name / "run.json"), scores, "title")
    return "\n".join(text.splitlines()[2:]) + "\n"


def results_of(name: str) -> dict[str, Any]:
    r"""Returns the results of a single benchmark's record."""
    results: dict[str, Any] = record_of(RECORDS / f"{name}.json")["results"]
    return results


def photographs(network: str) -> str:
    r"""Returns the speeds from files to scores of a network on photographs."""
    return bench_tables.throughput(results_of(f"throughput_{network}"), bench_tables.FROM_FILES)


def rows(study: str, group: str | None = None) -> dict[str, list[Run]]:
    r"""Returns the runs of a study by method and variant, see :func:`study_tables.rows_of`."""
    return study_tables.rows_of(load_study(study), read_runs(RECORDS / f"{study}.jsonl"), group)


def ranked(study: str, columns: Mapping[str, Column], group: str | None = None) -> str:
    r"""Returns the means of a study's methods, best validation first.

    Arguments:
        study: The name of the study.
        columns: The columns.
        group: The group of methods; None for all.
    """
    return study_tables.means(study_tables.best_first(rows(study, group)), columns)


def near_and_far(run: Run) -> float:
    r"""Returns what the mirrored studies compare."""
    return (run.metric("nearood") + run.metric("farood")) / 2


def chosen(study: str) -> str:
    r"""Returns the methods of a mirrored study by what its protocol compares.

    Those are shown, too, that were taken out of the study and of the code for what they showed here.
    """
    columns = {title: metric(name) for title, name in MIRRORED.items()}
    found: dict[str, list[Run]] = {}
    for run in read_runs(RECORDS / f"{study}.jsonl"):
        found.setdefault(", ".join(filter(None, [run.method, run.variant])), []).append(run)
    return study_tables.ranking(found, {**columns, "mean": near_and_far}, near_and_far)


def sources(
    study: str,
    methods: Sequence[tuple[str, str]],
    references: Sequence[str],
    columns: Mapping[str, tuple[str | None, str]],
) -> str:
    r"""Returns what a reference's source does, by method and variant.

    Arguments:
        study: The name of the study.
        methods: The methods, each with a variant.
        references: The references.
        columns: For each title the ID data set, None for any, and the set whose AUROC is shown.
    """
    runs, table = read_runs(RECORDS / f"{study}.jsonl"), []
    for method, variant in methods:
        for reference in references:
            key = method, variant, reference
            own = [run for run in runs if (run.method, run.variant, run.reference) == key]
            title = f"{', '.join(filter(None, [method, variant]))}: {reference}"
            found = [
                [metric(name)(run) for run in own if id_name in (None, run.id)]
                for id_name, name in columns.values()
            ]
            table.append([title, *(f"{np.mean(numbers):.1f}" for numbers in found)])
    return study_tables.markdown_rows(["score: reference", *columns], table)


def accuracies() -> str:
    r"""Returns the accuracy of classifiers on held-out ID training images."""
    lines = map(json.loads, (RECORDS / "held_out_accuracy.jsonl").read_text().splitlines())
    table = [
        [
            run["id"],
            f"{run['config']['network']['width']:g}",
            f"{run['steps']:,}",
            f"{run['accuracy']:.1f}",
        ]
        for run in lines
    ]
    return study_tables.markdown_rows(["ID", "width", "steps", "accuracy (%)"], table)


def path_terms(stage: str) -> str:
    r"""Returns the table of a stage of the question what path terms add."""
    return study_tables.differences(rows("pack_path_terms", stage), PATH_TERMS)


def of_study(
    name: str, table: Callable[[Study, Sequence[Run]], str], id_name: str | None = None
) -> str:
    r"""Returns a table of a study, or of one of its ID data sets, or the command that runs it."""
    runs = [run for run in read_runs(RECORDS / f"{name}.jsonl") if id_name in (None, run.id)]
    return table(load_study(name), runs) if runs else not_run(name)


def not_run(study: str) -> str:
    r"""Returns what stands in the place of a study's table until it is run."""
    return f"Not run yet: `python benchmarks/study.py {study} --data-root DIR`.\n"


def paths(study: Study, runs: Sequence[Run]) -> str:
    r"""Returns near and far AUROC and times of one-step and solver-based heads."""
    columns = {
        "near": metric(HELD), "far": metric("farood"), "head trained in (s)": lambda run: run.validation.get("seconds", np.nan),
        "seconds": METHODS["seconds"],
    }  # fmt: skip
    return study_tables.means(study_tables.rows_of(study, runs), columns)


def shares() -> str:
    r"""Returns what the share of the reference that is of the ID data's own source decides."""
    found = [
        (load_study(name), read_runs(RECORDS / f"{name}.jsonl"))
        for name in ("share_pixels", "share_heads")
    ]
    any_run = any(runs for _, runs in found)
    return study_tables.by_reference(found) if any_run else not_run("share_pixels")


def outliers(tables: str) -> str:
    r"""Returns the AUROCs of outlier detectors on the made or the shipped tables."""
    return bench_tables.outliers(results_of(f"outliers_{tables}"))


TABLES: dict[str, Callable[[], str]] = {
    "study": lambda: ranked("pack_objectives", OBJECTIVES),
    "short": lambda: ranked("pack_short", OBJECTIVES),
    "finalists": lambda: ranked("pack_longer", OBJECTIVES),
    "cifar10-pack": lambda: run_table("cifar10_pack_cpu"),
    "cifar10-pack-long": lambda: run_table("cifar10_pack_long"),
    "compare-ratio": lambda: ranked("pack_methods", METHODS, "ratio"),
    "compare-learning": lambda: study_tables.learning(
        rows("pack_methods", "ratio"), "loss_time_score"
    ),
    "compare-paper-style": lambda: ranked("pack_methods", METHODS, "paper-style"),
    "compare-class": lambda: ranked("pack_methods", METHODS, "class"),
    "feature-ratio": lambda: bench_tables.feature_ratio(results_of("feature_ratio")),
    "digits": lambda: run_table("digits"),
    "places100": lambda: run_table("places100"),
    "ablations": lambda: study_tables.means(
        rows("digits_options"), {**VALIDATION, **TEST}, digits=2, head="change"
    ),
    **{
        f"path-terms-{stage}": partial(path_terms, stage)
        for stage in ("screen", "confirm", "finalists", "few", "mixed", "scarce")
    },
    "latency-short": lambda: bench_tables.latency(
        {k: v for k, v in results_of("latency").items() if "log-ratio" in k or "NFE" in k}
    ),
    "latency": lambda: bench_tables.latency(results_of("latency")),
    "latency-training": lambda: bench_tables.latency(results_of("latency_training")),
    "training-step": lambda: bench_tables.latency(results_of("training_step"), "the bare loop's"),
    "latency-memory": lambda: bench_tables.latency(results_of("latency_memory")),
    "latency-deployed": lambda: bench_tables.deployed(results_of("latency_deployed")),
    "memory-224": lambda: bench_tables.memory(results_of("memory_224")),
    "throughput": lambda: bench_tables.throughput(results_of("throughput")),
    **{
        f"throughput-{name.replace('_', '-')}": partial(photographs, name)
        for name in ("resnet18", "mobilenet_v3_small")
    },
    "int8": lambda: bench_tables.int8(results_of("int8")),
    "joint-score": lambda: bench_tables.joint_score(results_of("joint_score")),
    **{f"outliers-{tables}": partial(outliers, tables) for tables in ("made", "shipped")},
    "density-planar": task_tables.planar,
    "density-images": task_tables.images,
    "density-tabular": task_tables.tabular,
    "kl": lambda: task_tables.divergences("kl"),
    "kl-d20": lambda: task_tables.divergences("kl_d20"),
    "kl-lag": lambda: task_tables.lags("kl"),
    "kl-d20-lag": lambda: task_tables.lags("kl_d20"),
    "drift": task_tables.drift,
    "mi-gaussian": lambda: task_tables.information("mi_gaussian"),
    "mi-large": lambda: task_tables.information("mi_large"),
    "mi-perceptron": lambda: task_tables.information("mi_mlp", "mi_mlp_long"),
    "mi-rivals": lambda: task_tables.information("mi_rivals"),
    "bmi": task_tables.benchmark_tasks,
    "mi-pathological": task_tables.pathological,
    "mi-pathological-errors": task_tables.pathological_errors,
    "information": lambda: (
        information.report(information.read([RECORDS / "information.jsonl"])) + "\n"
    ),
    "gradient-snr": lambda: bench_tables.gradient_snr(results_of("gradient_snr")),
    "mirror-pixels": lambda: chosen("mirror_pixels"),
    "mirror-sources": lambda: sources(
        "mirror_heads",
        [("pixels", ""), ("pixels", "+ energy"), ("time score matching", "")],
        ["reference_other", "reference_mixed"],
        {title: (None, name) for title, name in MIRRORED.items()},
    ),
    "main-sources": lambda: sources(
        "main",
        [
            ("OS-DRE, pixels", ""),
            ("OS-DRE, pixels", "+ energy"),
            ("OS-DRE, representation, time score matching", ""),
        ],
        ["tin_reference", "tiny_reference"],
        {
            "cifar10: cifar100_held": ("cifar10", "cifar100_held"),
            "cifar10: tin": ("cifar10", "tin"),
            "cifar100: cifar10_held": ("cifar100", "cifar10_held"),
            "cifar100: tin": ("cifar100", "tin"),
        },
    ),
    "mirror-heads": lambda: chosen("mirror_heads"),
    "mirror-held-out": lambda: of_study(
        "mirror_held_out", partial(study_tables.crossed_differences, by=near_and_far)
    ),
    "held-out-accuracy": accuracies,
    "transfer": lambda: bench_tables.transfer(results_of("transfer")),
    # Filled by their studies.
    "paths-heads": lambda: of_study("paths_heads", paths),
    "paths-heads-seconds": lambda: of_study("paths_heads_seconds", paths),
    "paths-heads-sets": lambda: of_study("paths_heads", study_tables.overview),
    "shares": shares,
    "share-heads-sets": lambda: of_study("share_heads", study_tables.overview),
    "head-factors": lambda: of_study("head_factors", study_tables.crossed),
    "head-factors-sets": lambda: of_study("head_factors", study_tables.overview),
    "head-options": lambda: of_study("head_options", study_tables.crossed),
    "main": lambda: of_study("main", study_tables.side_by_side),
    **{
        f"main-{id_name}-{name.lower().replace('@', '').replace('_', '-')}": partial(
            of_study, "main", partial(study_tables.overview, name=name), id_name
        )
        for id_name in ("cifar10", "cifar100")
        for name in METRICS[:-1]
    },
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
    for path in pages():
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
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, fail on a difference"
    )
    parser.add_argument("--latex", metavar="NAME", help="print this table")
    args = parser.parse_args(argv)
    if args.latex:
        return exit_status(lambda: print(study_tables.latex(_table(args.latex)), end="") or 0)
    return exit_status(lambda: run(change=not args.check))


def run(change: bool) -> int:
    r"""Rewrites or checks pages and figures."""
    differing = check_pages(change) + check_figures(change)
    return 1 if differing and not change else 0


if __name__ == "__main__":
    sys.exit(main())
