"""A plan's account has the bytes of keys and values on the host."""

from __future__ import annotations

import weakref

import pytest
import torch

from slipstream import host_memory
from slipstream.cost import ANY_HOST, CountedOperations, StateBytes
from slipstream.planner.plan import ONE_DEVICE
from slipstream.planner.search import GlobalBatch, evaluate
from slipstream.profile import count_model
from support.architectures import ARCHITECTURES, LENGTH, build, tokens
from support.pipelines import make_pipe


@pytest.mark.parametrize("name", ["llama", "mistral, window of 7"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_account_knows_the_bytes_on_the_host(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: all files that are there at the same time."""
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
        build(config).float(), schedule, num_microbatches=2, slices=[*lengths], num_ranks=1, context="host"
    )
    inputs = tokens(batch=2)
    pipe.step(inputs, inputs)
    monkeypatch.setattr(host_memory, "_mapped_file", mapped)
    pipe.step(inputs, inputs)

    plan = ONE_DEVICE.closed(
        schedule=schedule,
        num_microbatches=2,
        slices=lengths,
        partition=(config.num_hidden_layers,),
        context="host",
    )
    costs = CountedOperations(count_model(config, LENGTH, torch.float32))
    account = evaluate(plan, costs, GlobalBatch(LENGTH, 2), StateBytes.of("float32"), ANY_HOST)
    assert account.host_peaks() == [most[0]]
    assert not there[0]
