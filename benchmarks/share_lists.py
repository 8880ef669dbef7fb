r"""Writes the lists of references of which a share comes from the ID data's own source.

    python benchmarks/share_lists.py --data-root DIR [--out runs/lists]

For CIFAR-10. Each list has as many images as TinyImageNet's part of `tiny_reference`: a share from
CIFAR-100, evenly from the classes that `tiny_reference` holds, the others evenly from every second
class of `tin_reference`. The images of a smaller share are among those of a larger one. The study
`share_pixels` trains with them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from outputs import require_writable

from ood_osdre.errors import UserError, exit_status
from ood_osdre.files import write_text_atomic

SHARES = (0, 5, 20, 50, 100)
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("runs") / "lists", metavar="DIR")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Writes a list for each share."""
    require_writable(args.out)
    folder = args.data_root / "benchmark_imglist" / "cifar10"
    own, other = classes(folder / OWN, "cifar100"), classes(folder / OTHER, "tin")
    other = {name: other[name] for name in sorted(other)[::2]}
    for share in SHARES:
        lines = [*take(own, share), *take(other, 100 - share)]
        write_text_atomic(args.out / f"share_{share:03d}.txt", "\n".join(lines) + "\n")
        print(f"share_{share:03d}.txt: {len(lines):,} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
