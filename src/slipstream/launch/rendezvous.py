"""Connects the ranks of all nodes before anything is built, and checks that they can train together."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
import transformers

from slipstream.errors import RankFailedError, SlipstreamError, StoppedRunError
from slipstream.launch.stop_request import StopRequest
from slipstream.network_interfaces import GLOO, NCCL, find_address, find_interface, interface_problems, joining_hint
from slipstream.parallel import RENDEZVOUS_SECONDS, accepts, connected_store, describe_held_port, ranks_text, time_limit
from slipstream.version import __version__
from slipstream.watchdog import listen_at, loopback_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_CONNECT_SECONDS = 10.0
_OVER = "over"  # a key of the store
_IDLE_SECONDS = 0.5
_SECONDS_TO_LEAVE = 10.0
_SECONDS_TO_ANSWER = 0.02


@dataclass(frozen=True)
class RendezvousPoint:
    """The number of this rank, and where all ranks connect, as the launcher says."""

    rank: int
    world_size: int
    address: str
    port: int
    # True if torchrun's agent keeps the store for its ranks, else rank 0 keeps it.
    keeps_store: bool
    outlives_starts: bool  # True for the agent's store, which has the keys of earlier starts
    # Whether this node's agent has counted an earlier start.
    is_restart: bool
    seconds: float
    is_one_machine: bool = False  # True if all ranks run here

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RendezvousPoint:
        """Reads the variables that a launcher sets; raises SlipstreamError if one is missing or no number."""
        seconds = time_limit(environment)
        outlives = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        try:
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            address = environment["MASTER_ADDR"]
            port = int(environment["MASTER_PORT"])
            is_one_machine = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
            keeps = rank == 0 and not outlives
            return cls(rank, world_size, address, port, keeps, outlives, is_restart, seconds, is_one_machine)
        except KeyError as missing:
            raise SlipstreamError(
                f"RANK and WORLD_SIZE are set, but {missing} is not; start with torchrun or srun, which set it, or "
                f"set it to the place where rank 0 runs{joining_hint(environment)}"
            ) from None
        except ValueError as error:
            raise SlipstreamError(
                f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers; {error}; start with torchrun or srun"
            ) from None

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.address}, MASTER_PORT={self.port}"


def connect_ranks(facts: Mapping[str, str], problem: str | None = None) -> ConnectedRanks:
    """Connects all ranks, compares their facts, and tries the connections between them.

    Chooses the interface that gloo uses (GLOO_SOCKET_IFNAME, unless it is set): the one on the route to the master.
    Collective; no process group is needed.

    Args:
        facts: what must be equal on all ranks.
        problem: the obstacle to this rank's taking part, if any.

    Raises:
        SlipstreamError: on every rank, if ranks differ, one has a problem, or two can't reach each other; on the ranks
            that have connected, if the master doesn't answer or a rank doesn't connect in time.
    """
    place = RendezvousPoint.from_environment(os.environ)
    ranks = ConnectedRanks(place, _connect(place))
    if place.outlives_starts:
        ranks.begin_start()
    mine = address_towards(place.address, place.port)
    problem = problem or interface_problems(os.environ, uses_nccl=False).get(GLOO)
    here = [socket.gethostname(), mine, dict(facts), problem, place.is_restart]
    ranks.hosts, addresses, all_facts, problems, restarts = zip(*ranks.gather("ranks", here), strict=True)
    ranks.is_restart = any(restarts)
    ranks.end_where(_describe_problems(problems, ranks.hosts) or _describe_differences(all_facts, ranks.hosts))
    ranks.address = _choose_address(mine, addresses)
    ranks.end_where(_describe_problems(_try_connections(ranks, ranks.address), ranks.hosts))
    return ranks


@dataclass
class ConnectedRanks:
    """The ranks at one store, which exchange values there, and later form the process group."""

    place: RendezvousPoint
    store: Store
    hosts: Sequence[str] = ()  # each rank's machine
    address: str = ""  # this rank's address for the others
    is_restart: bool = False  # True if a launcher has started some of the ranks before
    start: str = ""  # the name of this start, in a store with keys of earlier ones

    def __str__(self) -> str:
        return name_ranks(range(self.place.world_size), self.hosts)

    def begin_start(self) -> None:
        """Goes on under keys of this start alone, in a store that has those of earlier ones. Collective.

        Agents number starts differently: one whose own ranks had to end as another node's did doesn't count that. So
        rank 0 makes up a name, and tells it to each rank that asks; a rank of an earlier start asks no more.

        Raises SlipstreamError where ranks are missing: which.
        """
        self.start = self._named_start() if self.place.rank == 0 else self._start_asked_for()
        self.store = dist.PrefixStore(self.start, self.store)  # type: ignore[attr-defined]

    def connect_again(self, keys: str, seconds: float) -> Store:
        """Returns another connection to the store, under keys of its own in this start.

        Args:
            keys: what the names of its keys begin with.
            seconds: limit of each wait in it.
        """
        place = self.place
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(place.address, place.port, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
        return dist.PrefixStore(f"{self.start}/{keys}", store)  # type: ignore[attr-defined]

    def _named_start(self) -> str:
        """Returns a new name, once all other ranks have it."""
        start = uuid4().hex
        answered: dict[int, str] = {}
        joined = [_joined(start, rank) for rank in range(self.place.world_size)]
        end = time.monotonic() + self.place.seconds
        try:
            self.store.set(joined[0], "")
            while not self.store.check(joined):
                if time.monotonic() > end:
                    raise SlipstreamError(self._describe_absence(joined))
                for rank in range(1, self.place.world_size):
                    # What a rank of an earlier start has asked stands here until the new one asks.
                    if self.store.check([_asking(rank)]) and answered.get(rank) != (own := self._own_name(rank)):
                        self.store.set(f"start/{own}", start)
                        answered[rank] = own
                time.sleep(_SECONDS_TO_ANSWER)
        except RuntimeError as error:
            raise SlipstreamError(self._describe_absence(joined)) from error
        return start

    def _own_name(self, rank: int) -> str:
        name: str = self.store.get(_asking(rank)).decode()
        return name

    def _start_asked_for(self) -> str:
        """Returns the name that rank 0 has given this start."""
        own = uuid4().hex
        rank = self.place.rank
        answer = f"start/{own}"
        try:
            self.store.set(_asking(rank), own)
            start: str = self.store.get(answer).decode()
            self.store.set(_joined(start, rank), "")
        except RuntimeError as error:
            asking = map(_asking, range(1, self.place.world_size))
            raise SlipstreamError(self._describe_absence([answer, *asking])) from error
        return start

    def describe_store(self) -> str:
        """Returns where rank 0 keeps the store, which lets whoever reaches it write; "" where torchrun keeps it."""
        if not self.place.keeps_store:
            return ""
        address = _listening_address(self.place)
        where = f"{address} ({find_interface(address)})" if address else "all interfaces"
        return f"their store listens at {where}, port {self.place.port}"

    def gather(self, name: str, value: Any) -> list[Any]:
        """Returns the values of all ranks, anything that JSON has; raises SlipstreamError that names missing ranks."""
        keys = [f"{name}/{rank}" for rank in range(self.place.world_size)]
        try:
            self.store.set(keys[self.place.rank], json.dumps(value))
            return [json.loads(answer) for answer in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise SlipstreamError(self._describe_absence(keys)) from error

    def end_where(self, problem: str | None) -> None:
        """Raises SlipstreamError if there is a problem, which is the same on every rank, once all of them know."""
        if problem is None:
            return
        self.gather("known", None)
        self.store.set(f"gone/{self.place.rank}", "")
        # This rank ends last, because the store ends with it.
        if self.place.keeps_store:
            with suppress(RuntimeError):
                self.store.wait([f"gone/{rank}" for rank in range(self.place.world_size)])
        raise SlipstreamError(problem)

    @contextmanager
    def end_told_to_idle_ones(self, num_used: int) -> Iterator[None]:
        """Tells the ranks from `num_used` on, which wait for it, that the body has ended well on rank 0."""
        yield
        if self.place.rank == 0 and num_used < self.place.world_size:
            self.store.set(_OVER, "")
            # The store ends with this process.
            if self.place.keeps_store:
                keys = [f"{_OVER}/{rank}" for rank in range(num_used, self.place.world_size)]
                with suppress(RuntimeError):
                    self.store.wait(keys, timedelta(seconds=_SECONDS_TO_LEAVE))

    def wait_for_the_end(self, stop: StopRequest) -> None:
        """Waits, on a rank without work, until the run has ended; raises StoppedRunError where it is asked to stop."""
        stop.begin()
        rank = self.place.rank
        while not stop.name:
            try:
                if self.store.check([_OVER]):
                    self.store.set(f"{_OVER}/{rank}", "")
                    return
            except RuntimeError:
                raise RankFailedError(f"rank {rank}, which had no work, lost the run: rank 0 has ended") from None
            time.sleep(_IDLE_SECONDS)
        raise StoppedRunError(f"{stop.name} ended rank {rank}, which had no work")

    def _describe_absence(self, keys: list[str]) -> str:
        place = self.place
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return f"rank {place.rank} lost the store at {place}: rank 0 or its torchrun has ended; see its output"
        return (
            f"rank {place.rank} connected to {place}, but of {place.world_size} ranks these didn't within "
            f"{place.seconds:g} seconds: {', '.join(absent)}. See their output; if they only start late, wait "
            f"longer with {RENDEZVOUS_SECONDS}={2 * place.seconds:g}{joining_hint(os.environ)}"
        )


def _joined(start: str, rank: int) -> str:
    return f"{start}/joined/{rank}"


def _asking(rank: int) -> str:
    return f"asking/{rank}"


def _connect(place: RendezvousPoint) -> Store:
    """Returns the store at MASTER_ADDR."""

    def connect() -> Store:
        address = _listening_address(place) if place.keeps_store else ""
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.address,
            place.port,
            place.world_size,
            is_master=place.keeps_store,
            timeout=timedelta(seconds=place.seconds),
            wait_for_workers=False,
            master_listen_fd=listen_at(address, place.port).detach() if address else None,
        )

    store = connected_store(connect, place.seconds)
    if isinstance(store, Exception):
        silence = _describe_silence(place, str(store).splitlines()[0])
        raise SlipstreamError(silence + joining_hint(os.environ)) from store
    return dist.PrefixStore("slipstream", store)  # type: ignore[attr-defined]


def _listening_address(place: RendezvousPoint) -> str:
    """Returns the address of the one interface at which the other ranks reach rank 0's store; "" where only they know.

    That is where MASTER_ADDR leads back to this machine by the loopback interface (Debian's /etc/hosts gives the host's
    name to it) although ranks run on others: then the store has to listen on all interfaces.
    """
    address = address_towards(place.address, place.port)
    return "" if is_loopback(address) and not place.is_one_machine else address


def _describe_silence(place: RendezvousPoint, reason: str) -> str:
    if place.keeps_store:
        return describe_held_port(0, str(place), reason)
    if accepts(place.address, place.port, place.seconds):
        return describe_held_port(place.rank, f"{place} ({_resolve(place)})", reason)
    host = socket.gethostname()
    return (
        f"rank {place.rank} on {host} got no answer from the master at {place} ({_resolve(place)}) within "
        f"{place.seconds:g} seconds ({reason}). Check that rank 0 has started there, that the name resolves to its "
        f"address here (getent hosts {place.address}), and that firewalls pass the port (nc -vz {place.address} "
        f"{place.port}); to wait longer, set {RENDEZVOUS_SECONDS}={2 * place.seconds:g}"
    )


def _resolve(place: RendezvousPoint) -> str:
    try:
        entries = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    except OSError:
        return "a name without an address on this machine"
    return " or ".join(dict.fromkeys(str(entry[4][0]) for entry in entries))


def _choose_address(mine: str, all_addresses: Sequence[str]) -> str:
    """Returns the address at which other ranks reach this one, and names its interface to gloo unless the user did.

    `mine` is on the route to the master. On the master's machine that can be the loopback interface (Debian's
    /etc/hosts gives the host's name to it); there, the route to a rank of another machine counts.
    """
    chosen = os.environ.get(GLOO)
    if chosen:
        return find_address(chosen.partition(",")[0]) or mine
    if len(set(all_addresses)) == 1:
        # All ranks are on this machine, and no other should reach them.
        mine = loopback_address()
    elif is_loopback(mine):
        mine = address_towards(next(address for address in all_addresses if not is_loopback(address)), port=9)
    interface = find_interface(mine)
    if interface is not None:
        os.environ[GLOO] = interface
    return mine


def _try_connections(ranks: ConnectedRanks, address: str) -> list[str | None]:
    """Returns the problem of each rank with connecting to the next one directly, as gloo will, if it has any."""
    place = ranks.place
    problem = None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listening:
        places = ranks.gather("listening", listening.getsockname()[:2])
        following = (place.rank + 1) % place.world_size
        host, port = places[following]
        try:
            socket.create_connection((host, port), timeout=min(_CONNECT_SECONDS, place.seconds / 2)).close()
        except OSError as error:
            problem = (
                f"no connection to {name_ranks([following], ranks.hosts)} at {host}, port {port} ({error}). The ranks "
                "communicate directly, at ports that the system chooses: let firewalls pass TCP between the nodes, or "
                f"name the interface between them in {GLOO} and {NCCL} on each node"
            )
        return ranks.gather("connected", problem)


def _describe_problems(problems: Sequence[str | None], hosts: Sequence[str]) -> str | None:
    named = ranks_by_value(problems).items()
    return "\n".join(f"{name_ranks(ranks, hosts)}: {problem}" for problem, ranks in named if problem) or None


def _describe_differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> str | None:
    different = differences(facts, hosts)
    if not different:
        return None
    return (
        "the ranks of one run must have the same code and the same settings, but these differ:\n  "
        + "\n  ".join(different)
        + "\ninstall the same versions on all nodes, and start the same command on each"
    )


_Value = TypeVar("_Value")


def describe_process(settings: Mapping[str, Any], device_type: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks of a run, by name: versions, sources, kind of device, settings.

    Args:
        settings: nested dictionaries of JSON values.
        device_type: "cpu" or "cuda", and whether ranks share it.
        texts: the contents of files that the settings name, by their names in messages; compared by their hashes.
    """
    return {
        "slipstream": __version__,
        "slipstream's source files": hash_sources(Path(__file__).parents[1]),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        "device": device_type,
        **dict(flat_settings(dict(settings))),
        **{name: _hash(text.encode()) for name, text in texts.items()},
    }


def hash_sources(package: Path) -> str:
    """Returns a hash of the names and the contents of a package's Python files."""
    files = sorted(package.rglob("*.py"))
    return _hash(b"".join(f"{file.relative_to(package)} {_hash(file.read_bytes())}\n".encode() for file in files))


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Returns a line for each name whose value differs between ranks: the values, and the ranks that have them."""
    lines = []
    for name in dict.fromkeys(chain(*facts)):
        ranks_with = ranks_by_value([rank_facts.get(name, "absent") for rank_facts in facts])
        if len(ranks_with) > 1:
            values = (f"{value} on {name_ranks(ranks, hosts)}" for value, ranks in ranks_with.items())
            lines.append(f"{name}: {'; '.join(values)}")
    return lines


def ranks_by_value(values: Sequence[_Value]) -> dict[_Value, list[int]]:
    """Returns the ranks that have each value, where `values` are of rank 0, 1, ..."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Returns the ranks and their hosts as text, such as `ranks 0-3 (node0), rank 5 (node1)`."""
    grouped = groupby(ranks, key=lambda rank: hosts[rank])
    return ", ".join(f"{ranks_text(list(numbers))} ({host})" for host, numbers in grouped)


def flat_settings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields dotted names and values as they are typed on the command line."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat_settings(inner, f"{name}.{key}" if name else key)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


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
