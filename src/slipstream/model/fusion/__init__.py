"""Makes one kernel of each norm and of each activation in a model, and two of its rotary embeddings."""

from slipstream.model.fusion.fused_kernels import check_compiler, fuse_kernels
