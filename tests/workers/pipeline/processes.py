"""Cases of test_processes: steps of a causal LM on several ranks, compared with the unsplit model, and what ranks are
told that call something else, have another batch, or wait in vain."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import slipstream
from slipstream import Parallelism, Pipeline, Runtime, SlipstreamError
from slipstream.checkpoint import CheckpointFolder
from slipstream.comm import StagedTransport
from slipstream.comm.transport import TransportError
from slipstream.model import causal_cross_entropy
from slipstream.pipeline.token_values import TokenRule, TokenValues
from support import slow_copies
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    LENGTH,
    build,
    gradient_error,
    gradients,
    labels_of,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.parallel.group_cases import Case, by_name, shared_folder
from support.pipelines import make_pipe
from support.refusals import refused
from workers.parallel import exactness


@dataclass(frozen=True)
class CutCase(exactness.Case):
    """A way to train whose stages may end inside layers, and whose activations may wait in host memory."""

    offload: float = 0.0
    partition: tuple[float, ...] = ()

    def settings(self) -> dict[str, object]:
        return super().settings() | {"offload": self.offload, "partition": [*self.partition] or "auto"}


def exact(case: CutCase) -> None:
    """Three steps of AdamW with clipping follow the unsplit model; the loss is on every rank."""
    sizes = dist.get_world_size(), 1, 1
    with no_rounding_inside():
        error = exactness.run(case, sizes, slipstream.make_mesh(*sizes))
    assert error < BOUND, error


def timeline() -> None:
    """Every rank has the spans of all, and an evaluation's messages."""
    pipe = make_pipe(ARCHITECTURES["llama"], schedule="zb-v", stages_per_rank=2, num_microbatches=2, slices=4)
    loss = pipe.step(tokens(), tokens())
    assert abs(pipe.evaluate(tokens(), tokens()) - loss) < 1e-6
    found = pipe.timeline()
    assert {span.rank for span in found.spans} == set(range(dist.get_world_size()))
    crossings = sum(a != b for a, b in pairwise(pipe.layout.training.placement))
    assert len(found.messages) == 8 * crossings  # the forwards of the evaluation
    with pytest.raises(SlipstreamError, match=r"by their norm alone.* call pipe.clip_grad_norm_\(max_norm\)"):
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
    assert len([*pipe.parameters()]) == len([*pipe.named_parameters()])


def ragged(name: str) -> None:
    """Microbatches of their own rows and slices follow the unsplit model, in messages of as many shapes."""
    inputs = tokens(batch=5)
    labels, whole = labels_of(inputs), build(ARCHITECTURES[name], seed=3)
    wanted = unsplit_step(whole, inputs, labels)
    for schedule, v in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)):
        pipe = make_pipe(
            ARCHITECTURES[name],
            seed=3,
            dtype=torch.float64,
            schedule=schedule,
            stages_per_rank=v,
            microbatches=[[2, [30, 20, 14]], [1, [64]], [2, [5, 30, 17, 12]]],
        )
        assert abs(pipe.step(inputs, labels) - wanted) < BOUND
        found, expected = gradients(pipe), gradients(whole)
        assert gradient_error({key: expected[key] for key in found}, found) < BOUND
        assert pipe.evaluate(inputs, labels) == pytest.approx(float(wanted), rel=1e-9)


def auto() -> None:
    """All ranks settle on the same order and slices, and each step on the way has the loss of the unsplit model."""
    whole = build(ARCHITECTURES["llama"], seed=3)
    pipe = make_pipe(ARCHITECTURES["llama"], seed=3, dtype=torch.float64, schedule="auto", slices="auto")
    inputs = tokens()
    with torch.no_grad():
        wanted = causal_cross_entropy(whole(input_ids=inputs, use_cache=False).logits[:, :-1], inputs[:, 1:])
    while pipe.is_tuning:
        assert abs(pipe.step(inputs, inputs) - wanted[0] / wanted[1]) < BOUND
    chosen = [None, None]
    dist.all_gather_object(chosen, (str(pipe.layout.training), pipe.slices(LENGTH)))
    assert chosen[0] == chosen[1]
    assert pipe.layout.training.name == "auto"


def nothing_given(**sizes: int) -> None:
    """All ranks plan alike, without measuring; two loops are equal to the bit, and exact, on lists of sequences too."""
    own = slipstream.make_mesh(pp=2, **sizes)
    replicas = sizes.get("dp", 1)
    whole, inputs = build(ARCHITECTURES["llama"], seed=3), tokens(2 * replicas)
    labels = labels_of(inputs)
    with no_rounding_inside():
        wanted = unsplit_step(whole, inputs, labels)
    found = []
    for _ in range(2):
        pipe = make_pipe(ARCHITECTURES["llama"], seed=3, dtype=torch.float64, num_microbatches=2, mesh=own)
        mine, targets = (rows.chunk(replicas)[pipe.replica] for rows in (inputs, labels))
        with no_rounding_inside():
            loss = pipe.step(mine, targets)
        assert abs(loss - wanted) < BOUND, (loss, wanted)
        step = {name: each.clone() for name, each in gradients(pipe).items()}
        rows = [row[: 20 + 7 * number] for number, row in enumerate(mine)]
        found.append((float(loss), step, float(pipe.step(rows, rows)), str(pipe.layout.training), pipe.how_planned))
    (loss, step, ragged_loss, *plan), again = found
    expected = {name: each for name, each in gradients(whole).items() if name in step}
    uncut = {name: each for name, each in step.items() if each.shape == expected[name].shape}  # by tensor parallelism
    assert uncut
    assert gradient_error({name: expected[name] for name in uncut}, uncut) < BOUND
    assert (loss, ragged_loss, *plan) == (again[0], *again[2:])
    assert all(torch.equal(each, again[1][name]) for name, each in step.items())
    chosen = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, plan)
    assert chosen == [plan] * len(chosen)
    assert plan[-1].startswith("planned by counted operations: ")


def mismatch() -> None:
    """Ranks that pass different batches find out before they exchange anything, and can go on."""
    rank, good = dist.get_rank(), tokens()
    changed, shorter = good.clone(), tokens(length=32)
    changed[1, -1] += 1
    for mesh in (None, slipstream.make_mesh(tp=2)):
        pipe = make_pipe(ARCHITECTURES["llama"], slices=4, mesh=mesh)
        loss = pipe.step(good, good)
        for inputs, targets in ((shorter, shorter), (changed, changed), (good, changed)):
            for run in (pipe.step, pipe.evaluate):
                with pytest.raises(
                    SlipstreamError, match="ranks of one pipeline were given different batches"
                ) as error:
                    run(*((inputs, targets) if rank else (good, good)))
                assert "\n  rank 0: inputs (2, 64) int64, labels (2, 64) int64, checksum " in str(error.value)
                assert f"\n  rank 1: inputs {tuple(inputs.shape)} int64, labels " in str(error.value)
                assert "a sampler takes num_replicas=pipe.num_replicas and rank=pipe.replica" in str(error.value)
        whole = pipe._runtime.read_batch(good, good)
        further = TokenValues(TokenRule("teacher", is_shifted=True, num_dims=1), torch.full((2, 64, 3), rank))
        with pytest.raises(SlipstreamError, match="different batches") as error:
            pipe._runtime.step(replace(whole, companions={**whole.companions, "teacher": further}), 1.0)
        assert "labels (2, 64) int64, teacher (2, 64, 3) int64, checksum " in str(error.value)
        with pytest.raises(SlipstreamError, match="rank 0 refused its batch" if rank else "inputs are .* float"):
            pipe.step(good if rank else good.float(), good)
        for run in (pipe.step, pipe.evaluate):
            assert abs(run(good, good) - loss) < 1e-6
    pipe = make_pipe(ARCHITECTURES["llama"], slices=4)
    rows = [good[0], changed[1] if rank else good[1, :50]]
    with pytest.raises(SlipstreamError, match=r"rank 0: sequences of \[64, 50\] .*\n  rank 1: sequences of \[64, 64\]"):
        pipe.step(rows, rows)
    rows = [good[0], (changed if rank else good)[1]]
    with pytest.raises(SlipstreamError, match=r"rank 1: sequences of \[64, 64\] tokens, checksum "):
        pipe.step(rows, rows)


def other_calls(axis: str, limit: float | None = None) -> None:
    """Ranks that call different methods are told which, whatever comes first, and can go on."""
    rank, inputs = dist.get_rank(), tokens()
    pipe = make_pipe(
        ARCHITECTURES["llama"],
        slices=4,
        mesh=slipstream.make_mesh(**{axis: 2}),
        parallel=Parallelism(shard="optimizer" if axis == "dp" else "none"),
        memory_limit=limit,
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.0)
    loss = pipe.step(inputs, inputs)
    with shared_folder() as folder:
        pipe.save(folder, 1, optimizer=optimizer)
        calls = calls_of(pipe, optimizer, folder)
        if limit:  # within which these rehearse a step first
            calls = {name: calls[name] for name in ("step", "evaluate", "state_dict", "memory_table")}
        pairs = [*pairwise([*calls, "step"]), *(("state_dict", name) for name in calls if name != "state_dict")]
        for pair in pairs + [(other, one) for one, other in pairs]:
            optimizer.step()  # so that some of the calls have parameters to gather first
            with refused("the ranks call different methods of the Pipeline") as error:
                calls[pair[rank]]()
            assert f"\n  rank 0: {pair[0]}\n  rank 1: {pair[1]}\nCall {pair[0]} and {pair[1]} on " in str(error.value)
        assert not (folder / "pretrained").exists()
        assert CheckpointFolder(folder).steps() == [1]
        assert abs(pipe.step(inputs, inputs) - loss) < 1e-6
        for call in calls.values():
            call()


def calls_of(pipe: Pipeline, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Callable[[], object]]:
    """Returns a call of each collective method."""
    inputs = tokens()
    return {
        "step": lambda: pipe.step(inputs, inputs),
        "step of a list of sequences": lambda: pipe.step([*inputs], [*inputs]),
        "evaluate": lambda: pipe.evaluate(inputs, inputs),
        "state_dict": pipe.state_dict,
        "save_pretrained": lambda: pipe.save_pretrained(folder / "pretrained"),
        "save": lambda: pipe.save(folder, 2, optimizer=optimizer),
        "load": lambda: pipe.load(folder),
        "clip_grad_norm_": lambda: pipe.clip_grad_norm_(1.0),
        "logits": lambda: pipe.logits(inputs),
        "log_probabilities": lambda: pipe.log_probabilities(inputs, inputs),
        "timeline": pipe.timeline,
        "memory_table": lambda: pipe.memory_table(inputs, inputs),
    }


def other_pipelines() -> None:
    """Ranks that call one method of two Pipelines are told which of them, whatever one has made by itself before."""
    rank, inputs = dist.get_rank(), tokens()
    alone = dist.new_group([0])
    if rank == 0:
        mesh = DeviceMesh.from_group(alone, "cpu", mesh_dim_names=("pp",))
        make_pipe(ARCHITECTURES["llama"], mesh=mesh).step(inputs, inputs)
    pipes = [make_pipe(ARCHITECTURES["llama"], slices=2) for _ in range(2)]
    with pytest.raises(SlipstreamError, match="the ranks call different methods of Pipelines") as error:
        pipes[rank].step(inputs, inputs)
    assert "\n  rank 0: step of Pipeline 1, in the order" in str(error.value)
    assert "\n  rank 1: step of Pipeline 2, in the order" in str(error.value)
    for pipe in pipes:
        pipe.step(inputs, inputs)


def never_called(folder: str, watched: str, *absent: str) -> None:
    """Ranks that end in place of a call are named, and no others that call something else; unwatched, all are."""
    is_watched = watched == "watched"
    pipe = make_pipe(ARCHITECTURES["llama"], slices=2, stall_limit=600.0 if is_watched else "off")
    if str(pipe.rank) in absent:
        return
    calls = {"state_dict": pipe.state_dict, "save_pretrained": lambda: pipe.save_pretrained(Path(folder) / "unwritten")}
    name = [*calls][pipe.rank % 2]
    missing = f"ranks {'-'.join(absent)}, which have" if len(absent) > 1 else f"rank {absent[0]}, which has"
    if is_watched:
        which = f"{missing} ended without an error"
    else:
        which = f"{['ranks 1-2', 'ranks 0, 2'][pipe.rank]}, of which one has ended or doesn't answer"
    text = f"rank {pipe.rank} waited in {name}, which every rank must call, for {which}"
    with pytest.raises(TransportError, match=text):
        calls[name]()
    print(f"rank {pipe.rank} reported", flush=True)
    Path(folder, f"rank {pipe.rank}").touch()
    while len(list(Path(folder).glob("rank *"))) + len(absent) < dist.get_world_size():
        time.sleep(0.05)  # a rank that ends before the others have asked would be named by them too


def absent() -> None:
    """A rank whose neighbour has ended says at which action it waits, for whom, and what is missing there."""
    pipe = make_pipe(ARCHITECTURES["llama"], schedule="1f1b", slices=2)
    inputs = tokens()
    if pipe.rank == 0:
        return
    with pytest.raises(TransportError) as raised:
        pipe.step(inputs, inputs)
    assert "rank 1 waits at 1RECV_F0.0 (action " in str(raised.value)
    assert "for 0SEND_F0.0 of rank 0.\n  missing on rank 0: 0F0.0, 0SEND_F0.0" in str(raised.value)
    print("rank 1 reported", flush=True)


def failing() -> None:
    """Where a copy fails, the rank says why, although it waits for another, which ends as well."""
    pipe = make_pipe(ARCHITECTURES["llama"], num_microbatches=2, slices=4)
    slow_copies.SlowCopies.fails_at = -1 if pipe.rank else 3
    with pytest.raises(TransportError) as raised:
        pipe.step(tokens(), tokens())
    reason = "can't come: its tensors could not be copied" if pipe.rank else "rank's GPU: an illegal memory access"
    assert reason in str(raised.value), str(raised.value)
    print(f"rank {pipe.rank} reported", flush=True)


def buffers() -> None:
    """64 messages a channel pass through as many buffers as are in flight, not through 64."""
    inputs = tokens(batch=4)
    pipe = make_pipe(ARCHITECTURES["llama"], slices=16, num_microbatches=4)
    for _ in range(2):
        pipe.step(inputs, inputs)
    (executor,) = pipe._runtime.executors
    transport: Any = executor._transport
    is_staged = isinstance(transport, StagedTransport)
    pools = [transport._hosts._free, transport._here._free] if is_staged else [transport._pool]
    for pool in pools:
        assert 0 < sum(len(free) for free in pool.values()) <= 30, {size: len(free) for size, free in pool.items()}


def channels() -> None:
    """What opens NCCL's channels passes through all of them, in both directions, and leaves nothing behind."""
    options = {"slices": 4, "num_ranks": 2, "partition": [1] * 4, "runtime": Runtime(self_check=False)}
    pipe = Pipeline.from_config(ARCHITECTURES["llama"], schedule="zb-v", stages_per_rank=2, **options)
    (executor,) = pipe._runtime.executors
    transport: Any = executor._transport
    before = pipe.step(tokens(), tokens())
    transport._open([*transport._groups])
    assert pipe.step(tokens(), tokens()) == before


def mesh() -> None:
    """An axis pp of a mesh is the pipeline; axes that have no meaning are refused."""
    model, inputs = build(ARCHITECTURES["llama"]), tokens()
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("apart", "pp"))["pp"]
    expected = make_pipe(model, mesh=alone, slices=4).step(inputs, inputs)
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    pipe = make_pipe(model, mesh=both, slices=4)
    assert pipe.num_ranks == 2
    assert abs(pipe.step(inputs, inputs) - expected) < BOUND
    for axes in (("dp", "tp"), ("pp", "xp")):
        with pytest.raises(SlipstreamError, match=r"the mesh has the axes .* expected 'pp', and where they are used"):
            Pipeline(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=axes))


HALVES = (0.5, 1, 1.5, 1)  # each rank has the halves of two layers that the other doesn't
CASES: dict[str, Case] = by_name(timeline, auto, mismatch, buffers, channels, mesh)
CASES |= {
    f"exact, {name}": partial(exact, case)
    for name, case in {
        "zb-h1": CutCase("llama, tied", "zb-h1"),
        "interleaved": CutCase("qwen3", "interleaved-1f1b", 2),
        "zb-v": CutCase("llama, tied", "zb-v", 2),
        "1f1b": CutCase("llama"),
        "gpipe": CutCase("gpt2", "gpipe"),
        "halves": CutCase("llama, tied", "zb-v", 2, partition=HALVES),
        "selective, offloaded": CutCase("llama, tied", recompute="selective", offload=0.7),
        "recomputed": CutCase("llama, tied", recompute="full"),
        "zb-v, selective, offloaded": CutCase("llama, tied", "zb-v", 2, "selective", offload=0.7),
        "gpt2": CutCase("gpt2"),
    }.items()
}
CASES |= {f"ragged, {name}": partial(ragged, name) for name in ("llama, tied", "gpt2")}
CASES |= {f"nothing given, {name}": partial(nothing_given, **{name: 2}) for name in ("dp", "cp", "tp")}
CASES["nothing given"] = nothing_given
CASES |= {f"other calls, {axis}": partial(other_calls, axis) for axis in ("pp", "dp", "tp")}
CASES["other calls, pp, within a limit"] = partial(other_calls, "pp", 1e9)

if __name__ == "__main__":  # what ends ranks, or counts what a process has made
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = {"never called": never_called, "other pipelines": other_pipelines, "absent": absent, "failing": failing}
    what = sys.argv[1].removeprefix("staged ")
    if what != sys.argv[1]:  # as between GPUs that ranks share
        slow_copies.install()
    alone[what](*sys.argv[2:])
    if what == "other pipelines":
        dist.barrier()
    dist.destroy_process_group()
