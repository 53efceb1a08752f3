"""The network interfaces of this machine, those that variables name for gloo and NCCL, and what made ranks connect."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interface_problems(environment: Mapping[str, str], uses_nccl: bool) -> dict[str, str]:
    """Returns by variable why gloo, or NCCL where it is used, can't take the interfaces that the variable names, and
    what to type."""
    checks = {GLOO: _gloo_problem, **({NCCL: _nccl_problem} if uses_nccl else {})}
    here = sorted(name for _, name in socket.if_nameindex())
    found = {}
    for name, check in checks.items():
        if (given := environment.get(name)) and (problem := check(given, here)):
            found[name] = f"{name}={given}, {problem}; the interfaces here are {', '.join(here)}: name one of them, or "
            found[name] += f"type unset {name}"
    return found


def _gloo_problem(names: str, here: list[str]) -> str:
    absent = [name for name in names.split(",") if name not in here]
    if absent:
        return f"but there is no {' and no '.join(repr(name) for name in absent)}"
    without = [name for name in names.split(",") if find_address(name) is None]
    return f"but {' and '.join(without)} has no address" if without else ""


def _nccl_problem(names: str, here: list[str]) -> str:
    """NCCL takes interfaces that begin with one of the names, with = those that are called so, with ^ all others."""
    is_excluding, is_exact = names.startswith("^"), names.lstrip("^").startswith("=")
    given = [name.partition(":")[0] for name in names.lstrip("^").removeprefix("=").split(",")]
    matching = [
        each for each in here if any(each == name if is_exact else name and each.startswith(name) for name in given)
    ]
    usable = [each for each in here if each not in matching] if is_excluding else matching
    return "" if usable else "which leaves none" if is_excluding else "but there is none of that name"


def find_interface(address: str) -> str | None:
    """Returns the name of the interface with this address, such as `eth0`; None if there is none."""
    return next((name for name, known in _addresses() if known == address), None)


def find_address(interface: str) -> str | None:
    """Returns the first address of an interface, IPv4 before IPv6; None if there is none."""
    return next((address for name, address in _addresses() if name == interface), None)


def _addresses() -> Iterator[tuple[str, str]]:
    """Yields pairs of interface and address, all IPv4 addresses first."""
    import psutil

    entries = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, of_it in entries.items():
            # eth0:1 is an alias on eth0, %eth0 a scope
            yield from ((name.partition(":")[0], e.address.partition("%")[0]) for e in of_it if e.family == family)


_JOINING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def joining_hint(environment: Mapping[str, str]) -> str:
    """Returns a sentence on the variables that made this process one of several, and how to be without them: they may
    be left in a shell. "" where torchrun or srun has set them."""
    if "TORCHELASTIC_RUN_ID" in environment or "SLURM_PROCID" in environment or "RANK" not in environment:
        return ""
    there = [name for name in _JOINING if name in environment]
    return (
        f". This process joins others because RANK={environment['RANK']} and WORLD_SIZE="
        f"{environment.get('WORLD_SIZE', '')} are set; if no launcher has set them, type unset {' '.join(there)}"
    )
