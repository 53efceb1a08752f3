"""Finds out where ranks call different methods of a Pipeline, by the one message with which each of these begins."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.messages import TransportError
from slipstream.parallel import PendingWork, Ranks
from slipstream.watchdog import explain_loss, waiting

_CALLS = (
    "step",
    "evaluate",
    "logits",
    "log_probabilities",
    "clip_grad_norm_",
    "state_dict",
    "save_pretrained",
    "save",
    "load",
    "sequence_log_probabilities",
    "timeline",
    "memory_table",
)
_NUM_VALUES = 4
_made: Counter[tuple[int, ...]] = Counter()  # Pipelines in this process, by the ranks that share them


class RankValues(NamedTuple):
    """What a rank has sent at the beginning of a call."""

    rank: int
    replica: int
    values: list[int]


class CallAgreement:
    """Lets all ranks of a mesh find out together whether they are in one call, and exchange a few numbers.

    Every collective method of a Pipeline begins with this all-gather of six numbers for each rank. It has one shape, so
    that calls that differ meet in it: a gather of weights that met a sum of losses would end the processes, or wait.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        together = tuple(ranks.world.global_ranks)
        _made[together] += 1
        self._number = _made[together]  # of the Pipeline, as these ranks make theirs in one order
        self.name = _CALLS[0]
        """The method that a message belongs to. A method whose message has numbers of a batch sets it beforehand."""
        self._asked: tuple[str, Tensor, PendingWork | None] | None = None  # what is being gathered

    def begin(self, name: str, values: Sequence[int] | Tensor = ()) -> list[RankValues]:
        """Returns what every rank sends at the beginning of the method of this name. Collective.

        Raises SlipstreamError on every rank where others call other methods, and TransportError where a rank has ended.
        """
        self.name = name
        self.start(values)
        return self.finish()

    def start(self, values: Sequence[int] | Tensor, of_list: bool = False) -> None:
        """Starts to exchange some numbers, up to four int64, in the method that runs; `of_list` where they are those of
        its plan for a list of sequences, which comes before those of the batch. Collective."""
        self.finish()
        if self._ranks.world.size == 1:
            return
        device = self._ranks.device
        numbers = values.to(device) if isinstance(values, Tensor) else torch.tensor(values, device=device).long()
        call = 2 * (self._number * len(_CALLS) + _CALLS.index(self.name)) + of_list
        head = torch.tensor([call, self._ranks.data.rank, *[0] * (_NUM_VALUES - len(numbers))], device=device)
        self._asked = self.name, *self._ranks.world.start_all_gather(torch.cat([head[:2], numbers, head[2:]]))

    def finish(self) -> list[RankValues]:
        """Waits for what has been started; returns it of every rank, nothing where there is nothing to wait for."""
        if self._asked is None:
            return []
        (name, gathered, work), self._asked = self._asked, None
        world = self._ranks.world
        try:
            if work is not None:
                of_which = f" of Pipeline {self._number}" if self._number > 1 else ""
                with waiting(f"{name}{of_which}, until every rank calls it".encode()):
                    work.wait()
        except RuntimeError as error:
            raise TransportError(
                explain_loss(
                    f"rank {world.global_ranks[world.rank]} waited in {name} for "
                    f"{named([rank for place, rank in enumerate(world.global_ranks) if place != world.rank])}: every "
                    f"rank must call it, and one has ended or doesn't answer ({error})"
                )
            ) from error
        found = list(zip(world.global_ranks, gathered.tolist(), strict=True))
        ranks_of: defaultdict[int, list[int]] = defaultdict(list)
        for rank, (call, *_) in found:
            ranks_of[call].append(rank)
        if len(ranks_of) > 1:
            raise _difference(ranks_of)
        return [RankValues(rank, replica, values) for rank, (_, replica, *values) in found]


def _difference(ranks_of: dict[int, list[int]]) -> SlipstreamError:
    """Returns the error that says which ranks are in which call."""
    texts = {}
    numbers = {call // 2 // len(_CALLS) for call in ranks_of}
    for call in ranks_of:
        number, place = divmod(call // 2, len(_CALLS))
        texts[call] = f"{_CALLS[place]}{' of a list of sequences' if call % 2 else ''}"
        if len(numbers) > 1:
            texts[call] += f" of Pipeline {number}, in the order in which they were made"
    lines = "\n  ".join(f"{named(ranks)}: {texts[call]}" for call, ranks in ranks_of.items())
    where = "the Pipeline" if len(numbers) == 1 else "Pipelines"
    calls = " and ".join(text.partition(",")[0] for text in texts.values())
    return SlipstreamError(
        f"the ranks call different methods of {where}, each of which waits for every rank:\n  {lines}\nCall {calls} on "
        "every rank, in the same order. Under `if pipe.leads:` belongs only what is done with a result, such as "
        "printing it; save and save_pretrained write on one rank by themselves."
    )


def named(ranks: Sequence[int]) -> str:
    """Returns the ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
