"""The sources of a plan's numbers: counted operations on a described cluster, or a profile of this hardware."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from types import MappingProxyType
from typing import TypeAlias

from slipstream.cost.cluster import Cluster
from slipstream.cost.costs import Costs
from slipstream.cost.counted import CountedCosts
from slipstream.cost.host_memory import HostMemorySpec
from slipstream.cost.measured import MeasuredCosts
from slipstream.cost.operation_counts import ModelCount
from slipstream.cost.profile import Profile
from slipstream.cost.sharing import WAYS, counted_exchanges, possible_degrees, refused_ways
from slipstream.cost.system import SLIPSTREAM, System
from slipstream.cost.update import StateBytes, refused_shards
from slipstream.errors import SlipstreamError
from slipstream.options import SHARED_WORK, Degrees

_COUNTED_ALONE: Mapping[str, str] = MappingProxyType(
    {"vocabulary": "Counts don't say whether a head can be spread: plan from the model's configuration."}
)


class CountedSource:
    """A counted model on a described cluster."""

    # The values of `recompute` whose times are known, the last of which holds least.
    recomputations: tuple[str, ...] = ("none", "selective", "full", "stage", "stage+full")
    microbatch_sizes = None  # sequences that a microbatch may have: any number

    def __init__(
        self,
        model: ModelCount,
        cluster: Cluster,
        name: str,
        sequence_parallel: bool = False,
        fused: bool = False,
        refusals: Mapping[str, str] = _COUNTED_ALONE,
        system: System = SLIPSTREAM,
    ) -> None:
        """`sequence_parallel`: whether ranks that share layers also share tokens; `fused`: whether the model was
        counted with fused kernels; `refusals`: why training refuses a `context_parallel` or an `expert_parallel`
        above 1, sharded parameters as `shard`, or a spread `vocabulary`; `system`: what runs the step."""
        model = system.counted(model, cluster.device)
        self.model, self.cluster, self.name, self.hardware = model, cluster, name, cluster.name
        self.sequence_parallel, self.fused, self.system = sequence_parallel, fused, system
        self.kinds = model.kinds  # the kind of every layer; equal layers have equal numbers
        self.parts, self.units_per_layer = model.parts, model.units_per_layer  # the kind of every part
        self.num_devices, self.devices_per_domain = cluster.num_devices, cluster.devices_per_domain
        self.memory = cluster.device.memory  # bytes of a device
        rate = cluster.host.rate(cluster.devices_per_node)
        device = cluster.device
        self.host = HostMemorySpec(rate, cluster.host.latency, device.host_memory, device.host_memory_bandwidth)
        self.dtype, self.state = model.dtype, system.state or StateBytes.of(model.dtype)
        self.num_experts = model.num_experts
        self.refusals = refused_ways(model) | refused_shards(model) | dict(refusals)
        # The possible numbers of ranks, by the fields of `Degrees`.
        self.degrees = possible_degrees(model, self.refusals)
        # This raises where the dtype has no peak.
        cluster.device.matmul_flops(model.dtype)

    def exchanges(self, degrees: Degrees, asked: Collection[str] | None = None) -> tuple[str, ...]:
        """Returns the exchanges of ranks that share slices, of those `asked` for."""
        return counted_exchanges(self.model, degrees, asked)

    def slice_range(self, seq_len: int) -> tuple[int, int]:
        """Returns the lengths of the shortest and the longest slice whose times are known."""
        return 1, seq_len

    def costs(self, degrees: Degrees, microbatch_size: int) -> Costs:
        """Returns the costs of the model's stages."""
        return CountedCosts(
            model=self.model,
            cluster=self.cluster,
            degrees=degrees,
            microbatch_size=microbatch_size,
            sequence_parallel=self.sequence_parallel,
            system=self.system,
        )

    def peak_seconds(self, num_sequences: int, seq_len: int) -> float | None:
        """Returns the seconds of a step's products at one device's peak: the numerator of MFU, if known.

        They are those of three forwards; where parts are frozen, of the forward and of the gradients that are needed.
        """
        flops = 0.0
        for count, part in self.model.counted(self.model.whole):
            flops += count * part.step_products.at(num_sequences * seq_len)
            for call in part.attentions:
                scores = count * num_sequences * call.num_heads * float(call.window.scores(seq_len))
                flops += call.step_flops(scores)
        return flops / self.cluster.device.flops[self.model.dtype]

    @property
    def num_nodes(self) -> int:
        """The nodes of the cluster."""
        return self.cluster.num_nodes

    def with_nodes(self, number: int) -> CostSource | None:
        """Returns the same model on other nodes of the cluster; None where the hardware is given."""
        return self._on(self.cluster.with_nodes(number))

    def _on(self, cluster: Cluster) -> CountedSource:
        """Returns the same model on another cluster of the same devices."""
        source = copy(self)
        source.cluster, source.num_devices = cluster, cluster.num_devices
        source.devices_per_domain = cluster.devices_per_domain
        return source

    def trained(self) -> tuple[str, ...]:
        """Returns a sentence about the trained parts and the end of the backward; nothing where all weights train."""
        model = self.model
        if model.num_trained == model.num_parameters:
            return ()
        layers = model.layers_without_backward
        run = "the embedding runs" if not layers else f"the embedding and the first {layers:g} layers run"
        below = f"; {run} forward only: no activations are kept and no gradient is sent to them"
        below = "" if model.embedding.has_backward else below
        return (
            f"{model.num_trained:,} of {model.num_parameters:,} parameters train: gradients and optimizer state are "
            f"theirs alone, and frozen layers have no weight gradient{below}.",
        )

    def notes(self) -> tuple[str, ...]:
        """Returns the assumptions on which the numbers rest, as sentences."""
        state = self.state
        return (
            f"Times are computed from counted operations and the description of {self.cluster.name}, not measured.",
            f"A parameter takes {state.weights:g} bytes, its gradient {state.gradients:g}, its optimizer state "
            f"{state.optimizer:g}.",
            *(["Tokens are taken to choose all experts alike."] if self.num_experts else []),
            "The gradients of a rank's first stage are reduced after its last backward, those of its others while "
            "earlier stages compute; the optimizer's step follows, and with a sharded one the gathering of weights.",
        )


class ProfileSource:
    """A model measured on the present hardware, of one microbatch size, its work shared by one number of ranks.

    It has what an CountedSource has.
    """

    recomputations: tuple[str, ...] = ("none", "full", "stage", "stage+full")
    devices_per_domain = 2**62
    num_experts = 0  # experts whose times are known
    num_nodes = 1
    # Fused kernels are in the times already.
    fused = False
    # Both are unknown, so nothing can be planned with them.
    memory = float("inf")
    host = None

    def __init__(self, profile: Profile, num_ranks: int) -> None:
        if num_ranks < 1:
            raise SlipstreamError(f"num_ranks={num_ranks}: a plan needs at least one rank.")
        self.profile = profile
        self._costs = MeasuredCosts(profile)
        self.name = f"{profile.model.model_type}, {profile.model.num_layers} layers of {profile.model.hidden_size}"
        self.hardware = profile.hardware.cpu if profile.hardware.device == "cpu" else profile.hardware.device
        shared = profile.degrees
        self.kinds, self.num_devices = profile.kinds, num_ranks * shared.num_ranks
        self.degrees = {name: (getattr(shared, name),) for name in WAYS}
        alone = [each for each in SHARED_WORK if getattr(shared, each.degree) == 1 and each.degree != "tensor"]
        again = "Its times weren't measured: profile again with"
        self.refusals = {each.choice: f"{again} --{each.axis}." for each in alone}
        self.refusals |= dict.fromkeys(("shard", "vocabulary"), "Its times weren't measured.")
        self.parts, self.units_per_layer = profile.parts, profile.units_per_layer
        self.microbatch_sizes = (profile.microbatch_size,)
        self.dtype, self.state = profile.dtype, StateBytes.of(profile.dtype)
        self.sequence_parallel = profile.sequence_parallel

    def exchanges(self, degrees: Degrees, asked: Collection[str] | None = None) -> tuple[str, ...]:
        known = self.profile.degrees
        return (known.exchange,) if degrees == known._replace(exchange=degrees.exchange) else ()

    def slice_range(self, seq_len: int) -> tuple[int, int]:
        if seq_len > self.profile.seq_len:
            raise SlipstreamError(
                f"seq_len={seq_len}, but the profile has times up to {self.profile.seq_len} tokens. Profile again "
                f"with --seq-len={seq_len}."
            )
        lengths = [fit.lengths for stage in self.profile.stages for fit in stage.fits.values()]
        return max(stage_lengths[0] for stage_lengths in lengths), min(stage_lengths[-1] for stage_lengths in lengths)

    def costs(self, degrees: Degrees, microbatch_size: int) -> Costs:
        return self._costs

    def peak_seconds(self, num_sequences: int, seq_len: int) -> float | None:
        return None

    def with_nodes(self, number: int) -> CostSource | None:
        return None

    def trained(self) -> tuple[str, ...]:
        return ()

    def notes(self) -> tuple[str, ...]:
        off, link = f"{self.profile.error:.1%}", "computed from the measured link, without overlap."
        if self.profile.link is None:
            link = "left out: one process can't measure a link."
        return (
            f"Times come from a profile; at the points held out, its fits are off by {off} on average.",
            f"The gradients' reduction between pipelines is {link}",
        )


CostSource: TypeAlias = CountedSource | ProfileSource
"""A model on some devices: what a search reads to find a plan."""
