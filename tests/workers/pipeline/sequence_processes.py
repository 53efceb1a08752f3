"""Cases of test_processes: steps of a sequence of layers on several ranks, compared with one process."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from slipstream import Layers, Memory, Parallelism, Pipeline, Skip, make_mesh
from slipstream.comm import HEADER_BYTES
from slipstream.model import causal_cross_entropy
from support.architectures import BOUND, gradient_error, gradients
from support.parallel.group_cases import Case, by_name
from support.refusals import refused
from support.sequences import sliced_layers
from support.sequences.random_layers import Mix, Unsplit, batch, build, costs
from support.sequences.sliced_layers import ROWS, SOURCE, TARGET
from workers.pipeline.ragged_meshes import error

KINDS = ["norm", "skip", "tuple", "dropout", "relu", "short skip"]


def split(schedule: str, recompute: str, stages_per_rank: int) -> None:
    """Parameters and batch norms after two updates are to the bit those of one stage."""
    inputs, targets = batch(11)
    states = []
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("apart", "pp"))["pp"]
    for is_alone in (True, False):
        torch.manual_seed(4)
        model = build(KINDS)
        pipe = Pipeline(
            model,
            "gpipe" if is_alone else schedule,
            num_microbatches=4,
            stages_per_rank=1 if is_alone else stages_per_rank,
            memory=Memory(recompute="none" if is_alone else recompute),
            layers=Layers(costs=costs(model)),
            mesh=alone if is_alone else None,
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets)
            optimizer.step()
        states.append((loss, pipe.state_dict(), pipe.evaluate(inputs, targets)))
    assert pipe.num_ranks == dist.get_world_size()
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][2], states[1][2])
    assert pipe.rank > 0 or states[0][1].keys() == states[1][1].keys()
    assert [name for name, tensor in states[1][1].items() if not torch.equal(tensor, states[0][1][name])] == []
    meta = [layer.name for layer in pipe._runtime.family._layers if any(p.is_meta for p in layer.module.parameters())]  # type: ignore[attr-defined]
    assert meta, "layers of other ranks are still in memory"


def straight() -> None:
    """A skip of 64 numbers a row goes from rank 0 to rank 2, past rank 1, between layers that hand on 8."""
    wide, near = Skip("wide"), Skip("near")
    layers = [nn.Linear(4, 64), wide.stash(), nn.Linear(64, 8), near.stash(), nn.Tanh(), nn.Linear(8, 8)]
    layers += [near.pop(), Mix(), nn.Linear(8, 64), wide.pop(), Mix(), nn.Linear(64, 5)]
    pipe = Pipeline(nn.Sequential(*layers), "1f1b", num_microbatches=4, partition=[4, 4, 4])
    rows, size = 10, 4  # float32
    inputs, targets = torch.randn(rows, 4), torch.randint(0, 5, (rows,))
    pipe.step(inputs, targets)
    main, near_bytes, wide_bytes = rows * 8 * size, rows * 8 * size, rows * 64 * size
    expected = (main + near_bytes + wide_bytes, main + main + near_bytes, main + wide_bytes)
    assert pipe.bytes_sent == expected[pipe.rank], (pipe.rank, pipe.bytes_sent, expected)
    pipe.evaluate(inputs, targets)
    assert pipe.bytes_sent == (main + near_bytes + wide_bytes, main, 0)[pipe.rank]


def buffers() -> None:
    """A rank keeps no more skips than microbatches are under way, however many there are."""
    skip = Skip("wide")
    layers = [nn.Linear(4, 64), skip.stash(), nn.Linear(64, 8), nn.Linear(8, 64), skip.pop(), Mix(), nn.Linear(64, 5)]
    pipe = Pipeline(nn.Sequential(*layers), "1f1b", num_microbatches=16, partition=[3, 1, 3])
    pipe.step(torch.randn(16, 4), torch.randint(0, 5, (16,)))
    pool = pipe._runtime.transport._pool  # type: ignore[attr-defined]
    wide = len(pool[HEADER_BYTES + 64 * 4])  # rank 0 sends skips and receives their gradients
    assert pipe.rank > 0 or 2 <= wide <= 8, wide


def replicas(over_replicas: str) -> None:
    """Two replicas of two ranks: gradients of the whole batch, batch norms of all rows or of each replica's own."""
    mesh = make_mesh(pp=2, dp=2)
    model = build(["norm", "skip", "norm"])
    shares = [batch(6, seed=replica) for replica in range(2)]
    pipe = Pipeline(
        model,
        "1f1b",
        2,
        mesh=mesh,
        layers=Layers(example=shares[0][0], batch_norm_over_replicas=over_replicas == "all"),
        parallel=Parallelism(shard="optimizer"),
    )
    whole = build(["norm", "skip", "norm"])
    inputs, targets = (torch.cat(each) for each in zip(*shares, strict=True))
    expected = Unsplit(whole, inputs, targets, 4)
    loss = pipe.step(*shares[pipe.replica])
    assert abs(loss - expected.loss) < BOUND
    own = expected if over_replicas == "all" else Unsplit(whole, *shares[pipe.replica], 2)
    for stage in pipe._runtime.stages.values():
        for name, tensor in stage.state().items():
            if "running" in name:
                assert torch.allclose(tensor, own.model.state_dict()[name], rtol=1e-12, atol=1e-14), name
    assert error(pipe, expected.gradients) < BOUND
    norms = pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(expected.model.parameters(), 1.0)
    assert abs(norms[0] - norms[1]) < 1e-9


def sparse(shards: str) -> None:
    """The gradient of a sparse embedding, whose rows differ between two replicas."""

    def made(is_sparse: bool) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(20, 8, sparse=is_sparse), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5)).double()

    ids, targets = torch.randint(0, 20, (8, 3)), torch.randint(0, 5, (8,))
    whole, own = made(is_sparse=False), slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    functional.cross_entropy(whole(ids), targets).backward()
    parallel = Parallelism(shard="optimizer" if shards == "shards" else "none")
    pipe = Pipeline(made(is_sparse=True), num_microbatches=2, mesh=make_mesh(pp=1, dp=2), parallel=parallel)
    for count in (1, 2):
        pipe.step(ids[own], targets[own], loss_scale=4.0)
        assert error(pipe, {name: count * gradient for name, gradient in gradients(whole).items()}) < BOUND


def slices(name: str, schedule: str, recompute: str, stages_per_rank: int) -> None:
    """Token slices: the gradients of the unsplit sequence, and what all slices read is sent once."""
    case = sliced_layers.CASES[name]
    inputs, targets = case.batch()
    pipe = Pipeline(
        case.model(),
        schedule,
        num_microbatches=2,
        slices=[2, 4, 3],
        stages_per_rank=stages_per_rank,
        memory=Memory(recompute=recompute),
        layers=Layers(example=inputs),
        loss_fn=causal_cross_entropy,
    )
    loss, expected = case.unsplit(2)
    assert abs(pipe.evaluate(inputs, targets) - loss) < BOUND
    for _ in range(2):
        for parameter in pipe.parameters():
            parameter.grad = None
        assert abs(pipe.step(inputs, targets) - loss) < BOUND
        found = gradients(pipe)
        assert gradient_error({key: expected[key] for key in found}, found) < BOUND
    held = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(held, torch.tensor(float(len(found))))
    assert sum(held) == len(expected)


def sliced_bytes() -> None:
    """Rank 0 has the encoder, rank 1 the decoder's second half: the encoding goes there with the first slice alone."""
    case = sliced_layers.CASES["transformer"]
    inputs, targets = case.batch()
    names = [name for name, _ in case.build().named_children()]
    first = names.index("decoder1_attention")
    sent = []
    for cuts in ([9], [2, 4, 3]):
        pipe = Pipeline(
            case.model(),
            "gpipe",
            slices=cuts,
            num_microbatches=2,
            partition=[first, len(names) - first],
            loss_fn=causal_cross_entropy,
            layers=Layers(example=inputs),
        )
        pipe.step(inputs, targets)
        sent.append(pipe.bytes_sent)
    width, size = 16, 8  # float64
    hidden, encoding, mask = ROWS * TARGET * width * size, ROWS * SOURCE * width * size, ROWS * SOURCE
    assert sent == ([hidden + encoding + mask] * 2 if pipe.rank == 0 else [hidden + encoding] * 2), sent


def sliced_replicas() -> None:
    """Two replicas of two ranks, each with its own rows."""
    case = sliced_layers.CASES["transformer"]
    (source, target), targets = case.batch()
    mesh = make_mesh(pp=2, dp=2)
    own = slice(0, 4) if mesh["dp"].get_local_rank() == 0 else slice(4, None)
    pipe = Pipeline(
        case.model(),
        "zb-h1",
        num_microbatches=2,
        slices=3,
        mesh=mesh,
        loss_fn=causal_cross_entropy,
        layers=Layers(example=(source, target)),
    )
    loss, expected = case.unsplit(1)
    assert abs(pipe.step((source[own], target[own]), targets[own]) - loss) < BOUND
    found = gradients(pipe)
    assert found
    assert gradient_error({key: expected[key] for key in found}, found) < BOUND


def weighted() -> None:
    """Two replicas of two ranks, whose classes weigh differently, under a divisor of the loss function's own."""
    mesh = make_mesh(pp=2, dp=2)
    (inputs, targets), weights = batch(12), torch.tensor([0.1, 3.0, 0.5, 7.0, 1.0], dtype=torch.float64)
    targets[:6], targets[6:] = targets[:6] % 2, 2 + targets[6:] % 3
    targets[3] = -100

    def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = functional.cross_entropy(outputs, targets, weights, reduction="sum")
        return total, weights[targets[targets != -100]].sum()

    for sharded in (False, True):
        whole, model = build(["conv"]), build(["conv"])
        loss = functional.cross_entropy(whole(inputs), targets, weights)
        loss.backward()
        wanted = gradients(whole)
        parallel = Parallelism(shard="optimizer" if sharded else "none")
        cut = {"mesh": mesh, "parallel": parallel, "layers": Layers(costs=costs(model))}
        pipe = Pipeline(model, "zb-h1", 3, loss_fn=loss_fn, **cut)
        own = slice(6 * pipe.replica, 6 * pipe.replica + 6)
        assert abs(pipe.evaluate(inputs[own], targets[own]) - loss) < BOUND
        for number in (1, 2):  # gradients add up
            assert abs(pipe.step(inputs[own], targets[own]) - loss) < BOUND
            assert error(pipe, {name: number * gradient for name, gradient in wanted.items()}) < BOUND


def frozen() -> None:
    """Every rank hears that nothing is trained."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).requires_grad_(False)
    pipe = Pipeline(model, partition=[1, 2])
    inputs, targets = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    pipe.evaluate(inputs, targets)
    with refused("nothing would be trained"):
        pipe.step(inputs, targets)
    if pipe.rank == 1:
        model[2].requires_grad_(True)  # one rank's layer is enough
    pipe.step(inputs, targets)


def mismatch() -> None:
    """Ranks with other inputs find out, and are told those of each."""
    pipe = Pipeline(nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(32, 5)), partition=[1, 2])
    inputs, targets = torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.int64)
    with refused("the ranks of one pipeline were given different batches") as problem:
        pipe.step(inputs[:, :, :, ::2].repeat(1, 2, 1, 1) if pipe.rank == 0 else inputs, targets)
    for rank, shape in enumerate(["(4, 4, 4, 2)", "(4, 2, 4, 4)"]):
        assert f"rank {rank}: inputs {shape} float32" in str(problem.value)


SPLIT = [
    ("zb-v", "none", 2),
    ("interleaved-1f1b", "selective", 2),
    ("gpipe", "segments", 1),
    ("1f1b", "full", 1),
    ("zb-h1", "none", 1),
]
SLICED = [
    ("mixed", "interleaved-1f1b", "segments", 2),
    ("transformer", "zb-v", "none", 2),
    ("transformer", "1f1b", "none", 1),
    ("mixed", "zb-h1", "full", 1),
]
CASES: dict[str, Case] = by_name(straight, buffers, sliced_bytes, sliced_replicas, weighted, frozen, mismatch)
CASES |= {f"split, {schedule}": partial(split, schedule, recompute, v) for schedule, recompute, v in SPLIT}
CASES |= {
    f"slices, {name}, {schedule}": partial(slices, name, schedule, recompute, v)
    for name, schedule, recompute, v in SLICED
}
CASES |= {f"norms of {over}": partial(replicas, over) for over in ("all", "own")}
CASES |= {f"sparse, {shards}": partial(sparse, shards) for shards in ("whole", "shards")}
