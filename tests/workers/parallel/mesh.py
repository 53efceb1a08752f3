"""What each of four processes of test_meshes runs: what meshes promise in addition to equal gradients."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import slipstream
from slipstream import Parallelism, Pipeline, Precision, Runtime, Schedule, SlipstreamError, make_mesh
from slipstream.cost import Device, load_cluster
from slipstream.model import causal_cross_entropy
from support.architectures import (
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.hybrids import HYBRIDS
from support.parallel.group_cases import by_name, run_cases, shared_folder
from support.parallel.shared_models import CONFIGS
from support.pipelines import make_pipe

LLAMA = CONFIGS["llama"]  # of two layers, as all of them


def pipeline(mesh: tuple[int, int, int], name: str = "llama", **settings: object) -> Pipeline:
    settings = {"dtype": torch.float64, "slices": 4, "num_microbatches": 2, **settings}
    return make_pipe(CONFIGS[name], seed=3, mesh=make_mesh(*mesh), **settings)


def check_gradients(pipe: Pipeline, wanted: dict[str, Tensor]) -> None:
    """This rank's rows of its shares of the trained parameters have the whole model's gradients."""
    for piece in pipe.parameter_shards():
        if piece.name in wanted:
            gradient = piece.parameter.grad
            assert gradient is not None
            rows = piece.share.take(wanted[piece.name])[piece.first_row :]
            error = gradient_error({"": rows[: len(gradient)]}, {"": gradient})
            assert error < BOUND, (piece.name, error)


def link_bytes() -> None:
    """Each of tp ranks sends exactly 1/tp of what a stage hands on; without sequence parallelism it is gathered there,
    one all-gather a message, with it nothing is."""
    inputs = tokens()
    whole = 2 * 64 * LLAMA.hidden_size * 8  # bytes of a batch between two stages, in one direction
    for sequence in (False, True):
        pipe = pipeline((2, 1, 2), sequence_parallel=sequence)
        pipe.step(inputs, inputs)
        assert pipe.bytes_sent == whole // 2, (sequence, pipe.bytes_sent)
        group = pipe.axes["tp"]
        before = group.calls["all_gather"]
        pipe.evaluate(inputs, inputs)
        gathered = group.calls["all_gather"] - before
        # without: 8 messages come to the second stage. With: two a layer for its regions, and the head's
        layers, slices = 1, 8
        expected = slices * pipe.rank if not sequence else slices * (2 * layers + pipe.rank)
        assert gathered == expected, (sequence, pipe.rank, gathered, expected)


def export() -> None:
    """A mesh's export is the model it was made of, and any mesh reads it."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    inputs, labels = tokens(), labels_of(tokens())
    for name in ("llama, tied", "gpt2"):
        path = Path(folder[0]) / name.replace(", ", "-")
        pipe = pipeline((2, 1, 2), name, shard="none")
        loss = pipe.evaluate(inputs, labels)
        pipe.save_pretrained(path)
        whole = build(CONFIGS[name], seed=3).state_dict()
        read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).state_dict()
        assert all(torch.equal(tensor, read[key]) for key, tensor in whole.items())
        again = Pipeline.from_pretrained(
            path,
            precision=Precision(dtype=torch.float64),
            runtime=Runtime(self_check=False),
            mesh=make_mesh(1, 2, 2),
            slices=2,
        )
        half = slice(again.replica, again.replica + 1)
        assert abs(again.evaluate(inputs[half], labels[half]) - loss) < BOUND


def dropout() -> None:
    """What ranks hold alike stays alike under dropout: where they compute the same, they drop the same."""
    config = CONFIGS["gpt2"].__class__(**CONFIGS["gpt2"].to_dict())
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.3
    inputs = tokens()
    for sequence in (False, True):
        pipe = make_pipe(
            config,
            dtype=torch.float64,
            parallel=Parallelism(sequence_parallel=sequence),
            mesh=make_mesh(2, 1, 2),
            slices=4,
        )
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(inputs, inputs))
            optimizer.step()
        still = pipe.evaluate(inputs, inputs)
        assert abs(losses[0] - still) > 1e-3  # something was dropped, or learned
        for piece in pipe.parameter_shards():
            if piece.share.is_whole:
                others = pipe.axes["tp"].gather(piece.parameter.detach().clone())
                assert torch.equal(others[0], others[1]), (sequence, piece.name)
        assert len({float(each) for each in pipe.axes["tp"].gather(losses[1])}) == 1


def accumulation() -> None:
    """Steps without zero_grad add up, whatever is reduced, sharded or tied; frozen weights stay as they are."""
    _accumulate("llama", (1, 2, 2), frozen="model.embed_tokens.weight")
    for mesh in ((2, 1, 2), (2, 2, 1)):  # the tied weight's two gradients come from two stages
        _accumulate("llama, tied", mesh)


def _accumulate(name: str, mesh: tuple[int, int, int], frozen: str = "") -> None:
    def model() -> PreTrainedModel:
        built = build(CONFIGS[name], seed=3)
        if frozen:
            built.get_parameter(frozen).requires_grad_(False)
        return built

    whole = model()
    batches = [(tokens(batch=4, seed=seed), labels_of(tokens(batch=4, seed=seed))) for seed in range(2)]
    for inputs, labels in batches:
        unsplit_step(whole, inputs, labels)
    wanted = gradients(whole)
    for shard in (False, True)[: mesh[1]]:  # one replica has all rows
        pipe = make_pipe(
            model(),
            mesh=make_mesh(*mesh),
            slices=4,
            parallel=Parallelism(shard="optimizer" if shard else "none", sequence_parallel=True),
        )
        each = 4 // pipe.num_replicas
        for inputs, labels in batches:
            mine = slice(each * pipe.replica, each * (pipe.replica + 1))
            pipe.step(inputs[mine], labels[mine])
        check_gradients(pipe, wanted)


def auto() -> None:
    """All ranks of a mesh settle on one order and one slicing, though each pipeline measures its own."""
    pipe = pipeline((2, 1, 2), schedule="auto", slices="auto", num_microbatches=1)
    inputs, expected = tokens(), None
    while pipe.is_tuning:
        loss = pipe.step(inputs, inputs)
        expected = loss if expected is None else expected
        assert abs(loss - expected) < BOUND
    chosen: list[object] = [None] * 4
    dist.all_gather_object(chosen, (str(pipe.layout.training), pipe.slices(64)))
    assert len(set(map(str, chosen))) == 1


def limit() -> None:
    """memory_limit holds on a mesh: what fits runs, what doesn't is refused on every rank."""
    inputs, settings = tokens(), {"slices": 2, "num_microbatches": 1}
    pipeline((2, 1, 2), memory_limit=1e9, **settings).step(inputs, inputs)
    with pytest.raises(SlipstreamError, match=r"too much .*, in the schedule"):
        pipeline((2, 1, 2), memory_limit=1e5, **settings).step(inputs, inputs)


def ends_apart(every: bool = False) -> None:
    """Stages that are the embedding alone and the head alone, their weights shared by tensor ranks or replicas. Each
    model and end is on one mesh, or on every one."""
    inputs, labels = tokens(batch=4), labels_of(tokens(batch=4))
    meshes: list[Any] = [
        ((2, 1, 2), {"sequence_parallel": False}),
        ((2, 2, 1), {}),
        ((2, 1, 2), {"sequence_parallel": True}),
    ]
    for number, (name, partition) in enumerate(product(("llama, tied", "gpt2"), ([0, 2], [2, 0]))):
        whole = build(CONFIGS[name], seed=3)
        expected = unsplit_step(whole, inputs, labels)
        wanted = gradients(whole)
        for mesh, settings in meshes if every else [meshes[number % len(meshes)]]:
            pipe = pipeline(mesh, name, partition=partition, **settings)
            rows = slice(0, 4) if mesh[1] == 1 else slice(2 * pipe.replica, 2 * pipe.replica + 2)
            assert abs(pipe.step(inputs[rows], labels[rows]) - expected) < BOUND * expected
            check_gradients(pipe, wanted)


def planned_halves() -> None:
    """A plan with a cut inside layers that two ranks share, a found order and found slices trains exactly."""
    config, inputs, labels = CONFIGS["llama"], tokens(batch=1), labels_of(tokens(batch=1))
    whole = build(config, seed=3)
    expected = unsplit_step(whole, inputs, labels)
    wanted = gradients(whole)
    plan: list[Any] = [None]
    if dist.get_rank() == 0:
        plan[0] = _planned(config, inputs.shape[1])
    dist.broadcast_object_list(plan)
    schedule, slices, partition = plan[0]
    assert any(layers % 1 for layers in partition)
    for sequence in (False, True):
        pipe = pipeline(
            *((2, 1, 2), "llama"),
            **{"schedule": schedule, "slices": slices, "partition": partition},
            **{"num_microbatches": 1, "sequence_parallel": sequence},
        )
        assert abs(pipe.step(inputs, labels) - expected) < BOUND * expected
        check_gradients(pipe, wanted)


def planned_from_measured_costs() -> None:
    """A pipeline that ranks share is planned from what its shares cost, the same on all of them, and trains exactly."""
    inputs, labels = tokens(length=32), labels_of(tokens(length=32))
    whole = build(CONFIGS["llama, tied"], seed=3)
    expected = unsplit_step(whole, inputs, labels)
    wanted = gradients(whole)
    free = {"schedule": "auto", "num_ranks": 2, "slices": "auto", "seq_len": inputs.shape[1]}
    pipe = pipeline((1, 1, 2), "llama, tied", **free, sequence_parallel=True)
    assert pipe.plan is not None
    chosen: list[object] = [None] * 2
    dist.all_gather_object(chosen, (str(pipe.order), pipe.plan.slices, pipe.plan.partition))
    assert len(set(chosen)) == 1
    assert abs(pipe.step(inputs, labels) - expected) < BOUND * expected
    check_gradients(pipe, wanted)


def pipelines_beside_each_other() -> None:
    """Six processes: the middle rank of three is in more groups than the others, so groups can't be told apart by how
    many a rank is in."""
    inputs, labels = tokens(), labels_of(tokens())
    whole = build(CONFIGS["llama, tied"], seed=3)
    expected = unsplit_step(whole, inputs, labels)
    pipe = pipeline((3, 1, 2), "llama, tied", partition=[1, 1, 0])
    assert abs(pipe.step(inputs, labels) - expected) < BOUND * expected
    check_gradients(pipe, gradients(whole))


def carried_states(every: bool = False) -> None:
    """Ranks that share layers carry whole states, also where one token is alone in its slice."""
    inputs, labels = tokens(), labels_of(tokens())
    for name, sequence in (("qwen3_5_text", True), ("jamba", False), ("kimi_linear", True))[: 2 + every]:
        with no_rounding_inside():
            whole = build(HYBRIDS[name], seed=3)
            expected = unsplit_step(whole, inputs, labels)
            pipe = make_pipe(
                build(HYBRIDS[name], seed=3),
                mesh=make_mesh(2, 1, 2),
                schedule="zb-h1",
                slices=[20, 1, 30, 13],
                num_microbatches=2,
                parallel=Parallelism(sequence_parallel=sequence),
            )
            assert abs(pipe.step(inputs, labels) - expected) < BOUND * expected
        wanted = gradients(whole)
        check_gradients(pipe, wanted)


def packed_rows(every: bool = False) -> None:
    """Ranks that share tokens between the parts of a layer take rows of several sequences, as the first thing that a
    pipeline runs: of documents, of a list, and of a batch with padding. Each model takes one kind, or every one."""
    inputs, labels = tokens(), labels_of(tokens())
    cuts, lengths = [[30, 34], [64]], [64, 41]
    documents = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in cuts])
    rows = [[row[:length] for row, length in zip(each, lengths, strict=True)] for each in (inputs, labels)]
    counted = torch.arange(64) < torch.tensor(lengths)[:, None]
    padded = {"input_ids": inputs, "attention_mask": counted.long(), "labels": labels.masked_fill(~counted, -100)}
    apart = [list(row.split(each)) for row, each in zip(inputs, cuts, strict=True)]
    of_apart = [list(row.split(each)) for row, each in zip(labels, cuts, strict=True)]
    kinds: list[Any] = [
        ((inputs, labels), {"document_ids": documents}, ([*apart[0], *apart[1]], [*of_apart[0], *of_apart[1]])),
        (rows, {}, rows),
        ((padded,), {}, rows),
    ]
    for number, config in enumerate((CONFIGS["phi3"], CONFIGS["llama"], HYBRIDS["qwen3_5_text"])):
        for arguments, more, parts in kinds if every else [kinds[number]]:
            whole, count = build(config, seed=3), sum(int((label[1:] != -100).sum()) for label in parts[1])
            with no_rounding_inside():
                losses = []
                for ids, label in zip(*parts, strict=True):
                    loss = causal_cross_entropy(whole(input_ids=ids[None]).logits[:, :-1], label[None, 1:])[0] / count
                    loss.backward()
                    losses.append(float(loss.detach()))
                pipe = make_pipe(
                    build(config, seed=3),
                    mesh=make_mesh(2, 1, 2),
                    slices=3,
                    parallel=Parallelism(sequence_parallel=True),
                )
                assert abs(pipe.step(*arguments, **more) - sum(losses)) < BOUND * sum(losses)
            wanted = gradients(whole)
            check_gradients(pipe, wanted)


def _planned(config: PretrainedConfig, seq_len: int) -> tuple[Schedule, list[int], list[float]]:
    """Returns what `slipstream plan` finds for four devices on which kernels cost nothing, so that slices are short."""
    numbers = {"memory": 1e9, "memory_bandwidth": 1e10, "kernel_seconds": 0.0}
    device = Device(name="small", flops={"float32": 1e9}, matmul_efficiency=1.0, **numbers)
    cluster = replace(load_cluster("h100-dgx"), device=device, num_nodes=1, devices_per_node=4)
    degrees = {"tensor_parallel": 2, "pipeline_parallel": 2, "schedule": "auto", "recompute": "none", "offload": 0.0}
    best = slipstream.plan(config, cluster, seq_len=seq_len, global_batch=1, dtype="float32", **degrees).best
    assert best.joint is not None
    return best.joint.schedule, [int(length) for length in best.plan.slices], [*map(float, best.plan.partition)]


def refusals() -> None:
    """Named before anything runs."""
    for mesh, reason in (
        ((3, 1, 1), r"pp=3 x dp=1 x tp=1 has 3 ranks, but 4 processes run. With dp=1 and tp=1 choose pp=4"),
        ((1, 3, 1), r"has 3 ranks, but 4 processes run. Choose numbers whose product is 4"),
    ):
        with pytest.raises(SlipstreamError, match=reason):
            make_mesh(*mesh)
    with pytest.raises(SlipstreamError, match="loss_fn with tensor parallelism: no rank has all logits"):
        pipeline((2, 1, 2), loss_fn=lambda outputs, targets: (outputs.sum(), targets.numel()))
    with pytest.raises(SlipstreamError, match="can't hold the values of"):
        pipeline((2, 2, 1), master_dtype=torch.float32)
    config = LLAMA.__class__(**LLAMA.to_dict())
    config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size = 6, 3, 8, 48
    with pytest.raises(SlipstreamError, match="heads"):
        make_pipe(config, mesh=make_mesh(1, 1, 4))


def low_precision() -> None:
    """bfloat16 weights with float32 masters learn as float32 does, sharded or not; the masters are what is exported to
    checkpoints, the weights follow them."""
    inputs = tokens(batch=4)
    curves = {}
    for name, settings in {
        "float32": {"dtype": torch.float32},
        "bf16": {"dtype": torch.bfloat16, "master_dtype": torch.float32},
        "bf16, sharded": {"dtype": torch.bfloat16, "master_dtype": torch.float32, "shard": "optimizer"},
    }.items():
        pipe = pipeline((2, 2, 1), **settings, slices=2, num_microbatches=1)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=6e-3)
        assert {parameter.dtype for parameter in pipe.parameters()} == {torch.float32}
        mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
        curve = []
        for step in range(6):
            optimizer.zero_grad()
            curve.append(float(pipe.step(inputs[mine], inputs[mine], loss_scale=8.0)))
            pipe.clip_grad_norm_(1.0)
            if step == 5:
                before = pipe.evaluate(inputs[mine], inputs[mine])  # ends nothing: the update is still to come
            optimizer.step()
        curves[name] = curve
        assert pipe.evaluate(inputs[mine], inputs[mine]) < before - 1e-4
    assert curves["float32"][-1] < 0.9 * curves["float32"][0]
    for name in ("bf16", "bf16, sharded"):
        error = max(abs(a - b) for a, b in zip(curves[name], curves["float32"], strict=True))
        assert error < 0.03, (name, error)


def optimizer_on_the_host() -> None:
    """To the bit as on the device: with replicas, stages and both, tied weights, norms that clip, and a checkpoint from
    which the other setting goes on, on another mesh."""
    inputs, places = tokens(batch=4), ("device", "host")
    for mesh, name, settings in (
        ((2, 2, 1), "llama, tied", {"dtype": torch.float32}),
        ((2, 2, 1), "llama", {"dtype": torch.bfloat16, "master_dtype": torch.float32, "shard": "optimizer"}),
        ((1, 2, 2), "llama", {"dtype": torch.float32, "shard": "optimizer"}),
    ):
        with shared_folder() as folder:
            runs = {}
            for place in places:
                loop = _Loop(mesh, name, settings | {"optimizer": place})
                losses = loop.train(inputs, 2)
                loop.pipe.save(folder / place, 2, optimizer=loop.optimizer)
                runs[place] = [losses + loop.train(inputs, 1), loop.pipe.state_dict()]
            for place, other in zip(places, reversed(places), strict=True):
                loop = _Loop(mesh, name, settings | {"optimizer": other}, seed=4)
                loop.pipe.load(folder / place, optimizer=loop.optimizer)
                runs[f"{other} after {place}"] = [loop.train(inputs, 1), loop.pipe.state_dict()]
        losses, state = runs["device"]
        for run, (found, weights) in runs.items():
            assert found == losses[-len(found) :], (mesh, run)
            assert all(torch.equal(tensor, weights[key]) for key, tensor in state.items()), (mesh, run)


class _Loop:
    """A pipeline and its optimizer, over copies of weights on the host or weights on the device."""

    def __init__(self, mesh: tuple[int, int, int], name: str, settings: dict[str, Any], seed: int = 3) -> None:
        options = {"slices": 2, "num_microbatches": 1, **settings}
        self.pipe = make_pipe(CONFIGS[name], seed=seed, mesh=make_mesh(*mesh), **options)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)

    def train(self, inputs: Tensor, num_steps: int) -> list[float]:
        each = len(inputs) // self.pipe.num_replicas
        mine = slice(each * self.pipe.replica, each * (self.pipe.replica + 1))
        found = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss = self.pipe.step(inputs[mine], inputs[mine])
            found += [float(loss), float(self.pipe.clip_grad_norm_(0.5))]
            self.optimizer.step()
        return found


def every_model_mesh_and_kind_of_rows() -> None:
    for case in (ends_apart, carried_states, packed_rows):
        case(every=True)


OTHERS = by_name(planned_from_measured_costs, pipelines_beside_each_other)  # of two and of six processes
OF_FOUR = by_name(
    link_bytes,
    export,
    dropout,
    accumulation,
    ends_apart,
    planned_halves,
    auto,
    carried_states,
    packed_rows,
    limit,
    refusals,
    low_precision,
    optimizer_on_the_host,
    every_model_mesh_and_kind_of_rows,
)
CASES = OTHERS | OF_FOUR

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
