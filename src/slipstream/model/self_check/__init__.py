"""Says whether slices are exact for an architecture: from the states of its layers, and by comparing toys of it."""

from slipstream.model.self_check.change_trial import TrialResult, try_changes
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
from slipstream.model.self_check.dispatched_trial import result_by_kind, try_dispatched
from slipstream.model.self_check.toy_runs import TokenCuts, check_carried_state
