"""Data parallelism: gradient reduction, sharded parameters and optimizer state, loss scaling."""

from slipstream.parallel.replicas.gradient_reduction import GradientReduction
from slipstream.parallel.replicas.loss_scale import LossScale
from slipstream.parallel.replicas.master_parameters import MasterParameters
from slipstream.parallel.replicas.sharded_parameters import ShardedParameters
