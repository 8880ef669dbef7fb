r"""The tables and figures of a comparison, from its run records.

A comparison is a folder METHOD/seed-N of `run.json` and `metrics.csv`, with a method's variants in
folders below. Nothing here trains or scores.
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from grid import slug
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from methods import METHODS
from runs import Run, markdown_rows, mean_deviation, read_run

from ood_osdre.evaluation.plots import STROKES, STYLE, density_grid
from ood_osdre.evaluation.scores import ROLES, read_scores
from ood_osdre.files import atomic_path, write_text_atomic

METRICS = ("AUROC", "FPR@95", "AUPR_IN", "AUPR_OUT")
MEANS = {"nearood": "near", "farood": "far", "all": "all"}
# Of the paper's table, what fits a page; the CSV file has every column.
SHOWN = [
    "val AUROC", "near AUROC", "far AUROC", "all AUROC", "near FPR@95", "far FPR@95",
    "all AUPR_IN", "all AUPR_OUT", "parameters", "seconds",
]  # fmt: skip


def collect(folder: Path) -> pd.DataFrame:
    r"""Returns one row for each method, variant and seed, in percent and seconds.

    Validation, by which the checkpoint was selected, is that of the method's own score; a variant
    has none.

    Arguments:
        folder: The folder of the comparison.

    Raises:
        UserError: If a run is damaged.
    """
    rows = []
    for name, method in METHODS.items():
        for run in sorted(path.parent for path in (folder / slug(name)).glob("seed-*/run.json")):
            own = read_run(run)
            # Of a solver every row says its number of evaluations.
            solver = any(variant.startswith("NFE") for variant in method.variants)
            variant = f"NFE {_evaluations(own):.0f}" if solver else ""
            scored = [(variant, own)] + [
                (variant, read_run(run / slug(variant)))
                for variant in method.variants
                if (run / slug(variant) / "run.json").is_file()
            ]
            for variant, again in sorted(scored, key=lambda pair: _evaluations(pair[1])):
                row = {"method": name, "variant": variant, "group": method.group}
                rows.append(row | _values(again))
    return pd.DataFrame(rows)


def _evaluations(run: Run) -> float:
    r"""Returns how many times the network was evaluated for an image."""
    config = run.record["config"]
    if config.get("estimator") != "time_conditioned":
        return 1.0
    asked = config["evaluation"]["evaluations"]
    return float(run.record.get("results", {}).get("evaluations", asked))


def _values(run: Run) -> dict[str, float]:
    values = {"seed": float(run.seed), "val AUROC": run.validation("val_auroc")}
    for row, title in MEANS.items():
        values |= {f"{title} {metric}": run.metric(row, metric) for metric in METRICS}
    ends = run.metrics.loc[run.metrics["role"] == "id"].iloc[0]
    values["parameters"] = float(ends["parameters"])
    values["seconds"] = float(ends["seconds"])
    values["evaluations"] = _evaluations(run)
    return values


def summary(frame: pd.DataFrame, group: str) -> pd.DataFrame:
    r"""Returns the table of a group: a row for each method, best validation first.

    A method's variants follow it.

    Arguments:
        frame: The rows of :func:`collect`.
        group: The group.

    Returns:
        Texts: the mean over seeds, and the standard deviation where there are several; of the
        seconds the least, which a busy machine lengthens least.
    """
    frame = frame[frame["group"] == group]
    order = frame.groupby("method")["val AUROC"].mean().sort_values(ascending=False, kind="stable")
    rows = []
    for method in order.index:
        own = frame[frame["method"] == method]
        for variant, runs in own.groupby("variant", sort=False):
            title = f"{method}, {variant}" if variant else method
            cells = {column: _text(column, runs[column]) for column in SHOWN}
            rows.append({"method": title, "seeds": str(len(runs)), **cells})
    return pd.DataFrame(rows)


def _text(column: str, values: pd.Series) -> str:
    if column == "parameters":
        return f"{values.iloc[0]:,.0f}"
    if column == "seconds":
        return f"{values.min():.1f}"
    return mean_deviation(values.tolist())


def learning(folder: Path) -> str:
    r"""Returns how far the runs of time score matching that keep their log have come.

    Their loss is, up to its noise, the squared error less that of a score of 0; the logged ones are
    of single batches. The spread of the log-ratios is that of the checkpoint that was selected.

    Arguments:
        folder: The folder of the comparison.
    """
    rows = []
    for name in METHODS:
        run = folder / slug(name) / "seed-0"
        if not ((run / "log.jsonl").is_file() and (run / "scores.npz").is_file()):
            continue
        log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses = [entry["loss_time_score"] for entry in log if "loss_time_score" in entry]
        if len(losses) < 6 or losses[-1] != log[-1]["loss_total"]:
            continue
        selected = read_run(run).record["validation"]["best"]["step"]
        scores = read_scores(run / "scores.npz")
        sets = [s.score for role in ROLES for s in scores.of(role).values()]
        thirds = [
            f"{third.mean():.1f} ± {third.std(ddof=1) / len(third) ** 0.5:.1f}"
            for third in np.array_split(losses, 3)
        ]
        rows.append([name, *thirds, f"{selected:,.0f}", f"{np.concatenate(sets).std():.3f}"])
    header = ["loss, first third", "second third", "last third"]
    return markdown_rows(["method", *header, "checkpoint of step", "spread (nats)"], rows)


def markdown(table: pd.DataFrame) -> str:
    r"""Returns a table in Markdown."""
    return markdown_rows(list(table.columns), table.to_numpy().tolist())


def latex(table: pd.DataFrame) -> str:
    r"""Returns a table in LaTeX, for the `booktabs` package."""

    def line(cells: list[str]) -> str:
        text = " & ".join(cells).replace("±", r"$\pm$").replace("∞", r"$\infty$")
        return text.replace("³", r"\textsuperscript{3}").replace("_", r"\_").replace("%", r"\%")

    body = [rf"{line(row)} \\" for row in table.to_numpy().tolist()]
    columns = "l" + "r" * (len(table.columns) - 1)
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            rf"{line(list(table.columns))} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def nfe_plot(frame: pd.DataFrame, path: Path) -> None:
    r"""Draws quality against network evaluations and against seconds.

    Fixed rules of the solver-based baselines are curves, their adaptive solver a diamond, the one-step
    and direct ratios of the same group points at one evaluation.

    Arguments:
        frame: The rows of :func:`collect`.
        path: The image to write.
    """
    frame = frame[frame["group"] == "ratio"]
    solvers = [name for name in frame["method"].unique() if METHODS[name].variants]
    marks = []  # rows, marker, dashes, colour, label
    for i, name in enumerate(solvers):
        own, (color, dashes) = frame[frame["method"] == name], STROKES[i]
        fixed = own["variant"].str.startswith("NFE")
        marks.append((own[fixed], "o", dashes, color, name))
        if not fixed.all():
            marks.append((own[~fixed], "D", "none", color, f"{name}, adaptive"))
    others = frame[~frame["method"].isin(solvers)].groupby("method", sort=False)
    for i, (name, runs) in enumerate(others):
        marker = "*" if str(name).startswith("OS-DRE") else "x"
        marks.append((runs, marker, "none", STROKES[i % len(STROKES)][0], str(name)))
    labels = {
        "evaluations": "network evaluations an image",
        "seconds": "least seconds to score the test sets",
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 6.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2, sharex="col")
        for row, metric in zip(axes, ("near AUROC", "far AUROC"), strict=True):
            for ax, (column, label) in zip(row, labels.items(), strict=True):
                for runs, marker, dashes, color, title in marks:
                    variants = runs.groupby("variant", sort=False)
                    x = variants[column].min()
                    y = variants[metric].mean()
                    ax.plot(x, y, marker=marker, ls=dashes, color=color, label=title)
                ax.set_xscale("log")
                ax.xaxis.set_minor_formatter(NullFormatter())
                ax.xaxis.set_major_formatter("{x:g}")
                ax.set_ylabel(f"{metric} (%)")
                if metric == "far AUROC":
                    ax.set_xlabel(label)
        handles, titles = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, titles, loc="outside lower center", ncols=3)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=120)


def densities(folder: Path, path: Path) -> None:
    r"""Draws the densities of the scores of every method, of the first seed that is kept.

    Arguments:
        folder: The folder of the comparison.
        path: The image to write.
    """
    scored = {
        name: read_scores(files[0])
        for name in METHODS
        if (files := sorted((folder / slug(name)).glob("seed-*/scores.npz")))
    }
    if scored:
        density_grid(path, scored)


def write(folder: Path) -> None:
    r"""Writes the tables of every group, the NFE plot and the density grid of a comparison."""
    frame = collect(folder)
    if frame.empty:
        return
    tables = {group: summary(frame, group) for group in frame["group"].unique()}
    with atomic_path(folder / "runs.csv") as temporary:
        frame.to_csv(temporary, index=False, float_format="%.4f")
    for kind, render in (("md", markdown), ("tex", latex)):
        text = "\n".join(f"{render(table)}" for table in tables.values())
        write_text_atomic(folder / f"table.{kind}", text)
    nfe_plot(frame, folder / "nfe.png")
    densities(folder, folder / "densities.png")
