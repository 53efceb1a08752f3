"""Forward alone: the loss of a batch, and what the model says of its tokens, over slices and ranks."""

from slipstream.pipeline.evaluation.pipeline_evaluation import PipelineEvaluation
