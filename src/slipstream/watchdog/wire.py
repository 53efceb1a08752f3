"""Messages between watchers, ranks and their hub: JSON, a line each, over TCP; nothing is unpickled.

Whatever comes in is bounded and may be anything: a line that isn't a JSON object ends its own connection, and no other.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from slipstream.watchdog.judgement import end_of

_MOST_BYTES = 2**20  # bytes of a line; a longer one doesn't come from a watcher
# Bytes read per look at a connection, so that no connection holds up the others.
_MOST_AT_ONCE = 2**16
_SECONDS_TO_CONNECT = 1.0
_POLL_SECONDS = 0.05
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between tries to connect


class Line:
    """A connection that sends and receives dictionaries.

    Attributes:
        connection: the socket, which doesn't block.
        end: "" while the line is open; "closed" once the other end has closed it, as the system does at the end of a
            process; "reset" where something that it hadn't read was lost with it; "broken" after anything else, which
            says nothing of the other end.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = _MOST_BYTES) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.end = ""
        self.most_bytes = most_bytes
        self._received, self._unsent = b"", b""

    @property
    def is_open(self) -> bool:
        """Whether messages may still come and go."""
        return not self.end

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, or keeps the bytes that the system doesn't take now for the next call."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends the bytes that were kept."""
        try:
            while self._unsent and self.is_open:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            # The other end doesn't read.
            if len(self._unsent) > _MOST_BYTES:
                self.end = "broken"
        except OSError:
            self.end = "broken"

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting, of a bounded number of bytes."""
        if not self.is_open:
            return []
        try:
            data = self.connection.recv(_MOST_AT_ONCE)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            self.end = "reset" if isinstance(error, ConnectionResetError) else "broken"
            return []
        if not data:
            self.end = "closed"
        *lines, self._received = (self._received + data).split(b"\n")
        messages = []
        for line in lines:
            if (message := _parse(line, self.most_bytes)) is None:
                self.end = "broken"
                break
            messages.append(message)
        if len(self._received) > self.most_bytes:
            self.end = "broken"
        return messages

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()
        self.end = self.end or "broken"


def _parse(line: bytes, most_bytes: int) -> dict[str, Any] | None:
    """Returns the JSON object that a line is; None where it is anything else."""
    if len(line) > most_bytes:
        return None
    try:
        message = json.loads(line)
    # The line may not be JSON or UTF-8, have a number of a million digits, or be nested too deeply.
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


class Link:
    """A line to the hub, which is made again wherever it ends, after pauses that grow from try to try.

    Attributes:
        line: the present one; None where there is none.
        heard: when something came from the hub, or this link was made.
        has_heard: whether anything has come at all.
    """

    def __init__(self, address: str, port: int, hello: Callable[[], dict[str, Any]]) -> None:
        """Makes no connection yet; `hello` returns the first message on each."""
        self._place = (address, port)
        self._hello = hello
        self.line: Line | None = None
        self.heard = time.monotonic()
        self.has_heard = False
        self._num_tries = 0
        self._next_try = 0.0
        self._refused: list[float] = []  # times at which the last tries in a row were refused

    @property
    def is_refused(self) -> bool:
        """Whether nobody listens any more: the hub has ended, and so has the process that would start it again."""
        return len(self._refused) > 2 and self._refused[-1] - self._refused[0] > 1

    def keep(self) -> None:
        """Connects where there is no open line and it is time to try."""
        if self.line is not None and not self.line.is_open:
            self.line.close()
            self.line = None
        if self.line is not None or time.monotonic() < self._next_try:
            return
        try:
            self.line = Line(socket.create_connection(self._place, timeout=_SECONDS_TO_CONNECT))
            self.line.send(self._hello())
            self._refused = []
        except ConnectionRefusedError:
            self._refused.append(time.monotonic())
        except OSError:
            self._refused = []
        self._num_tries += 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._num_tries, 10))
        self._next_try = time.monotonic() + pause * random.uniform(0.5, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message where there is a line; the next line's hello makes up for a lost one."""
        if self.line is not None:
            self.line.send(message)

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        messages = [] if self.line is None else self.line.receive()
        if messages:
            self.heard = time.monotonic()
            self.has_heard = True
            self._num_tries = 0
        return messages


def wait_for(lines: Sequence[Line | socket.socket | int | None], seconds: float) -> bool:
    """Waits until something has come on one of the open lines, sockets or descriptors, or for some seconds; returns
    whether something has."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            if isinstance(line, Line):
                if line.is_open:
                    selector.register(line.connection, selectors.EVENT_READ)
            elif line is not None:
                selector.register(line, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def wait_for_an_end(processes: Sequence[int], seconds: float, *others: int) -> None:
    """Waits until one of the processes has ended, something has come on another descriptor, or for some seconds."""
    ends = [end_of(process) for process in processes]
    try:
        # None: the system can't say when it ends, or it has ended already
        wait_for([*ends, *others], min(seconds, _POLL_SECONDS) if None in ends else seconds)
    finally:
        for end in ends:
            if end is not None:
                os.close(end)


def listen_at(address: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens at an address of this machine, so that only its interface is reached; port 0 lets
    the system choose one. Raises OSError where the address isn't this machine's, or the port is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)


def loopback_address() -> str:
    """Returns the loopback interface's address: 127.0.0.1, or ::1 where it has that alone."""
    for address in ("127.0.0.1", "::1"):
        with suppress(OSError):
            listen_at(address).close()
            return address
    return "127.0.0.1"
