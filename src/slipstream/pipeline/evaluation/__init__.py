"""What the model says of the tokens of a batch, without a loss: logits and log-probabilities, over slices and ranks."""

from slipstream.pipeline.evaluation.token_outputs import gathered_logits, log_probabilities
from slipstream.pipeline.evaluation.token_rows import RowPlaces, TokenRows, aligned_with_labels, sum_over_stages
