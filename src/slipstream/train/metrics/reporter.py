"""Reports each step of all ranks: the devices' utilisation, the phases, and the bytes sent."""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slipstream.errors import SlipstreamError
from slipstream.model import recompute_advice
from slipstream.parallel import GpuMemory, RankGroup, expands_segments, fragmentation_advice
from slipstream.pipeline import Pipeline
from slipstream.planner.joint import JointPlan, SlicedUnits
from slipstream.planner.joint.slowed_step import SlowedStep
from slipstream.timeline import Timeline
from slipstream.train.config import Config
from slipstream.train.data import TokenBatch
from slipstream.train.device_choice import share_of_gpu
from slipstream.train.metrics.flops import FlopsMeter, find_peak
from slipstream.train.metrics.records import (
    ChangeRecord,
    MetricsRecord,
    Phases,
    StartRecord,
    StepRecord,
    Tracker,
    last_of_before,
    make_trackers,
    peak_memory,
)
from slipstream.train.run_context import RunContext
from slipstream.train.training_step import StepResult, compute_dtype
from slipstream.units import bytes_text, long_duration_text, times_text
from slipstream.watchdog import watchdog_paused


class Reporter:
    """Gathers each rank's measurements of a step; the leading rank writes them. Every rank makes one."""

    def __init__(
        self,
        run: RunContext,
        pipe: Pipeline,
        sequence: tuple[float, float],
        resumed_after: int = 0,
        plan: JointPlan | None = None,
    ) -> None:
        """Finds the devices' peak and opens the trackers. Collective.

        Args:
            run: of this rank.
            pipe: this rank's part of the pipeline.
            sequence: the mean tokens of a sequence, and the mean number of sequences of a step.
            resumed_after: the steps before; 0 where the run begins.
            plan: of the rows that the run trains on, where it has planned them by itself.
        """
        config = run.config
        self._run = run
        self._pipe = pipe
        self._plan = plan
        axes = {axis: group for axis, group in pipe.axes.items() if axis != "pp"}
        summed = {"gradients": pipe.copies, "expert_gradients": pipe.expert_copies}  # perhaps over several axes
        joined = {group: name for name, group in reversed(summed.items()) if group not in axes.values()}
        self._traffic = Traffic(axes | {name: group for group, name in joined.items() if group.size > 1})
        # Of the leading rank, which writes them: counting takes seconds. None where the operations can't be counted.
        self._figures: FlopsMeter | None = None
        peak = find_peak(run.device, compute_dtype(config), share_of_gpu(config))
        if pipe.leads:
            try:
                length, rows = map(round, sequence)
                with watchdog_paused("counting the model's operations"):
                    self._figures = FlopsMeter(pipe.config, length, rows, run.world.size, peak, pipe.trained_weights)
            except SlipstreamError as error:
                run.progress.say(f"FLOPs are not shown: {error}")
        self._trackers: list[Tracker] = []  # none on ranks other than the first
        repeated, self._stood_since = 0, 0.0
        self._stragglers, hosts = self._watch_for_stragglers()
        self._allocators = AllocatorWatch(run.world.gather(GpuMemory.now()), config.memory.recompute)
        self.asked_to_stop = ""  # the signal that has asked any rank to stop
        self._num_tokens = 0  # all steps together
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether "auto" was trying settings
        if pipe.leads:
            settings = config.model_dump(mode="json")
            folder = run.folder
            if resumed_after:
                repeated, self._stood_since = last_of_before(folder.metrics, resumed_after)
            folder.listed.add(folder.metrics)
            if "tensorboard" in config.tracking.to:
                folder.listed.add_folder(folder.tensorboard)
            self._trackers = make_trackers(config.tracking.to, folder.path, settings, resumed_after)
        mesh = {axis: group.size for axis, group in pipe.axes.items()}
        self.write(StartRecord.now(resumed_after, hosts, run.device, mesh, repeated))
        if self._figures is not None:
            self.write(self._figures.run)

    def _watch_for_stragglers(self) -> tuple[Stragglers, list[str]]:
        """Returns a comparison of ranks of the same work, at one place of the pipeline, and the host of each rank.

        Collective.
        """
        gathered = self._run.world.gather((self._pipe.rank, socket.gethostname()))
        peers = [[rank for rank, (place, _) in enumerate(gathered) if place == mine] for mine, _ in gathered]
        self._places = [place for place, _ in gathered]
        hosts = [host for _, host in gathered]
        return Stragglers(peers, hosts), hosts

    def write(self, record: MetricsRecord) -> None:
        """Writes a record to the metrics file and to every tracker."""
        for tracker in self._trackers:
            with self._run.writes.of(tracker.name):
                tracker.write(record)

    def report(
        self,
        step: int,
        result: StepResult,
        data_seconds: float,
        batch: TokenBatch,
        timeline: Timeline,
        trial: bool,
        asked_to_stop: str = "",
    ) -> StepRecord:
        """Writes and returns the record of a step. Collective.

        Args:
            step: the number of the step, from 1.
            result: the step's loss and norm, and how long it took.
            data_seconds: the time before it, in which its batch was prepared.
            batch: the rows of this replica.
            timeline: of the step's actions.
            trial: whether "auto" was still to plan.
            asked_to_stop: the signal that asked this rank to stop, if one did; all ranks then have it as an attribute.
        """
        documents = batch.document_lengths() if self._pipe.leads_replica else []
        computed = Phases.computed(timeline, self._pipe.rank, result.optimizer_seconds, data_seconds)
        sent_now = self._traffic.of_step(self._pipe.bytes_sent)
        on_gpu = GpuMemory.now()
        mine = peak_memory(), sent_now, documents, asked_to_stop, computed, on_gpu
        memory, sent, lengths, asked, phases, gpus = zip(*self._run.world.gather(mine), strict=True)
        self.asked_to_stop = next(filter(None, asked), "")
        seconds = result.seconds
        figures = None
        documents = [length for of_rank in lengths for length in of_rank]
        slow = [] if trial else self._describe_slow(step, phases)
        if self._figures is not None:
            ran = self._pipe.last_step
            figures = self._figures.of_step(seconds, ran.layout, ran.microbatches, documents)
        record = StepRecord(
            step=step,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            step_seconds=seconds,
            tokens=sum(documents),
            tokens_per_second=sum(documents) / seconds,
            idle_fraction=timeline.idle_fraction,
            peak_memory=list(memory),
            figures=figures,
            phases=Phases.of(timeline, result.optimizer_seconds, data_seconds),
            bytes_sent={axis: sum(sent_bytes[axis] for sent_bytes in sent) for axis in sent_now},
            trial=trial or None,
            rank_phases=[{name: round(seconds, 6) for name, seconds in rank.items()} for rank in phases],
            rewards=result.rewards,
            bad=result.bad,
            stragglers=slow or None,
            gpu_memory=list(gpus) if any(gpus) else None,
        )
        for line in [*slow, *self._allocators.lines(step, gpus, trial)]:
            self._run.progress.warn(line)
        if self._stood_since:
            self.write(ChangeRecord(round(time.time() - self._stood_since, 3)))
            self._stood_since = 0.0
        self.write(record)
        self._seconds[trial].append(seconds)
        self._num_tokens += sum(documents)
        return record

    def _describe_slow(self, step: int, phases: Sequence[dict[str, float]]) -> list[str]:
        """Returns a line for each rank that has become slow, and on the leader whether another cut makes up for it."""
        lines = []
        for slow in self._stragglers.add(step, phases):
            lines.append(slow.line)
            if self._pipe.leads:
                lines += cut_advice(self._run.config, self._plan, slow.rank, self._places[slow.rank], slow.slowness)
        return lines

    def close(self) -> None:
        """Says how long a whole training takes at the measured rate, and closes the trackers."""
        seconds = self._seconds[False] or self._seconds[True]
        if self._figures is not None and seconds:
            tokens = self._run.config.tracking.tokens or self._num_tokens
            time = long_duration_text(tokens / self._figures.run.tokens_per_step * statistics.median(seconds))
            self._run.progress.say(f"{tokens:,} tokens take {time} at this rate")
        for tracker in self._trackers:
            with self._run.writes.of(tracker.name):
                tracker.close()


_LEAST_GAIN = 0.03  # the least share of a step's time above noise


def cut_advice(config: Config, plan: JointPlan | None, rank: int, place: int, slowness: float) -> list[str]:
    """Returns a line about the best cut for a rank at a place of the pipeline that computes so many times as long.

    There is none where nothing is known: it needs the costs of the run's own plan, with a whole head, and without a
    memory limit, which another cut might break.
    """
    if plan is None or plan.costs is None or plan.head == "spread" or config.memory.limit is not None:
        return []
    units = SlicedUnits(plan.costs, plan.slices, plan.costs.link(plan.schedule.num_ranks), plan.recompute)
    slowed = SlowedStep(units, plan.schedule, {place: slowness})
    seconds = slowed.seconds(plan.partition)
    (cut, best) = slowed.best_cut(plan.partition)
    if config.parallel.data > 1:  # the other replicas wait for the slow one, but lose by the cut
        best = max(best, SlowedStep(units, plan.schedule, {}).seconds(cut))
    slow = f"rank {rank} computes {slowness:.2g} times as slowly"
    if best > (1 - _LEAST_GAIN) * seconds:
        return [f"{slow}: no other cut would save {_LEAST_GAIN:.0%} of the step's time"]
    layers, tokens = (",".join(f"{size:g}" for size in numbers) for numbers in (cut, plan.slices))
    return [
        f"{slow}: the cut {layers} would take {best / seconds:.2f} of the step's time; to go on with it from a "
        f"checkpoint, type --checkpoint.resume=latest --pipeline.schedule={config.folder.planned_schedule} "
        f"--pipeline.slices=[{tokens}] --pipeline.partition=[{layers}]"
    ]


_FACTOR = 1.3  # times the peers' median
_STEPS = 20  # steps of a median, and the medians in a row that have to be high
# A step has to be slower by these seconds: below them the noise of a clock and a scheduler counts.
_LEAST_SECONDS = 0.005


class Straggler(NamedTuple):
    """A rank that has become slow, how many times as long it computes as it should, and a line about that."""

    rank: int
    slowness: float
    line: str


class Stragglers:
    """Compares each rank with those that do the same work: the same stages in other replicas, the same layers by tensor
    ranks; without such peers, a rank with its own past.

    A step alone says little on a machine that others use. A rank is named when the median of its last 20 steps is 1.3
    times that of its peers, in 20 steps in a row, and once until it has caught up.
    """

    def __init__(self, peers: Sequence[Sequence[int]], hosts: Sequence[str]) -> None:
        """`peers` has for each rank the ranks that do the same work, with itself; `hosts` the machine of each."""
        self._peers = peers
        self._hosts = hosts
        self._last = [deque[dict[str, float]](maxlen=_STEPS) for _ in peers]
        self._usual: list[float] = []  # each rank's own seconds, once known
        self._in_a_row = [0] * len(peers)

    def add(self, step: int, phases: Sequence[dict[str, float]]) -> list[Straggler]:
        """Takes the seconds of a step's phases on every rank, without waits; returns the ranks that have become
        slow."""
        for last, measured in zip(self._last, phases, strict=True):
            last.append(measured)
        if len(self._last[0]) < _STEPS:
            return []
        medians = [statistics.median(sum(by_phase.values()) for by_phase in last) for last in self._last]
        if not self._usual:
            self._usual = medians
        stragglers = []
        for rank, mine in enumerate(medians):
            usual = self._of_peers(rank, medians)
            is_slow = mine > _FACTOR * usual and mine - usual > _LEAST_SECONDS
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if is_slow else 0
            if self._in_a_row[rank] == _STEPS:
                stragglers.append(Straggler(rank, mine / usual, self._describe(rank, step, mine, usual)))
        return stragglers

    def _of_peers(self, rank: int, medians: Sequence[float]) -> float:
        others = [medians[peer] for peer in self._peers[rank] if peer != rank]
        if others:
            return statistics.median(others)
        # All stages of a machine that has become busier are slower alike, and none of them is to blame.
        pace = statistics.median(now / before for now, before in zip(medians, self._usual, strict=True))
        return self._usual[rank] * max(1.0, pace)

    def _describe(self, rank: int, step: int, mine: float, usual: float) -> str:
        others = [peer for peer in self._peers[rank] if peer != rank]
        phase = max(self._last[rank][-1], key=lambda name: self._excess(rank, name, others))
        against = f"its peers' ({', '.join(f'rank {peer}' for peer in others)})" if others else "its own before"
        return (
            f"step {step}: rank {rank} ({self._hosts[rank]}) is slow in {phase.replace('_', ' ')}: it computes for "
            f"{mine:.3f} s a step, {mine / usual:.2f} times {against}"
        )

    def _excess(self, rank: int, phase: str, others: Sequence[int]) -> float:
        """Returns by how much a phase is longer than the peers'; alone, how long it is."""
        mine = statistics.median(by_phase.get(phase, 0.0) for by_phase in self._last[rank])
        theirs = [statistics.median(by_phase.get(phase, 0.0) for by_phase in self._last[peer]) for peer in others]
        return mine - (statistics.median(theirs) if theirs else 0.0)


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


class Traffic:
    """The bytes that this rank sends in collectives, step by step.

    A collective is taken to send as much as a ring of n ranks does, which is the least possible: (n-1)/n of the bytes
    of a gathered or scattered tensor, and twice that in an all-reduce, which does both (PTD-P section 3.3.1). In an
    all-to-all it sends as much as it receives.
    """

    def __init__(self, axes: Mapping[str, RankGroup]) -> None:
        """Begins to count; `axes` are groups by name, such as {"dp": ..., "tp": ...}."""
        self._axes = dict(axes)
        self._before = {name: _ring_bytes(group) for name, group in axes.items()}

    def of_step(self, pipeline_bytes: int) -> dict[str, int]:
        """Returns the bytes by axis since the last call; the transport of the pipeline has counted its own."""
        now = {name: _ring_bytes(group) for name, group in self._axes.items()}
        sent = {name: round(now[name] - self._before[name]) for name in now}
        self._before = now
        return {"pp": pipeline_bytes, **sent}


def _ring_bytes(group: RankGroup) -> float:
    """Returns the bytes that this rank has sent in all collectives of the group so far."""
    part = (group.size - 1) / group.size
    # Of an all-to-all only the numbers for other ranks are counted.
    shares = {"all_reduce": 2 * part, "all_to_all": 1}
    return sum(shares.get(name, part) * size for name, size in group.payload.items())
