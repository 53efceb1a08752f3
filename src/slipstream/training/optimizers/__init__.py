"""The optimizer of a run and its learning rates: found by name, tried on a toy, and made for a rank's parameters."""

from slipstream.training.optimizers.learning_rates import check_schedule, make_scheduler
from slipstream.training.optimizers.optimizer_choice import check_arguments, make_optimizer
from slipstream.training.optimizers.optimizer_trial import OptimizerTraits, try_optimizer
