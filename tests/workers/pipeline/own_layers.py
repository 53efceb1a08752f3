"""What each of two processes of test_layers_of_ones_own runs: cases in one way, the outcome of each a line of JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from support.sequences.own_layer_runs import Way, alone, outcome
from support.sequences.own_layers import CASES


def main(slices: str, recompute: str, every: str) -> None:
    way, cases = Way(int(slices), recompute), CASES[:: int(every)]
    known = alone(cases, way)
    dist.init_process_group("gloo")
    for case, references in zip(cases, known, strict=True):
        found = outcome(case, way, references, None)
        print(json.dumps([dist.get_rank(), case.name, found]), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
    dist.destroy_process_group()
