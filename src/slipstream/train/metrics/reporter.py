"""Reports each step of all ranks: the devices' utilisation, the phases, and the bytes sent."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

from slipstream.errors import SlipstreamError
from slipstream.parallel import GpuMemory
from slipstream.pipeline import Pipeline
from slipstream.planner.joint import JointPlan
from slipstream.timeline import Timeline
from slipstream.train.data import TokenBatch
from slipstream.train.device_choice import share_of_gpu
from slipstream.train.metrics.allocator_watch import AllocatorWatch
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
from slipstream.train.metrics.stragglers import Stragglers, cut_advice
from slipstream.train.metrics.traffic import Traffic
from slipstream.train.run_context import RunContext
from slipstream.train.training_step import StepResult, compute_dtype
from slipstream.units import long_duration_text
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
        self._trackers: list[Tracker] = []  # empty on all ranks but the first
        repeated = 0
        self._stood_since = 0.0
        self._stragglers, hosts = self._watch_for_stragglers()
        self._allocators = AllocatorWatch(run.world.gather(GpuMemory.now()), config.memory.recompute)
        self.asked_to_stop = ""  # the signal that asked any rank to stop
        self._num_tokens = 0  # all steps together
        # Seconds of steps; True: steps in which "auto" tried settings.
        self._seconds: dict[bool, list[float]] = {False: [], True: []}
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
        """Reports how long a whole training takes at the measured rate, and closes the trackers."""
        seconds = self._seconds[False] or self._seconds[True]
        if self._figures is not None and seconds:
            tokens = self._run.config.tracking.tokens or self._num_tokens
            time = long_duration_text(tokens / self._figures.run.tokens_per_step * statistics.median(seconds))
            self._run.progress.say(f"{tokens:,} tokens take {time} at this rate")
        for tracker in self._trackers:
            with self._run.writes.of(tracker.name):
                tracker.close()
