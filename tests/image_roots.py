r"""Tiny data roots in OpenOOD's layout, for the tests of the data modules."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

ID_CLASSES = ("air plane", "bird")
REFERENCE_CLASSES = 24
#: Role, name, list, images per class folder.
SETS = (
    ("id_train", "toy", "train_toy.txt", 6),
    ("id_val", "toy", "val_toy.txt", 2),
    ("id_test", "toy", "test_toy.txt", 4),
    ("reference", "others", "train_others.txt", 2),
    ("ood_val", "near", "val_near.txt", 3),
    ("near", "near", "test_near.txt", 5),
    ("far", "far", "test_far.txt", 5),
    ("far", "far away", "test_far_away.txt", 5),
)


def write_image(
    path: Path, seed: int, size: tuple[int, int] = (32, 32), mode: str = "RGB"
) -> None:
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
    image.convert(mode).save(path)


def folders(role: str, name: str) -> list[str]:
    if role.startswith("id_"):
        return [f"toy/{role}/{c}" for c in ID_CLASSES]
    if role == "reference":
        return [f"others/n{i:02d}/images" for i in range(REFERENCE_CLASSES)]
    return [f"{name}/{role}"]


def make_root(root: Path) -> Path:
    r"""Writes lists, images and a manifest, and returns the manifest's path."""
    entries = []
    for index, (role, name, list_name, count) in enumerate(SETS):
        lines = []
        for label, folder in enumerate(folders(role, name)):
            for i in range(count):
                image = f"{folder}/{i}.png"
                write_image(root / "images_classic" / image, hash_of(index, label, i))
                lines.append(f"{image} {label if role.startswith('id_') else -1}\n")
        path = root / "benchmark_imglist" / "toy" / list_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))  # blank lines in between
        entries.append({"name": name, "role": role, "list": list_name, "count": len(lines)})

    ids = {"toy": {"mean": [0.5] * 3, "std": [0.25] * 3, "sets": entries}}
    manifest = root / "toy.yml"
    manifest.write_text(yaml.safe_dump({"title": "Toy", "get": "Ask around.", "ids": ids}))
    return manifest


def hash_of(*indices: int) -> int:
    return sum(i * 101**k for k, i in enumerate(indices))


def as_cifar(root: Path) -> Path:
    r"""Gives the toy benchmark the name of an ID set that the commands know."""
    manifest = root / "toy.yml"
    manifest.write_text(manifest.read_text().replace("  toy:", "  cifar10:"))
    lists = root / "benchmark_imglist"
    (lists / "toy").rename(lists / "cifar10")
    return manifest


def edit(root: Path, name: str, **changes: object) -> None:
    r"""Changes entries of one list in the manifest."""
    content = yaml.safe_load((root / "toy.yml").read_text())
    for entry in content["ids"]["toy"]["sets"]:
        if entry["list"] == name:
            entry.update(changes)
    (root / "toy.yml").write_text(yaml.safe_dump(content))


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    r"""Changes each line of a list."""
    lines = [line for line in path.read_text().splitlines() if line]
    path.write_text("".join(f"{change(line)}\n" for line in lines))
