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
    share_gpus_by_nccl,
    shortage_explained,
)
from slipstream.parallel.mesh import (
    NO_LIMIT,
    RENDEZVOUS_SECONDS,
    MeshAxis,
    Ranks,
    accepts,
    add_axis,
    connected_store,
    describe_held_port,
    end_group_at_exit,
    join_launched_group,
    limit_of_the_environment,
    make_mesh,
    time_limit,
    watch_group,
)
from slipstream.parallel.parameter_share import ParameterShard, ParameterShare, part_bounds
from slipstream.parallel.rank_group import (
    PendingWork,
    RankGroup,
    all_reduce,
    ranks_text,
    receive_tensor,
    release_groups_at_exit,
    send_tensor,
)
from slipstream.parallel.sharing import (
    PossibleRanks,
    SharedStages,
    check_sharing,
    check_tensor_parallel,
    possible_exchanges,
    possible_sharing,
)
