"""Runs a schedule against a cost model instead of tensors: when actions start and end, and the memory they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slipstream.schedule import (
    COMMUNICATION,
    OPERATIONS,
    Action,
    Channel,
    Held,
    Lane,
    Op,
    Schedule,
    channel,
    predecessors,
    running_order,
    sending,
    sent_result,
    without_communication,
)
from slipstream.simulator.costs import (
    CostModel,
    MemoryTables,
    RankMemory,
    TableCost,
    UnitCost,
    activation_step,
    result_seconds,
)
from slipstream.timeline import Span, Timeline

if TYPE_CHECKING:
    from slipstream.array_types import Floats
    from slipstream.schedule.action_arrays import ActionArrays


def simulate(schedule: Schedule, cost: CostModel, memory: MemoryTables | None = None) -> Timeline:
    """Returns the timeline of one step, in which each rank runs its actions in order as early as it can.

    Messages travel while ranks compute and follow each other on their channel; so do a rank's copies to the host and
    back, for which nothing waits but what needs them. In a schedule without communication a
    message leaves when its action ends; in a lowered one when both ends are posted, and SEND and RECV appear as spans
    from posting to done. Activations count from the start of F to the end of B or W, except for tensors that R brings
    back later and for the time between OFFLOAD and RELOAD. Times and bytes have the cost model's number type: with ints
    or Fractions the result is exact.

    Args:
        schedule: with or without sends and receives.
        cost: seconds and bytes of its actions and messages.
        memory: if given, the timeline's memory is all that the ranks hold: the most during each action, and after it.
            Where microbatches differ, a table for each.

    Raises:
        ScheduleError: the ranks get stuck; the message names the cycle of ranks that wait for each other.
    """
    simulation = _Simulation(schedule, cost)
    for action in running_order(schedule):
        if action.op in COMMUNICATION:
            simulation.post(action)
        else:
            simulation.compute(action)
    steps = simulation.memory
    on_host = simulation.host_memory
    if memory is not None:
        ends = {span.action: span for span in simulation.spans if span.action.op not in COMMUNICATION}
        held = memory_of(schedule, memory)
        steps = [_steps(rank, ends) for rank in held]
        on_host = [_host_steps(rank, ends) for rank in held]
    uses_host = any(size for each in on_host for _, size in each)
    return Timeline(
        spans=tuple(simulation.spans),
        num_ranks=schedule.num_ranks,
        memory=tuple(map(tuple, steps)),
        name=schedule.name,
        host_memory=tuple(map(tuple, on_host)) if uses_host else (),
    )


def memory_of(schedule: Schedule, tables: MemoryTables, frees_late: bool = False) -> tuple[RankMemory, ...]:
    """Returns every rank's memory in a training step after the first, whose gradients start from none.

    A schedule without communication gets the executor's. Where microbatches differ, give a table for each. With
    `frees_late`, the tensors that an OFFLOAD copies stay until the copy had the time of an action, as in a step of CUDA
    graphs.

    Raises:
        SlipstreamError: the table lacks a unit.
    """
    from slipstream.simulator.memory_account import order_bytes  # loads numpy

    return order_bytes(schedule, tables).memory(frees_late)


def rank_memory(schedule: Schedule, rank: int, tables: MemoryTables) -> RankMemory:
    """Returns one rank's memory, as `memory_of` does, from the bytes of that rank's stages alone."""
    from slipstream.simulator.memory_account import order_bytes  # loads numpy

    return order_bytes(schedule, tables, rank).rank_memory(rank)


def end_times(arrays: ActionArrays, cost: CostModel) -> tuple[Floats, Floats]:
    """Returns when every action of a valid schedule ends, as `simulate` has it, and how long it takes.

    The schedule has no sends and receives. Of one whose ranks get stuck, an action that never starts ends before 0.
    """
    import numpy as np

    from slipstream.schedule.compiled_sweep import delayed_start_times, start_times  # loads numba
    from slipstream.simulator.action_graph import result_delays, timed

    graph, order = timed(arrays, cost)
    # Results of a spread head go to several ranks, which aren't equally far.
    if arrays.schedule.spreads_vocabulary:
        start = delayed_start_times(graph, order, result_delays(arrays, graph, cost))
    else:
        start = start_times(graph, order)
    return np.where(start < 0, start, start + graph.seconds), graph.seconds


def step_seconds(schedule: Schedule, cost: CostModel) -> float:
    """Returns the makespan that `simulate` has, to rounding, in a small part of its time: what a search compares.

    Raises ScheduleError where the ranks get stuck.
    """
    # A message that is written out leaves when both ends are posted.
    if schedule.is_lowered:
        return float(simulate(schedule, cost).makespan)
    ends, _ = end_times(_arrays(schedule, cost), cost)
    if ends.min() < 0:
        # This raises, and says which ranks wait for each other.
        simulate(schedule, cost)
    return float(ends.max())


def activation_peaks(schedule: Schedule, cost: CostModel) -> list[float]:
    """Returns the most bytes of activations that each rank holds, as `simulate` counts them: a matter of the order."""
    import numpy as np

    from slipstream.simulator.memory_account import row_peaks

    arrays = _arrays(without_communication(schedule), cost)
    trains = arrays.trains

    def of_slices(value: Callable[[Action], float]) -> Floats:
        return arrays.each(lambda action: value(action.with_op(Op.F)), among=trains)

    whole = of_slices(cost.activation_bytes)
    kept = np.where(arrays.has(Op.R), of_slices(cost.kept_bytes), whole)

    sizes = {Held.ALL: whole, Held.KEPT: kept, Held.REST: whole - kept, Held.OWN: arrays.each(cost.own_bytes)}
    taken, freed = np.zeros((2, len(trains)))
    for op in schedule.ops:
        mine = arrays.is_one_of(op) & trains
        for held, changes in ((OPERATIONS[op].takes, taken), (OPERATIONS[op].frees, freed)):
            if held is not None:
                changes[mine] += sizes[held][mine]
    return [float(most) for most in row_peaks(arrays.firsts, taken, np.zeros_like(taken), freed)]


def _arrays(schedule: Schedule, cost: CostModel) -> ActionArrays:
    from slipstream.schedule.action_arrays import ActionArrays  # loads numpy

    return ActionArrays.of(schedule, alike=isinstance(cost, TableCost | UnitCost))


def _steps(rank: RankMemory, spans: dict[Action, Span]) -> list[tuple[float, float]]:
    """Returns (time, bytes) steps; memory that a message frees shows with the next action."""
    moments = [(spans[moment.action], moment) for moment in rank.moments if moment.action in spans]
    return [step for span, moment in moments for step in ((span.start, moment.most), (span.end, moment.after))]


def _host_steps(rank: RankMemory, spans: dict[Action, Span]) -> list[tuple[float, float]]:
    """Returns (time, bytes) steps of what is on the rank's host."""
    moments = ((moment.action, sum(moment.on_host.values())) for moment in rank.moments)
    return [(spans[action].start, held) for action, held in moments if action in spans]


def _add_step(steps: list[tuple[float, float]], time: float, change: float) -> None:
    """Adds a change to (time, bytes) steps."""
    steps.append((time, (steps[-1][1] if steps else 0) + change))


class _Simulation:
    """The state of a running simulation. Actions come in an order in which all they wait for came before."""

    def __init__(self, schedule: Schedule, cost: CostModel) -> None:
        self.schedule, self.cost = schedule, cost
        self.free: list[float] = [0] * schedule.num_ranks  # when each rank ends its last compute action
        self.copied: list[float] = [0] * schedule.num_ranks  # when each rank ends its last copy to the host or back
        self.end: dict[Action, float] = {}
        self.arrival: dict[Action, float] = {}  # producer -> when its result is on the other rank, or copied
        self.posted: dict[Action, float] = {}
        self.line_free: dict[Channel, float] = {}
        self.spans: list[Span] = []
        self.memory: list[list[tuple[float, float]]] = [[] for _ in range(schedule.num_ranks)]
        self.host_memory: list[list[tuple[float, float]]] = [[] for _ in range(schedule.num_ranks)]

    def compute(self, action: Action) -> None:
        rank = self.schedule.placement[action.stage]
        start, lane = self.free[rank], OPERATIONS[action.op].lane
        for before in predecessors(action, self.schedule):
            # A copy is awaited by what computes with it.
            is_copy = lane is not Lane.COPIES and OPERATIONS[before.op].lane is Lane.COPIES
            here = self.schedule.placement[before.stage] == rank and not is_copy
            start = max(start, self.end[before] if here else self._arrival(before, rank))
        end = self.free[rank] = self.end[action] = start + self.cost.seconds(action)
        self.spans.append(Span(rank, action, start, end))
        if lane is Lane.COPIES:
            self.copied[rank] = max(end, self.copied[rank]) + self.cost.copy_seconds(action)
            self.arrival[action] = self.copied[rank]
        if self.schedule.trains(action.stage) and (step := activation_step(self.spans[-1], self.schedule, self.cost)):
            time, change = step
            _add_step(self.memory[rank], time, change)
            if lane is Lane.COPIES:
                _add_step(self.host_memory[rank], time, -change)
        if not self.schedule.is_lowered and (send := sending(action, self.schedule)):
            self.arrival[action], _ = self._transfer(send, end)

    def _arrival(self, before: Action, rank: int) -> float:
        """Returns when a result of another rank is here; those of a spread head travel on channels of their own."""
        if before in self.arrival:
            return self.arrival[before]
        source = self.schedule.placement[before.stage]
        return self.end[before] + result_seconds(self.cost, before, source, rank)

    def post(self, action: Action) -> None:
        """Notes when one end of a message is reached; at the second one the message leaves."""
        self.posted[action] = self.free[self.schedule.placement[action.stage]]
        if action.other_end not in self.posted:
            return
        send, receive = action.send, action.send.other_end
        self.end[receive], self.end[send] = self._transfer(send, max(self.posted[send], self.posted[receive]))
        for end in (send, receive):
            rank = self.schedule.placement[end.stage]
            self.spans.append(Span(rank, end, self.posted[end], self.end[end]))

    def _transfer(self, send: Action, ready: float) -> tuple[float, float]:
        """Returns when the message arrives, and when its channel is free again."""
        line = channel(send, self.schedule)
        start = max(ready, self.line_free.get(line, ready))
        if send.peer >= 0 and self.schedule.spreads_vocabulary:
            made = sent_result(send, self.schedule)
            return start + result_seconds(self.cost, made, line.source, line.destination), start
        occupied = self.cost.link_occupied(send, line.source, line.destination)
        self.line_free[line] = start + occupied
        return start + self.cost.link_seconds(send, line.source, line.destination), start + occupied
