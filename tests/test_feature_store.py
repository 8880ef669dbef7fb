r"""Features on disk: what keys them, what is computed again, and that heads never need all at once."""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from image_roots import make_root
from torch import Tensor, nn

from ood_osdre.config import Config, HeadConfig
from ood_osdre.data import BenchmarkData, image_files, load_benchmark, load_manifest
from ood_osdre.data.transforms import Preprocess
from ood_osdre.detectors import feature_head as heads
from ood_osdre.detectors import feature_store, head_data
from ood_osdre.detectors.feature_store import FeatureFolder, Stored, Whitened, make_room
from ood_osdre.models import Classifier
from ood_osdre.models.representation import whitening_of
from ood_osdre.stages import train_run

HEAD = {"rank": 4, "held_out": 0.2, "width": 8, "depth": 1, "training": {"steps": 4, "warmup": 1}}
PREPROCESS = Preprocess([0.4] * 3, [0.3] * 3)


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> BenchmarkData:
    root = tmp_path_factory.mktemp("root")
    make_root(root)
    return load_benchmark(load_manifest(root / "toy.yml", "toy"), root, progress=False)


def classifier(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, 6), nn.Tanh())
    return Classifier.of(net, nn.Linear(6, 2)).eval()


def features_of(
    data: BenchmarkData,
    model: Classifier | None = None,
    seed: int = 0,
    time_budget: float | None = None,
    **options: object,
) -> tuple[Sequence[Tensor | Stored], str]:
    given = {"data": {"broaden": 0.4, **options}, "head": HEAD, "training": {"seed": seed}}
    given |= {"estimator": "classifier", "objective": {"endpoint": 0.0, "class_weight": 1.0}}
    config = Config.from_mapping({**given, "evaluation": {"batch_size": 3}})
    assert config.head is not None
    images = head_data.HeadData(config, config.head, data)
    return images.features(model or classifier(), PREPROCESS, time_budget=time_budget)


def kept(data: BenchmarkData) -> set[str]:
    assert data.cache is not None
    return {p.name for p in data.cache.glob("features-*")}


def test_rows_and_pieces_are_those_of_the_tensor() -> None:
    x = torch.randn(23, 5)
    stored = Stored([x[:8], x[8:16], x[16:]])
    assert (len(stored), stored.shape, stored.dtype) == (23, x.shape, x.dtype)
    for rows in (
        torch.tensor([22, 0, 8, 7, 0]),
        torch.arange(0),
        slice(None, None, 4),
        slice(3, 9),
    ):
        assert torch.equal(stored[rows], x[rows])
    assert torch.equal(torch.cat(list(stored.split(3))), x)
    assert max(map(len, stored.split(3))) == 3
    whitening = whitening_of(x, x + 1, None)
    rows = torch.tensor([4, 20, 9])
    part = Whitened(stored, whitening, rows, "cpu")
    assert part.shape == (3, whitening.shape[1])
    torch.testing.assert_close(part[torch.tensor([2, 0])], whitening(x[[9, 4]]))


def test_features_are_computed_once_and_keyed_by_what_they_depend_on(
    data: BenchmarkData, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 2)
    first, _ = features_of(data)
    before = kept(data)
    assert len(before) == 2
    computed, compute = [], head_data.classifier_features

    def counted(*args: object) -> object:
        computed.append(len(args[1]))  # type: ignore[arg-type]
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_data, "classifier_features", counted)
    again, _ = features_of(data)
    assert not computed
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    # Of another seed the reference is broadened otherwise, and the ID images are the same.
    features_of(data, seed=1)
    assert sum(computed) == len(data.split_reference()[0])
    # One shard that is gone is computed alone, and to the same numbers.
    computed.clear()
    assert data.cache is not None
    (data.cache / min(before) / "00001.npy").unlink()
    (data.cache / max(before) / "00000.npy").write_bytes(b"damaged")
    again, _ = features_of(data)
    assert sum(computed) == 12
    assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    # So is one that was cut short, or holds another number; a line says so.
    path = data.cache / max(before) / "00000.npy"
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:-100], whole[:150] + b"\x01" + whole[151:]):
        computed.clear()
        caplog.clear()
        path.write_bytes(damaged)
        again, _ = features_of(data)
        assert sum(computed) == 6
        (record,) = caplog.records
        assert record.getMessage().startswith(f"rebuilding the damaged cache {path}")
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        assert path.read_bytes() == whole
    # Another network, other images and another share are others.
    count = len(kept(data))
    for model, options in (
        (classifier(1), {}),
        (None, {"train_limit": 11}),
        (None, {"broaden": 0.1}),
    ):
        features_of(data, model, **options)
        count += 1 if options == {"broaden": 0.1} else 2
        assert len(kept(data)) == count


def counted(monkeypatch: pytest.MonkeyPatch, kill_at: int = 0) -> list[int]:
    r"""Returns what grows with each batch whose features are computed; SIGTERM comes at one of them."""
    calls, compute = list[int](), head_data.classifier_features

    def classifier_features(*args: object) -> object:
        calls.append(1)
        if len(calls) == kill_at:
            os.kill(os.getpid(), 15)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_data, "classifier_features", classifier_features)
    return calls


def test_a_signal_stops_it_and_what_is_done_is_not_done_again(
    data: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 1)
    model, calls = classifier(2), counted(monkeypatch, kill_at=6)
    assert features_of(data, model)[1] == "SIGTERM"
    whole, stopped = features_of(data, model)
    assert (stopped, len(calls)) == ("", 1 + sum(-(-len(x) // 3) for x in whole))
    assert [len(x) for x in whole] == [12, len(data.split_reference()[0])]


def test_a_time_budget_stops_it_after_a_shard_that_is_kept(
    data: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 1)
    model, calls = classifier(7), counted(monkeypatch)
    for count in range(1, 100):
        found, reason = features_of(data, model, time_budget=0.0)
        if not reason:
            break
        assert (reason, len(calls)) == ("time budget", count)
    shards = len(calls)
    assert shards == count - 1 == sum(-(-len(x) // 3) for x in found)
    assert features_of(data, model, time_budget=1e6)[1] == ""
    # Where nothing can be kept, every call would stop at the same image.
    memory = replace(data, cache=None)
    whole, reason = features_of(memory, model, time_budget=0.0)
    assert (reason, len(calls)) == ("", 2 * shards)
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


def test_a_run_whose_budget_ends_among_the_features_goes_on_with_them(
    data: BenchmarkData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 4)
    options: dict[str, object] = {
        "estimator": "classifier",
        "network": {"width": 0.125, "depths": (1, 1, 1, 1), "stem_stride": 2},
        "objective": {"endpoint": 0.0, "class_weight": 1.0},
        "training": {"steps": 1, "batch_size": 4, "warmup": 0, "amp": "none"},
        "evaluation": {"batch_size": 3},
        "head": HEAD,
    }
    config, reasons = Config.from_mapping(options), list[str]()
    while "finished" not in reasons and len(reasons) < 30:
        outcome = train_run(config, data, tmp_path, torch.device("cpu"), 0.0, True, progress=False)
        reasons.append(outcome[1].reason)
    assert reasons.count("time budget, computing features") > 2
    assert reasons[-2:] == ["time budget, training the head", "finished"]


def test_old_features_make_room_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "KEPT", 3000)
    folders = [FeatureFolder([tmp_path], [i], 10, 10) for i in range(6)]
    for i, folder in enumerate(folders):
        assert folder.read(0) is None
        folder.keep(0, torch.full((10, 25), float(i)))
        os.utime(folder.folders[0], (i, i))
    left = folders[0].folders[0] / f".{'0' * 32}.tmp.npy"  # of a writer that was killed
    left.touch()
    os.utime(left, (0, 0))
    os.utime(folders[2].folders[0], (now := time.time() - 3600, now))  # another run's
    monkeypatch.setattr(feature_store, "KEPT", 3400)
    make_room(folders[:2])  # alone they are about as many as may be kept beside them
    assert [f.read(0) is not None for f in folders] == [True, True, True, False, True, True]
    assert not left.exists()
    # However many, those that are in use stay.
    monkeypatch.setattr(feature_store, "KEPT", 0)
    make_room(folders[:1])
    assert [f.read(0) is not None for f in folders] == [True, True, True, False, False, False]


def test_features_are_in_use_while_others_are_computed(
    data: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 1)
    model, compute, ages = classifier(3), head_data.classifier_features, []
    assert data.cache is not None
    before = kept(data)

    def aged(*args: object) -> object:
        for name in kept(data) - before:
            ages.append(time.time() - (data.cache / name).stat().st_mtime)
            os.utime(data.cache / name, (0, 0))
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_data, "classifier_features", aged)
    features_of(data, model)
    assert len(ages) > 20  # of those of the ID images, too, while the reference was at work
    assert max(ages) < 60


def test_where_nothing_can_be_kept_it_is_kept_elsewhere_or_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    for homes in ([tmp_path / "file"], [tmp_path / "file", tmp_path / "other"]):
        folder = FeatureFolder(homes, ["k"], 4, 2)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            folder.keep(0, torch.ones(2, 3))
            folder.keep(1, torch.ones(2, 3))
            make_room([folder])
        assert len(caplog.records) == 1
        assert [folder.read(i) is not None for i in range(2)] == [len(homes) == 2] * 2


class Watched(Stored):
    r"""Stored features that remember the most rows that were asked for at once."""

    most = 0

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        found = super().__getitem__(rows)
        Watched.most = max(Watched.most, len(found))
        return found


@pytest.mark.parametrize("mixed", [0, 30])
def test_a_head_is_that_of_the_tensors_and_sees_few_rows_at_once(
    monkeypatch: pytest.MonkeyPatch, mixed: int
) -> None:
    monkeypatch.setattr(heads, "TOGETHER", 40)
    monkeypatch.setattr(heads, "WATCHED", 20)
    monkeypatch.setattr("ood_osdre.models.representation.WHOLE", 40 * 8 * 6)
    monkeypatch.setattr("ood_osdre.data.transforms.Standardiser.sample_size", 30)
    Watched.most = 0
    torch.manual_seed(0)
    x_1, x_0 = torch.randn(300, 6) + 1, torch.randn(400, 6)
    x_1[7] = x_1[250]  # copies, which stay on one side
    head = HeadConfig.of(
        {**HEAD, "rank": None, "training": {**HEAD["training"], "batch_size": 16}}, "h"
    )
    taken = []
    split = heads._split

    def remember(*args: object) -> object:
        taken.append(split(*args))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(heads, "_split", remember)
    models = []
    for wrap in (lambda x: x, lambda x: Watched(list(x.split(64)))):
        fitted = heads.fit_head(head, wrap(x_1), wrap(x_0), mixed=mixed)
        assert fitted.outcome.finished
        models.append(fitted.model)
        scores, _, rows = fitted.outcome.scores["id"]  # of the rows that were watched
        with torch.no_grad():
            torch.testing.assert_close(
                fitted.model.log_ratio(x_1[rows]), torch.as_tensor(scores), rtol=1e-3, atol=1e-4
            )
    for one, other in zip(taken[:2], taken[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert Watched.most <= 61
    x = torch.randn(9, 6)
    with torch.no_grad():
        expected, found = (model.log_ratio(x) for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert expected.std() > 0


def test_a_benchmark_too_large_for_memory_gives_stored_features(
    data: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, _ = features_of(data)
    monkeypatch.setattr(image_files, "LIMIT", 0)
    stored, _ = features_of(data)
    for a, b in zip(stored, held, strict=True):
        assert isinstance(a, Stored)
        np.testing.assert_array_equal(a[:], b)
