"""The accounts of plans and of steps have the bytes on the host, and steps keep to a limit of them."""

from __future__ import annotations

import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream import Pipeline, SlipstreamError, host_memory
from slipstream.cost import ANY_HOST, CountedOperations, StateBytes
from slipstream.host_memory import HostSegments
from slipstream.pinned_segments import pinned_bytes
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


GIB = 2**30


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """The segments that are made, in order."""
    made, make = list[StorageWeakRef](), HostSegments._segment

    def recorded(self: HostSegments, size: int) -> torch.UntypedStorage:
        segment = make(self, size)
        made.extend([StorageWeakRef(segment)] * (size > 0))
        return segment

    monkeypatch.setattr(HostSegments, "_segment", recorded)
    return made


def test_tensors_share_segments(segments: list[StorageWeakRef], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a power of two have one of their own, and none overlap."""
    host = HostSegments(torch.device("cpu"))
    own = [torch.full((size,), index, dtype=torch.uint8) for index, size in enumerate([1300, 2600, 4096, 700] * 20)]
    kept = [host.like(tensor).copy_(tensor) for tensor in own]
    assert all(torch.equal(there, tensor) for there, tensor in zip(kept, own, strict=True))
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept]
    assert sizes.count(4096) == 20
    assert {*sizes} <= {4096, 2**14, 2**15, 2**16}
    assert len(segments) < 20 + 10


def test_a_segment_returns_with_its_last_tensor(segments: list[StorageWeakRef]) -> None:
    host = HostSegments(torch.device("cpu"))
    kept = [host.take(1300) for _ in range(40)]
    assert len(segments) == 2
    del kept[1:25]
    assert not segments[0].expired()
    del kept[0]
    assert [segment.expired() for segment in segments] == [True, False]


def test_copies_have_the_order_of_dims_and_a_version_of_their_own() -> None:
    host = HostSegments(torch.device("cpu"))
    first, second = (host.like(torch.empty(3, 5, 7, dtype=dtype).transpose(0, 2)) for dtype in (torch.bfloat16, None))
    assert first.stride() == second.stride() == (1, 7, 35)
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.get_default_dtype())
    before = second._version
    first.zero_()
    assert second._version == before
    assert host.like(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("size", [3 << 10, 1_300_000, 70 << 20, 100 << 20, 300 << 20, GIB + 1])
def test_the_account_knows_how_much_of_a_segment_is_used(
    size: int, segments: list[StorageWeakRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[int]()

    def segment(_: HostSegments, size: int) -> torch.UntypedStorage:
        made.append(1 << (size - 1).bit_length() if size else 0)
        return torch.UntypedStorage(size, device="meta")

    monkeypatch.setattr(HostSegments, "_segment", segment)
    monkeypatch.setattr(host_memory, "_part", lambda *_: None)
    host = HostSegments(torch.device("cpu"))
    for _ in range(341 * 4):
        host.take(size)
    assert sum(made) == pytest.approx(341 * 4 * pinned_bytes(size), rel=0.02)
    assert size <= pinned_bytes(size) <= (1.07 if size < GIB / 16 else 1.2 if size < GIB else 2) * size


def test_pinned_tensors_take_a_part_of_a_segment() -> None:
    host = ANY_HOST._replace(bandwidth=1e9)
    expected = [0, 1, 16 * 4 / 21, 4096, 16 * 8192 / 31, GIB / 3, GIB / 2, 2 * GIB]
    sizes = np.array([0, 1, 3, 4096, 4097, 0.3 * GIB, 0.45 * GIB, 1.2 * GIB])
    np.testing.assert_allclose(host.held_bytes(sizes), expected)
    assert ANY_HOST.held_bytes(3) == 3
    # Each of four slices has two layers' keys and values, of 100 tokens, 20 of which take as much as 2048.
    costs = CountedOperations(count_model(llama(), 400, torch.float32))
    plan = ONE_DEVICE.closed(schedule="gpipe", num_microbatches=1, slices=(100,) * 4, partition=(4,), context="host")
    free, pinned = (
        evaluate(plan, costs, GlobalBatch(400, 1), StateBytes.of("float32"), each).host_peaks()[0]
        for each in (ANY_HOST, host)
    )
    assert pinned == pytest.approx(1.024 * free)
