"""What each process of test_meshes runs: FSDP2 alone, and a Pipeline whose parameters FSDP2 shards."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from benchmarks.papers.zero3 import exchanged, zero3_bytes
from benchmarks.zero3 import CountedCollectives, sent, shard
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from slipstream import Pipeline, SlipstreamError, make_mesh
from slipstream.cost import StateBytes
from slipstream.model import causal_cross_entropy
from slipstream.parallel.zero import ShardedParameters
from slipstream.pipeline import ExpectedBatch, held_beside
from slipstream.planner.search import GlobalBatch, evaluate
from slipstream.schedule import Op
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.live_memory import rehearsed_bytes
from support.parallel.group_cases import by_name, run_cases
from support.pipelines import make_pipe

SLICES = [5, 30, 17, 12]
EVEN = llama(vocab_size=64)  # rows that two and four processes divide
ROWS = 2  # of each replica


def batch(step: int, replicas: int) -> tuple[Tensor, Tensor]:
    """Rows of which every next one has fewer labels that count."""
    inputs = tokens(batch=ROWS * replicas, seed=step)
    labels = inputs.clone()
    for row in range(ROWS * replicas):
        labels[row, : 7 * row] = -100
    return inputs, labels


def fsdp2_step(config: LlamaConfig) -> tuple[dict[str, Tensor], CountedCollectives, float]:
    """One step of FSDP2 alone: whole gradients, what was counted, and the parameters' bytes."""
    model = build(config, seed=3)
    num_bytes = float(sum(parameter.nbytes for parameter in model.parameters()))
    shard(model, model.model.layers)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs, labels = batch(0, size)
    rows = slice(ROWS * rank, ROWS * (rank + 1))
    with CountedCollectives() as counted:
        logits = model(input_ids=inputs[rows], use_cache=False).logits
        total, _ = causal_cross_entropy(logits[:, :-1], labels[rows, 1:])
        (total / (labels[:, 1:] != -100).sum()).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}, counted, num_bytes


def fsdp2_sends_what_the_formula_says() -> None:
    """To the byte, where all rows divide; each weight is gathered twice and its gradient scattered once."""
    _, counted, num_bytes = fsdp2_step(EVEN)
    assert counted.payload == Counter(all_gather=2 * num_bytes, reduce_scatter=num_bytes), counted.payload
    size = dist.get_world_size()
    assert sent(counted.payload, size) == zero3_bytes(num_bytes, size) == 3 * (size - 1) / size * num_bytes


@no_rounding_inside()
def both_systems_have_the_gradients_of_the_whole_model() -> None:
    """FSDP2 alone, and PTD-P on the same processes."""
    size = dist.get_world_size()
    whole = build(EVEN, seed=3)
    unsplit_step(whole, *batch(0, size))
    expected = {name: p.grad for name, p in whole.named_parameters()}
    zero3, _, _ = fsdp2_step(EVEN)
    assert gradient_error(expected, zero3) < BOUND
    for pp, dp, tp in [(size, 1, 1), (1, 1, size)] if size == 2 else [(2, 2, 1), (2, 1, 2)]:
        pipe = pipeline(EVEN, pp, dp, tp=tp)
        step(pipe, 0, size)
        for name, found, wanted in pieces(pipe, expected):
            assert gradient_error({name: wanted}, {name: found}) < BOUND, (pp, dp, tp, name)
            assert gradient_error({name: zero3[name]}, {name: expected[name]}) < BOUND


def pipeline(
    config: LlamaConfig, pp: int, dp: int, frozen: str = "nothing", tp: int = 1, **settings: object
) -> Pipeline:
    settings = {"num_microbatches": ROWS * dist.get_world_size() // dp, "slices": SLICES, **settings}
    model = freeze(build(config, seed=3), frozen)
    return make_pipe(model, mesh=make_mesh(pp, dp, tp), **settings)


def freeze(model: PreTrainedModel, part: str) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def rows_of(pipe: Pipeline, seed: int, replicas: int) -> tuple[Tensor, Tensor]:
    """This replica's of the rows of `replicas` replicas, however many there are."""
    mine = ROWS * replicas // pipe.num_replicas
    rows = slice(pipe.replica * mine, (pipe.replica + 1) * mine)
    inputs, labels = batch(seed, replicas)
    return inputs[rows], labels[rows]


def step(pipe: Pipeline, seed: int, replicas: int, loss_scale: float = 1.0) -> Tensor:
    return pipe.step(*rows_of(pipe, seed, replicas), loss_scale=loss_scale)


def pieces(pipe: Pipeline, whole: dict[str, Tensor], what: str = "grad") -> list[tuple[str, Tensor, Tensor]]:
    """This rank's part of every parameter it has: found, and the whole model's."""
    found = []
    for piece in pipe.parameter_shards():
        tensor = getattr(piece.parameter, what).detach()
        rows = piece.share.take(whole[piece.name].detach())[piece.first_row :][: piece.parameter.shape[0]]
        found.append((piece.name, tensor, rows))
    assert found
    return found


def sharded(pipe: Pipeline) -> ShardedParameters:
    """What its parameters are."""
    assert isinstance(pipe._runtime.parameters._masters, ShardedParameters)
    return pipe._runtime.parameters._masters


@no_rounding_inside()
def sharded_parameters_train_as_the_whole_model() -> None:
    """Three steps of AdamW over token slices and microbatches, in every order of forwards and backwards."""
    size = dist.get_world_size()
    cases = [("llama", "1f1b", 1, "none"), ("gpt2", "1f1b", 1, "stage+full"), ("mixtral", "gpipe", 1, "selective")]
    for pp, dp in [(1, 2)] if size == 2 else [(2, 2), (1, 4)]:
        several = [("qwen3", "interleaved-1f1b", 2, "full"), ("llama", "zb-v", 2, "none")] if pp > 1 else []
        for model, schedule, stages_per_rank, recompute in cases + several:
            config, frozen = untied(model), "k_proj" if model == "mixtral" else "nothing"
            settings = {"schedule": schedule, "stages_per_rank": stages_per_rank, "recompute": recompute}
            pipe = pipeline(config, pp, dp, frozen, shard="parameters", **settings)
            rows = sharded(pipe)
            whole = freeze(build(config, seed=3), frozen)
            optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in (pipe.parameters(), whole.parameters())]
            for seed in range(3):
                for optimizer in optimizers if seed != 1 else []:  # that step adds to the gradients of the first
                    optimizer.zero_grad()
                inputs, labels = batch(seed, size)
                wanted = unsplit_step(whole, inputs, labels)
                assert abs(step(pipe, seed, size, loss_scale=2.0**seed) - wanted) < 1e-9, (model, schedule, seed)
                expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
                compare(pipe, rows, expected, "grad", (pp, dp, model, schedule, seed))
                norms = pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
                assert abs(norms[0] - norms[1]) < 1e-9 * norms[1]
                pipe.evaluate(*rows_of(pipe, seed, size))
                for optimizer in optimizers:
                    optimizer.step()
            compare(pipe, rows, dict(whole.named_parameters()), "data", (pp, dp, model, schedule), bound=1e-9)
            with tempfile.TemporaryDirectory() as folder:
                pipe.save_pretrained(folder)
                if pipe.leads:
                    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
                    for name, tensor in whole.state_dict().items():
                        assert torch.allclose(saved[name], tensor, rtol=1e-9, atol=1e-9), name


def untied(model: str) -> LlamaConfig:
    config = copy.deepcopy(ARCHITECTURES[model])
    config.tie_word_embeddings = False
    return config


def compare(
    pipe: Pipeline, rows: ShardedParameters, whole: dict[str, Tensor], what: str, case: object, bound: float = BOUND
) -> None:
    """This replica's rows against the whole model's; all of them together are all."""
    own = {name: p for stage in pipe._runtime.stages.values() for name, p in stage.named_parameters()}
    held = dict(rows.named_parameters())
    floor = max(tensor.abs().max() for tensor in whole.values()).detach().reshape(1)
    count = torch.zeros((), dtype=torch.int64)
    for name, parameter in own.items():
        assert isinstance(parameter, DTensor), name  # nothing is whole between steps
        mine = rows.rows(name)
        count += len(mine)
        assert (name in held) == (len(mine) > 0)
        if mine and name not in whole:
            assert held[name].grad is None
            assert not held[name].requires_grad
        elif mine:
            found = getattr(held[name], what).detach()
            wanted = whole[name].detach()[mine.start : mine.stop]
            error = gradient_error({name: wanted, "all": floor}, {name: found, "all": floor})
            assert error < bound, (case, name, error)
    assert int(pipe.axes["dp"].sum(count)) == sum(parameter.shape[0] for parameter in own.values())


def sharded_parameters_send_what_the_formula_says() -> None:
    """Gathered once a step and scattered once, whatever the number of slices and microbatches."""
    size = dist.get_world_size()
    for slices in (1, 4):
        pipe = pipeline(EVEN, 1, size, slices=slices, shard="parameters")
        sharded(pipe)
        data = pipe.axes["dp"]
        before = data.payload["reduce_scatter"]
        with CountedCollectives() as counted:
            step(pipe, 0, size)
        num_bytes = sum(p.nbytes for p in build(EVEN).parameters())
        assert data.payload["reduce_scatter"] - before == num_bytes
        agreement = 7 * 8 * size  # seven numbers of each rank
        assert counted.payload["reduce_scatter"] == num_bytes
        assert counted.payload["all_gather"] == num_bytes + agreement, counted.payload
        assert counted.payload["all_reduce"] < 100  # losses
        assert exchanged(num_bytes, size, 2) < zero3_bytes(num_bytes, size)


def memory_is_that_of_the_rows_between_steps() -> None:
    size = dist.get_world_size()
    pipe = pipeline(EVEN, 1, size, shard="parameters")
    rows = sharded(pipe)
    step(pipe, 0, size)
    num_bytes = sum(parameter.nbytes for parameter in build(EVEN).parameters())
    assert sum(parameter.nbytes for _, parameter in rows.named_parameters()) == num_bytes / size
    assert sum(parameter.grad.nbytes for _, parameter in rows.named_parameters()) == num_bytes / size
    rows.begin()
    whole = [parameter for stage in pipe._runtime.stages.values() for parameter in stage.model.parameters()]
    assert sum(parameter.untyped_storage().nbytes() for parameter in whole) == num_bytes
    for number in pipe._runtime.stages:
        rows.reduce(number)
    assert sum(parameter.untyped_storage().nbytes() for parameter in whole) == 0
    rows.finish()


def wider_rows_are_the_masters_of_a_sharded_optimizer() -> None:
    """float32 weights with float64 rows: to the bit the steps, updates and saved weights of ZeRO-1 with such masters.

    Two replicas, whose sums have one order.
    """
    size, found = dist.get_world_size(), dict[str, list[Tensor]]()
    for sharding in ("optimizer", "parameters"):
        dtypes: dict[str, object] = {"dtype": torch.float32, "master_dtype": torch.float64}
        pipe = pipeline(EVEN, size // 2, 2, shard=sharding, recompute="full", **dtypes)
        assert {parameter.dtype for parameter in pipe.parameters()} == {torch.float64}
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        found[sharding] = []
        for seed in range(3):
            optimizer.zero_grad()
            found[sharding].append(step(pipe, seed, size))
            gradients = [piece.parameter.grad for piece in sorted(pipe.parameter_shards(), key=lambda each: each.name)]
            assert {gradient.dtype for gradient in gradients} == {torch.float64}
            found[sharding] += gradients
            optimizer.step()
            found[sharding].append(pipe.evaluate(*rows_of(pipe, seed, size)))
        state = pipe.state_dict()
        assert all(tensor.dtype == torch.float32 for tensor in state.values())
        found[sharding] += [state[name] for name in sorted(state)]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other)


def a_step_is_counted_with_its_rows() -> None:
    """Whole weights and gradients, and this replica's rows with what AdamW keeps of them."""
    size = dist.get_world_size()
    dtypes: dict[str, object] = {"dtype": torch.float32, "master_dtype": torch.float64}
    pipe = pipeline(EVEN, 1, size, shard="parameters", **dtypes)
    table = pipe.memory_table(*rows_of(pipe, 0, size))
    number = sum(parameter.numel() for parameter in build(EVEN).parameters())
    buffers = sum(buffer.nbytes for buffer in pipe._runtime.stages[0].model.buffers())
    assert table.parameters[0] == (4 + 8 / size) * number + buffers
    assert table.optimizer[0] == 2 * 8 / size * number
    assert table.gradients[0, Op.B] == 8 * number
    step(pipe, 0, size)


def a_plan_counts_what_is_sharded() -> None:
    """Before the stages are made, as it is rehearsed then."""
    size, counted = dist.get_world_size(), {}
    for sharding in ("none", "optimizer", "parameters"):
        pipe = pipeline(EVEN, 1, size, shard=sharding, schedule="auto", slices="auto", seq_len=ExpectedBatch(64))
        plan, (inputs, _) = pipe.plan, rows_of(pipe, 0, size)
        assert plan is not None
        assert plan.costs is not None
        assert (plan.plan.open_fields, plan.plan.data_parallel, plan.plan.shard) == ((), size, sharding)
        batch, beside = GlobalBatch(64, ROWS * size), held_beside(ROWS * 64)
        (counted[sharding],) = evaluate(plan.plan, plan.costs, batch, StateBytes.of("float64"), beside=beside).peaks()
        assert 0.95 < counted[sharding] / rehearsed_bytes(pipe, inputs) < 1.1
    assert counted["optimizer"] < counted["parameters"] < counted["none"]


def what_cant_be_sharded_is_refused() -> None:
    size = dist.get_world_size()
    with pytest.raises(SlipstreamError, match=r"tied to .*shard='optimizer'"):
        pipeline(ARCHITECTURES["llama, tied"], 1, size, shard="parameters")
    with pytest.raises(SlipstreamError, match=f"tp={size}"):
        pipeline(EVEN, 1, 1, tp=size, shard="parameters")
    pipe = pipeline(EVEN, 1, size, shard="parameters")
    name, parameter = next(iter(sharded(pipe).named_parameters()))
    parameter.requires_grad_(False)
    with pytest.raises(SlipstreamError, match=name):
        step(pipe, 0, dist.get_world_size())


CASES = by_name(
    fsdp2_sends_what_the_formula_says,
    both_systems_have_the_gradients_of_the_whole_model,
    sharded_parameters_train_as_the_whole_model,
    sharded_parameters_send_what_the_formula_says,
    memory_is_that_of_the_rows_between_steps,
    wider_rows_are_the_masters_of_a_sharded_optimizer,
    a_step_is_counted_with_its_rows,
    a_plan_counts_what_is_sharded,
    what_cant_be_sharded_is_refused,
)

if __name__ == "__main__":
    warnings.filterwarnings("error", module=r"torch\.distributed\.fsdp")
    run_cases(CASES, sys.argv[1:])
