r"""Tests of what the task commands share: arguments, records, figures, processes and their end."""

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import AxLine
from PIL import Image

from ood_osdre.errors import UserError
from ood_osdre.tasks import __main__ as command_module
from ood_osdre.tasks import tracking
from ood_osdre.tasks.__main__ import main
from ood_osdre.tasks.suites import density, kl, mutual_information, planar
from ood_osdre.tasks.suites.jobs import Row, run_jobs
from ood_osdre.tasks.suites.reports import average, refuse_other_results, summarise, write_report


def arguments(**given: object) -> argparse.Namespace:
    names = ("sets", "methods", "kernels", "seeds", "steps", "lr", "data_root")
    values = {"device": "cpu", "seed": 0, "full": False, "whiten": False, "suite": "planar"}
    return argparse.Namespace(**dict.fromkeys(names) | values | given)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZE": 21, "PIXELS": 16, "HELD_OUT": 100}.items():
        monkeypatch.setattr(planar, name, value)
    options = planar.OPTIONS.replace(steps=2, batch_size=16, features=8, depth=1)
    monkeypatch.setattr(planar, "OPTIONS", options)


@pytest.mark.parametrize("jobs", [planar.planar_jobs, density.table_jobs, density.image_jobs])
def test_given_options_win(jobs: Callable[[argparse.Namespace], list[Any]]) -> None:
    (own,) = {job.options.lr for job in jobs(arguments())}
    given = jobs(arguments(lr=0.5, steps=7, seed=3, seeds=2, kernels=["imq", "rq"]))
    assert own < 0.5
    assert {(job.options.lr, job.options.steps) for job in given} == {(0.5, 7)}
    fitted = [job for job in given if job.method == "os-dre"]
    found = {(job.options.kernel, job.options.seed) for job in fitted}
    assert found == {(k, s) for k in ("imq", "rq") for s in (3, 4)}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((f"--lr {value}", "above 0") for value in ("0", "nan", "inf", "fast")),
        ("--seed 500000001", "0 to 500000000"),
        ("--steps 1.5", "at least 1"),
        ("--streams -1", "at least 0"),
        ("--horizon 20", "1 to 19"),
        ("--dims 99999999", "1 to 10000"),
        ("--methods osdre", "os-dre"),
    ],
)
def test_values_are_refused_by_the_parser(
    given: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["kl", *given.split()])
    assert stop.value.code == 2
    option, value = given.split()
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"error: argument {option}: " in last
    assert value in last
    assert expected in last


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kl --dims 3 3", "--dims: got 3 twice"),
        ("kl --scenarios linear_drift linear_drift", "--scenarios: got linear_drift twice"),
        ("mi --methods ksg os-dre ksg", "--methods: got ksg twice"),
        ("mi --suite gaussian --methods ksg", "--methods: got 'ksg' with --suite gaussian"),
        ("mi --suite pathological --dims 40", "--dims: got --suite pathological, expected gauss"),
        ("mi --suite pathological --backbones mlp", "--backbones: got --suite pathological"),
        ("density --sets moons moons", "--sets: got moons twice"),
        ("density --sets moon", "--sets: got 'moon'"),
        (
            "density --methods nwj",
            "--methods: got 'nwj' with --suite planar, expected some of os-dre",
        ),
        (
            "density --suite images --methods d3re",
            "--methods: got 'd3re' for the images digits",
        ),
        ("density --suite images --sets mnist", "benchmark_imglist/cifar10/test_mnist.txt: "),
        ("density --suite tabular --sets rocks", "--sets: got 'rocks'"),
        ("density --suite tabular --sets power", "power/data.npy: is absent"),
        ("density --suite tabular --methods flow", "--methods: got 'flow'"),
        ("density --suite tabular --sets a/x.csv b/x.csv", "a/x.csv: is absent"),
        ("density --suite images --whiten", "--whiten: got --suite images, expected tabular"),
        (
            "density --suite images --sets mnist --methods os-dre os-dre-likelihood",
            "--methods: got 'os-dre-likelihood' for the images mnist, expected some of os-dre",
        ),
        ("density --device foo", "--device foo: not available here"),
        ("mi --device cuda:77", "--device cuda:77: not available here"),
    ],
)
def test_slips_are_refused_before_any_fit(
    given: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*given.split(), "--quiet", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_interrupted_import_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module.importlib, "import_module", interrupted)
    assert main(["kl"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_summary_is_that_of_numpy() -> None:
    rng = np.random.default_rng(0)
    values = {("b", 2.0): rng.normal(2, 1, 3), ("a", 0.0): rng.normal(0, 1, 1)}
    rows: list[Row] = [
        {"task": task, "truth": truth, "seed": seed, "estimate": value, "seconds": seed}
        for (task, truth), own in values.items()
        for seed, value in enumerate(own)
    ]
    first, second = summarise(rows, ["task"])  # in order of appearance
    x = values["b", 2.0]
    assert first == pytest.approx(
        {"task": "b", "truth": 2.0, "seeds": 3, "mean": x.mean(), "std": x.std(ddof=1),
         "mse": ((x - 2) ** 2).mean(), "mae": abs(x - 2).mean(), "relative": x.mean() / 2 - 1,
         "seconds": 1.0}
    )  # fmt: skip
    assert (second["std"], second["relative"]) == (None, None)
    assert type(first["seeds"]) is int
    (single,) = summarise(rows[:1], ["task"])
    assert not {"std", "mse"} & single.keys()
    averaged = average([{**row, "none": None} for row in rows], ["task"])
    assert [row["seeds"] for row in averaged] == [3, 1]
    assert averaged[0]["estimate"] == pytest.approx(x.mean())
    assert averaged[0]["none"] is None


TABLE: list[Row] = [
    {"task": "a", "n": 1, "mean": 68380.0, "mass": 2e30, "lag": None},
    {"task": "bc", "n": 2, "mean": 0.123456, "mass": 1.5, "lag": 12},
]


def test_report_is_written_whole_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(rows: list[Row]) -> None:
        write_report(tmp_path, "x", "Title", "Note.", TABLE, rows, {"steps": 1, "seed": 3})

    write(TABLE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["x.csv", "x.json", "x.md"]
    text = before["x.md"].decode()
    title, _, *lines, _, note = text.splitlines()
    assert (title, note) == ("# Title", "Note.")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2:] == [["a", "1", "68380", "2e+30", "-"], ["bc", "2", "0.1235", "1.5", "12"]]
    assert before["x.csv"].decode().splitlines()[1:] == [
        "a,1,68380.0,2e+30,",
        "bc,2,0.123456,1.5,12",
    ]
    record = json.loads(before["x.json"])
    assert record["results"] == {"table": TABLE, "rows": TABLE}
    assert (record["seed"], record["benchmark"]) == (3, "tasks/x")
    assert text in capsys.readouterr().out

    with pytest.raises(UserError, match=r"x\.json: 'results\.rows.*mean' is nan"):
        write([{"mean": math.nan}])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    # Nor is any of it if the last of the files cannot be.
    (tmp_path / "x.md").unlink()
    (tmp_path / "x.md" / "folder").mkdir(parents=True)
    with pytest.raises(UserError, match=r"x\.md: cannot be written"):
        write([])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.json", "x.md"]
    assert (tmp_path / "x.json").read_bytes() == before["x.json"]


def test_record_holds_a_command_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What `python -m ood_osdre.tasks kl --seed 3` leaves.
    main_module = types.ModuleType("__main__")
    main_module.__spec__ = importlib.util.find_spec("ood_osdre.tasks.__main__")
    main_module.__file__ = "/somewhere/tasks/__main__.py"
    monkeypatch.setitem(sys.modules, "__main__", main_module)
    monkeypatch.setattr(sys, "argv", [main_module.__file__, "kl", "--seed", "3"])
    write_report(tmp_path, "x", "Title", "", TABLE, [], {})
    command = json.loads((tmp_path / "x.json").read_text())["command"]
    assert command == ["python", "-m", "ood_osdre.tasks", "kl", "--seed", "3"]


def test_results_of_other_settings_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    command = f"density --sets moons --methods os-dre --out {tmp_path}".split()
    assert main([*command, "--quiet"]) == 0
    path = tmp_path / "density-planar.json"
    before = path.read_bytes()
    capsys.readouterr()
    assert main([*command, "--steps", "3", "--lr", "0.1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}: holds results of other settings (lr, steps);")
    assert path.read_bytes() == before
    # The same is the same, with a progress bar or without.
    assert main(command) == 0


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"config": 3}', None])
def test_files_that_are_no_record_are_kept(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kl.json"
    refuse_other_results(tmp_path, "kl", {"steps": 1})
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r"kl\.json: cannot be read: .*choose another --out"):
        refuse_other_results(tmp_path, "kl", {"steps": 1})


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    r"""The figures that are saved."""
    saved: list[Figure] = []
    for suite in (kl, mutual_information):
        monkeypatch.setattr(suite, "save_png", lambda figure, path, **_: saved.append(figure))
    return saved


def test_record_of_the_monitor_says_what_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Figure]
) -> None:
    monkeypatch.setattr(kl, "MONITORED", kl.MONITORED.replace(steps=2, batch_size=32))
    monkeypatch.setattr(kl, "DRIFTS", (0.0,))
    monkeypatch.setattr(kl, "RUN_LENGTH", 100)
    monkeypatch.setattr(kl, "PERCEPTRON", kl.PERCEPTRON.replace(features=8, batch_size=16))
    monkeypatch.setattr(tracking, "HELD_OUT", 100)
    command = "kl --dims 2 --horizon 1 --steps 3 --lr 0.01 --methods os-dre --quiet"
    command += f" --scenarios linear_drift --backbone mlp --out {tmp_path}"
    assert main([*command.split(), "--streams", "1"]) == 0
    config = json.loads((tmp_path / "drift.json").read_text())["config"]
    used = {"steps": 2, "lr": 0.3, "backbone": "block_quadratic", "device": "cpu", "streams": 1}
    assert {key: config[key] for key in used} == used
    assert "scenarios" not in config
    assert "streams" not in json.loads((tmp_path / "kl.json").read_text())["config"]

    # Without the monitor's streams its table stays, with others it would be replaced.
    before = (tmp_path / "drift.json").read_bytes()
    assert main([*command.split(), "--streams", "0"]) == 0
    assert main([*command.split(), "--streams", "2"]) == 2
    assert (tmp_path / "drift.json").read_bytes() == before


def estimate(method: str, truth: float, mean: float, features: str = "mlp") -> Row:
    common = {"method": method, "kernel": "-", "features": features, "std": None}
    return {**common, "truth": truth, "mean": mean}


def test_figure_of_information_is_not_flattened(figures: list[Figure], tmp_path: Path) -> None:
    rows = [estimate("NWJ", truth, mean) for truth, mean in ((10, -202.0), (40, -3738.0))]
    rows += [estimate("DRE-∞", 10, 9.7), estimate("DRE-∞", 40, 38.0), estimate("MINE", 40, 900.0)]
    mutual_information.plot(tmp_path / "a.png", [], rows, "Title")
    (ax,) = figures[0].axes
    low, high = ax.get_ylim()
    assert -12 <= low < 9.7
    assert 40 < high <= 52
    edges = {
        line.get_marker(): line.get_ydata() for line in ax.lines if len(line.get_xdata()) == 1
    }
    assert edges["v"] == pytest.approx([low])
    assert edges["^"] == pytest.approx([high])
    assert [text.get_text() for text in ax.texts] == ["-202", "-3738", "900"]
    assert ax.get_title() == "features: mlp"

    # One truth has a line of its own all the same.
    mutual_information.plot(tmp_path / "a.png", [], [estimate("KSG", 0.5, 0.4, "-")], "Title")
    (ax,) = figures[1].axes
    (line,) = (line for line in ax.lines if line.get_label() == "truth")
    assert isinstance(line, AxLine)
    low, high = ax.get_ylim()
    assert low < 0.4
    assert high > 0.5


@pytest.mark.parametrize(("distinct", "copies"), [(0, 1), (21, 1), (5, 20)])
def test_images_have_to_span_their_pixels(distinct: int, copies: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "images_classic" / "mnist"
    folder.mkdir(parents=True)
    for i in range(22):
        Image.fromarray(rng.integers(0, 256, (4, 4), dtype=np.uint8)).save(folder / f"{i}.png")
    path = tmp_path / "benchmark_imglist" / "cifar10" / "test_mnist.txt"
    path.parent.mkdir(parents=True)
    given = arguments(suite="images", sets=["mnist"], data_root=tmp_path)

    def write(distinct: int, copies: int) -> None:
        path.write_text("".join(f"mnist/{i}.png -1\n" for i in range(distinct)) * copies)

    write(distinct, copies)
    with pytest.raises(
        UserError, match=rf"test_mnist\.txt: got {distinct} distinct images of mnist"
    ):
        density.image_jobs(given)
    write(22, 1)
    assert len(density.image_jobs(given)) == 2


# Jobs are code, which `eval` runs: it leaves a file of its process's number and goes on for a minute.
GO_ON = """[
    __import__("pathlib").Path({folder!r}, str(__import__("os").getpid())).touch(),
    __import__("time").sleep(60),
]"""


def gone(pid: int) -> bool:
    for _ in range(500):
        try:
            # A process that nobody waits for, as its parent is gone, may stay as a zombie.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_come_in_order(processes: int) -> None:
    jobs = [f"[{{'x': {x}}}]" for x in ("__import__('time').sleep(0.3) or 3", 1, 2)]
    before = signal.getsignal(signal.SIGINT)  # which a shell has its background ignore
    assert run_jobs(eval, jobs, processes, False) == [{"x": 3}, {"x": 1}, {"x": 2}]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.slow
def test_a_process_has_one_thread() -> None:
    assert run_jobs(eval, ["[__import__('torch').get_num_threads()]"] * 2, 2, False) == [1, 1]


@pytest.mark.parametrize(
    ("job", "message"),
    [("int('a slip')", "a slip"), ("__import__('os')._exit(1)", "--jobs 2: a process was killed")],
)
def test_failed_job_stops_the_rest(job: str, message: str, tmp_path: Path) -> None:
    started = time.monotonic()
    go_on = GO_ON.format(folder=str(tmp_path))
    with pytest.raises(ValueError, match=message) as caught:
        run_jobs(eval, [go_on, job, go_on, go_on], 2, False)
    assert time.monotonic() - started < 40
    assert isinstance(caught.value, UserError) == ("killed" in message)
    assert all(gone(int(file.name)) for file in tmp_path.iterdir())


SCRIPT = """
import signal
import sys
from ood_osdre.errors import exit_status
from ood_osdre.tasks.suites.jobs import run_jobs

if __name__ == "__main__":
    # A shell has the processes of its background ignore it, and they pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(exit_status(lambda: len(run_jobs(eval, [sys.argv[1]] * 3, 2, False))))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_processes_end_with_their_parent(name: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, GO_ON.format(folder=str(tmp_path))],
        env=os.environ | {"PYTHONPATH": str(Path(command_module.__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # Of both workers: Ctrl-C is ignored until they are started.
    while len(workers := list(tmp_path.iterdir())) < 2 and process.poll() is None:
        time.sleep(0.01)
    if name == "SIGINT":  # as a terminal does, to all of them
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=60)
    assert all(gone(int(worker.name)) for worker in workers)
    if name != "SIGKILL":
        assert process.returncode == 130
        assert error == "error: interrupted\n"
