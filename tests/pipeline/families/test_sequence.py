"""Any nn.Sequential has the gradients of the unsplit one, on any number of ranks of one process to the bit."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream import Layers, Memory, Pipeline
from slipstream.schedule import SCHEDULES
from support.architectures import BOUND, gradient_error, gradients
from support.examples import examples
from support.sequences.random_layers import KINDS, Unsplit, batch, build, sequences

EXACT = tuple(kind for kind in KINDS if kind != "dropout")  # draws other numbers than the unsplit model
RECOMPUTE = ("none", "full", "stage", "stage+full", "selective", 1, "segments")
ORDERS = [(name, v) for name in SCHEDULES for v in (1, 2) if v in SCHEDULES[name].stages_per_rank]


@examples(60)
@given(
    sequences(EXACT),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(0, 5),
    st.sampled_from(ORDERS),
    st.sampled_from(RECOMPUTE),
)
def test_exact(
    kinds: list[str],
    around: bool,
    num_ranks: int,
    num_microbatches: int,
    more_rows: int,
    order: tuple[str, int],
    recompute: str | int,
) -> None:
    model = build(kinds, around)
    inputs, targets = batch(num_microbatches + more_rows)
    expected = Unsplit(model, inputs, targets, num_microbatches)
    schedule, stages_per_rank = order
    num_ranks = min(num_ranks, len(model) // stages_per_rank)
    pipe = Pipeline(
        model,
        schedule,
        num_microbatches,
        stages_per_rank=stages_per_rank,
        num_ranks=num_ranks,
        memory=Memory(recompute=recompute),
        layers=Layers(costs=_costs(model)),
    )
    untouched = inputs.clone()
    loss = pipe.step(inputs, targets)
    assert torch.equal(inputs, untouched)
    assert abs(loss - expected.loss) < BOUND
    assert gradient_error(expected.gradients, gradients(pipe)) < BOUND
    state = pipe.state_dict()
    for name, tensor in expected.model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=1e-12, atol=1e-14), name
    assert abs(pipe.evaluate(inputs, targets) - expected.evaluate(inputs, targets)) < BOUND


def _costs(model: nn.Sequential) -> list[float]:
    num_layers = sum(not isinstance(module, nn.Sequential) for module in model.modules())
    return [1.0 + number % 3 for number in range(num_layers)]


@examples(30)
@given(sequences(), st.integers(1, 8), st.sampled_from(ORDERS), st.sampled_from(RECOMPUTE))
@example(["norm"] * 4, 5, ("gpipe", 1), "none")  # moving averages: sums of several microbatches, in neighbouring layers
def test_the_number_of_ranks_changes_no_bit(
    kinds: list[str], num_microbatches: int, order: tuple[str, int], recompute: str | int
) -> None:
    inputs, targets = batch(num_microbatches + 3)
    schedule, stages_per_rank = order
    expected: tuple[Tensor, dict[str, Tensor]] | None = None
    for num_ranks in (1, 2, 3, 4):
        model = build(kinds)
        if num_ranks * stages_per_rank > len(model):
            break
        torch.manual_seed(3)
        of_one = num_ranks == 1 and schedule != "breadth-first"
        pipe = Pipeline(
            model,
            "gpipe" if of_one else schedule,
            num_microbatches,
            stages_per_rank=1 if of_one else stages_per_rank,
            num_ranks=num_ranks,
            memory=Memory(recompute="none" if num_ranks == 1 else recompute),
            layers=Layers(costs=_costs(model)),
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = pipe.step(inputs, targets)
            optimizer.step()
        found = loss, pipe.state_dict()
        expected = expected or found
        assert torch.equal(found[0], expected[0])
        assert [name for name, tensor in expected[1].items() if not torch.equal(tensor, found[1][name])] == []
