r"""Lays out the sets of the manifest `places100` in a data root, from git mirrors.

    python benchmarks/places100_root.py --places GIT --labels GIT --data-root DIR

`--places` is a clone of rathull/CTFs, whose commit below has the images of MiniPlaces, and `--labels` one
of CSAILVision/miniplaces, which has its categories and the labels of the validation images. A permutation
of the 100 classes, of seed 0, has 50 ID classes, 25 of the reference and 25 of near OOD. A class is the
whole path of its folder. Of each ID class the last 20 of 900 training images validate; test images are
validation images of MiniPlaces. The far sets, `texture/` and `tin/val/`, are listed as they lie in the
data root, where the script that lays out `openood_subset` has put them. No image is to be committed.
"""

import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ood_osdre.data.lists import list_folder, write_list
from ood_osdre.errors import Parser, UserError, exit_status

COMMIT = "f35c219885f163ca00a045236dd44be489598837"
#: How many classes of the permutation each role has, in order.
PARTS = {"id": 50, "reference": 25, "near": 25}
VALIDATING = 20
IMAGES, LISTS = "images_classic", "benchmark_imglist/places100"
TRAIN, VAL = "data/images/train/", "data/images/val/"
FAR = {"texture": "texture", "tin": "tin/val"}


def permuted(count: int = 100) -> dict[str, list[int]]:
    r"""Returns the classes of each role by their numbers in the categories, in order."""
    order = np.random.default_rng(0).permutation(count)
    ends = np.cumsum(list(PARTS.values()))[:-1]
    return {role: o.tolist() for role, o in zip(PARTS, np.split(order, ends), strict=True)}


def folder_of(category: str) -> str:
    r"""Returns the folder of a class: of `/b/bakery/shop` it is `bakery-shop`.

    Example:
        >>> folder_of("/b/bakery/shop")
        'bakery-shop'
    """
    return "-".join(category.split("/")[2:])


def rows_of(repository: Path, path: str) -> list[list[str]]:
    r"""Returns the words of the lines of a text file in a repository."""
    command = ["git", "-C", str(repository), "show", f"HEAD:{path}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--labels {repository}: no {path} in its newest commit.")
    return [line.split() for line in done.stdout.splitlines()]


def files(repository: Path, path: str) -> Iterator[tuple[str, bytes]]:
    r"""Yields the paths below one, and the contents, of the JPEG files that are there."""
    command = ["git", "-C", str(repository), "archive", COMMIT, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                for member in archive:
                    content = archive.extractfile(member)
                    if content is not None and member.name.endswith(".jpg"):
                        yield member.name.removeprefix(path), content.read()
        except tarfile.ReadError:
            raise UserError(f"--places {repository}: no {path} in commit {COMMIT}.") from None


def lay_out(places: Path, labels: Path, root: Path) -> None:
    r"""Writes images and lists."""
    numbers = {folder_of(name): int(n) for name, n in rows_of(labels, "data/categories.txt")}
    truth = {Path(name).name: int(n) for name, n in rows_of(labels, "data/val.txt")}
    parts = permuted(len(numbers))
    role_of = {n: role for role, part in parts.items() for n in part}
    label_of = {n: i for i, n in enumerate(parts["id"])}
    images, lists = root / IMAGES, root / LISTS
    found: dict[str, list[tuple[str, int]]] = {}

    def put(split: str, name: str, number: int, content: bytes) -> None:
        path = images / "places100" / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        row = path.relative_to(images).as_posix(), label_of.get(number, -1)
        found.setdefault(f"{role_of[number]}_{split}", []).append(row)

    for name, content in files(places, TRAIN):
        folder = folder_of(f"/{Path(name).parent.as_posix()}")
        if role_of[numbers[folder]] != "near":
            put("train", f"{folder}/{Path(name).name}", numbers[folder], content)
    for name, content in files(places, VAL):
        if role_of[truth[name]] != "reference":
            put("val", name, truth[name], content)

    rows = {key: sorted(value) for key, value in found.items()}
    of_class: dict[int, list[tuple[str, int]]] = {}
    for row in rows["id_train"]:
        of_class.setdefault(row[1], []).append(row)
    written = {
        "train_places100": [row for part in of_class.values() for row in part[:-VALIDATING]],
        "val_places100": [row for part in of_class.values() for row in part[-VALIDATING:]],
        "test_places100": rows["id_val"],
        "train_reference": rows["reference_train"],
        "test_near": rows["near_val"],
    }
    for name, folder in FAR.items():
        paths = sorted(f"{folder}/{p}" for p in list_folder(images / folder).names)
        written[f"test_{name}"] = [(path, -1) for path in paths]
    for name, lines in written.items():
        write_list(lists / f"{name}.txt", *zip(*lines, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    r"""Lays the sets out and returns the exit status."""
    parser = Parser(description=__doc__)
    for name in ("places", "labels"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="GIT")
    parser.add_argument("--data-root", type=Path, required=True, metavar="DIR")
    args = parser.parse_args(argv)

    def run() -> int:
        lay_out(args.places, args.labels, args.data_root)
        return 0

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
