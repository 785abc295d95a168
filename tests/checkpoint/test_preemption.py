import os
import signal
import threading

import pytest

from src.run import preemption as module
from src.run.preemption import Preemption


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_and_the_former_handler_comes_back(number):
    received = []
    outer = signal.signal(number, lambda number, frame: received.append(number))
    try:
        preemption = Preemption()
        assert not preemption.reached(1)
        send(number)
        assert preemption.reached(2)
        assert preemption.signal == number
        assert received == []
        preemption.close()
        send(number)
        assert received == [number]
    finally:
        signal.signal(number, outer)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_after_a_signal_ends_at_once_and_says_what_stands(first, tmp_path, monkeypatch):
    ended, calls = threading.Event(), []

    def end(code, message, at_once):
        calls.append((code, message, at_once))
        ended.set()

    monkeypatch.setattr(module, "end", end)
    preemption = Preemption(tmp_path)
    try:
        send(first)
        send(signal.SIGTERM)  # which schedulers may repeat
        assert not calls
        send(signal.SIGINT)
        assert ended.wait(60)
    finally:
        preemption.close()
    assert calls == [(130, "interrupted; there is no checkpoint", True)]


def test_a_run_in_another_thread_leaves_the_handlers_alone():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    answers = []

    def run():
        preemption = Preemption()
        answers.append(preemption.reached(1))
        preemption.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
