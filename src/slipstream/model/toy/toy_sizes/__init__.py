"""Makes the numbers of a configuration small: widths, layers, and whatever counts tokens."""

from slipstream.model.toy.toy_sizes.composite import shrink_other_parts, width_of
from slipstream.model.toy.toy_sizes.layers import shrink_layers, take_layer_overrides
from slipstream.model.toy.toy_sizes.token_numbers import TokenNumber, shrink_number, token_numbers
from slipstream.model.toy.toy_sizes.widths import shrink_widths
