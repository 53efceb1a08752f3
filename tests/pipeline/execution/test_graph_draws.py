"""Each place of a graph draws from a generator that a replay seeds; here generators only note what is done to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream.keyed_draws import PlaceSeed, current_draws
from slipstream.pipeline.execution.action_graphs import GraphDraws

LAYER, TILE = PlaceSeed(1, ("layer",)), PlaceSeed(1, ("tile",))


class NotedGenerator:
    """Has the interface of a CUDA generator: what it draws depends on its state, which it may share."""

    def __init__(self, _: Any = None) -> None:
        self.state: dict[str, int] = {}

    def manual_seed(self, number: int) -> NotedGenerator:
        self.state["seed"] = number
        return self

    def graphsafe_get_state(self) -> NotedGenerator:
        shared = NotedGenerator()
        shared.state = self.state
        return shared

    def graphsafe_set_state(self, other: NotedGenerator) -> None:
        self.state = other.state

    def clone_state(self) -> NotedGenerator:
        copied = NotedGenerator()
        copied.state = dict(self.state)
        return copied


class NotedGraph:
    def __init__(self) -> None:
        self.registered: list[NotedGenerator] = []

    def register_generator_state(self, generator: NotedGenerator) -> None:
        self.registered.append(generator)


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> NotedGenerator:
    """The generator that layers draw from."""
    generator = NotedGenerator().manual_seed(7)
    monkeypatch.setattr(torch, "Generator", NotedGenerator)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return generator


def test_each_place_has_a_generator_that_a_replay_seeds(default: NotedGenerator) -> None:
    draws, graph, callers = GraphDraws(torch.device("cuda")), NotedGraph(), default.state
    with draws.recording(graph, 3) as seeds:  # type: ignore[arg-type]
        assert current_draws() is draws
        with draws.forked():
            draws.seed(LAYER)
            of_layer = default.state
            of_tile = draws.generator(torch.device("cuda"), TILE)
            draws.seed(TILE)
            of_last = default.state
        assert default.state is callers
    assert default.state is callers
    assert [each.state for each in graph.registered] == [of_layer, of_tile.state, of_last]
    assert len({id(state) for state in (of_layer, of_tile.state, of_last, callers)}) == 4
    for step in (5, 6):
        draws.prepare(seeds, step)
        numbers = [PlaceSeed(step, seed.place).number for seed in (LAYER, TILE, TILE)]
        assert [each.state["seed"] for each in graph.registered] == numbers
    assert default.state == {"seed": 7}


def test_graphs_share_generators_and_have_their_own_seeds(default: NotedGenerator) -> None:
    draws, graphs, seeds = GraphDraws(torch.device("cuda")), [NotedGraph(), NotedGraph(), NotedGraph()], []
    for graph, places in zip(graphs, ([LAYER], [TILE, LAYER], []), strict=True):
        with draws.recording(graph, len(places)) as found:  # type: ignore[arg-type]
            for place in places:
                draws.generator(torch.device("cuda"), place)
        seeds.append(found)
    assert seeds == [[LAYER], [TILE, LAYER], []]
    assert [len(graph.registered) for graph in graphs] == [1, 2, 0]
    assert graphs[0].registered[0] is graphs[1].registered[0]


def test_a_recording_that_fails_leaves_a_state_that_took_no_part_in_it(default: NotedGenerator) -> None:
    draws, callers = GraphDraws(torch.device("cuda")), default.state
    with (
        pytest.raises(RuntimeError, match="more often than in the step before"),
        draws.recording(NotedGraph(), 0),  # type: ignore[arg-type]
        draws.forked(),
    ):
        draws.seed(LAYER)
    assert default.state is not callers
    assert default.state == {"seed": 7}
