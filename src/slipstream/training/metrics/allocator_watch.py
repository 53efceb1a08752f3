"""Says once that ranks' allocators hold much beside tensors, and once that they had to give memory back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.parallel import GpuMemory, expands_segments, fragmentation_advice
from slipstream.units import bytes_text, times_text


class AllocatorWatch:
    """Follows what the allocators of all ranks' GPUs count, and tells of the rank where it is worst."""

    def __init__(self, before: Sequence[GpuMemory | None]) -> None:
        """`before` the first step, what was counted on each rank."""
        self._retries = [_retries(each) for each in before]
        self._told: set[str] = set()

    def lines(self, step: int, found: Sequence[GpuMemory | None], trial: bool = False) -> list[str]:
        """Returns a line for what is new after a step; none after a `trial`, which holds other memory than the run."""
        rose = [_retries(now) - before for now, before in zip(found, self._retries, strict=True)]
        self._retries = [_retries(each) for each in found]
        if trial:
            return []
        lines = dict([*self._fragmented(found), *self._retried(found, rose)])
        new = [f"step {step}: {line}" for what, line in lines.items() if what not in self._told]
        self._told.update(lines)
        return new

    def _fragmented(self, found: Sequence[GpuMemory | None]) -> Iterator[tuple[str, str]]:
        much = {rank: each for rank, each in enumerate(found) if each is not None and each.is_fragmented}
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
            less = "--memory.recompute=full or more slices need less memory"
            how = less if expands_segments() else f"{fragmentation_advice()}; {less}"
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
