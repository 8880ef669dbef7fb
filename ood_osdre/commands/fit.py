r"""Trains a detector on ID data against a reference, and calibrates its decisions.

ID and REFERENCE are folders of images, list files (`path LABEL` a line) or arrays (.npy, .npz); rows of
numbers come as .csv, too. Of folders in ID, one a class, the detector learns to tell the classes.
REFERENCE says what is not ID: broad, of the same kind of files, and neither ID data nor the OOD data of a
test. A part of both validates, and another tenth of ID, or what --calibrate names, sets the threshold.
"""

__all__ = ["main"]

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Parser, UserError, count, counted, rate
from .common import finish

if TYPE_CHECKING:
    from ..config import Config
    from ..detectors import OneStepDetector

UNFINISHED, ALPHA, SIZE = 3, 0.05, 32
# A set of a few hundred images is not trained on thousands of times, unless that is asked for. The
# count is of all its images, also of the tenths that calibrate and validate.
EPOCHS, LEAST_STEPS = 50, 1000
EPILOG = """\
examples:
  %(prog)s flowers/ photographs/ --out runs/flowers
  %(prog)s flowers/ photographs/ --out runs/flowers --calibrate fresh/ --alpha 0.01
  %(prog)s flowers/ photographs/ --out runs/flowers --backbone timm:resnet18 --size 224
  %(prog)s flowers/ photographs/ --out runs/flowers --classifier timm:resnet18@weights.pth --size 224
  %(prog)s normal.csv shuffled.csv --out runs/sensors training.steps=5000

Configurations are those of ood-osdre eval: vectors for rows of numbers, backbone for --backbone,
cifar10_representation for --classifier, else cifar10, without a GPU cifar10_cpu.
"""


def parser(prog: str) -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(prog=prog, description=__doc__, epilog=EPILOG)
    add = p.add_argument
    add("id", metavar="ID", help="in-distribution data")
    add("reference", metavar="REFERENCE", help="what they are told apart from")
    add("--out", type=Path, required=True, metavar="RUN", help="folder of the run, a new one")
    known = "rate at which ID data may be flagged as OOD (default: %(default)s)"
    add("--alpha", type=rate, default=ALPHA, metavar="RATE", help=known)
    known = "fresh ID data that set the threshold (default: a tenth of ID, held out first)"
    add("--calibrate", metavar="DATA", help=known)
    known = "network to train on: timm:NAME, whose weights timm downloads, or timm:NAME@FILE"
    add("--backbone", metavar="SOURCE", help=known)
    known = "classifier on whose frozen features to train: timm:NAME@FILE, a run folder, OpenOOD's"
    add("--classifier", metavar="SOURCE", help=f"{known} weights")
    known = "side of images, in pixels, to which they are brought (default: %(default)s)"
    add("--size", type=count(1, 4096), default=SIZE, metavar="N", help=known)
    add("--config", metavar="NAME|FILE", help="a configuration (default: see below)")
    add("--max-steps", type=count(1), metavar="N", help="shorten training to N steps")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    add(
        "--resume", action="store_true", help="go on with the run of the folder, options as before"
    )
    add("--quiet", action="store_true", help="no progress, no summary")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="any key of the configuration")
    return p


def main(arguments: Sequence[str] | None = None, prog: str = "ood-osdre fit") -> int:
    r"""Runs the verb and returns its exit status."""
    args = parser(prog).parse_intermixed_args(arguments)
    return finish(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Trains, calibrates and saves; returns 3 if it was stopped before."""
    check_folder(args.out, args.resume)
    for source in filter(None, (args.id, args.reference, args.calibrate)):
        if not os.path.exists(os.path.expanduser(source)):
            raise UserError(f"{source}: no such folder or file.")
    if args.backbone and args.classifier:
        raise UserError("--backbone: got --classifier, too; expected one network.")
    vectors = is_table(args.id)
    if vectors and (args.backbone or args.classifier):
        raise UserError(f"{args.id}: has vectors, and --backbone and --classifier take images.")
    from ..detectors import OneStepDetector
    from ..evaluation.report import report_beside
    from ..training.distributed import find_device

    device = find_device(None if args.device == "auto" else args.device, "--device")
    config = read_config(args, vectors, device.type == "cuda")
    detector = OneStepDetector(
        config,
        backbone=args.backbone,
        size=args.size,
        device=device,
        progress=not args.quiet,
    )
    data = args.id, args.reference
    options = {"folder": args.out, "resume": args.resume, "alpha": args.alpha}
    try:
        detector.fit(*data, calibration=args.calibrate, **options)
    except UserError:
        outcome = detector.outcome
        if not outcome.reason or outcome.finished:
            raise
        print(
            f"stopped ({outcome.reason}) at step {outcome.step} of {outcome.steps}, saved in "
            f"{args.out}; go on with --resume",
            file=sys.stderr,
        )
        return UNFINISHED
    detector.save(args.out)
    write_record(detector, args)
    report_beside(args.out)
    if not args.quiet:
        print(summary(detector, args.out))
    return 0


def write_record(detector: "OneStepDetector", args: argparse.Namespace) -> None:
    r"""Writes what has to be known to repeat a fit, and the scores of its validation if there are."""
    from ..evaluation.records import RunRecord
    from ..evaluation.report import HELD_OUT
    from ..evaluation.scores import Scores, write_scores
    from ..files import local
    from ..training.distributed import device_name
    from ..training.run import RECORD

    folder, outcome, scorer = local(args.out), detector.outcome, detector.scorer
    fresh = args.calibrate or f"a tenth of {args.id}"
    sets = [
        ("ID", args.id, "trains; a part validates"),
        ("calibration", fresh, "sets the threshold, trains nothing"),
        ("reference", args.reference, "trains; a part validates"),
    ]
    given = [
        {"set": name, "given": source, "use": use, "count": detector.counts[name]}
        for name, source, use in sets
    ]
    if outcome.scores:
        scores = Scores()
        for role, name in (("id", "held-out"), ("near", "held-out reference")):
            scores.add(role, name, *outcome.scores[role])
        write_scores(folder / HELD_OUT, scores)
    RunRecord(
        config=scorer.metadata["config"],
        seed=detector.config.training.seed,
        device=device_name(detector.device),
        data={"given": given, "warnings": detector.remarks},
        validation={"best": outcome.best, "history": outcome.history},
        results={"parameters": scorer.parameters, "alpha": args.alpha},
        train_seconds=outcome.seconds,
    ).write(folder / RECORD)


def check_folder(out: Path, resume: bool) -> None:
    r"""Refuses a folder that is there already, unless it holds a run to go on with."""
    from ..training.run import HEAD, LOCK, LOG, MODEL_FILE, STATE_FILE

    path = os.path.expanduser(out)
    try:
        there = os.listdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"--out {out}: cannot be a folder ({error.strerror}).") from None
    if set(there) - {LOCK} and not resume:
        raise UserError(f"--out {out}: is there already; choose another, or go on with --resume.")
    # What a run that was killed before its first checkpoint has left.
    others = [n for n in there if n not in (LOCK, LOG, HEAD) and ".tmp" not in n]
    if others and not {STATE_FILE, MODEL_FILE} & set(there):
        raise UserError(f"--out {out}: holds no run to go on with, but {min(others)}.")


def is_table(source: str) -> bool:
    r"""Returns whether a source holds vectors, not images."""
    from ..files import ARRAYS, is_folder, local, read_array

    path = local(source)
    if is_folder(path) or path.suffix.lower() not in ARRAYS:
        return False
    return path.suffix.lower() == ".csv" or read_array(path)[0].ndim == 2


def read_config(args: argparse.Namespace, vectors: bool, gpu: bool) -> "Config":
    r"""Returns the configuration: that of the kind of data and network, with the options given."""
    from ..config import load_config, shortened
    from ..files import local

    kinds = [(vectors, "vectors"), (args.backbone, "backbone")]
    kinds += [(args.classifier, "cifar10_representation"), (gpu, "cifar10"), (True, "cifar10_cpu")]
    name = args.config or next(name for holds, name in kinds if holds)
    stems = [local(source).resolve().stem or source for source in (args.id, args.reference)]
    options = [("id", stems[0]), ("title", " against ".join(stems))]
    options += [("classifier", args.classifier)] if args.classifier else []
    config = load_config(name, [*options, *args.overrides])
    if args.max_steps is not None:
        return shortened(config, args.max_steps)
    if args.config or any("training." in option for option in args.overrides):
        return config
    enough = EPOCHS * size_of(args.id) // config.training.batch_size
    return shortened(config, max(enough, LEAST_STEPS))


def size_of(source: str) -> int:
    r"""Returns the number of items of a source, 0 where it is not seen at a glance."""
    from ..data.lists import read_list, stream_folder
    from ..files import ARRAYS, is_folder, local, read_array

    path = local(source)
    if is_folder(path):
        return sum(1 for _ in stream_folder(path, told=False))
    if path.suffix.lower() in ARRAYS:
        return len(read_array(path)[0])
    try:
        return len(read_list(path))
    except UserError:
        return 0


def summary(detector: "OneStepDetector", out: Path) -> str:
    r"""Returns what was trained, when it decides what, and what to do next."""
    outcome, conformal = detector.outcome, detector.conformal
    assert conformal is not None
    steps = (
        f"{counted(outcome.step, 'step')} in {outcome.seconds:,.0f} s, " if outcome.step else ""
    )
    classes = len(detector.scorer.class_names)
    named = f"{classes} classes, " if classes else ""
    low, high = conformal.rates
    between = f"; with these, {low:.1%} to {high:.1%} of ID are flagged" if conformal.rank else ""
    return (
        f"{out}: {steps}{named}calibrated on {counted(conformal.size, 'ID input')}: OOD below "
        f"{conformal.threshold:.4g} nats (alpha {conformal.alpha:g})"
        f"{between}\n"
        f"next: ood-osdre score {out} {'ROWS.csv' if detector.scorer.metadata.get('dim') else 'IMAGES'}"
        " --out scores.csv"
    )
