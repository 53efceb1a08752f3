"""A Pipeline's facts: its cut, its timeline, and the calls to use in place of those that it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Never

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from slipstream.checkpoint import is_finite
from slipstream.errors import SlipstreamError
from slipstream.model import Adapter, TrainedWeights
from slipstream.options import Degrees
from slipstream.parallel import RankGroup
from slipstream.pipeline.batch import Batch
from slipstream.pipeline.families import Balance, ExecutedStep, StageLayout
from slipstream.pipeline.memory import rehearse
from slipstream.pipeline.runtime import PipelineRuntime
from slipstream.planner.joint import JointPlan
from slipstream.planner.ragged import StageRates
from slipstream.schedule import Schedule
from slipstream.simulator import MemoryTable
from slipstream.timeline import Timeline
from slipstream.units import numbers_text, plural


def _own_rows(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


class PipelineFacts:
    """The part of a Pipeline that describes it."""

    _runtime: PipelineRuntime

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration. Raises SlipstreamError for an nn.Sequential, which has none."""
        self._runtime.family.check_has("config")
        config: PretrainedConfig = self._runtime.family.config
        return config

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self._runtime.device

    def find_non_finite(self) -> str | None:
        """Returns the name of a weight with elements that are infinite or not numbers, a frozen one too; None where all
        are finite. Collective."""
        weights = (each for stage in self._runtime.stages.values() for each in stage.named_parameters())
        # Beneath an adapter a weight has another name than in the files.
        found = (name.replace(".base_layer.", ".") for name, each in weights if not is_finite(_own_rows(each.detach())))
        return next(filter(None, self._runtime.ranks.world.gather(next(found, None))), None)

    @property
    def rank(self) -> int:
        """This process's place on the pipeline."""
        return self._runtime.ranks.pipeline.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the pipeline: each a process, or all of them in this one."""
        return self.layout.num_ranks

    @property
    def replica(self) -> int:
        """This pipeline's place among those that share a batch (dp)."""
        return self._runtime.ranks.data.rank

    @property
    def num_replicas(self) -> int:
        """The number of pipelines that share a batch (dp)."""
        return self._runtime.ranks.data.size

    @property
    def leads(self) -> bool:
        """Whether this is the one rank of all that writes and speaks for them."""
        return self._runtime.ranks.leads

    @property
    def leads_replica(self) -> bool:
        """Whether this is the one rank of those that are given the same rows that speaks for them."""
        return self._runtime.ranks.leads_replica

    @property
    def num_processes(self) -> int:
        """The processes of the whole mesh."""
        return self._runtime.ranks.world.size

    @property
    def degrees(self) -> Degrees:
        """By how many processes a stage's work is shared, and the exchange of those that share slices, as given or
        planned."""
        return self._runtime.degrees

    @property
    def has_own_loss(self) -> bool:
        """Whether a `loss_fn` was given, so that a step's loss isn't cross-entropy."""
        return self._runtime.has_own_loss

    @property
    def has_sequence_loss(self) -> bool:
        """Whether that is a `SequenceLoss`."""
        return self._runtime.has_sequence_loss

    @property
    def plan(self) -> JointPlan | None:
        """The plan of schedule, slices and partition, where all were "auto"; `plan.table()` has the comparison."""
        return self._runtime.planned.plan

    @property
    def how_planned(self) -> str:
        """How what nobody gave was planned without measuring, or why it wasn't, in a line; "" where all was given or
        "auto"."""
        return _plan(self._runtime)

    @property
    def rates(self) -> StageRates | None:
        """The stages' rates, by which steps on sequences of different lengths are planned: in seconds where it was
        measured, else in multiplications. None for an nn.Sequential."""
        return self._runtime.plans.rates

    @property
    def is_tuning(self) -> bool:
        """Whether "auto" is still to be planned: the next step may run in another order or in other slices."""
        return self._runtime.plans.is_measuring

    @property
    def is_counted(self) -> bool:
        """Whether what nobody gave was planned by counted operations."""
        return self._runtime.planned.counted is not None

    @property
    def layout(self) -> StageLayout:
        """The layers of every stage, and the lowered schedules of the next step and of an evaluation."""
        return self._runtime.layout

    @property
    def order(self) -> Schedule:
        """The schedule of the next step as it was given or found: `layout.training` without what passes add."""
        return self.layout.order

    @property
    def last_step(self) -> ExecutedStep:
        """The layout and the slices of the last step; "auto" may have other plans for the next."""
        return self._runtime.last_step

    @property
    def axes(self) -> dict[str, RankGroup]:
        """The groups of ranks that this one is in, by the axes of the mesh; with that of experts, where they are spread
        over a part of the ranks that hold the same other weights."""
        return self._runtime.ranks.by_name

    @property
    def copies(self) -> RankGroup:
        """The ranks that hold the same weights and see other tokens, over which gradients are added up."""
        return self._runtime.ranks.copies

    @property
    def expert_copies(self) -> RankGroup:
        """Those of `copies` that hold the same experts, over which these experts' gradients are added up."""
        return self._runtime.ranks.expert_copies

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank sent to other stages in the last step or evaluation, without headers."""
        return self._runtime.transport.bytes_sent

    @property
    def random_state(self) -> tuple[int, int]:
        """The seed, and the number of steps so far, on which dropout depends. May be set."""
        return self._runtime.random_state

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._runtime.random_state = state

    @property
    def balance(self) -> Balance:
        """The balance of the layers of an nn.Sequential over the ranks, and the layer that limits it.

        Raises SlipstreamError for a causal LM, and where costs aren't known: give `layers` an example or costs.
        """
        return self._runtime.family.balance(self.layout)

    def slices(self, length: int) -> list[int]:
        """Returns the tokens of each slice of a sequence of `length` tokens, as the next step cuts it; with
        `microbatches`, in the one with the most slices."""
        return self._runtime.plans.slices_of(length)

    def timeline(self) -> Timeline:
        """Returns the timeline of the last step or evaluation, in seconds, on all ranks. Collective."""
        return self._runtime.timeline()

    def memory_table(self, inputs: Tensor, targets: Tensor, microbatch: int = 0) -> MemoryTable:
        """Measures the bytes that this process's stages of a causal LM hold in a step on such a batch. Collective. For
        `slipstream.simulator.memory_of`, which adds the parts up by a schedule; where microbatches differ, of one."""
        return rehearse(self._runtime.rehearsed_step(Batch.of(self.device, inputs, targets)), microbatch)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter of PEFT that is trained, its name and configuration; None where the model has none."""
        return self.trained_weights.adapter

    @property
    def trained_weights(self) -> TrainedWeights:
        """The trained weights of a causal LM when the pipeline was made: all, all but some, or an adapter."""
        return self._runtime.family.trained


def summarise(runtime: PipelineRuntime) -> str:
    """Returns the lines, from facts of this rank alone: it never communicates."""
    lines = {
        "layers": _layers(runtime),
        "schedule": _schedule(runtime),
        **({"plan": plan} if (plan := _plan(runtime)) else {}),
        **({"context": str(runtime.planned.context)} if runtime.planned.context is not None else {}),
        "mesh": _mesh(runtime),
        "parameters": _parameters(runtime),
    }
    if runtime.graphs is not None:
        lines["CUDA graphs"] = str(runtime.graphs)
    return "\n".join([f"Pipeline of {runtime.family.name}", *(f"  {key}: {line}" for key, line in lines.items())])


def _layers(runtime: PipelineRuntime) -> str:
    layout = runtime.layout
    counts = " + ".join(f"{stage_layers.stop - stage_layers.start:g}" for stage_layers in layout.layers)
    num_stages = len(layout.layers)
    numbers = ", ".join(map(str, layout.order.placement))
    ranks = f"rank {numbers}" if num_stages == 1 else f"ranks {numbers}"
    head = "; the head's rows are spread over all ranks" if layout.spreads_vocabulary else ""
    return f"{counts} in {plural(num_stages, 'stage')}, on {ranks}{head}"


def _schedule(runtime: PipelineRuntime) -> str:
    layout = runtime.layout
    lengths = runtime.plans.rows.slices
    num_microbatches = layout.order.num_microbatches
    microbatches = plural(num_microbatches, "microbatch")
    slices = lengths if isinstance(lengths, int) else numbers_text(lengths)
    name = "slices" if isinstance(lengths, int) else "slices of tokens"
    still = '; "auto" is still to be planned' if runtime.plans.is_measuring else ""
    return f"{layout.order.name}, {microbatches}, {name}: {slices}{still}"


def _plan(runtime: PipelineRuntime) -> str:
    """Returns the line about what is planned without measuring, or why it isn't; "" where all is given."""
    if runtime.planned.counted is not None:
        return str(runtime.planned.counted)
    return f"as usual, for nothing is planned: {runtime.planned.unplanned}" if runtime.planned.unplanned else ""


def _mesh(runtime: PipelineRuntime) -> str:
    ranks = runtime.ranks
    if ranks.world.size == 1:
        return f"one process, on {runtime.device}"
    sizes = ", ".join(f"{name}={group.size}" for name, group in ranks.by_name.items())
    mine = ", ".join(f"{group.rank} of {name}" for name, group in ranks.by_name.items())
    return f"{sizes}; this is rank {mine}, on {runtime.device}"


def _parameters(runtime: PipelineRuntime) -> str:
    parameters = [parameter for _, parameter in runtime.parameters.named()]
    here = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    computes = _dtypes([parameter for stage in runtime.stages.values() for parameter in stage.model.parameters()])
    updates = _dtypes(parameters)
    place = " on the host" if runtime.parameters.are_on_host else ""
    dtypes = computes if computes == updates and not place else f"{computes}, updated in {updates}{place}"
    which = "" if trained == here else f", of which {trained:,} are trained"
    return f"{here:,} on this rank{which}; {dtypes}"


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


_PLACE = (
    "its parameters are where Pipeline(device=...) puts them, and of the dtype in precision=slipstream.Precision(dtype="
    "...). accelerate, which calls it, has a loop of its own: write yours around pipe.step(inputs, labels), or use "
    "`slipstream train`; for transformers' Trainer there is slipstream.extras.hf_trainer.SlipstreamTrainer"
)
_LAYERS = "its layers are spread over the ranks, and pipe.named_parameters() yields what this rank's optimizer updates"
CHECKPOINTING = ("gradient_checkpointing_enable", "activation_checkpointing_enable")
_RECOMPUTE = "give Pipeline(memory=slipstream.Memory(recompute='full')), or 'selective'"
_FORWARD = (
    "call pipe.step(inputs, labels), which runs forward and backward and returns the loss, or pipe.evaluate(inputs, "
    "labels); for logits pipe.logits(inputs)"
)
_COMPILE = "for fused norms and activations give Pipeline(runtime=slipstream.Runtime(fused=True))"

UNSUPPORTED_CALLS = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"), _PLACE),
    **dict.fromkeys(("modules", "named_modules", "children"), _LAYERS),
    **dict.fromkeys(CHECKPOINTING, _RECOMPUTE),
    **dict.fromkeys(("forward", "__call__"), _FORWARD),
    **dict.fromkeys(("compile", "_compiled_call_impl"), _COMPILE),
    "push_to_hub": "save_pretrained(folder), and on one rank huggingface_hub.upload_folder(repo_id=..., "
    "folder_path=folder)",
    "resize_token_embeddings": "call it on the model before the Pipeline is made; in a configuration of `slipstream "
    "train`, special tokens of data.chat_template and data.end_of_text get rows by themselves",
    "backward": "pipe.step has already run the backward, and its gradients are in .grad",
    "zero_grad": "call optimizer.zero_grad()",
    "no_sync": "to add up the gradients of several batches, call pipe.step for each before optimizer.step()",
    "generate": "save_pretrained(folder), and let AutoModelForCausalLM.from_pretrained(folder) generate",
    "load_state_dict": "start with Pipeline.from_pretrained(folder), or from a model with these weights; "
    "pipe.load(folder) loads what pipe.save saved",
}
"""What to type instead, by the attribute's name."""

COPIES = (
    "a Pipeline can't be copied or pickled: it holds its ranks' connections. pipe.save_pretrained(folder) writes the "
    "model, and pipe.save(folder, step, optimizer=optimizer) what training goes on from."
)
ASKED_BY_COMPILE = "_torchdynamo_orig_callable"
"""The attribute that torch.compile, and nobody else, asks for first."""


def refuse_arguments(call: str, inputs: object, labels: object, others: Mapping[str, object]) -> Never:
    """Raises the error for a method that is called without inputs, or with a batch's keys in place of a batch."""
    if "input_ids" in others:
        raise SlipstreamError(f"{call}(**batch): give the batch as one argument, pipe.{call}(batch).")
    if others:
        names = ", ".join(map(repr, others))
        raise TypeError(f"Pipeline.{call}() has no argument {names}")
    raise SlipstreamError(f"inputs are missing: give pipe.{call}(inputs, labels), or a mapping that has 'input_ids'.")


def refuse_foreign_norm(caller: FrameType) -> None:
    """Raises SlipstreamError where this frame, which reads a rank's parameters, is torch's `clip_grad_norm_`."""
    is_torchs = str(caller.f_globals.get("__name__", "")).startswith("torch.")
    if is_torchs and caller.f_code.co_name in ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_"):
        raise SlipstreamError(
            "torch.nn.utils.clip_grad_norm_ of a rank's parameters would scale by their norm alone, and each rank by "
            "another: call pipe.clip_grad_norm_(max_norm), which takes the norm over all ranks."
        )
