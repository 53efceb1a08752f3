"""A cluster described in a file: its devices, the links between them, and checks that the numbers are plausible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np

from slipstream.errors import SlipstreamError, did_you_mean, syntax_text
from slipstream.foreign_text import parse_json, parse_yaml, read_text

SHIPPED = (
    "v100-p3.16xlarge",
    "t4-g4dn.12xlarge",
    "a100-dgx",
    "a100-selene",
    "h100-dgx",
    "h200-hgx",
    "a100-40gb-dgx",
    "h100-96gb",
    "h100-pcie",
    "b200-hgx",
    "b300-hgx",
    "gb200-nvl72",
    "gb300-nvl72",
    "mi300x-oam",
    "l40s-pcie",
    "a6000-pcie",
    "rtx4090-pcie",
    "rtx5090-pcie",
)
"""The names of clusters that `load_cluster` knows; of two whose devices have one name, the first is looked up by it."""


@dataclass(frozen=True)
class PlausibleRange:
    """The plausible values of a number, and the unit that people use by mistake: 10**power, and its name."""

    least: float
    most: float
    unit: str
    power: int = 0
    usual: str = ""

    def __call__(self, value: Any, where: str) -> float:
        """Returns a plausible number, which YAML may have read as text (25e9); raises for any other value."""
        try:
            amount = float(value)
        except (TypeError, ValueError):
            raise SlipstreamError(f"{where} is {value!r}: give {self.unit}, a number.") from None
        if isinstance(value, bool) or not isfinite(amount) or not self.least <= amount <= self.most:
            raise SlipstreamError(
                f"{where} is {value}: implausible, it is in {self.unit}, {self.least:g} to {self.most:g}."
                f"{self._meant(amount)}"
            )
        if self is COUNT and amount != int(amount):
            raise SlipstreamError(f"{where} is {value}: give {self.unit}.")
        return int(amount) if self is COUNT else amount

    def _meant(self, number: float) -> str:
        """Returns the value to type where another unit was probably meant."""
        if not isfinite(number) or (number <= 0 < self.most):
            return " Give a number above 0."
        if not self.power or not self.least <= number * 10.0**self.power <= self.most:
            return ""
        bits = f", {number / 8:g}e9 if gigabits" if self is BANDWIDTH else ""
        return f" Type {number:g}e{self.power} if {self.usual} were meant{bits}."


FLOPS = PlausibleRange(1e9, 1e17, "FLOP/s of dense matrix products", 12, "teraFLOP/s")
BANDWIDTH = PlausibleRange(1e7, 1e14, "bytes per second", 9, "gigabytes per second")
BYTES = PlausibleRange(1e8, 1e13, "bytes", 9, "gigabytes")
SECONDS = PlausibleRange(0, 1e-2, "seconds", -6, "microseconds")
FRACTION = PlausibleRange(1e-3, 1, "a fraction of the peak", -2, "percent")
COUNT = PlausibleRange(1, 1e6, "a whole number")
_TILE = 128  # rows and columns of a product's result that a multiprocessor computes at a time


@dataclass(frozen=True)
class Device:
    """One accelerator.

    A matrix product takes its FLOPs at `matmul_efficiency` of the peak and then its bytes at `memory_efficiency` of the
    memory's bandwidth, so that narrow and short products reach less. Its result is computed in tiles, as many at a time
    as there are `multiprocessors`, of which half have nothing to do in the last wave on average; 0 leaves that out.
    `attention_curve` has (tokens, fraction) pairs: the fraction of `attention_efficiency` that slices of so many tokens
    reach, linear over the logarithm of the tokens. `action_seconds` is the time that doesn't shrink with a slice beyond
    its kernels: the host's work to start an action, to wait for its message and to post the next one. `layer_seconds`
    is the host's work to start a layer's kernels, forward or backward: a layer takes as long at least.
    """

    name: str
    flops: Annotated[Mapping[str, float], _peaks]  # peak FLOP/s by dtype
    memory: Annotated[float, BYTES]  # bytes
    memory_bandwidth: Annotated[float, BANDWIDTH]  # bytes per second
    kernel_seconds: Annotated[float, SECONDS]  # the shortest time of a kernel, launch included
    matmul_efficiency: Annotated[float, FRACTION]  # the share of the peak at which matrix products compute
    attention_curve: Annotated[tuple[tuple[float, float], ...], _curve] = ((1.0, 1.0),)
    multiprocessors: Annotated[int, _multiprocessors] = 0
    layer_seconds: Annotated[float, SECONDS] = 0.0
    # The share of their rate at which products compute whose rows aren't multiples of 16 bytes (8 numbers of 16 bits):
    # kernels load these number by number. Assumed; a Hopper was measured (docs/papers.md)
    unaligned_rate: Annotated[float, FRACTION] = 0.45
    action_seconds: Annotated[float, SECONDS] = 0.0  # per forward or backward of a stage, however short its slice
    memory_efficiency: Annotated[float, FRACTION] = 0.8  # the share of the memory's bandwidth that kernels reach
    attention_efficiency: Annotated[float, FRACTION] = 0.5  # the share of the peak that the attention kernel reaches
    host_memory: Annotated[float, BYTES] = 32e9  # bytes of the host's memory for each device
    # Bytes per second that the host's processors read and write for each device. Default: of two sockets for eight
    # devices, each with eight channels of DDR4-3200 (205 GB/s, AMD EPYC 7742 data sheet), of which streams reach 80%
    host_memory_bandwidth: Annotated[float, BANDWIDTH] = 40e9
    # Peak FLOP/s of products whose operands are cast to fewer bits, by format: float8, float4
    narrow_flops: Annotated[Mapping[str, float], _narrow_peaks] = field(default_factory=dict)

    def matmul_flops(self, dtype: str) -> float:
        """Returns the FLOP/s at which matrix products compute, besides reading and writing their operands."""
        return self._peak(dtype) * self.matmul_efficiency

    def narrow_rate(self, name: str, dtype: str) -> float:
        """Returns how many times as fast as in `dtype` matrix products are whose operands are cast to a format."""
        if name not in self.narrow_flops:
            known = ", ".join(self.narrow_flops) or "none"
            raise SlipstreamError(
                f"products in {name} have no peak on {self.name} (known: {known}): add their FLOP/s to "
                "device.narrow_flops in a cluster file of your own."
            )
        return self.narrow_flops[name] / self._peak(dtype)

    def wave_seconds(self, dtype: str) -> float:
        """Returns the waste of the last wave of a matrix product, for every term that an element of its result adds up:
        half the time of a tile."""
        return _TILE**2 * self.multiprocessors / self.matmul_flops(dtype)

    def attention_flops(self, dtype: str, num_tokens: Any) -> Any:
        """Returns the FLOP/s that attention of a slice of `num_tokens` tokens reaches, as a number or an array."""
        return self._peak(dtype) * self.attention_efficiency * _along(self.attention_curve, num_tokens)

    def _peak(self, dtype: str) -> float:
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise SlipstreamError(
                f"dtype={dtype!r} has no peak on {self.name}: use {known}, or add its FLOP/s to "
                f"device.flops in a cluster file of your own."
            )
        return self.flops[dtype]

    @property
    def bytes_per_second(self) -> float:
        """The bytes that kernels read and write per second."""
        return self.memory_bandwidth * self.memory_efficiency


def _along(curve: Sequence[tuple[float, float]], num_tokens: Any) -> Any:
    tokens, fractions = np.array(curve).T
    return np.interp(np.log(np.maximum(num_tokens, 1)), np.log(tokens), fractions)


@dataclass(frozen=True)
class LinkKind:
    """A connection of two devices: bytes per second in one direction, which `shared_by` devices of a node share."""

    bandwidth: Annotated[float, BANDWIDTH]
    latency: Annotated[float, SECONDS]  # seconds of a message, however short
    shared_by: Annotated[int, COUNT] = 1
    efficiency: Annotated[float, FRACTION] = 0.8  # the share of the bandwidth that messages reach

    def rate(self, senders: int = 1) -> float:
        """Returns the bytes per second of each of `senders` devices that use the link at the same time."""
        return self.bandwidth * self.efficiency / min(senders, self.shared_by)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. `inside` connects the devices of a node or, in a rack that NVLink connects as a
    whole, those of a domain of several nodes; `between` connects domains; `host` connects a device with its host's
    memory, and its rate is that of copies one way at a time, while all devices of a node copy."""

    name: str
    device: Device
    num_nodes: Annotated[int, COUNT]
    devices_per_node: Annotated[int, COUNT]
    inside: LinkKind  # the link between devices of a domain
    between: LinkKind  # the link between domains
    host: LinkKind = LinkKind(16e9, 1e-5, efficiency=1.0)
    sources: Annotated[tuple[str, ...], _sources] = ()  # where the numbers come from
    nodes_per_domain: Annotated[int, COUNT] = 1

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def devices_per_domain(self) -> int:
        """The devices that `inside` connects."""
        return self.devices_per_node * self.nodes_per_domain

    def all_reduce_seconds(self, num_bytes: Any, size: int, stride: int = 1) -> Any:
        """Returns the seconds of an all-reduce: of a reduce-scatter and an all-gather."""
        return 2 * self.exchange_seconds(num_bytes, size, stride)

    def exchange_seconds(self, num_bytes: Any, size: int, stride: int = 1) -> Any:
        """Returns the seconds in which n = `size` devices, `stride` apart, gather or reduce-scatter so many bytes.

        Each device sends (n-1)/n of them in n-1 messages, most of which stay inside of a domain. A group with m devices
        in a domain sends to the next one over the cards of all m, in as many rings, at most as fast as inside. All
        devices take part in some such group at the same time, so those of a node share its network cards.
        """
        if size <= 1:
            return 0.0
        together = self._in_a_domain(size, stride)
        num_domains = -(-size // together)
        latency = (num_domains - 1) * self.between.latency + (size - num_domains) * self.inside.latency
        rate = self.inside.rate() if together > 1 else inf
        if num_domains > 1:
            rate = min(rate, together * self.between.rate(self.devices_per_node))
        return latency + (size - 1) / size * num_bytes / rate

    def leaves_domain(self, size: int, stride: int = 1) -> bool:
        """Returns whether `size` devices, `stride` apart, are in several domains."""
        return size > self._in_a_domain(size, stride)

    def all_to_all_seconds(self, num_bytes: Any, size: int, stride: int = 1) -> Any:
        """Returns the seconds in which each of `size` devices, `stride` apart, sends an equal part of so many bytes to
        every one of them, itself included.

        All messages are sent at the same time: those inside of a domain beside those that leave it, for which the
        devices of a node share its network cards.
        """
        if size <= 1:
            return 0.0
        together = self._in_a_domain(size, stride)
        inside = (together - 1) / size * num_bytes / self.inside.rate()
        across = (size - together) / size * num_bytes / self.between.rate(self.devices_per_node)
        latency = self.between.latency if size > together else self.inside.latency
        return latency + np.maximum(inside, across)

    def _in_a_domain(self, size: int, stride: int) -> int:
        return max(1, min(size, self.devices_per_domain // stride))

    def with_nodes(self, num_nodes: int) -> Cluster:
        """Returns the cluster with another number of nodes."""
        return replace(self, num_nodes=num_nodes)

    def with_devices(self, devices_per_node: int) -> Cluster:
        """Returns the cluster with another number of devices in each node."""
        return replace(self, devices_per_node=devices_per_node)


def load_cluster(source: str | Path) -> Cluster:
    """Returns a shipped cluster by its name, or one described in a YAML or JSON file.

    Raises:
        SlipstreamError: for an unknown name, a file that can't be read, and fields that are missing, unknown or
            implausible: which one, its value, the plausible ones, and the remedy.
    """
    name, path = str(source), Path(source)
    if name in SHIPPED:
        path = Path(__file__).with_name("clusters") / f"{name}.yaml"
    elif not path.suffix and not path.exists():
        raise SlipstreamError(
            f"cluster={name!r} is not known{did_you_mean(name, SHIPPED)} Choose one of {', '.join(SHIPPED)}, or give "
            "a .yaml or .json file."
        )
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise SlipstreamError(f"can't read the cluster file {path}: {error}.") from error
    return parse_cluster(_read(text, name), name)


def _read(text: str, where: str) -> Any:
    import yaml

    with suppress(ValueError):  # JSON first: in YAML 1.1, 25e9 isn't a number
        return parse_json(text)
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise SlipstreamError(f"{where} is neither YAML nor JSON: {syntax_text(error)}.") from error


def parse_cluster(values: Any, where: str = "cluster") -> Cluster:
    """Returns a cluster from nested dictionaries as in a file; raises as `load_cluster` does."""
    cluster: Cluster = _parse(values, Cluster, where, f"{where}: ")
    return cluster


def _parse(values: Any, kind: type, where: str, prefix: str) -> Any:
    """Returns a `kind` from a dictionary, which has all fields that it requires and no others."""
    hints = get_type_hints(kind, include_extras=True)
    names = ", ".join(hints)
    if not isinstance(values, dict):
        raise SlipstreamError(f"{where} is {values!r}: give the fields {names}.")
    for key in values:
        if key not in hints:
            hint = did_you_mean(str(key), tuple(hints))
            raise SlipstreamError(f"{where} has no field {key!r}{hint} Its fields are {names}.")
    missing = [each.name for each in fields(kind) if _is_required(each) and each.name not in values]
    if missing:
        raise SlipstreamError(f"{where} lacks {', '.join(missing)}: add {missing[0]}: ....")
    return kind(**{key: _parse_field(value, hints[key], prefix + key) for key, value in values.items()})


def _is_required(found: Field[Any]) -> bool:
    return found.default is MISSING and found.default_factory is MISSING


def _parse_field(value: Any, hint: Any, where: str) -> Any:
    """Returns the value of a field, checked by its type's annotation, if it is no text and no record itself."""
    if is_dataclass(hint):
        return _parse(value, hint, where, f"{where}.")  # type: ignore[arg-type]
    return str(value) if hint is str else hint.__metadata__[0](value, where)


def _peaks(values: Any, where: str, example: str = "bfloat16: 312e12") -> dict[str, float]:
    if not isinstance(values, dict) or not values:
        raise SlipstreamError(f"{where} is {values!r}: give FLOP/s by dtype, as {{{example}}}.")
    return {str(dtype): FLOPS(peak, f"{where}.{dtype}") for dtype, peak in values.items()}


def _narrow_peaks(values: Any, where: str) -> dict[str, float]:
    return _peaks(values, where, "float8: 1979e12")


def _curve(values: Any, where: str) -> tuple[tuple[float, float], ...]:
    pairs = values if isinstance(values, Sequence) and not isinstance(values, str) else []
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise SlipstreamError(f"{where} is {values!r}: give [tokens, fraction] pairs, as [[64, 0.2], [2048, 0.6]].")
    curve = tuple((float(COUNT(tokens, f"{where}: tokens")), FRACTION(share, where)) for tokens, share in pairs)
    if any(a >= b for (a, _), (b, _) in pairwise(curve)):
        raise SlipstreamError(f"{where} has tokens {[tokens for tokens, _ in curve]}: list them from few to many.")
    return curve


def _multiprocessors(value: Any, where: str) -> float:
    return value if value == 0 and not isinstance(value, bool) else COUNT(value, where)


def _sources(values: Any, where: str) -> tuple[str, ...]:
    return tuple(map(str, values or ()))
