r"""Tests of what the task commands share: options, records, processes and how they end."""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.lines import AxLine
from PIL import Image

from ood_osdre.errors import UserError
from ood_osdre.tasks import __main__ as command_module
from ood_osdre.tasks.__main__ import main
from ood_osdre.tasks.suites import density, images, mutual_information, planar, reports
from ood_osdre.tasks.suites import kl as alarms
from ood_osdre.tasks.suites.images import image_jobs, levels_of
from ood_osdre.tasks.suites.planar import planar_jobs
from ood_osdre.tasks.suites.reports import Row, refuse_other_results, run_jobs, write_report
from ood_osdre.tasks.suites.tabular import table_jobs


def arguments(**given: object) -> argparse.Namespace:
    names = ("sets", "methods", "kernels", "seeds", "steps", "lr", "data_root")
    values = {"device": "cpu", "seed": 0, "full": False, "whiten": False, "suite": "planar"}
    return argparse.Namespace(**dict.fromkeys(names) | values | given)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planar, "SIZE", 21)
    monkeypatch.setattr(planar, "PIXELS", 16)
    monkeypatch.setattr(planar, "HELD_OUT", 100)
    options = planar.OPTIONS.replace(steps=2, batch_size=16, features=8, depth=1)
    monkeypatch.setattr(planar, "OPTIONS", options)


@pytest.mark.parametrize("jobs", [planar_jobs, table_jobs, image_jobs])
def test_density_uses_the_learning_rate_given(jobs: object) -> None:
    assert callable(jobs)
    (own,) = {job.options.lr for job in jobs(arguments())}
    (given,) = {job.options.lr for job in jobs(arguments(lr=0.5))}
    assert own < given == 0.5


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(
            ("--lr", value, "a finite number above 0")
            for value in ("0", "nan", "inf", "-0.1", "fast")
        ),
        ("--seed", "-1", "a whole number, 0 to 2147483647"),
        ("--seed", str(2**31), "a whole number, 0 to 2147483647"),
        ("--seeds", "0", "a whole number, at least 1"),
        ("--steps", "1.5", "a whole number, at least 1"),
        ("--streams", "-1", "a whole number, at least 0"),
        ("--horizon", "0", "a whole number, 1 to 19"),
        ("--horizon", "20", "a whole number, 1 to 19"),
        ("--dims", "99999999", "a whole number, 1 to 10000"),
    ],
)
def test_numbers_are_refused_by_the_parser(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["kl", option, value])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"error: argument {option}: got {value}, expected {expected}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("kl --dims 3 3", "--dims: got 3 twice, expected it once"),
        ("kl --scenarios linear_drift linear_drift", "--scenarios: got linear_drift twice"),
        ("mi --methods ksg os-dre ksg", "--methods: got ksg twice"),
        ("mi --suite gaussian --methods os-dre ksg", "--methods: got 'ksg' with --suite gaussian"),
        ("mi --backbones mlp mlp", "--backbones: got mlp twice"),
        ("mi --kernels rq rq", "--kernels: got rq twice"),
        ("density --sets moons moons", "--sets: got moons twice"),
        ("density --whiten", "--whiten: got --suite planar, expected tabular"),
        ("density --suite images --whiten", "--whiten: got --suite images, expected tabular"),
        ("density --device foo", "--device foo: not available here"),
        ("kl --device meta", "--device meta: not available here"),
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


def test_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    table: list[Row] = [{"task": "a", "mean": 1.0}]
    write_report(tmp_path, "x", "Title", table, table, {"steps": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(before) == ["x.csv", "x.json", "x.md"]
    with pytest.raises(UserError, match=r"x\.json: 'results\.rows.*mean' is nan"):
        write_report(tmp_path, "x", "New", table, [{"mean": math.nan}], {"steps": 1})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    # Nor is any of it if the last of the files cannot be.
    (tmp_path / "x.md").unlink()
    (tmp_path / "x.md" / "folder").mkdir(parents=True)
    with pytest.raises(UserError, match=r"x\.md: cannot be written"):
        write_report(tmp_path, "x", "New", table, table, {"steps": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.csv", "x.json", "x.md"]
    assert (tmp_path / "x.json").read_bytes() == before["x.json"]


def test_record_holds_a_command_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: Row = {"task": "a", "mean": 1.0}

    def recorded() -> dict[str, object]:
        write_report(tmp_path, "x", "Title", [row], [], {"seed": 3})
        return dict(json.loads((tmp_path / "x.json").read_text()))

    # What `python -m ood_osdre.tasks kl --seed 3` leaves.
    main_module = types.ModuleType("__main__")
    main_module.__spec__ = importlib.util.find_spec("ood_osdre.tasks.__main__")
    monkeypatch.setitem(sys.modules, "__main__", main_module)
    main_module.__file__ = "/somewhere/tasks/__main__.py"
    monkeypatch.setattr(sys, "argv", [main_module.__file__, "kl", "--seed", "3"])
    record = recorded()
    assert record["command"] == ["python", "-m", "ood_osdre.tasks", "kl", "--seed", "3"]
    assert record["seed"] == 3
    # A script has no module's name.
    main_module.__spec__ = None
    monkeypatch.setattr(sys, "argv", ["benchmarks/a.py", "b"])
    assert recorded()["command"] == ["benchmarks/a.py", "b"]


def test_whole_numbers_are_printed_whole(tmp_path: Path) -> None:
    table: list[Row] = [{"parameters": 68380.0, "mean": 68380.25, "mass": 2e30, "lag": 0.05}]
    text = write_report(tmp_path, "x", "Title", table, [], {})
    assert text.splitlines()[-1] == "| 68380 | 6.838e+04 | 2e+30 | 0.05 |"


def test_files_are_announced_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    reports.announce("", Path("a"))
    reports.announce("", Path("b"), plot=True)
    lines = capsys.readouterr().out.split("\n")
    assert lines[1::2] == ["Tables and record: a", "Tables, plot and record: b"]


def test_known_names_are_listed_once() -> None:
    with pytest.raises(UserError, match=r"--x: got 'c', expected some of a, b\.$"):
        reports.refuse_unknown("--x", ["a", "c"], ["a", "b", "a"])


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    r"""The figures that are saved."""
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: saved.append(self))
    return saved


def estimate(method: str, truth: float, mean: float, features: str = "mlp") -> Row:
    common = {"method": method, "kernel": "-", "features": features, "std": None}
    return {**common, "truth": truth, "mean": mean}


def test_figure_of_information_is_not_flattened(figures: list[Figure], tmp_path: Path) -> None:
    rows = [estimate("NWJ", truth, mean) for truth, mean in ((10, -202.0), (40, -3738.0))]
    rows += [estimate("DRE-∞", 10, 9.7), estimate("DRE-∞", 40, 38.0), estimate("MINE", 40, 900.0)]
    mutual_information.plot(tmp_path / "a.png", "Title", rows)
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


def test_figure_of_information_has_a_line_for_one_truth(
    figures: list[Figure], tmp_path: Path
) -> None:
    mutual_information.plot(tmp_path / "a.png", "Title", [estimate("KSG", 0.5, 0.4, "-")])
    (ax,) = figures[0].axes
    assert ax.get_title() == ""
    (line,) = (line for line in ax.lines if line.get_label() == "truth")
    assert isinstance(line, AxLine)
    low, high = ax.get_ylim()
    assert low < 0.4
    assert high > 0.5


def test_figure_comes_after_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    def fail(*_: object) -> str:
        raise UserError("no")

    monkeypatch.setattr(density, "write_report", fail)
    command = f"density --sets moons --methods os-dre --quiet --out {tmp_path}"
    assert main(command.split()) == 2
    assert not list(tmp_path.iterdir())


def test_results_of_other_settings_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    command = f"density --sets moons --methods os-dre --out {tmp_path}".split()
    assert main([*command, "--quiet"]) == 0
    before = (tmp_path / "density-planar.json").read_bytes()
    capsys.readouterr()
    assert main([*command, "--steps", "3", "--lr", "0.1"]) == 2
    error = capsys.readouterr().err
    path = tmp_path / "density-planar.json"
    assert error == (
        f"error: {path}: holds results of other settings (lr, steps); choose another --out.\n"
    )
    assert path.read_bytes() == before
    # The same is the same, with a progress bar or without.
    assert main(command) == 0


def test_files_that_are_no_record_are_kept(tmp_path: Path) -> None:
    refuse_other_results(tmp_path, "kl", {"steps": 1})
    refuse_other_results(tmp_path / "absent", "kl", {"steps": 1})
    for content in ("{", "[]", "{}", '{"config": 3}'):
        (tmp_path / "kl.json").write_text(content)
        with pytest.raises(UserError, match=r"kl\.json: no record of this task"):
            refuse_other_results(tmp_path, "kl", {"steps": 1})
    with pytest.raises(UserError, match="cannot be read"):
        refuse_other_results(tmp_path / "kl.json", "kl", {})


def test_record_of_the_monitor_says_what_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "MONITORED", alarms.MONITORED.replace(steps=2, batch_size=32))
    monkeypatch.setattr(alarms, "DRIFTS", (0.0,))
    monkeypatch.setattr(alarms, "RUN_LENGTH", 100)
    command = "kl --dims 2 --horizon 1 --steps 3 --lr 0.01 --methods os-dre --quiet"
    command += f" --scenarios linear_drift --backbone mlp --out {tmp_path}"
    assert main([*command.split(), "--streams", "1"]) == 0
    config = json.loads((tmp_path / "drift.json").read_text())["config"]
    used = {"steps": 2, "lr": 0.3, "backbone": "block_quadratic", "device": "cpu", "streams": 1}
    assert {key: config[key] for key in used} == used
    assert "scenarios" not in config

    # Without the monitor's streams its table stays, with others it would be replaced.
    before = (tmp_path / "drift.json").read_bytes()
    assert main([*command.split(), "--streams", "0"]) == 0
    assert main([*command.split(), "--streams", "2"]) == 2
    assert (tmp_path / "drift.json").read_bytes() == before


def test_methods_that_a_set_of_images_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    command = "density --suite images --sets mnist --quiet --methods os-dre os-dre-likelihood"
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --methods: got 'os-dre-likelihood' for the images mnist")
    assert error.count("\n") == 1


def image_root(root: Path, distinct: int, copies: int) -> Path:
    rng = np.random.default_rng(0)
    folder = root / "images_classic" / "mnist"
    folder.mkdir(parents=True)
    for i in range(distinct):
        Image.fromarray(rng.integers(0, 256, (4, 4), dtype=np.uint8)).save(folder / f"{i}.png")
    path = root / "benchmark_imglist" / "cifar10" / "test_mnist.txt"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"mnist/{i}.png -1\n" for i in range(distinct)) * copies)
    return root


@pytest.mark.parametrize(
    ("distinct", "copies", "message"),
    [
        (0, 1, r"test_mnist\.txt: an empty list, expected images of mnist"),
        (21, 1, "got 21 distinct images of mnist, expected at least 22 for 16 dimensions"),
        (5, 20, "got 5 distinct images of mnist, expected at least 22"),
        (22, 1, ""),
    ],
)
def test_images_have_to_span_their_pixels(
    distinct: int, copies: int, message: str, tmp_path: Path
) -> None:
    root = image_root(tmp_path, distinct, copies)
    given = arguments(suite="images", sets=["mnist"], data_root=root)
    if message:
        with pytest.raises(UserError, match=message):
            image_jobs(given)
    else:
        assert len(image_jobs(given)) == 2
        data = images.dequantised(levels_of("mnist", root))
        assert len(data.train) == 18 * images.COPIES


def test_broken_image_is_named(tmp_path: Path) -> None:
    root = image_root(tmp_path, 30, 1)
    path = root / "images_classic" / "mnist" / "4.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"4\.png: cannot be read"):
        levels_of("mnist", root)


def test_interrupted_import_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module.importlib, "import_module", interrupted)
    assert main(["kl"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    r"""A folder with a torch for processes that are started: the real one takes seconds."""
    folder = tmp_path / "path"
    folder.mkdir()
    text = "class device: pass\n\ndef set_num_threads(n): pass\n"
    (folder / "torch.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return folder


# Jobs are code, which `eval` runs: it leaves its process's number and goes on for a minute.
GO_ON = """[
    __import__("pathlib").Path({path!r} + ".part").write_text(str(__import__("os").getpid())),
    __import__("os").replace({path!r} + ".part", {path!r}),
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


@pytest.mark.parametrize(
    "fixture", ["without_torch", pytest.param("tmp_path", marks=pytest.mark.slow)]
)
def test_processes_return_rows_in_order(fixture: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(fixture)
    jobs = [f"[{{'x': {x}}}]" for x in (3, 1, 2)]
    assert run_jobs(eval, jobs, 2, False) == [{"x": 3}, {"x": 1}, {"x": 2}]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("job", "message"),
    [("int('a slip')", "a slip"), ("__import__('os')._exit(1)", "--jobs 2: a process was killed")],
)
def test_failed_job_stops_the_rest(
    job: str, message: str, tmp_path: Path, without_torch: Path
) -> None:
    started = time.monotonic()
    go_on = GO_ON.format(path=str(tmp_path / "pid"))
    with pytest.raises(ValueError, match=message) as caught:
        run_jobs(eval, [go_on, job, go_on, go_on], 2, False)
    assert time.monotonic() - started < 40
    assert isinstance(caught.value, UserError) == ("killed" in message)
    assert not multiprocessing.active_children()


SCRIPT = """
import signal
import sys
from ood_osdre.errors import exit_status
from ood_osdre.tasks.suites.reports import run_jobs

if __name__ == "__main__":
    # A shell has the processes of its background ignore it, and they pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(exit_status(lambda: len(run_jobs(eval, [sys.argv[1]] * 3, 2, False))))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_processes_end_with_their_parent(name: str, tmp_path: Path, without_torch: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(without_torch), str(Path(command_module.__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, script, GO_ON.format(path=str(tmp_path / "pid"))],
        env=os.environ | {"PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(6000):
        if (tmp_path / "pid").exists() or process.poll() is not None:
            break
        time.sleep(0.01)
    worker = int((tmp_path / "pid").read_text())
    if name == "SIGINT":  # as a terminal does, to all of them
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=60)
    assert gone(worker)
    if name != "SIGKILL":
        assert process.returncode == 130
        assert error == "error: interrupted\n"


def test_number_types_do_not_name_internals() -> None:
    with pytest.raises(Exception, match="got x, expected a whole number, 2 to 5") as caught:
        reports.count(2, 5)("x")
    assert "read" not in str(caught.value)
