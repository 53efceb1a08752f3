"""Tensor and data parallelism beside the pipeline: the mesh, its groups, and what is spread over them."""
