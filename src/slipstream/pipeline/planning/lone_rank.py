"""The slices of a rank that is alone in its pipeline, where nobody gives them: the usual ones, or as many as it takes
that a step fits the memory.

No other rank waits for it, so a step takes the longer the more slices it has: the fewest that fit are the fastest. They
follow from the account of counted operations, without measuring.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.errors import SlipstreamError
from slipstream.parallel import Ranks
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.pipeline.planning.counted_plans import slices_text
from slipstream.pipeline.planning.step_settings import RowOrder, StepSettings, usual_order
from slipstream.planner.cuts import Cuts
from slipstream.schedule import USUAL_SLICES, slice_lengths
from slipstream.units import bytes_text, plural

_MOST_SLICES = 512  # the most of a search over meshes
_TRIES = 3  # numbers of slices that are rehearsed within a limit
# What a plan may compute again within a limit, in the order of what it costs.
_WITHIN_LIMIT = ("none", "stage", "full", "stage+full")
# What to type where nothing fits, in the order of what it costs.
_PROPOSED: tuple[dict[str, str], ...] = (
    {"recompute": "stage"},
    {"recompute": "stage+full"},
    {"recompute": "stage", "context": "host"},
    {"recompute": "stage+full", "context": "host"},
    {"recompute": "stage+full", "context": "host", "optimizer": "host"},
)


class StepAccount(Protocol):
    """The account of a step on one rank, by counted operations."""

    def peak(self, slices: Sequence[int], num_rows: int, changes: Mapping[str, str]) -> float:
        """Returns the most bytes that the rank holds with such slices of `num_rows` sequences in a microbatch, and with
        these settings of `memory` in place of those that are given.

        Raises SlipstreamError where they can't be known.
        """
        ...

    def surely_fits(self, num_tokens: int, room: float) -> bool:
        """Returns whether a microbatch of so many tokens fits in any slices, in no time and without counting."""
        ...


@dataclass(frozen=True)
class RankRoom:
    """The memory that a rank may fill.

    Args:
        bytes: of it.
        words: that say whose they are, such as "this GPU has room for 76 GB".
    """

    bytes: float
    words: str


class NoRoomError(SlipstreamError):
    """Raised where a step doesn't fit the memory however its sequences are sliced."""


@dataclass(frozen=True)
class _Choice:
    """The slices of sequences of one length, and what is computed again.

    Args:
        recompute: as in `memory`.
        slices: the tokens of each; none for the usual number of slices.
        instead_of: the bytes with what is usual and given, where that doesn't fit.
    """

    recompute: str | int
    slices: tuple[int, ...] = ()
    instead_of: float = 0.0


class LoneRankPlans:
    """The plans of a Pipeline of one rank. The leader of the replicas finds them, and all follow.

    Args:
        options: of the Pipeline, as they were given.
        ranks: of all replicas.
        account: of a step. The leader calls it.
        room: that the memory limit or the device leaves.
        length: tokens of the rows for which a recomputation is chosen where the options say nothing.
        useless: settings of `memory` that save nothing here, or are refused.
    """

    def __init__(
        self,
        options: PipelineOptions,
        ranks: Ranks,
        account: StepAccount,
        room: RankRoom,
        length: int,
        useless: Collection[str] = (),
    ) -> None:
        self._ranks = ranks
        self._account = account
        self._room = room
        self._memory = options.memory
        self._useless = useless
        self._given: str | int = options.memory.recompute
        self._has_limit = options.memory.limit is not None
        expected = options.expected
        self._knows_length = expected is not None
        # The rows that the choice is for.
        self._length, self._num_rows = length, 1
        if expected is not None:
            self._length, self._num_rows = expected.longest or expected.seq_len, expected.microbatch_size
        self._choice: _Choice | None = None
        self._problem = ""

    def decided(self, options: PipelineOptions) -> PipelineOptions:
        """Returns the options with the usual order and what is computed again; the slices are still open. Collective.

        Raises NoRoomError where nothing fits the device.
        """
        plan = usual_order(options, 1)
        options = replace(options, schedule=plan.schedule, stages_per_rank=plan.stages_per_rank, slices="auto")
        may_recompute = self._has_limit and self._given == "none"
        if self._knows_length or may_recompute:
            self._choice = self._chosen(_WITHIN_LIMIT if may_recompute else (self._given,))
            self._given = self._choice.recompute
        return replace(options, memory=options.memory.model_copy(update={"recompute": self._given}))

    def first_order(self, settings: StepSettings) -> RowOrder:
        """Returns the order for rows of the expected length, if that is known, otherwise the usual order."""
        return self._order(settings) if self._knows_length else settings.usual

    def report(self, options: PipelineOptions) -> str:
        """Returns a sentence about the slices that are given, or those of the plan: what a step holds with them, and
        what there is room for. Collective.

        Raises SlipstreamError where nothing fits the device, or a step's bytes can't be counted.
        """
        given = options.slices
        if given is None:
            self.decided(options)
            if self._problem:
                raise SlipstreamError(self._problem)
            assert self._choice is not None
            given = self._choice.slices or len(self._usual)
        assert not isinstance(given, str), '"auto" is measured'
        slices = slice_lengths(given, self._length)
        changes = {} if self._given == self._memory.recompute else {"recompute": str(self._given)}
        held = self._peak(slices, changes)
        again = f", with memory.recompute={self._given}" if changes else ""
        text = f"{slices_text(slices)}{again}: by counted operations a step holds {bytes_text(held)}"
        if held <= self._room.bytes:
            return f"{text}, and {self._room.words}"
        return f"{text}, but {self._room.words}. Give {self._remedy()}"

    @property
    def num_slices(self) -> int:
        """The slices of sequences of the expected length, or the usual number."""
        return USUAL_SLICES if self._choice is None else len(self._choice.slices) or USUAL_SLICES

    def orders(self, settings: StepSettings, length: int, num_rows: int) -> Iterator[RowOrder]:
        """Yields the order for rows of `length` tokens, `num_rows` in a microbatch, and then orders in more slices, for
        where a rehearsal shows that it holds more than was counted. Collective; all replicas follow the leader's
        numbers.

        Raises NoRoomError where nothing fits the device.
        """
        length, num_rows = self._ranks.broadcast((length, num_rows))
        if not self._knows_length or (self._length, self._num_rows) != (length, num_rows):
            self._length, self._num_rows, self._knows_length = length, num_rows, True
            self._choice = self._chosen((self._given,))
        order = self._order(settings)
        yield order
        for _ in range(_TRIES - 1):
            count = min(2 * order.num_slices, self._most_slices)
            if count <= order.num_slices:
                return
            order = settings.repeated(settings.start(count), self._even(count), is_planned=True)
            yield order

    def __str__(self) -> str:
        """Returns a line about the slices, or why they are the usual ones; "" where these fit."""
        if self._problem:
            return f"slices as usual, for nothing is planned: {self._problem}"
        choice = self._choice
        if choice is None or not choice.instead_of:
            return ""
        again = f" with memory.recompute={choice.recompute}" if choice.recompute != self._memory.recompute else ""
        usual = f"{plural(len(self._usual), 'slice')}{' without it' if again else ''}"
        return (
            f"planned by counted operations: {slices_text(choice.slices or self._usual)}{again}, as {usual} would hold "
            f"{bytes_text(choice.instead_of)}, and {self._room.words}"
        )

    def _order(self, settings: StepSettings) -> RowOrder:
        assert self._choice is not None
        if not self._choice.slices:
            return settings.usual._replace(is_planned=True)
        return settings.repeated(settings.start(len(self._choice.slices)), self._choice.slices, is_planned=True)

    # --- the choice --------------------------------------------------------------------------------------------------

    def _chosen(self, recomputations: Sequence[str | int]) -> _Choice:
        """Returns the leader's choice. Collective."""
        usual = _Choice(recomputations[0])
        try:
            found: _Choice = self._ranks.run_on_leader(lambda: self._found(usual, recomputations))
        except NoRoomError:
            raise
        except SlipstreamError as error:
            self._problem = str(error)
            return usual
        return found

    def _found(self, usual: _Choice, recomputations: Sequence[str | int]) -> _Choice:
        """Returns the usual slices where they fit, else the fewest that do, with the first recomputation that lets
        them."""
        if self._account.surely_fits(self._length * self._num_rows, self._room.bytes):
            return usual
        usual_peak = self._peak(self._usual, {})
        if usual_peak <= self._room.bytes:
            return usual
        for recompute in recomputations:
            changes = {} if recompute == self._given else {"recompute": str(recompute)}
            count = self._fewest(changes)
            if count is not None:
                return _Choice(recompute, () if count == len(self._usual) else self._even(count), usual_peak)
        # A rehearsal decides about a limit, and says what to change.
        if self._has_limit:
            return usual
        raise self._refusal()

    def _fewest(self, changes: Mapping[str, str]) -> int | None:
        """Returns the fewest slices that fit, from the usual number on; None where none do."""
        too_few, count, most = 0, len(self._usual), self._most_slices
        while not self._fits(count, changes):
            if count >= most:
                return None
            too_few, count = count, min(2 * count, most)
        while too_few and count - too_few > 1:
            middle = (too_few + count) // 2
            too_few, count = (too_few, middle) if self._fits(middle, changes) else (middle, count)
        return count

    def _fits(self, count: int, changes: Mapping[str, str]) -> bool:
        slices = self._usual if count == len(self._usual) else self._even(count)
        return self._peak(slices, changes) <= self._room.bytes

    def _peak(self, slices: Sequence[int], changes: Mapping[str, str]) -> float:
        return self._account.peak(slices, self._num_rows, changes)

    @property
    def _usual(self) -> list[int]:
        """The usual slices of rows of the length."""
        return slice_lengths(min(USUAL_SLICES, self._length), self._length)

    @property
    def _most_slices(self) -> int:
        places = Cuts.of_rows(self._length).num_places(self._length)
        return max(len(self._usual), min(_MOST_SLICES, places))

    def _even(self, count: int) -> tuple[int, ...]:
        return Cuts.of_rows(self._length).even(self._length, count)

    def _refusal(self) -> NoRoomError:
        """Returns the error that says by how much nothing fits, and what to type."""
        least = min(self._peak(slices, {}) for slices in (self._usual, self._even(self._most_slices)))
        rows = plural(self._num_rows, "sequence")
        return NoRoomError(
            f"a microbatch of {rows} of {self._length} tokens doesn't fit, however it is sliced: by counted operations "
            f"a step holds {bytes_text(least)} or more, and {self._room.words}. Give {self._remedy()}; or "
            f"slices={USUAL_SLICES}, to try it all the same."
        )

    def _remedy(self) -> str:
        """Returns the cheapest change with which a step fits."""
        for changes in _PROPOSED:
            new = {name: value for name, value in changes.items() if getattr(self._memory, name) != value}
            if not new or not new.keys().isdisjoint(self._useless):
                continue
            if (count := self._fewest(changes)) is not None:
                held = bytes_text(self._peak(self._even(count), changes))
                settings = " and ".join(f"memory.{name}={value}" for name, value in new.items())
                return f"{settings}, with which {plural(count, 'slice')} hold {held}"
        return "fewer tokens, or more ranks"
