"""What each task of test_nodes runs where no model is needed: it meets the others, and sums over gloo."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from slipstream.errors import SlipstreamError
from slipstream.launch import connect_ranks, describe_process
from slipstream.launch.local_ranks import is_task, torchrun_variables


def main() -> None:
    if is_task(os.environ):
        os.environ.update(torchrun_variables(os.environ))
    try:
        meeting = connect_ranks(describe_process({}, "cpu", {}))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    dist.init_process_group("gloo", store=meeting.store, rank=meeting.place.rank, world_size=meeting.place.world_size)
    total = torch.tensor(float(meeting.place.rank))
    dist.all_reduce(total)
    print(f"{meeting}; {os.environ['GLOO_SOCKET_IFNAME']}; sum {total.item():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
