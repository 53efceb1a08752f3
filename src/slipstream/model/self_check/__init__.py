"""Says whether slices are exact for an architecture: from the states of its layers, and by comparing toys of it."""

from slipstream.model.self_check.comparison import (
    TOLERANCE,
    LabelLoss,
    SelfCheck,
    check_causal,
    check_packed,
    check_sliceable,
    check_trainable,
    find_label_loss,
    longest_packed_sequence,
)
from slipstream.model.self_check.toy_runs import TokenCuts, check_carried_state
