"""What a run saves of itself and when, and from which of its checkpoints it goes on."""

from slipstream.training.saving.failure_log import FailureLog
from slipstream.training.saving.run_checkpoints import CheckpointedParts, RunCheckpoints
