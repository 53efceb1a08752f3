"""What each process of test_data_parallel runs: one case after the other, in one process group."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from workers.parallel import gradient_cases, master_cases

CASES: Iterable[Callable[[], None]] = (
    gradient_cases.sums_are_those_of_one_process,
    gradient_cases.missing_gradients_count_as_zeros,
    gradient_cases.calls_and_bytes_are_those_of_the_formulas,
    gradient_cases.reductions_run_beside_the_pipeline,
    gradient_cases.tied_weights_are_delivered_whole,
    gradient_cases.partial_gradients_are_summed_over_tensor_ranks,
    gradient_cases.scaled_losses_have_unscaled_gradients,
    master_cases.three_steps_of_adamw,
    master_cases.sharded_and_replicated_to_the_bit,
    master_cases.slices_are_added_in_float32,
    master_cases.masters_keep_small_updates,
    master_cases.short_parameters_are_on_some_replicas,
    master_cases.all_ranks_skip_the_same_step,
)


def run(cases: Iterable[Callable[[], None]]) -> Iterator[str]:
    """The names of cases that every process got through."""
    for case in cases:
        case()
        dist.barrier()
        yield case.__name__


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    chosen = [case for case in CASES if case.__name__ in sys.argv[1:]] or CASES
    try:
        for name in run(chosen):
            print(f"passed {name}\n" if dist.get_rank() == 0 else "", end="", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # others may wait in a collective: the launcher ends them
    dist.destroy_process_group()
