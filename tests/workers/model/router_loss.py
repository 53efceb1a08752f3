"""What each process of two replicas of two stages runs: a step with the load-balancing loss of each layer's experts."""

from __future__ import annotations

import copy
import sys

from slipstream import Pipeline, make_mesh
from slipstream.model import IGNORED
from support.architectures import BOUND, no_rounding_inside, tokens
from support.mixtures import mixture, unsplit_step
from support.options import grouped
from support.parallel.group_cases import by_name, run_cases
from support.pipelines import in_usual_order
from workers.parallel.exactness import error

ROWS = 2  # of each replica, a microbatch each


def gradients_are_those_of_all_microbatches() -> None:
    check_step(slices=[5, 1, 30, 28])


def sharded_optimizer_states_and_recomputation() -> None:
    check_step(slices=3, schedule="zb-v", stages_per_rank=2, recompute="full", shard="optimizer")


def check_step(**settings: object) -> None:
    """Each microbatch of the 2 x 2 ranks has another number of labels that count, and by it its share of the loss."""
    mesh, model = make_mesh(2, 2), mixture("mixtral")
    inputs = tokens(batch=2 * ROWS)
    labels = inputs.clone()
    for row in range(2 * ROWS):
        labels[row, : 15 * row] = IGNORED
    whole = copy.deepcopy(model)
    with no_rounding_inside():
        unsplit_step(whole, [*zip(inputs.split(1), labels.split(1), strict=True)])
        options = {"num_microbatches": ROWS, "self_check": False, "router_loss": "per_layer", "mesh": mesh, **settings}
        pipe = Pipeline(model, **grouped(**in_usual_order(**options)))
        mine = slice(pipe.replica * ROWS, (pipe.replica + 1) * ROWS)
        pipe.step(inputs[mine], labels[mine], loss_scale=1024.0)
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert any("gate" in name for name in wanted)
    found = error(pipe, wanted, "grad")
    assert found < BOUND, found


CASES = by_name(gradients_are_those_of_all_microbatches, sharded_optimizer_states_and_recomputation)

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
