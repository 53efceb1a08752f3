"""The weights of a pipeline: where they come from, and how they are gathered and written."""

from slipstream.pipeline.weights.export import (
    copy_beside,
    gather_state,
    read_generation,
    save_on_leader,
    state_misfits,
    tied_names,
    write_generation,
    write_model,
)
from slipstream.pipeline.weights.weight_source import WeightSource, in_memory, pretrained_source, with_frozen
