"""The processes of a job, as threads of this one: who comes, who agrees, and how the others learn of an end."""

import contextlib
import errno
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from src.system import rendezvous
from src.system.errors import TransientError, UserError
from tests import runs


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """For processes that here never go."""
    monkeypatch.setattr(rendezvous, "NEWS_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.2)


def join(address, count, process, facts=None, timeout=60, say=lambda line: None, silence=30):
    """One process's connections."""
    return rendezvous.Meeting(address, count, facts or {}, timeout, silence, "they differ", say).join(process)


def results(address, *processes, **options):
    """What `join` returned or raised for each (process, count, facts)."""
    with ThreadPoolExecutor(len(processes)) as threads:
        futures = [
            threads.submit(join, address, count, process, facts, **options) for process, count, facts in processes
        ]
        return [future.exception() or future.result() for future in futures]


def kill(job, peers):
    """Does what the system does when a process is killed."""
    job._has_told = True  # its own thread says nothing any more
    for peer in peers.values():
        with contextlib.suppress(OSError):  # the other was first
            peer._socket.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def three():
    """The jobs of three processes that have come together, with a queue of what each was told to end with."""
    address = runs.free_address()
    connections = results(address, *((process, 3, {"key": "1"}) for process in range(3)))
    ends = [queue.SimpleQueue() for _ in connections]
    jobs = [
        rendezvous.Job(process, peers, lambda code, message, end=end: end.put((code, message)))
        for process, (peers, end) in enumerate(zip(connections, ends, strict=True))
    ]
    yield jobs, ends, connections, address
    for job, peers in zip(jobs, connections, strict=True):
        kill(job, peers)


def test_the_port_is_free_for_jax_once_all_have_come(three):
    *_, address = three
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass


@pytest.mark.parametrize("dying", [0, 2])
def test_a_process_that_dies_is_named_to_all_others(three, dying):
    jobs, ends, connections, _ = three
    kill(jobs[dying], connections[dying])
    for process in {0, 1, 2} - {dying}:
        code, message = ends[process].get(timeout=60)
        assert code == 75
        assert message.startswith(f"process {dying} of this job was killed, or its machine is lost")
        assert "\n" not in message


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long)])
def test_what_ended_a_process_is_told_to_all_others(three, failing):
    jobs, ends, connections, _ = three
    jobs[failing].tell(2, "error: data.jsonl, line 8: not JSON")
    kill(jobs[failing], connections[failing])
    for process in {0, 1, 2} - {failing}:
        assert ends[process].get(timeout=60) == (
            2,
            f"process {failing} of this job ended: error: data.jsonl, line 8: not JSON",
        )
    assert ends[failing].empty()


def test_a_process_that_has_come_to_its_end_is_not_missed(three):
    jobs, ends, connections, _ = three
    for process in (1, 2):
        jobs[process].leave()
        kill(jobs[process], connections[process])
    jobs[0].await_news()
    assert ends[0].empty()


@pytest.mark.parametrize(
    ("places", "agree"), [("aaa", [True] * 3), ("aab", [False] * 3), ("baa", [False] * 3), ("a", [False])]
)
def test_processes_agree_that_all_failed_at_the_same_place(places, agree, three, monkeypatch):
    """Each gets an answer within a bounded time, also if the others know of no error."""
    monkeypatch.setattr(rendezvous, "AGREE_SECONDS", 20 if all(agree) else 0.5)
    jobs, ends, *_ = three
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda job, place: job.all_failed(place), jobs, places)) == agree
    assert all(each.empty() for each in ends)
    jobs[1].tell(2, "error: then it ends")
    assert ends[0].get(timeout=60) == (2, "process 1 of this job ended: error: then it ends")


@pytest.mark.parametrize("stopped", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_process_that_is_stopped_is_named_to_all_with_it_once_it_goes_on(stopped):
    connections = results(runs.free_address(), *((process, 3, {}) for process in range(3)), silence=1)
    ends = [queue.SimpleQueue() for _ in connections]

    def watch(process):
        peers, end = connections[process], ends[process]
        return rendezvous.Job(process, peers, lambda code, message: end.put((code, message)))

    jobs = {process: watch(process) for process in (0, 1, 2) if process != stopped}
    found = {process: ends[process].get(timeout=60) for process in jobs}
    expected = f"process {stopped} of this job has not answered for 1 s: it or its machine is stopped. Give all "
    for code, message in found.values():
        assert code == 75
        assert message.startswith(expected)
    jobs[stopped] = watch(stopped)
    assert ends[stopped].get(timeout=60) in found.values()  # of itself, and not that others were silent meanwhile
    for process, peers in enumerate(connections):
        kill(jobs[process], peers)


def test_processes_that_say_nothing_but_that_they_are_there_go_on():
    connections = results(runs.free_address(), (0, 2, {}), (1, 2, {}), silence=1)
    ends = queue.SimpleQueue()
    jobs = [rendezvous.Job(process, peers, lambda *end: ends.put(end)) for process, peers in enumerate(connections)]
    with pytest.raises(queue.Empty):
        ends.get(timeout=3)
    for job, peers in zip(jobs, connections, strict=True):
        kill(job, peers)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_process_that_has_finished_waits_for_the_others_as_long_as_it_takes(first):
    connections = results(runs.free_address(), (0, 2, {}), (1, 2, {}), silence=1)
    ends = queue.SimpleQueue()
    jobs = [rendezvous.Job(process, peers, lambda *end: ends.put(end)) for process, peers in enumerate(connections)]
    jobs[first].leave()
    with pytest.raises(queue.Empty):
        ends.get(timeout=3)
    jobs[1 - first].leave()
    for job, peers in zip(jobs, connections, strict=True):
        kill(job, peers)


@pytest.mark.parametrize(
    "said",
    [
        b'{"greeting": "MinText"}',
        b'{"greeting": "MinText", "process": "1", "count": 2, "facts": {}}',
        b'{"greeting": "MinText", "process": 1, "count": 2, "facts": 3}',
        b'{"greeting": "MinText", "process": true, "count": 2, "facts": {}}',
        b'{"greeting": "MinText", "process": 1, "count": 2, "facts": {"steps": [3]}}',
        b'["MinText"]',
        b"GET / HTTP/1.1",
    ],
)
def test_a_stranger_that_connects_delays_nobody(monkeypatch, said):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 300.0)
    address = runs.free_address()
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as strangers:
        first = thread.submit(join, address, 2, 0)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                strangers.enter_context(socket.create_connection(place)).sendall(said + b"\n")
                break
        for _ in range(10):
            strangers.enter_context(socket.create_connection(place))
        peers = [join(address, 2, 1), first.result(timeout=60)]
    assert [set(each) for each in peers] == [{0}, {1}]


def test_a_process_that_does_not_come_is_named_to_those_that_are_there():
    address = runs.free_address()
    said = []
    found = results(address, (0, 4, {}), (2, 4, {}), timeout=1, say=said.append)
    for error in found:
        assert isinstance(error, TransientError)
        assert f"process 1, 3 of 4 did not connect to {address} within 1 s" in str(error)


def test_those_who_wait_say_for_whom(monkeypatch):
    monkeypatch.setattr(rendezvous, "SAY_EVERY", 0.2)
    for process, words in ((0, "waiting for process 1 of 2 at"), (1, "process 0 does not answer at")):
        said = []
        with pytest.raises(TransientError):
            join(runs.free_address(), 2, process, timeout=1, say=said.append)
        assert said
        assert words in said[0]


def test_an_address_where_nobody_or_another_program_answers_is_named():
    address = runs.free_address()
    with pytest.raises(TransientError, match=rf"process 0 of 2 did not answer at {address} within 1 s"):
        join(address, 2, 1, timeout=1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n")).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransientError, match=r"it sent something other than MinText's messages"):
            join(address, 2, 1, timeout=0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b'{"code": 400, "error": "no"}\n')).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransientError, match=r"another program answers there"):
            join(address, 2, 1, timeout=0)


@pytest.mark.parametrize(("bind", "host"), [("127.0.0.1:{port}", "127.0.0.1"), (None, "")])
def test_it_listens_where_the_environment_has_jax_listen(bind, host, monkeypatch):
    """Nobody else is to reach it, not while processes join either."""
    address = runs.free_address()
    port = int(address.rpartition(":")[2])
    if bind:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bind.format(port=port))
    with rendezvous._listen(address, 1) as listening:
        where = listening.getsockname()[:2]
    assert where == (host, port) if host else where in (("::", port), ("0.0.0.0", port))


def test_a_port_in_use_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransientError, match=rf"port \d+, of {address}, is in use by another program"):
            join(address, 2, 0)


def test_processes_that_differ_are_all_told_where():
    facts = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}]
    found = results(runs.free_address(), *((process, 3, facts[process]) for process in range(3)))
    for error in found:
        assert isinstance(error, UserError)
        assert str(error).splitlines() == [
            "they differ",
            "  b: 2 in process 0, 2; 3 in process 1",
            "  c: nothing in process 0, 1; 4 in process 2",
        ]


@pytest.mark.parametrize("others", [[(1, 3, {}), (1, 3, {})], [(1, 2, {})], [(3, 4, {})]])
def test_processes_that_are_numbered_wrongly_are_told_so(others):
    found = results(runs.free_address(), (0, 3, {}), *others)
    assert all(isinstance(error, UserError) for error in found)
    assert "each process_id from 0 to 2 once" in str(found[0])


def test_a_process_that_is_started_again_takes_its_place():
    address = runs.free_address()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(join, address, 3, 0)
        with socket.socket() as gone:
            while gone.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) == errno.ECONNREFUSED:
                pass
            gone.sendall(b'{"greeting": "MinText", "process": 1, "count": 3, "facts": {}}\n')
            assert gone.recv(100)
        found = results(address, (1, 3, {}), (2, 3, {}))
        peers = [first.result(timeout=60), *found]
    assert [set(each) for each in peers] == [{1, 2}, {0}, {0}]
    for each in peers:
        for peer in each.values():
            peer.close()
