"""Tells where the allocators of the ranks' GPUs are short of memory, or hold it in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.model import recompute_advice
from slipstream.parallel import GpuMemory, expands_segments, fragmentation_advice
from slipstream.units import bytes_text, times_text


class AllocatorWatch:
    """Follows the counters of the allocators of all ranks' GPUs, and tells of the rank where it is worst."""

    def __init__(self, before: Sequence[GpuMemory | None], recompute: str | int) -> None:
        """`before` has each rank's counters before the first step; `recompute` is the setting."""
        advised = recompute_advice(recompute).replace("'", "").removesuffix(", ")
        self._less = f"--{advised} or more slices need less memory" if advised else "more slices need less memory"
        self._retries = [_retries(counters) for counters in before]
        self._told: set[str] = set()

    def lines(self, step: int, found: Sequence[GpuMemory | None], trial: bool = False) -> list[str]:
        """Returns a line for each new finding after a step; none after a `trial`, whose memory differs."""
        rose = [_retries(now) - before for now, before in zip(found, self._retries, strict=True)]
        self._retries = [_retries(counters) for counters in found]
        if trial:
            return []
        lines = dict([*self._fragmented(found), *self._retried(found, rose)])
        new = [f"step {step}: {line}" for what, line in lines.items() if what not in self._told]
        self._told.update(lines)
        return new

    def _fragmented(self, found: Sequence[GpuMemory | None]) -> Iterator[tuple[str, str]]:
        much = {rank: counts for rank, counts in enumerate(found) if counts is not None and counts.is_fragmented}
        if much:
            rank, held = max(much.items(), key=lambda item: item[1].reserved - item[1].allocated)
            spare = bytes_text(held.reserved - held.allocated)
            yield (
                "fragmented",
                f"on rank {rank} {held.describe()}: {spare} in pieces of sizes that weren't asked for when tensors "
                f"needed most. If memory is short, {fragmentation_advice()}",
            )

    def _retried(self, found: Sequence[GpuMemory | None], rose: Sequence[int]) -> Iterator[tuple[str, str]]:
        rank = max(range(len(rose)), key=rose.__getitem__)
        held = found[rank]
        if held is not None and rose[rank] > 0:
            how = self._less if expands_segments() else f"{fragmentation_advice()}; {self._less}"
            yield (
                "retried",
                f"on rank {rank} the GPU's memory ran out {times_text(rose[rank])}, and PyTorch's allocator gave back "
                f"all that was unused to go on, for which the GPU has to wait. {_capital(held.describe())}. To keep "
                f"the GPU computing, {how}",
            )


def _retries(memory: GpuMemory | None) -> int:
    return 0 if memory is None else memory.retries


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
