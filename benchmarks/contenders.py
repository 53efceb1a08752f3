"""What is compared: transformers' model in one process and in replicas, context parallelism, PyTorch's pipelines, and
Slipstream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from benchmarks.action_times import ActionTimes
from benchmarks.peers import mean_loss, model_config, torch_pipeline, use_checkpoints, whole_model
from slipstream import Pipeline, Runtime, Schedule, make_mesh, simulate
from slipstream.timeline import Timeline

CUT = [4, 4]
INTERLEAVED_CUT = [2, 2, 2, 2]
_SAMPLED = 2  # steps whose actions' times are compared with a plan


def tokens(config: PretrainedConfig, batch: int, length: int) -> Tensor:
    """Returns random tokens, which are inputs and unshifted targets."""
    return torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


def shifted(inputs: Tensor) -> Tensor:
    """Returns targets for the peers' loss: the last token of a row predicts nothing."""
    return torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], -100)], dim=1)


class WholeModel:
    """A contender of which each process has all weights."""

    model: nn.Module

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def report(self) -> None:
        return None


class Unsliced(WholeModel):
    """transformers' model in one process, one sequence after the other.

    With `checkpoints` what enters a layer is saved for its backward, and the rest is computed again; `on_host`: torch's
    save_on_cpu moves what is saved to host memory.
    """

    def __init__(
        self, config: PretrainedConfig, batch: int, length: int, checkpoints: bool = False, on_host: bool = False
    ) -> None:
        self.inputs = tokens(config, batch, length)
        self.model = whole_model(config)
        if checkpoints:
            use_checkpoints(self.model)
        self._saving: Callable[[], AbstractContextManager[object]] = save_on_cpu if on_host else nullcontext

    def step(self) -> float:
        return sum(self._add(row) for row in self.inputs.split(1))

    def _add(self, row: Tensor) -> float:
        with self._saving():
            logits = self.model(input_ids=row, use_cache=False).logits
            loss = mean_loss(logits, shifted(row)) / len(self.inputs)
        loss.backward()
        return float(loss.detach())


class Peer:
    """torch.distributed.pipelining as a contender."""

    def __init__(
        self,
        schedule: str,
        num_microbatches: int,
        batch: int,
        length: int,
        config: PretrainedConfig | None = None,
    ) -> None:
        """`config` is of a model of as many layers as the benchmarks' Llama, which is the default."""
        config = config or model_config(length)
        inputs = tokens(config, batch, length)
        cut = INTERLEAVED_CUT if "interleaved" in schedule else CUT
        self._step, self._parameters = torch_pipeline(schedule, config, cut, num_microbatches, inputs, shifted(inputs))

    def step(self) -> float | None:
        return self._step()

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._parameters

    def report(self) -> None:
        return None


class Replicas(WholeModel):
    """PyTorch's DistributedDataParallel: each process has a part of the sequences, one after the other, and they sum
    their gradients."""

    def __init__(self, config: PretrainedConfig, batch: int, length: int) -> None:
        each = batch // dist.get_world_size()
        self.rows = tokens(config, batch, length).split(each)[dist.get_rank()].split(1)
        self.model = DistributedDataParallel(whole_model(config))

    def step(self) -> float:
        with self.model.no_sync():
            loss = sum(self._add(row) for row in self.rows[:-1])
        total = torch.tensor(loss + self._add(self.rows[-1]))
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _add(self, row: Tensor) -> float:
        loss = mean_loss(self.model(input_ids=row, use_cache=False).logits, shifted(row)) / len(self.rows)
        loss.backward()
        return float(loss.detach())


class HeadsForTokens(WholeModel):
    """Context parallelism by torch and transformers alone: each process has a part of every sequence's tokens and all
    weights; in attention, all tokens of a part of the heads. They sum their gradients at the end."""

    NAME = "heads for tokens"

    def __init__(self, config: PretrainedConfig, batch: int, length: int) -> None:
        AttentionInterface.register(self.NAME, _attend_with_own_heads)
        AttentionMaskInterface.register(self.NAME, lambda *args, **kwargs: None)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=self.NAME)
        size, rank = dist.get_world_size(), dist.get_rank()
        whole = tokens(config, batch, length)
        self.rows = whole.split(1)
        self.mine = slice(rank * length // size, (rank + 1) * length // size)
        self.positions = torch.arange(length)[None, self.mine]
        self.num_targets = batch * (length - 1)

    def step(self) -> float:
        total = torch.tensor(sum(self._add(row) for row in self.rows))
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
            gradient.copy_(summed)
        dist.all_reduce(total)
        return float(total)

    def _add(self, row: Tensor) -> float:
        logits = self.model(input_ids=row[:, self.mine], position_ids=self.positions, use_cache=False).logits
        targets = shifted(row)[:, self.mine].flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / self.num_targets
        loss.backward()
        return float(loss.detach())


def _attend_with_own_heads(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends with a part of the heads to all tokens; takes and returns all heads of a part of the tokens."""
    packed = torch.stack([query, key, value])  # (3, batch, heads, tokens of this rank, head size)
    query, key, value = _exchange(packed, split=2, join=3)
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=kwargs.get("scaling"))
    return _exchange(output, split=2, join=1).transpose(1, 2).contiguous(), None


def _exchange(x: Tensor, split: int, join: int) -> Tensor:
    """Sends each rank its part of a dimension, and joins what all have sent along another."""
    parts = torch.stack(x.chunk(dist.get_world_size(), split)).contiguous()
    received = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)
    return torch.cat(received.unbind(0), join)


@dataclass(frozen=True)
class PlannedStep:
    """What a plan from measured costs chose and predicted.

    Args:
        seconds: the step that was predicted before the first one ran.
        with_own_times: the same order simulated with the times that its actions took in the run: what is left of the
            error then isn't that of the measured costs.
        ideal: all work divided by the ranks, by the measured costs.
        table: the plan against the best of the other placements.
    """

    seconds: float
    with_own_times: float
    ideal: float
    table: str


@dataclass(frozen=True)
class OwnReport:
    """How Slipstream ran its last step."""

    timeline: Timeline
    schedule: Schedule
    order: str
    slices: list[int]
    layers: list[float]
    planned: PlannedStep | None


class Ours:
    """Slipstream as a contender, on one pipeline, or on a mesh where settings give the sizes of its axes; with "auto"
    it has chosen before its first step counts."""

    def __init__(self, config: PretrainedConfig, batch: int, length: int, settings: Mapping[str, Any]) -> None:
        given = dict(settings) | ({"mesh": make_mesh(**settings["mesh"])} if "mesh" in settings else {})
        given = {"seq_len": length} | given
        self.pipe = Pipeline.from_config(config, runtime=Runtime(self_check=False), **given)
        self.inputs = tokens(config, batch, length).chunk(self.pipe.num_replicas)[self.pipe.replica]
        while self.pipe.is_tuning:
            self._step_anew()

    def step(self) -> float:
        return float(self.pipe.step(self.inputs, self.inputs))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.pipe.parameters()

    def report(self) -> OwnReport:
        layout = self.pipe.layout
        layers = [stage.stop - stage.start for stage in layout.layers]
        slices = self.pipe.slices(self.inputs.shape[1])
        timeline = self.pipe.timeline()
        return OwnReport(timeline, layout.training, str(self.pipe.order), slices, layers, self._planned())

    def _planned(self) -> PlannedStep | None:
        plan = self.pipe.plan
        if plan is None:
            return None
        self._step_anew()  # warms up
        samples = ActionTimes()
        for _ in range(_SAMPLED):
            self._step_anew()
            samples.add(self.pipe.timeline())
        own = simulate(plan.schedule, samples.cost()).makespan
        return PlannedStep(plan.seconds, own, plan.ideal, plan.table())

    def _step_anew(self) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = None
        self.step()
