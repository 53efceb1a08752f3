"""Cases of data_parallel.py: a step's gradients, summed over replicas and over tensor ranks."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import nn

from slipstream.model.weight_gradients import add_weight_gradients_in_place
from slipstream.parallel import RankGroup, Ranks, make_mesh
from slipstream.parallel.gradients import GradientReduction, MasterParameters
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    no_rounding_inside,
    unsplit_step,
)
from support.parallel.replica import Replica, batch, local_loss, none_partial, world


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
            masters = MasterParameters([(n, p) for n, p in model.named_parameters() if n != head_name], data, shard)
            stages = {0: [(name, embedding)], 1: [(n, p) for n, p in model.named_parameters() if n != head_name]}
            stages[1].append((name, head))
            reduced = GradientReduction(stages, data, RankGroup(), none_partial, masters, whole={name})
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
            masters = MasterParameters(named, axes.data, shard, bucket_bytes=1000)
            axes.tensor.payload.clear()
            reduced = GradientReduction({0: named}, axes.data, axes.tensor, added_over, masters)
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
