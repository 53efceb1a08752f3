"""The costs of layers, slices and messages: described hardware, counted operations, measured profiles."""

from slipstream.cost.analytic import AnalyticCosts
from slipstream.cost.cluster import SHIPPED, Cluster, Device, LinkKind, load_cluster
from slipstream.cost.fit import AttentionWindow, SlicePoint, TimeFit, find_windows, fit_times
from slipstream.cost.memory import head_part_memory, memory_table
from slipstream.cost.operation_counts import Amount, AttentionCall, ModelCount, OpCount, PartCount, StateBytes
from slipstream.cost.profile import (
    Hardware,
    MeasuredLink,
    MeasuredStage,
    Measurement,
    ModelIdentity,
    Profile,
    load_profile,
)
from slipstream.cost.sources import (
    AnalyticSource,
    CostSource,
    HostMemorySpec,
    ProfileSource,
    StageCosts,
)
from slipstream.cost.stages import (
    BY_LAYER,
    EXCHANGES,
    OPS,
    REPLAYED,
    WITH_MESSAGES,
    ActionBytes,
    Stage,
    StageParts,
    choose_stages,
    kinds_by_layer,
    messages_of_stages,
    part_kinds,
    partition_of,
    parts_of,
    unit_bounds,
)
from slipstream.options import UNSHARED, Degrees
