"""With keys and values on the host a step has the gradients of the unsplit model, and the device holds none of them."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, PretrainedConfig

from slipstream import Memory, PlanOptions, SlipstreamError
from slipstream.profile.stage_bench import memory_meter, tensors_alive
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES, BOUND, build, gradients, llama, tokens
from support.exact_steps import documents_error, exact_pipe, sequences_error
from support.forked import ForkedProgram
from support.hybrids import HYBRIDS, SIZES
from support.live_memory import LiveMemory, rehearsed_bytes
from support.observers import BeforeEach
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import computed_rows, make_pipe
from support.timeouts import wait_until
from support.unusual_layers import CROSSING, OWN_ATTENTION

CUT: dict[str, Any] = {"slices": [5, 30, 17, 12], "num_microbatches": 2, "context": "host"}


LATENT = DeepseekV3Config(
    **SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2},
    q_lora_rank=None,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    first_k_dense_replace=2,
)
MODELS: dict[str, PretrainedConfig] = {**ARCHITECTURES, **HYBRIDS, **CROSSING, "deepseek_v3": LATENT}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *first_of(
            [
                ("gemma2", {"schedule": "1f1b", "recompute": "stage"}),  # a window and a soft cap
                ("gpt_oss", {"schedule": "zb-h1", "memory_limit": 1e9}),  # sinks
                ("llama4_text", {"schedule": "gpipe", "recompute": "full"}),  # chunks
                ("gpt2", {"schedule": "interleaved-1f1b", "stages_per_rank": 2}),
                ("llama, tied", {"schedule": "1f1b", "offload": 1.0, "recompute": "selective"}),
                ("mamba", {"schedule": "1f1b", "recompute": "stage+full"}),  # states that layers carry
                ("qwen3", {"schedule": "1f1b", "num_flushes": 2}),  # grouped heads
                ("deepseek_v3", {"schedule": "1f1b"}),  # latent attention, whose keys are wider than its values
                ("qwen3_next", {"schedule": "1f1b"}),  # a hybrid
                ("gemma3n_text", {"schedule": "1f1b"}),  # keys and values of another layer
            ],
            3,
        ),
        *first_of(
            [
                ("mixtral", {"schedule": "zb-v", "stages_per_rank": 2}),
                ("mistral, window of 7", {"schedule": "zb-h1", "recompute": "stage+full"}),
                ("gemma3", {"schedule": "1f1b"}),  # a rope for each kind of layer
                ("phi3, longrope", {"schedule": "gpipe", "recompute": "stage"}),  # a rope by length
                ("kimi_linear", {"schedule": "1f1b", "recompute": "stage"}),  # latent attention beside delta rules
            ],
            0,
            "grid",
        ),
    ],
)
def test_gradients_are_those_of_the_unsplit_model(name: str, settings: dict[str, Any]) -> None:
    """On one rank, where a share is on the host, and on two."""
    share = random.Random(name).random()
    for num_ranks, context in ((1, share), (2, "host")):
        if num_ranks == 2 or "stages_per_rank" not in settings:
            changed = CUT | settings | {"num_ranks": num_ranks, "context": context}
            exact_pipe(build(MODELS[name]), tokens(batch=4), **changed)


# Sinks, chunks, latent keys and states; the others attend as one of these or as the models of whole rows.
OFTEN = ["gpt_oss", "llama4_text", "deepseek_v3", "qwen3_next"]
SELDOM = ["llama", "gemma2", "gemma3", "mixtral", "qwen3", "mistral, window of 7"]


@pytest.mark.parametrize("name", [*first_of(OFTEN), *first_of(SELDOM, 0, "grid")])
def test_documents_attend_to_their_own_keys(name: str) -> None:
    """Packed into rows, and as sequences of different lengths."""
    lengths, share = [(20, 44), (7, 33, 24)], random.Random(name).random()
    assert documents_error(build(MODELS[name]), tokens(batch=2), lengths, slices=6, context="host") < BOUND
    settings: dict[str, Any] = {"slices": 3, "num_microbatches": 2, "context": share}
    assert sequences_error(build(MODELS[name]), (50, 7, 33, 2, 18), **settings) < BOUND


@pytest.mark.parametrize("seed", [*first_of(range(3)), *first_of(range(3, 8), 0, "grid")])
def test_slices_may_be_cut_anywhere(seed: int) -> None:
    dice = random.Random(seed)
    for name in dice.sample(["gpt_oss", "llama", "gemma2", "llama4_text", "gemma3", "mixtral"], 2):
        ends = sorted(dice.sample(range(1, 64), dice.randint(1, 9)))
        slices = [after - before for before, after in pairwise([0, *ends, 64])]
        context = dice.choice(["host", dice.random()])
        settings = {"slices": slices, "context": context, "recompute": dice.choice(["none", "stage", "full"])}
        settings |= {"num_ranks": dice.randint(1, 2), "num_microbatches": dice.randint(1, 2)}
        exact_pipe(build(ARCHITECTURES[name]), tokens(batch=2), **settings)


def test_the_device_holds_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two actions, in files of the temporary folder that have no name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = {}
    for where in ("device", "host", 0.5):
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
    assert held[0.5] == [held["device"][0] / 2] * 2


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", True])
def test_a_number_that_is_no_share_is_refused(share: Any) -> None:
    with pytest.raises(SlipstreamError, match=r"context=.*: give 'device', 'host', 'auto' or a number from 0 to 1"):
        Memory(context=share)
    with pytest.raises(SlipstreamError, match=r"context=.*give the share of keys and values on the host, 0 to 1"):
        PlanOptions(context=share)


def test_shares_of_nothing_and_of_all_are_the_device_and_the_host() -> None:
    for share, place in ((0, "device"), (1, "host")):
        found = [
            gradients(exact_pipe(build(llama()), tokens(batch=4), **CUT | {"context": context}))
            for context in (share, place)
        ]
        for name, gradient in found[0].items():
            assert torch.equal(gradient, found[1][name])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_limit_knows_a_share(recompute: str) -> None:
    """Keys, values and their sums of half of the tokens are on the device, by the ranks' own measure."""
    needed = {
        context: rehearsed_bytes(make_pipe(build(llama()).float(), slices=4, context=context), tokens())
        for context in ("device", 0.5, "host")
    }
    assert needed["host"] < needed[0.5] < needed["device"]
    tables = {context: make_pipe(build(llama()).float(), slices=4, context=context) for context in ("device", 0.5)}
    whole, half = (pipe.memory_table(tokens(), tokens()) for pipe in tables.values())
    assert half.context[0] == whole.context[0] / 2
    assert half.context_gradients[0] == whole.context_gradients[0] / 2


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


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({}, False),
        ({"context": 0.5}, False),
        ({"context": "device"}, True),
        ({"partition": [2, 2]}, True),
        ({"memory_limit": 1e9}, True),
    ],
)
def test_weight_gradients_wait_only_where_what_they_keep_is_counted(settings: dict[str, Any], waits: bool) -> None:
    """By a plan, which has a cut, or within a limit: else W follows I directly."""
    changed = {"slices": 4, "num_microbatches": 2, "num_ranks": 2, "context": "host"} | settings
    rows = computed_rows(make_pipe(build(llama(num_hidden_layers=4)), "zb-h1", **changed))
    following = [
        after == action._replace(op=Op.W) for row in rows for action, after in pairwise(row) if action.op is Op.I
    ]
    assert all(following) != waits


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_a_model_that_reads_all_keys_is_refused(name: str) -> None:
    """ALiBi among them, as models have it."""
    config = OWN_ATTENTION[name]
    kind = config.model_type
    for context in ("host", 0.5):
        problem = f"memory.context={context!r}: model_type '{kind}' .* memory.context='device'"
        with pytest.raises(SlipstreamError, match=problem):
            make_pipe(config, slices=2, context=context)


CONTEXT, OFFLOAD = {"context": "host"}, {"offload": 1.0}


@pytest.mark.parametrize(
    ("settings", "number", "problem"),
    [
        (
            CONTEXT,
            errno.ENOSPC,
            r"memory.context=host: .* don't fit in .* \(No space left on device\). Set TMPDIR .* or",
        ),
        (
            {"context": 0.5},
            errno.ENOSPC,
            r"memory.context=0.5: .* Set TMPDIR .* or shorten the sequence",
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


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Limits one of the process's resources."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_files_that_may_not_grow_are_named() -> None:
    """The step is lost, and the next one isn't."""
    pipe = make_pipe(build(llama()), slices=2, context="host")
    with (
        limited(resource.RLIMIT_FSIZE, 1024),
        pytest.raises(SlipstreamError, match=r"kB more keys, values and states .* \(File too large\). Set TMPDIR"),
    ):
        pipe.step(tokens(), tokens())
    for parameter in pipe.parameters():
        parameter.grad = None
    loss = pipe.step(tokens(), tokens())
    assert abs(loss - make_pipe(build(llama()), slices=2).step(tokens(), tokens())) < BOUND


def test_a_low_limit_of_locked_memory_is_enough_for_files() -> None:
    """Only a GPU's pinned memory is locked; `ulimit -l 0` lets everything else run."""
    with limited(resource.RLIMIT_MEMLOCK, 0):
        loss = make_pipe(build(llama()), slices=2, context="host", offload=1.0).step(tokens(), tokens())
    assert abs(loss - make_pipe(build(llama()), slices=2).step(tokens(), tokens())) < BOUND


def test_files_are_their_owners_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = set[int]()
    allocate = os.posix_fallocate

    def noting(number: int, start: int, size: int) -> None:
        modes.add(os.fstat(number).st_mode & 0o777)
        allocate(number, start, size)

    monkeypatch.setattr(os, "posix_fallocate", noting)
    mask = os.umask(0)
    try:
        make_pipe(build(llama()), slices=2, context="host").step(tokens(), tokens())
    finally:
        os.umask(mask)
    assert modes == {0o600}


def test_a_killed_process_leaves_no_file_and_disturbs_no_other(tmp_path: Path) -> None:
    files, folders = tmp_path / "files", [tmp_path / name for name in ("killed", "other")]
    for folder in (files, *folders):
        folder.mkdir()
    worker = WORKERS / "pipeline/context_on_host.py"
    killed = ForkedProgram(folders[0], worker, files, "1000000")
    other = ForkedProgram(folders[1], worker, files, "3")
    try:
        mapped = Path(f"/proc/{killed.pid}/maps")
        wait_until(lambda: f" {files}/" in mapped.read_text(), "it maps no file")
    finally:
        killed.send_signal(signal.SIGKILL)
    killed.communicate()
    out, errors = other.communicate()
    assert other.returncode == 0, errors
    expected = make_pipe(build(llama()), slices=8).step(tokens(), tokens())
    assert float(out) == pytest.approx(float(expected), rel=BOUND)
    assert not os.listdir(files)


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
