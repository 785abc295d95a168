import os
import signal
import threading

from src.preemption import Preemption


def test_sigterm_ends_the_run_after_the_step_and_the_former_handler_comes_back():
    received = []
    outer = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        preemption = Preemption()
        assert not preemption.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(2)
        assert received == []
        preemption.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, outer)


def test_a_run_in_another_thread_leaves_the_handlers_alone():
    before = signal.getsignal(signal.SIGTERM)
    answers = []

    def run():
        preemption = Preemption()
        answers.append(preemption.reached(1))
        preemption.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]
    assert signal.getsignal(signal.SIGTERM) is before
