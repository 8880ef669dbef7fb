r"""`report.html`: a run, an evaluation or the average of several seeds as one page to look at.

The page is made from the files of a folder alone, at any time, and needs no network: figures are in
it as SVG, images as small JPEGs. Those that the scorer gets most wrong are shown if a benchmark's
images, or a fit's files or arrays, are at hand, and else their names. What a folder lacks has no section.
"""

__all__ = ["HELD_OUT", "REPORT", "report_beside", "write_report"]

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import pandas as pd
from markupsafe import Markup

from ..errors import UserError, one_line
from ..files import is_regular, local, write_text_atomic
from ..options import flat
from ..training.checkpoint import MODEL, checkpoint_path, read_checkpoint
from ..training.run import LOG, RECORD
from .calibration import SplitConformal
from .decisions import CALIBRATION, read_calibration
from .gallery import gallery, given_images
from .plots import as_svg, over_steps, swatch
from .records import facts_of, read_entries, sets_of
from .score_plots import densities, held_out, rankings, score_label
from .scores import OOD_ROLES, Scores, read_scores
from .tables import COLUMNS

if TYPE_CHECKING:
    from ..data import BenchmarkData

REPORT = "report.html"
# The seeds of an average that are drawn in its page; each has one of its own, too.
SEEDS = 3

# The numbers of :class:`~ood_osdre.evaluation.calibration.Calibration`, as a page names them.
CALIBRATED = {
    "log_mass_0": "log E₀[r], in nats",
    "log_mass_1": "log E₁[1/r], in nats",
    "posterior_error": "calibration error of 1 / (1 + 1/r), a fraction",
}
# Where a log has them, and what a page adds to the name.
PREFIXES = {"val_": "", "held_out_": "", "held_out_noisy_": ", with the noise of the path's ends"}

# What validates a fit, as a page names it: there is no benchmark, whose near sets `val_near` may be.
VALIDATED = {
    "val_near": "AUROC against the held-out reference",
    "val_far": "AUROC against images made by a program",
    "val_auroc": "mean of both AUROCs",
    "held_out_auroc": "AUROC against the held-out reference",
    "val_accuracy": "accuracy of the classes",
}
#: The scores of a fit's validation, in the form of a run's `scores.npz`.
HELD_OUT = "held_out.npz"

Row = dict[str, Any]
log = logging.getLogger(__name__)


def report_beside(folder: Path, data: "BenchmarkData | None" = None) -> None:
    r"""Writes the page of a finished run, which stays finished if that fails: a warning says so.

    Arguments are those of :func:`write_report`.
    """
    try:
        write_report(folder, data)
    except Exception as error:  # noqa: BLE001 - a page is never worth a run
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        log.warning("%s: not written (%s%s)", folder / REPORT, kind, one_line(error, 200))


def write_report(folder: Path, data: "BenchmarkData | None" = None) -> Path:
    r"""Writes `report.html` into a run folder, atomically.

    Arguments:
        folder: The folder of a run, of an evaluation, or of several seeds.
        data: The benchmark, for its images; None for a page without.

    Returns:
        The page.

    Raises:
        UserError: If the folder holds no run, a file of it is damaged, or the page cannot be written.
    """
    table = _table(folder := local(folder))
    sources = _sources(folder, table)
    record = _record(sources[0])
    has_more = (folder / LOG).is_file() or checkpoint_path(folder, CALIBRATION).is_file()
    if not record and table is None and not has_more:
        raise UserError(f"{folder}: no run to report on, expected {RECORD} or metrics.csv")
    config, name = record.get("config", {}), folder.resolve().name
    benchmark = record.get("benchmark") if table is None else table["benchmark"].iloc[0]
    facts = facts_of(record, [_record(source).get("seed") for source in sources])
    seed = f"seed {facts['seed']}" if "seed" in facts else ""
    text = _template().render(
        title=benchmark or name,
        subtitle=[config.get("title"), name if benchmark else "", seed, facts.get("created")],
        columns=list(COLUMNS.values()),
        rows=[] if table is None else list(_rows(table)),
        notes=_notes(folder),
        runs=[_run(source, data if source == folder else None) for source in sources[:SEEDS]],
        seeds=[_seed(source, folder) for source in sources] if sources[1:] else [],
        facts=facts,
        sets=sets_of(record),
        given=record.get("data", {}).get("given", []),
        warnings=record.get("data", {}).get("warnings", []),
        options=flat(config),
    )
    write_text_atomic(folder / REPORT, text)
    return folder / REPORT


def _sources(folder: Path, table: pd.DataFrame | None) -> list[Path]:
    r"""Returns the folders of the seeds that were averaged, or else the folder itself."""
    seeds = [] if (folder / RECORD).is_file() else list(folder.glob(f"seed-*/{RECORD}"))
    if table is not None and (known := table.get("seeds", [""])[0]):
        seeds = [path for path in seeds if path.parent.name.removeprefix("seed-") in known.split()]
    return [p.parent for p in sorted(seeds, key=lambda p: (len(p.parent.name), p))] or [folder]


def _template() -> jinja2.Template:
    r"""Returns the template of a page."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = count()  # of the figures, whose inner names must differ
    pages.filters["svg"] = lambda panel: Markup(as_svg(panel, f"figure {next(numbers)}"))
    pages.filters["swatch"] = lambda line: Markup(swatch(line.stroke))
    return pages.get_template(REPORT)


def _record(folder: Path) -> dict[str, Any]:
    r"""Returns the record of a run as it was written; empty if there is none."""
    path = folder / RECORD
    return read_entries(path) if path.is_file() else {}


def _table(folder: Path) -> pd.DataFrame | None:
    r"""Returns the table of a run, the ID row first; None if there is none."""
    path = folder / "metrics.csv"
    if not path.is_file():
        return None
    try:
        table = pd.read_csv(path, keep_default_na=False, dtype=str)
        rows = table.loc[table["role"] != "id", ["benchmark", "set", "images", *COLUMNS.values()]]
        if rows.empty:
            raise ValueError("no row of metrics")
        rows[[*COLUMNS.values()]].astype(float)  # where a line was cut, cells are empty
        table.filter(regex="^images$|_std$").replace("", "0").astype(float)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: not the table of a run ({one_line(error, 80)})") from None
    return table


def _rows(table: pd.DataFrame) -> Iterator[Row]:
    r"""Yields, for each row of metrics, its name, role, images and cells, in percent."""
    for _, row in table[table["role"] != "id"].iterrows():
        cells = []
        for column in COLUMNS.values():
            deviation = row.get(f"{column}_std", "")
            cells.append(_fixed(row[column]) + (f" ± {_fixed(deviation)}" if deviation else ""))
        images = f"{float(row['images']):,.0f}" if row["images"] else ""
        yield {"set": row["set"], "role": row["role"], "images": images, "cells": cells}


def _fixed(text: str) -> str:
    return f"{float(text):.2f}" if text else ""


def _notes(folder: Path) -> list[str]:
    r"""Returns the notes below the table, which its Markdown file has."""
    path = folder / "metrics.md"
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    return [line.removeprefix("- ") for line in lines if line.startswith("- ")]


def _seed(source: Path, folder: Path) -> Row:
    r"""Returns the name, page and AUROC of a seed."""
    table = _table(source)
    auroc = {} if table is None else dict(zip(table["set"], table["AUROC"], strict=True))
    return {
        "name": source.name,
        "page": f"{source.relative_to(folder).as_posix()}/{REPORT}",
        "auroc": {name: _fixed(text) for name, text in auroc.items() if text},
    }


def _run(folder: Path, data: "BenchmarkData | None") -> Row:
    r"""Returns what is drawn of a run."""
    record, conformal = _record(folder), _conformal(folder)
    run: Row = {"name": folder.name, "conformal": conformal, "flagged": []}
    run |= {"densities": [], "rankings": [], "gallery": [], "held_out": None}
    if (folder / "scores.npz").is_file():
        scores = read_scores(folder / "scores.npz")
        what = score_label(record.get("config", {}), scores)
        run |= {"what": what, "densities": densities(scores, what), "rankings": rankings(scores)}
        images = {} if data is None else {**data.near, **data.far, "": data.id_test}
        run["gallery"] = list(gallery(scores, images))
        run["flagged"] = [] if conformal is None else _flagged(scores, conformal)
    histories, is_fit = _histories(folder, record), not record.get("benchmark")
    names = VALIDATED if is_fit else {}
    masses = {p + k: v + more for p, more in PREFIXES.items() for k, v in CALIBRATED.items()}
    panels = [p for stage in histories.items() for p in over_steps(*stage, masses | names)]
    run["training"] = [panel for panel in panels if panel.level is None]
    run["masses"] = [panel for panel in panels if panel.level is not None]
    last = [entries[-1] for entries in histories.values() if entries]
    best = record.get("validation", {}).get("best") or (last or [{}])[-1]
    found = [{k: best.get(p + k) for k in CALIBRATED} for p in PREFIXES]
    known = [values for values in found if None not in values.values()]
    run["validation"] = {VALIDATED[k]: 100 * best[k] for k in names if best.get(k) is not None}
    if "val_far" not in best:
        run["validation"].pop(VALIDATED["val_auroc"], None)  # there is one alone
    if (folder / HELD_OUT).is_file():
        threshold = None if conformal is None else conformal.threshold
        scores = read_scores(folder / HELD_OUT)
        run |= {"held_out": held_out(scores, threshold), "rankings": rankings(scores)}
        run["gallery"] = list(gallery(scores, given_images(record, scores), threshold))
    run["calibration"] = {CALIBRATED[k]: v for k, v in known[0].items()} if known else {}
    return run


def _conformal(folder: Path) -> SplitConformal | None:
    r"""Returns the calibrated decision that a detector's folder holds; None if it has none."""
    if not checkpoint_path(folder, CALIBRATION).is_file():
        return None
    _, model, digest = read_checkpoint(folder, MODEL)
    return read_calibration(folder, digest, model)[0]


def _flagged(scores: Scores, conformal: SplitConformal) -> list[tuple[str, float]]:
    r"""Returns the share of each set that a calibrated decision flags."""
    sets = {n: s for role in ("id", *OOD_ROLES) for n, s in scores.of(role).items()}
    return [(name, float(conformal.flagged(s.score).mean())) for name, s in sets.items()]


def _histories(folder: Path, record: Mapping[str, Any]) -> dict[str, list[Row]]:
    r"""Returns what each stage logged, the run's own without a name; else the record's validations."""
    found = {}
    for path in filter(is_regular, sorted(folder.rglob(LOG))):
        entries = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a line that was damaged
            entries += [entry] if isinstance(entry, dict) else []
        found[path.parent.relative_to(folder).as_posix().removeprefix(".")] = entries
    return found or {"": record.get("validation", {}).get("history", [])}
