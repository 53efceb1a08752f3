"""Checkpoints: saved in the background, complete or not at all, and loaded by any mesh of ranks."""

from slipstream.checkpoint.best_checkpoint import Improvement, find_best, require_best
from slipstream.checkpoint.checkpoint_folder import CheckpointFolder, step_named
from slipstream.checkpoint.checkpoints import Checkpoints
from slipstream.checkpoint.finite import describe_non_finite, is_finite
from slipstream.checkpoint.manifest import Manifest
from slipstream.checkpoint.optimizer_state import kept_parts, load_training, training_shards
from slipstream.checkpoint.save_interval import SaveInterval
from slipstream.checkpoint.saved_checkpoint import CheckpointReader, SavedCheckpoint
from slipstream.checkpoint.tensor_shard import TensorShard
from slipstream.checkpoint.verified_files import DamagedError
