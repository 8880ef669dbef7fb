r"""Tests of the command `ood-osdre`: from files to decisions, what it refuses, and what it leaves."""

import base64
import csv
import io
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from scipy import sparse

from ood_osdre import load_scorer
from ood_osdre.__main__ import VERBS, main
from ood_osdre.commands import monitor as monitoring
from ood_osdre.data.images import decode
from ood_osdre.detectors import OneStepDetector, files, head_data
from ood_osdre.detectors import scorer as scoring
from ood_osdre.detectors.labels import remarks_on
from ood_osdre.errors import UserError
from ood_osdre.evaluation.calibration import SplitConformal
from ood_osdre.evaluation.scores import read_scores
from ood_osdre.files import parse_rows, read_array
from ood_osdre.progress import EVERY, Bar
from ood_osdre.tasks import DriftMonitor
from ood_osdre.tasks.__main__ import TASKS

SMALL = ["network.width=0.125", "training.batch_size=8", "training.warmup=1", "--device", "cpu"]
SMALL += ["training.eval_every=4", "training.amp=none", "data.val_limit=5", "--quiet"]
ROWS = [
    "network.width=0.1",
    "training.steps=150",
    "training.warmup=5",
    "--device",
    "cpu",
    "--quiet",
]


@pytest.fixture(autouse=True)
def float32() -> None:
    torch.set_default_dtype(torch.float32)


def photographs(folder: Path, count: int, shade: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        pixels = rng.integers(shade, shade + 100, (36, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    r"""A folder with photographs of two classes, others as a reference, and a run on them."""
    torch.set_default_dtype(torch.float32)
    root = tmp_path_factory.mktemp("commands")
    photographs(root / "id" / "cat", 20, 0, 0)
    photographs(root / "id" / "dog", 20, 50, 1)
    photographs(root / "reference", 30, 155, 2)
    arguments = [str(root / "id"), str(root / "reference"), "--out", str(root / "run")]
    assert main(["fit", *arguments, "--alpha", "0.25", "training.steps=4", *SMALL]) == 0
    return root


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    r"""A folder with tables of numbers, of which the first has names above, and a run on them."""
    torch.set_default_dtype(torch.float32)
    root, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    np.savetxt(root / "id.csv", rng.normal(1, 1, (900, 2)), "%.6f", ",", header="a,b", comments="")
    np.savetxt(root / "reference.csv", rng.normal(-1, 1, (600, 2)), "%.6f", ";")
    arguments = [str(root / "id.csv"), str(root / "reference.csv"), "--out", str(root / "run")]
    assert main(["fit", *arguments, *ROWS]) == 0
    return root


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_scores_are_those_of_the_detector(root: Path, tmp_path: Path) -> None:
    inbox = photographs(tmp_path / "inbox", 6, 20, 5)
    out = tmp_path / "scores.csv"
    assert main(["score", str(root / "run"), "--out", str(out), str(inbox), "--quiet"]) == 0
    found = table(out.read_text())
    detector = OneStepDetector.load(root / "run", device="cpu")
    assert [row["file"] for row in found] == sorted(map(str, inbox.iterdir()))
    scores = np.array([float(row["log_ratio"]) for row in found], np.float32)
    np.testing.assert_allclose(scores, detector.score(str(inbox)), rtol=1e-5, atol=1e-5)
    assert [float(row["p_value"]) for row in found] == pytest.approx(
        detector.conformal.pvalue(scores), rel=1e-5
    )
    decisions = np.where(detector.conformal.flagged(scores), "OOD", "ID")
    assert [row["decision"] for row in found] == decisions.tolist()
    names = ["cat", "dog"]
    assert [row["class"] for row in found] == [names[i] for i in detector.classify(str(inbox))]


def test_a_tenth_that_is_held_out_calibrates(root: Path) -> None:
    scorer = load_scorer(root / "run")
    assert (scorer.conformal.size, scorer.conformal.alpha) == (4, 0.25)
    detector = OneStepDetector.load(root / "run", device="cpu")
    every = detector.score(str(root / "id"))
    # They are ID images, and none that fit has read: exactly those are taken once more.
    held = [x for x in every if np.isclose(scorer.conformal.scores, x, atol=1e-4).any()]
    assert len(held) >= 4
    with pytest.raises(ValueError, match="36 of 40 items were read in fit"):
        detector.calibrate(str(root / "id"))


def test_copies_do_not_calibrate_what_they_have_trained(tmp_path: Path) -> None:
    x = np.repeat(np.random.default_rng(0).normal(size=(40, 2)), 3, axis=0)
    detector = OneStepDetector({"network": {"kind": "mlp", "width": 0.1}}, training__steps=2)
    detector.progress = False
    detector.fit(x, -x, alpha=0.2)  # refuses copies of what it has read
    assert 3 * detector.conformal.size == pytest.approx(12, abs=2)


def test_what_calibrates_is_refused_before_training(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(root / "id"), str(root / "reference"), "--out", str(tmp_path / "run")]
    assert main(["fit", *arguments, "--calibrate", str(root / "id" / "cat"), *SMALL]) == 2
    assert "20 of 20 items were read in fit" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_read_gets_a_row(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = photographs(tmp_path / "inbox", 2, 20, 5)
    (inbox / "broken.png").write_bytes(b"\x89PNG and no more")
    (inbox / "gone.png").symlink_to(tmp_path / "nowhere")
    (inbox / "notes.txt").write_text("no image, and not asked for")
    os.mkfifo(tmp_path / "pipe.png")  # which nobody writes to
    out = tmp_path / "scores.csv"
    sources = [str(inbox), str(tmp_path / "pipe.png"), str(tmp_path / "inbox" / "notes.txt")]
    assert main(["score", str(root / "run"), *sources, "--out", str(out)]) == 1
    first = f"4 could not be scored, the first: {inbox / 'broken.png'}: "
    assert first in capsys.readouterr().err
    found = {Path(row["file"]).name: row for row in table(out.read_text())}
    assert [name for name, row in found.items() if row["log_ratio"]] == ["00.png", "01.png"]
    for name in ("broken.png", "gone.png", "pipe.png", "notes.txt"):
        assert found[name]["error"]
        assert not found[name]["decision"]


def test_paths_come_on_standard_input_and_by_pattern(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = photographs(tmp_path / "in box", 3, 20, 5)
    assert main(["score", str(root / "run"), f"{inbox}/0[12].png", "--quiet"]) == 0
    by_pattern = table(capsys.readouterr().out)
    type_in(monkeypatch, f"{inbox}/01.png\n\n{inbox}/02.png\n")
    assert main(["score", str(root / "run"), "--quiet"]) == 0
    assert table(capsys.readouterr().out) == by_pattern
    type_in(monkeypatch, f"{inbox}/01.png\n{inbox}/absent*.png\n{inbox}/absent.png")
    assert main(["score", str(root / "run"), "-", "--quiet"]) == 1
    found = table(capsys.readouterr().out)
    # A batch of another size is rounded otherwise.
    one, other = (float(row["log_ratio"]) for row in (found[0], by_pattern[0]))
    assert one == pytest.approx(other, rel=1e-4)
    assert found[0]["file"] == by_pattern[0]["file"]
    assert [row["error"] for row in found[1:]] == ["no such file"] * 2


def test_patterns_take_files_once_and_lines_are_no_patterns(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inbox = photographs(tmp_path / "inbox", 2, 20, 5)
    photographs(inbox / "below", 1, 20, 6)
    found = []
    for pattern in ("inbox/**", "inbox/**/*.png"):
        assert main(["score", str(root / "run"), str(tmp_path / pattern), "--quiet"]) == 0
        found.append([Path(row["file"]).name for row in table(capsys.readouterr().out)])
    assert [sorted(names) for names in found] == [["00.png", "00.png", "01.png"]] * 2
    np.save(tmp_path / "number.npy", np.float64(5))
    type_in(monkeypatch, f"{inbox}/0[1].png\n{inbox}\n{tmp_path}/number.npy\n{inbox}/01.png\n")
    assert main(["score", str(root / "run"), "--quiet"]) == 1
    errors = [row["error"] for row in table(capsys.readouterr().out)]
    assert errors[:2] == ["no such file", "is a folder"]
    assert errors[2]
    assert not errors[3]


def test_the_rest_of_a_tree_is_scored_where_a_folder_has_gone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        photographs(tmp_path / "tree" / name, 1, 20, 5)
    items = files.list_items([str(tmp_path / "tree")], vectors=False)
    assert next(items)[0].endswith("a/00.png")
    (tmp_path / "tree" / "b" / "00.png").unlink()
    (tmp_path / "tree" / "b").rmdir()
    photographs(tmp_path / "tree" / "c", 1, 20, 5)
    ((name, problem),) = items
    assert (Path(name).name, problem) == ("b", "No such file or directory")


def test_what_fit_holds_out_may_be_in_the_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 6, (300, 3)).astype(float)
    shuffled = np.stack([rng.permutation(column) for column in x.T], axis=1)
    options = {"training__steps": 3, "training__warmup": 1, "progress": False}
    detector = OneStepDetector({"network": {"kind": "mlp"}}, **options)
    detector.fit(x, shuffled, alpha=0.2)
    assert "items were read in fit" in caplog.text
    with pytest.raises(UserError, match="50 of 50 items were read in fit"):
        detector.fit(x, shuffled, alpha=0.2, calibration=x[:50])


def test_memory_does_not_grow_with_the_number_of_files(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = photographs(tmp_path, 1, 20, 5) / "00.png"
    scorer, alive, most = load_scorer(root / "run"), 0, 0
    monkeypatch.setattr(files, "MOST", 10)

    def paths() -> Iterator[tuple[str, Path]]:
        nonlocal alive, most
        for i in range(95):
            alive += 1
            most = max(most, alive)
            yield f"{i}", path

    scored = 0
    for part in files.score_items(scorer, files.in_parts(scorer, paths())):
        alive -= len(part.names)
        scored += len(part.names)
        assert len({round(float(s), 4) for s in part.scores}) == 1
    assert (scored, most) == (95, 20)


def test_rows_of_tables_are_scored(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = np.array([[1.5, 0.5], [-2.0, -1.0], [np.inf, 0.0]])
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x)
    text = "a,b\n1.5,0.5\n-2,-1\ninf,0\n1,2,3\n1,two\n"
    (tmp_path / "x.csv").write_text(text)
    detector = OneStepDetector.load(rows / "run", device="cpu")
    for name in ("x.npy", "x.npz", "x.csv"):
        assert main(["score", str(rows / "run"), str(tmp_path / name), "--quiet"]) == 1
        found = table(capsys.readouterr().out)
        scores = [float(row["log_ratio"]) for row in found if row["log_ratio"]]
        assert scores == pytest.approx(detector.score(x[:2]), rel=1e-5)
        assert not found[2]["log_ratio"]
        if name == "x.csv":
            assert [row["file"].rpartition(":")[2] for row in found] == list("23456")
    type_in(monkeypatch, text)
    assert main(["score", str(rows / "run"), "--quiet"]) == 1
    by_stdin = table(capsys.readouterr().out)
    assert [row["log_ratio"] for row in by_stdin] == [row["log_ratio"] for row in found]
    assert "not 2" in by_stdin[3]["error"] or "(3,)" in by_stdin[3]["error"]


def test_another_alpha_is_that_of_the_same_scores(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conformal = load_scorer(rows / "run").conformal
    assert (conformal.size, conformal.alpha) == (90, 0.05)
    source = [str(rows / "run"), str(rows / "id.csv"), "--quiet"]
    flagged = []
    for alpha in (0.05, 0.5):
        assert main(["score", *source, "--alpha", str(alpha)]) == 0
        found = table(capsys.readouterr().out)
        assert all((float(r["p_value"]) <= alpha) == (r["decision"] == "OOD") for r in found)
        flagged.append(sum(r["decision"] == "OOD" for r in found))
    assert flagged[0] < flagged[1]


def test_the_monitor_is_the_drift_monitor(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(3)
    stream = np.concatenate([rng.normal(1, 1, (150, 2)), rng.normal(-1, 1, (120, 2))]).round(6)
    lines = [",".join(map(str, row)) for row in stream]
    type_in(monkeypatch, "\n".join(["a,b", *lines[:20], "oh,no", "1,oh", *lines[20:]]))
    assert main(["monitor", str(rows / "run"), "--run-length", "1000", "--window", "50"]) == 1
    output = capsys.readouterr()
    alarms = [json.loads(line) for line in output.out.splitlines()]
    assert "stdin:22" in output.err
    assert "270 inputs" in output.err
    conformal = load_scorer(rows / "run").conformal
    scores = OneStepDetector.load(rows / "run", device="cpu").score(stream)
    calibration = np.random.default_rng(0).permutation(conformal.scores)
    monitor = DriftMonitor(lambda x: x, calibration, 1000, 50)
    expected = []
    for score in scores:
        if monitor.alarm is not None and monitor.count >= monitor.alarm + 50:
            monitor.restart(calibration)
        if (state := monitor.update([score])).alarm == state.inputs:
            expected.append((state.alarm, state.start))
    assert [(a["input"], a["start"]) for a in alarms] == expected
    assert 2 <= len(alarms) <= 3  # the drift goes on, and an alarm is told once
    assert 145 <= alarms[0]["start"] < alarms[0]["input"] < 200


def test_a_stream_without_inputs_is_told(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "")
    assert main(["monitor", str(rows / "run")]) == 2
    assert capsys.readouterr().err == "error: standard input: nothing to watch.\n"


def test_a_stream_is_scored_as_it_comes(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r"""What has come is scored before the next input has: a stream may pause."""
    reading, writing = os.pipe()
    scorer = load_scorer(rows / "run")
    with os.fdopen(reading) as stream, os.fdopen(writing, "w") as feed:
        monkeypatch.setattr(sys, "stdin", stream)
        parts = monitoring.as_they_come(scorer)
        scored = files.score_items(scorer, parts, ahead=False)
        for i in range(3):
            feed.write(f"{i},1\n")
            feed.flush()
            assert len(next(scored).names) == 1
        feed.close()
        assert list(scored) == []


def test_fit_leaves_a_page_and_report_draws_it_anew(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = root / "run" / "report.html"
    drawn = page.read_text(encoding="utf-8")
    page.write_text("")
    assert main(["report", str(root / "run")]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    # Figures have random names of their parts.
    assert len(page.read_text(encoding="utf-8")) == pytest.approx(len(drawn), rel=0.01)


def test_a_fit_says_how_it_was_made(root: Path, rows: Path, tmp_path: Path) -> None:
    record = json.loads((root / "run" / "run.json").read_text())
    given = {entry["set"]: (entry["given"], entry["count"]) for entry in record["data"]["given"]}
    assert given["ID"] == (str(root / "id"), 36)  # of 40, a tenth of which calibrates
    assert given["calibration"] == (f"a tenth of {root / 'id'}", 4)
    assert given["reference"] == (str(root / "reference"), 30)
    assert (record["seed"], record["config"]["training"]["steps"]) == (0, 4)
    assert record["versions"]["torch"]
    assert record["train_seconds"] > 0
    text = (root / "run" / "report.html").read_text(encoding="utf-8")
    assert "AUROC against the held-out reference" in text
    assert f"a tenth of {root / 'id'}" in text
    assert "<h3>Losses</h3>" not in text  # its one validation is no curve
    # The worst of what was held out are shown, as they are in their files.
    named = read_scores(root / "run" / "held_out.npz")
    detector = OneStepDetector.load(root / "run", device="cpu")
    for role, folder, sign in (("id", "id", 1), ("near", "reference", -1)):
        (held,) = named.of(role).values()
        again = detector.score([root / folder / name for name in held.name])
        np.testing.assert_allclose(again, held.score, atol=1e-4)
        worst = held.name[int(np.argmin(sign * held.score))]
        pixels = decode(root / folder / worst, 64)
        source = re.findall(rf'<img src="data:image/jpeg;base64,(\S+)" alt="{worst}">', text)
        shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(found)))) for found in source]
        assert min(np.abs(pixels - image.astype(float)).mean() for image in shown) < 12
    for title in ("held-out reference: most taken for ID", "ID class 0 (cat): most rejected"):
        assert title in text
    # Files that have gone, or are no images any more, are names.
    gone = shutil.copytree(root / "run", tmp_path / "run")
    record["data"]["given"] = [
        entry | {"given": str(tmp_path)} for entry in record["data"]["given"]
    ]
    (gone / "run.json").write_text(json.dumps(record))
    (tmp_path / worst).write_text("no image")
    assert main(["report", str(gone)]) == 0
    text = (gone / "report.html").read_text(encoding="utf-8")
    assert "<img" not in text
    assert f'<figcaption title="{worst}">' in text

    # The scores are those that the log has the AUROC of, and of the model that was kept.
    last = json.loads((rows / "run" / "log.jsonl").read_text().splitlines()[-1])
    scores = read_scores(rows / "run" / "held_out.npz")
    ((_, of_id),), ((_, others),) = (scores.of(role).items() for role in ("id", "near"))
    assert (len(of_id.score), len(others.score)) == (81, 60)
    assert scores.metrics()["near"]["held-out reference"].auroc == last["val_near"]
    detector = OneStepDetector.load(rows / "run", device="cpu")
    for name, held in (("id", of_id), ("reference", others)):
        every = dict(zip(*detector.score_named(str(rows / f"{name}.csv")), strict=True))
        again = [every[line] for line in held.name]
        np.testing.assert_allclose(again, held.score, atol=1e-3)
    page = (rows / "run" / "report.html").read_text(encoding="utf-8")
    for title in ("Held-out data", "ROC", "ID: most rejected"):
        assert f"<h3>{title}</h3>" in page
    worst = others.name[int(np.argmax(others.score))]
    assert f'<figcaption title="{worst}"><b>{others.score.max():.4g}</b>' in page
    assert "made by a program" not in page  # of vectors there are no such images


@pytest.mark.parametrize("differ", ["size", "format", "mode", "some", "few", "nothing"])
def test_files_that_differ_by_a_rule_are_warned_of(
    differ: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("id", "reference"):
        other = name == "reference"
        (tmp_path / name).mkdir()
        for i in range(8 if differ == "few" else 20):
            side = (
                9 if (other and differ in ("size", "few")) or (i < 3 and differ == "some") else 8
            )
            image = Image.new("L" if other and differ == "mode" else "RGB", (side, side))
            image.save(tmp_path / name / f"{i}.{'jpg' if other and differ == 'format' else 'png'}")
    (tmp_path / "id" / "notes.txt").write_text("told where the images are read, and once")
    remarks = remarks_on(str(tmp_path / "id"), tmp_path / "reference")
    assert remarks == caplog.messages
    assert not remarks_on(np.zeros(3), tmp_path / "reference")
    expected = {"size": "9x9 PNG RGB", "format": "8x8 JPEG RGB", "mode": "8x8 PNG L"}
    if differ in expected:
        (told,) = caplog.messages
        assert told.startswith(
            f"ID files are 8x8 PNG RGB, reference files {expected[differ]}: the"
        )
    else:
        assert not caplog.messages


def test_exported_decisions_are_the_detector_s(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scorer.pt2"
    assert main(["export", str(rows / "run"), str(path), "--threshold", "--p-value"]) == 0
    x = torch.randn(40, 2, dtype=torch.float64)
    score, p, decision = (y.detach() for y in torch.export.load(path).module()(x))
    conformal = load_scorer(rows / "run").conformal
    np.testing.assert_array_equal(p, conformal.pvalue(score.numpy()))
    np.testing.assert_array_equal(decision, np.where(conformal.flagged(score.numpy()), -1, 1))
    assert set(decision.tolist()) == {-1, 1}
    # What the detector refuses is no ID in a file.
    x[0] = torch.nan
    assert torch.export.load(path).module()(x)[2][0] == -1


def test_an_existing_run_is_not_touched(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "run"
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    data = [str(root / "id"), str(root / "reference")]
    assert main(["fit", *data, "--out", str(run), *SMALL]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["fit", *data, "--out", str(root / "id"), "--resume", *SMALL]) == 2
    assert "no run to go on with" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert sorted(os.listdir(root / "id")) == ["cat", "dog"]


def test_a_run_goes_on_after_a_signal(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ood_osdre.training import trainer

    arguments = [str(root / "id"), str(root / "reference"), "--alpha", "0.25", "training.steps=4"]
    arguments += [*SMALL, "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_stop_reason", lambda *_: "SIGTERM")
        assert main(["fit", *arguments]) == 3
    assert "stopped (SIGTERM) at step 1 of 4" in capsys.readouterr().err
    assert main(["score", str(tmp_path / "run"), str(tmp_path)]) == 2
    assert (
        "no checkpoint here, expected a file model.safetensors; finish" in capsys.readouterr().err
    )
    assert main(["score", str(tmp_path / "run"), str(root / "id")]) == 2
    assert main(["fit", *arguments, "--resume"]) == 0
    (one, other) = (load_scorer(path / "run") for path in (root, tmp_path))
    np.testing.assert_array_equal(one.conformal.scores, other.conformal.scores)


@pytest.mark.parametrize("select", [[], ["training.eval_every=10", "evaluation.select=val_near"]])
def test_a_fit_resumed_after_its_last_validation_has_the_scores_of_it(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select: list[str]
) -> None:
    from ood_osdre.training import trainer

    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    data = [str(rows / "id.csv"), str(rows / "reference.csv"), *ROWS, *select]
    assert main(["fit", *data, "--out", whole]) == 0

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "_finish", killed)
        assert main(["fit", *data, "--out", part]) == 130
    assert main(["fit", *data, "--out", part, "--resume"]) == 0
    one, other = (np.load(Path(run) / "held_out.npz") for run in (whole, part))
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key])
    assert "most rejected" in (Path(part) / "report.html").read_text(encoding="utf-8")


def test_a_fit_that_ended_before_its_calibration_decides_nothing(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = [str(rows / "id.csv"), str(rows / "reference.csv"), *ROWS], str(tmp_path / "run")

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    for moment in (
        f"{OneStepDetector.__module__}.OneStepDetector.calibrate",
        f"{scoring.__name__}.write_checkpoint",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(moment, killed)
            assert main(["fit", *data, "--out", run, "--resume"]) == 130
        status = main(["score", run, str(rows / "id.csv"), "--quiet"])
        output = capsys.readouterr()
        assert (status == 2) == ("calibration.safetensors: is no file; go on" in output.err)
        # The trainer's own model is the one that was calibrated.
        assert (status == 0) == any(row["decision"] == "OOD" for row in table(output.out))
    assert main(["fit", *data, "--out", run, "--resume"]) == 0
    for name in ("calibration", "model"):
        found = [load_file(path / f"{name}.safetensors") for path in (rows / "run", Path(run))]
        assert all(torch.equal(x, found[1][key]) for key, x in found[0].items())


def test_a_mistake_found_late_leaves_the_folder_free(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    command = ["fit", str(rows / "id.csv"), str(rows / "reference.csv"), "--out", str(run), *ROWS]
    late = ["network.kind=resnet", "network.width=0.125", "network.depths=[1,1,1,1]"]
    assert main([*command, *late]) == 2
    assert os.listdir(run) == [".lock"]
    assert main([*command, "training.steps=2", "training.warmup=1"]) == 0


MISTAKES = {
    "no verb": (["scor"], "no verb 'scor' .did you mean 'score'"),
    "no ID": (["fit", "nowhere", "{reference}", "--out", "{new}"], "nowhere: no such folder"),
    "no reference": (["fit", "{id}", "nowhere", "--out", "{new}"], "nowhere: no such folder"),
    "before ID": (["fit", "{empty}", "nowhere", "--out", "{new}"], "nowhere: no such folder"),
    "calibrates": (["fit", "{empty}", "{id}", "--out", "{new}", "--calibrate", "nowhere"],
                   "nowhere: no such folder"),
    "empty": (["fit", "{empty}", "{reference}", "--out", "{new}"], "holds no image; expected"),
    "alpha": (["fit", "{id}", "{id}", "--out", "{new}", "--alpha", "5"], "above 0 and below 1"),
    "key": (["fit", "{id}", "{id}", "--out", "{new}", "training.step=1"], "mean 'training.steps'"),
    "both": (["fit", "{id}", "{id}", "--out", "{new}", "--backbone", "a", "--classifier", "b"],
             "expected one network"),
    "backbone": (["fit", "{id}", "{id}", "--out", "{new}", "--backbone", "timm:resnet_18@x"],
                 "no model 'resnet_18'"),
    "classifier": (["fit", "{id}", "{id}", "--out", "{new}", "--classifier", "nowhere"],
                   "nowhere: no weights"),
    "file": (["fit", "{id}", "{id}", "--out", "{file}"], "cannot be a folder"),
    "no UTF-8": (["fit", "{id}", "{id}", "--out", "{new}\udcff", "--device", "cpu"],
                 "cannot be written: 'utf-8' codec can't encode"),
    "no run": (["score", "nowhere", "{id}", "--out", "{new}"], "no checkpoint here"),
    "no files": (["score", "{run}", "{empty}", "--out", "{new}"], "nothing to score"),
    "no input": (["score", "{run}"], "standard input: nothing to score"),
    "mistyped": (["score", "{run}", "{id}", "nowhere", "--out", "{new}"], "nowhere: no such file"),
    "pattern": (["score", "{run}", "{id}/*.gif", "--out", "{new}"], "no such file .* pattern"),
    "too few": (["monitor", "{run}"], "run: has 4 .* at least 50; fit"),
    "window": (["monitor", "{run}", "--window", "9" * 20], "--window: got 9+, expected"),
    "nothing to report": (["report", "{empty}"], "no run to report on"),
    "suffix": (["export", "{run}", "{new}.txt"], "got the suffix"),
    "own set": (["eval", "--id", "flowers"], "--benchmark FILE"),
    "own set, data": (["data", "check", "--id", "flowers"], "--id: got flowers, .*--benchmark FILE"),
    "no such task": (["tasks", "ml"], "invalid choice: 'ml'"),
    "no folder": (["tasks", "mi", "--out", "{file}/mi", "--quiet"], "file/mi.*: cannot be"),
    "no such place": (["tasks", "mi", "--out", "/proc/none", "--quiet"], "cannot be a folder"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    root: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file")
    places = {"id": root / "id", "reference": root / "reference", "run": root / "run"}
    places |= {"empty": tmp_path / "empty", "file": tmp_path / "file", "new": tmp_path / "new"}
    arguments, message = MISTAKES[kind]
    type_in(monkeypatch, "")
    try:
        status = main([text.format(**places) for text in arguments])
    except SystemExit as ended:  # argparse
        status = ended.code
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert re.search(f"error: .*{message}", line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_what_is_scored_is_not_replaced(
    rows: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, picture = tmp_path / "new.csv", photographs(tmp_path / "in", 1, 0, 0) / "00.png"
    new.write_text("1,2\n")
    before = picture.read_bytes()
    for source in (f"{new}", f"{tmp_path}/*.csv"):
        assert main(["score", f"{rows / 'run'}", source, "--out", f"{new}", "--quiet"]) == 2
    with new.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["score", f"{rows / 'run'}", "--out", f"{new}", "--quiet"]) == 2
    assert new.read_text() == "1,2\n"
    arguments = [f"{root / 'run'}", f"{picture.parent}", "--quiet", "--out"]
    assert main(["score", *arguments, f"{picture}"]) == 2
    assert picture.read_bytes() == before
    assert main(["score", *arguments, f"{tmp_path / 'in' / 'scores.csv'}"]) == 0


def test_streams_that_are_closed(
    rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(rows / "run")
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdin", None)
        assert main(["score", run]) == 2
    assert "standard input: is closed" in capsys.readouterr().err
    for verb in ("score", "monitor"):
        type_in(monkeypatch, "1,2\n")
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stdout", None)
            assert main([verb, run]) == 2
        assert capsys.readouterr().err.startswith("error: standard output: is closed")
        type_in(monkeypatch, "1,2\n")
        with monkeypatch.context() as closed:
            closed.setattr(sys, "stderr", None)
            assert main([verb, run]) == 0  # and no summary among the results
        assert len(capsys.readouterr().out.splitlines()) == 2 * (verb == "score")


def test_text_and_fifos_get_rows(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "s.npy", np.array(["", "hello"]))
    os.mkfifo(tmp_path / "f.csv")  # which nobody writes to
    sources = [f"{tmp_path / name}" for name in ("s.npy", "f.csv")]
    assert main(["score", str(rows / "run"), *sources, "--quiet"]) == 1
    empty, text, fifo = table(capsys.readouterr().out)
    assert empty["error"] == text["error"] != "hello"
    assert "expected" in text["error"]
    assert fifo["error"] == "is no regular file"


def test_help_waits_for_nothing_heavy() -> None:
    code = """
import sys
from ood_osdre.__main__ import main
for arguments in (["--help"], ["fit", "--help"], ["score", "--help"], ["monitor", "--help"],
        ["export", "--help"], ["report", "--help"], ["tasks", "--help"]):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 0
    assert not {"torch", "pydantic", "numpy"} & set(sys.modules), arguments
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    assert done.stdout.count("\nexample") == 7  # of the command and these verbs


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_plain_text_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [[verb, task, "--help"] for task in TASKS] if verb == "tasks" else []
    for arguments in ([verb, "--help"], *tasks):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert not re.search(r":[a-z]+:`|\.\. math|``", text)
        if arguments[1] == "--help":
            example = text.partition("\nexample")[2]
            assert f"ood-osdre {verb} " in example


def test_progress_is_lines_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("ood_osdre.progress.time.monotonic", lambda: now[0])
    with Bar(total=30, desc="training", unit="step", file=stream) as bar:
        bar._time = lambda: now[0]
        bar.start_t = bar.last_print_t = now[0]
        for i in range(30):
            now[0] += 1 if i else 71  # the first builds and measures what the others have
            bar.update()
            bar.set_postfix(loss=1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 30 // int(EVERY)
    # It is told from a few steps on, and the first is none of them.
    assert lines[0] == "training 1 of 30 steps, 01:11"
    assert lines[1].startswith("training 11 of 30 steps, 01:21, 00:19 to go")
    assert "\r" not in stream.getvalue()


def test_a_bar_tells_no_time_before_a_few_steps() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream, shown = Terminal(), {"desc": "training", "unit": "step", "mininterval": 0}
    with Bar(total=30, file=stream, miniters=1, **shown) as bar:
        for _ in range(8):
            bar.update()
    drawn = [line for line in stream.getvalue().split("\r") if "/30" in line]
    timed = ["<" in line for line in drawn]
    assert timed == [False] * 6 + [True] * (len(timed) - 6)
    assert any(timed)


def test_tables_of_numbers(tmp_path: Path) -> None:
    text = 'x;y\n"1";2\n\n3; 4e-1\n5;six'
    names, rows = parse_rows(text.splitlines())
    (number, first), (_, second), (last, problem) = rows
    assert names == ("x", "y")
    assert (number, last) == (2, 5)
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [3.0, 0.4])
    assert "six" in problem
    # What names no columns is no header.
    assert isinstance(next(parse_rows(["1,two"])[1])[1], str)
    path = tmp_path / "x.npz"
    np.savez(path, images=np.zeros((2, 3)), labels=[4, 5])
    array, labels, names = read_array(path)
    assert (array.shape, labels.tolist(), names) == ((2, 3), [4, 5], None)
    np.savez(path, one=np.zeros(2), two=np.zeros(2))
    with pytest.raises(ValueError, match="arrays one, two, expected one"):
        read_array(path)
    path.write_bytes(b"PK and no more")
    with pytest.raises(ValueError, match=r"x\.npz: cannot be read"):
        read_array(path)


def test_rows_of_a_table_are_called_by_the_lines_of_its_file(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path, array = str(rows / "run"), tmp_path / "x.csv", tmp_path / "x.npy"
    path.write_text("a,b\n1,2\n\n3,4\n")
    assert read_array(path)[2] == ["line 2", "line 4"]
    detector = OneStepDetector.load(run)
    assert detector.score_named(path)[0] == ["line 2", "line 4"]
    path.write_text("a,b\n1,2\n\n3,nan\n1e300,5\n6,x\n")
    np.save(array, [[1.0, 2.0], [3.0, np.nan]])
    assert main(["score", run, str(path), str(array), "--quiet"]) == 1
    found = {row["file"]: row["error"] for row in table(capsys.readouterr().out)}
    bad = "no number in single precision"
    assert found == {
        f"{path}:2": "",
        f"{path}:4": f"{bad}: 'nan'",
        f"{path}:5": f"{bad}: '1e300'",
        f"{path}:6": f"{bad}: 'x'",
        f"{array}:0": "",
        f"{array}:1": "1 of 1 vectors hold NaN or infinity, expected real numbers in single precision.",
    }
    with pytest.raises(ValueError, match=rf"line 4 of the file: {bad}: 'nan'; 3 such lines"):
        detector.score(path)


TABLES = {
    "header of pandas": ("0,1,2\n5,6,7\n", "012", [[5, 6, 7]]),
    "two columns, which it may not be": ("0,1\n5,6\n", "", [[0, 1], [5, 6]]),
    "index": (",a,b\n0,5,6\n", "ab", [[5, 6]]),
    "index of days": (",a,b\n2026-01-01,5,6\n", "ab", [[5, 6]]),
    "index and header of pandas": (",0,1\n0,5,6\n", "01", [[5, 6]]),
    "first row without values": (",NA\n5,6\n", "", ["no number in single precision: ''", [5, 6]]),
    "digits with an underscore": ("a,b\n1_0,2\n", "ab", ["no number"]),
    "names that part": ('"a,a",b\n5,6\n', ["a,a", "b"], [[5, 6]]),
    "names of more": ("a b\n0 5 6\n", "ab", ["3 values, not 2"]),
}


@pytest.mark.parametrize("kind", TABLES)
def test_first_lines_of_tables(kind: str) -> None:
    text, names, expected = TABLES[kind]
    found, rows = parse_rows(text.splitlines())
    assert found == tuple(names)
    for (_, row), known in zip(rows, expected, strict=True):
        assert known in row if isinstance(known, str) else row.tolist() == known


def test_columns_are_those_of_fit(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = str(rows / "run"), tmp_path / "other.csv"
    problems = {
        "b,a": "another order",
        "a": "lacks 1 column: b",
        "a,b,c": "in addition 1 column: c",
    }
    for header, problem in problems.items():
        count = len(header.split(","))
        other.write_text(f"{header}\n{','.join(['1'] * count)}\n")
        assert main(["score", run, str(other), str(rows / "reference.csv"), "--quiet"]) == 1
        first, *others = table(capsys.readouterr().out)
        assert (first["file"], first["log_ratio"]) == (str(other), "")
        assert problem in first["error"]
        assert len(others) == 600  # without names, in the order of fit
        for verb in ("score", "monitor"):
            type_in(monkeypatch, other.read_text())
            assert main([verb, run, "--quiet"]) == 2
            told = capsys.readouterr().err
            assert told.startswith("error: stdin: ")
            assert problem in told
        with pytest.raises(UserError, match=problem):
            OneStepDetector.load(run, device="cpu").score(other)
    data = [str(rows / "id.csv"), str(rows / "reference.csv")]
    for given in ([data[0], str(other)], [*data, "--calibrate", str(other)]):
        np.savetxt(other, np.ones((9, 2)), "%d", ",", header="b,a", comments="")
        assert main(["fit", *given, "--out", str(tmp_path / "run"), *ROWS]) == 2
        assert "has another order, 2 columns: b, a" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_what_calibrates_has_a_rate() -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    with pytest.raises(UserError, match="alpha: got null, expected a rate"):
        OneStepDetector({"network": {"kind": "mlp"}}, progress=False).fit(x, -x, calibration=x)
    with pytest.raises(UserError, match=r"got csr_array, expected an array.* toarray"):
        OneStepDetector({"network": {"kind": "mlp"}}, progress=False).fit(sparse.csr_array(x), -x)


def test_what_calibrates_is_like_the_id_data(
    rows: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.ones((9, 3)))
    data = [str(rows / "id.csv"), str(rows / "reference.csv"), "--out", str(tmp_path / "run")]
    for source in (tmp_path / "x.npy", root / "reference"):
        assert main(["fit", *data, "--calibrate", str(source), *ROWS]) == 2
        assert "calibration data: items of shape (3" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()


def test_a_head_on_a_classifier_by_name(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import timm

    monkeypatch.setattr("ood_osdre.detectors.feature_head.SMALLEST", 20)
    net = timm.create_model("test_resnet", num_classes=2)
    torch.save(net.state_dict(), tmp_path / "net.pth")
    source = f"timm:test_resnet@{tmp_path}/net.pth"
    data = [str(root / "id"), str(root / "reference"), "--device", "cpu", "--quiet"]
    own = {
        "--classifier": ["head.rank=4", "head.training.steps=3", "head.training.warmup=1"],
        "--backbone": ["training.steps=2", "training.warmup=1", "training.batch_size=4"],
    }
    for option, keys in own.items():
        run = str(tmp_path / option)
        assert main(["fit", *data, *keys, option, source, "--out", run]) == 0
        assert main(["score", run, str(root / "id" / "cat"), "--quiet"]) == 0
        found = table(capsys.readouterr().out)
        scores = [float(row["log_ratio"]) for row in found]
        paths = sorted((root / "id" / "cat").iterdir())
        pixels = np.stack([decode(path, 32) for path in paths])
        assert scores == pytest.approx(load_scorer(run).score(pixels), rel=1e-4, abs=1e-4)
        assert {row["class"] for row in found} <= {"cat", "dog", "0", "1"}
        named = read_scores(Path(run) / "held_out.npz")
        detector = OneStepDetector.load(run, device="cpu")
        for role, folder in (("id", "id"), ("near", "reference")):
            (held,) = named.of(role).values()
            plain = [name.removesuffix(" (transformed)") for name in held.name]
            again = detector.score([root / folder / name for name in plain])
            same = [name in plain for name in held.name]
            assert any(same)
            np.testing.assert_array_equal(np.abs(again - held.score) < 1e-4, same)
        classes = ["cat", "dog"]
        (held,) = named.of("id").values()
        assert [classes[i] for i in held.label] == [name[:3] for name in held.name]
        assert "<h3>Held-out data</h3>" in (Path(run) / "report.html").read_text()
    # The second, whose network is of timm, is no classifier that a run could build again.
    assert main(["fit", *data, "--classifier", run, "--out", str(tmp_path / "third")]) == 2
    assert "is of a backbone of its own (ResNet (timm.create_model(" in capsys.readouterr().err


def test_a_classifier_of_a_run_brings_its_names_and_what_trained_it(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = [str(root / "id"), str(root / "reference"), "--device", "cpu", "--quiet"]
    keys = ["head.rank=4", "head.training.steps=3", "head.training.warmup=1"]
    run, other = str(tmp_path / "run"), str(tmp_path / "other")
    assert main(["fit", *data, *keys, "--classifier", str(root / "run"), "--out", run]) == 0
    assert load_scorer(run).class_names == ["cat", "dog"]
    images = str(root / "id" / "cat")
    calibrated = ["--classifier", str(root / "run"), "--calibrate", images, "--out", other]
    assert main(["fit", *data, *keys, *calibrated]) == 2
    assert "items were read in fit" in capsys.readouterr().err
    assert not Path(other).exists()


def test_features_of_a_classifier_that_were_computed_are_not_computed_again(
    root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_data, "SHARD", 1)
    computed, compute, stop = [], head_data.classifier_features, 3

    def stopping(*args: object) -> object:
        computed.append(len(args[1]))  # type: ignore[arg-type]
        if len(computed) == stop:
            os.kill(os.getpid(), 15)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(head_data, "classifier_features", stopping)
    command = ["fit", str(root / "id"), str(root / "reference"), "--device", "cpu", "--quiet"]
    command += ["--classifier", str(root / "run"), "head.rank=4", "head.training.steps=3"]
    command += ["head.training.warmup=1", "evaluation.batch_size=8"]
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert main([*command, "--out", str(run)]) == 3
    assert "(SIGTERM, computing features)" in capsys.readouterr().err
    first = sum(computed)
    computed.clear()
    stop = 0
    assert main([*command, "--out", str(run), "--resume"]) == 0
    again = sum(computed)
    computed.clear()
    assert main([*command, "--out", str(whole)]) == 0
    # The batch at which it was stopped was lost, and the layers are tried on two images each time.
    assert first + again == sum(computed) + 8 + 2
    models = [load_file(folder / "model.safetensors") for folder in (run, whole)]
    assert all(torch.equal(models[0][name], x) for name, x in models[1].items())
    assert not list(tmp_path.rglob("features-*"))


def test_conformal_scores_of_another_model_are_refused(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    detector = OneStepDetector.load(rows / "run", device="cpu")
    assert isinstance(detector.conformal, SplitConformal)
    detector.save(tmp_path)
    (tmp_path / "calibration.safetensors").write_bytes(
        (rows / "run" / "calibration.safetensors").read_bytes()
    )
    assert load_scorer(tmp_path).conformal.size == detector.conformal.size  # the same model
    with torch.no_grad():
        next(detector._trained.ratio.parameters()).add_(1)
    calibration = (tmp_path / "calibration.safetensors").read_bytes()
    detector.save(tmp_path)
    (tmp_path / "calibration.safetensors").write_bytes(calibration)
    with pytest.raises(ValueError, match="another model's calibration"):
        load_scorer(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "another model's calibration" in capsys.readouterr().err


def test_a_keyword_is_advised_as_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'training__steps'"):
        OneStepDetector(steps=200)
    with pytest.raises(ValueError, match=r"did you mean 'training\.steps'"):
        OneStepDetector({"steps": 200})
    logging.getLogger().handlers.clear()
