r"""Writes the lists of references of which a share comes from the ID data's own source.

    python benchmarks/share_lists.py --data-root DIR [--out runs/lists]

For CIFAR-10. Each list begins with as many images as CIFAR-100's part of `tiny_reference`, 25,000: a
share of them from CIFAR-100, evenly from the classes that `tiny_reference` holds, the others evenly
from every second class of `tin_reference`. The images of a smaller share are among those of a larger
one. All lists end with the same 1,000 images, evenly from the other classes of `tin_reference`: the
studies `share_pixels` and `share_heads` train on the others and hold these out
(`data.hold_out_reference=1000`).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outputs import require_writable

from ood_osdre.errors import Parser, UserError, exit_status
from ood_osdre.files import local, write_text_atomic

SHARES = (0, 5, 20, 50, 100)
# Of each class that is held out, in percent: 20 of the 500 images.
HELD = 4
OWN, OTHER = "train_tiny_reference.txt", "train_tin_reference.txt"


def classes(path: Path, source: str) -> dict[str, list[str]]:
    r"""Returns the lines of a list that are images of a source, by class folder, in its order.

    Raises:
        UserError: If the list cannot be read or has no such images.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(f"{source}/"):
            found.setdefault(line.rpartition("/")[0], []).append(line)
    if not found:
        raise UserError(f"{path}: has no images of {source}/, expected openood_subset's list.")
    return found


def take(found: dict[str, list[str]], percent: int) -> list[str]:
    r"""Returns the first images of each class, a percentage of them."""
    return [line for lines in found.values() for line in lines[: len(lines) * percent // 100]]


def main(argv: Sequence[str] | None = None) -> int:
    r"""Writes the lists."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data-root", type=local, required=True, metavar="DIR")
    parser.add_argument("--out", type=local, default=Path("runs") / "lists", metavar="DIR")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Writes a list for each share."""
    require_writable(args.out)
    folder = args.data_root / "benchmark_imglist" / "cifar10"
    own, other = classes(folder / OWN, "cifar100"), classes(folder / OTHER, "tin")
    names = sorted(other)
    held = take({name: other[name] for name in names[1::2]}, HELD)
    other = {name: other[name] for name in names[::2]}
    for share in SHARES:
        lines = [*take(own, share), *take(other, 100 - share)]
        write_text_atomic(args.out / f"share_{share:03d}.txt", "\n".join([*lines, *held]) + "\n")
        print(f"share_{share:03d}.txt: {len(lines):,} images to train, {len(held):,} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
