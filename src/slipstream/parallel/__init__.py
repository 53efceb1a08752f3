"""Tensor and data parallelism within the pipeline: the mesh, its groups, and which rank holds what."""
