"""The costs of a model's work: described hardware, counted operations, measured profiles, and what changes them."""

from slipstream.cost.action_bytes import ActionBytes
from slipstream.cost.cluster import SHIPPED, Cluster, Device, LinkKind, load_cluster
from slipstream.cost.costs import NO_LINK, Costs, LinkTime
from slipstream.cost.counted import CountedCosts
from slipstream.cost.fit import AttentionWindow, SlicePoint, TimeFit, find_windows, fit_times
from slipstream.cost.host_memory import ANY_HOST, SOME_GPUS_HOST, HostMemorySpec
from slipstream.cost.measured import MeasuredCosts, profile_behind
from slipstream.cost.measured_stages import choose_stages
from slipstream.cost.memory import NOTHING_BESIDE, HeldBeside, backward_bytes, head_part_memory, memory_table
from slipstream.cost.mode import (
    ContextOnHost,
    Mode,
    NarrowContextGradients,
    PartlyTrained,
    TiledLoss,
    WithoutHead,
    WithoutLookups,
    with_context,
    with_context_gradients,
    with_loss_tokens,
)
from slipstream.cost.operation_counts import (
    Amount,
    AttentionCall,
    ModelCount,
    OpCount,
    PartCount,
)
from slipstream.cost.operations import CountedOperations
from slipstream.cost.profile import (
    Hardware,
    MeasuredLink,
    MeasuredStage,
    Measurement,
    ModelIdentity,
    Profile,
    load_profile,
)
from slipstream.cost.sharing import (
    EXCHANGES,
    WAYS,
    Copies,
    Divided,
    Exchange,
    Sharing,
    all_degrees,
    counted_exchanges,
    divided_by,
    with_exchange,
)
from slipstream.cost.sources import (
    CostSource,
    CountedSource,
    ProfileSource,
)
from slipstream.cost.system import BUCKET_BYTES, SLIPSTREAM, ExpertRuns, ReplicaExchange, System
from slipstream.cost.typical_cluster import (
    ASSUMED_EFFICIENCY,
    CPU_LINK,
    CPU_RATES,
    GPU_LINK,
    GPU_RATES,
    clusters_named,
    typical_cluster,
)
from slipstream.cost.update import LONE_UPDATE, Numbers, StateBytes, Update, possible_shards
from slipstream.cost.work import (
    BY_LAYER,
    OPS,
    REPLAYED,
    WITH_MESSAGES,
    Stage,
    StageParts,
    Work,
    check_partition,
    kinds_by_layer,
    messages_of_stages,
    part_kinds,
    partition_of,
    parts_of,
    unit_bounds,
)
from slipstream.options import SHARED_WORK, UNSHARED, Degrees
