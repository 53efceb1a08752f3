"""Tensor and data parallelism within the pipeline: the mesh, its groups, and each rank's share of the parameters."""

from slipstream.parallel.device_mesh import MeshAxes, MeshAxis, add_axis, make_mesh
from slipstream.parallel.gpu_allocator import (
    GpuMemory,
    allocator_setting,
    expands_segments,
    fragmentation_advice,
    shortage_explained,
)
from slipstream.parallel.gpu_sharing import (
    check_transport,
    choose_backend,
    describe_sharing,
    gpu_of,
    refuse_shards,
    share_gpus_by_nccl,
)
from slipstream.parallel.launched_group import end_group_at_exit, join_launched_group
from slipstream.parallel.parameter_shard import ParameterShard
from slipstream.parallel.parameter_share import ParameterShare, part_bounds
from slipstream.parallel.rank_group import RankGroup, release_groups_at_exit
from slipstream.parallel.ranks import Ranks
from slipstream.parallel.staged_collectives import PendingWork, all_reduce, receive_tensor, send_tensor
from slipstream.parallel.watched_group import NO_LIMIT, watch_group
