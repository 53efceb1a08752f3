"""From a model and hardware to a plan: the entry point of `slipstream plan`, and plan files."""
