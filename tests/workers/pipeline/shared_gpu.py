"""What each process of test_shared_gpu runs: one case after the other, in one group of processes on one GPU, or on
CPUs that exchange everything as such processes do: shared_gpu.py cuda|cpu CASE ..."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from slipstream import Pipeline, Precision, Runtime, make_mesh
from slipstream.comm import StagedTransport
from slipstream.model import causal_cross_entropy
from slipstream.parallel import rank_group
from slipstream.pipeline import runtime as pipeline_runtime
from support.architectures import ARCHITECTURES, BOUND, LENGTH, build, no_rounding_inside, tokens
from workers.parallel.exactness import Case, run
from workers.pipeline.processes import CutCase

DEVICE = sys.argv[1]


CASES = {
    "pp": (
        (2, 1, 1),
        (Case("llama, tied"), Case("gpt2", "zb-v", 2), CutCase("llama", recompute="selective", offload=0.7)),
    ),
    "dp": ((1, 2, 1), (Case("llama"), Case("llama, tied", recompute="full", shard="optimizer"))),
    "tp": ((1, 1, 2), (Case("llama, tied"), Case("qwen3", sequence=True))),
    "pp, tp": ((2, 1, 2), (Case("llama"),)),
    "pp, dp": ((2, 2, 1), (Case("llama, tied", shard="optimizer"),)),
}


def exact(name: str) -> None:
    """Three steps of AdamW follow the unsplit model, in float64."""
    sizes, cases = CASES[name]
    mesh = make_mesh(*sizes, device_type=DEVICE)
    assert dist.get_backend() == "gloo"
    for case in cases:
        error = run(case, sizes, mesh, DEVICE)
        assert error < BOUND, (case, error)


def auto() -> None:
    """Ranks settle on one order and its slices by times that both measured on the GPU at once."""
    whole = build(ARCHITECTURES["llama"], seed=3).to(DEVICE)
    runtime, automatic = Runtime(self_check=False), {"schedule": "auto", "slices": "auto", "partition": "auto"}
    options = {"precision": Precision(dtype=torch.float64), "runtime": runtime, "device": DEVICE, **automatic}
    pipe = Pipeline.from_config(ARCHITECTURES["llama"], seed=3, **options)
    assert isinstance(pipe._runtime.transport, StagedTransport)
    inputs = tokens().to(DEVICE)
    with torch.no_grad():
        total, count = causal_cross_entropy(whole(input_ids=inputs, use_cache=False).logits[:, :-1], inputs[:, 1:])
    while pipe.is_tuning:
        assert abs(float(pipe.step(inputs, inputs)) - float(total / count)) < BOUND
    chosen = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, (str(pipe.layout.training), pipe.slices(LENGTH)))
    assert chosen[0] == chosen[1]


def state() -> None:
    """The leader gathers the whole model's state from both ranks' GPU."""
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False), "device": DEVICE}
    pipe = Pipeline.from_config(ARCHITECTURES["llama, tied"], seed=3, slices=2, **options)
    found, whole = pipe.state_dict(), build(ARCHITECTURES["llama, tied"], seed=3).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        pipeline_runtime.connect_transport = StagedTransport
        rank_group._is_staged = lambda *_: True
    for each in sys.argv[2:]:
        with no_rounding_inside():
            {"auto": auto, "state": state}.get(each, lambda name=each: exact(name))()
    dist.barrier()
    dist.destroy_process_group()
