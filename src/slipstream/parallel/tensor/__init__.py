"""Tensor parallelism: which weights are split over ranks, and the collectives around them."""
