"""Saves a loop's model, optimizer and scheduler in a checkpoint, and goes on from there."""

from slipstream.pipeline.saving.loop_checkpoint import load_loop, save_loop
from slipstream.pipeline.saving.model_description import describe_model
from slipstream.pipeline.saving.update_rule import Scheduler
