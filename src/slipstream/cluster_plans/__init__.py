"""Plans of models for clusters: what `slipstream plan` and `slipstream.plan` do, and the files of their plans."""
