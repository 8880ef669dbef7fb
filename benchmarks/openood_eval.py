r"""Evaluates a trained run inside OpenOOD's own evaluator.

    python benchmarks/openood_eval.py --data-root DIR --checkpoint runs/cifar10
    python benchmarks/openood_eval.py --data-root DIR --scores runs/cifar10/scores.npz

The first scores the images of OpenOOD's loaders by the run's model; the second fills the
evaluator's score cache from scores that a run has left. Either way the table is OpenOOD's, made by
its code, to be compared with the run's own.

Needs OpenOOD on PYTHONPATH, a clone of https://github.com/Jingkang50/OpenOOD. With several
checkpoints (seeds), the leaderboard's row has means and deviations over them; it is written only
from a full benchmark: every list with the images that OpenOOD v1.5 has.
"""

import argparse
import contextlib
import csv
import io
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ood_osdre.data.__main__ import check
from ood_osdre.data.manifests import load_manifest
from ood_osdre.errors import Parser, UserError, count, exit_status
from ood_osdre.evaluation.records import RunRecord, git_commit
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.files import local, write_text_atomic
from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor, eval_ood
from ood_osdre.plugin.openood.host import Foreign, prefill, require

CONVENTION = (
    "FPR@95: fraction of ID flagged when 95 % of OOD is caught (OOD positive, OpenOOD v1.5); "
    "the accuracy is that of ID images, once for all rows."
)
LEADERBOARD = (
    "Training",
    "Postprocessor",
    "Near-OOD_AUROC",
    "Far-OOD_AUROC",
    "ID_Accuracy",
    "Outlier_Data",
    "Arch",
    "Additional_Description",
)


def parser() -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(description=__doc__)
    add = p.add_argument
    add("--data-root", type=local, required=True, metavar="DIR", help="OpenOOD's data folder")
    add("--id", choices=("cifar10", "cifar100"), default="cifar10", help="ID set")
    add("--checkpoint", type=local, nargs="+", metavar="DIR", help="run folders, one a seed")
    add("--scores", type=local, nargs="+", metavar="FILE", help="scores.npz of runs, one a seed")
    add("--fsood", action="store_true", help="count covariate-shifted ID images as ID")
    add("--batch-size", type=count(1), default=200)
    add("--workers", type=count(0), default=4)
    add("--device", default="cpu", help="cpu, cuda, ...")
    add("--out", type=local, metavar="DIR", help="write openood.csv and openood.json here")
    add("--leaderboard", type=local, metavar="FILE", help="append the leaderboard's row")
    add("--quiet", action="store_true", help="no progress bars, nothing of OpenOOD's output")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the command and returns its exit status."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Evaluates every seed, prints the table, and writes what was asked for."""
    if (args.checkpoint is None) == (args.scores is None):
        raise UserError("arguments: give either --checkpoint or --scores.")
    if args.fsood and args.scores is not None:
        raise UserError("--fsood: needs --checkpoint; scores of a run have no shifted ID images.")
    require("openood")
    check_root(args.data_root, args.id, args.fsood)
    if args.leaderboard is not None:
        check_full(args)
    sources = args.checkpoint or args.scores
    frames = [evaluate(args, source) for source in sources]
    values = np.stack([frame.to_numpy(dtype=float) for frame in frames])
    mean = pd.DataFrame(values.mean(axis=0), frames[0].index, frames[0].columns)
    print(f"OpenOOD, ID {args.id}, {'full-spectrum, ' * args.fsood}{len(frames)} run(s)\n")
    print(mean.to_string(float_format="%.2f"))
    print(f"\n{CONVENTION}")
    if args.out is not None:
        write(args, mean, values)
    if args.leaderboard is not None:
        append_row(args, leaderboard_row(args, frames))
    return 0


def evaluate(args: argparse.Namespace, source: Path) -> pd.DataFrame:
    r"""Returns the evaluator's own table of a run folder or of a file of scores."""
    net: Foreign = None
    if args.checkpoint is not None:
        net = OSDRENet.load(source).to(args.device)
    with contextlib.redirect_stdout(io.StringIO() if args.quiet else sys.stderr):
        evaluator = make_evaluator(args, net)
        if net is not None:
            return eval_ood(evaluator, args.fsood, progress=not args.quiet)
        prefill(evaluator, read_scores(source), run_of(source)["results"]["accuracy"])
        return evaluator.eval_ood(progress=False)


def make_evaluator(args: argparse.Namespace, net: Foreign) -> Foreign:
    r"""Builds OpenOOD's evaluator; without a network it can only be given scores."""
    postprocessor: Foreign = OSDREPostprocessor()
    if net is None:
        base = require("openood.postprocessors").BasePostprocessor
        postprocessor, net = base(None), require("torch.nn").Identity()
        postprocessor.APS_mode = postprocessor.hyperparam_search_done = False
    return require("openood.evaluation_api").Evaluator(
        net,
        id_name=args.id,
        data_root=str(args.data_root),
        postprocessor=postprocessor,
        batch_size=args.batch_size,
        num_workers=args.workers,
    )


def run_of(path: Path) -> dict[str, Foreign]:
    r"""Returns the record that stands beside a run's scores or its checkpoint."""
    record = (path if path.is_dir() else path.parent) / "run.json"
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{record}: not a readable record of a run ({error}).") from None


def check_root(root: Path, id_name: str, fsood: bool) -> None:
    r"""Refuses a data root that OpenOOD would start to download into, or fail on."""
    datasets = require("openood.evaluation_api.datasets")
    info = datasets.DATA_INFO[id_name]
    lists = [split["imglist_path"] for split in info["id"].values()]
    lists.append(info["ood"]["val"]["imglist_path"])
    for group in (info["csid"], info["ood"]["near"], info["ood"]["far"]):
        lists += [group[name]["imglist_path"] for name in group["datasets"]]
    # The evaluator opens the lists of shifted ID images in any case, their images only if asked.
    names = [*datasets.benchmarks_dict[id_name], *(info["csid"]["datasets"] if fsood else ())]
    folders = [f"images_classic/{name}" for name in names]
    absent = [p for p in lists if not (root / p).is_file()]
    absent += [p for p in folders if not (root / p).is_dir() or not any((root / p).iterdir())]
    if absent:
        raise UserError(
            f"{root}: {len(absent)} lists or image folders are absent: {', '.join(absent)}. "
            "OpenOOD's scripts/download/download.py fetches them."
        )


def check_full(args: argparse.Namespace) -> None:
    r"""Refuses a leaderboard's row of anything but the whole of OpenOOD v1.5."""
    if args.fsood:
        raise UserError("--leaderboard: the row is of the benchmark without --fsood.")
    statuses = check(load_manifest("openood", args.id), args.data_root)
    roles = ("id_test", "near", "far")
    lacking = [s for s in statuses if s.spec.role in roles and not s.present]
    if lacking:
        names = ", ".join(f"{s.spec.name} ({s.detail})" for s in lacking)
        raise UserError(f"--leaderboard: needs the full benchmark, but not whole are: {names}.")


def leaderboard_row(args: argparse.Namespace, frames: Sequence[pd.DataFrame]) -> list[str]:
    r"""Returns the row, with means and sample deviations over runs."""

    def cell(row: str, column: str) -> str:
        values = [float(frame.loc[row, column]) for frame in frames]
        spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
        return f"{np.mean(values):.2f}{spread}"

    record = run_of((args.checkpoint or args.scores)[0])
    network, training = record["config"]["network"], record["config"]["training"]
    is_resnet18 = network["kind"] == "resnet" and list(network["depths"]) == [2, 2, 2, 2]
    arch = "ResNet18" if is_resnet18 else f"ResNet {network['depths']}"
    if network["width"] != 1 or network["stem_stride"] != 1:
        arch += f" (width {network['width']}, stem stride {network['stem_stride']})"
    reference = record["data"]["reference"]
    return [
        "OS-DRE",
        "OS-DRE",
        cell("nearood", "AUROC"),
        cell("farood", "AUROC"),
        cell("nearood", "ACC"),
        "Yes",
        arch,
        f"{training['steps']} steps; outliers: {reference}; OpenOOD v1.5; {len(frames)} seed(s)",
    ]


def append_row(args: argparse.Namespace, row: Sequence[str]) -> None:
    r"""Adds a row to a CSV file with the leaderboard's columns."""
    path = args.leaderboard
    text = path.read_text() if path.is_file() else ",".join(LEADERBOARD) + "\n"
    if text.splitlines()[0] != ",".join(LEADERBOARD):
        raise UserError(f"{path}: its first line is not that of the leaderboard's results.")
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(row)
    write_text_atomic(path, text.rstrip("\n") + "\n" + buffer.getvalue())


def write(args: argparse.Namespace, mean: pd.DataFrame, values: np.ndarray) -> None:
    r"""Writes the table and its provenance."""
    write_text_atomic(args.out / "openood.csv", mean.to_csv(float_format="%.6f"))
    runs = [run_of(p).get("config") for p in args.checkpoint or args.scores]
    RunRecord(
        config={"runs": runs},
        benchmark=f"OpenOOD's evaluator, {args.id}{', fsood' * args.fsood}",
        device=args.device,
        results={
            "convention": CONVENTION,
            "openood": git_commit(require("openood").__path__[0]),
            "rows": list(mean.index),
            "columns": list(mean.columns),
            "values": values.tolist(),
        },
    ).write(args.out / "openood.json")


if __name__ == "__main__":
    sys.exit(main())
