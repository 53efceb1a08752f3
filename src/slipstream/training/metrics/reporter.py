"""What is measured of each step, on all ranks, and told: the device's use, where time goes, what is sent."""

from __future__ import annotations

import statistics

import torch

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.pipeline import Pipeline
from slipstream.timeline import Timeline
from slipstream.training.config import Config
from slipstream.training.data import TokenBatch
from slipstream.training.metrics.device_peak import find_peak
from slipstream.training.metrics.flops import FlopsMeter, document_lengths
from slipstream.training.metrics.phases import Phases
from slipstream.training.metrics.records import MetricsRecord, StepRecord, gather, peak_memory
from slipstream.training.metrics.summary import describe_time
from slipstream.training.metrics.trackers import Trackers, make_trackers
from slipstream.training.metrics.traffic import Traffic, add_up
from slipstream.training.training_step import StepResult, compute_dtype


class Reporter:
    """Every rank has one, and hands over what it knows of each step; the leader writes."""

    def __init__(
        self, config: Config, pipe: Pipeline, device: torch.device, progress: Progress, resumed_after: int = 0
    ) -> None:
        """Collective. The run was resumed after some step, or begins."""
        self._config, self._pipe, self._progress = config, pipe, progress
        self._traffic = Traffic({axis: group for axis, group in pipe.axes.items() if axis != "pp"})
        self._figures = self._make_figures(device)
        self._trackers = Trackers()
        self._seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether "auto" was trying
        if pipe.leads:
            folder, settings = config.training.output, config.model_dump(mode="json")
            self._trackers = make_trackers(config.tracking.to, folder, settings, resumed_after)
        if self._figures is not None:
            self.write(self._figures.run)

    def write(self, line: MetricsRecord) -> None:
        """To the file of metrics, and wherever else figures go."""
        self._trackers.write(line)

    def report(
        self,
        step: int,
        updated: StepResult,
        seconds: float,
        data_seconds: float,
        lr: float,
        batch: TokenBatch,
        timeline: Timeline,
        trial: bool = False,
    ) -> StepRecord:
        """Collective: a step of so many seconds, on this replica's batch; a trial where "auto" was still trying."""
        is_first = self._pipe.rank == self._pipe.axes["tp"].rank == 0  # one rank of each replica
        mine = (
            peak_memory(),
            self._traffic.of_step(self._pipe.bytes_sent),
            document_lengths(batch.document_ids) if is_first else [],
        )
        memory, sent, lengths = zip(*gather(mine), strict=True)
        training = self._config.training
        figures = None
        if self._figures is not None:
            documents = [length for each in lengths for length in each]
            figures = self._figures.of_step(seconds, *self._pipe.last_step, documents)
        line = StepRecord(
            step=step,
            loss=updated.loss,
            lr=lr,
            grad_norm=updated.grad_norm,
            step_seconds=seconds,
            tokens_per_second=training.batch_size * training.seq_len / seconds,
            idle_fraction=timeline.idle_fraction,
            peak_memory=list(memory),
            figures=figures,
            phases=Phases.of(timeline, updated.optimizer_seconds, data_seconds),
            bytes_sent=add_up(sent),
            trial=trial or None,
        )
        self.write(line)
        self._seconds[trial].append(seconds)
        return line

    def close(self) -> None:
        """At the end: how long a whole training takes at this rate."""
        seconds = self._seconds[False] or self._seconds[True]
        if self._figures is not None and seconds:
            num_steps = sum(map(len, self._seconds.values()))
            tokens = self._config.tracking.tokens or num_steps * self._figures.tokens_per_step
            time = self._figures.time_to_train(tokens, statistics.median(seconds))
            self._progress.say(describe_time(tokens, time))
        self._trackers.close()

    def _make_figures(self, device: torch.device) -> FlopsMeter | None:
        """None where the model's operations can't be counted."""
        training, pipe = self._config.training, self._pipe
        peak = find_peak(device, compute_dtype(self._config))
        num_devices = len(gather(None))
        try:
            return FlopsMeter(pipe.config, training.seq_len, training.batch_size, num_devices, peak)
        except SlipstreamError as error:
            self._progress.say(f"no FLOPs are shown: {error}")
            return None
