"""Finds the address and the interface through which this machine reaches another one."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the route to another one. Nothing is sent.

    Raises:
        OSError: if the name doesn't resolve or there is no route.
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
    """Returns whether an address can only be reached from this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_interface(address: str) -> str | None:
    """Returns the name of the interface with this address, such as `eth0`; None if there is none."""
    return next((name for name, known in _list_addresses() if known == address), None)


def find_address(interface: str) -> str | None:
    """Returns the first address of an interface, IPv4 before IPv6; None if there is none."""
    return next((address for name, address in _list_addresses() if name == interface), None)


def _list_addresses() -> list[tuple[str, str]]:
    """Returns pairs of interface and address, all IPv4 addresses first."""
    return [
        (name.partition(":")[0], entry.address.partition("%")[0])  # eth0:1 is an alias on eth0, %eth0 a scope
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family
    ]
