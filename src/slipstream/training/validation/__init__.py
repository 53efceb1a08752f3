"""Validations of a run: the loss on held-out text, which of them was the best, and whether the run should end."""

from slipstream.training.validation.loss_history import LossHistory, is_out_of_patience
from slipstream.training.validation.validator import Validator
