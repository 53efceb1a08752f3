"""Starts ranks as local processes, and connects those of torchrun and Slurm, on one node or several."""

from slipstream.launch.forked_ranks import ForkServer, fork_server
from slipstream.launch.local_ranks import (
    RegroupedError,
    has_launcher,
    launch_ranks,
    reported_to_the_launcher,
    temporary_folder,
)
from slipstream.launch.progress import Progress
from slipstream.launch.rendezvous import (
    ConnectedRanks,
    connect_ranks,
    describe_process,
    flat_settings,
    name_ranks,
    time_limit,
)
from slipstream.launch.stop_request import (
    StopRequest,
    launched_error_file,
    watched_local_rank,
    watched_run,
)
