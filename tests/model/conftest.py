"""What the tests of fused kernels share: float64 throughout, and counts of what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from torch import Tensor, fx

from slipstream.model import compiled_region, fusion
from support.architectures import no_rounding_inside
from support.fusing import kernels_in_float64


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Models stay in float64, and so does what is traced."""
    with no_rounding_inside(), kernels_in_float64():
        yield


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code of the graphs that are compiled from now on, of forwards and of backwards."""
    codes: list[str] = []
    fusion.fused_rotation.cache_clear()
    compile_graph = compiled_region.compile_graph

    def counted(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> object:
        codes.append(graph.code)
        return compile_graph(graph, inputs)

    monkeypatch.setattr(compiled_region, "compile_graph", counted)
    return codes


@pytest.fixture
def by_torch_compile() -> Callable[[], int]:
    """Returns how many regions were left to torch.compile, each for its forward and its backward."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    return lambda: counters["stats"]["unique_graphs"] - before
