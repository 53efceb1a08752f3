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

from support.changed_models import CHANGES
from support.changed_runs import Outcomes, outcomes_of
from support.timeouts import SOON

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait = timedelta(seconds=SOON)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=wait)
    for name in sys.argv[1:]:
        group = dist.PrefixStore(f"group/{name}", store)
        dist.init_process_group("gloo", store=group, timeout=wait, rank=rank, world_size=size)
        change = CHANGES[name]
        store.set(f"{name}/{rank}", json.dumps(outcomes_of(change, **change.settings("processes"))))
        each: list[Outcomes] = [json.loads(store.get(f"{name}/{other}")) for other in range(size)]
        worst = {part: max((one[part] for one in each), key=lambda said: (said != "exact", said)) for part in each[0]}
        same = {part: [one[part].partition(":")[0] for one in each] for part in each[0]}
        for part, said in same.items():
            if "refused" in said and set(said) != {"refused"}:
                worst[part] = f"off: one rank is refused alone: {[one[part] for one in each]}"
        dist.destroy_process_group()
        if rank == 0:
            print(json.dumps([name, worst]), flush=True)
