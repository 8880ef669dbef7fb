r"""Images that stay files: the same numbers as from memory, and never many of them at once."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from image_roots import as_cifar, edit, make_root
from PIL import Image
from torch import nn

from ood_osdre import OneStepDetector
from ood_osdre.data import ImageSet, image_files, images, load_benchmark, load_manifest, transforms
from ood_osdre.data.__main__ import main
from ood_osdre.data.image_files import ArrayRows, ImageFiles, fingerprints, in_batches, survey
from ood_osdre.data.inputs import read, read_pieces
from ood_osdre.data.sets import hold_out_reference, thinned
from ood_osdre.data.transforms import Preprocess
from ood_osdre.errors import UserError
from ood_osdre.evaluation.evaluate import Validation
from ood_osdre.paths import Moments
from ood_osdre.sections import DataConfig
from ood_osdre.training import distributed, streaming
from ood_osdre.training.batches import ImageBatches, limited

SIDE, COUNT = 32, 40
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (2, COUNT, SIDE, SIDE, 3), dtype=np.uint8)
OPTIONS = {"training__warmup": 1, "training__batch_size": 8, "training__amp": "none"}
OPTIONS |= {"progress": False, "data__val_limit": 4, "data__flip": "alternating"}
OPTIONS |= {"evaluation__batch_size": 8, "backbone": nn.Sequential(nn.AvgPool2d(8), nn.Flatten())}


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    r"""Two folders of images: of each of two classes half, and one copy of another."""
    root, found = tmp_path_factory.mktemp("images"), []
    for name, pixels in zip(("id", "reference"), PIXELS, strict=True):
        for i, image in enumerate(pixels):
            path = root / name / f"class {i % 2}" / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[0] if i == 2 else image).save(path)
        found.append(root / name)
    return found


@pytest.fixture
def _streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "LIMIT", 0)


def files_of(folder: Path) -> tuple[ImageSet, ImageSet]:
    r"""Returns the images of a folder as files and in memory."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.png"))
    labels = np.arange(len(names)) % 2
    lazy = images.image_files(folder, names, SIDE, "toy")
    return ImageSet(lazy, labels, names), ImageSet(lazy[:], labels, names)


class Counting:
    r"""Counts the images that are decoded, and those that are at once in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all, self.most, decode_all = 0, 0, images.decode_all

        def counted(paths: list[Path], *args: object, **kwargs: object) -> np.ndarray:
            self.all, self.most = self.all + len(paths), max(self.most, len(paths))
            return decode_all(paths, *args, **kwargs)

        monkeypatch.setattr(images, "decode_all", counted)


def test_rows_of_files_and_arrays_are_those_of_the_array(folders: list[Path]) -> None:
    lazy, held = files_of(folders[0])
    array = held.images
    view = ArrayRows(array, np.arange(COUNT))
    assert isinstance(lazy.images, ImageFiles)
    mask = np.arange(COUNT) % 3 == 0
    for x in (lazy.images, view):
        assert (x.shape, x.dtype, x.ndim, len(x), x.nbytes) == (
            array.shape, array.dtype, 4, COUNT, array.nbytes,
        )  # fmt: skip
        for rows in (slice(3, 9), slice(None, None, -7), [5, 1, 5], mask, np.int64(3), -1, 7):
            np.testing.assert_array_equal(x[rows], array[rows])
        twice = x.pick([9, 8, 7, 6]).pick(np.array([2, 0]))
        np.testing.assert_array_equal(twice[:], array[[7, 9]])
        np.testing.assert_array_equal(np.asarray(x), array)
        np.testing.assert_array_equal(np.stack(list(x)), array)
        batches = list(in_batches(x, 7, 2, 33))
        assert [len(b) for b in batches] == [7, 7, 7, 7, 3]
        np.testing.assert_array_equal(np.concatenate(batches), array[2:33])
        with pytest.raises(IndexError):
            x[COUNT]


def test_subsets_are_views(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, held = files_of(folders[0])
    count = Counting(monkeypatch)
    parts = [*hold_out_reference(lazy), thinned(lazy, 7), limited(lazy, 5, 3)]
    assert count.all == 0
    monkeypatch.setattr("ood_osdre.data.sets.HELD", 0)
    expected = [*hold_out_reference(held), thinned(held, 7), limited(held, 5, 3)]
    for part, same in zip(parts, expected, strict=True):
        assert isinstance(same.images, ArrayRows)
        assert np.shares_memory(same.images.array, held.images)
        np.testing.assert_array_equal(part.images[:], same.images[:])
        assert part.names == same.names
        assert part.labels.tolist() == same.labels.tolist()
    assert parts[2].held() is parts[2]  # of none of them is held what is more than nothing
    monkeypatch.undo()
    assert isinstance(parts[2].held().images, np.ndarray)


def test_one_pass_finds_fingerprints_and_exact_statistics(folders: list[Path]) -> None:
    lazy, held = files_of(folders[0])
    rows = np.arange(1, COUNT, 2)
    for found in (survey(lazy.images), survey(held.images)):
        assert found.marks.tolist() == fingerprints(held.images).tolist()
        mean, std = found.statistics(rows)
        x = held.images[rows].astype(np.float64)
        np.testing.assert_array_equal(mean, x.sum((0, 1, 2)) / (len(rows) * SIDE * SIDE))
        np.testing.assert_allclose(std, x.std((0, 1, 2)), rtol=1e-12)
    grey = survey(np.full((3, 8, 8, 3), 255, np.uint8))
    assert grey.statistics(np.arange(3))[1].tolist() == [0.0] * 3


def test_no_batch_depends_on_where_images_are(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    r"""Held, gathered or decoded ahead; in order, again from the middle, or one alone."""
    (lazy, held), (reference, others) = map(files_of, folders)
    options = DataConfig(crop=3, broaden=0.3, mixture=0.2, flip="random")
    preprocess = Preprocess((0.4,) * 3, (0.2,) * 3)

    def batches(*sets: ImageSet) -> ImageBatches:
        return ImageBatches(*sets, options, preprocess, 7, 1)

    expected = batches(held, others)
    monkeypatch.setattr(image_files, "LIMIT", 0)
    frozen = ImageSet(held.images.copy(), held.labels, held.names)
    frozen.images.flags.writeable = False
    streamed, mixed = batches(lazy, reference), batches(frozen, reference)
    order = [0, 1, 0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 3]
    for step in order:
        for x, a, b in zip(expected(step), streamed(step), mixed(step), strict=True):
            assert x is None or (torch.equal(x, a) and torch.equal(x, b))
    streamed.close()
    assert streamed._images.whole == [None, None]
    for a, b in zip(streamed.ends(), expected.ends(), strict=True):
        assert torch.equal(torch.cat(list(a)), torch.cat(list(b)))


@pytest.mark.parametrize("mixture", [0.0, 0.5, 0.99])
def test_of_several_processes_each_decodes_what_it_trains_on(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, mixture: float
) -> None:
    (lazy, held), (reference, others) = map(files_of, folders)
    share = min(0.5, 1 - mixture)
    options = DataConfig(crop=3, broaden=share, mixture=mixture, flip="random")
    preprocess = Preprocess((0.4,) * 3, (0.2,) * 3)
    # The one that needs images of other places.
    monkeypatch.setattr(transforms, "BROADENINGS", {"mix": transforms.BROADENINGS["mix"]})
    size, mixed, together = 24, round(24 * mixture), round(24 * share)
    expected = ImageBatches(held, others, options, preprocess, size, 1)
    monkeypatch.setattr(image_files, "LIMIT", 0)
    for start in range(0, size, 8):
        part = slice(start, start + 8)
        monkeypatch.setattr(distributed, "share", lambda size, part=part: part)
        with monkeypatch.context() as counted:
            count = Counting(counted)
            batches = ImageBatches(lazy, reference, options, preprocess, size, 1)
            for step in (0, 4):
                for x, own in zip(expected(step), batches(step), strict=True):
                    assert x is None or torch.equal(x[part], own[part])
        own_places = set(range(start, start + 8))
        before = {(i - 1) % size for i in own_places if i >= size - mixed}
        beside = set(range(together)) if start < together else set()
        assert count.all == 2 * (len(own_places | before) + len(own_places | beside))


def test_the_processes_that_decode_are_used_and_bounded(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lazy, _), (reference, _) = map(files_of, folders)
    monkeypatch.setattr(image_files, "LIMIT", 0)
    count, made = Counting(monkeypatch), []
    loader = streaming.DataLoader

    def counted(*args: object, **kwargs: object) -> object:
        made.append((kwargs["num_workers"], kwargs["prefetch_factor"]))
        return loader(*args, **kwargs)

    monkeypatch.setattr(streaming, "DataLoader", counted)
    monkeypatch.setattr(streaming, "AHEAD", 5 * 2 * 4 * SIDE * SIDE * 3)
    monkeypatch.setattr(streaming, "cores", lambda: 2)
    state = torch.random.get_rng_state()
    batches = ImageBatches(lazy, reference, DataConfig(), Preprocess([0.5] * 3, [0.2] * 3), 4, 0)
    for step in (0, 1, 0, 1, 2, 3, 4, 5):
        batches(step)
    # Those of the first steps alone were decoded here, a step at a time.
    assert (count.all, count.most) == (4 * 2 * 4, 4)
    assert made == [(2, 2)]
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert not multiprocessing.active_children()
    assert torch.equal(torch.random.get_rng_state(), state)


HELD = """
import sys
from pathlib import Path
from ood_osdre.data import ImageSet, image_files, images
from ood_osdre.data.transforms import Preprocess
from ood_osdre.sections import DataConfig
from ood_osdre.training.batches import ImageBatches

image_files.LIMIT, folder = 0, Path(sys.argv[1])
names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.png"))
lazy = images.image_files(folder, names, 32, "toy")
same = ImageSet(lazy, images.np.arange(len(names)) % 2, names)
batches = ImageBatches(same, same, DataConfig(), Preprocess([0.5] * 3, [0.2] * 3), 4, 0)
for step in range(4):
    batches(step)
assert batches._images.ahead.coming is not None
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no such processes")
def test_a_program_that_holds_its_batches_ends(folders: list[Path]) -> None:
    command = [sys.executable, "-c", HELD, str(folders[0])]
    with subprocess.Popen(command, start_new_session=True) as program:
        try:
            assert program.wait(300) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def test_moments_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x_0, x_1 = torch.randn(90, 3, 4, 4), torch.randn(70, 3, 4, 4) + 1
    found = Moments.of(x_0.split(13), iter(x_1.split(50)))
    np.testing.assert_allclose(found, Moments.of(x_0, x_1), rtol=1e-13)
    assert found.cross == pytest.approx(float((x_0.mean(0) * x_1.mean(0)).sum()), rel=1e-5)
    preprocess = Preprocess([0.5] * 3, [0.2] * 3)
    (whole,) = preprocess.sample(PIXELS[0])
    assert len(whole) == COUNT
    for name in ("WHOLE", "PIECE"):
        monkeypatch.setattr(f"ood_osdre.data.transforms.{name}", 1)
    pieces = list(preprocess.sample(np.repeat(PIXELS[0], 4, axis=0)))
    assert [len(p) for p in pieces] == [64, 64, 32]


def fitted(folders: list[Path], steps: int = 6, **options: object) -> OneStepDetector:
    detector = OneStepDetector("digits", training__steps=steps, **OPTIONS)
    return detector.fit(*folders, **options)


def weights(detector: OneStepDetector) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in detector._trained.ratio.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(v, other[k]) for k, v in one.items())


def test_a_seed_trains_the_same_weights_from_files(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = fitted(folders)
    monkeypatch.setattr(image_files, "LIMIT", 0)
    for name in (
        "transforms.MULTIPLE",
        "image_files.SURVEYED",
        "transforms.WHOLE",
        "inputs.PIECE",
    ):
        monkeypatch.setattr(f"ood_osdre.data.{name}", 8)
    monkeypatch.setattr("ood_osdre.data.transforms.PIECE", 8)
    count = Counting(monkeypatch)
    streamed = fitted(folders)
    assert same(weights(streamed), weights(held))
    assert streamed.outcome.best.keys() == held.outcome.best.keys()
    for key in held.outcome.best.keys() - {"seconds"}:
        assert streamed.outcome.best[key] == held.outcome.best[key]
    assert streamed._trained.metadata == held._trained.metadata
    assert not multiprocessing.active_children()  # those that decoded
    assert count.most == 8
    np.testing.assert_array_equal(streamed.score(folders[1]), held.score(folders[1]))
    # What was read in fit is known by its pixels, and is refused.
    with pytest.raises(UserError, match="40 of 40 items were read in fit"):
        streamed.calibrate(PIXELS[0][[0, 1, 0, *range(3, COUNT)]])


@pytest.mark.usefixtures("_streamed")
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = fitted(folders, steps=7)
    call = ImageBatches.__call__

    def interrupted(self: ImageBatches, step: int) -> object:
        if step == 5:
            raise KeyboardInterrupt
        return call(self, step)

    every = {**OPTIONS, "training__checkpoint_every": 4}
    detector = OneStepDetector("digits", training__steps=7, **every)
    with monkeypatch.context() as patch:
        patch.setattr(ImageBatches, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            detector.fit(*folders, folder=tmp_path)
    detector.fit(*folders, folder=tmp_path, resume=True)
    assert same(weights(detector), weights(whole))


@pytest.mark.usefixtures("_streamed")
@pytest.mark.parametrize("steps", [1, 6])
def test_a_file_that_breaks_on_the_way_is_one_line_that_names_it(
    folders: list[Path], tmp_path: Path, steps: int
) -> None:
    lazy, _ = files_of(folders[0])
    copies = tmp_path / "copies"
    for name in lazy.names:
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(folders[0] / name, copies / name)
    reference, _ = files_of(copies)
    options, preprocess = DataConfig(), Preprocess([0.5] * 3, [0.2] * 3)
    batches = ImageBatches(lazy, reference, options, preprocess, 4, 0)
    for step in range(steps):
        batches(step)
    for path in copies.rglob("*.png"):
        path.unlink()
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"toy: cannot decode .*\.png") as error:
        list(map(batches, range(steps, steps + 20)))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"cannot decode .*\.png"):
        list(in_batches(reference.images, 8))


@pytest.mark.usefixtures("_streamed")
def test_a_daemon_decodes_in_its_own_process(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_may_fork", lambda: False)
    monkeypatch.setattr(streaming, "DataLoader", None)
    (lazy, _), (reference, _) = map(files_of, folders)
    batches = ImageBatches(lazy, reference, DataConfig(), Preprocess([0.5] * 3, [0.2] * 3), 4, 0)
    for step in range(6):
        batches(step)


def test_users_files_are_decoded_whole_only_if_they_are_few(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sorted(folders[0].rglob("*.png"))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{p} {i % 2}\n" for i, p in enumerate(paths)))
    lazy, held = files_of(folders[0])
    given = {"folder": folders[0], "list": listed, "paths": paths, "set": lazy}
    whole = {k: read(x, SIDE, "input") for k, x in given.items()}
    monkeypatch.setattr(image_files, "LIMIT", 0)
    monkeypatch.setattr("ood_osdre.data.inputs.PIECE", 9)
    for name, x in given.items():
        found = read(x, SIDE, "input")
        assert isinstance(found.values, ImageFiles)
        assert isinstance(whole[name].values, np.ndarray)
        np.testing.assert_array_equal(found.values[:], held.images)
        np.testing.assert_array_equal(whole[name].values, held.images)
        assert found.names == whole[name].names
        assert found.labels.tolist() == whole[name].labels.tolist()
        pieces = list(read_pieces(x, SIDE, "input"))
        assert [len(p.values) for p in pieces] == [9, 9, 9, 9, 4]
        assert [n for p in pieces for n in p.names] == found.names
    with pytest.raises(UserError, match=r"input: got images of 32 x 32 pixels, expected 16 x 16"):
        read(lazy, 16, "input")


def test_validation_holds_few_images(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (lazy, _), (reference, _) = map(files_of, folders)
    preprocess = Preprocess([0.5] * 3, [0.2] * 3)
    for name in ("ood_osdre.data.sets.HELD", "ood_osdre.evaluation.evaluate.DRAWN"):
        monkeypatch.setattr(name, 11 * SIDE * SIDE * 3)
    few = Validation(lazy, reference, preprocess, limit=10)
    assert all(isinstance(x, np.ndarray) for x in (few.id_val.images, *few.near.values()))
    many = Validation(lazy, reference, preprocess)
    assert all(isinstance(x, ImageFiles) for x in (many.id_val.images, *many.near.values()))
    assert [len(x) for x in many.far.values()] == [11] * 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_root(tmp_path)
    return tmp_path


def test_a_large_set_of_a_benchmark_stays_files_and_leaves_no_cache(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = yaml.safe_load((root / "toy.yml").read_text())
    content["ids"]["toy"]["sets"] += [  # of neither there are files to be compared
        {"name": "made", "role": "far", "synthetic": "noise", "count": 3},
        {"name": "array", "role": "far", "list": "array.npy"},
    ]
    (root / "toy.yml").write_text(yaml.safe_dump(content))
    np.save(root / "array.npy", 255 - PIXELS[0])
    manifest = load_manifest(root / "toy.yml", "toy")
    held = load_benchmark(manifest, root, root / "cache", progress=False)
    monkeypatch.setattr(image_files, "LIMIT", 12 * SIDE * SIDE * 3 - 1)  # below two of the sets
    count = Counting(monkeypatch)
    data = load_benchmark(manifest, root, root / "none", progress=False)
    assert count.most < 12
    assert [isinstance(s.images, ImageFiles) for s in (data.id_train, data.id_val, data.reference)] == [
        True, False, True,
    ]  # fmt: skip
    kept = [p.name for p in (root / "none").iterdir() if not p.name.startswith("marks")]
    assert len(kept) == 6
    np.testing.assert_array_equal(data.reference.images[:], held.reference.images)
    for one, other in zip(data.split_reference(), held.split_reference(), strict=True):
        np.testing.assert_array_equal(one.images[:], other.images[:])
    assert not caplog.records


def test_an_array_brought_to_another_size_is_another_set(root: Path) -> None:
    np.save(root / "array.npy", 255 - PIXELS[0])
    edit(root, "test_far.txt", list="array.npy", count=COUNT)
    keys, marks = [], []
    for size in (32, 16):
        text = (root / "toy.yml").read_text()
        (root / "toy.yml").write_text(f"{text}size: {size}\n")
        manifest = load_manifest(root / "toy.yml", "toy")
        (root / "toy.yml").write_text(text)
        found = load_benchmark(manifest, root, progress=False).far["far"]
        keys.append(found.key)
        marks += [p.name for p in (root / ".ood_osdre_cache").glob("marks-far-far-*")]
    assert keys[0] != keys[1]
    assert len(set(marks)) == 2


@pytest.mark.parametrize("most", [50_000, 0])
def test_copies_of_files_are_looked_for_or_it_is_said_that_they_are_not(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    monkeypatch.setattr(image_files, "LIMIT", 12 * SIDE * SIDE * 3 - 1)
    monkeypatch.setattr("ood_osdre.data.status.OPENED", most)
    manifest = load_manifest(root / "toy.yml", "toy")
    folder = root / "images_classic"
    for source, target in (
        ("toy/id_train/bird/0", "others/n03/images/1"),
        ("far/far/1", "near/near/1"),
    ):
        (folder / f"{target}.png").write_bytes((folder / f"{source}.png").read_bytes())
    load_benchmark(manifest, root, progress=False)
    messages = [record.getMessage() for record in caplog.records]
    expected = "id_train toy and reference others"
    if most:
        assert messages == [f"{expected} share images: 1 of the 48 of the latter"]
    else:
        (message,) = messages
        assert re.match(r"not compared, as their files are too many: \d+ pairs: ", message)
        assert f"{expected}, " in message


def test_a_damaged_cache_is_found_when_it_is_written_or_the_data_are_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(images, "CHECKED", 0)
    as_cifar(root)
    manifest, cache = load_manifest(root / "toy.yml", "cifar10"), root / ".ood_osdre_cache"
    before = load_benchmark(manifest, root, progress=False).reference.images[:].copy()
    (path,) = cache.glob("train_others-*.npy")
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    (cache / "mine.npy").write_bytes(b"of another program")

    def check() -> str:
        command = ["check", "--id", "cifar10", "--benchmark", str(root / "toy.yml")]
        assert main([*command, "--data-root", str(root)]) == 0
        return capsys.readouterr().out

    # Nobody reads all pixels of a large one to use a few of them.
    again = load_benchmark(manifest, root, progress=False)
    assert not np.array_equal(again.reference.images, before)
    assert f"{path}: damaged and removed; the next run decodes it again" in check()
    assert "removed" not in check()
    assert (cache / "mine.npy").exists()
    once_more = load_benchmark(manifest, root, progress=False)
    np.testing.assert_array_equal(once_more.reference.images, before)


def test_a_large_array_of_another_size_is_resized_as_it_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = RNG.integers(0, 256, (200, 20, 24, 3), dtype=np.uint8)
    np.save(root / "array.npy", array)
    edit(root, "test_far.txt", list="array.npy", count=len(array))
    manifest = load_manifest(root / "toy.yml", "toy")
    held = load_benchmark(manifest, root, progress=False)
    monkeypatch.setattr(image_files, "LIMIT", 100 * SIDE * SIDE * 3)
    most, resized = [], image_files.ResizedRows._fetched

    def counted(self: image_files.ResizedRows, rows: np.ndarray) -> np.ndarray:
        most.append(len(rows))
        return resized(self, rows)

    monkeypatch.setattr(image_files.ResizedRows, "_fetched", counted)
    data = load_benchmark(manifest, root, root / "none", progress=False)
    assert 0 < max(most) < 100
    assert data.checksums == held.checksums
    assert not list((root / "none").glob("array-*"))
    large, small = data.far["far"], held.far["far"]
    rows = np.array([190, 3, 3])
    np.testing.assert_array_equal(large.images[:], small.images[:])
    np.testing.assert_array_equal(large.subset(rows).images[:], small.images[rows])
    # As what trains, its rows are fetched for their step.
    chosen = [torch.as_tensor(rows)]
    for images_of in (large.images, small.images):
        ((batch, within),) = streaming.StepImages(
            [images_of], lambda _: chosen, torch.device("cpu")
        )(0)
        np.testing.assert_array_equal(batch[within], small.images[rows])


def test_checking_that_all_can_be_decoded_holds_few(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, empty = [], np.empty
    monkeypatch.setattr(
        images.np, "empty", lambda *a, **k: made.append(empty(*a, **k)) or made[-1]
    )
    as_cifar(root)
    for name in ("3", "4"):
        (root / f"images_classic/far/far/{name}.png").write_bytes(b"damaged")
    command = ["check", "--id", "cifar10", "--benchmark", str(root / "toy.yml"), "--decode"]
    assert main([*command, "--data-root", str(root)]) == 0
    assert re.search(r"cannot decode 2 files: .*far/3\.png.*\n", capsys.readouterr().out)
    assert not [x.shape for x in made if x.ndim == 4 and len(x) > 1]
