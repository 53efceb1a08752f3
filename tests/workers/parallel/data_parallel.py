"""What each process of test_data_parallel runs: one case after the other, in one process group."""

from __future__ import annotations

import sys

from support.parallel.group_cases import by_name, run_cases
from workers.parallel import gradient_cases, master_cases

CASES = by_name(
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

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:])
