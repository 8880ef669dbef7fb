r"""Scores files with a detector that `ood-osdre fit` has trained, and writes one row each, as CSV.

Columns: `file`, with the line of a .csv, whose header is line 1, or the row of an array, from 0;
`log_ratio`, of ID data to the reference, in nats, larger = more in-distribution;
`p_value` (conformal), the share of the calibration data that score as low or lower; `decision`, ID or OOD: OOD
where the p-value is at most alpha, so of ID data at most that share, in expectation; `class`, the nearest of
the ID classes, of OOD files too, if there are classes; `error`, why a file has no score. The rest is scored,
and the exit status is 1. Of a folder, files that are no images by their suffix are left out, with a warning.
"""

__all__ = ["main"]

import argparse
import csv
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..errors import Parser, UserError, rate
from .common import STDIN, add_scoring, find_scorer, finish, input_lines, output

if TYPE_CHECKING:
    from ..detectors import Scorer
    from ..detectors.files import Item, ScoredItems
    from ..evaluation.calibration import SplitConformal

INCOMPLETE, OOD = 1, "OOD"
EPILOG = """\
examples:
  %(prog)s runs/flowers inbox/ --out scores.csv
  %(prog)s runs/flowers 'inbox/**/*.png' extra.jpg --alpha 0.01 --out scores.csv
  find inbox -name '*.png' | %(prog)s runs/flowers > scores.csv
  %(prog)s runs/sensors rows.csv --out scores.csv

Memory does not grow with the number of files, but for names: of a folder's own files, and of what a
pattern matches.
"""


def parser(prog: str) -> argparse.ArgumentParser:
    r"""Builds the parser of the command line."""
    p = Parser(prog=prog, description=__doc__, epilog=EPILOG)
    add_scoring(p)
    known = "folders, files or patterns; arrays and tables (.npy, .npz, .csv) by their rows"
    p.add_argument(
        "images",
        nargs="*",
        metavar="IMAGES",
        help=f"{known}; none or - for paths, or rows of numbers, on standard input",
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    p.add_argument("--alpha", type=rate, metavar="RATE", help="default: that of the run")
    return p


def main(arguments: Sequence[str] | None = None, prog: str = "ood-osdre score") -> int:
    r"""Runs the verb and returns its exit status."""
    args = parser(prog).parse_intermixed_args(arguments)
    return finish(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Scores everything and returns 1 if something could not be."""
    check_sources(args.images)
    check_out(args.out, args.images)
    from ..detectors.files import in_parts, score_items
    from ..evaluation.calibration import SplitConformal
    from ..progress import Bar

    scorer = find_scorer(args)
    conformal = scorer.conformal
    if conformal is None and args.alpha is not None:
        raise UserError(f"--alpha: {args.run} is not calibrated, so it makes no decisions.")
    if conformal is not None and args.alpha is not None:
        conformal = SplitConformal(conformal.scores, args.alpha)
    score = "log_ratio" if scorer.ratio.in_nats else "score"
    total = flagged = failed = 0
    reason = ""
    live = args.out is not None or not output().isatty()
    bar = Bar(desc="scoring", unit="file", disable=args.quiet or not live)
    with opened(args.out) as file, bar:
        rows = csv.writer(file, lineterminator="\n")
        for part in score_items(scorer, in_parts(scorer, items_of(args.images, scorer))):
            if not total:  # no header stands alone
                rows.writerow(["file", score, "p_value", "decision", "class", "error"])
            for row in cells(part, scorer, conformal):
                rows.writerow(row)
                total += 1
                flagged += row[3] == OOD
                failed += bool(row[5])
                reason = reason or (f"{row[0]}: {row[5]}" if row[5] else "")
            bar.update(len(part.names))
        if not total:
            raise UserError(f"{' '.join(args.images) or 'standard input'}: nothing to score.")
    if not args.quiet:
        rule = "not calibrated, so no decisions"
        if conformal is not None:
            rule = f"{flagged:,} flagged as {OOD} at alpha {conformal.alpha:g}"
        print(f"{total - failed:,} scored, {rule}", file=sys.stderr)
    if failed:
        print(f"{failed:,} could not be scored, the first: {reason}", file=sys.stderr)
    return INCOMPLETE if failed else 0


def check_sources(sources: Sequence[str]) -> None:
    r"""Refuses what was mistyped; what is there and cannot be read gets a row instead."""
    for source in sources:
        path = os.path.expanduser(source)
        there = source == STDIN or os.path.lexists(path)
        if not there and (
            not glob.has_magic(source) or next(glob.iglob(path, recursive=True), None) is None
        ):
            pattern = glob.has_magic(source)
            raise UserError(f"{source}: no such file or folder{' as this pattern' * pattern}.")


def check_out(out: Path | None, sources: Sequence[str]) -> None:
    r"""Refuses to replace what is to be scored."""
    from ..data.lists import image_suffixes
    from ..files import is_folder, is_regular, local

    if out is None or not is_regular(local(out)):
        return
    target = Path(os.path.realpath(local(out)))
    for source in sources or [STDIN]:
        found = [os.path.expanduser(source)]
        found += glob.iglob(found[0], recursive=True) if glob.has_magic(source) else []
        same = any(is_regular(path) and os.path.samefile(path, target) for path in found)
        if source == STDIN and sys.stdin is not None:
            with suppress(OSError):  # no stream of the system's
                same = os.path.samestat(os.fstat(sys.stdin.fileno()), target.stat())
        elif is_folder(found[0]) and target.suffix.lower() in image_suffixes():
            same = Path(os.path.realpath(found[0])) in target.parents
        if same:
            raise UserError(f"--out {out}: is to be scored ({source}); expected another file.")


def items_of(sources: Sequence[str], scorer: "Scorer") -> Iterator["Item"]:
    r"""Yields what is to be scored, see :mod:`ood_osdre.detectors.files`."""
    from ..detectors.files import list_items, list_lines, list_rows

    vectors, columns = len(scorer.shape) == 1, scorer.columns
    for source in sources or [STDIN]:
        if source != STDIN:
            yield from list_items([source], vectors, columns)
        elif vectors:
            yield from list_rows(input_lines(), "stdin", columns)
        else:
            yield from list_lines(input_lines(), vectors)


@contextmanager
def opened(path: Path | None) -> Iterator[IO[str]]:
    r"""Opens a file that is whole or absent in the end; None for standard output."""
    if path is None:
        yield output()
        return
    from ..files import atomic_path, local, sweep

    sweep(local(path).parent)
    opening = partial(open, mode="w", encoding="utf-8", errors="surrogateescape", newline="")
    with atomic_path(path) as temporary, opening(temporary) as file:
        yield file


def cells(
    part: "ScoredItems", scorer: "Scorer", conformal: "SplitConformal | None"
) -> Iterator[list[object]]:
    r"""Yields the rows of a part."""
    names = scorer.class_names
    for i, name in enumerate(part.names):
        row: dict[str, object] = dict.fromkeys(("score", "p_value", "decision", "class"), "")
        if not part.problems[i]:
            row["score"] = f"{part.scores[i]:.9g}"  # single precision, to the last digit
            if conformal is not None:
                row["p_value"] = f"{conformal.pvalue(part.scores[i : i + 1])[0]:.6g}"
                is_ood = conformal.flagged(part.scores[i : i + 1])[0]
                row["decision"] = OOD if is_ood else "ID"
            if part.classes is not None:
                row["class"] = names[part.classes[i]]
        yield [name, *row.values(), part.problems[i]]
