"""What each process of a standing pair runs for test_nccl: nccl.py cuda|cpu FOLDER; a case's name on each line of its
input. FOLDER/trainer.json is what a Trainer alone has logged.

Where there is no GPU the ranks compute on CPUs and gloo connects them: then the cases are tried, not NCCL.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slipstream import Parallelism, Pipeline, Precision, Runtime, make_mesh
from slipstream.model import causal_cross_entropy
from support.architectures import ARCHITECTURES, BOUND, build, no_rounding_inside, tokens
from support.parallel.group_cases import by_name
from support.trainers import accuracy, arguments, check_logs, history, pipeline, trainer
from workers.parallel import context, expert_parallel
from workers.parallel.exactness import Case, run

DEVICE, FOLDER = sys.argv[1], Path(sys.argv[2])
ON_GPU = DEVICE == "cuda"
TRANSPORT = "nccl" if ON_GPU else "gloo"
CONNECTED: dict[str, Any] = {"device_type": DEVICE, "transport": TRANSPORT}  # of a mesh


def exact(*cases: Case, pp: int = 1, dp: int = 1, tp: int = 1) -> None:
    """Three steps of AdamW follow the unsplit model, in float64."""
    sizes = (pp, dp, tp)
    mesh = make_mesh(*sizes, **CONNECTED)
    assert dist.get_backend() == TRANSPORT
    for case in cases:
        error = run(case, sizes, mesh, DEVICE)
        assert error < BOUND, (case, error)


def pipe_of(model: str = "llama, tied", **settings: Any) -> Pipeline:
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False, transport=TRANSPORT)}  # type: ignore[arg-type]
    return Pipeline.from_config(ARCHITECTURES[model], seed=3, device=DEVICE, **options | settings)


def one_f_one_b_in_unequal_slices() -> None:
    exact(Case("llama, tied"), pp=2)


def interleaved() -> None:
    exact(Case("llama", "interleaved-1f1b", 2, "full"), pp=2)


def v_shaped() -> None:
    """Messages go both ways between the ranks, and receives are posted ahead in both directions."""
    exact(Case("gpt2", "zb-v", 2), pp=2)


def zero_bubble() -> None:
    exact(Case("llama", "zb-h1"), pp=2)


def tensor_ranks() -> None:
    exact(Case("llama, tied"), tp=2)


def sequence_parallel() -> None:
    exact(Case("qwen3", sequence=True), tp=2)


def replicas_with_a_sharded_optimizer() -> None:
    exact(Case("llama", shard="optimizer"), dp=2)


def replicas_with_sharded_parameters() -> None:
    """FSDP2: the first gradients of two replicas are those of the whole model."""
    mesh = make_mesh(dp=2, **CONNECTED)
    pipe = pipe_of("llama", mesh=mesh, slices=3, parallel=Parallelism(shard="parameters"))
    whole = build(ARCHITECTURES["llama"], seed=3).to(DEVICE)
    inputs = tokens(batch=2).to(DEVICE)
    own = slice(pipe.replica, pipe.replica + 1)
    loss = pipe.step(inputs[own], inputs[own])
    total, count = causal_cross_entropy(whole(input_ids=inputs, use_cache=False).logits[:, :-1], inputs[:, 1:])
    (total / count).backward()
    assert abs(float(loss) - float(total.detach() / count)) < BOUND
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    assert abs(float(pipe.clip_grad_norm_(1e9)) - float(norm)) < BOUND * float(norm)


def context_exchanges_heads() -> None:
    context.rows("llama, tied", {"cp": 2} | CONNECTED, context_exchange="heads")


def context_exchanges_keys() -> None:
    context.rows("gemma3", {"cp": 2} | CONNECTED, context_exchange="keys")


def experts_apart() -> None:
    """Each of two replicas sends the other as many tokens as its routers choose for experts there."""
    expert_parallel.exact("qwen3_moe", partial(make_mesh, dp=2, ep=2, **CONNECTED))


def graphs_exchange() -> None:
    """Replayed graphs exchange heads and keys of slices that the ranks share."""
    context.recorded(CONNECTED)


def evaluated() -> None:
    pipe = pipe_of(slices=3)
    inputs = tokens().to(DEVICE)
    whole = build(ARCHITECTURES["llama, tied"], seed=3).to(DEVICE)
    with torch.no_grad():
        total, count = causal_cross_entropy(whole(input_ids=inputs, use_cache=False).logits[:, :-1], inputs[:, 1:])
    assert abs(float(pipe.evaluate(inputs, inputs)) - float(total / count)) < BOUND


def saved_and_resumed() -> None:
    """A third step is the same to the bit, whether the run went on or was loaded after the second."""
    inputs = tokens().to(DEVICE)
    losses, place = [], None
    for resumes in (False, True):
        pipe = pipe_of(slices=3)
        if place is None:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder, device=torch.device(DEVICE))
            place = Path(folder[0]) / "checkpoints"
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if resumes:
            pipe.load(place, optimizer=optimizer)
        for step in range(2 if resumes else 0, 3):
            optimizer.zero_grad()
            losses.append(float(pipe.step(inputs, inputs)))
            optimizer.step()
            if step == 1:
                pipe.save(place, 2, optimizer=optimizer)
    assert losses[2] == losses[3]


def trainer_logs() -> None:
    """Two stages in a SlipstreamTrainer log, evaluate and save what a Trainer with the whole model does."""
    if ON_GPU and torch.cuda.device_count() == 1:
        os.environ["LOCAL_RANK"] = "0"  # accelerate's barriers name the GPU of a rank by it
    pipe = pipeline(device=DEVICE, transport=TRANSPORT)
    args = arguments(FOLDER / "trainer", max_steps=3, save_strategy="steps", save_steps=3, use_cpu=not ON_GPU)
    made = trainer(pipe, args, compute_metrics=accuracy)
    made.train()
    check_logs(history(made), json.loads((FOLDER / "trainer.json").read_text()))
    assert (FOLDER / "trainer/checkpoint-3/slipstream").is_dir()


def state_is_gathered() -> None:
    found, whole = pipe_of(slices=2).state_dict(), build(ARCHITECTURES["llama, tied"], seed=3).state_dict()
    assert all(torch.equal(tensor.cpu(), whole[name]) for name, tensor in found.items())


def killed() -> None:
    """Rank 1 ends without a word; rank 0 is told who it was, and not by a time limit."""
    pipe = pipe_of(slices=2)
    inputs = tokens().to(DEVICE)
    pipe.step(inputs, inputs)
    if dist.get_rank() == 1:
        os._exit(9)
    pipe.step(inputs, inputs)


# The most valuable first: a lease may end before the last
CASES = by_name(
    one_f_one_b_in_unequal_slices,
    v_shaped,
    replicas_with_a_sharded_optimizer,
    tensor_ranks,
    context_exchanges_heads,
    experts_apart,
    replicas_with_sharded_parameters,
    trainer_logs,
    context_exchanges_keys,
    interleaved,
    zero_bubble,
    sequence_parallel,
    saved_and_resumed,
    evaluated,
    state_is_gathered,
    graphs_exchange,
)
ENDING = by_name(killed)


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        problem = ""
        try:
            with no_rounding_inside():
                (CASES | ENDING)[line.strip()]()
        except BaseException:
            problem = traceback.format_exc()[-3000:]
        print(json.dumps(problem), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
