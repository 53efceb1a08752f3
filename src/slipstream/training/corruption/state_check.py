"""Compares what several ranks hold in common, and checks what one alone holds for changes between two updates."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator

from slipstream.checkpoint import TensorShard
from slipstream.errors import RankFailedError
from slipstream.parallel import RankGroup, receive_tensor, send_tensor
from slipstream.training.corruption.fingerprints import (
    Difference,
    find_differences,
    fingerprint,
    lone_places,
    place_of,
)
from slipstream.watchdog import counted_off

_MOST_NAMED = 4  # tensors of an error's message


class CorruptStateError(RankFailedError):
    """Weights or optimizer state have changed without an update; the message names rank, host and tensor."""


class StateCheck:
    """Checks weights and optimizer state every `every` steps, and whenever `compare` is called.

    Copies of one tensor, over replicas (dp) and over ranks that share layers (tp), have to have the same bits. Elements
    that one rank alone holds, as with ZeRO, get a checksum after an update, which has to hold before the next.

    Args:
        every: steps between checks; 0 for none but by `compare`.
        takes_majority: whether, of three or more copies, the majority's replace a wrong one; else an error is raised.
        shards: returns all tensors of this rank, as a checkpoint has them.
        world: all ranks.
        say: gets a line of text about what was put right.
    """

    def __init__(
        self,
        every: int,
        takes_majority: bool,
        shards: Callable[[], Iterable[TensorShard]],
        world: RankGroup,
        say: Callable[[str], None],
    ) -> None:
        self._every, self._takes_majority, self._shards = every, takes_majority, shards
        self._world, self._say = world, say
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
        """Checks what was noted after the last update. Not collective; raises CorruptStateError on this rank alone."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
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
        with counted_off("comparing copies"):  # large ones may take longer than ranks may wait otherwise
            mine = {place_of(shard): fingerprint(shard.tensor) for shard in self._shards()}
            found = self._world.gather(mine)
        self._hosts = self._hosts or self._world.gather(socket.gethostname())
        self._lone = lone_places([list(each) for each in found])
        differences = find_differences(found)
        if not differences:
            return False
        if not self._takes_majority or not all(each.wrong for each in differences):
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
