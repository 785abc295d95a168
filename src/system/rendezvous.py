"""Connects the processes of a job before JAX does, and informs them at once when one of them ends, with the reason.

Process 0 listens at the coordinator's address. When all processes have connected and agree, it releases the port for
JAX's own service, but the connections stay open: the operating system closes the connections of a killed process, and
TCP's keep-alive probes find a lost machine. A stopped process keeps its connections, so each also sends heartbeats from
Python. A missing one is noticed earlier than a missing heartbeat of JAX's, for which JAX aborts a process. A process
that ends tells process 0, which tells all. A message is a JSON object on a line; besides heartbeats, a process sends at
most two after joining: at which point it failed, and how it ended or that it finished.
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
from dataclasses import dataclass
from typing import Any, NoReturn

from src.system.errors import MISTAKE, TRY_AGAIN, TransientError, UserError, first_few
from src.system.json_text import parse_json

Facts = Mapping[str, str]

SAY_EVERY = 30.0  # seconds between two lines about missing processes
NEWS_SECONDS = 3.0  # how long to wait for news of another process's end, which may have caused an error here
AGREE_SECONDS = 10.0  # how long a failed process waits for the others to report the same failure
HELLO_SECONDS = 5.0  # how long a new connection has to identify itself
LEAVE_SECONDS = 2.0  # how long process 0 waits for the others to end after telling them of its own end
GREETING = "MinText"
MAX_MESSAGE_BYTES = 2**24
AGAIN = "Give all processes the same command again"
HOW_LONG = "jax_distributed_initialization_timeout is how long processes wait"


# ---- Joining


@dataclass
class Meeting:
    """Connects the processes of a job, and checks that they agree in `facts`, before JAX connects them."""

    address: str  # host:port of process 0
    count: int
    facts: Facts  # must be the same in all processes
    timeout: int  # seconds that process 0 waits for the others, and they for it
    silence: int  # seconds after which a machine that does not answer counts as lost
    disagree: str  # the message before a list of facts that differ
    say: Callable[[str], object]  # prints a line; called every `SAY_EVERY` seconds while a process is missing

    def join(self, process: int) -> dict[int, "Peer"]:
        """Connects `process` with the others and waits for all of them; returns its connections by process.

        Raises TransientError if a process is missing or process 0's port is in use; UserError if the processes differ
        in `facts` or `count`, if a number is given twice or is not below `count`, or if process 0 cannot listen.
        """
        self._begin = self._last_line = time.monotonic()
        return {0: self._connect(process)} if process else self._receive()

    def _is_over(self, waiting: str) -> bool:
        """Tells whether the timeout has passed; every `SAY_EVERY` seconds, reports what this process waits for."""
        now = time.monotonic()
        if now - self._last_line >= SAY_EVERY:
            self._last_line = now
            self.say(f"{waiting} (for {now - self._begin:.0f} s so far, at most {self.timeout} s)")
        return now > self._begin + self.timeout

    def _receive(self) -> dict[int, "Peer"]:
        """Waits, as process 0, for the others to connect, and then releases the port; returns their connections."""
        address, count = self.address, self.count
        peers: dict[int, Peer] = {}
        facts_of: dict[int, Facts] = {0: self.facts}
        newcomers: dict[Peer, float] = {}  # the time by which each has to identify itself
        with _listen(address, count) as listener:
            listener.settimeout(0.2)
            while len(peers) < count - 1:
                missing = first_few(str(number) for number in range(1, count) if number not in peers)
                missing = f"process {missing} of {count}"
                if self._is_over(f"waiting for {missing} at {address}"):
                    message = f"{missing} did not connect to {address} within {self.timeout} s: see its log, or it "
                    _end_all(peers.values(), TRY_AGAIN, f"{message}cannot reach this address. {HOW_LONG}")
                with contextlib.suppress(TimeoutError):
                    newcomers[Peer(listener.accept()[0], self.silence)] = time.monotonic() + HELLO_SECONDS
                for peer, deadline in list(newcomers.items()):
                    if (hello := peer.poll()) or time.monotonic() > deadline:
                        del newcomers[peer]
                        self._admit(peer, hello or {}, peers, facts_of)
                peers = {number: peer for number, peer in peers.items() if not peer.is_gone()}
        if lines := _differences([facts_of[number] for number in range(count)]):
            _end_all(peers.values(), MISTAKE, "\n".join([self.disagree, *lines]))
        for peer in peers.values():
            peer.send({"begin": True})
        return peers

    def _admit(
        self, peer: "Peer", hello: Mapping[str, Any], peers: dict[int, "Peer"], facts_of: dict[int, Facts]
    ) -> None:
        """Adds the process that sent `hello` to `peers` and `facts_of`; closes `peer` if it is not MinText's greeting.

        Ends the job, raising UserError, if the number or count in the greeting does not fit.
        """
        kinds = {"process": int, "count": int, "facts": dict}
        strange = hello.get("greeting") != GREETING or any(type(hello.get(name)) is not kinds[name] for name in kinds)
        if strange or not all(isinstance(value, str) for value in hello["facts"].values()):
            peer.close()
            return
        number, count = hello["process"], self.count
        taken = not 0 < number < count or (number in peers and not peers[number].is_gone())
        if taken or hello["count"] != count:
            _end_all(
                [*peers.values(), peer],
                MISTAKE,
                f"a process connected to {self.address} with process_id={number} num_processes={hello['count']}, but "
                f"process 0 has num_processes={count}{f' and already a process {number}' if taken else ''}"
                f": expected the same num_processes everywhere, and each process_id from 0 to {count - 1} once",
            )
        peer.send({"greeting": GREETING})
        peers[number] = peer
        # Store equal facts of thousands of processes once.
        facts_of[number] = self.facts if hello["facts"] == self.facts else hello["facts"]

    def _connect(self, process: int) -> "Peer":
        host, _, port = self.address.rpartition(":")
        hello = {"greeting": GREETING, "process": process, "count": self.count, "facts": dict(self.facts)}
        while True:
            try:
                peer = Peer(socket.create_connection((host.strip("[]"), int(port)), timeout=5), self.silence)
            except OSError as error:  # including TimeoutError and gaierror
                reason = error.strerror or str(error)
            else:
                peer.send(hello)
                reply = peer.read(HELLO_SECONDS)
                if reply.get("greeting") == GREETING:
                    reply = peer.read()  # process 0 knows how long to wait for the others
                if reply.get("begin"):
                    return peer
                peer.close()
                if reply.keys() >= {"code", "message"}:
                    _end_all([], reply["code"], str(reply["message"]))
                reason = reply.get("lost", "another program answers there")
            if self._is_over(f"process 0 does not answer at {self.address} ({reason})"):
                raise TransientError(
                    f"process 0 of {self.count} did not answer at {self.address} within {self.timeout} s ({reason}): "
                    f"see its log, or this is not its address. {HOW_LONG}"
                )
            time.sleep(0.2)


def _listen(address: str, count: int) -> socket.socket:
    """Listens at the port of `address`, on all of this machine's addresses, or at JAX_COORDINATOR_BIND_ADDRESS.

    Raises TransientError if the port is in use, and UserError for other failures.
    """
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    host, _, port = (bind or address).rpartition(":")
    host = host.strip("[]") if bind else ""
    dual_stack = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack or ":" in host else socket.AF_INET
    place = ("" if dual_stack else host, int(port))
    try:
        return socket.create_server(place, family=family, backlog=max(count, 128), dualstack_ipv6=dual_stack)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransientError(
                f"port {port}, of {address}, is in use by another program on this machine, perhaps by an earlier run "
                "that has not ended: wait for it, end it, or give all processes another port"
            ) from None
        raise UserError(f"process 0 cannot listen at {address}: {error.strerror}") from None


def _end_all(peers: Iterable["Peer"], code: int, message: str) -> NoReturn:
    for peer in peers:
        peer.send({"code": code, "message": message})
    raise (UserError if code == MISTAKE else TransientError)(message)


def _differences(facts: list[Facts]) -> list[str]:
    """Formats a line for each fact that differs: `  key: 0.01 in process 0; 0.02 in process 1, 2`."""
    lines = []
    for name in dict.fromkeys(name for each in facts for name in each):
        processes: dict[str, list[str]] = {}
        for process, each in enumerate(facts):
            processes.setdefault(each.get(name, "nothing"), []).append(str(process))
        if len(processes) > 1:
            listed = "; ".join(f"{value} in process {first_few(numbers)}" for value, numbers in processes.items())
            lines.append(f"  {name}: {listed}")
    return lines


# ---- After joining


class Job:
    """Watches the other processes of a job, and tells them how this one ends.

    `peers`: process 0 has a connection to each other process, and each of these one to process 0. A thread calls `end`
    with an exit code and a message when another process has ended and this one must end too.
    """

    def __init__(self, process: int, peers: Mapping[int, "Peer"], end: Callable[[int, str], object]) -> None:
        self.process, self._peers, self._end = process, dict(peers), end
        self._has_told, self._has_left, self._news = False, False, threading.Event()
        self._failed, self._failures = dict[int, str](), threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="job", daemon=True)
        self._watcher.start()

    def tell(self, code: int, message: str) -> None:
        """Tells the others that this process ends, and how; process 0 waits a moment for them to end."""
        self._tell_all({"code": code, "message": f"process {self.process} of this job ended: {message or code}"})

    def all_failed(self, place: str) -> bool:
        """Reports that this process failed at `place`; returns whether all others do so too within `AGREE_SECONDS`."""
        with self._failures:
            if self.process:
                self._send({"failed": place})
            agreed = self._failures.wait_for(lambda: {*map(self._failed.get, self._peers)} == {place}, AGREE_SECONDS)
            if agreed and not self.process:
                self._send({"failed": place})
        return agreed

    def leave(self) -> None:
        """Tells the others that this process has finished without an error and no longer needs them."""
        self._has_left = True
        self._send({"leaves": True})

    def await_news(self) -> None:
        """Waits up to `NEWS_SECONDS` for news that another process has ended, and if so until this one is ended."""
        if self._news.wait(NEWS_SECONDS):
            self._watcher.join()

    def _send(self, message: Mapping[str, Any]) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def _tell_all(self, message: Mapping[str, Any]) -> None:
        if self._has_told:
            return
        self._has_told = True
        self._send(message)
        if self.process == 0:  # JAX aborts processes whose coordinator is gone
            deadline = time.monotonic() + LEAVE_SECONDS
            for peer in self._peers.values():
                while not peer.is_gone() and time.monotonic() < deadline:
                    time.sleep(0.01)

    def _watch(self) -> None:
        poll, silence = select.poll(), min(peer.silence for peer in self._peers.values())
        watched = {peer.fileno(): number for number, peer in self._peers.items()}
        heard, beat, next_beat = dict.fromkeys(watched, time.monotonic()), silence / 6, 0.0
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        while watched:
            before = time.monotonic()
            if before >= next_beat:
                next_beat = before + beat
                for number in watched.values():
                    self._peers[number].send({"alive": True})
            ready, now = poll.poll(1000 * (next_beat - before)), time.monotonic()
            if now - before > 2 * beat:  # this process was itself stopped, so messages of the others are still unread
                heard = dict.fromkeys(watched, now)
            for descriptor, _ in ready:
                number = watched[descriptor]
                while descriptor in watched and (message := self._peers[number].poll()):
                    heard[descriptor] = now
                    if self._has_told or self._ends_by(number, message):
                        return
                    if message.get("leaves"):
                        poll.unregister(descriptor)
                        del watched[descriptor]
            for descriptor, number in watched.items():
                if now - heard[descriptor] > silence and not self._has_left:
                    problem = f"process {number} of this job has not answered for {silence} s"
                    text = f"{problem}: it or its machine is stopped. {AGAIN}"
                    self._ends_by(number, {"code": TRY_AGAIN, "message": text})
                    return

    def _ends_by(self, number: int, message: Mapping[str, Any]) -> bool:
        if "failed" in message:
            with self._failures:
                self._failed[number] = message["failed"]
                self._failures.notify()
        if not message.keys() & {"code", "lost"}:
            return False
        self._news.set()
        if "code" not in message:
            lost = f"process {number} of this job was killed, or its machine is lost ({message['lost']})"
            message = {"code": TRY_AGAIN, "message": f"{lost}. {AGAIN}"}
        self._tell_all(message)
        self._end(int(message["code"]), str(message["message"]))
        return True


class Peer:
    """Exchanges messages with another process; after `silence` seconds without answer, its machine counts as lost."""

    def __init__(self, connection: socket.socket, silence: int) -> None:
        self._socket, self._received, self._lost, self.silence = connection, b"", "", silence
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": max(silence // 3, 1), "TCP_KEEPINTVL": max(silence // 6, 1), "TCP_KEEPCNT": 4}
        for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * silence}.items():
            if hasattr(socket, name):  # macOS lacks some
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.fileno = connection.fileno

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, unless the connection has ended."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def poll(self) -> dict[str, Any] | None:
        """Returns the next message; None if it has not arrived yet, `{"lost": reason}` if no valid one will."""
        if not self.is_gone() and b"\n" not in self._received:
            return None
        line, end, self._received = self._received.partition(b"\n")
        message = None
        with contextlib.suppress(ValueError):
            message = parse_json(line) if end else {"lost": self._lost}
        return message if isinstance(message, dict) else {"lost": "it sent something other than MinText's messages"}

    def read(self, seconds: float | None = None) -> dict[str, Any]:
        """Waits for the next message and returns it.

        Returns `{"lost": reason}` if no valid one will come, or if no data arrives for `seconds` (None: no limit).
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (message := self.poll()) is None:
            if not poll.poll(None if seconds is None else 1000 * seconds):
                return {"lost": "it sent nothing"}
        return message

    def is_gone(self) -> bool:
        """Reads the data that has arrived; tells whether the connection has ended or failed."""
        while not self._lost:
            try:
                data = self._socket.recv(2**16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError as error:
                self._lost = error.strerror or str(error)
            else:
                self._received += data
                self._lost = "" if data else "the connection ended"
            if len(self._received) > MAX_MESSAGE_BYTES:
                self._lost = "it sent something other than MinText's messages"
        return bool(self._lost)

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()
