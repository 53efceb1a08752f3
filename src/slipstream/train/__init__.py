"""Trains from a configuration: data, loop, metrics and checkpoints."""
