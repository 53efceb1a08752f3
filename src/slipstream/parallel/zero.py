"""Parameters that are spread over the replicas between steps (ZeRO-3) by FSDP2, each gathered once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slipstream.errors import SlipstreamError
from slipstream.model import storage_id
from slipstream.parallel.gpus import refuse_shards
from slipstream.parallel.gradients import PendingReduction, add_gradient, in_buckets
from slipstream.parallel.rank_group import RankGroup


class ShardedParameters:
    """Shards parameters, gradients and optimizer state over the replicas; has the methods of GradientReduction and
    MasterParameters.

    Every step calls `begin`, then `reduce` for each stage after its last backward, then `finish`. Rajbhandari et al.
    2020, "ZeRO", P_os+g+p (section 5.3), with the gathers of a whole step merged into one. A replica keeps its rows
    (dim 0) of every parameter, its gradient and its optimizer's state:

        begin      all-gather: the stages' modules hold whole, plain tensors; every slice's F, I and W is as ever
        reduce     reduce-scatter of the stage's summed gradients; its whole tensors are released
        finish     the rows' gradients are in `.grad` of the rows in `named_parameters`

    A step of any number of slices thus sends 2 (n-1)/n of the parameters' bytes on each of n replicas, as ZeRO-1 does;
    gathering for each slice's pass instead would send that as often as there are passes. The price is that a stage's
    weights are whole, with whole gradients, from `begin` to its `reduce`: the saving is memory between steps, and that
    of the optimizer and its rows. FSDP2 shards, gathers and releases; its reductions stay off. With a wider `dtype` the
    rows are of that, and are rounded before they are gathered; gradients are added and summed in it.

    Gradients are summed, never averaged: the loss is divided by the tokens of the whole batch.
    """

    is_sharded = True
    host = None  # no optimizer on the host

    def __init__(
        self,
        stages: Mapping[int, tuple[nn.Module, Sequence[nn.Module]]],
        copies_of: Callable[[str], RankGroup],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Collective over the replicas. From now on parameters of the modules are DTensors between steps.

        Args:
            stages: of each of this rank's stages its model and those layers of it that are gathered by themselves.
            copies_of: returns the ranks that hold a parameter and see other tokens, over which it is sharded.
            dtype: of the optimizer's copies of trained parameters. None: theirs.

        Raises SlipstreamError where a parameter has no rows, or is held by two modules, and with a `dtype` where
        trained parameters compute in several.
        """
        for model, _ in stages.values():
            _check_can_be_sharded(model)
        self._models = {stage: model for stage, (model, _) in stages.items()}
        self._copies = {name: copies_of(name) for name, _ in self._named()}
        self._dtypes = {name: parameter.dtype for name, parameter in self._named()}  # dtypes for computing
        policy = MixedPrecisionPolicy() if dtype is None else _computing_in(self._named(), dtype)
        meshes = {ranks: _mesh_of(ranks, self._named()[0][1].device) for ranks in dict.fromkeys(self._copies.values())}
        of_parameter = {id(parameter): meshes[self._copies[name]] for name, parameter in self._named()}
        self._modules = {stage: _shard(*modules, of_parameter, policy, dtype) for stage, modules in stages.items()}
        # Sharding has replaced the parameters.
        named = self._named()
        self._shapes = {name: parameter.shape for name, parameter in named}
        self._trained = {name for name, parameter in named if parameter.requires_grad}
        self._masters = {name: master for name, parameter in named if (master := _rows_of(parameter)).numel()}
        self._missing: set[int] = set()
        self._started: list[PendingReduction] = []
        self._scale = 1.0
        self.gather()
        for name, parameter in self._named():
            if name in self._trained:
                parameter.grad_dtype = dtype or parameter.dtype  # dtype of the sum over slices
        self.publish()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the rows that the optimizer updates, under the parameters' names: this replica's rows, views of
        FSDP2's shards.

        A parameter of fewer rows than replicas has none on some.
        """
        return iter(self._masters.items())

    def rows(self, name: str) -> range:
        """Returns the rows (dim 0) of the parameter that this replica has."""
        copies = self._copies[name]
        return range(*_chunk_bounds(self._shapes[name][0], copies.size, copies.rank))

    def whole(self, name: str, tensor: DTensor) -> Tensor:
        """Returns all rows of a parameter, in the dtype in which it computes. Collective over the replicas."""
        return tensor.full_tensor().to(self._dtypes[name])

    def is_spread(self, name: str) -> bool:
        """Returns whether each replica has different rows of it: true of every parameter, including frozen ones."""
        return name in self._shapes

    def publish(self) -> None:
        """Releases gathered parameters: after an evaluation, and wherever an optimizer may have updated the shards."""
        for modules in self._modules.values():
            _reshard(modules)

    def begin(self, scale: float = 1.0, is_divided: bool = False) -> None:
        """Begins a step whose losses are multiplied by `scale`, by which its gradients are divided; gathers all
        parameters. Gradients of earlier steps are apart anyway, whether or not `finish` is given a divisor.

        Collective over the replicas. Raises SlipstreamError where one was frozen too late.
        """
        self._check_trained()
        self._scale, self._started, self._missing = scale, [], set(self._modules)
        self.publish()
        self.gather()
        for model in self._models.values():
            model.zero_grad()

    def gather(self) -> None:
        """Makes all parameters whole. Collective."""
        for modules in self._modules.values():
            for handle in filter(None, [module.unshard(async_op=True) for module in modules]):
                handle.wait()

    @torch.no_grad()
    def reduce(self, stage: int) -> None:
        """Starts reducing a stage's gradients, after its last backward, and releases its whole weights. Collective."""
        self._missing.discard(stage)
        trained = [named for named in self._models[stage].named_parameters() if named[0] in self._trained]
        for copies in dict.fromkeys(self._copies[name] for name, _ in trained):
            alike = [named for named in trained if self._copies[named[0]] is copies]
            for bucket in in_buckets(alike, lambda parameter: parameter.grad_dtype or parameter.dtype):
                self._started.append(PendingReduction.scatter(bucket, copies, _chunk_bounds))
        _reshard(self._modules[stage])

    @torch.no_grad()
    def finish(self, divisor: float = 1.0) -> None:
        """Waits for all reductions; adds this step's gradients, divided by `divisor`, to the earlier ones, in the rows'
        `.grad`."""
        if self._missing:
            raise RuntimeError(f"the gradients of stages {sorted(self._missing)} were not reduced in this step")
        self._scale *= divisor
        for started in self._started:
            for name, _, gradient in started.finish():
                if name in self._masters:
                    add_gradient(self._masters[name], gradient if self._scale == 1 else gradient.div_(self._scale))
        self._started = []

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [named for model in self._models.values() for named in model.named_parameters()]

    def _check_trained(self) -> None:
        for name, master in self._masters.items():
            if master.requires_grad != (name in self._trained):
                raise SlipstreamError(
                    f"requires_grad of {name} was changed. With sharded parameters, freeze those of the model before "
                    "the Pipeline is made of it."
                )


def _check_can_be_sharded(model: nn.Module) -> None:
    storages: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            raise SlipstreamError(
                f"parallel.shard='parameters': {name} is a scalar, which has no rows to spread. Use shard='optimizer'."
            )
        other = storages.setdefault(storage_id(parameter), name)
        if other != name:
            raise SlipstreamError(
                f"parallel.shard='parameters': {other} and {name} are one tied weight, whose shards would be updated "
                "separately. Use shard='optimizer', or a model with tie_word_embeddings=False."
            )


def _mesh_of(ranks: RankGroup, device: torch.device) -> DeviceMesh:
    assert ranks.process_group is not None
    if device.type == "cuda" and ranks.gpu_backend != "nccl":
        refuse_shards()
    return DeviceMesh.from_group(ranks.process_group, device.type, mesh_dim_names=("dp",))


def _computing_in(named: Sequence[tuple[str, nn.Parameter]], master_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Returns the policy by which parameters whose rows are of another dtype compute in theirs."""
    first: dict[torch.dtype, str] = {}
    for name, parameter in named:
        if parameter.is_floating_point():
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        kinds = " and ".join(f"{name} in {dtype}" for dtype, name in first.items())
        raise SlipstreamError(
            f"parallel.shard='parameters' with precision.master_dtype={master_dtype}: the model computes with {kinds}, "
            "and what is gathered is rounded to one dtype. Use parallel.shard='optimizer'."
        )
    return MixedPrecisionPolicy(param_dtype=next(iter(first), None), cast_forward_inputs=False)


def _shard(
    model: nn.Module,
    layers: Sequence[nn.Module],
    meshes: Mapping[int, DeviceMesh],
    policy: MixedPrecisionPolicy,
    dtype: torch.dtype | None,
) -> list[FSDPModule]:
    """Returns FSDP2's modules, which neither reduce gradients nor release gathered parameters until asked to."""

    def mesh_of(module: nn.Module) -> DeviceMesh:
        return meshes[id(next(module.parameters()))]

    modules = []
    for module, mesh in [(module, mesh_of(module)) for module in _units(model, layers, mesh_of)]:
        for parameter in module.parameters():
            if parameter.requires_grad and dtype is not None and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.to(dtype)
        modules.append(fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy))
    for sharded in modules:
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)
    return modules


def _units(
    model: nn.Module, layers: Sequence[nn.Module], mesh_of: Callable[[nn.Module], DeviceMesh]
) -> Iterator[nn.Module]:
    """Yields the layers, and modules with parameters outside of them, inner modules first; of a layer also the parts
    that other ranks hold than the rest, such as its experts.

    It doesn't yield the model: on a stage that isn't the last one its output is a placeholder's, about which FSDP2
    would warn.
    """
    in_layers = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        if modules := _with_parameters(layer.modules()):
            yield from (module for module in modules if mesh_of(module) is not mesh_of(modules[0]))
            yield layer
    yield from reversed(_with_parameters(module for module in model.modules() if id(module) not in in_layers))


def _with_parameters(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if next(module.parameters(recurse=False), None) is not None]


def _reshard(modules: Sequence[FSDPModule]) -> None:
    for module in modules:
        module.reshard()
    for module in modules:
        left = [name for name, p in cast(nn.Module, module).named_parameters() if not isinstance(p, DTensor)]
        # The next step would compute with weights from before the optimizer's step.
        if left:
            raise RuntimeError(f"{left[0]} is still whole: a forward that failed has left FSDP2 in the middle of it")


def _rows_of(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a view of a shard: the optimizer updates FSDP2's own memory."""
    assert isinstance(parameter, DTensor)
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


def _chunk_bounds(num_rows: int, size: int, rank: int) -> tuple[int, int]:
    """Returns the [start, stop) of a replica's rows, as torch.chunk distributes them."""
    most = -(-num_rows // size)
    return min(most * rank, num_rows), min(most * (rank + 1), num_rows)
