r"""Tests for the ood_osdre.data.download and ood_osdre.data.__main__ modules."""

import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import yaml
from image_roots import make_root
from PIL import Image
from torchvision import datasets

from ood_osdre.data import load_manifest
from ood_osdre.data.__main__ import main
from ood_osdre.data.download import at_mirror, subset_mask
from ood_osdre.data.lists import image_list, read_list
from ood_osdre.resources import find

CLASSES = [f"class {i}" for i in range(10)]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "mirror"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def cifar(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    r"""A CIFAR-10 archive of 10 images a training batch and 40 test images."""
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files, test = {}, np.empty(0)
    for name in names:
        count = 40 if name == "test_batch" else 10
        test = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        files[name] = pickle.dumps({"data": test, "labels": [i % 10 for i in range(count)]})
    files["batches.meta"] = pickle.dumps({"label_names": CLASSES})

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    (tmp_path / "mirror" / "cifar-10-python.tar.gz").write_bytes(archive.getvalue())

    meta = {**datasets.CIFAR10.meta, "md5": md5(files["batches.meta"])}
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(archive.getvalue()))
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    lists = {"train_list": names[:5], "test_list": names[5:]}
    for attribute, members in lists.items():
        monkeypatch.setattr(
            datasets.CIFAR10, attribute, [[name, md5(files[name])] for name in members]
        )

    return test.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.fixture
def mnist(mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    r"""MNIST files of 7 training and 5 test images."""
    rng = np.random.default_rng(1)
    resources, pixels = [], np.empty(0)
    for split, count in (("train", 7), ("t10k", 5)):
        pixels = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8)
        for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            magic = 0x800 + array.ndim
            data = struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()
            data = gzip.compress(data)
            name = f"{split}-{kind}-ubyte.gz"
            (tmp_path / "mirror" / name).write_bytes(data)
            resources.append((name, md5(data)))
    monkeypatch.setattr(datasets.MNIST, "resources", resources)

    return pixels


def cifar_manifest(root: Path) -> Path:
    r"""Writes a manifest with OpenOOD's own recipes, but the sizes of the fake archives."""
    shipped = yaml.safe_load(find("data_manifests", "openood").read_text())
    counts = {"id_train": 50, "mnist": 12, "random300k": 4}
    counts |= {f"id_{part}": int(mask(part).sum()) for part in ("val", "test")}
    entry = shipped["ids"]["cifar10"]
    sizes = [(s, counts.get(s["role"], counts.get(s["name"]))) for s in entry["sets"]]
    entry["sets"] = [{**s, "sha256": None, "count": size} for s, size in sizes if size]
    path = root / "fake.yml"
    path.write_text(yaml.safe_dump(shipped))
    return path


def mask(name: str) -> np.ndarray:
    r"""The first four images of each class, as the archive has them."""
    return subset_mask(f"cifar10_{name}")[:, :4]


@pytest.fixture
def arguments(tmp_path: Path, mirror: str) -> list[str]:
    root = tmp_path / "data"
    root.mkdir()
    np.save(root / "300K_random_images.npy", np.zeros((4, 32, 32, 3), np.uint8))
    manifest = cifar_manifest(tmp_path)
    where = ["--benchmark", str(manifest), "--data-root", str(root)]
    return ["check", "--id", "cifar10", *where, "--download", "--mirror", mirror]


@pytest.mark.usefixtures("mnist")
def test_download_lays_images_out_as_openood(
    arguments: list[str], cifar: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.count("present  ") == 5

    root = tmp_path / "data"
    train = read_list(root / "benchmark_imglist" / "cifar10" / "train_cifar10.txt")
    assert train.names[0] == "cifar10/train/class 0/0001.png"
    assert train.names[-1] == "cifar10/train/class 9/0005.png"
    assert set(train.labels) == set(range(10))

    parts = [
        read_list(root / f"benchmark_imglist/cifar10/{s}_cifar10.txt") for s in ("val", "test")
    ]
    assert len(parts[0]) + len(parts[1]) == 40
    assert not set(parts[0].names) & set(parts[1].names)
    for part, name in zip(parts, ("val", "test"), strict=True):
        for path in part.names:
            c, number = path.split("/")[2], int(Path(path).stem) - 1
            assert mask(name)[CLASSES.index(c), number]

    pixels = np.asarray(Image.open(root / "images_classic/cifar10/test/class 3/0002.png"))
    np.testing.assert_array_equal(pixels, cifar[13])


@pytest.mark.usefixtures("cifar")
def test_mnist_has_openoods_names_and_label(
    arguments: list[str], mnist: np.ndarray, tmp_path: Path
) -> None:
    assert main(arguments) == 0
    content = read_list(tmp_path / "data" / "benchmark_imglist" / "cifar10" / "test_mnist.txt")

    assert content.names[:2] == ("mnist/test/0_0.jpg", "mnist/test/1_1.jpg")
    assert content.names[-1] == "mnist/train/6_6.jpg"
    assert set(content.labels) == {-1}
    image = Image.open(tmp_path / "data" / "images_classic" / content.names[4])
    assert (image.format, image.mode, image.size) == ("JPEG", "L", (28, 28))
    assert np.abs(np.asarray(image).astype(int) - mnist[4]).mean() < 10


@pytest.mark.usefixtures("cifar", "mnist")
def test_existing_lists_and_images_stay(arguments: list[str], tmp_path: Path) -> None:
    root = tmp_path / "data"
    path = root / "benchmark_imglist" / "cifar10" / "test_mnist.txt"
    path.parent.mkdir(parents=True)
    official = "".join(f"mnist/test/{i}_{i}.jpg -1\n" for i in reversed(range(5)))
    official += "".join(f"mnist/train/{i}_{i}.jpg -1\n" for i in range(7))
    path.write_text(official)
    kept = root / "images_classic" / "mnist" / "test" / "2_2.jpg"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"mine")

    assert main(arguments) == 0
    assert path.read_text() == official
    assert kept.read_bytes() == b"mine"
    assert main([*arguments, "--decode"]) == 1


@pytest.mark.usefixtures("cifar", "mnist")
@pytest.mark.parametrize("archive", ["cifar-10-python.tar.gz", "t10k-labels-idx1-ubyte.gz"])
@pytest.mark.parametrize("damage", ["absent", "changed"])
def test_failed_download_is_one_line(
    arguments: list[str],
    tmp_path: Path,
    archive: str,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mirror" / archive
    path.unlink()
    if damage == "changed":
        path.write_bytes(b"something else")

    assert main(arguments) == 2
    error = capsys.readouterr().err
    line = next(text for text in error.splitlines() if "error: " in text)
    assert "cannot download" in line
    assert not list((tmp_path / "data").rglob("test_mnist.txt"))


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100", "FashionMNIST", "MNIST", "SVHN"])
def test_every_url_goes_to_the_mirror(name: str) -> None:
    kind = getattr(datasets, name)
    changed = at_mirror(kind, "http://127.0.0.1/")
    flat = yaml.safe_dump(changed)

    assert all(hasattr(kind, attribute) for attribute in changed)
    assert "http://127.0.0.1/" in flat
    assert flat.count("://") == flat.count("http://127.0.0.1/")


CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


@pytest.mark.parametrize(
    ("id_name", "role", "classes"),
    [
        ("cifar10", "id_val", CIFAR10),
        ("cifar10", "id_test", CIFAR10),
        ("cifar10", "near", CIFAR100),
        ("cifar100", "id_val", CIFAR100),
        ("cifar100", "id_test", CIFAR100),
    ],
)
def test_subsets_are_those_of_openoods_lists(id_name: str, role: str, classes: str) -> None:
    r"""The list of a subset has the checksum of OpenOOD's own."""
    spec = load_manifest("openood", id_name).role(role)[0]
    recipe = spec.download
    names, labels = [], []
    for label, number in zip(*subset_mask(recipe.subset).nonzero(), strict=True):
        where = {
            "split": "test",
            "class_name": classes.split()[label],
            "number": number + recipe.first,
        }
        names.append(recipe.path.format(**where))
        labels.append(-1 if role == "near" else label)
    assert image_list(names, labels).checksum == spec.sha256


def test_check_reports_every_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_root(tmp_path)
    lists, images = tmp_path / "benchmark_imglist" / "toy", tmp_path / "images_classic"
    (images / "near" / "near" / "1.png").unlink()
    (images / "far" / "far" / "1.png").write_bytes(b"")
    (lists / "val_near.txt").unlink()
    arguments = ["check", "--id", "toy", "--benchmark", str(tmp_path / "toy.yml")]
    arguments += ["--data-root", str(tmp_path)]

    assert main(arguments) == 0
    table = capsys.readouterr().out
    rows = {Path(line).name: line.split() for line in table.splitlines() if ".txt" in line}
    assert rows["train_toy.txt"][2:5] == ["present", "12", "12"]
    assert rows["test_near.txt"][2:5] == ["partial", "4", "5"]
    assert rows["test_far.txt"][2:5] == ["corrupt", "5", "5"]
    assert rows["val_near.txt"][2:6] == ["absent", "0", "3", str(lists / "val_near.txt")]
    assert "1 file: near/near/1.png" in table
    assert "1 file: far/far/1.png" in table

    (lists / "test_toy.txt").write_text("nonsense\n")
    assert main(arguments) == 1
    table = capsys.readouterr().out
    assert "id_test    toy       corrupt" in table
    assert "line 1: 'nonsense'" in table
    assert "Ask around." in table


def test_check_of_the_embedded_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--id", "digits"]) == 0
    table = capsys.readouterr().out
    assert table.count("(embedded)") == len(load_manifest("digits", "digits").sets) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--id", "cifar"], "--id: got cifar (did you mean 'cifar10'?)"),
        (["--id", "cifar10", "--benchmark", "opnood"], "did you mean 'openood'"),
        (["--id", "cifar10", "--reference", "tin579"], "did you mean 'tin597'"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
