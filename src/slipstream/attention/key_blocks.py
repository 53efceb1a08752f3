"""Where a microbatch's keys and values lie: on the device as whole buffers, or on the host as a block for each slice.

On the host, a slice attends to one block after the other, and the next one is on its way meanwhile; in a backward the
sums of a block's gradients come and go with it:

    device      own | block 2 | block 1 | block 0        outputs are merged by their log-sum-exps
    host        ....... block 2, block 1, block 0

Where a share is on the host, it has the oldest slices, and the device the others in buffers, which are one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.attention.masks import KeyRanges
from slipstream.host_memory import HostMemory, HostTensors, Tenant, host_memory, return_freed_memory


class KeyBlock(NamedTuple):
    """Some keys and values that a slice's queries see, and in a backward the sums of their gradients."""

    ranges: KeyRanges  # the keys visible to each query, with places counted from `start`
    start: int  # place of the first key of the block
    key: Tensor  # (B,Hkv,n,D), from the first key on that any query sees
    value: Tensor  # (B,Hkv,n,Dv)
    sums: tuple[Tensor, ...] = ()  # sums of both gradients; empty in a forward


class HostContext(NamedTuple):
    """A place on the host for keys and values."""

    memory: HostMemory
    share: float = 1.0  # share of each sequence's tokens, above 0: the first ones


def context_on_host(device: torch.device, share: float = 1.0) -> HostContext | None:
    """Returns the place for a share of the keys and values of a model on a device; None where the share is 0. On CPUs
    freed memory is returned to the system from then on, as what is saved would else stay with the process."""
    if not share:
        return None
    if device.type == "cpu":
        return_freed_memory()
    setting = f"memory.context={'host' if share == 1 else f'{share:g}'}"
    tenant = Tenant(setting, "keys, values and states", "shorten the sequence")
    return HostContext(host_memory(device, tenant), share)


class HostBlock:
    """One slice's keys and values on the host, with the sums of their gradients once there are any."""

    def __init__(self, host: HostMemory, key: Tensor, value: Tensor, least_sums: torch.dtype) -> None:
        """`least_sums` is the type that gradients are summed in, unless that of the keys is wider."""
        self._host = host
        self._type = torch.promote_types(key.dtype, least_sums)
        self._keys = host.keep((key, value))
        self._sums: HostTensors | None = None

    def begin(self, with_sums: bool) -> None:
        """Begins to bring the block to the device; the sums are zeros the first time."""
        there = self._keys.begin()
        if with_sums and self._sums is None:
            self._sums = self._host.zeros(there, self._type)
        if with_sums and self._sums is not None:
            self._sums.begin()

    def keys(self) -> list[Tensor]:
        """Returns key and value, which were begun."""
        return self._keys.wait()

    def sums(self) -> list[Tensor]:
        """Returns the sums of their gradients, which were begun."""
        return [] if self._sums is None else self._sums.wait()

    def put_back(self) -> None:
        """Returns the sums to the host, and leaves the device."""
        self._keys.leave()
        if self._sums is not None:
            self._sums.put_back()

    @property
    def num_bytes(self) -> int:
        """The bytes on the host."""
        return self._keys.num_bytes + (0 if self._sums is None else self._sums.num_bytes)


class DeviceBlock:
    """The keys and values of the last slices, which stay on the device, in a backward with the sums of their gradients.

    Args:
        buffers: of keys, values, and the sums of both.
    """

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers

    def begin(self, with_sums: bool) -> None:
        """See `HostBlock`."""

    def keys(self) -> list[Tensor]:
        """See `HostBlock`."""
        return self._buffers[:2]

    def sums(self) -> list[Tensor]:
        """See `HostBlock`."""
        return self._buffers[2:]

    def put_back(self) -> None:
        """See `HostBlock`."""


class SeenBlock(NamedTuple):
    """A block of which queries see some keys."""

    start: int  # place of its first key
    block: HostBlock | DeviceBlock
    ranges: KeyRanges  # the keys visible to each query, with places counted from `start`


def streamed(blocks: Sequence[SeenBlock], with_sums: bool) -> Iterator[KeyBlock]:
    """Yields what queries see of blocks, on the device, the next block on its way; the sums of all but the first return
    to the host once they were added to.

    Args:
        blocks: that with the queries' own keys, and then the others.
        with_sums: whether gradients are added up.
    """
    for seen_block in blocks[:1]:
        seen_block.block.begin(with_sums)
    for index, (start, block, ranges) in enumerate(blocks):
        if index + 1 < len(blocks):
            blocks[index + 1].block.begin(with_sums)
        seen = ranges.first, ranges.keys_end - ranges.first
        sums = block.sums() if with_sums else []
        key, value, *sums = (tensor.narrow(2, *seen) for tensor in (*block.keys(), *sums))
        yield KeyBlock(ranges, start, key, value, tuple(sums))
        # The slice's own sums become final in its backward, and are needed here.
        if index or not with_sums:
            block.put_back()
