"""What each process of test_tensor_parallel runs: one case after the other, in one process group."""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from slipstream.parallel import RankGroup
from support.architectures import no_rounding_inside
from support.shared_models import CONFIGS
from workers.parallel import tensor_cases

CASES = (
    tensor_cases.layers_without_an_mlp_of_their_own,
    tensor_cases.stages_share_what_is_left_of_a_model,
    tensor_cases.each_rank_has_its_share,
    tensor_cases.two_all_reduces_a_layer_each_way,
    tensor_cases.the_loss_is_that_of_all_logits,
    tensor_cases.no_rank_holds_all_logits,
    tensor_cases.nothing_stays_of_a_forward,
    tensor_cases.autocast,
    tensor_cases.ranks_are_told_what_is_their_own,
    tensor_cases.dropout_agrees_where_tensors_do,
    tensor_cases.toys_are_checked,
    tensor_cases.a_plan_may_be_given,
)
ROUNDING = (tensor_cases.autocast, tensor_cases.the_loss_is_that_of_all_logits)  # they are about lower precisions


def main(wanted: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = RankGroup(dist.group.WORLD)
    cases = {case.__name__: case for case in CASES} | {name: partial(tensor_cases.compare, name) for name in CONFIGS}
    for name, case in cases.items():
        if wanted and name not in wanted:
            continue
        try:
            if case in ROUNDING:
                case(group)
            else:
                with no_rounding_inside():
                    case(group)
        except Exception:
            print(f"failed {name} on rank {group.rank}\n{traceback.format_exc()}", flush=True)
            raise
        group.barrier()
        if group.rank == 0:
            print(f"passed {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
