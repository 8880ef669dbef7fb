r"""Writes a detector to a file that needs no Python, preprocessing inside.

FILE ends in .onnx or .pt2. From `images`, uint8 RGB with shape (B, S, S, 3), or `vectors`, float64 with
shape (B, d), it computes `log_ratio` in nats, larger = more in-distribution, `logits` if there are
classes, and what is asked for below: those of the detector at this log-ratio. Standardisation is inside.
Resizing is not: bring the shorter side to the run's S by Pillow's bilinear filter, then crop the centre.
Before it is written, the file is compared with the detector on --inputs, or on synthetic ones;
`ood_osdre.export` says how.
"""

__all__ = ["main"]

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..errors import Parser, number
from .common import add_scoring, find_scorer, finish

EPILOG = """\
examples:
  %(prog)s runs/flowers flowers.onnx --p-value --threshold
  %(prog)s runs/flowers flowers.pt2 --inputs inbox/
"""


def main(arguments: Sequence[str] | None = None, prog: str = "ood-osdre export") -> int:
    r"""Runs the verb and returns its exit status."""
    p = Parser(prog=prog, description=__doc__, epilog=EPILOG)
    add_scoring(p)
    p.set_defaults(device="cpu")
    p.add_argument("file", type=Path, metavar="FILE", help="what to write")
    for option, name, known in (
        ("--p-value", "p_value", "double, with shape (B)"),
        ("--threshold", "decision", "+1 for ID, -1 for OOD, with shape (B)"),
    ):
        known = f"add the output {name}: {known}"
        p.add_argument(option, dest="extras", action="append_const", const=name, help=known)
    p.add_argument("--inputs", metavar="PATH", help="what to compare on: images or vectors")
    known = "the largest difference, as a share of the spread (default: 1e-4)"
    p.add_argument("--tolerance", type=number(positive=True), default=1e-4, help=known)
    args = p.parse_args(arguments)
    return finish(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Exports the detector of a run."""
    from ..export import RESIZING, export_scorer
    from ..files import local

    extras = sorted(set(args.extras or ()), reverse=True)  # p_value, decision
    scorer, path = find_scorer(args), local(args.file)
    difference = export_scorer(scorer, path, args.inputs, args.tolerance, extras)
    if not args.quiet:
        print(f"{path}: agrees with {args.run} to {difference:.1e} of the outputs' spread")
        if not scorer.metadata.get("dim"):
            print(f"images: {RESIZING.format(scorer.metadata['size'])}")
    return 0
