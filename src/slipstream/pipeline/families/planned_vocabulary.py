"""Whether a plan may spread a causal LM's head over the ranks of a pipeline."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from slipstream.errors import SlipstreamError
from slipstream.model import ModelAnatomy
from slipstream.model.vocabulary import find_spreadable_head
from slipstream.pipeline.families.causal_lm_layout import check_spread
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.planner.joint import Vocabulary


def planned_vocabulary(
    config: PretrainedConfig, anatomy: ModelAnatomy, num_ranks: int, tensor_ranks: int, options: PipelineOptions
) -> Vocabulary:
    """Returns how a plan may have the head: "whole", "spread", or "auto" for either, by what the options say.

    Raises SlipstreamError where they ask for "spread" and it can't be.
    """
    if options.vocabulary == "whole":
        return "whole"
    try:
        planned = replace(options, schedule="1f1b", slices=1)  # the plan's to give
        check_spread(config, tensor_ranks, num_ranks, planned)
        find_spreadable_head(config, anatomy)
    except SlipstreamError:
        if options.vocabulary == "spread":
            raise
        return "whole"
    return "spread" if options.vocabulary == "spread" else "auto"
