r"""Many fits, in order or in several processes that end together."""

__all__ = ["Row", "run_jobs"]

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeAlias

from joblib import Parallel, delayed, parallel_config

from ...errors import UserError
from ...progress import Bar

Row: TypeAlias = dict[str, Any]


def run_jobs(
    function: Callable[[Any], list[Row]], jobs: Sequence[Any], processes: int, progress: bool
) -> list[Row]:
    r"""Runs a function of this package on every job, in order or in parallel.

    If a job fails, or the command is interrupted or ended by a signal, all jobs are stopped.

    Arguments:
        function: From a job to rows; with several processes both have to be picklable.
        jobs: The jobs.
        processes: The number of processes, each with one thread.
        progress: Whether to show a progress bar over the jobs.

    Returns:
        The rows of all jobs, in the order of the jobs.

    Raises:
        UserError: If a process was killed.
    """
    prepare = {"initializer": _end_with, "initargs": (os.getpid(),)}
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with parallel_config("loky", inner_max_num_threads=1, **prepare):
            parallel = Parallel(processes, batch_size=1, return_as="generator")
            # A terminal sends Ctrl-C to all processes, but it is the parent that ends them: those
            # that are started here, and those that joblib starts to end them, inherit that it is
            # ignored.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            results = parallel(delayed(function)(job) for job in jobs)
            try:
                signal.signal(signal.SIGINT, interrupt)
                bar = Bar(results, total=len(jobs), disable=not progress, unit="fit")
                return [row for rows in bar for row in rows]
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                results.close()
    except BrokenProcessPool:
        raise UserError(
            f"--jobs {processes}: a process was killed, as when memory is short; try fewer --jobs."
        ) from None
    finally:
        signal.signal(signal.SIGINT, interrupt)


def _end_with(parent: int) -> None:
    r"""Ends this process, a worker, when its parent was killed and could not."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
