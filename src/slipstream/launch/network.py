"""By which address and which interface this machine reaches another one."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFCONF = 0x8912  # Linux: the IPv4 addresses of all interfaces
_NAME, _ENTRY = 16, 40  # bytes of a name and of an entry in its answer
_MOST_ENTRIES = 1024


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to another one, as its routes say. Nothing is sent.

    Raises OSError where the name doesn't resolve or there is no way.
    """
    problem = OSError(f"{host} has no address")
    for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(place)
            except OSError as error:
                problem = error
                continue
            return str(probe.getsockname()[0])
    raise problem


def is_loopback(address: str) -> bool:
    """Whether it can only be reached from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_interface(address: str) -> str | None:
    """The name of the interface with this address, such as `eth0`; None where the system doesn't say."""
    return next((name for name, known in _list_addresses() if known == address), None)


def find_address(interface: str) -> str | None:
    """The first address of an interface, IPv4 before IPv6."""
    return next((address for name, address in _list_addresses() if name == interface), None)


def _list_addresses() -> list[tuple[str, str]]:
    """Interfaces and addresses. On Linux only: elsewhere the standard library has no way to ask."""
    if sys.platform != "linux":
        return []
    return [*_list_ipv4(), *_list_ipv6()]


def _list_ipv4() -> list[tuple[str, str]]:
    import fcntl

    answer = array.array("B", bytes(_ENTRY * _MOST_ENTRIES))
    place, size = answer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        filled = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iP", size, place))
    length, _ = struct.unpack("iP", filled)
    found = []
    for start in range(0, length, _ENTRY):
        entry = answer[start : start + _ENTRY].tobytes()
        name = entry[:_NAME].split(b"\0")[0].decode().partition(":")[0]  # eth0:1 is an alias on eth0
        found.append((name, socket.inet_ntoa(entry[_NAME + 4 : _NAME + 8])))  # after the family and the port
    return found


def _list_ipv6() -> list[tuple[str, str]]:
    file = Path("/proc/net/if_inet6")
    lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [(line[-1], str(ipaddress.IPv6Address(bytes.fromhex(line[0])))) for line in lines]
