"""What each process of test_tensor_parallel runs: one case after the other, in one process group."""

from __future__ import annotations

import sys
from functools import partial

import torch.distributed as dist

from slipstream.parallel import RankGroup
from support.architectures import no_rounding_inside
from support.parallel.group_cases import by_name, run_cases
from support.parallel.shared_models import CONFIGS
from workers.parallel import adapter_cases, tensor_cases

CASES = by_name(
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
) | {name: partial(tensor_cases.compare, name) for name in CONFIGS}
CASES |= {f"adapter: {name}": partial(adapter_cases.compare, name) for name in adapter_cases.ADAPTERS}
CASES |= by_name(adapter_cases.dropout_is_that_of_the_whole_input, adapter_cases.what_cannot_be_cut_is_refused)
ROUNDING = ("autocast", "the_loss_is_that_of_all_logits")  # they are about lower precisions


def run_case(name: str) -> None:
    group = RankGroup(dist.group.WORLD)
    if name in ROUNDING:
        CASES[name](group)
    else:
        with no_rounding_inside():
            CASES[name](group)


if __name__ == "__main__":
    run_cases({name: partial(run_case, name) for name in CASES}, sys.argv[1:])
