r"""Tests of the tables: their preprocessing, on small files of the same form, and their faults."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

from ood_osdre.errors import UserError
from ood_osdre.resources import find
from ood_osdre.tasks.suites import tables
from ood_osdre.tasks.suites.tables import SHIPPED, load_table, table_names

SIZES = {
    "power": [162, 18, 20],
    "gas": [81, 9, 10],
    "hepmass": [36, 4, 30],
    "miniboone": [81, 9, 10],
    "bsds300": [5, 3, 2],
}


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    r"""The shipped manifest with the sizes of small files."""
    content = yaml.safe_load(find("data_manifests", "tabular").read_text())
    for name, entry in content["tables"].items():
        entry["rows"] = SIZES[name]
        entry["dim"] = {"gas": 3, "hepmass": 3}.get(name, entry["dim"])
    path = tmp_path / "small.yml"
    path.write_text(yaml.safe_dump(content))
    return path


def save(path: Path, x: np.ndarray) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, x)
    return x


def test_manifest_has_the_published_sizes() -> None:
    entries = yaml.safe_load(find("data_manifests", "tabular").read_text())["tables"]
    assert {name: (e["dim"], sum(e["rows"])) for name, e in entries.items()} == {
        "power": (6, 2_049_280),
        "gas": (8, 1_052_065),
        "hepmass": (21, 525_123),
        "miniboone": (43, 36_488),
        "bsds300": (63, 1_300_000),
    }
    assert table_names() == (*SHIPPED, *entries)


def test_power(tmp_path: Path, manifest: Path) -> None:
    values = np.random.default_rng(0).normal(size=(200, 8))
    x = save(tmp_path / "power/data.npy", values)
    table = load_table("power", tmp_path, manifest)
    both = np.vstack([table.train, table.val])
    np.testing.assert_allclose(both.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(both.std(axis=0), 1)
    # Columns 1 and 3 are gone, rows are in the order of the shuffle, and the noise is that of the
    # gap, the voltage, three meters, and none for the time.
    order = np.arange(200)
    np.random.RandomState(42).shuffle(order)
    every = np.vstack([both, table.test])
    widths = (0.001, 0.01, 1, 1, 1, 0)
    for column, kept, width in zip(every.T, (0, 2, 4, 5, 6, 7), widths, strict=True):
        design = np.stack([x[order, kept], np.ones(200)], axis=1)
        (slope, _), *_ = np.linalg.lstsq(design, column, rcond=None)
        noise = (column - design @ np.linalg.lstsq(design, column, rcond=None)[0]) / slope
        assert noise.std() == pytest.approx(width / np.sqrt(12), rel=0.15, abs=1e-9)


def test_miniboone(tmp_path: Path, manifest: Path) -> None:
    x = save(tmp_path / "miniboone/data.npy", np.random.default_rng(0).normal(3, 2, (100, 43)))
    table = load_table("miniboone", tmp_path, manifest)
    mean, std = x[:90].mean(axis=0), x[:90].std(axis=0)
    np.testing.assert_allclose(table.train, (x[:81] - mean) / std)
    np.testing.assert_allclose(table.test, (x[90:] - mean) / std)


def test_gas(tmp_path: Path, manifest: Path) -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(3, 100))
    columns = {"Time": a, "Meth": a, "Eth": b, "R1": a, "R2": a + 1e-3 * b, "R3": b, "R4": c}
    (tmp_path / "gas").mkdir()
    pd.DataFrame(columns).to_pickle(tmp_path / "gas/ethylene_CO.pickle")
    table = load_table("gas", tmp_path, manifest)
    # Of R1 and R2 the first goes.
    kept = np.stack([a + 1e-3 * b, b, c], axis=1)
    kept = (kept - kept.mean(axis=0)) / kept.std(axis=0, ddof=1)
    np.testing.assert_allclose(table.val, kept[81:90])


def test_hepmass(tmp_path: Path, manifest: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "hepmass").mkdir()
    frames = []
    for n, stray in ((80, ""), (60, ",")):
        x = rng.normal(size=(n, 3))
        label = np.arange(n) % 2
        rows = [
            ",".join(map(str, [float(y), *row, round(abs(row[0])) % 2])) + stray
            for y, row in zip(label, x, strict=True)
        ]
        name = "1000_test.csv" if stray else "1000_train.csv"
        text = "\n".join(["# label,f0,f1,f2,f3" + stray, *rows])
        (tmp_path / "hepmass" / name).write_text(text)
        frames.append(x[label == 1])
    table = load_table("hepmass", tmp_path, manifest)
    mean, std = frames[0].mean(axis=0), frames[0].std(axis=0, ddof=1)
    np.testing.assert_allclose(table.train, (frames[0][:36] - mean) / std)
    np.testing.assert_allclose(table.test, (frames[1] - mean) / std)


def test_bsds300(tmp_path: Path, manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "BSDS300/BSDS300.hdf5"
    path.parent.mkdir()
    path.write_bytes(b"")
    content = {k: np.full((n, 63), n) for k, n in (("train", 5), ("validation", 3), ("test", 2))}
    h5py = SimpleNamespace(File=lambda path: nullcontext(content))
    monkeypatch.setattr(tables.importlib, "import_module", lambda name: h5py)
    assert (load_table("bsds300", tmp_path, manifest).val == 3).all()

    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(tables.importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"BSDS300\.hdf5: .*h5py, if it is installed"):
        load_table("bsds300", tmp_path, manifest)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COLOUR_ROWS", 2000)
    table = load_table(name)
    np.testing.assert_allclose(table.train.mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(table.train.std(axis=0), 1)
    rows = np.concatenate([table.train, table.val, table.test])
    # Values that were rounded are so no longer.
    assert len(np.unique(rows[:, 0])) == len(rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("hepmas", None, r"got 'hepmas', expected some of .*hepmass"),
        ("power", None, r"power/data\.npy: is absent; see 'get' in .*small\.yml"),
        ("mine.csv", None, r"mine\.csv: is absent"),
        ("miniboone", np.ones((99, 43)), r"\(9, 43\)\], expected .*\(10, 43\)\]"),
        ("miniboone", np.ones((100, 42)), r"npy: got shape \(100, 42\); .* 43\)"),
        ("miniboone", np.ones((100, 43)), "table miniboone: .*contains NaN"),
        ("miniboone", np.array([{}]), r"data\.npy: not a whole \.npy array"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_files_are_refused(
    name: str, content: np.ndarray | None, message: str, tmp_path: Path, manifest: Path
) -> None:
    if content is not None:
        save(tmp_path / name / "data.npy", content)
    with pytest.raises(UserError, match=message) as caught:
        load_table(name, tmp_path, manifest)
    assert "\n" not in str(caught.value)
