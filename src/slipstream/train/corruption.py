"""Finds weights and optimizer state that have changed without an update: a bit that has flipped in memory."""

from __future__ import annotations

import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.checkpoint import TensorShard
from slipstream.errors import RankFailedError
from slipstream.parallel import receive_tensor, send_tensor
from slipstream.train.run_context import RunContext
from slipstream.watchdog import watchdog_paused

_MOST_NAMED = 4  # tensors of an error's message


class CorruptStateError(RankFailedError):
    """Weights or optimizer state have changed without an update; the message names rank, host and tensor."""


class StateCheck:
    """Checks weights and optimizer state every `every` steps, and whenever `compare` is called.

    Copies of one tensor, over replicas (dp) and over ranks that share layers (tp), have to have the same bits. Elements
    that one rank alone holds, as with ZeRO, get a checksum after an update, which has to hold before the next.

    Args:
        run: whose configuration says how often, and whether, of three or more copies, the majority's replace a wrong
            one; else an error is raised.
        shards: returns all tensors of this rank, as a checkpoint has them.
    """

    def __init__(self, run: RunContext, shards: Callable[[], Iterable[TensorShard]]) -> None:
        training = run.config.training
        self._every = training.check_replicas_every
        self._takes_majority = training.corrupt_replicas == "majority"
        self._shards = shards
        self._world = run.world
        self._say = run.progress.warn
        self._hosts: list[str] = []
        self._lone: set[str] = set()
        self._noted: dict[str, int] = {}  # checksums since an update

    def after_step(self, step: int) -> bool:
        """Checks after the updates of the steps whose turn it is; returns whether copies were put right. Collective."""
        if not self._every or step % self._every:
            return False
        is_repaired = self.compare()
        self._noted = {place: fingerprint(shard.tensor) for place, shard in self._lone_shards()}
        return is_repaired

    def before_update(self) -> None:
        """Checks that the state is still as noted. Not collective; raises CorruptStateError on this rank alone."""
        if not self._noted:
            return
        noted = self._noted
        self._noted = {}
        wrong = [place for place, shard in self._lone_shards() if noted.get(place) != fingerprint(shard.tensor)]
        if wrong:
            where = f"on rank {self._world.rank} ({socket.gethostname()})"
            raise CorruptStateError(
                f"{_named(wrong)} {where} changed between two updates, though nothing has written to it: a bit has "
                "flipped in its memory. Test that machine; go on from the last checkpoint with "
                "--checkpoint.resume=last-good"
            )

    def forget(self) -> None:
        """Forgets checksums, as the state is about to be loaded."""
        self._noted = {}

    def compare(self) -> bool:
        """Compares all copies now; returns whether some were put right.

        Collective. Raises CorruptStateError on every rank.
        """
        if self._world.size == 1:
            self._lone = {place_of(shard) for shard in self._shards()}
            return False
        # Comparing large copies may take longer than ranks may otherwise wait.
        with watchdog_paused("comparing copies"):
            mine = {place_of(shard): fingerprint(shard.tensor) for shard in self._shards()}
            digests = self._world.gather(mine)
        self._hosts = self._hosts or self._world.gather(socket.gethostname())
        self._lone = lone_places([list(places) for places in digests])
        differences = find_differences(digests)
        if not differences:
            return False
        if not self._takes_majority or not all(difference.wrong for difference in differences):
            raise CorruptStateError("; ".join(map(self._describe, differences[:_MOST_NAMED])) + _ADVICE)
        tensors = {place_of(shard): shard for shard in self._shards()}
        for difference in differences:
            self._put_right(difference, tensors.get(difference.place))
            self._say(f"{self._describe(difference)}; it has the others' copy now. Test that machine")
        return True

    def _put_right(self, difference: Difference, shard: TensorShard | None) -> None:
        """Replaces wrong copies of a tensor by that of a rank of the majority."""
        rank = self._world.global_ranks
        if shard is None:
            return
        tensor = shard.tensor.detach()
        whole = tensor.contiguous()
        for wrong in difference.wrong:
            if self._world.rank == difference.right:
                send_tensor(whole, rank[wrong], self._world.process_group)
            elif self._world.rank == wrong:
                receive_tensor(whole, rank[difference.right], self._world.process_group)
                tensor.copy_(whole)

    def _describe(self, difference: Difference) -> str:
        if difference.wrong:
            ranks = ", ".join(f"rank {rank} ({self._hosts[rank]})" for rank in difference.wrong)
            return f"{difference.place} of {ranks} differs from the copies of the other ranks that have it"
        ranks = ", ".join(f"{rank} ({self._hosts[rank]})" for rank in difference.holders)
        if len(difference.holders) == 2:
            return f"the two copies of {difference.place}, on ranks {ranks}, differ, so that neither can be trusted"
        return f"the copies of {difference.place} on ranks {ranks} differ, and none is in the majority"

    def _lone_shards(self) -> Iterator[tuple[str, TensorShard]]:
        return ((place, shard) for shard in self._shards() if (place := place_of(shard)) in self._lone)


_ADVICE = (
    ". A bit has flipped in one rank's memory, or a collective has gone wrong on it: test that machine, and go on from "
    "the last checkpoint with --checkpoint.resume=last-good"
)


def _named(places: list[str]) -> str:
    more = f" and {len(places) - _MOST_NAMED} other tensors" if len(places) > _MOST_NAMED else ""
    return ", ".join(places[:_MOST_NAMED]) + more


_BLOCK = 2**24  # elements widened at a time, of a tensor on a GPU


class Difference(NamedTuple):
    """A tensor of which ranks hold different copies. `wrong` has those that differ from the majority, and is empty
    where there is none; `right` is a rank of the majority."""

    place: str
    holders: tuple[int, ...]
    wrong: tuple[int, ...]
    right: int


def fingerprint(tensor: Tensor) -> int:
    """Returns a number of the tensor's bits: another one wherever a single bit differs, and mostly where more do."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    if not flat.is_cuda:
        return zlib.crc32(flat.view(torch.uint8).numpy().data)
    # A sum of integers in which every bit has its weight; the products tell elements that changed places.
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _BLOCK):
        part = words[start : start + _BLOCK].long()
        total += (part * (2 * torch.arange(start, start + len(part), device=flat.device) + 1)).sum()
    return int(total)


def place_of(shard: TensorShard) -> str:
    """Returns which elements of which tensor a shard has: the same text on all ranks that have the same."""
    rows = f"rows {shard.first_row}-{shard.first_row + (shard.tensor.shape[0] if shard.tensor.dim() else 1) - 1}"
    cut = "" if shard.share.is_whole else f" of the part {list(shard.share.ranges)} along dim {shard.share.dim}"
    return f"{shard.key} ({rows}{cut})"


def find_differences(found: Sequence[Mapping[str, int]]) -> list[Difference]:
    """Returns the tensors whose copies differ, from the fingerprints by place of every rank."""
    differences = []
    for place in dict.fromkeys(name for digests in found for name in digests):
        values = {rank: digests[place] for rank, digests in enumerate(found) if place in digests}
        (value, count), *others = Counter(values.values()).most_common()
        if others:
            is_majority = 2 * count > len(values)
            right = [rank for rank, digest in values.items() if digest == value]
            wrong = tuple(rank for rank in values if rank not in right) if is_majority else ()
            differences.append(Difference(place, tuple(values), wrong, right[0]))
    return differences


def lone_places(places: Iterable[Sequence[str]]) -> set[str]:
    """Returns the places that one rank alone holds, from those of every rank."""
    counts = Counter(place for of_rank in places for place in of_rank)
    return {place for place, count in counts.items() if count == 1}
