"""Saves a pipeline's model, a loop's optimizer and scheduler, and goes on from there."""

from slipstream.pipeline.saving.model_description import describe_model
from slipstream.pipeline.saving.pipeline_saving import PipelineSaving
