"""Training on preferences: pairs of answers, the loss that compares them, and the reference it compares with."""

from slipstream.training.preferences.pair_reader import PairReader, read_pairs
from slipstream.training.preferences.pair_source import PairSource
from slipstream.training.preferences.preference_loss import (
    describe_rewards,
    mean_rewards,
    preference_loss,
    reward_sums,
    sums_of_pairs,
)
from slipstream.training.preferences.reference import check_reference, kept_reference, load_with_reference
