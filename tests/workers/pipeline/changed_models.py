"""Each process of test_changed_models: two ranks run every change that is named, each in a group of its own.

A rank that raises while the other waits must not end the changes after it: so the group is made anew for each.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from support.changes import CHANGES
from support.changes.runs import Outcomes, outcomes_of
from support.timeouts import SOON

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=SOON)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)
    for name in sys.argv[1:]:
        group = dist.PrefixStore(f"group/{name}", store)
        dist.init_process_group("gloo", store=group, timeout=wait, rank=rank, world_size=size)
        mine = outcomes_of(CHANGES[name], **CHANGES[name].settings("processes"))
        if "not run" not in mine.values():
            dist.barrier()
        # After an error at once, so that the other doesn't wait for messages.
        dist.destroy_process_group()
        store.set(f"{name}/{rank}", json.dumps(mine))
        each: list[Outcomes] = [json.loads(store.get(f"{name}/{other}")) for other in range(size)]
        worst = {part: max((one[part] for one in each), key=lambda said: (said != "exact", said)) for part in each[0]}
        same = {part: [one[part].partition(":")[0] for one in each] for part in each[0]}
        for part, said in same.items():
            if "refused" in said and set(said) != {"refused"}:
                worst[part] = f"off: one rank is refused alone: {[one[part] for one in each]}"
        if rank == 0:
            print(json.dumps([name, worst]), flush=True)
