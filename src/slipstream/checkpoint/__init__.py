"""Checkpoints: saved in the background, complete or not at all, and loaded by any mesh of ranks."""

from slipstream.checkpoint.checkpoints import Checkpoints
from slipstream.checkpoint.encoded_values import decode, encode
from slipstream.checkpoint.files import DamagedError, describe_non_finite, is_finite
from slipstream.checkpoint.folder import CheckpointFolder, Improvement, find_best, require_best, step_named
from slipstream.checkpoint.loop_record import Scheduler, check_rule, describe_rule, loop_facts, restore_rule
from slipstream.checkpoint.manifest import Manifest, TensorShard
from slipstream.checkpoint.optimizer_state import kept_parts, load_training, training_shards
from slipstream.checkpoint.saved_checkpoint import CheckpointReader, SavedCheckpoint
