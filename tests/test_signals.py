r"""Tests for the ood_osdre.training.run module."""

import signal
import threading

from ood_osdre.training.run import caught_signals


def test_signals_are_listed_and_handlers_come_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(n) for n in numbers]
    with caught_signals() as received:
        for number in numbers:
            signal.raise_signal(number)
            signal.raise_signal(number)

    assert received == [signal.SIGINT] * 2 + [signal.SIGTERM] * 2
    assert [signal.getsignal(n) for n in numbers] == before


def test_another_thread_leaves_the_handlers_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with caught_signals() as received:
            seen.append((signal.getsignal(signal.SIGTERM), list(received)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, [])]
