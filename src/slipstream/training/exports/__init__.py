"""Models out of runs: taken from a checkpoint, found by a run's folder, evaluated on a text, and asked to write one."""

from slipstream.training.exports.checkpoint_choice import ChosenCheckpoint, choose_checkpoint
from slipstream.training.exports.checkpoint_export import check_export_folder, export_checkpoint
from slipstream.training.exports.continuation import TextWriter
from slipstream.training.exports.evaluation import EvaluationRequest, evaluate_model
from slipstream.training.exports.model_choice import OpenedModel, opened_model
from slipstream.training.exports.pair_loss import PairLoss
from slipstream.training.exports.text_loss import TextLoss
