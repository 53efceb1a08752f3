"""The stores of keys, values and carried states name a wrong order, and free memory with the last backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.attention import AttentionSite, CarriedStates, ContextError, ContextStore, KeyRanges, attend

CUTS = [(0, 4), (4, 9), (9, 12)]


def inputs(start: int, end: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(start)
    return [torch.randn(1, 2, end - start, 4, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def run(store: ContextStore, start: int, end: int, first: int = 0, call: object = "a") -> Tensor:
    ranges = KeyRanges(torch.full((1, end - start), first), start)
    return attend(*inputs(start, end), AttentionSite(store, call, ranges, scale=0.5))


def test_buffers_are_freed_by_the_last_backward() -> None:
    store = ContextStore(12)
    assert not store.num_bytes
    assert store.num_bytes == 0
    outputs = [[run(store, *cut, call=call) for cut in CUTS] for call in ("a", "b")]
    one = 2 * 2 * 12 * 4 * 4  # K and V of one call: 2 heads, 12 tokens, 4 wide, 4 bytes
    assert store.num_bytes == 2 * one
    for call, left in ((0, one), (1, 0)):
        for index in (2, 1, 0):
            outputs[call][index].sum().backward()
            assert store.num_bytes == (left if index == 0 else left + 2 * one)
    assert not store.num_bytes


def test_gradient_buffers_are_float32_or_wider() -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        store = ContextStore(4)
        attend(*inputs(0, 4, dtype), AttentionSite(store, 0, KeyRanges.causal(0, 4), scale=1.0))
        (block,) = store.key_gradients(0, KeyRanges.causal(0, 4), KeyRanges.causal(0, 4))
        assert [t.dtype for t in (block.key, block.value, *block.sums)] == [dtype, dtype, wide, wide]


def test_it_remembers_calls_and_reads() -> None:
    store = ContextStore(12)
    for cut in CUTS:
        for call in ("b", "a"):
            run(store, *cut, first=min(cut[0], 3), call=call).sum()
    store.free()
    assert not store.num_bytes
    assert [*store.reads] == ["b", "a"]
    assert store.reads["a"] == [(0, 4), (3, 9), (3, 12)]
    assert "c" not in store.reads


def test_wrong_backward_order_is_named() -> None:
    store = ContextStore(12)
    outputs = [run(store, *cut) for cut in CUTS]
    outputs[2].sum().backward(retain_graph=True)
    with pytest.raises(ContextError, match=r"slice \[0, 4\) of attention call 'a' runs backward before .* \[4, 9\)"):
        outputs[0].sum().backward()
    with pytest.raises(ContextError, match=r"slice \[9, 12\) .* a second time"):
        outputs[2].sum().backward()


def test_slices_that_do_not_attend_to_each_other_are_free_of_order() -> None:
    """Two documents, [0, 6) in slices of 2 and 4 tokens and [6, 12) in one slice that may come first."""
    store = ContextStore(12)
    second = run(store, 6, 12, first=6)
    first = [run(store, 0, 2), run(store, 2, 6)]
    first[1].sum().backward()
    first[0].sum().backward()
    second.sum().backward()
    assert not store.num_bytes


def test_backward_after_freeing_is_named() -> None:
    store = ContextStore(4)
    output = run(store, 0, 4)
    store.free()
    with pytest.raises(ContextError, match="aren't in the store"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("before", "cut", "message"),
    [
        ([(0, 4)], (0, 4), r"written over the slice \[0, 4\)"),
        ([(0, 4)], (3, 6), r"written over the slice \[0, 4\)"),
        ([(0, 4)], (5, 6), "4 isn't written yet"),
        ([], (4, 6), "0 isn't written yet"),
        ([], (0, 13), "ends after the sequence of 12 tokens"),
    ],
)
def test_wrong_forward_order_is_named(before: list[tuple[int, int]], cut: tuple[int, int], message: str) -> None:
    store = ContextStore(12)
    for each in before:
        run(store, *each)
    with pytest.raises(ContextError, match=message):
        run(store, *cut)


def test_replay_reads_but_never_writes() -> None:
    """Recomputation: forward without gradient, then each slice again with it, just before its backward."""
    plain, replayed = ContextStore(12), ContextStore(12)
    expected = [run(plain, *cut) for cut in CUTS]
    with torch.no_grad():
        for cut in CUTS:
            run(replayed, *cut)
    for cut, output in reversed(list(zip(CUTS, expected, strict=True))):
        before = replayed.num_bytes
        with replayed.replay():
            again = run(replayed, *cut)
        assert torch.equal(again, output)
        assert replayed.num_bytes == before
        again.sum().backward()
        output.sum().backward()
    assert not replayed.num_bytes
    with pytest.raises(ContextError, match="is replayed, but its forward never ran"), replayed.replay():
        run(replayed, 0, 4)


STATE_CUTS = [(0, 3), (3, 4), (4, 9)]


def state_inputs() -> Tensor:
    return torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def decayed(state: Tensor | None, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """A recurrence: s(t) = decay * s(t-1) + x(t), y(t) = s(t)^2; returns y and the last s."""
    outputs = []
    state = torch.zeros((), dtype=x.dtype) if state is None else state
    for each in x:
        state = decay * state + each
        outputs.append(state**2)
    return torch.stack(outputs), state


def run_slice(states: CarriedStates, x: Tensor, decay: Tensor, first: int, end: int) -> Tensor:
    output, state = decayed(states.read("a", first), x[first:end], decay)
    return states.leave({"a": state}, first, end, output)


def test_a_forward_before_the_one_it_continues() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9)
    with pytest.raises(ContextError, match=r"from token 3 on needs the state of 'a'.*first run the slice before"):
        run_slice(states, state_inputs(), decay, 3, 4)


def test_a_backward_before_that_of_the_next_slice() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    outputs = [run_slice(states, state_inputs(), decay, *cut) for cut in STATE_CUTS]
    with pytest.raises(ContextError, match=r"slice \[3, 4\) runs backward before the slice from 4 on"):
        outputs[1].sum().backward()


def test_a_forward_after_the_backward_that_frees_its_state() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    outputs = [run_slice(states, state_inputs(), decay, *cut) for cut in STATE_CUTS]
    outputs[2].sum().backward()
    with pytest.raises(ContextError, match=r"from token 4 on .*any more"):
        run_slice(states, state_inputs(), decay, 4, 9)


def test_without_gradients_one_state_is_kept() -> None:
    states, decay = CarriedStates(), torch.tensor(0.9, dtype=torch.float64)
    with torch.no_grad():
        for cut in STATE_CUTS:
            run_slice(states, state_inputs(), decay, *cut)
            assert len(states._states) == 1
    states.free()
    assert not states.calls


def test_what_is_left_holds_no_more_than_its_numbers() -> None:
    states, long = CarriedStates(), torch.randn(1000)
    states.leave({"a": long[-3:]}, 0, 1000, long)
    left = states.read("a", 1000)
    assert left is not None
    assert left.untyped_storage().nbytes() == 3 * 4
