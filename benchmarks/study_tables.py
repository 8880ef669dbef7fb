r"""Tables of studies, in Markdown or LaTeX: means over seeds, or paired differences from a method.

Everything is in percent, but for calibration, which is in nats, and times, which are in seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from records import Run, training_seconds
from scipy import stats
from studies import Study

from ood_osdre.evaluation.tables import HELD

#: A column: its value for a run.
Column: TypeAlias = Callable[[Run], float]
#: The runs of a row, by its title.
Rows: TypeAlias = Mapping[str, Sequence[Run]]


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Returns a table in Markdown, its first column to the left and the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


def latex(table: str) -> str:
    r"""Returns a table in LaTeX, for the `booktabs` package.

    Arguments:
        table: The table in Markdown; what stands below it is left out.
    """

    def line(text: str) -> str:
        cells = " & ".join(cell.strip() for cell in text.strip("|").split("|"))
        cells = cells.replace("±", r"$\pm$").replace("∞", r"$\infty$")
        return cells.replace("³", r"\textsuperscript{3}").replace("_", r"\_").replace("%", r"\%")

    header, rule, *rows = [text for text in table.splitlines() if text.startswith("|")]
    columns = "l" + "r" * (rule.count("|") - 2)
    body = "".join(rf"{line(row)} \\" + "\n" for row in rows)
    return (
        rf"\begin{{tabular}}{{{columns}}}"
        + "\n\\toprule\n"
        + rf"{line(header)} \\"
        + "\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def mean_deviation(values: Sequence[float], digits: int = 1) -> str:
    r"""Returns a mean, with the standard deviation over seeds where there are several."""
    if np.isnan(mean := float(np.mean(values))):
        return "-"
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def validation(key: str) -> Column:
    r"""Returns the column of a validation number."""
    return lambda run: run.value(key)


def metric(row: str, name: str = "AUROC") -> Column:
    r"""Returns the column of a metric of a set or a group's mean."""
    return lambda run: run.metric(row, name)


#: What of a head's calibration is known on images held out of the two sets that it was trained on.
CALIBRATION: dict[str, Column] = {
    f"{title}{suffix}": validation(f"{part}_{key}")
    for part, suffix in (("held_out", ""), ("held_out_noisy", ", noisy"))
    for title, key in (
        ("log E_0[r]", "log_mass_0"),
        ("log E_1[1/r]", "log_mass_1"),
        ("posterior error", "posterior_error"),
    )
}


def rows_of(study: Study, runs: Sequence[Run], group: str | None = None) -> dict[str, list[Run]]:
    r"""Returns the runs of each method and variant that has some, as the study lists them.

    A method's variants follow it, those with fewer evaluations of the network first.

    Arguments:
        study: The study.
        runs: Its runs.
        group: The group of methods, whose name as a prefix is left out; None for all.
    """
    rows: dict[str, list[Run]] = {}
    for name, method in study.methods.items():
        if group is None or method.group == group:
            ways: dict[str, list[Run]] = {
                variant: [] for variant in (method.variant, *method.variants)
            }
            for run in runs:
                if run.method == name and run.variant in ways:
                    ways[run.variant].append(run)
            found = [item for item in ways.items() if item[1]]
            for variant, own in sorted(found, key=lambda item: item[1][0].evaluations):
                title = f"{name}, {variant}" if variant else name
                rows[title.removeprefix(f"{group}: ")] = sorted(own, key=_seed)
    return rows


def _seed(run: Run) -> int:
    return run.seed


def best_first(rows: Rows) -> dict[str, Sequence[Run]]:
    r"""Returns rows by validation AUROC, which a method's variants follow."""

    def quality(runs: Sequence[Run]) -> float:
        method = runs[0].method
        own = [r.value("val_auroc") for row in rows.values() for r in row if r.method == method]
        return -float(np.nanmean(own)) if np.isfinite(own).any() else np.inf

    return dict(sorted(rows.items(), key=lambda item: quality(item[1])))


def means(rows: Rows, columns: Mapping[str, Column], digits: int = 1, head: str = "method") -> str:
    r"""Returns means and standard deviations over seeds.

    Of `parameters` it is the number, of `seconds` the least, which a busy machine lengthens least.

    Arguments:
        rows: The runs of each row.
        columns: The columns by title.
        digits: The digits after the point.
        head: The title of the first column.
    """
    table = [
        [
            title,
            str(len(runs)),
            *(_cell(k, [f(r) for r in runs], digits) for k, f in columns.items()),
        ]
        for title, runs in rows.items()
    ]
    return markdown_rows([head, "seeds", *columns], table)


def _cell(column: str, values: Sequence[float], digits: int) -> str:
    if column == "parameters":
        return f"{values[0]:,.0f}"
    if column == "seconds":
        return f"{min(values):.1f}"
    return mean_deviation(values, digits)


def differences(rows: Rows, columns: Mapping[str, Column]) -> str:
    r"""Returns the means of the first row, then differences of each other one from it.

    Runs of the same seed are paired.

    Arguments:
        rows: The runs of each row.
        columns: The columns by title.
    """
    values = {
        title: {run.seed: [column(run) for column in columns.values()] for run in runs}
        for title, runs in rows.items()
    }
    (base_title, base), *others = values.items()
    averages = np.mean(list(base.values()), axis=0)
    table = [[base_title, str(len(base)), *(f"{mean:.2f}" for mean in averages)]]
    for title, runs in others:
        if seeds := sorted(base.keys() & runs.keys()):
            pairs = np.array([np.subtract(runs[seed], base[seed]) for seed in seeds])
            table.append([title, str(len(seeds)), *(paired(pair.tolist()) for pair in pairs.T)])
    return markdown_rows(["method", "seeds", *columns], table)


def paired(values: Sequence[float]) -> str:
    r"""Returns a mean difference, with its 95 % t-interval from three pairs on."""
    mean, n = float(np.mean(values)), len(values)
    if n < 3:
        return f"{mean:+.2f}"
    half = stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)
    return f"{mean:+.2f} ± {half:.2f}"


def ranking(rows: Rows, columns: Mapping[str, Column], by: Column) -> str:
    r"""Returns means over all settings and seeds, the best first, and differences from the best.

    A difference is a mean over what the row and the best share, with its standard error. The best has
    the largest mean, and the others are in the order of their differences. What sees no reference is
    compared with the best's mean over all of them.

    Arguments:
        rows: The runs of each row.
        columns: The columns by title.
        by: What is compared.
    """
    blind = {k for k, own in rows.items() if all(run.is_blind for run in own)}
    means_of = {k: _by_setting(own, by, k in blind) for k, own in rows.items()}
    best = max(means_of, key=lambda title: np.mean(list(means_of[title].values())))
    gaps = {}
    for title, own in means_of.items():
        other = _by_setting(rows[best], by, title in blind)
        gaps[title] = [own[setting] - other[setting] for setting in own if setting in other]
    table = []
    for title in sorted(rows, key=lambda k: (k != best, -np.mean(gaps[k] or [-np.inf]))):
        found, gap = gaps[title], "-"
        if len(found) > 1:
            error = np.std(found, ddof=1) / np.sqrt(len(found))
            gap = "" if title == best else f"{np.mean(found):+.1f} ± {error:.1f}"
        averages = [f"{np.mean([f(run) for run in rows[title]]):.1f}" for f in columns.values()]
        table.append([title, str(len(rows[title])), *averages, gap])
    return markdown_rows(["method", "runs", *columns, "from the best"], table)


def _by_setting(
    runs: Sequence[Run], by: Column, blind: bool
) -> dict[tuple[str, str | None, int], float]:
    r"""Returns means by benchmark, reference and seed; of the blind, over all references."""
    found: dict[tuple[str, str | None, int], list[float]] = {}
    for run in runs:
        key = run.benchmark, None if blind else run.reference, run.seed
        found.setdefault(key, []).append(by(run))
    return {key: float(np.mean(values)) for key, values in found.items()}


def learning(rows: Rows, loss: str) -> str:
    r"""Returns how far the runs of seed 0 that keep their curve have come.

    Losses are means over thirds of the training, of single batches, with their standard errors; the
    spread is that of the log-ratios of the checkpoint that was selected.

    Arguments:
        rows: The runs of each row.
        loss: The loss's name in the log.
    """
    table = []
    for title, runs in rows.items():
        for run in runs:
            if run.seed or run.curve is None or run.spread is None:
                continue
            thirds = [
                f"{third.mean():.1f} ± {third.std(ddof=1) / len(third) ** 0.5:.1f}"
                for third in np.array_split(run.curve[loss], 3)
            ]
            step = f"{run.validation['step']:,.0f}"
            # Of a solver's variants, the row is the model's.
            table.append(
                [run.method if run.variant else title, *thirds, step, f"{run.spread:.3f}"]
            )
    header = ["loss, first third", "second third", "last third"]
    return markdown_rows(["method", *header, "checkpoint of step", "spread (nats)"], table)


def near_far(runs: Sequence[Run]) -> str:
    r"""Returns mean near (:attr:`records.Run.near`) and far AUROC; a dash without runs."""
    near, far = [run.metric(run.near) for run in runs], [run.metric("farood") for run in runs]
    return f"{mean_deviation(near)} / {mean_deviation(far)}" if runs else "-"


def side_by_side(study: Study, runs: Sequence[Run]) -> str:
    r"""Returns near and far AUROC of each method, in a column for each ID data set and reference.

    What sees no reference has the same numbers with each. Minutes are means over all of a row's runs, of
    all training that a score needs (:func:`records.training_seconds`).

    Arguments:
        study: The study.
        runs: Its runs.
    """
    present = {(run.id, run.reference) for run in runs}
    settings = [(i, r) for i in study.ids for r in study.references if (i, r) in present]
    table = []
    for title, own in rows_of(study, runs).items():
        found = [[run for run in own if run.id == i and run.stands_for(r)] for i, r in settings]
        minutes = np.mean([training_seconds(run, runs) for run in own]) / 60
        counts = sorted({len(cell) for cell in found if cell})
        seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        table.append([title, seeds, *map(near_far, found), f"{minutes:.0f}"])
    header = ["near / far AUROC (%)", "seeds", *(f"{i}, {r}" for i, r in settings), "minutes"]
    return markdown_rows(header, table)


def crossed(study: Study, runs: Sequence[Run]) -> str:
    r"""Returns near and far AUROC of methods that are named `ROW: COLUMN`.

    Arguments:
        study: The study.
        runs: Its runs.
    """
    found, columns = _by_name(study, runs)
    table = [[title, *(near_far(row.get(k, [])) for k in columns)] for title, row in found.items()]
    return markdown_rows(["near / far AUROC (%)", *columns], table)


def crossed_differences(study: Study, runs: Sequence[Run], by: Column) -> str:
    r"""Returns means of methods that are named `ROW: COLUMN`, and differences of the first column.

    A difference from another column is a mean over pairs of the same benchmark, reference and seed.

    Arguments:
        study: The study.
        runs: Its runs.
        by: What is compared.
    """
    found, columns = _by_name(study, runs)
    first, *others = columns
    table = []
    for title, row in found.items():
        values = {k: _by_setting(row[k], by, blind=False) for k in columns}
        cells = [f"{np.mean(list(values[k].values())):.1f}" for k in columns]
        for other in others:
            gaps = [values[first][key] - value for key, value in values[other].items()]
            cells.append(paired(gaps))
        table.append([title, str(len(row[first])), *cells])
    return markdown_rows(["", "pairs", *columns, *(f"{first}, less {k}" for k in others)], table)


def _by_name(
    study: Study, runs: Sequence[Run]
) -> tuple[dict[str, dict[str, list[Run]]], list[str]]:
    r"""Returns the runs of methods that are named `ROW: COLUMN`, and all columns."""
    found: dict[str, dict[str, list[Run]]] = {}
    for title, own in rows_of(study, runs).items():
        row, _, column = title.rpartition(": ")
        if row:
            found.setdefault(row, {})[column] = own
    return found, list(dict.fromkeys(column for row in found.values() for column in row))


def by_reference(studies: Sequence[tuple[Study, Sequence[Run]]]) -> str:
    r"""Returns near and far AUROC with each reference, in a column for each method.

    Arguments:
        studies: Studies of the same references, with their runs.
    """
    columns: dict[str, list[Run]] = {}
    for study, runs in studies:
        columns |= rows_of(study, runs)
    references = [Path(str(r)).stem for r in studies[0][0].references]
    table = [
        [name, *(near_far([r for r in own if r.reference == name]) for own in columns.values())]
        for name in references
    ]
    return markdown_rows(["near / far AUROC (%)", *columns], table)


def overview(study: Study, runs: Sequence[Run], name: str = "AUROC") -> str:
    r"""Returns a metric of every set and mean, a table for each ID data set, benchmark and reference.

    With AUROC stand validation, accuracy, times and the calibration of heads. Training times are those
    of :func:`records.training_seconds`.

    Arguments:
        study: The study.
        runs: Its runs.
        name: The metric.
    """
    # In the order of the study's references, whichever run ended first.
    order = {Path(str(r)).stem: i for i, r in enumerate(study.references)}
    ids = list(dict.fromkeys(run.id for run in runs))
    settings = sorted(
        dict.fromkeys((run.id, run.benchmark, run.reference) for run in runs),
        key=lambda setting: (ids.index(setting[0]), order.get(setting[2] or "", 0)),
    )
    by_path = {Path(r).stem for r in study.references if r is not None and Path(r).suffix}
    texts = []
    for setting in settings:
        own = [run for run in runs if (run.id, run.benchmark, run.reference) == setting]
        columns: dict[str, Column] = {
            row: metric(row, name) for row in dict.fromkeys(k for r in own for k in r.metrics)
        }
        what = f"{name} in percent: {setting[0]}, {setting[1]}, reference {setting[2]}"
        if HELD in columns and setting[2] in by_path:
            what += ", given by path: nearood counts near sets whole, whatever it holds of their "
            what += f"classes; {HELD} the parts that no reference of the manifest holds"
        if name == "AUROC":
            columns = {"val AUROC": validation("val_auroc"), **columns}
            columns |= {"accuracy": lambda run: np.nan if run.accuracy is None else run.accuracy}
            columns |= {
                "trained in (s)": partial(training_seconds, runs=runs),
                "seconds": lambda run: run.score_seconds,
            }
        texts.append(f"{what}\n\n{means(rows_of(study, own), columns)}")
        heads = rows_of(study, [run for run in own if "held_out_log_mass_0" in run.validation])
        if heads and name == "AUROC":
            what = (
                "Calibration on held-out images of the same two sets, at the head's rank, in nats"
            )
            what += " (posterior error in percent); noisy: as the path dequantises its ends"
            texts.append(f"{what}\n\n{means(heads, CALIBRATION, digits=2)}")
    return "\n".join(texts)
