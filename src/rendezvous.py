"""How the processes of a job come together before JAX does, and learn at once how one of them ended.

Process 0 listens at the coordinator's address. When all have come and agree it leaves the port to JAX's own service,
but the connections stay open: the system closes those of a process that is killed, and a machine that is lost stops
answering the system's probes. What ends a process is told to process 0, and by it to all. A message is a JSON object on
a line; a process sends at most one after the join: how it ended, or that it came to its end.
"""

import contextlib
import errno
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO

from src.errors import MISTAKE, TRY_AGAIN, TransientError, UserError, first_few
from src.json_text import parse_json

Facts = Mapping[str, str]

SAY_EVERY = 30.0  # seconds between two lines about who is missing
GREETING = "MinText"
MAX_MESSAGE_BYTES = 2**24


class Job:
    """The processes of a job, each of which learns of each other's end.

    Args:
        process: which this one is.
        peers: connections to the others: process 0 has one to each, the others have one to process 0.
        end: called with an exit code and a message, from a thread, when another process ended and this one has to.
    """

    def __init__(self, process: int, peers: Mapping[int, "Peer"], end: Callable[[int, str], object]) -> None:
        self.process = process
        self._peers, self._end = dict(peers), end
        self._told = False
        self._news = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="job", daemon=True)
        self._watcher.start()

    def tell(self, code: int, message: str) -> None:
        """Tells all others that this process ends, and how; process 0 waits until they have ended, a moment at most."""
        self._tell_all({"code": code, "message": f"process {self.process} of this job ended: {message or code}"})

    def leave(self) -> None:
        """Tells the others that this process has come to its end, and that all is well."""
        for peer in self._peers.values():
            peer.send({"leaves": True})

    def await_news(self) -> None:
        """Returns after a moment, unless another process has ended: then this one is about to end too."""
        if self._news.wait(3):
            self._watcher.join()

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        if self._told:
            return
        self._told = True
        for peer in self._peers.values():
            peer.send(message)
        if self.process == 0:  # JAX aborts in processes whose coordinator is gone
            end = time.monotonic() + 2
            for peer in self._peers.values():
                peer.await_end(end)

    def _watch(self) -> None:
        watched = {peer.fileno(): number for number, peer in self._peers.items()}
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        while watched:
            for descriptor, _ in poll.poll():
                number = watched[descriptor]
                message = self._peers[number].read()
                if self._told:
                    return
                if message.get("leaves"):
                    poll.unregister(descriptor)
                    del watched[descriptor]
                    continue
                self._news.set()
                if "code" not in message:
                    lost = f"process {number} of this job was killed, or its machine is lost ({message['lost']})"
                    message = {"code": TRY_AGAIN, "message": f"{lost}: give all processes the same command again"}
                self._tell_all(message)
                self._end(int(message["code"]), str(message["message"]))
                return


current_job: Job | None = None  # set where this process has joined a job of several


class Peer:
    """A connection to another process."""

    def __init__(self, connection: socket.socket, silence: int) -> None:
        """`silence`: seconds without an answer from the other's system until it is taken for lost."""
        self._socket = connection
        self._file: BinaryIO = connection.makefile("rb")
        options = {"TCP_KEEPIDLE": max(silence // 3, 1), "TCP_KEEPINTVL": max(silence // 6, 1), "TCP_KEEPCNT": 4}
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * silence}.items():
            if hasattr(socket, name):  # macOS lacks some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Returns the connection's descriptor, for polling."""
        return self._socket.fileno()

    def timeout(self, seconds: float | None) -> None:
        """Sets how long reading may take; None: for ever."""
        self._socket.settimeout(seconds)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, if there still is somebody to get it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """Returns the next message; one with `lost`, which says why, where there is none."""
        try:
            line = self._file.readline(MAX_MESSAGE_BYTES)
            message = parse_json(line) if line else {"lost": "the connection ended"}
        except OSError as error:
            return {"lost": error.strerror or str(error)}
        except ValueError:
            return {"lost": "what it said is no message of MinText's"}
        return message if isinstance(message, dict) else {"lost": "what it said is no message of MinText's"}

    def is_gone(self) -> bool:
        """Returns whether the other closed the connection; only while no message is expected."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def await_end(self, end: float) -> None:
        """Waits until the other closes the connection, or `time.monotonic()` is `end`."""
        while not self.is_gone() and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self._socket.close()


def join(
    address: str,
    count: int,
    process: int,
    facts: Facts,
    *,
    timeout: int,
    silence: int,
    disagree: str,
    say: Callable[[str], object],
) -> dict[int, Peer]:
    """Waits for all processes of the job; returns this one's connections.

    Args:
        address: host:port of process 0, the same for all.
        count: of the processes.
        process: which this one is.
        facts: has to be the same in all processes.
        timeout: seconds that process 0 waits for the others, and they for it.
        silence: seconds after which a machine that does not answer is taken for lost.
        disagree: what to say, before the facts that differ.
        say: gets a line each `SAY_EVERY` seconds about who is missing.

    Raises:
        TransientError: somebody is missing; process 0's port is in use.
        UserError: the facts of the processes differ, two have the same number, or process 0 cannot listen.
    """
    host, _, port = address.rpartition(":")
    clock = _Clock(timeout, say)
    if process == 0:
        return _receive(address, int(port), count, facts, clock, silence, disagree)
    return {0: _come((host.strip("[]"), int(port)), address, count, process, facts, clock, silence)}


class _Clock:
    """The time that a process waits for others, and when it says so."""

    def __init__(self, timeout: int, say: Callable[[str], object]) -> None:
        self._begin = self._said = time.monotonic()
        self.timeout, self._say = timeout, say

    def left(self) -> float:
        return self._begin + self.timeout - time.monotonic()

    def say(self, text: str) -> None:
        if time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            self._say(f"{text} (since {self._said - self._begin:.0f} s, for {self.timeout} s at most)")


def _receive(
    address: str, port: int, count: int, facts: Facts, clock: _Clock, silence: int, disagree: str
) -> dict[int, Peer]:
    """Process 0: waits for the others at the port, which is free again afterwards."""
    peers: dict[int, Peer] = {}
    theirs: dict[int, Facts] = {0: facts}
    with _listen(address, port, count) as listener:
        listener.settimeout(0.2)
        while len(peers) < count - 1:
            missing = _some(number for number in range(1, count) if number not in peers)
            clock.say(f"waiting for process {missing} of {count} at {address}")
            if clock.left() < 0:
                _refuse(
                    peers,
                    TRY_AGAIN,
                    f"process {missing} of {count} did not come to {address} within {clock.timeout} s: its log says "
                    "why, or it does not reach this address. jax_distributed_initialization_timeout is how long "
                    "processes wait",
                )
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                peer = Peer(connection, silence)
                peer.timeout(5)
                hello = peer.read()
                if hello.get("greeting") != GREETING:
                    peer.close()
                    continue
                peer.timeout(None)
                number = hello["process"]
                taken = not 0 < number < count or (number in peers and not peers[number].is_gone())
                if taken or hello["count"] != count:
                    _refuse(
                        {**peers, -1: peer},
                        MISTAKE,
                        f"a process came to {address} with process_id={number} num_processes={hello['count']}, and "
                        f"process 0 has num_processes={count}{f'; that is process {number} already' if taken else ''}"
                        f": expected the same num_processes everywhere, and each process_id from 0 to {count - 1} once",
                    )
                peer.send({"greeting": GREETING})
                peers[number] = peer
                theirs[number] = facts if hello["facts"] == facts else hello["facts"]  # thousands of equal ones are one
            peers = {number: peer for number, peer in peers.items() if not peer.is_gone()}
    if lines := differences([theirs[number] for number in range(count)]):
        _refuse(peers, MISTAKE, "\n".join([disagree, *lines]))
    for peer in peers.values():
        peer.send({"begin": True})
    return peers


def _refuse(peers: Mapping[int, Peer], code: int, message: str) -> None:
    """Ends the job before it begins, in all processes that are there."""
    for peer in peers.values():
        peer.send({"code": code, "message": message})
    raise _error(code, message)


def _error(code: int, message: str) -> Exception:
    return (UserError if code == MISTAKE else TransientError)(message)


def _listen(address: str, port: int, count: int) -> socket.socket:
    """Listens at the port, on all of this machine's addresses or the one that the environment gives JAX."""
    host = ""
    if bind := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        host, port = bind.rpartition(":")[0].strip("[]"), int(bind.rpartition(":")[2])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("" if both else host, port),
            family=socket.AF_INET6 if both else family,
            backlog=count,
            dualstack_ipv6=both,
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransientError(
                f"port {port}, of {address}, is in use by another program on this machine, perhaps by an earlier run "
                "that has not ended: wait for it, end it, or give all processes another port"
            ) from None
        raise UserError(f"process 0 cannot listen at {address}: {error.strerror}") from None


def _come(
    place: tuple[str, int], address: str, count: int, process: int, facts: Facts, clock: _Clock, silence: int
) -> Peer:
    """Connects to process 0 as soon as it listens, and waits until all processes have come."""
    hello = {"greeting": GREETING, "process": process, "count": count, "facts": dict(facts)}
    while True:
        try:
            peer = Peer(socket.create_connection(place, timeout=5), silence)
        except OSError as error:  # TimeoutError and gaierror too
            reason = error.strerror or str(error)
        else:
            peer.send(hello)
            answer = peer.read()
            if answer.get("greeting") == GREETING:
                peer.timeout(None)  # process 0 knows how long to wait for the others
                answer = peer.read()
            if answer.get("begin"):
                return peer
            peer.close()
            if "code" in answer:
                raise _error(answer["code"], answer["message"])
            reason = answer.get("lost", "another program answers there")
        clock.say(f"process 0 does not answer at {address} ({reason})")
        if clock.left() < 0:
            raise TransientError(
                f"process 0 of {count} did not answer at {address} within {clock.timeout} s ({reason}): its log says "
                "why, or this is not its address. jax_distributed_initialization_timeout is how long processes wait"
            )
        time.sleep(0.2)


def differences(theirs: list[Facts]) -> list[str]:
    """Returns a line for each fact that differs, with the processes that have each value."""
    names = dict.fromkeys(name for facts in theirs for name in facts)
    values = {name: [facts.get(name, "nothing") for facts in theirs] for name in names}
    return [f"  {name}: {_by_process(each)}" for name, each in values.items() if len(set(each)) > 1]


def _by_process(values: list[str]) -> str:
    """Says which processes have which value: `0.01 in process 0; 0.02 in process 1, 2, 3, 4, 5 and 3 more`."""
    return "; ".join(
        f"{value} in process {_some(process for process, other in enumerate(values) if other == value)}"
        for value in dict.fromkeys(values)
    )


def _some(numbers: Iterable[int]) -> str:
    return first_few(map(str, numbers))
