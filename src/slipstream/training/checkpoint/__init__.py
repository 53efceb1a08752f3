"""Checkpoints: saved in the background, complete or not at all, and loaded by any mesh of ranks."""

from slipstream.training.checkpoint.base_model import differs
from slipstream.training.checkpoint.checkpoint_folder import CheckpointFolder, step_named
from slipstream.training.checkpoint.checkpoints import Checkpoints
from slipstream.training.checkpoint.manifest import Manifest
from slipstream.training.checkpoint.run_state import RunState, check_data, describe_data, describe_model, run_shards
from slipstream.training.checkpoint.save_interval import SaveInterval
from slipstream.training.checkpoint.saved_checkpoint import CheckpointReader, SavedCheckpoint
from slipstream.training.checkpoint.tensor_shard import TensorShard
from slipstream.training.checkpoint.verified_files import DamagedError
