"""With keys and values on the host a step has the gradients of the unsplit model, and the device holds none of them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig

from slipstream import SlipstreamError
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from support.architectures import ARCHITECTURES, VOCABULARY, build, llama, tokens
from support.exact_steps import documents_error, exact_pipe
from support.hybrids import HYBRIDS
from support.live_memory import LiveMemory
from support.observers import BeforeEach
from support.parameters import first_of
from support.pipelines import make_pipe

CUT: dict[str, Any] = {"slices": [5, 30, 17, 12], "num_microbatches": 2, "context": "host"}


@pytest.mark.parametrize(
    ("name", "settings"),
    first_of(
        [
            ("gemma2", {"schedule": "1f1b", "recompute": "stage"}),  # a window and a soft cap
            ("gpt_oss", {"schedule": "zb-h1"}),  # sinks
            ("llama4_text", {"schedule": "gpipe", "recompute": "full"}),  # chunks
            ("gpt2", {"schedule": "interleaved-1f1b", "stages_per_rank": 2}),
            ("llama, tied", {"schedule": "1f1b", "offload": 1.0, "recompute": "selective"}),
            ("mixtral", {"schedule": "zb-v", "stages_per_rank": 2}),
            ("mamba", {"schedule": "1f1b", "recompute": "stage+full"}),  # states that layers carry
            ("qwen3", {"schedule": "1f1b", "num_flushes": 2}),
        ],
        3,
    ),
)
def test_gradients_are_those_of_the_unsplit_model(name: str, settings: dict[str, Any]) -> None:
    exact_pipe(build((ARCHITECTURES | HYBRIDS)[name]), tokens(batch=4), **CUT | settings)


def test_documents_attend_to_their_own_keys() -> None:
    inputs = tokens(batch=2)
    assert documents_error(build(llama()), inputs, [(20, 44), (7, 33, 24)], slices=6, context="host") < 1e-10


def test_the_device_holds_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two actions, in files of the temporary folder that have no name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = {}
    for where in ("device", "host"):
        pipe = make_pipe(build(llama()).float(), "gpipe", slices=8, context=where)
        stores: list[tuple[int, int]] = []
        files = set[int]()

        def watch(action: object, state: Any, stores: list[tuple[int, int]] = stores, files: set[int] = files) -> None:
            each = state.stores.values()
            stores.append((sum(s.num_bytes for s in each), sum(s.host_bytes for s in each)))
            files.add(len(os.listdir("/proc/self/fd")))

        pipe._runtime.executors[0].observe(BeforeEach(watch))
        with LiveMemory():
            pipe.step(tokens(), tokens())
        held[where] = [max(sizes) for sizes in zip(*stores, strict=True)]
        assert not os.listdir(tmp_path)
        assert len(files) == 1  # none stays open, however many blocks there are
    assert held["device"][1] == held["host"][0] == 0
    assert held["host"][1] >= held["device"][0] / 2


@pytest.mark.parametrize(
    ("name", "recompute"),
    first_of(
        [("llama", "stage"), ("mamba", "stage"), ("llama", "full"), ("llama", "stage+full"), ("llama", "none")], 2
    ),
)
def test_the_device_holds_nothing_of_a_slice_that_waits(name: str, recompute: str) -> None:
    """Of each token its position, its label, and of each slice the sums by which its recomputation is checked."""
    peaks = []
    for num_slices in (8, 16):
        ids = tokens(batch=1, length=64 * num_slices)
        config = llama(num_hidden_layers=2, max_position_embeddings=ids.shape[1])
        pipe = make_pipe(
            build(HYBRIDS.get(name, config)).float(),
            slices=num_slices,
            context="host",
            offload=1.0,
            recompute=recompute,
            self_check=False,
        )
        with memory_meter(torch.device("cpu"), tensors_alive()) as memory:
            before = memory.num_bytes
            pipe.step(ids, ids)
            peaks.append(memory.peak - before)
    assert peaks[1] - peaks[0] < (8 + 8 + 2) * 8 * 64


def test_a_model_that_reads_all_keys_is_refused() -> None:
    model = BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(SlipstreamError, match=r"memory.context='host': model_type 'bloom' .* memory.context='device'"):
        make_pipe(model, slices=2, context="host")


CONTEXT, OFFLOAD = {"context": "host"}, {"offload": 1.0}


@pytest.mark.parametrize(
    ("settings", "number", "problem"),
    [
        (
            CONTEXT,
            errno.ENOSPC,
            r"memory.context=host: .* don't fit in .* \(No space left on device\). Set TMPDIR .* or",
        ),
        (CONTEXT, errno.ENOMEM, r"\(Cannot allocate memory\). Give fewer slices"),
        (CONTEXT, errno.EMFILE, r"\(Too many open files\). Raise the limit of open files, ulimit -n"),
        (OFFLOAD, errno.ENOSPC, r"memory.offload: .* saved activations don't fit in .* or lower memory.offload"),
    ],
)
def test_a_host_without_room_is_named(
    settings: dict[str, Any], number: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    pipe = make_pipe(build(llama()), slices=2, num_microbatches=2, **settings)
    inputs = tokens(batch=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(SlipstreamError, match=problem):
            pipe.step(inputs, inputs)
    assert torch.isfinite(pipe.step(inputs, inputs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory() -> None:
    """The copies run on streams of their own; a race would change numbers."""
    inputs, found = tokens(batch=4).cuda(), []
    for where in ("device", "host", "host"):
        pipe = make_pipe(build(llama()).bfloat16(), **CUT | {"context": where, "num_ranks": 2}, device="cuda")
        pipe.step(inputs, inputs)
        found.append({name: p.grad.float() for name, p in pipe.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=0.05, atol=0.02 * float(gradient.abs().max()))
