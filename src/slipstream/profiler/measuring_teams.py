"""Deals what is to be measured to the ranks of a host, so that each measures its share while the others do theirs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slipstream.parallel import RankGroup, Ranks

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class MeasuringTeams:
    """The teams of this rank's host. A team is one rank, or those that share every layer and measure in step.

    Only teams of one host deal: another host may be faster. Where several have ranks, each host measures everything.
    """

    world: RankGroup
    teams: tuple[tuple[int, ...], ...]  # ranks of the world
    mine: int  # the number of this rank's team

    @classmethod
    def of(cls, ranks: Ranks, deals: bool = True) -> MeasuringTeams:
        """Returns the teams of this rank's host; this rank's alone where nothing is to be dealt. Collective."""
        shared = ranks.tensor.size > 1
        team = tuple(map(ranks.world.global_ranks.index, ranks.tensor.global_ranks)) if shared else (ranks.world.rank,)
        everyone = ranks.world.gather((team, socket.gethostname()))
        hosts = [host for _, host in everyone]
        here = {hosts[rank] for rank in team}
        teams = tuple(dict.fromkeys(each for each, _ in everyone if {hosts[rank] for rank in each} == here))
        if not deals:
            return cls(ranks.world, ((ranks.world.rank,),), 0)
        return cls(ranks.world, teams, teams.index(team))

    def share(self, seconds: Mapping[Item, float], turn: int = 0, fills: bool = True) -> list[Item]:
        """Returns what this rank's team measures.

        Args:
            seconds: about how long each item takes, equal on all ranks.
            turn: the number of the round: from one to the next, items go to the next team.
            fills: whether a team that would be done before others measures some of the items too, so that no core
                rests while another one measures.
        """
        shares: list[list[Item]] = [[] for _ in self.teams]
        load = [0.0] * len(shares)
        for item in sorted(seconds, key=lambda item: -seconds[item]):
            least = load.index(min(load))
            shares[least].append(item)
            load[least] += seconds[item]
        own = (self.mine + turn) % len(shares)
        if fills:
            shares[own] += _filling(shares[own], seconds, max(load) - load[own])
        return shares[own]

    def gather(self, mine: Result) -> list[Result]:
        """Returns what each team of this host has measured, as its first rank did. Collective."""
        everyone: list[Any] = self.world.gather(mine)
        return [everyone[team[0]] for team in self.teams]


def _filling(has: list[Item], seconds: Mapping[Item, float], room: float) -> list[Item]:
    """Returns items for which there is room, those first that a team doesn't have, and each of them at most once."""
    added: list[Item] = []
    for item in sorted(seconds, key=lambda item: (item in has, -seconds[item])):
        if seconds[item] <= room:
            added.append(item)
            room -= seconds[item]
    return added
