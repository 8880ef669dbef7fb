r"""The tables and figures of a comparison, from its run records.

A comparison is a folder METHOD/seed-N of `run.json` and `metrics.csv`, with a method's variants in
folders below. Nothing here trains or scores.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from grid import record_of, slug
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from methods import METHODS

from ood_osdre.files import atomic_path, write_text_atomic
from ood_osdre.plots import STROKES, STYLE, density_grid
from ood_osdre.scores import read_scores

METRICS = ("AUROC", "FPR@95", "AUPR_IN", "AUPR_OUT")
MEANS = {"nearood": "near", "farood": "far", "all": "all"}
# Of the paper's table, what fits a page; the CSV file has every column.
SHOWN = [
    "val AUROC", "near AUROC", "far AUROC", "all AUROC", "near FPR@95", "far FPR@95",
    "all AUPR_IN", "all AUPR_OUT", "parameters", "seconds",
]  # fmt: skip


def collect(folder: Path) -> pd.DataFrame:
    r"""Returns one row for each method, variant and seed, in percent and seconds.

    Arguments:
        folder: The folder of the comparison.
    """
    rows = []
    for name, method in METHODS.items():
        for run in sorted((folder / slug(name)).glob("seed-*")):
            own = _read(run)
            # Of a solver every row says its number of evaluations.
            solver = any(variant.startswith("NFE") for variant in method.variants)
            variant = f"NFE {own['evaluations']:.0f}" if solver else ""
            rows.append({"method": name, "variant": variant, "group": method.group, **own})
            for variant in method.variants:
                if (again := run / slug(variant)).is_dir():
                    row = {"method": name, "variant": variant, "group": method.group}
                    rows.append(row | _read(again) | {"val AUROC": rows[-1]["val AUROC"]})
    return pd.DataFrame(rows)


def _read(run: Path) -> dict[str, float]:
    record = record_of(run)
    best = record["validation"].get("best", {})
    table = pd.read_csv(run / "metrics.csv").set_index("set")
    values = {"seed": record["seed"], "val AUROC": 100 * best.get("val_auroc", np.nan)}
    for row, title in MEANS.items():
        values |= {f"{title} {metric}": float(table.loc[row, metric]) for metric in METRICS}
    ends = table.loc[table["role"] == "id"].iloc[0]
    values["parameters"] = float(ends["parameters"])
    values["seconds"] = float(ends["seconds"])
    asked = record["config"]["evaluation"]["evaluations"]
    values["evaluations"] = float(record.get("results", {}).get("evaluations", asked))
    return values


def summary(frame: pd.DataFrame, group: str) -> pd.DataFrame:
    r"""Returns the table of a group: a row for each method, best validation first.

    Arguments:
        frame: The rows of :func:`collect`.
        group: The group.

    Returns:
        Texts: the mean over seeds, and the standard deviation where there are several.
    """
    frame = frame[frame["group"] == group]
    titles = frame["method"] + np.where(frame["variant"] == "", "", ", " + frame["variant"])
    grouped = frame.assign(method=titles).groupby("method", sort=False)
    order = grouped["val AUROC"].mean().sort_values(ascending=False, kind="stable").index
    rows = [
        {"method": title, "seeds": str(len(runs)), **{c: _text(c, runs[c]) for c in SHOWN}}
        for title in order
        if (runs := grouped.get_group(title)) is not None
    ]
    return pd.DataFrame(rows)


def _text(column: str, values: pd.Series) -> str:
    if column == "parameters":
        return f"{values.iloc[0]:,.0f}"
    mean = values.mean()
    if np.isnan(mean):
        return "-"
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.1f} ± {values.std(ddof=1):.1f}"


def markdown(table: pd.DataFrame) -> str:
    r"""Returns a table in Markdown."""
    return markdown_rows(list(table.columns), table.to_numpy().tolist())


def markdown_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Returns a table in Markdown, its first column to the left and the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, rule, *rows))


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

    The solver-based rivals are curves, the one-step and direct ratios of the same group points.

    Arguments:
        frame: The rows of :func:`collect`.
        path: The image to write.
    """
    frame = frame[frame["group"] == "ratio"]
    solvers = [name for name in frame["method"].unique() if METHODS[name].variants]
    axes_of: list[tuple[str, str, Callable[[pd.DataFrame], pd.Series]]] = [
        ("evaluations", "network evaluations an image", lambda f: f["evaluations"]),
        ("seconds", "seconds to score the test sets", lambda f: f["seconds"]),
    ]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 6.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 2, sharex="col")
        for row, metric in zip(axes, ("near AUROC", "far AUROC"), strict=True):
            for ax, (_, label, x) in zip(row, axes_of, strict=True):
                for i, name in enumerate(solvers):
                    runs = (
                        frame[frame["method"] == name]
                        .groupby("evaluations")
                        .mean(numeric_only=True)
                        .reset_index()
                    )
                    color, dashes = STROKES[i]
                    ax.plot(x(runs), runs[metric], "o", color=color, ls=dashes, label=name)
                others = frame[~frame["method"].isin(solvers)].assign(evaluations=1.0)
                for i, (name, runs) in enumerate(others.groupby("method", sort=False)):
                    ours = str(name).startswith("OS-DRE")
                    ax.plot(
                        x(runs).mean(), runs[metric].mean(), "*" if ours else "x",
                        color=STROKES[i % len(STROKES)][0], label=str(name),
                    )  # fmt: skip
                ax.set_xscale("log")
                ax.xaxis.set_major_formatter("{x:g}")
                ax.set_ylabel(f"{metric} (%)")
                if metric == "far AUROC":
                    ax.set_xlabel(label)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, dpi=120)


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
    scored = {
        name: read_scores(path)
        for name in METHODS
        if (path := folder / slug(name) / "seed-0" / "scores.npz").is_file()
    }
    if scored:
        density_grid(folder / "densities.png", scored)
