"""Hosts on one machine: network namespaces behind one switch, each with an address, a name and an /etc/hosts.

              switch (a namespace with a bridge)
        port0 |      port1 |      port2 |
    eth0 10.77.0.1     10.77.0.2     10.77.0.3
         node0         node1         node2

Linux only, and only where one may make namespaces (root, with iproute2 and util-linux).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

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


class NoHostsError(RuntimeError):
    """Raised where this machine doesn't allow such hosts; the message says what was refused."""


class Hosts:
    """Some hosts, until `close`."""

    def __init__(self, num_hosts: int) -> None:
        self.names = [f"node{index}" for index in range(num_hosts)]
        self.addresses = [f"10.77.0.{index + 1}" for index in range(num_hosts)]
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
        for index in range(len(self.names)):
            self._plug_in(index)
        _run(*self.command(0, ["true"]))

    def _plug_in(self, index: int) -> None:
        host, port = self._namespaces[index], f"port{index}"
        _run("ip", "netns", "add", host)
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
        for namespace in [*self._namespaces, self._switch]:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        shutil.rmtree(self._folder)


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
