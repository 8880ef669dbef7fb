r"""The tables of single benchmarks, each a function of its record's results."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from study_tables import markdown_rows

from ood_osdre.evaluation.scores import Scores
from ood_osdre.evaluation.tables import MetricsTable

# The neighbours of the nearest-neighbour score.
NEIGHBOURS = 50
HEADS = {
    "msp": "MSP",
    "energy": "Energy",
    "knn": f"KNN (k = {NEIGHBOURS})",
    "ratio_linear": "Ratio head, linear",
    "ratio_mlp": "Ratio head, MLP",
    "ratio_linear_broad": "Ratio head, linear, a third of the reference broadened",
    "ratio_mlp_broad": "Ratio head, MLP, a third of the reference broadened",
}
OURS_WARM, FROM_FILES = "ours, warm", "ours, from files"

# What may order families of methods, and what it is to order.
GUIDES = ("mirror", "validation")
TEST = "test"
#: Families of methods on an ID data set with a reference, in the record of `transfer.py`.
Panel: TypeAlias = Mapping[str, Mapping[str, Any]]


def run(record: Mapping[str, Any], scores: Scores, title: str) -> str:
    r"""Returns the metrics of a run of the main command, computed from its scores.

    Arguments:
        record: The run record.
        scores: The scores of the run.
        title: The title of the table.
    """
    results, data = record["results"], record["data"]
    absent = record["absent"]
    return MetricsTable.of(
        scores.metrics(),
        title=title,
        absent={"near": absent, "far": absent},
        accuracy=results["accuracy"],
        seconds=record["score_seconds"],
        parameters=results["parameters"],
        counts=data["counts"],
        reference=data["reference"],
        # Older records have none of these, and their benchmarks no set that a reference holds.
        overlaps=data.get("overlaps"),
        parts=data.get("parts"),
        remark=data.get("remark", ""),
        steps=record["config"]["training"]["steps"],
    ).to_markdown()


def latency(
    results: Mapping[str, Sequence[float | None]], over: str = "the bare backbone's"
) -> str:
    r"""Returns times over those of the bare backbone, with the intervals of what has one."""
    rows = [
        # In older records, what is counted has an interval of no length.
        [k, f"{m:.4f}", "-" if a == b else f"[{a:.4f}, {b:.4f}]"]
        for k, (m, a, b) in results.items()
    ]
    return markdown_rows(["what", f"over {over}", "95 % interval"], rows)


def deployed(results: Mapping[str, Sequence[float | None]]) -> str:
    r"""Returns times of whole scores over those of the networks that they are made of."""
    return latency(results, "its networks")


def memory(results: Mapping[str, Any]) -> str:
    r"""Returns the peaks of a fit to few files and of one to many, in MiB, and their seconds."""
    columns = ("pss", "max_rss", "seconds")
    rows = [
        [f"{fit['images']:,} images", *(f"{fit[name]:,.0f}" for name in columns)]
        for fit in results["fits"].values()
    ]
    rows.append(["more", *(f"{results['more'][name]:,.0f}" for name in columns[:2]), ""])
    return markdown_rows(["fit", "peak PSS, MiB", "largest RSS, MiB", "seconds"], rows)


def throughput(results: Mapping[str, Any], over: str = OURS_WARM) -> str:
    r"""Returns speeds and times over those of one way, that of the warm pass, fastest first."""
    seconds, count = results["seconds"], results["images"]
    warm = np.array(seconds[over])
    rows = []
    for name in sorted(seconds, key=lambda name: float(np.median(seconds[name]))):
        ratios = np.array(seconds[name]) / warm
        speed = count / np.median(seconds[name])
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        rows.append([name, f"{speed:,.0f}", f"{np.median(ratios):.2f}", spread])
    return markdown_rows(["way", "images / s", f"time over {over}", "least and most"], rows)


def gradient_snr(results: Mapping[str, Mapping[str, Any]]) -> str:
    r"""Returns the signal-to-noise ratios of one sample's gradient, medians over seeds."""
    rows = [
        [row["model"], row["loss"], str(row["points"]), *_snr(row)] for row in results.values()
    ]
    header = ["model", "loss", "points a sample", "SNR a sample", "samples for SNR 1"]
    return markdown_rows([*header, "direct SNR"], rows)


def _snr(row: Mapping[str, Any]) -> list[str]:
    snr, direct = np.median(row["snr"]), np.median(row["direct_snr"])
    return [
        f"{snr:.1e} ({min(row['snr']):.1e} to {max(row['snr']):.1e})",
        f"{1 / snr:.1e}" if snr > 0 else "-",
        # Noise alone gives about one over the samples, of either sign.
        f"{direct:.1e}" if direct > 10 / row["samples"] else "-",
    ]


def int8(results: Mapping[str, Any]) -> str:
    r"""Returns AUROCs, and the accuracy if there is one, in single precision and in eight bits."""
    rows = [
        [name, f"{a:.2f}", f"{b:.2f}", f"{c:+.2f}"] for name, (a, b, c) in results["auroc"].items()
    ]
    if "accuracy" in results:
        a, b = results["accuracy"]
        rows.append(["ID accuracy", f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"])
    return markdown_rows(["set", "AUROC, float32", "AUROC, int8", "change"], rows)


def joint_score(results: Mapping[str, Mapping[str, float]]) -> str:
    r"""Returns the errors of the data score and of the ratio, a row a form."""
    columns = list(results["conditional"])
    rows = [
        [form, *(f"{row[c]:.3f}" if c in row else "-" for c in columns)]
        for form, row in results.items()
    ]
    return markdown_rows(["form", *columns], rows)


def feature_ratio(results: Mapping[str, Any]) -> str:
    r"""Returns AUROC / FPR@95 of scores and heads on the features of one classifier."""
    metrics, seconds = results["metrics"], results["seconds"]
    sets = list(next(iter(metrics.values())))
    rows = [
        [
            HEADS[method],
            "yes" if method in seconds else "no",
            *(f"{100 * m['auroc']:.2f} / {100 * m['fpr95']:.2f}" for m in row.values()),
            f"{seconds[method]:.0f} s" if method in seconds else "-",
        ]
        for method, row in metrics.items()
    ]
    return markdown_rows(["score", "reference", *sets, "head trained in"], rows)


def outliers(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    r"""Returns the mean AUROC of outlier detectors by table, or by kind of outlier of made ones.

    Beside it the mean of these columns, and over the tables that of the rate of flagged inliers.
    """
    tables = next(iter(results.values()))
    kinds = [
        (table, kind)
        for table, own in tables.items()
        # Classes that are outliers in turn have numbers, kinds of outliers names.
        for kind in ([None] if all(map(str.isdigit, own["auroc"])) else own["auroc"])
    ]
    rows = []
    for method, own in results.items():
        cells = [
            np.mean([values for k, values in own[table]["auroc"].items() if kind in (None, k)])
            for table, kind in kinds
        ]
        flagged = np.mean([np.mean(each["flagged"]) for each in own.values()])
        rows.append([method, *(f"{value:.1f}" for value in (*cells, np.mean(cells), flagged))])
    titles = [table if kind is None else f"{kind}, {table.split()[0]}" for table, kind in kinds]
    return markdown_rows(["method", *titles, "mean", "inliers flagged"], rows)


def with_interval(values: Sequence[float | None], digits: int) -> str:
    r"""Returns a number with the ends of its interval, if that has a length; a dash where it is not known."""
    if values[0] is None:
        return "-"
    estimate, low, high = (f"{value:.{digits}f}" for value in values)
    # Of one seed alone nothing was drawn anew: no length is no certainty.
    return estimate if values[1] == values[2] else f"{estimate} [{low}, {high}]"


def transfer(results: Mapping[str, Panel]) -> str:
    r"""Returns each family's numbers with their intervals, and rho, a table a panel."""
    texts = []
    for title, panel in results.items():
        rows = [
            [name, *(with_interval(own[k], 1) for k in (*GUIDES, TEST))]
            for name, own in panel["families"].items()
        ]
        rhos = [with_interval(panel["rho"][k], 2) for k in GUIDES]
        rows.append(["Spearman's rho with test", *rhos, ""])
        texts.append(f"{title}\n\n{markdown_rows(['family', *GUIDES, TEST], rows)}")
    return "\n".join(texts)
