"""What the joint search is asked: the model's costs, the sequences, the ranks, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slipstream.array_types import Floats
from slipstream.errors import SlipstreamError
from slipstream.planner.joint.unit_costs import SlicedUnits, UnitCosts
from slipstream.schedule import Schedule

# From the layers of each stage, the slices, the compute actions and whether forwards run again: bytes of each rank.
MemoryAccount = Callable[[tuple[float, ...], tuple[int, ...], Schedule, bool], Sequence[float]]


@dataclass(frozen=True)
class JointProblem:
    """What is searched for: a step of `num_microbatches` sequences of `seq_len` tokens on `num_ranks` ranks.

    Args:
        costs: what each unit of the model costs, for a microbatch.
        granularity: slices begin at multiples of this many tokens.
        most_slices: the largest number of slices of a sequence, unless `longest_slice` asks for more.
        longest_slice: tokens of the longest slice, of which whole granules count. None: the sequence.
        memory_limit: bytes of each rank. None: no limit.
        account: returns the most bytes that each rank holds with a plan; they decide what fits. None: weights,
            gradients, optimizer state and activations alone count.
        split: whether backwards may be split into input and weight gradients.
        effort: how many actions list scheduling may place; some 5 million take a second.
        tied: whether the head's weight embeds too, so that the embedding is spread where the head is.
    """

    costs: UnitCosts
    seq_len: int
    num_ranks: int
    num_microbatches: int = 1
    granularity: int = 64
    most_slices: int = 32
    longest_slice: int | None = None
    memory_limit: float | None = None
    account: MemoryAccount | None = None
    split: bool = True
    effort: float = 1.5e8
    tied: bool = False

    def check(self) -> None:
        """Raises SlipstreamError where no slices are allowed."""
        if self.longest < 1:
            raise SlipstreamError(
                f"longest_slice={self.longest_slice}, but slices begin at multiples of granularity={self.granularity} "
                "tokens: give a longest slice of at least as many, or a smaller granularity."
            )

    @property
    def longest(self) -> int:
        """The number of tokens of the longest slice that is allowed."""
        if self.longest_slice is None or self.longest_slice >= self.seq_len:
            return self.seq_len
        return self.longest_slice // self.granularity * self.granularity

    @property
    def slice_counts(self) -> range:
        """The numbers of slices that are allowed."""
        fewest = -(-self.seq_len // self.longest)
        return range(fewest, max(fewest, min(self.most_slices, -(-self.seq_len // self.granularity))) + 1)

    @cached_property
    def num_units(self) -> int:
        """The embedding, the layers or their halves, and the head."""
        return self.costs.num_layers * self.costs.units_per_layer + 2

    def ideal(self, units: SlicedUnits) -> float:
        """Returns all work on these slices, or on as few as are allowed where that is less, divided by the ranks."""
        full, rest = divmod(self.seq_len, self.longest)
        few = SlicedUnits(self.costs, (self.longest,) * full + (rest,) * (rest > 0))
        # Measured costs may rise faster than the tokens, so that shorter slices are less work.
        least = min(float(each.unit_work().sum()) for each in (few, units))
        return least * self.num_microbatches / self.num_ranks

    @cached_property
    def state_sums(self) -> Floats:
        """The bytes of weights, gradients and optimizer state of the first 0, 1, ... units."""
        sums: Floats = np.concatenate([[0.0], np.cumsum(self.costs.state_bytes())])
        return sums
