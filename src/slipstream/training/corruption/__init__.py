"""Finds weights and optimizer state that have changed without an update: a bit that has flipped in memory."""

from slipstream.training.corruption.state_check import StateCheck
