"""Messages between watchers and their hub: JSON, a line each, over TCP; nothing is unpickled."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Sequence
from typing import Any

_MOST_BYTES = 2**20  # of a line; whoever sends more isn't a watcher


class Line:
    """A connection that sends and receives dictionaries. `is_open` is False once the other end has gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.is_open = connection, True
        self._received, self._unsent = b"", b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, or keeps what the system doesn't take now for the next call."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what was kept."""
        try:
            while self._unsent and self.is_open:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            self.is_open = len(self._unsent) < _MOST_BYTES
        except OSError:
            self.is_open = False

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come, without waiting."""
        try:
            while data := self.connection.recv(65536):
                self._received += data
            self.is_open = False
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.is_open = False
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages, self.is_open = [], False
        if len(self._received) > _MOST_BYTES or not all(isinstance(each, dict) for each in messages):
            messages, self.is_open = [], False
        return messages


def wait_for(connections: Sequence[socket.socket | int], seconds: float) -> list[socket.socket | int]:
    """Waits until something has come on one of the connections or descriptors, or for some seconds; returns those."""
    with selectors.DefaultSelector() as selector:
        for each in connections:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]  # type: ignore[misc]
