r"""Many fits, in order or in several processes that end together."""

__all__ = ["run_jobs"]

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from types import FrameType
from typing import TypeVar

from tqdm import tqdm

from ..errors import UserError
from .reports import Row

Job = TypeVar("Job")


def run_jobs(
    function: Callable[[Job], list[Row]], jobs: Sequence[Job], processes: int, progress: bool
) -> list[Row]:
    r"""Runs a function of this package on every job, in order or in parallel.

    Arguments:
        function: From a job to rows; with several processes both have to be picklable.
        jobs: The jobs.
        processes: The number of processes.
        progress: Whether to show a progress bar over the jobs.

    Returns:
        The rows of all jobs, in the order of the jobs.
    """
    results: dict[int, list[Row]] = {}
    with tqdm(total=len(jobs), disable=not progress, unit="fit") as bar:
        if processes == 1:
            for i, job in enumerate(jobs):
                results[i] = function(job)
                bar.update()
        else:
            with closing(_in_parallel(function, jobs, processes)) as ended:
                for i, rows in ended:
                    results[i] = rows
                    bar.update()
    return [row for i in range(len(jobs)) for row in results[i]]


def _in_parallel(
    function: Callable[[Job], list[Row]], jobs: Sequence[Job], processes: int
) -> Generator[tuple[int, list[Row]], None, None]:
    r"""Yields the number and the rows of each job as it ends; if one fails, all are stopped."""
    # Spawned, as a forked child of a process that has used threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, context, initializer=_prepare_worker)
    with _interrupted_by_sigterm():
        try:
            with _interrupts_held():
                futures = {pool.submit(function, job): i for i, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException as error:
            # Nobody waits for the rest, which may take hours.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    f"--jobs {processes}: a process was killed, as when memory is short; try fewer."
                ) from None
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    r"""Lets SIGTERM do what Ctrl-C does, in the main thread, so that no worker is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    r"""Holds Ctrl-C back; processes that are started meanwhile never get it.

    A terminal sends it to all of them, but it is the parent that ends them.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _prepare_worker() -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    r"""Ends this process when its parent does: one that was killed cannot."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
