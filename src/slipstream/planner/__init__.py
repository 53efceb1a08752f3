"""Decides before anything runs: which stage gets which layers."""
