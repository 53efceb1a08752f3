"""Assigns layers to stages and ranks so that the slowest rank is as fast as possible."""

from slipstream.planner.partition.layers_to_stages import partition_layers
