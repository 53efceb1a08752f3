"""Says whether slices are exact for an architecture: from what its layers carry, and by comparing toys of it."""

from slipstream.model.self_check.carried_state import check_carried_state
from slipstream.model.self_check.causality import check_causal
from slipstream.model.self_check.comparison import TOLERANCE, SelfCheck, check_sliceable
from slipstream.model.self_check.label_loss import LabelLoss, find_label_loss
