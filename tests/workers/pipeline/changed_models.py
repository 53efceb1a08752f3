"""Each process of test_changed_models: two ranks run the changes that are named, and rank 0 prints their outcomes.

What only one rank raises or refuses would leave the other waiting: it ends both, and the test starts a pair for the
changes after it.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from support.changes import CHANGES
from support.changes.runs import Outcomes, outcomes_of
from support.timeouts import SOON


def leave(name: str, outcomes: Outcomes) -> None:
    print(json.dumps([name, outcomes]), flush=True)
    os._exit(1)


def in_both(name: str, mine: Outcomes) -> Outcomes:
    """Returns of each part the worse outcome of the two ranks; ends them where one alone is refused."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    store.set(f"outcomes/{rank}", json.dumps(mine))
    other = f"outcomes/{1 - rank}"
    try:
        store.wait([other], timedelta(seconds=SOON / 4))
    except dist.DistError:
        leave(name, {part: f"off: rank {rank} alone is {said}" for part, said in mine.items()})
    theirs: Outcomes = json.loads(store.get(other))
    return {part: max(said, theirs[part], key=lambda said: (said != "exact", said)) for part, said in mine.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    wait = timedelta(seconds=SOON)
    store = dist.TCPStore(address, port, is_master=False, timeout=wait)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in sys.argv[1:]:
        group = dist.PrefixStore(name, store)
        join = partial(dist.init_process_group, "gloo", store=group, timeout=wait, rank=rank, world_size=size)
        mine = outcomes_of(CHANGES[name], join=join, **CHANGES[name].settings("processes"))
        if any(said.startswith("raised") for said in mine.values()):
            leave(name, mine)
        outcomes = in_both(name, mine)
        dist.destroy_process_group()
        if rank == 0:
            print(json.dumps([name, outcomes]), flush=True)
