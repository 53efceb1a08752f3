"""Stages of an `nn.Sequential`: its layers, skip connections, token slices and batch norms."""
