"""Writes the first configuration of a model and data, with a plan for this machine."""

from slipstream.extras.init.written_config import WrittenConfig, write_config
