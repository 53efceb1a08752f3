"""What a run keeps in a checkpoint besides what any loop does, and how it goes on from there."""

from slipstream.training.resuming.base_model import describe_base, differs
from slipstream.training.resuming.run_state import (
    RunState,
    check_data,
    describe_data,
    describe_text,
    load_run,
    run_shards,
)
