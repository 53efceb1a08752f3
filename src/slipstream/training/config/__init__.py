"""The configuration of `slipstream train`: its sections and its file."""
