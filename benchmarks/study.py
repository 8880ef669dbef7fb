r"""Runs a study of `studies/`: its methods by seeds, each by the main command.

    python benchmarks/study.py pack_methods --data-root DIR [--only METHOD ...] [--seeds 0 1] [--jobs 2]

Each run trains in a folder of its own, `runs/STUDY/...`; a finished one adds its line to
`benchmarks/records/STUDY.jsonl`, from which `python benchmarks/report.py` makes the tables. The
command can be interrupted and given again at any time: what has a line is skipped, what is
unfinished goes on. Every option of every method is checked before the first run; a line that is
there, but of other options than the study has now, is an error.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from filelock import FileLock, Timeout
from jobs import Job, check_settings, config_of, named, plan
from records import RECORDS, append, finished_run, read_curve, read_runs, record_of
from studies import STUDIES, Study, load_study, slug
from study_tables import overview
from tqdm import tqdm

from ood_osdre import cli
from ood_osdre.errors import Parser, UserError, count, exit_status, number
from ood_osdre.files import atomic_path, local
from ood_osdre.options import differences

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PLOT = "score_density.png"
# The main commands that are at work.
RUNNING: set["subprocess.Popen[str]"] = set()


class Runner:
    r"""Runs the jobs of a study and writes their lines.

    Arguments:
        study: The study.
        args: The options of :func:`main`.
        records: The file of the lines, which no other process writes.

    Raises:
        UserError: If an option of a method is wrong, or a line is of another run.
    """

    def __init__(self, study: Study, args: argparse.Namespace, records: Path) -> None:
        self.study, self.args, self.records = study, args, records
        check_settings(study)
        self.lines = {run.key: run for run in read_runs(records)}
        self.jobs = plan(
            study, args.only or list(study.methods), args.seeds, args.out / args.study
        )
        self.trained: dict[Path, Future[str | None]] = {}
        self.deadline = None if args.budget is None else time.monotonic() + args.budget
        self.writing = Lock()
        for job in self.jobs:
            for variant, further in self._ways(job):
                self._is_done(job, variant, further)

    def run(self) -> int:
        r"""Runs what is not done yet; returns the number of failures."""
        failures = 0
        ways = [(job, *way) for job in self.jobs for way in self._ways(job)]
        # Of a seed, what waits for no other, then what does, then further ways to score: nothing waits
        # long, nor for what is behind itself.
        ways.sort(key=lambda way: (way[0].seed, bool(way[2]), self._needs(way[0], way[2]) != {}))
        with ThreadPoolExecutor(self.args.jobs) as pool:
            futures = []
            for job, variant, further in ways:
                futures.append(pool.submit(self._told, job, variant, further))
                if not further:
                    self.trained[job.folder] = futures[-1]
            try:
                for future in tqdm(futures, unit="run", disable=None):
                    if failure := future.result():
                        failures += 1
                        tqdm.write(failure, file=sys.stderr)
            except KeyboardInterrupt:
                # A terminal tells the runs, too; what else interrupts does not.
                pool.shutdown(wait=False, cancel_futures=True)
                for run in list(RUNNING):
                    run.send_signal(signal.SIGINT)
                raise
        return failures

    def _ways(self, job: Job) -> list[tuple[str, Sequence[str]]]:
        r"""Returns the ways to score a job, its own first: names and further options."""
        others = [(k, o) for k, o in job.method.variants.items() if k not in self.args.without]
        return [(job.method.variant, ()), *others]

    def _is_done(self, job: Job, variant: str, further: Sequence[str]) -> bool:
        r"""Returns whether a line is there.

        Raises:
            UserError: If an option is wrong, or the line is of a run with other options.
        """
        wanted, asked = config_of(job, further), job.setting[2]
        for run in self.lines.values():
            # A reference that is a path goes by its last part.
            reference = Path(asked).stem if asked else run.reference
            key = *job.setting[:2], reference, job.name, variant, job.seed
            if run.key == key:
                # The key says these two. An option newer than the line is not held against it.
                found = {**run.config, **{k: wanted[k] for k in ("reference", "title")}}
                if difference := differences(found, wanted, shared=True):
                    raise UserError(
                        f"{self.records}: {run.label} is of another run ({difference}); "
                        "remove its line, or choose another --records."
                    )
                return True
        return False

    def _told(self, job: Job, variant: str, further: Sequence[str]) -> str | None:
        r"""Trains a job, or scores it in a further way; returns what went wrong, if anything did."""
        label = ", ".join(filter(None, [job.name, variant, f"seed {job.seed}"]))
        try:
            if self._is_done(job, variant, further):
                return None
            if lacking := self._lacking(job, further):
                return f"not started: {label}, as the run of {lacking!r} is not there"
            left = None if self.deadline is None else self.deadline - time.monotonic()
            if not further and left is not None and left <= 0:
                return f"not started: {label}"
            if further:
                folder = self._score(job, variant, further)
            else:
                self._train(job, left)
                folder = job.folder
            self._write(job, variant, folder)
        except UserError as error:
            return f"{label}: {error}"
        return None

    def _needs(self, job: Job, further: Sequence[str]) -> dict[str, Path]:
        r"""Returns the folders of the runs that a way to score names, its own if it is a further one."""
        options = further or job.overrides
        needs = {n: f for n, f in job.needs.items() if any(str(f) in option for option in options)}
        return needs | ({job.name: job.folder} if further else {})

    def _lacking(self, job: Job, further: Sequence[str]) -> str | None:
        r"""Waits for the runs that are needed; returns the method of one that failed.

        Raises:
            UserError: If one that is done has left no run.
        """
        for need, folder in self._needs(job, further).items():
            if folder in self.trained and self.trained[folder].result():
                return need
            if not (folder / "run.json").is_file():
                raise UserError(
                    f"{folder}: lacks the run of {need!r}; remove its line to train it again."
                )
        return None

    def _train(self, job: Job, left: float | None) -> None:
        budget = [] if left is None else ["--time-budget", f"{left:.0f}"]
        self._command([*job.command, "--out", str(job.folder), "--resume", *budget])

    def _score(self, job: Job, variant: str, further: Sequence[str]) -> Path:
        r"""Scores a trained model in another way; returns the folder."""
        folder = job.folder / slug(variant)
        self._command(["--checkpoint", str(job.folder), "--out", str(folder), *further])
        return folder

    def _command(self, options: Sequence[str]) -> None:
        r"""Gives the main command.

        Raises:
            UserError: With its error, if it failed.
        """
        machine = ["--data-root", str(self.args.data_root), "--device", self.args.device]
        run = subprocess.Popen(
            [sys.executable, str(HERE / "eval_ood.py"), "--quiet", *machine, *options],
            env={**os.environ, "OMP_NUM_THREADS": str(self.args.threads)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        RUNNING.add(run)
        _, told = run.communicate()
        RUNNING.discard(run)
        if run.returncode:
            lines = told.strip().splitlines() or ["no message"]
            # Beneath an error there may be a hint.
            last = next((line for line in lines if line.startswith("error: ")), lines[-1])
            raise UserError(last if run.returncode == cli.UNFINISHED else f"failed: {last}")

    def _write(self, job: Job, variant: str, folder: Path) -> None:
        r"""Adds the line of a finished run, after its plot where that is kept."""
        record = record_of(folder / "run.json")
        curve = self.study.curve if job.method.curve is None else job.method.curve
        run = finished_run(
            folder,
            method=job.name,
            variant=variant,
            seed=job.seed,
            id=job.setting[0],
            benchmark=job.setting[1],
            config=named(job, record["config"]),
            threads=self.args.threads if str(record["device"]).startswith("cpu") else None,
            curve=read_curve(folder / "log.jsonl")
            if curve and variant == job.method.variant
            else None,
        )
        own = job.name in self.study.keep and variant == job.method.variant
        if own and job.seed == min(self.study.seeds):
            name = slug("-".join(filter(None, [*job.setting, job.name])))
            with atomic_path(self.args.results / self.args.study / f"{name}.png") as temporary:
                shutil.copyfile(folder / PLOT, temporary)
        with self.writing:
            append(self.records, run)
            self.lines[run.key] = run


@contextmanager
def locked(records: Path) -> Iterator[None]:
    r"""Keeps other processes from writing a study's lines; the system ends it with the process."""
    lock = FileLock(records.with_suffix(".lock"))
    try:
        records.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{records}: another study.py is writing it.") from None
    except OSError as error:
        raise UserError(f"{records}: cannot be written: {error.strerror or error}.") from None
    try:
        yield
    finally:
        lock.release()


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs a study and prints what its lines say."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("study", metavar="STUDY", help="the name of a file in studies/")
    add("--data-root", type=local, default=Path("data"))
    add("--only", nargs="+", metavar="METHOD", help="these methods, and those that they need")
    add("--without", nargs="+", default=[], metavar="VARIANT", help="variants to leave out")
    add("--ids", nargs="+", metavar="ID", help="of its in-distribution data sets, these")
    add("--seeds", type=count(0), nargs="+", metavar="SEED", help="in place of the study's")
    add("--jobs", type=count(1), default=2, help="runs side by side")
    add("--threads", type=count(1), default=1, help="threads of each run on a CPU")
    add("--device", default="cpu")
    add("--budget", type=number(), metavar="S", help="start or continue nothing after S seconds")
    add("--out", type=local, default=Path("runs"), metavar="DIR", help="scratch")
    add("--studies", type=local, default=STUDIES, metavar="DIR")
    add("--records", type=local, default=RECORDS, metavar="DIR")
    add("--results", type=local, default=RESULTS, metavar="DIR", help="for plots")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Runs what is not done yet, and prints a table of what is."""
    study = load_study(args.study, args.studies)
    for option, given, known in (
        ("--only", args.only or (), study.methods),
        ("--ids", args.ids or (), study.ids),
        ("--without", args.without, {v for m in study.methods.values() for v in m.variants}),
    ):
        if unknown := [name for name in given if name not in known]:
            expected = ", ".join(known) or "none"
            raise UserError(f"{option} {unknown[0]}: not of {args.study}, expected {expected}.")
    records = args.records / f"{args.study}.jsonl"
    with locked(records):
        failures = Runner(study.replace(ids=args.ids or study.ids), args, records).run()
    print(overview(study, read_runs(records)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
