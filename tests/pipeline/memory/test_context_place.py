"""memory.context="auto" is decided by the account of plans, once for all ranks, before anything runs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from slipstream import Pipeline, SlipstreamError
from slipstream.pipeline.planning import context_place
from support.architectures import LENGTH, build, llama, tokens
from support.options import grouped
from support.pipelines import make_pipe
from support.unusual_layers import OWN_ATTENTION


def automatic(**settings: Any) -> Pipeline:
    order = {"schedule": "gpipe", "num_ranks": 2, "num_microbatches": 4, "slices": 4, "seq_len": LENGTH}
    return make_pipe(llama(), context="auto", **order | settings)


@pytest.mark.parametrize("settings", [{}, {"recompute": "stage"}, {"offload": 1.0}, {"optimizer": "host"}], ids=str)
def test_it_is_the_host_where_the_device_has_no_room(settings: dict[str, Any]) -> None:
    """By the limit, or by the memory of the machine; `print` says why."""
    roomy = automatic(**settings)
    assert not roomy.layout.context_on_host
    assert "context: keys and values are on the device, as memory.context=auto: the fullest rank would" in repr(roomy)
    full = automatic(memory_limit=10_000.0, **settings)
    assert full.layout.context_on_host
    assert re.search(r"on the host, .* with them on its device, which has 10.0 kB", repr(full))


def test_steps_run_wherever_it_is() -> None:
    inputs = tokens(batch=4)
    losses = [automatic().step(inputs, inputs)]
    # Not the limit of a step, which is measured.
    losses.append(
        make_pipe(
            llama(), **{"schedule": "gpipe", "num_ranks": 2, "num_microbatches": 4, "slices": 4}, context="host"
        ).step(inputs, inputs)
    )
    torch.testing.assert_close(losses[0], losses[1])


def test_it_needs_the_tokens_of_a_sequence() -> None:
    with pytest.raises(SlipstreamError, match=r"memory.context='auto' is decided by the tokens .* seq_len="):
        automatic(seq_len=None)
    assert not automatic(seq_len=None, slices=[20, 24, 10, 10]).layout.context_on_host


def test_what_is_refused_on_the_host() -> None:
    """Where the device doesn't fit, or the host isn't possible at all."""
    pipe = make_pipe(build(OWN_ATTENTION["bloom"]), slices=2, seq_len=LENGTH, context="auto")
    assert not pipe.layout.context_on_host
    assert "reads the keys and values of all earlier tokens at once" in repr(pipe)
    with pytest.raises(
        SlipstreamError, match=r"memory.context=auto: keys and values can't be on the host, as it reads"
    ):
        context_place(lambda: 2e9, 1e9, "it reads them")
    with pytest.raises(SlipstreamError, match=r"memory.context='auto': an option of causal LMs, .* Give 'device'"):
        Pipeline(nn.Sequential(nn.Linear(4, 4)), **grouped(context="auto"))
