"""Writes the first configuration of a model and data, with a plan for this machine."""

from slipstream.extras.first_config.written_config import WrittenConfig, write_config
