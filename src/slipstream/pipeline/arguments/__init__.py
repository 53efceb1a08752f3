"""From the arguments of a step or an evaluation to a batch."""

from slipstream.pipeline.arguments.given_batch import Inputs, given_batch, padded_as
