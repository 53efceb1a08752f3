"""Reports each step of all ranks: the devices' utilisation, the phases, and the bytes sent."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.parallel import GpuMemory, RankGroup
from slipstream.pipeline import Pipeline
from slipstream.timeline import Timeline
from slipstream.training.config import Config
from slipstream.training.cut_advice import CutAdvice
from slipstream.training.data import TokenBatch
from slipstream.training.device_choice import share_of_gpu
from slipstream.training.metrics.allocator_watch import AllocatorWatch
from slipstream.training.metrics.device_peak import find_peak
from slipstream.training.metrics.disk_trouble import DiskTrouble
from slipstream.training.metrics.flops import FlopsMeter
from slipstream.training.metrics.phases import Phases
from slipstream.training.metrics.records import MetricsRecord, StartRecord, StepRecord, peak_memory
from slipstream.training.metrics.stragglers import Stragglers
from slipstream.training.metrics.trackers import Tracker, make_trackers
from slipstream.training.metrics.traffic import Traffic
from slipstream.training.run_folder import RunFolder
from slipstream.training.training_step import StepResult, compute_dtype
from slipstream.watchdog import counted_off


class Reporter:
    """Gathers what each rank measured of a step; the leading rank writes it. Every rank makes one."""

    def __init__(
        self,
        config: Config,
        pipe: Pipeline,
        device: torch.device,
        progress: Progress,
        sequence: tuple[float, float],
        resumed_after: int = 0,
        cut_advice: CutAdvice | None = None,
    ) -> None:
        """Finds the devices' peak and opens the trackers. Collective.

        Args:
            config: of the run.
            pipe: this rank's part of the pipeline.
            device: this rank's.
            progress: where lines are shown.
            sequence: the mean tokens of a sequence, and the mean number of sequences of a step.
            resumed_after: the steps before; 0 where the run begins.
            cut_advice: says whether another cut makes up for a slow rank.
        """
        self._config, self._pipe, self._progress = config, pipe, progress
        self._world = RankGroup(dist.group.WORLD)
        self._traffic = Traffic({axis: group for axis, group in pipe.axes.items() if axis != "pp"})
        # Of the leading rank, which writes them: counting takes seconds. None where the operations can't be counted.
        self._figures: FlopsMeter | None = None
        training, peak = config.training, find_peak(device, compute_dtype(config), share_of_gpu(config))
        if pipe.leads:
            try:
                length, number = map(round, sequence)
                counted = pipe.config, length, number, self._world.size, peak
                with counted_off("counting the model's operations"):
                    self._figures = FlopsMeter(*counted, pipe.trained_weights)
            except SlipstreamError as error:
                progress.say(f"FLOPs are not shown: {error}")
        self._disk = DiskTrouble(progress.warn)
        self._trackers: list[Tracker] = []  # none on ranks other than the first
        self._cut_advice = cut_advice
        self._stragglers, hosts = self._watch_for_stragglers()
        self._allocators = AllocatorWatch(self._world.gather(GpuMemory.now()))
        self.asked_to_stop = ""  # the signal that has asked any rank to stop
        self._num_tokens = 0  # of all steps
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether "auto" was trying
        if pipe.leads:
            settings, folder = config.model_dump(mode="json"), RunFolder(training.output)
            folder.listed.add(folder.metrics)
            if "tensorboard" in config.tracking.to:
                folder.listed.add_folder(folder.tensorboard)
            self._trackers = make_trackers(config.tracking.to, training.output, settings, resumed_after)
        self.write(StartRecord.now(resumed_after, hosts, device))
        if self._figures is not None:
            self.write(self._figures.run)

    def _watch_for_stragglers(self) -> tuple[Stragglers, list[str]]:
        """Returns what compares ranks of the same work, those at one place of the pipeline, and the host of each rank.

        Collective.
        """
        found = self._world.gather((self._pipe.rank, socket.gethostname()))
        peers = [[rank for rank, (place, _) in enumerate(found) if place == mine] for mine, _ in found]
        self._places, hosts = [place for place, _ in found], [host for _, host in found]
        return Stragglers(peers, hosts), hosts

    def write(self, record: MetricsRecord) -> None:
        """Writes a record to the metrics file and to every tracker."""
        for tracker in self._trackers:
            with self._disk.tolerated(tracker.name):
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
            result: what the step computed, and how long it took.
            data_seconds: the time before it, in which its batch was prepared.
            batch: the rows of this replica.
            timeline: what ran when.
            trial: whether "auto" was still to plan what to run.
            asked_to_stop: the signal that asked this rank to stop, if one did; all ranks then have it as an attribute.
        """
        is_first = self._pipe.rank == self._pipe.axes["tp"].rank == 0  # one rank of each replica
        documents = batch.document_lengths() if is_first else []
        computed = Phases.computed(timeline, self._pipe.rank, result.optimizer_seconds, data_seconds)
        sent_now, on_gpu = self._traffic.of_step(self._pipe.bytes_sent), GpuMemory.now()
        mine = peak_memory(), sent_now, documents, asked_to_stop, computed, on_gpu
        memory, sent, lengths, asked, phases, gpus = zip(*self._world.gather(mine), strict=True)
        self.asked_to_stop = next(filter(None, asked), "")
        seconds = result.seconds
        figures, documents = None, [length for each in lengths for length in each]
        slow = [] if trial else self._describe_slow(step, phases)
        if self._figures is not None:
            figures = self._figures.of_step(seconds, *self._pipe.last_step, documents)
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
            bytes_sent={axis: sum(each[axis] for each in sent) for axis in sent_now},
            trial=trial or None,
            rank_phases=[{name: round(each, 6) for name, each in rank.items()} for rank in phases],
            rewards=result.rewards,
            bad=result.bad,
            stragglers=slow or None,
            gpu_memory=list(gpus) if any(gpus) else None,
        )
        for line in [*slow, *self._allocators.lines(step, gpus, trial)]:
            self._progress.warn(line)
        self.write(record)
        self._seconds[trial].append(seconds)
        self._num_tokens += sum(documents)
        return record

    def _describe_slow(self, step: int, phases: Sequence[dict[str, float]]) -> list[str]:
        """Returns a line for each rank that has become slow, and on the leader whether another cut makes up for it."""
        lines = []
        for each in self._stragglers.add(step, phases):
            lines.append(each.line)
            if self._pipe.leads and self._cut_advice is not None:
                lines += self._cut_advice.lines(each.rank, self._places[each.rank], each.slowness)
        return lines

    def close(self) -> None:
        """Says how long a whole training takes at the measured rate, and closes the trackers."""
        seconds = self._seconds[False] or self._seconds[True]
        if self._figures is not None and seconds:
            tokens = self._config.tracking.tokens or self._num_tokens
            time = self._figures.time_to_train(tokens, statistics.median(seconds))
            self._progress.say(time.describe(tokens))
        for tracker in self._trackers:
            with self._disk.tolerated(tracker.name):
                tracker.close()
