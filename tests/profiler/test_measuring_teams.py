"""Ranks of a host deal what is to be measured: everything is measured, no core rests, and all plan from the same."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from slipstream.parallel import RankGroup
from slipstream.profile import measurement_run
from slipstream.profile.measurement_run import MeasuringTeams
from support.forked import launch
from support.paths import WORKERS

SECONDS = {"a": 8.0, "b": 5.0, "c": 4.0, "d": 2.0, "e": 1.0}


def teams(num_teams: int) -> list[MeasuringTeams]:
    return [MeasuringTeams(RankGroup(), tuple((rank,) for rank in range(num_teams)), mine) for mine in range(num_teams)]


@pytest.mark.parametrize("num_teams", [1, 2, 3, 8])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_everything_is_measured_by_some_team(num_teams: int, turn: int) -> None:
    shares = [team.share(SECONDS, turn, fills=False) for team in teams(num_teams)]
    assert Counter(item for share in shares for item in share) == Counter([*SECONDS])


@pytest.mark.parametrize("num_teams", [2, 3, 8])
def test_no_team_rests_while_another_has_much_to_do(num_teams: int) -> None:
    """Each fills its time, until what it doesn't have would take longer than the others; nothing gets longer by it."""
    longest = max(sum(SECONDS[item] for item in team.share(SECONDS, fills=False)) for team in teams(num_teams))
    for team in teams(num_teams):
        share = team.share(SECONDS)
        load = sum(SECONDS[item] for item in share)
        assert load <= longest
        assert all(load + SECONDS[item] > longest for item in {*SECONDS} - {*share})


def test_items_go_from_team_to_team() -> None:
    first, second = teams(2)
    assert first.share(SECONDS, 1) == second.share(SECONDS, 0)
    assert first.share(SECONDS, 2) == first.share(SECONDS, 0)


class _World(RankGroup):
    """The ranks of several hosts, as rank 0 sees them."""

    def __init__(self, everyone: list[Any]) -> None:
        super().__init__()
        self.global_ranks, self._everyone = [*range(len(everyone))], everyone

    def gather(self, value: Any) -> list[Any]:
        return self._everyone


def test_only_teams_of_one_host_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are a host's; 2 and 3 another's, and 4 and 5 share layers across both."""
    monkeypatch.setattr(measurement_run.socket, "gethostname", lambda: "here")
    places = [((0,), "here"), ((1,), "here"), ((2,), "there"), ((3,), "there"), ((4, 5), "here"), ((4, 5), "there")]
    world = _World(places)
    ranks = replace(measurement_run.Ranks.of(), world=world)
    assert MeasuringTeams.of(ranks).teams == ((0,), (1,))
    assert MeasuringTeams.of(ranks, deals=False).teams == ((0,),)


def told(pipelines: int, shared: int) -> dict[str, Any]:
    ended = launch(pipelines * shared, WORKERS / "profiler/measuring.py", str(pipelines), str(shared))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_two_ranks_measure_half_each_and_plan_from_the_samples_of_both() -> None:
    """Every point has samples of both ranks, of which one is 1% slower here."""
    found = told(2, 1)
    assert found["equal"]
    assert min(found["spreads"]) > 0
    stages, points, lengths = found["stages"], found["points"], found["lengths"]
    warm, bytes_of_all = stages * lengths, stages * (lengths + 1)
    alone = warm + 2 * stages * points + bytes_of_all
    assert max(found["counts"]) <= warm + (alone - warm) * 0.75  # a share, and what fills the time of the other's


@pytest.mark.more
def test_ranks_that_share_layers_measure_in_step() -> None:
    found = told(1, 2)
    assert found["equal"]
    assert len({*found["counts"]}) == 1
