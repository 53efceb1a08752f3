"""The plan of one step: which sequences form which microbatch, the slices of each, and the order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.schedule import Schedule, SlicedMicrobatch


@dataclass(frozen=True)
class StepPlan:
    """The microbatches, slices and order of one step.

    Args:
        groups: the numbers of the sequences in each microbatch, which are packed into one row in this order.
        slices: the tokens of each slice, of each microbatch.
        schedule: what every rank runs in which order; its microbatches have as many slices.
        seconds: the simulated step; None where nobody has simulated it.
    """

    groups: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[int, ...], ...]
    schedule: Schedule
    seconds: float | None = None

    @property
    def microbatches(self) -> list[SlicedMicrobatch]:
        """The one row and the slices of each microbatch."""
        return [SlicedMicrobatch(1, slices) for slices in self.slices]

    def check(self, lengths: Sequence[int]) -> None:
        """Raises SlipstreamError where this isn't a plan for sequences of these lengths, in tokens."""
        self._check_groups(len(lengths))
        if len(self.slices) != len(self.groups):
            raise SlipstreamError(
                f"the plan has {len(self.groups)} microbatches, but slices of {len(self.slices)}. Give each its slices."
            )
        for number, (group, slices) in enumerate(zip(self.groups, self.slices, strict=True)):
            tokens = sum(lengths[sequence] for sequence in group)
            if sum(slices) != tokens or min(slices, default=0) < 1:
                raise SlipstreamError(
                    f"the plan cuts microbatch {number} into slices of {_short(slices)} tokens, {sum(slices)} in all, "
                    f"but its sequences {_short(group)} have {tokens}: it was made for other lengths. Make a plan for "
                    "these."
                )
        counts = [len(slices) for slices in self.slices]
        if counts != [*self.schedule.slice_counts]:
            raise SlipstreamError(
                f"the plan has microbatches of {_short(counts)} slices, but its schedule {self.schedule.name!r} of "
                f"{_short(self.schedule.slice_counts)}. Make them equal."
            )

    def _check_groups(self, num_sequences: int) -> None:
        """Raises SlipstreamError where not every sequence is in one microbatch."""
        found = Counter(sequence for group in self.groups for sequence in group)
        unknown = sorted(found.keys() - range(num_sequences))
        wrong = [number for number in range(num_sequences) if found[number] != 1]
        if unknown:
            problem = f"there is no sequence {unknown[0]}"
        elif wrong:
            problem = f"sequence {wrong[0]} is in {found[wrong[0]]} of them, not in one"
        elif not all(self.groups):
            problem = "one is empty"
        else:
            return
        raise SlipstreamError(
            f"the plan's microbatches don't add up to the batch of {num_sequences} sequences: {problem}. Make a plan "
            "for this batch."
        )


def _short(numbers: Iterable[int]) -> str:
    """Returns the first numbers of a list."""
    listed = [*numbers]
    return f"[{', '.join(map(str, listed[:8]))}{', ...' if len(listed) > 8 else ''}]"
