"""Models out of runs: taken from a checkpoint."""

from slipstream.training.exports.checkpoint_choice import ChosenCheckpoint, choose_checkpoint
from slipstream.training.exports.checkpoint_export import check_export_folder, export_checkpoint
