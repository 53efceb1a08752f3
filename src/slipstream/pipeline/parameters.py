"""Keeps a rank's parameters: the copies that the optimizer updates, and how their gradients are reduced in a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.model import PipelineStage, storage_id, torch_dtype
from slipstream.parallel import ParameterShard, ParameterShare, RankGroup, Ranks, all_reduce
from slipstream.parallel.gradients import GradientReduction, MasterParameters
from slipstream.parallel.host_link import sum_of_squares
from slipstream.parallel.tensor import TensorParallel
from slipstream.parallel.zero import ShardedParameters
from slipstream.pipeline.agreement import CallAgreement
from slipstream.pipeline.execution.action_graphs import FixedGradients
from slipstream.pipeline.pipeline_options import PipelineOptions


class Parameters:
    """The parameters of a rank, whose gradients are reduced in each step.

    Call `begin`, `reduce` of every stage, and `end`; then `.grad` of the parameters in `named` is complete.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        ranks: Ranks,
        tensor: TensorParallel | None,
        holders: Mapping[str, Sequence[int]],
        options: PipelineOptions,
    ) -> None:
        """Collective. `holders` are the pipeline's ranks that hold each weight of several, in the order of its stages;
        where parameters are sharded there is none."""
        self._stages = stages
        self._ranks = ranks
        self._tensor = tensor
        shard = options.parallel.shard
        dtype = torch_dtype(options.precision.master_dtype)
        self._experts = next((stage.experts for stage in stages.values()), None)
        self._tied = TiedGradients([*stages.values()], ranks, holders)
        self._masters: MasterParameters | ShardedParameters
        self._gradients: GradientReduction | ShardedParameters
        if shard == "parameters" and ranks.copies.size > 1:
            modules = {stage_index: (stage.model, stage.layers) for stage_index, stage in stages.items()}
            self._masters = self._gradients = ShardedParameters(modules, self.copies_of, dtype)
        else:
            on_host = options.memory.optimizer == "host"
            self._masters = MasterParameters(
                list(self._own()), self.copies_of, shard == "optimizer", dtype, on_host=on_host
            )
            trained = {stage_index: list(_trained_by(stage)) for stage_index, stage in stages.items()}
            self._gradients = GradientReduction(
                trained, self.copies_of, ranks.tensor, self._added_over, self._masters, whole=self._tied.names
            )
        # The part of each of the unsplit model's parameters that this rank holds
        self.shares = {name: self._share(name, parameter) for name, parameter in self._own()}
        self._fixed: FixedGradients | None = None
        self._is_stale = False  # True from an update of the masters to the next `publish`

    def keep_clear_of(self, fixed: FixedGradients) -> None:
        """Has every step begin with copies of those gradients of earlier steps that lie where it writes."""
        self._fixed = fixed

    def begin(self, loss_scale: float = 1.0, is_divided: bool = False) -> None:
        """Begins a step; call it after `publish`. `is_divided` where `end` may be given a divisor."""
        self._is_stale = False
        self._gradients.begin(loss_scale, is_divided)
        if self._fixed is not None:
            self._copy_from(self._fixed)

    def _copy_from(self, fixed: FixedGradients) -> None:
        """Copies gradients of earlier steps, but for those that are added to where they are."""
        own_ids = {id(parameter) for _, parameter in self._own()}
        for _, master in self.named():
            if id(master) not in own_ids and master.grad is not None and fixed.holds(master.grad):
                master.grad = master.grad.clone()
        if isinstance(self._gradients, GradientReduction):
            self._gradients.copy_earlier(fixed.holds)

    def reduce(self, stage: int) -> None:
        """Sums a stage's gradients over replicas after its last backward, while other stages still run."""
        self._gradients.reduce(stage)

    def end(self, divisor: float = 1.0) -> None:
        """Completes the gradients of a step, divided by `divisor`."""
        self._gradients.finish(divisor)
        if isinstance(self._gradients, GradientReduction):
            for name, total in self._tied.totals():
                self._gradients.deliver(name, total)
        self._is_stale = True

    def drop(self) -> None:
        """Ends a step that was refused after it had run: no gradient is left, of earlier steps neither, and so an
        optimizer changes nothing. Collective."""
        self.end()
        for _, parameter in (*self._own(), *self.named()):
            parameter.grad = None

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a tensor of a stage's state with all its rows, as it computes. Collective over the replicas where
        they are spread."""
        if isinstance(tensor, DTensor):
            assert isinstance(self._masters, ShardedParameters)
            return self._masters.whole(name, tensor)
        return tensor

    def publish(self) -> None:
        """Copies the optimizer's updates since the last step to the parameters that compute. Collective.

        The optimizer may do more after an evaluation: only the next step ends that.
        """
        if self._is_stale:
            self._masters.publish()

    def gather(self) -> None:
        """Makes sharded parameters whole for an evaluation, as they are for a step. Collective.

        In their forwards, replicas that exchange tokens might gather layers at different times.
        """
        if isinstance(self._masters, ShardedParameters):
            self._masters.gather()

    def release(self) -> None:
        """Frees the parameters that `gather` made; of a sharded one, this replica's rows stay."""
        if isinstance(self._masters, ShardedParameters):
            self._masters.publish()

    @property
    def are_on_host(self) -> bool:
        """Whether the optimizer updates copies in the host's memory."""
        return self._masters.host is not None

    @property
    def are_a_part(self) -> bool:
        """Whether another rank's optimizer updates weights of the model that this one's doesn't."""
        some = any(not shard.is_whole for shard in self.shards())
        return some or self._ranks.copies.size < self._ranks.world.size

    def refresh(self) -> None:
        """Notes that the parameters in `named` were changed, so that the next `publish` copies them to the modules."""
        self._is_stale = True

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank's optimizer updates, under the unsplit model's names, each once."""
        return self._masters.named_parameters()

    def shards(self) -> Iterator[ParameterShard]:
        """Yields the parameters of `named`, each with its place in the unsplit model's parameter."""
        for name, parameter in self.named():
            rows = self._masters.rows(name)
            yield ParameterShard(name, parameter, self.shares[name], rows.start, self._counts(name))

    def copies_of(self, name: str) -> RankGroup:
        """Returns the ranks that hold the same part of a parameter as this one, and see other tokens."""
        is_spread = self._experts is not None and self._experts.has(name)
        return self._ranks.expert_copies if is_spread else self._ranks.copies

    def _counts(self, name: str) -> bool:
        """Returns whether this rank counts for its part of a parameter: one of those that update it alike."""
        is_own = self.copies_of(name).rank == 0 or self._masters.is_spread(name)
        return is_own and self.shares[name].copy == 0 and name not in self._tied.copies

    def bytes_of(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """Returns the device's bytes of the optimizer's copies of those tensors that are parameters, and of all that it
        updates of them there."""
        if self.are_on_host:
            return 0, 0
        masters = dict(self.named())
        names = {id(parameter): name for name, parameter in self._own()}
        copies = updated = 0
        for tensor in tensors:
            master = masters.get(names.get(id(tensor), ""))
            if master is not None and tensor.requires_grad:
                updated += master.nbytes
                copies += 0 if storage_id(master) == storage_id(tensor) else master.nbytes
        return copies, updated

    def host_bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of the optimizer's copies on the host of those tensors that are trained parameters."""
        if not self.are_on_host:
            return 0
        masters = dict(self.named())
        names = {id(parameter): name for name, parameter in self._own()}
        own = (names.get(id(tensor), "") for tensor in tensors if tensor.requires_grad)
        return sum(masters[name].nbytes for name in own if name in masters)

    def clip_(self, max_norm: float, calls: CallAgreement) -> Tensor:
        """Scales all gradients so that the norm of the whole model's is at most `max_norm`; returns the
        norm before. Each weight counts once, wherever it has copies. Collective."""
        named = [(name, p.grad) for name, p in self.named() if p.grad is not None]
        square = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        host = self._masters.host
        for name, gradient in named:
            if self._counts(name):
                of_it = sum_of_squares(gradient) if host is None else host.square_of(name, gradient)
                square += of_it.to(square.device)
        # A call's values are integers, so the sum goes as its bits.
        ranks = calls.begin("clip_grad_norm_", square.view(1).view(torch.int64))
        if ranks:  # all ranks; empty for a single process
            bits = torch.tensor([rank.values[0] for rank in ranks])
            square = bits.view(torch.float64).sum().to(square.device)
        norm = square.sqrt()
        if math.isfinite(max_norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            if host is not None:
                # A factor of 1 isn't worth a pass over the host's memory.
                scale = scale.cpu()
                named = [] if scale == 1 else named
            for _, gradient in named:
                gradient.mul_(scale.to(gradient.dtype))
        return norm

    def _own(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def _share(self, name: str, parameter: nn.Parameter) -> ParameterShare:
        for stage in self._stages.values():
            rows = stage.vocabulary
            if rows is not None and any(parameter is row_parameter for row_parameter in rows.parameters()):
                return ParameterShare((rows.num_ids, *parameter.shape[1:]), 0, ((rows.held.start, rows.held.stop),))
        if self._experts is not None and self._experts.has(name):
            share: ParameterShare = self._experts.share(name, parameter)
            return share
        if self._tensor is None:
            return ParameterShare.whole(tuple(parameter.shape), self._ranks.tensor.rank)
        return self._tensor.share(name)

    def _added_over(self, name: str) -> tuple[int, ...]:
        if self._tensor is None:
            return ()
        # Each rank has seen other tokens of these experts, so their gradients are added over all tensor ranks.
        if self._experts is not None and self._experts.has(name):
            return tuple(range(self._ranks.tensor.size))
        return self._tensor.added_over(name)


def _trained_by(stage: PipelineStage) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters in which a stage's backwards leave gradients; a tied head has a separate accumulator."""
    held = {id(tied.parameter) for tied in stage.tied}
    yield from ((name, parameter) for name, parameter in stage.named_parameters() if id(parameter) not in held)
    yield from ((tied.name, parameter) for tied in stage.tied for parameter in tied.accumulators)


class TiedGradients:
    """The gradients of weights that several stages hold: one weight, a gradient of each, added in one order (rule 11).

    After a step `totals` adds those of an embedding and its head, or of layers, on all ranks that hold the weight.
    These then hold the same gradient under the canonical name, so equal optimizers keep the copies equal.
    """

    def __init__(self, stages: list[PipelineStage], ranks: Ranks, holders: Mapping[str, Sequence[int]]) -> None:
        """Collective. `holders` are the pipeline's ranks that hold each weight, in the order of its stages."""
        tied = sorted((weight for stage in stages for weight in stage.tied), key=lambda weight: weight.name)
        self._weights = {weight.name: weight.parameter for weight in tied}  # sorted by name, for one order on all ranks
        self._accumulators: dict[str, list[nn.Parameter]] = {name: [] for name in self._weights}
        for weight in tied:
            known = self._accumulators[weight.name]
            known += [a for a in weight.accumulators if all(a is not other for other in known)]
        self.names = set(self._weights)  # names of this rank's tied weights
        several = {name: tuple(dict.fromkeys(places)) for name, places in sorted(holders.items())}
        # the names of weights that another rank counts
        self.copies = {name for name in self.names & several.keys() if several[name][0] != ranks.pipeline.rank}
        groups = {places: ranks.connect(places) for places in sorted({*several.values()}) if len(places) > 1}
        self._groups = {name: groups.get(places) for name, places in several.items()}

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the gradient of each trained weight, the sum over its uses. Collective.

        A sum of two is the same to the bit wherever it is formed.
        """
        for name, weight in self._weights.items():
            if weight.requires_grad:
                accumulators = self._accumulators[name]
                present = [accumulator.grad.to_dense() for accumulator in accumulators if accumulator.grad is not None]
                for accumulator in accumulators:
                    accumulator.grad = None
                wide = accumulators[-1].grad_dtype
                total = sum(present[1:], present[0]) if present else torch.zeros_like(weight, dtype=wide)
                if (group := self._groups.get(name)) is not None:
                    all_reduce(total, dist.ReduceOp.SUM, group)
                yield name, total
