"""Starting ranks: local processes, torchrun, Slurm and several nodes, and how they meet."""

from __future__ import annotations

from slipstream.launch.agreement import describe_process, name_ranks
from slipstream.launch.local_ranks import has_launcher, launch, reported_to_the_launcher
from slipstream.launch.progress import (
    Progress,
    make_console,
)
from slipstream.launch.rendezvous import Meeting, meet, time_limit

__all__ = [
    "Meeting",
    "Progress",
    "describe_process",
    "has_launcher",
    "launch",
    "make_console",
    "meet",
    "name_ranks",
    "reported_to_the_launcher",
    "time_limit",
]
