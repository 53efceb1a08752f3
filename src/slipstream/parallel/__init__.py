"""Tensor and data parallelism within the pipeline: the mesh, its groups, and each rank's share of the parameters."""

from slipstream.parallel.context import (
    SliceExchange,
    check_heads,
    heads_of_ranks,
    own_tokens,
    sequences_within,
    shared_slice,
)
from slipstream.parallel.gpus import (
    GpuMemory,
    allocator_setting,
    check_transport,
    choose_backend,
    describe_sharing,
    expands_segments,
    fragmentation_advice,
    gpu_of,
    refuse_shards,
    room_of_rank,
    share_gpus_by_nccl,
    shortage_explained,
)
from slipstream.parallel.launched_group import end_group_at_exit, join_launched_group
from slipstream.parallel.mesh import MeshAxis, add_axis, make_mesh
from slipstream.parallel.parameter_share import ParameterShard, ParameterShare, part_bounds
from slipstream.parallel.rank_group import (
    NO_LIMIT,
    PendingWork,
    RankGroup,
    all_reduce,
    ranks_text,
    receive_tensor,
    release_groups_at_exit,
    send_tensor,
)
from slipstream.parallel.ranks import Ranks
from slipstream.parallel.sharing import (
    PossibleRanks,
    SharedStages,
    check_sharing,
    check_tensor_parallel,
    possible_exchanges,
    possible_sharing,
)
from slipstream.parallel.store_connection import (
    RENDEZVOUS_SECONDS,
    accepts,
    connected_store,
    describe_held_port,
    time_limit,
)
from slipstream.parallel.watched_group import limit_of_the_environment, watch_group
