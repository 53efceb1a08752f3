"""Hosts on one machine: network namespaces behind one switch, each with an address, a name and an /etc/hosts.

              switch (a namespace with a bridge)
        port0 |      port1 |      port2 |
    eth0 10.77.0.1     10.77.0.2     10.77.0.3
         node0         node1         node2

Instead of the bridge, a thread of this program can pass the frames on: late, in stalls, with a fault, or not at all.
Linux only, and only where one may make namespaces (root, with iproute2 and util-linux).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PREFIX = "slipstream-hosts-"
# As a host would have it at its start; what is mounted is seen by this command alone.
_ENTER = """
set -e
echo "$1" > /proc/sys/kernel/hostname
mount --bind "$2" /etc/hosts
if [ -n "$3" ]; then mount --bind "$3" "$4"; fi
shift 4
exec "$@"
"""


_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TAP = 0x0002 | 0x1000  # Ethernet frames, without a header of the device's own
_MOST_BYTES = 2**16  # of a frame
_ETHERNET = 14  # bytes of its header: where to, where from, which protocol
_IP, _TCP = b"\x08\x00", 6


class NoHostsError(RuntimeError):
    """Raised where this machine doesn't allow such hosts; the message says what was refused."""


class Switch(threading.Thread):
    """Passes frames on between network devices of this program. What may be changed while it runs:

    Attributes:
        cut: the ports at which nothing comes in or goes out any more, and nobody is told.
        delay: seconds that each frame takes.
        stalls: the share of the frames with data that take 0.2 to 2 s more; what is sent behind one waits for it.
        corrupts_at: a TCP port: in the next frame with data for it, two bytes change places with the two before them,
            which its checksum can't tell. None again once that has happened.
        num_stalled: how many frames have been held up.
    """

    def __init__(self, ports: Sequence[int], dice: random.Random) -> None:
        """Doesn't start yet.

        Args:
            ports: descriptors of devices; a number here means the place in this list.
            dice: for stalls.
        """
        super().__init__(name="switch", daemon=True)
        self._ports, self._dice, self._numbers = list(ports), dice, count()
        self.cut, self.delay, self.stalls, self.num_stalled = set[int](), 0.0, 0.0, 0
        self.corrupts_at: int | None = None
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._last_due: dict[tuple[int, int], float] = {}
        self._port_of: dict[bytes, int] = {}  # by the address of the device behind it
        self._is_over = False

    def run(self) -> None:
        while not self._is_over:
            seconds = min(0.2, max(0.0, self._waiting[0][0] - time.monotonic())) if self._waiting else 0.2
            for descriptor in select.select(self._ports, [], [], seconds)[0]:
                self._take(self._ports.index(descriptor), os.read(descriptor, _MOST_BYTES))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, port, frame = heapq.heappop(self._waiting)
                with suppress(OSError):  # a device that is down
                    os.write(self._ports[port], frame)

    def close(self) -> None:
        """Ends the devices with it."""
        self._is_over = True
        if self.is_alive():
            self.join()
        for each in self._ports:
            os.close(each)

    def _take(self, source: int, frame: bytes) -> None:
        self._port_of[frame[6:12]] = source
        target = self._port_of.get(frame[:6])
        for port in range(len(self._ports)) if target is None else [target]:
            if port == source or {port, source} & self.cut:
                continue
            due = max(time.monotonic() + self.delay, self._last_due.get((source, port), 0.0))
            start = _data_start(frame)
            if start < len(frame) and self._dice.random() < self.stalls:
                due += self._dice.uniform(0.2, 2)
                self.num_stalled += 1
            self._last_due[source, port] = due
            heapq.heappush(self._waiting, (due, next(self._numbers), port, self._corrupted(frame, start)))

    def _corrupted(self, frame: bytes, start: int) -> bytes:
        """Returns the frame, corrupt where that was asked for: its checksum is a sum of pairs of bytes."""
        if self.corrupts_at is None or len(frame) < start + 4 or self.corrupts_at != _target_port(frame):
            return frame
        self.corrupts_at = None
        return frame[:start] + frame[start + 2 : start + 4] + frame[start : start + 2] + frame[start + 4 :]


def _data_start(frame: bytes) -> int:
    """Returns where the data of a TCP segment begins; the frame's length where it has none."""
    if frame[12:14] != _IP or frame[_ETHERNET + 9] != _TCP:
        return len(frame)
    segment = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    end = _ETHERNET + int.from_bytes(frame[_ETHERNET + 2 : _ETHERNET + 4], "big")
    start = segment + 4 * (frame[segment + 12] >> 4)
    return start if start < end else len(frame)


def _target_port(frame: bytes) -> int:
    segment = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    return int.from_bytes(frame[segment + 2 : segment + 4], "big")


class Hosts:
    """Some hosts, until `close`.

    Attributes:
        names: of the hosts.
        addresses: of the hosts.
        switch: between them, where that is this program's.
    """

    def __init__(self, num_hosts: int, dice: random.Random | None = None) -> None:
        """Makes the hosts; with `dice`, which its stalls take, the switch is a thread of this program."""
        self.names = [f"node{index}" for index in range(num_hosts)]
        self.addresses = [f"10.77.0.{index + 1}" for index in range(num_hosts)]
        self.switch: Switch | None = None
        self._dice = dice
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._namespaces = [f"{self._folder.name}-{name}" for name in self.names]
        self._switch = f"{self._folder.name}-switch"
        try:
            self._make()
        except NoHostsError:
            self.close()
            raise

    def _make(self) -> None:
        for tool in ("ip", "tc", "unshare", "mount"):
            if shutil.which(tool) is None:
                raise NoHostsError(f"there is no {tool} here (packages iproute2 and util-linux)")
        _remove_leftovers()
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host in self._namespaces:
            _run("ip", "netns", "add", host)
        if self._dice is not None:
            self.switch = Switch([self.inside(index, _open_device) for index in range(len(self.names))], self._dice)
            self.switch.start()
        for index in range(len(self.names)):
            self._plug_in(index)
        _run(*self.command(0, ["true"]))

    def _plug_in(self, index: int) -> None:
        host, port = self._namespaces[index], f"port{index}"
        if self.switch is None:
            _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host, "address", "add", f"{self.addresses[index]}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", host, "link", "set", interface, "up")
        self._names_known_to(index).write_text(self._list_names(index))

    def _names_known_to(self, index: int) -> Path:
        return self._folder / f"hosts{index}"

    def _list_names(self, index: int) -> str:
        """Returns /etc/hosts as Debian writes it: a host's name is at 127.0.1.1, where no other host reaches it."""
        places = dict(zip(self.names, self.addresses, strict=True))
        places |= {"localhost": "127.0.0.1", self.names[index]: "127.0.1.1"}
        return "".join(f"{address} {name}\n" for name, address in places.items())

    def command(self, index: int, command: Sequence[str], own: tuple[Path, Path] | None = None) -> list[str]:
        """Returns what runs a command on a host; `own=(disk, folder)` gives it another disk at `folder`."""
        enter = ["ip", "netns", "exec", self._namespaces[index], "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        disk = map(str, own or ("", ""))
        return [*enter, "sh", self.names[index], str(self._names_known_to(index)), *disk, *command]

    def inside(self, index: int, function: Callable[[], T]) -> T:
        """Returns what a function returns in a thread that is in a host's network."""
        results: list[T | OSError] = []

        def call() -> None:
            library = ctypes.CDLL(None, use_errno=True)
            with Path("/run/netns", self._namespaces[index]).open() as namespace:
                if library.setns(namespace.fileno(), _CLONE_NEWNET):
                    number = ctypes.get_errno()
                    results.append(OSError(number, os.strerror(number)))
                    return
            try:
                results.append(function())
            except OSError as error:
                results.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if isinstance(results[0], OSError):
            raise NoHostsError(f"a function in the network of {self.names[index]} is refused: {results[0]}")
        return results[0]

    def cut(self, index: int, other: int) -> None:
        """Cuts the two hosts off from each other."""
        _run("ip", "-n", self._namespaces[index], "route", "add", "unreachable", f"{self.addresses[other]}/32")

    def limit(self, megabits: float | None) -> None:
        """Limits how much each host sends in a second; None for no limit."""
        for host in self._namespaces:
            if megabits is None:
                subprocess.run(["tc", "-n", host, "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
            else:
                bucket = ["rate", f"{megabits}mbit", "burst", "256kb", "limit", "16mb"]
                _run("tc", "-n", host, "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket)

    def close(self) -> None:
        """Removes the hosts and their interfaces."""
        if self.switch is not None:
            self.switch.close()
        for namespace in [*self._namespaces, self._switch]:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        shutil.rmtree(self._folder)


def _open_device() -> int:
    """Makes the device eth0, whose frames this program reads and writes; returns its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP))
    return descriptor


def _remove_leftovers() -> None:
    """Removes hosts of programs that were killed before they could `close`."""
    for name in _run("ip", "netns", "list").split():
        if name.startswith(_PREFIX) and not Path("/proc", name.removeprefix(_PREFIX).partition("-")[0]).exists():
            _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise NoHostsError(f"`{' '.join(command)}` is refused: {result.stderr.strip()}")
    return result.stdout
