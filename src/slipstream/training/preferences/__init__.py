"""Training on preferences: pairs of a chosen and a rejected answer."""

from slipstream.training.preferences.pair_reader import PairReader, read_pairs
from slipstream.training.preferences.pair_source import PairSource
