"""The accounts of plans and of steps have the bytes on the host, and steps keep to a limit of them."""

from __future__ import annotations

import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import Pipeline, SlipstreamError, host_memory
from slipstream.cost import ANY_HOST, CountedOperations, StateBytes
from slipstream.planner.plan import ONE_DEVICE
from slipstream.planner.search import GlobalBatch, evaluate
from slipstream.profile import count_model
from slipstream.simulator import MemoryKind, memory_of
from support.architectures import ARCHITECTURES, LENGTH, build, llama, tokens
from support.observers import BeforeEach
from support.pipelines import make_pipe


@pytest.mark.parametrize("name", ["llama", "mistral, window of 7"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("context", ["host", 0.5])
def test_the_account_knows_the_bytes_on_the_host(
    name: str, schedule: str, context: str | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: all files that are there at the same time, and all buffers on the device."""
    there: list[int] = [0]
    most: list[int] = [0]
    make = host_memory._mapped_file

    def mapped(size: int, tenant: host_memory.Tenant) -> torch.Tensor:
        file = make(size, tenant)
        there[0] += size
        most[0] = max(most[0], there[0])
        weakref.finalize(file.untyped_storage(), lambda: there.__setitem__(0, there[0] - size))
        return file

    config = ARCHITECTURES[name]
    lengths = (24, 16, 16, 8)
    pipe = make_pipe(
        build(config).float(), schedule, num_microbatches=2, slices=[*lengths], num_ranks=1, context=context
    )
    inputs = tokens(batch=2)
    pipe.step(inputs, inputs)
    monkeypatch.setattr(host_memory, "_mapped_file", mapped)
    buffers = set[int]()

    def watch(action: object, state: Any) -> None:
        buffers.add(sum(store.num_bytes for store in state.stores.values()))

    pipe._runtime.executors[0].observe(BeforeEach(watch))
    pipe.step(inputs, inputs)

    plan = ONE_DEVICE.closed(
        schedule=schedule,
        num_microbatches=2,
        slices=lengths,
        partition=(config.num_hidden_layers,),
        context=context,
    )
    costs = CountedOperations(count_model(config, LENGTH, torch.float32))
    account = evaluate(plan, costs, GlobalBatch(LENGTH, 2), StateBytes.of("float32"), ANY_HOST)
    assert account.host_peaks() == [most[0]]
    (memory,) = account.bytes.memory()
    kinds = MemoryKind.CONTEXT, MemoryKind.CONTEXT_GRADIENTS
    assert max(sum(moment.during.get(kind, 0) for kind in kinds) for moment in memory.moments) == max(buffers)
    assert not there[0]
    # What is measured before a step is the same.
    (measured,) = memory_of(pipe.layout.training, pipe.memory_table(inputs, inputs))
    assert measured.host_peak == most[0]
    assert measured.worst_on_host.on_host[MemoryKind.CONTEXT] == most[0]


def pipeline(**settings: Any) -> Pipeline:
    return make_pipe(llama(), **{"schedule": "gpipe", "num_ranks": 2, "num_microbatches": 4, "slices": 4} | settings)


def host_peaks(pipe: Pipeline) -> list[float]:
    inputs = tokens(batch=4)
    return [rank.host_peak for rank in memory_of(pipe.layout.training, pipe.memory_table(inputs, inputs))]


@pytest.mark.parametrize(
    ("settings", "kind", "advised"),
    [
        ({"context": "host"}, MemoryKind.CONTEXT, "memory.context='device'"),
        ({"offload": 1.0, "recompute": "stage"}, MemoryKind.ACTIVATIONS, "memory.offload=0.5"),
        ({"optimizer": "host"}, MemoryKind.OPTIMIZER, "memory.optimizer='device'"),
    ],
    ids=str,
)
def test_a_step_that_has_too_much_on_the_host_is_refused(
    settings: dict[str, Any], kind: MemoryKind, advised: str
) -> None:
    """Before it runs; a byte more would do."""
    peaks = host_peaks(pipeline(**settings))
    inputs = tokens(batch=4)
    assert max(peaks) > 0
    pipeline(host_limit=max(peaks), **settings).step(inputs, inputs)
    pipe = pipeline(host_limit=max(peaks) - 1, **settings)
    with pytest.raises(SlipstreamError, match=rf"rank \d would have .* 1.00 B too much .*{kind} .*") as raised:
        pipe.step(inputs, inputs)
    assert f"memory.host_limit={max(peaks):.0f} would do" in str(raised.value)
    assert advised in str(raised.value)
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_nothing_on_the_host_keeps_to_any_limit() -> None:
    assert host_peaks(pipeline()) == [0, 0]
    inputs = tokens(batch=4)
    pipeline(host_limit=1.0).step(inputs, inputs)


@pytest.mark.parametrize("limit", [None, 1e9])
def test_sequences_of_different_lengths_keep_to_it(limit: float | None) -> None:
    """Also where the device has a limit, by which the memory of any rows is known."""
    rows = [row[: 64 - 9 * index] for index, row in enumerate(tokens(batch=4))]

    def step(host_limit: float) -> None:
        pipeline(context="host", memory_limit=limit, host_limit=host_limit).step(rows, rows)

    with pytest.raises(
        SlipstreamError, match=r"memory\.host_limit=\d+ would do.*The longest sequence is inputs\[0\]"
    ) as raised:
        step(100.0)
    needed = float(re.findall(r"host_limit=(\d+) would do", str(raised.value))[0])
    step(needed)
    with pytest.raises(SlipstreamError, match="too much"):
        step(needed - 1)


def test_pinned_tensors_take_powers_of_two() -> None:
    host = ANY_HOST._replace(bandwidth=1e9)
    np.testing.assert_array_equal(host.held_bytes(np.array([0, 1, 3, 4096, 4097])), [0, 1, 4, 4096, 8192])
    assert ANY_HOST.held_bytes(3) == 3
    # Each of four slices has two layers' keys and values, of 100 tokens that take as much as 128.
    costs = CountedOperations(count_model(llama(), 400, torch.float32))
    plan = ONE_DEVICE.closed(schedule="gpipe", num_microbatches=1, slices=(100,) * 4, partition=(4,), context="host")
    free, pinned = (
        evaluate(plan, costs, GlobalBatch(400, 1), StateBytes.of("float32"), each).host_peaks()[0]
        for each in (ANY_HOST, host)
    )
    assert pinned == pytest.approx(1.28 * free)
