"""The simulator's costs of messages on the links of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from slipstream.cost.cluster import Cluster, LinkKind
from slipstream.schedule import Action
from slipstream.simulator import TableCost


@dataclass(frozen=True, kw_only=True)
class ClusterCost(TableCost):
    """A TableCost whose messages take the links between the ranks' devices.

    Rank r of the pipeline is on the devices r · stride and following: tensor-parallel ranks next to each other, then
    data-parallel ones. Each of `num_parts` ranks sends its part of a message, and the receiving node's ranks
    gather it (PTD-P section 4.1); where ranks share the tokens, a message is one rank's, and nothing is gathered.
    """

    cluster: Cluster
    stride: int
    num_parts: int

    def link_seconds(self, send: Action, source: int, destination: int) -> float:
        return self._link(source, destination).latency + self.link_occupied(send, source, destination)

    def link_occupied(self, send: Action, source: int, destination: int) -> float:
        return self.message_bytes[send.slice] * self.byte_seconds[self._same_domain(source, destination)]

    @cached_property
    def byte_seconds(self) -> Mapping[bool, float]:
        """The seconds of a byte of a message, by whether both ranks are in one domain."""
        # The devices of a node that send at the same time share its link.
        senders = min(self.stride, self.cluster.devices_per_node)
        gathered = (self.num_parts - 1) / self.cluster.inside.rate()
        links = {True: self.cluster.inside, False: self.cluster.between}
        return {same: (1 / link.rate(senders) + gathered) / self.num_parts for same, link in links.items()}

    def _link(self, source: int, destination: int) -> LinkKind:
        return self.cluster.inside if self._same_domain(source, destination) else self.cluster.between

    def _same_domain(self, source: int, destination: int) -> bool:
        size = self.cluster.devices_per_domain
        return source * self.stride // size == destination * self.stride // size
