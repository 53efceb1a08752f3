"""Cases of replicas: gradients summed over them and over tensor ranks, and what optimizers update."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from slipstream import Parallelism, make_mesh
from slipstream.model.weight_gradients import add_weight_gradients_in_place
from slipstream.parallel import RankGroup, Ranks
from slipstream.parallel.gradients import GradientReduction, MasterParameters
from slipstream.train.loss_scale import LossScale
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    no_rounding_inside,
    unsplit_step,
)
from support.parallel.group_cases import by_name, run_cases
from support.parallel.replica import ROWS, Replica, batch, held_by, local_loss, none_partial, world
from support.pipelines import make_pipe


@no_rounding_inside()
def sums_are_those_of_one_process() -> None:
    """Two accumulating steps, with unequal numbers of valid tokens on each replica; then they are cleared."""
    for name in ("llama", "gpt2", "mixtral"):
        for shard in (False, True):
            whole = build(ARCHITECTURES[name], seed=3)
            replica = Replica(build(ARCHITECTURES[name], seed=3), world(), shard)
            for seed in range(2):
                unsplit_step(whole, *batch(seed, replica.data.size))
                replica.step(seed)
                wanted = {key: replica.own(g, key) for key, g in gradients(whole).items()}
                found = gradients(replica.masters)
                assert set(found) == set(wanted)
                assert gradient_error(wanted, found) < BOUND, (name, shard, seed)
            if shard:
                assert all(parameter.grad is None for parameter in replica.model.parameters())


def missing_gradients_count_as_zeros() -> None:
    """On one replica some parameters have no gradient; others are frozen, and take no part."""
    for shard in (False, True):
        data = world()
        model = build(ARCHITECTURES["llama"])
        frozen = [p for name, p in model.named_parameters() if "q_proj" in name]
        for parameter in frozen:
            parameter.requires_grad_(False)
        replica = Replica(model, data, shard)
        inputs, labels = batch(0, data.size)
        replica.gradients.begin()
        local_loss(model, inputs, labels, data).backward()
        if data.rank == 1:
            for name, parameter in model.named_parameters():
                if "o_proj" in name:
                    parameter.grad = None
        locally = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        replica.reduce()
        for name, master in replica.masters.named_parameters():
            if "q_proj" in name:
                assert master.grad is None
                continue
            wanted = replica.own(data.sum(locally[name].clone()), name)
            assert torch.allclose(master.grad, wanted, rtol=1e-12, atol=1e-15), name


def calls_and_bytes_are_those_of_the_formulas() -> None:
    """An all-reduce of all gradients; or a reduce-scatter of them and an all-gather of the parameters, each replica's
    share as large as the first one's."""
    for bucket_bytes in (10_000, 25 * 2**20):
        for shard in (False, True):
            data = world()
            replica = Replica(build(ARCHITECTURES["llama"]).float(), data, shard, bucket_bytes=bucket_bytes)
            replica.train(1)
            parameters = list(replica.model.parameters())
            num_bytes = sum(4 * p.numel() for p in parameters)
            padded = sum(4 * data.size * math.ceil(p.shape[0] / data.size) * p[0].numel() for p in parameters)
            wanted = {"reduce_scatter": padded, "all_gather": padded} if shard else {"all_reduce": num_bytes}
            assert dict(data.payload) == wanted
            assert padded < 1.1 * num_bytes
            for name, calls in data.calls.items():
                if bucket_bytes > num_bytes:
                    assert calls == (1 if name == "all_gather" else 2), name  # of gradients one in either stage
                else:
                    assert num_bytes / bucket_bytes < calls < len(parameters), name


def reductions_run_beside_the_pipeline() -> None:
    """`reduce` doesn't wait for a replica that is late; `finish` does."""
    for shard in (False, True):
        data = world()
        replica = Replica(build(ARCHITECTURES["llama"]), data, shard)
        replica.gradients.begin()
        local_loss(replica.model, *batch(0, data.size), data).backward()
        store = dist.PrefixStore(f"reductions/{shard}", dist.distributed_c10d._get_default_store())
        if data.rank == 1:  # it comes when all others have got on
            store.wait([f"got on/{rank}" for rank in range(data.size) if rank != 1])
            time.sleep(0.5)  # in which one that doesn't wait would finish
            store.set("came", "")
        for stage in (1, 0):
            replica.gradients.reduce(stage)
        store.set(f"got on/{data.rank}", "")
        replica.gradients.finish()
        assert store.check(["came"])


@no_rounding_inside()
def tied_weights_are_delivered_whole() -> None:
    """The embedding's and the head's gradients are reduced apart, added by the caller, and cut into rows last."""
    (name, head_name) = "model.embed_tokens.weight", "lm_head.weight"
    for data in (world(), RankGroup()):
        for shard in (False, True):
            whole, model = build(ARCHITECTURES["llama, tied"], seed=3), build(ARCHITECTURES["llama, tied"], seed=3)
            embedding = dict(model.named_parameters())[name]
            model.lm_head.weight = head = nn.Parameter(embedding.detach())
            add_weight_gradients_in_place(model)
            masters = MasterParameters(
                [(n, p) for n, p in model.named_parameters() if n != head_name], held_by(data), shard
            )
            stages = {0: [(name, embedding)], 1: [(n, p) for n, p in model.named_parameters() if n != head_name]}
            stages[1].append((name, head))
            reduced = GradientReduction(stages, held_by(data), RankGroup(), none_partial, masters, whole={name})
            for seed in range(2):
                inputs, labels = batch(seed, data.size)
                unsplit_step(whole, inputs, labels)
                reduced.begin()
                local_loss(model, inputs, labels, data).backward()
                for stage in (1, 0):
                    reduced.reduce(stage)
                reduced.finish()
                assert embedding.grad is not None
                assert head.grad is not None
                reduced.deliver(name, embedding.grad + head.grad)
                assert head.grad is None
            found = gradients(masters)
            wanted = gradients(whole)
            for key in wanted:
                rows = masters.rows(key)
                wanted[key] = wanted[key][rows.start : rows.stop]
            assert gradient_error(wanted, found) < BOUND


def partial_gradients_are_summed_over_tensor_ranks() -> None:
    """Norms over all of them, keys' and values' weights over those that share them, the rest not at all."""
    size = dist.get_world_size()
    for dp, tp in [(1, 2)] if size == 2 else [(1, size), (2, size // 2)]:
        axes = Ranks.of(make_mesh(dp=dp, tp=tp))
        pairs = [(first, first + 1) for first in range(0, tp, 2)]
        mine = pairs[axes.tensor.rank // 2]

        def added_over(name: str, tp: int = tp, mine: tuple[int, ...] = mine) -> tuple[int, ...]:
            return tuple(range(tp)) if "norm" in name else mine if "k_proj" in name else ()

        for shard in (False, True):
            model = build(ARCHITECTURES["llama"], seed=3)
            named = [*model.named_parameters()]
            masters = MasterParameters(named, held_by(axes.data), shard, bucket_bytes=1000)
            axes.tensor.payload.clear()
            reduced = GradientReduction({0: named}, held_by(axes.data), axes.tensor, added_over, masters)
            wanted = {name: torch.zeros_like(parameter) for name, parameter in named}
            for seed in range(2):
                reduced.begin()
                inputs, labels = batch(seed, size)
                loss = local_loss(model, inputs, labels, axes.world)
                local = torch.autograd.grad(loss, [parameter for _, parameter in named], retain_graph=True)
                loss.backward()
                for (name, _), gradient in zip(named, local, strict=True):
                    everyone = axes.world.all_gather(gradient)
                    ranks = added_over(name) or (axes.tensor.rank,)
                    wanted[name] += sum(everyone[replica * tp + rank] for replica in range(dp) for rank in ranks)
                reduced.reduce(0)
                reduced.finish()
            for name, master in masters.named_parameters():
                rows = masters.rows(name)
                assert torch.allclose(master.grad, wanted[name][rows.start : rows.stop], rtol=1e-12, atol=1e-15), name
            num_bytes = sum(p.nbytes for name, p in named if added_over(name))
            assert dict(axes.tensor.payload) == {"all_reduce": 2 * num_bytes}


def scaled_losses_have_unscaled_gradients() -> None:
    """To the bit, accumulated under different scales too; float16 without a scale loses what it can't represent."""
    for shard in (False, True):
        plain, scaled = (Replica(build(ARCHITECTURES["llama"]), world(), shard) for _ in range(2))
        for seed, scale in enumerate((1024.0, 4.0)):
            plain.step(seed)
            scaled.step(seed, scale)
        found = dict(scaled.masters.named_parameters())
        for name, master in plain.masters.named_parameters():
            assert torch.equal(found[name].grad, master.grad), name


@no_rounding_inside()
def three_steps_of_adamw() -> None:
    """Sharded, replicated and alone: the same parameters, on every replica the very same; the state is shared out."""
    whole = build(ARCHITECTURES["llama"], seed=3)
    alone = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    data = world()
    for seed in range(3):
        alone.zero_grad()
        unsplit_step(whole, *batch(seed, data.size))
        alone.step()
    sizes = {}
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"], seed=3), data, shard)
        optimizer = replica.train(3)
        for (name, wanted), found in zip(whole.named_parameters(), replica.model.parameters(), strict=True):
            assert ((found - wanted).abs().max() / wanted.abs().max()) < 1e-9, name
            assert torch.equal(data.all_gather(found.detach()), found.expand(data.size, *found.shape)), name
        sizes[shard] = moment_bytes(optimizer)
    total = sum(2 * p.nbytes for p in whole.parameters())
    assert sizes[False] == total
    assert sum(data.gather(sizes[True])) == total
    assert sizes[True] < 1.05 * total / data.size


def moment_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))


def sharded_and_replicated_to_the_bit() -> None:
    """In float32, where two replicas' sums are the same whatever adds them; more may add in another order."""
    data = world()
    trained = []
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"]).float(), data, shard)
        replica.train(3)
        trained.append(dict(replica.model.named_parameters()))
    for name, parameter in trained[0].items():
        if data.size == 2:
            assert torch.equal(parameter, trained[1][name]), name
        assert torch.allclose(parameter, trained[1][name], rtol=1e-3, atol=1e-4), name


def slices_are_added_in_float32() -> None:
    """Of parameters in bfloat16 with float32 masters: as float64 adds what reaches each layer, on all replicas."""
    for name in ("llama", "gpt2"):
        for shard in (False, True):
            data = world()
            replica = Replica(build(ARCHITECTURES[name]).bfloat16(), data, shard, torch.float32)
            inputs, labels = batch(0, data.size)
            replica.gradients.begin()
            expected = expected_gradients(replica.model)
            for start in range(0, 24, 6):  # as slices are, though these don't attend to those before
                piece = slice(start, start + 6)
                local_loss(replica.model, inputs[:, piece], labels[:, piece], data).backward()
            replica.reduce()
            found = dict(replica.masters.named_parameters())
            for key, wanted in expected.items():
                total = replica.own(data.sum(wanted), key)
                gradient = found[key].grad
                assert gradient.dtype == torch.float32
                error, rounded = ((other - total).abs().max() for other in (gradient, total.bfloat16()))
                bound = 1e-5 * total.abs().max()
                assert error < bound < rounded or not gradient.any(), (key, error, rounded)
                assert gradient.any() == total.any(), key  # not of positions that no slice has
            assert all(parameter.grad is None for parameter in replica.model.parameters())


def expected_gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name, what the coming backwards add up to in float64, filled as they run."""
    expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    totals = {id(p): expected[name] for name, p in model.named_parameters()}
    for module in model.modules():
        multiplies = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        for key, parameter in module.named_parameters(recurse=False):
            total = totals[id(parameter)]
            if not multiplies:
                parameter.register_hook(adding(total))
            else:
                module.register_forward_hook(adding_products(total, module) if key == "weight" else adding_sums(total))
    return expected


def adding(total: Tensor) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        total.add_(gradient)

    return hook


def adding_sums(total: Tensor) -> Callable[..., None]:
    def hook(_: nn.Module, _args: tuple[Tensor], output: Tensor) -> None:
        output.register_hook(lambda g: adding(total)(g.double().flatten(0, -2).sum(0)))

    return hook


def adding_products(total: Tensor, module: nn.Module) -> Callable[..., None]:
    def product(x: Tensor, g: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):
            return torch.zeros_like(total).index_add_(0, x.flatten(), g)
        return x.double().flatten(0, -2).t() @ g if isinstance(module, Conv1D) else g.t() @ x.double().flatten(0, -2)

    def hook(_: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        x = args[0].detach()
        output.register_hook(lambda g: adding(total)(product(x, g.double().flatten(0, -2))))

    return hook


def masters_keep_small_updates() -> None:
    """Steps that bfloat16 rounds away add up in the masters; the parameters are the masters, rounded."""
    for shard in (False, True):
        replica = Replica(build(ARCHITECTURES["llama"]).bfloat16(), world(), shard, torch.float32)
        before = {name: master.clone() for name, master in replica.masters.named_parameters()}
        optimizer = replica.adamw(lr=1e-6)
        for _ in range(2):
            replica.step(0)
            optimizer.step()
            replica.masters.publish()
        for name, master in replica.masters.named_parameters():
            moved = (master - before[name]).abs().max()
            assert 1e-7 < moved < 1e-5, (name, moved)
            parameter = dict(replica.model.named_parameters())[name]
            assert torch.equal(replica.own(parameter.detach(), name), master.detach().bfloat16())
            everywhere = replica.data.all_gather(parameter.detach())
            assert all(torch.equal(parameter, other) for other in everywhere), name


def masters_on_the_host_to_the_bit() -> None:
    """Weights after some steps, in either dtype, sharded or not; the losses are scaled in one of them."""
    for dtype, shard in ((None, False), (None, True), (torch.float32, False), (torch.float32, True)):
        trained = []
        for on_host in (False, True):
            model = build(ARCHITECTURES["llama"]).to(torch.float32 if dtype is None else torch.bfloat16)
            replica = Replica(model, world(), shard, dtype, on_host=on_host)
            optimizer = replica.adamw()
            for seed in range(3):
                optimizer.zero_grad()
                replica.step(seed, 4.0 if seed == 1 else 1.0)
                optimizer.step()
                replica.masters.publish()
            masters = dict(replica.masters.named_parameters())
            trained.append({**dict(model.named_parameters()), **{f"{name}'s master": m for name, m in masters.items()}})
            own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
            apart = own.isdisjoint(master.untyped_storage().data_ptr() for master in masters.values())
            assert apart == (on_host or dtype is not None)
        assert all(torch.equal(tensor, trained[1][name]) for name, tensor in trained[0].items()), (dtype, shard)


@no_rounding_inside()
def rows_that_ranks_of_one_process_share_are_complete() -> None:
    """Both ranks of a pipeline in this process compute with the rows of a spread head, and add to their gradients."""
    data = world()
    inputs, labels = batch(0, data.size)
    mine = slice(ROWS * data.rank, ROWS * (data.rank + 1))
    for name, shard in (("llama, tied", "none"), ("llama, tied", "optimizer"), ("llama", "none")):
        whole = build(ARCHITECTURES[name], seed=3)
        unsplit_step(whole, inputs, labels)
        wanted = gradients(whole)
        for place in ("device", "host"):
            settings = {"slices": 2, "num_ranks": 2, "vocabulary": "spread", "shard": shard, "optimizer": place}
            pipe = make_pipe(build(ARCHITECTURES[name], seed=3), mesh=make_mesh(1, data.size, 1), **settings)
            pipe.step(inputs[mine], labels[mine])
            for piece in pipe.parameter_shards():
                gradient = piece.parameter.grad
                assert gradient is not None
                rows = wanted[piece.name][piece.first_row :][: len(gradient)]
                assert gradient_error({"": rows}, {"": gradient}) < BOUND, (name, shard, place, piece.name)


class Short(nn.Module):
    """Parameters of fewer rows than replicas, of rows that do not divide, of none, and of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"scalar": (), "one": (1, 3), "three": (3,), "seven": (7, 2)}.items():
            values = torch.randn(shape, dtype=torch.float64, generator=generator)
            self.register_parameter(name, nn.Parameter(values))
        self.register_parameter("narrow", nn.Parameter(torch.ones(5)))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(parameter.double().pow(3).sum() for parameter in self.parameters())


def short_parameters_are_on_some_replicas() -> None:
    data = world()
    for dtype in (None, torch.float64):
        model, whole = Short(), Short()
        masters = MasterParameters([*model.named_parameters()], held_by(data), True, dtype)
        assert ("scalar" in dict(masters.named_parameters())) == (data.rank == 0)
        assert all(master.ndim == whole.get_parameter(name).ndim for name, master in masters.named_parameters())
        reduced = GradientReduction({0: [*model.named_parameters()]}, held_by(data), RankGroup(), none_partial, masters)
        optimizers = [
            torch.optim.AdamW([p for _, p in named], lr=1e-2)
            for named in (masters.named_parameters(), whole.named_parameters())
        ]
        for x in torch.tensor([1.0, 0.3], dtype=torch.float64):
            reduced.begin()
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(x * (data.rank + 1)).backward()
            reduced.reduce(0)
            reduced.finish()
            whole(x * sum(range(1, data.size + 1))).backward()
            for optimizer in optimizers:
                optimizer.step()
            masters.publish()
        for name, parameter in model.named_parameters():
            wanted = whole.get_parameter(name)
            bound = 1e-12 if wanted.dtype == torch.float64 else 1e-6
            assert ((parameter - wanted).abs() <= bound * wanted.abs()).all(), (name, dtype)
        assert sum(data.gather(len(masters.rows("seven")))) == 7


def all_ranks_skip_the_same_step() -> None:
    """One gradient of one rank isn't finite: nobody steps, the scale halves; the next step is good everywhere."""
    everyone = world()
    pipe = make_pipe(
        build(ARCHITECTURES["llama"]).half(),
        mesh=make_mesh(1, everyone.size, 1),
        parallel=Parallelism(shard="optimizer"),
        master_dtype=torch.float32,
    )
    scale, optimizer = LossScale(scale=2.0**8), torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    mine = slice(ROWS * everyone.rank, ROWS * (everyone.rank + 1))
    for step in range(2):
        optimizer.zero_grad()
        inputs, labels = batch(step, everyone.size)
        pipe.step(inputs[mine], labels[mine], loss_scale=scale.scale)
        if step == 0 and everyone.rank == everyone.size - 1:
            next(iter(pipe.parameters())).grad[0, 0] = math.nan
        finite = bool(pipe.clip_grad_norm_(1.0).isfinite())
        scale.update(finite)
        if finite:
            optimizer.step()
        assert everyone.gather(finite) == [step == 1] * everyone.size
        unmoved = all(torch.equal(old, new) for old, new in zip(before, pipe.parameters(), strict=True))
        assert unmoved == (step == 0)
    assert scale.scale == 2.0**7
    assert scale.num_skipped == 1


CASES = by_name(
    sums_are_those_of_one_process,
    missing_gradients_count_as_zeros,
    calls_and_bytes_are_those_of_the_formulas,
    reductions_run_beside_the_pipeline,
    tied_weights_are_delivered_whole,
    partial_gradients_are_summed_over_tensor_ranks,
    scaled_losses_have_unscaled_gradients,
    three_steps_of_adamw,
    sharded_and_replicated_to_the_bit,
    slices_are_added_in_float32,
    masters_keep_small_updates,
    masters_on_the_host_to_the_bit,
    rows_that_ranks_of_one_process_share_are_complete,
    short_parameters_are_on_some_replicas,
    all_ranks_skip_the_same_step,
)

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
