"""What each process of test_checkpoint_boxes runs."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slipstream.checkpoint import CheckpointReader, Checkpoints, TensorShard, background_save
from slipstream.checkpoint.background_save import Snapshot
from slipstream.errors import SlipstreamError
from slipstream.parallel import ParameterShare, RankGroup
from support.checkpoints.layouts import emptied, layout, same_bits, tensors
from support.timeouts import LIMIT

SEEDS = range(8)
MESHES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(1, 4), (2, 2), (4, 1)]}


def save(folder: Path, checkpoints: Checkpoints) -> None:
    """Of every seed one tensor after the other, spread over this many ranks in all ways."""
    del folder
    meshes = MESHES[dist.get_world_size()]
    for seed in SEEDS:
        pieces = layout(seed, tensors(seed), *meshes[seed % len(meshes)])[dist.get_rank()]
        checkpoints.save(seed, pieces, {"seed": seed})
        checkpoints.keep()
        for piece in pieces:
            piece.tensor.zero_()
    checkpoints.close()


def load(folder: Path, checkpoints: Checkpoints) -> None:
    """What any number of ranks saved comes back to the bit."""
    del folder
    for seed in SEEDS:
        found = checkpoints.find(seed)
        assert found is not None
        assert found.facts == {"seed": seed}
        for mesh in MESHES[dist.get_world_size()]:
            pieces = layout(seed + 100, tensors(seed), *mesh)[dist.get_rank()]
            targets = emptied(pieces)
            checkpoints.load(found, targets)
            for piece, target in zip(pieces, targets, strict=True):
                assert same_bits(piece.tensor, target.tensor), piece.key
        as_dtensors(found.folder, tensors(seed))


def as_dtensors(folder: Path, whole: dict[str, torch.Tensor]) -> None:
    """PyTorch alone reads it into tensors that it has sharded itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"embedding": Shard(0), "packed": Shard(1), "ids": Replicate()}
    state = {
        name: distribute_tensor(torch.zeros_like(whole[name]), mesh, [placement])
        for name, placement in placements.items()
    }
    dcp.load(state, storage_reader=CheckpointReader(folder))
    assert all(same_bits(tensor.full_tensor(), whole[name]) for name, tensor in state.items())


def kill(folder: Path, checkpoints: Checkpoints, victim: str) -> None:
    """One rank is no more before it has written all of its file."""
    del folder
    checkpoints.save(1, large(1.0, 10), {})
    checkpoints.wait()
    if dist.get_rank() == int(victim):
        Snapshot._blocks = dying_blocks  # type: ignore[method-assign]
    checkpoints.save(2, large(2.0, 5000), {})
    time.sleep(LIMIT)  # until the launcher ends this one


def dying_blocks(snapshot: Snapshot) -> Generator[bytes | memoryview]:
    yield snapshot._header
    os.kill(os.getpid(), signal.SIGKILL)


def trouble(folder: Path, checkpoints: Checkpoints) -> None:
    """All ranks are told alike what is wrong with one, and go on."""
    said: list[str] = []
    rank = dist.get_rank()
    checkpoints = Checkpoints(folder, RankGroup(dist.group.WORLD), say=said.append)
    checkpoints.save(1, large(1.0, 5000), {})
    checkpoints.wait()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)  # rank 1 has no room left
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if rank == 1 else soft, hard))
    checkpoints.save(2, large(2.0, 5000), {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 2 was not saved: rank 1: [Errno 27] File too large" in said.pop()

    checkpoints.save(3, [*large(3.0, 5000), TensorShard("twice", ParameterShare.whole((2,)), torch.ones(2))], {})
    checkpoints.wait()
    told = said.pop()
    assert "step 3 was not saved: " in told
    assert "ValueError: several ranks write the same elements of twice" in told
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]

    background_save._SECONDS_TO_APPEAR = 0.5
    apart = Checkpoints(folder.parent / f"of rank {rank}", RankGroup(dist.group.WORLD), say=said.append)
    apart.save(1, large(1.0, 5000), {})
    apart.close()
    assert "rank-00001.safetensors was written by its rank but hasn't appeared for rank 0 within" in said.pop()

    dist.barrier()
    found = checkpoints.find()
    assert found is not None
    with pytest.raises(SlipstreamError, match=r"can't be loaded: 1 isn't in it|can't be loaded: 0 has shape"):
        checkpoints.load(found, [TensorShard(str(rank), ParameterShare.whole((3,)), torch.ones(3))])
    dist.barrier()
    if rank == 0:
        file = folder / "step-00000001" / "rank-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    dist.barrier()
    with pytest.raises(SlipstreamError, match=r"rank-00001\.safetensors has been altered: .* No good one is left"):
        checkpoints.find()
    assert not said


def train_on(folder: Path, checkpoints: Checkpoints) -> None:
    """Two ranks train a model, save after two steps, and go on while it is written."""
    from support.checkpoints.run import pieces_of, start, train  # loads transformers

    del folder
    run = start()
    for step in range(4):
        checkpoints.keep()
        train(run, step)
        if step % 2:
            checkpoints.save(step, pieces_of(run, dist.get_rank(), dist.get_world_size()), {"next": step + 1})
    checkpoints.close()


def large(value: float, size: int) -> list[TensorShard]:
    """A tensor of this rank's own."""
    return [TensorShard(str(dist.get_rank()), ParameterShare.whole((size,)), torch.full((size,), value))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = {"save": save, "load": load, "kill": kill, "trouble": trouble, "train": train_on}
    folder = Path(sys.argv[2])
    cases[sys.argv[1]](folder, Checkpoints(folder, RankGroup(dist.group.WORLD), keep=100), *sys.argv[3:])
    dist.barrier()
    dist.destroy_process_group()
