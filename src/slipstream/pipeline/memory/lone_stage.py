"""The schedule of a rehearsal: one stage alone on its rank, with all that a schedule does to some slice of it."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.schedule import Action, Op, Schedule
from slipstream.simulator import StageSlice


def alone(like: StageSlice, split: bool, schedule: Schedule, num_slices: int) -> Schedule:
    """Returns the schedule of two microbatches on one stage of `schedule`, alone on its rank.

    All slices are treated as `like` is, with backwards whole or split. What the first stage embeds comes from other
    ranks, and from its own rows where these are next to it. A stage of which nothing is trained runs forwards alone.
    """
    placement = _apart(like.stage, schedule) if schedule.spreads_vocabulary else tuple(range(schedule.num_stages))
    last, has_rows = len(placement) - 1, schedule.spreads_vocabulary and like.stage in schedule.vocabulary_stages
    embeds, own = schedule.spreads_embedding, placement[like.stage]
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(2):
        parts = last, num_slices, has_rows, has_rows and embeds, schedule.num_frozen_stages
        rows[own] += _microbatch(like, split, microbatch, *parts)
        if has_rows or (embeds and like.stage == 0):
            for rank, stage in {placement[g]: g for g in range(last + 1)}.items():  # the last of each rank
                if rank != own:
                    rows[rank] += _sending(stage, microbatch, last, num_slices, embeds)
        if has_rows and embeds and like.stage > 0:
            rows[placement[0]] += (Action(Op.B, 0, microbatch, index) for index in reversed(range(num_slices)))
    if like.stage < schedule.num_frozen_stages and len(rows) > 1:  # others say that it is a step, not an evaluation
        rows[(own + 1) % len(rows)].append(Action(Op.B, last, 0, 0))
    frozen = schedule.num_frozen_stages
    return Schedule(
        "rehearsal",
        tuple(map(tuple, rows)),
        placement,
        num_microbatches=2,
        num_slices=num_slices,
        num_frozen_stages=frozen,
    )


def _sending(stage: int, microbatch: int, last: int, num_slices: int, embeds: bool) -> Iterator[Action]:
    """Yields what another rank would run of a spread head: it doesn't run, but says what is sent, in which order."""
    order = range(num_slices)
    if embeds:
        yield from (Action(Op.E, stage, microbatch, index) for index in order)
    yield from (Action(Op.V, stage, microbatch, index) for index in order)
    if stage == last:
        yield from (Action(Op.F, stage, microbatch, index) for index in order)
        yield from (Action(Op.L, stage, microbatch, index) for index in reversed(order))


def _apart(stage: int, schedule: Schedule) -> tuple[int, ...]:
    """Returns the placement with the rank's other stages on the next rank, or where it is the only one, on others."""
    placement, num_ranks = schedule.placement, schedule.num_ranks
    own = placement[stage]
    if num_ranks == 1:
        return tuple(range(schedule.num_stages))
    return tuple((own + 1) % num_ranks if there == own and g != stage else there for g, there in enumerate(placement))


def _microbatch(
    like: StageSlice,
    split: bool,
    microbatch: int,
    last: int,
    num_slices: int,
    has_rows: bool,
    looks_up: bool,
    num_frozen: int,
) -> Iterator[Action]:
    """Yields the forwards, then the backwards in reverse, each with the actions that go with it."""
    not_first, not_last, trains = like.stage > 0, like.stage < last, like.stage >= num_frozen
    forward = [
        (Op.E, looks_up),
        (Op.RECV_F, not_first),
        (Op.F, True),
        (Op.SEND_F, not_last),
        (Op.OFFLOAD, like.offloaded),
    ]
    backward = [
        (Op.L, has_rows and not not_last),
        (Op.RELOAD, like.offloaded),
        (Op.R, like.recomputed),
        (Op.RECV_B, not_last and trains),
        (Op.I if split else Op.B, trains),
        (Op.SEND_B, like.stage > num_frozen),
        (Op.W, split),
        (Op.VW, has_rows),
        (Op.EW, looks_up),
    ]
    order = range(num_slices)
    for ops, slices in ((forward, order), ([(Op.V, has_rows)], order), (backward, reversed(order))):
        for index in slices:
            yield from (Action(op, like.stage, microbatch, index) for op, runs in ops if runs)
