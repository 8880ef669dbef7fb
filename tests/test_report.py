r"""Tests for the ood_osdre.evaluation.report module: the page, as a file and in a browser."""

import base64
import csv
import io
import json
import logging
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ood_osdre.data import BenchmarkData, ImageSet, load_manifest
from ood_osdre.errors import UserError
from ood_osdre.evaluation import gallery, report
from ood_osdre.evaluation.records import RunRecord
from ood_osdre.evaluation.report import report_beside, write_report
from ood_osdre.evaluation.scores import Scores, read_scores, write_scores
from ood_osdre.evaluation.tables import MetricsTable
from ood_osdre.runs import join_seeds
from ood_osdre.training.checkpoint import digest_of, write_checkpoint

VOID = {"meta", "img", "br", "link", "hr", "input"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ODD = '<b>&"odd"</b>'
COUNTS = {"id_test": 60, "tin": 40, ODD: 30}
CONFIG = {"estimator": "one_step", "head": None, "title": "a <title>"}
TABLE = [
    "benchmark,set,role,images,FPR@95,AUROC,AUROC_std,AUPR_IN,AUPR_OUT,FPR@95_ID",
    "b,tin,near,40,9.0,91.5,0.5,90.0,89.0,10.0",
]


class Page(HTMLParser):
    r"""The elements and texts of a page, which has to close every element that it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def of(self, tag: str, key: str) -> list[str]:
        return [a[key] or "" for name, a in self.elements if name == tag and key in a]


def images_of(names: list[str]) -> ImageSet:
    pixels = np.random.default_rng(len(names)).integers(0, 256, (len(names), 8, 8, 3), np.uint8)
    return ImageSet(pixels, np.arange(len(names)) % 3, names)


@pytest.fixture(scope="module")
def data() -> BenchmarkData:
    names = {
        key: [f"{key}/test/c{i % 3}/{i}<&.png" for i in range(n)] for key, n in COUNTS.items()
    }
    sets = {key: images_of(n) for key, n in names.items()}
    empty = ImageSet.empty(8)
    near, far = {"tin": sets["tin"]}, {ODD: sets[ODD]}
    manifest = load_manifest("digits", "digits")
    return BenchmarkData(manifest, empty, empty, sets["id_test"], empty, near, far)


def make_run(folder: Path, data: BenchmarkData, seed: int = 0) -> MetricsTable:
    r"""Writes what a run leaves, from scores that are drawn."""
    rng, scores = np.random.default_rng(seed), Scores()
    groups = {"id": {"id_test": data.id_test}, "near": data.near, "far": data.far}
    for role, sets in groups.items():
        for name, s in sets.items():
            score = rng.normal({"id": 2, "near": 0, "far": -3}[role], 1, len(s))
            scores.add(role, name, score, s.labels if role == "id" else s.labels * 0 - 1, s.names)
    write_scores(folder / "scores.npz", scores)
    facts = {"counts": scores.counts(), "seeds": (seed,)}
    table = MetricsTable.of(scores.metrics(), "A <benchmark>", **facts)
    table.to_csv(folder / "metrics.csv")
    (folder / "metrics.md").write_text(table.to_markdown())
    best = {"val_log_mass_0": 0.125, "val_log_mass_1": -0.5, "val_posterior_error": 0.0625}
    facts = {"counts": scores.counts(), "checksums": {f"near/{ODD}": "ab" * 32}}
    RunRecord(
        config=CONFIG,
        seed=seed,
        benchmark="b",
        command=["eval", "a b"],
        data=facts,
        commit={"revision": "c0ffee", "dirty": True},
        validation={"best": best},
    ).write(folder / "run.json")
    entries = [{"step": i, "loss_total": 1 / i, "val_auroc": 0.5, **best} for i in (1, 2)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in entries) + '{"st')
    return table


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, data: BenchmarkData) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, data)
    write_report(folder, data)
    return folder


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    r"""Leaves out the figures, which take most of a page's time."""
    for name in ("densities", "rankings", "over_steps"):
        monkeypatch.setattr(report, name, lambda *args: [])


def test_the_page_is_whole_and_asks_for_nothing(run: Path) -> None:
    text = (run / "report.html").read_text()
    page, tags = Page(text), {tag for tag, _ in Page(text).elements}
    assert not tags & {"script", "link", "iframe", "object", "base", "form"}
    assert "://" not in text
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) == {"#"}
    sources = [*page.of("img", "src"), *page.of("a", "href")]
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)

    # What is wider than a phone scrolls, by a finger or by keys.
    tables = [tag for tag, _ in page.elements if tag == "table"]
    assert page.of("div", "class").count("wide") == len(tables) == len(page.of("div", "tabindex"))

    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {h[1:] for h in page.of("use", "href")} | set(
        re.findall(r"url\(#(.*?)\)", text)
    ) <= set(ids)
    assert "DejaVu Sans'" not in text


def test_every_set_is_named_and_counted_as_in_the_table(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    assert ODD not in text  # but escaped
    assert {"A <benchmark>", "id_test (ID)", "tin", ODD, "eval 'a b'"} <= set(page.texts)
    assert "c0ffee with changes" in page.texts
    assert {"0.1250", "-0.5000", "0.0625", "ab" * 8} <= set(page.texts)
    for title in ("Near OOD", "Far OOD", "ROC", "Losses", "Validation", "Calibration"):
        assert title in page.texts
    with open(run / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["role"] != "id"]
    at = page.texts.index("FPR@95_ID")
    cells = [text for text in page.texts[at + 1 :] if text]
    for row in rows:
        images = [row["images"]] if row["images"] else []
        numbers = [row[c] for c in ("FPR@95", "AUROC", "AUPR_IN", "AUPR_OUT", "FPR@95_ID")]
        expected = [row["set"], *images, *(f"{float(n):.2f}" for n in numbers)]
        assert cells[: len(expected)] == expected
        del cells[: len(expected)]
    assert "log E₀[r], in nats" in page.texts[page.texts.index("Calibration", at) :]
    assert "val_log_mass_0" not in page.texts
    notes = [line for line in page.texts if re.match(r"n = \d", line)]
    assert [int(re.findall(r"\d+", note)[0]) for note in notes] == [60, 40, 60, 30]


def test_the_gallery_shows_the_worst_images(run: Path, data: BenchmarkData) -> None:
    page = Page((run / "report.html").read_text())
    names = page.of("img", "alt")
    scores = read_scores(run / "scores.npz")
    tin, own = scores.of("near")["tin"], scores.of("id")["id_test"]
    first = tin.name[int(np.argmax(tin.score))]
    rejected = own.name[int(np.argmin(np.where(own.label == 1, own.score, np.inf)))]
    assert len(names) == 2 * gallery.PER_SET + 3 * gallery.PER_CLASS
    assert names[0] == first
    assert names[2 * gallery.PER_SET + gallery.PER_CLASS] == rejected
    assert "ID class 1 (c1): most rejected" in page.texts
    for name, source in zip(names, page.of("img", "src"), strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
        (images,) = (s for s in (data.near["tin"], data.far[ODD], data.id_test) if name in s.names)
        true = images.images[images.names.index(name)]
        assert np.abs(np.asarray(image, float) - true).mean() < 12
    caption = page.texts.index(first.split("/")[-2] + "/" + first.split("/")[-1])
    assert float(page.texts[caption - 1]) == pytest.approx(tin.score.max(), rel=1e-3)


@pytest.mark.usefixtures("bare")
def test_without_images_there_are_names(run: Path, data: BenchmarkData, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "again")
    others = {"tin": images_of([f"other/{i}.png" for i in range(40)])}
    moved = BenchmarkData(**{**vars(data), "near": others})
    for given, count in ((None, 0), (moved, gallery.PER_SET + 3 * gallery.PER_CLASS)):
        page = Page(write_report(tmp_path / "again", given).read_text())
        assert len(page.of("img", "src")) == count
        assert len(page.of("figcaption", "title")) == 2 * gallery.PER_SET + 3 * gallery.PER_CLASS


@pytest.mark.usefixtures("bare")
def test_many_classes_stay_a_small_file(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(1500)]
    noise = np.random.default_rng(0).integers(0, 256, (1500, 64, 64, 3), np.uint8)
    own, empty = ImageSet(noise, np.arange(1500) % 500, names), ImageSet.empty(64)
    scores = Scores()
    scores.add("id", "id_test", np.arange(1500.0), own.labels, names)
    scores.add("far", "one", [0.0], [-1], ["x"])
    write_scores(tmp_path / "scores.npz", scores)
    RunRecord(config=CONFIG, benchmark="b").write(tmp_path / "run.json")
    data = BenchmarkData(load_manifest("digits", "digits"), empty, empty, own, empty, {}, {})
    path = write_report(tmp_path, data)
    assert 500_000 < path.stat().st_size < 1_500_000
    assert path.read_text().count("<figcaption") == 1501


def test_seeds_have_one_page_that_leads_to_theirs(
    tmp_path: Path, data: BenchmarkData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "densities", lambda *args: [])
    monkeypatch.setattr(report, "over_steps", lambda *args: [])
    tables = [make_run(tmp_path / f"seed-{i}", data, seed=i) for i in (0, 1)]
    table = join_seeds(tables, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.of("a", "href") == ["seed-0/report.html", "seed-1/report.html"]
    assert text.count("<details") == 3
    mean, deviation = table.mean("tin").auroc, table.std("tin")
    assert deviation is not None
    assert f"{100 * mean:.2f} ± {100 * deviation.auroc:.2f}" in page.texts
    assert "0, 1" in page.texts
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.usefixtures("bare")
def test_a_page_of_seeds_is_of_those_averaged_and_finds_sets_by_name(
    tmp_path: Path, data: BenchmarkData
) -> None:
    tables = {i: make_run(tmp_path / f"seed-{i}", data, seed=i) for i in (0, 1, 2)}
    join_seeds([tables[0], tables[2]], tmp_path)
    # The same sets in another order, and one that the other seed has not.
    header, own, *rows = (tmp_path / "seed-2" / "metrics.csv").read_text().splitlines()
    rows = [header, own, *rows[::-1], rows[0].replace(",tin,", ",more,")]
    (tmp_path / "seed-2" / "metrics.csv").write_text("\n".join(rows))
    page = Page(write_report(tmp_path).read_text())
    assert page.of("a", "href") == ["seed-0/report.html", "seed-2/report.html"]
    assert "0, 2" in page.texts
    at = page.texts.index("Seeds")
    cells = [text for text in page.texts[at:] if text][2:]
    names = [*tables[0].rows, "more"]
    assert cells[: 1 + len(names)] == ["Seed", *names]
    for seed, more in ((0, []), (2, [f"{100 * tables[2].mean('tin').auroc:.2f}"])):
        found = [f"{100 * tables[seed].mean(name).auroc:.2f}" for name in tables[0].rows]
        start = cells.index(f"seed-{seed}") + 1
        assert cells[start : start + len(found + more)] == found + more


@pytest.mark.usefixtures("bare")
def test_a_calibrated_decision_is_told(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "own")
    tensors, model = {"scores": torch.arange(39.0) / 10}, {"w": torch.zeros(1)}
    facts = {"model": digest_of(model, {}), "alpha": 0.05}
    write_checkpoint(tmp_path / "own", "calibration", tensors, facts)
    write_checkpoint(tmp_path / "own", "model", model, {})
    text = " ".join(Page(write_report(tmp_path / "own").read_text()).texts)
    # The second of 39 scores, as 2 / 40 is the largest rate of at most 5 %.
    assert " = 0.05: flagged below 0.1," in " ".join(text.split())
    share = np.mean(read_scores(run / "scores.npz").of("near")["tin"].score < 0.1)
    assert f"tin {100 * share:.2f} % flagged" in text

    # A detector that was fitted and evaluated nowhere has its log and its calibration.
    for name in ("run.json", "scores.npz", "metrics.csv", "metrics.md"):
        (tmp_path / "own" / name).unlink()
    page = Page(write_report(tmp_path / "own").read_text())
    assert {"own", "Calibration", "0.1250"} <= set(page.texts)
    assert not {"Metrics", "Scores", "What goes wrong", "Data"} & set(page.texts)


WRONG: list[dict[str, object]] = [
    {"config": None},
    {"data": {"counts": [1]}},
    {"data": {"checksums": "x"}},
    {"results": {"parameters": "many"}},
    {"validation": {"best": ["x"]}},
    {"validation": {"history": "x"}},
    {"versions": 3},
    {"platform": []},
    {"command": 7},
    {"commit": "c0ffee"},
    {"train_seconds": "long"},
]


def test_what_is_damaged_beside_a_record_is_left_out_or_told(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "own")
    log, scores = tmp_path / "own" / "log.jsonl", tmp_path / "own" / "scores.npz"
    log.write_text('{"step": 1, "loss_total": 1' + 400 * "0" + "}\n[]\n\0")
    (tmp_path / "own" / "head").mkdir()
    os.mkfifo(tmp_path / "own" / "head" / "log.jsonl")  # which nobody writes to
    with np.load(scores) as file:
        known = dict(file)
    np.savez(scores, **known | {"role": np.full(len(known["role"]), "far")})
    with pytest.raises(UserError, match=r"scores\.npz: not a readable .* \(no set of role id\)"):
        write_report(tmp_path / "own")
    scores.unlink()
    assert "Metrics" in Page(write_report(tmp_path / "own").read_text()).texts


def test_a_page_that_cannot_be_drawn_is_one_warning(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run, tmp_path / "own")
    before = (tmp_path / "own" / "report.html").read_bytes()

    def fail(*args: object) -> None:
        raise MemoryError("no\nmemory")

    monkeypatch.setattr(report, "as_svg", fail)
    with caplog.at_level(logging.WARNING):
        report_beside(tmp_path / "own")
    (record,) = caplog.records
    assert record.getMessage().endswith("report.html: not written (MemoryError: no memory)")
    assert (tmp_path / "own" / "report.html").read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "own").iterdir()) == sorted(
        p.name for p in run.iterdir()
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", "no run to report on, expected run.json or metrics.csv"),
        ("run.json", "{", "run.json: not a run record"),
        ("run.json", "[]", "run.json: not a run record (an entry: got [], expected a mapping"),
        *(
            ("run.json", json.dumps({"config": {}, **wrong}), f"(an entry: {next(iter(wrong))}")
            for wrong in WRONG
        ),
        *(
            ("metrics.csv", text, "metrics.csv: not the table of a run (")
            for text in ("", "set,role\n", TABLE[0], "\n".join(TABLE)[:-9], "\0\1,\n\n\xff")
        ),
        ("metrics.csv", "\n".join(TABLE).replace("91.5", "9l.5"), "not the table of a run (could"),
        ("metrics.csv", "\n".join(TABLE).replace("40", "4o"), "not the table of a run (could"),
    ],
)
def test_a_folder_without_a_run_is_refused(
    name: str | None, content: str, message: str, tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        write_report(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it_without_a_complaint(run: Path, tmp_path: Path) -> None:
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path}/profile"]
    command += [f"--screenshot={tmp_path}/page.png", "--window-size=390,2000"]
    done = subprocess.run(
        [*command, (run / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    page = Page(done.stdout)
    assert {"Metrics", "Scores", "Curves", "Calibration", "What goes wrong", "Training"} <= set(
        page.texts
    )
    assert len([tag for tag, _ in page.elements if tag == "svg"]) > 8
    if (tmp_path / "page.png").is_file():
        assert np.asarray(Image.open(tmp_path / "page.png").convert("L")).std() > 5


def test_images_of_a_fit_in_arrays_are_shown_as_those_in_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    grey = rng.integers(0, 256, (20, 8, 8), dtype=np.uint8)
    paths = [str(tmp_path / "id.npy"), str(tmp_path / "reference.npz")]
    np.save(paths[0], colour)
    np.savez(paths[1], images=grey / np.float32(255), labels=np.zeros(20))
    scores, rows = Scores(), [3, 7, 19]
    for role, name in (("id", "held-out"), ("near", "held-out reference")):
        scores.add(role, name, rng.normal(size=3), np.full(3, -1), list(map(str, rows)))
    sets = [{"set": s, "given": p} for s, p in zip(("ID", "reference"), paths, strict=True)]
    record = {"data": {"given": sets}}
    found = gallery.given_images(record, scores)
    np.testing.assert_array_equal(found[""].images, colour[rows])
    expected = np.repeat(grey[rows, ..., None], 3, axis=3)
    np.testing.assert_array_equal(found["held-out reference"].images, expected)
    cells = [cell for row in gallery.gallery(scores, found) for cell in row.cells]
    assert (len(cells), all(cell.source for cell in cells)) == (6, True)
    # One that is shorter now, or holds vectors, has none; nor has one that has gone.
    for other in (colour[:19], colour.reshape(20, -1) / 255.0, None):
        np.save(paths[0], other) if other is not None else Path(paths[0]).unlink()
        assert list(gallery.given_images(record, scores)) == ["held-out reference"]
