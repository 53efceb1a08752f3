"""Decides which steps run as CUDA graphs, and records them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from slipstream.comm import FakeTransport, Transport
from slipstream.keyed_draws import drawing
from slipstream.model import PipelineStage, Tensors
from slipstream.options import host_share
from slipstream.parallel import Ranks
from slipstream.pipeline.cut_batch import SplitBatch
from slipstream.pipeline.execution.action_graphs import (
    ActionRunner,
    Computation,
    CountedDraws,
    CUDAGraphs,
    FixedGradients,
    RecordedStep,
    Recorder,
    signature,
)
from slipstream.pipeline.execution.executor import Executor, RankStep
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.schedule import Action, Schedule
from slipstream.watchdog import watchdog_paused

_log = logging.getLogger(__name__)
# The first of these equal steps warms up. The last one, before the recording, finds calls that wait for the GPU.
_EAGER_STEPS = 2

MakeExecutor = Callable[[int, Transport, Callable[[int], None]], Executor]


def recorder_of(device: torch.device) -> Recorder | None:
    """Returns the recorder of a device's kernels; None where there is none."""
    return CUDAGraphs(device) if device.type == "cuda" else None


class StepGraphs:
    """The graphs of this process's ranks in the step that repeats: of one schedule, and of batches of one shape.

    The first steps of a kind run eagerly. Then the actions of each rank are recorded, with made-up messages, without
    running; from then on they are replayed. Steps of another kind run eagerly until they repeat in turn.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        make_executor: MakeExecutor,
        device: torch.device,
        refusal: str | None,
    ) -> None:
        """`refusal` says why this pipeline's steps can't be recorded at all."""
        self._stages = stages
        self._make_executor = make_executor
        self._device = device
        has_none = f"{device.type} has none" if recorder_of(device) is None else None
        # All ranks get the same answer. A step or a stage may still refuse later.
        self.may_record = (has_none or refusal) is None
        obstacles = (stage.graph_obstacle for stage in stages.values())
        self.refusal = has_none or refusal or next(filter(None, obstacles), None)
        self.gradients = FixedGradients([p for stage in stages.values() for p in stage.model.parameters()])
        self._schedule: Schedule | None = None  # schedule of the last step
        self._kind: tuple[object, ...] = ()  # batch signature and modes of the last step
        self._num_alike = 0
        self._recorded: list[RecordedStep] = []
        self._draws = CountedDraws(device)  # draws of the last eager step
        self._num_seeds: dict[Action, int] = {}  # seeds per action of the last eager step
        self._said: set[str] = set()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # graphs built on another stream meet this one in the first step, where autograd waits as it must
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)

    @property
    def num_recorded(self) -> int:
        """The number of actions that are replayed."""
        return sum(len(step) for step in self._recorded)

    def __str__(self) -> str:
        return f"{self.num_recorded} actions recorded" if self.refusal is None else f"none, as {self.refusal}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs a step on a stream that can be recorded."""
        if self._stream is None or self.refusal is not None:
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            yield
        outside.wait_stream(self._stream)

    def of_step(self, ranks: Sequence[int], schedule: Schedule, batch: SplitBatch) -> list[RankStep]:
        """Returns how each of these ranks runs a step."""
        reason = self.refusal or _refusal_of_step(schedule, batch)
        if reason is not None:
            self._say(reason)
            return [RankStep() for _ in ranks]
        self._count(schedule, batch)
        if self._num_alike > _EAGER_STEPS and not self._recorded:
            self._record(ranks, schedule, batch)
        if self._recorded:
            self.gradients.begin()
            return [RankStep(step.replay, step.begin(batch), step.moves) for step in self._recorded]
        run: ActionRunner | None = self._watched if self._num_alike == _EAGER_STEPS else None
        return [RankStep(run) for _ in ranks]

    def _count(self, schedule: Schedule, batch: SplitBatch) -> None:
        """Counts the steps of this kind, in a row; another kind's graphs are dropped."""
        kind = signature(batch), self._modes()
        if schedule is not self._schedule or kind != self._kind:
            self._schedule = schedule
            self._kind = kind
            self._num_alike = 0
            self._recorded = []
        self._num_alike += 1

    def note_gradients(self) -> None:
        """Notes which parameters have gradients, to which graphs are to add."""
        if not self._recorded and self.refusal is None:
            self.gradients.note()

    def _record(self, ranks: Sequence[int], schedule: Schedule, batch: SplitBatch) -> None:
        """Records the actions of these ranks, or says why it can't."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self.gradients.begin()
        # A graph casts the weights itself: casts cached before an update would be stale.
        torch.clear_autocast_cache()
        try:
            with watchdog_paused("recording CUDA graphs"):
                self._recorded = [self._recorded_rank(rank, schedule, batch) for rank in ranks]
        except RuntimeError as error:
            self._recorded = []
            self._give_up(next(iter(str(error).splitlines()), type(error).__name__))
        # The casts made while recording live in the graph's memory, and no other code may use them.
        torch.clear_autocast_cache()

    def _recorded_rank(self, rank: int, schedule: Schedule, batch: SplitBatch) -> RecordedStep:
        # Each rank has its own recorder, as other ranks' actions may come between its own.
        recorder = recorder_of(self._device)
        assert recorder is not None
        step = RecordedStep(recorder, batch, self._device, self._num_seeds)
        executor = self._make_executor(rank, FakeTransport(self._device), _nothing)
        for _ in executor.start(schedule, step.batch, step.record, step.state, step.moves):
            raise RuntimeError(f"rank {rank} waits for another rank's message while it is recorded")
        executor.finish()
        return step

    def _watched(self, action: Action, inputs: Tensors, compute: Computation) -> Tensors:
        """Runs an action, and gives graphs up where it waits for the GPU or draws on the host: the value there may be
        another one in another step."""
        before = self._draws.num_seeds
        with drawing(self._draws), _synchronizations(self._device) as places:
            outputs = compute(inputs)
        self._num_seeds[action] = self._draws.num_seeds - before
        if places and self.refusal is None:
            self._give_up(f"the model waits for the GPU ({places[0]})")
        if self._draws.are_on_host and self.refusal is None:
            self._give_up("the model draws random numbers on the host")
        return outputs

    def _modes(self) -> tuple[object, ...]:
        """Returns the further state that a graph depends on: modes, and where parameters and buffers lie."""
        models = [stage.model for stage in self._stages.values()]
        tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return *autocast, *(model.training for model in models), *((t.data_ptr(), t.requires_grad) for t in tensors)

    def _give_up(self, reason: str) -> None:
        self.refusal = reason
        self._say(reason)

    def _say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("runs without CUDA graphs: %s", reason)


def graph_refusal(ranks: Ranks, options: PipelineOptions) -> str | None:
    """Returns why the steps of a pipeline can't be recorded as CUDA graphs; None where they may."""
    if ranks.tensor.size > 1:
        return "ranks of the tensor axis exchange tensors inside of layers"
    if ranks.sharing.size > 1 and ranks.sharing.gpu_backend != "nccl":
        return "ranks that share slices exchange tensors by gloo, through the host; NCCL's exchanges can be recorded"
    if ranks.experts.size > 1:
        return "how many tokens go to each expert is read on the host"
    if host_share(options.memory.context):
        return "keys and values come and go between the host and the GPU"
    if options.parallel.shard == "parameters":
        return "sharded parameters lie elsewhere in every step"
    if options.loss_fn is not None:
        return "loss_fn may be any code"
    return "routers add to the loss" if options.router_loss != "none" else None


def _nothing(_: int) -> None:
    """Does nothing."""


def _refusal_of_step(schedule: Schedule, batch: SplitBatch) -> str | None:
    if schedule.spreads_vocabulary:
        return "the vocabulary is spread over ranks"
    if batch.sequences:
        return "the loss is a function of whole sequences"
    if any(piece.document_start is not None for pieces in batch.slices for piece in pieces):
        return "rows of several documents have other masks in every step"
    return None


@contextmanager
def _synchronizations(device: torch.device) -> Iterator[list[str]]:
    """Collects where calls wait for the GPU, as file:line."""
    places: list[str] = []
    if device.type != "cuda":
        yield places
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = (warning for warning in caught if "called a synchronizing" in str(warning.message))
    places += [f"{warning.filename}:{warning.lineno}" for warning in waits]
