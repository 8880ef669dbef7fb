r"""The benchmarks of larger images: how one is laid out, and runs of both on a few images."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from image_roots import write_image

from ood_osdre import data
from ood_osdre.cli import main
from ood_osdre.data import image_files, load_manifest
from ood_osdre.data.image_files import ImageFiles
from ood_osdre.data.manifests import BENCHMARKS
from ood_osdre.resources import find

pytestmark = pytest.mark.usefixtures("benchmarks")
QUICK = ["--quiet", "--max-steps", "2", "head.rank=4", "head.width=8", "head.training.steps=2"]
QUICK += ["training.warmup=0", "head.training.warmup=0", "training.batch_size=8"]


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_permutation_of_the_manifest_is_that_of_its_seed() -> None:
    import places100_root

    text = find("data_manifests", "places100").read_text()
    written = re.findall(r"^#  (?: \w+ | {8,})((?: *\d+)+)$", text, re.MULTILINE)
    numbers = [int(n) for line in written for n in line.split()]
    assert numbers == [n for part in places100_root.permuted().values() for n in part]
    assert sorted(numbers) == list(range(100))


def test_places100_is_laid_out_by_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import places100_root as script

    places, labels, root = (tmp_path / name for name in ("places", "labels", "root"))
    classes = ["/a/abbey", "/b/bakery/shop", "/c/coast", "/c/church/outdoor"]
    for number, name in enumerate(classes):
        for i in range(3):
            write_image(places / f"data/images/train{name}/{i}.jpg", number)
        write_image(places / f"data/images/val/{number}.jpg", number)
    write_image(root / "images_classic/texture/dotted/1.jpg", 0)
    write_image(root / "images_classic/tin/val/images/1.JPEG", 0)
    (labels / "data").mkdir(parents=True)
    text = "".join(f"{name} {i}\n" for i, name in enumerate(classes))
    (labels / "data/categories.txt").write_text(text)
    (labels / "data/val.txt").write_text("".join(f"val/{i}.jpg {i}\n" for i in range(4)))
    for folder in (places, labels):
        git(folder, "init")
        git(folder, "add", ".")
        git(folder, "commit", "-m", "all")
    monkeypatch.setattr(script, "COMMIT", "HEAD")
    monkeypatch.setattr(script, "PARTS", {"id": 2, "reference": 1, "near": 1})
    monkeypatch.setattr(script, "VALIDATING", 1)
    command = ["--places", str(places), "--labels", str(labels), "--data-root", str(root)]
    assert script.main(command) == 0

    order = np.random.default_rng(0).permutation(4)
    names = [("abbey", "bakery-shop", "coast", "church-outdoor")[i] for i in order]
    found = {
        path.stem: path.read_text().splitlines()
        for path in (root / "benchmark_imglist/places100").iterdir()
    }
    own = {
        (f"places100/train/{name}/{i}.jpg {label}", i == 2)
        for label, name in enumerate(names[:2])
        for i in range(3)
    }
    assert set(found["train_places100"]) == {row for row, last in own if not last}
    assert set(found["val_places100"]) == {row for row, last in own if last}
    tests = {f"places100/val/{n}.jpg {label}" for label, n in enumerate(order[:2])}
    assert set(found["test_places100"]) == tests
    rows = [f"places100/train/{names[2]}/{i}.jpg -1" for i in range(3)]
    assert found["train_reference"] == rows
    assert found["test_near"] == [f"places100/val/{order[3]}.jpg -1"]
    assert found["test_texture"] == ["texture/dotted/1.jpg -1"]
    assert found["test_tin"] == ["tin/val/images/1.JPEG -1"]
    image = root / f"images_classic/places100/val/{order[3]}.jpg"
    assert image.read_bytes() == (places / f"data/images/val/{order[3]}.jpg").read_bytes()
    assert script.main([*command[:2], "--labels", str(places), *command[4:]]) == 2


def small_copy(root: Path, name: str, id_name: str) -> Path:
    r"""Writes a root for a manifest, of a few images each, and a manifest without counts."""
    content = yaml.safe_load(find("data_manifests", name).read_text())
    content["ids"] = {id_name: content["ids"][id_name]}
    content |= {"size": 32, "hold_out": []}
    folder = content.get("lists", "benchmark_imglist/{id}").replace("{id}", id_name)
    for index, spec in enumerate(content["ids"][id_name]["sets"]):
        spec.pop("count", None)
        spec.pop("sha256", None)
        rows = []
        for i in range(12 if spec["role"] in ("id_train", "reference") else 4):
            path = f"{spec['role']}/{spec['name']}/{i}.jpg"
            images = spec.get("images", content.get("images", "images_classic"))
            write_image(root / images / path, 100 * index + i, (40, 36))
            rows.append(f"{path} {i % 2 if spec['role'].startswith('id') else -1}\n")
        path = root / folder / spec["list"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(rows))
    manifest = root / f"{name}.yml"
    manifest.write_text(yaml.safe_dump(content))
    return manifest


@pytest.mark.parametrize("id_name", ["imagenet200", "places100"])
def test_they_run_on_the_features_of_a_given_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    id_name: str,
) -> None:
    pytest.importorskip("timm")
    torch.set_default_dtype(torch.float32)
    (name,) = BENCHMARKS[id_name]
    manifest = small_copy(tmp_path, name, id_name)
    network = torchvision.models.resnet18(num_classes=2)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    monkeypatch.setattr(image_files, "LIMIT", 5 * 32 * 32 * 3)  # what trains stays files
    loaded, load = [], data.load_benchmark
    monkeypatch.setattr(
        data, "load_benchmark", lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1]
    )

    source = f"timm:resnet18@{tmp_path / 'weights.pth'}"
    where = ["--benchmark", str(manifest), "--data-root", str(tmp_path), "--device", "cpu"]
    command = ["--id", id_name, *where, "--classifier", source, *QUICK]
    command += ["--config", "cifar10_representation"] if name == "places100" else []
    for out in ("one", "two") if id_name == "imagenet200" else ("one",):
        assert main([*command, "--out", str(tmp_path / out)]) == 0
    assert isinstance(loaded[0].id_train.images, ImageFiles)
    table = capsys.readouterr().out
    sets = load_manifest(manifest, id_name).sets
    assert all(s.name in table for s in sets if s.role in ("near", "far"))
    # A second head finds the features of the first.
    assert len(list((tmp_path / ".ood_osdre_cache").glob("features-*"))) == 2
    scores = [np.load(path) for path in tmp_path.glob("*/scores.npz")]
    for key in scores[0].files:
        assert np.array_equal(scores[0][key], scores[-1][key])
