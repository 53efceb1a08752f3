"""A profile of a tiny model has a time and bytes for everything that was requested.

Nothing here asserts a time: only that there are times, for everything that was asked.
"""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig

from slipstream.attention import ContextStore
from slipstream.cost import OPS, AttentionWindow, MeasuredCosts
from slipstream.errors import SlipstreamError
from slipstream.model import LayerRange, causal_cross_entropy, find_anatomy
from slipstream.model.hooks import TokenSlice
from slipstream.profile import ProfileSettings, identify_hardware, identify_model, profile_model
from slipstream.profile.layer_kinds import find_layer_kinds
from slipstream.profile.link_measurement import _travel, fit_link, measure_link
from slipstream.profile.measurement_run import MeasurementGrid, make_grid
from slipstream.profile.profile_run import make_benches
from slipstream.profile.stage_bench import LiveMemory, PrefilledStore, StageBench, tensors_alive
from slipstream.schedule import Op
from support.architectures import ARCHITECTURES, llama

CPU = torch.device("cpu")
SETTINGS = ProfileSettings(seq_len=64, longest_slice=16, granularity=8, repeats=2, budget=20.0)


def benches(config: PretrainedConfig, settings: ProfileSettings, stages: list[range]) -> list[StageBench]:
    """Benches of stages of whole layers."""
    cuts = [(LayerRange(layers.start, layers.stop), find_anatomy(config)) for layers in stages]
    return make_benches(config, settings, CPU, cuts)


def piece(length: int, batch: int = 1) -> TokenSlice:
    ids = torch.ones(batch, length, dtype=torch.int64)
    return TokenSlice(ids, torch.arange(length).expand(batch, -1), None, start=0, length=64, max_position=63)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [range(0, 1), range(1, 3), range(3, 4)], ids=str)
def test_activation_bytes_are_what_the_allocator_says(name: str, layers: range) -> None:
    """Allocated less freed during a forward, as torch's profiler sees it; keys and values are the store's."""
    (bench,) = benches(ARCHITECTURES[name], SETTINGS, [layers])
    stage, token_slice = bench.stage, piece(17)
    hidden = None if stage.is_first else torch.randn(1, 17, stage.hidden_size).requires_grad_()
    store = ContextStore(64)

    def forward() -> Tensor:
        output = stage.compute(token_slice, () if hidden is None else (hidden,), store)
        return causal_cross_entropy(output, token_slice.input_ids)[0] if stage.is_last else output[0]

    forward().sum().backward()  # fills what is cached between slices
    store = ContextStore(64)
    # What is freed within counts against what is allocated.
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        kept = forward()
    allocated = sum(event.self_cpu_memory_usage for event in seen.events())
    expected = allocated - store.num_bytes + (hidden.nbytes if hidden is not None else 0)
    del kept
    # GPT-2's activation multiplies with three numbers, which autograd keeps as they are, 8 bytes each.
    numbers = 3 * 8 * len(layers) if name == "gpt2" else 0
    assert bench.activation_bytes(17) == expected - numbers


@pytest.fixture
def bench() -> StageBench:
    """Of a layer in the middle of a Llama."""
    (one,) = benches(llama(), SETTINGS, [range(1, 2)])
    return one


def test_a_sample_needs_no_more_memory_than_warming_up(bench: StageBench) -> None:
    """Memory that is new to a process is slow at first, and would count where few samples are taken."""
    bench.warm_up(1, 0)  # makes weight gradients, and what is cached
    with LiveMemory(tensors_alive()) as memory:
        bench.warm_up(16, 0)
        warm = memory.peak
        memory.restart_peak()
        bench.run(16, 0)
        assert memory.peak == warm


def test_the_bytes_of_a_layers_actions(bench: StageBench) -> None:
    """Its input and output are messages, and all is in proportion to the tokens."""
    found, twice = bench.action_bytes(16, 32)
    messages = 2 * 4 * 16 * 32
    assert found.kept == bench.activation_bytes(16) - messages
    assert (twice.kept, twice.deferred) == (2 * found.kept, 2 * found.deferred)
    assert found.deferred > -found.kept
    assert all(0 <= found.peaks[op] <= twice.peaks[op] for op in OPS)


def test_context_bytes_are_keys_values_and_their_gradients() -> None:
    settings = ProfileSettings(seq_len=64, microbatch_size=3, dtype="bfloat16")
    (bench,) = benches(llama(), settings, [range(1, 3)])
    elements = 2 * 3 * 2 * 2 * 8  # layers, rows, K and V, heads, width
    assert bench.context_bytes() == (2 * elements, 4 * elements)  # gradients are summed in float32


def test_slices_run_again_after_any_context(bench: StageBench) -> None:
    """In any order, as often as one likes; what a slice reads is the context that was asked for."""
    for length, context in [(64, 0), (1, 63), (20, 44), (64, 0), (5, 0), (20, 1)]:
        seconds = bench.run(length, context)
        assert set(seconds) == set(OPS)
        assert min(seconds.values()) > 0
        (reads,) = bench._store.reads.values()
        assert reads[-2:] == [(0, context + length)] * 2
    assert PrefilledStore(8).length == 9  # one that is never complete


def test_something_else_is_read_before_every_op(bench: StageBench) -> None:
    """As much as a small model's weights and gradients, so that the caches are as a step leaves them."""
    assert bench._others is not None
    size = bench._others.numel()
    assert size >= 2 * sum(parameter.numel() for parameter in bench.stage.model.parameters())
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as recorded:
        bench.run(8, 0)
    reads = [event for event in recorded.events() if event.name == "aten::sum" and event.input_shapes[0] == [size]]
    assert len(reads) == 5  # F, B, and F, I, W


def test_seconds_in_which_another_program_has_the_core_do_not_count(
    bench: StageBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asleep, a process has no core either; several threads have no such seconds of their own."""
    assert bench._timed(lambda: time.sleep(0.2)) < 0.1
    assert bench.disturbed > 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert bench._timed(lambda: time.sleep(0.2)) > 0.1


@pytest.mark.parametrize(
    ("config", "kinds", "windows"),
    [
        (ARCHITECTURES["llama"], (0, 0, 0, 0), [AttentionWindow()]),
        (ARCHITECTURES["mistral, window of 7"], (0, 0, 0, 0), [AttentionWindow("sliding", 7)]),
        (ARCHITECTURES["gemma2"], (0, 1, 0, 1), [AttentionWindow("sliding", 7), AttentionWindow()]),
        (ARCHITECTURES["llama4_text"], (0, 0, 0, 1), [AttentionWindow("blockwise", 16), AttentionWindow()]),
    ],
    ids=["llama", "mistral", "gemma2", "llama4"],
)
def test_kinds_and_windows(config: PretrainedConfig, kinds: tuple[int, ...], windows: list[AttentionWindow]) -> None:
    found, names = find_layer_kinds(config, find_anatomy(config))
    assert found == kinds
    assert len(names) == len(set(names)) == max(kinds) + 1
    of_kinds = [range(first, first + 1) for first in map(kinds.index, sorted(set(kinds)))]
    found_windows = [one.windows() for one in benches(config, ProfileSettings(seq_len=64), of_kinds)]
    assert found_windows == [(window,) for window in windows]


def test_layers_of_other_sizes_are_another_kind() -> None:
    """Experts in every second layer."""
    config = type(ARCHITECTURES["qwen2_moe"]).from_dict(
        ARCHITECTURES["qwen2_moe"].to_dict() | {"decoder_sparse_step": 2}
    )
    assert find_layer_kinds(config, find_anatomy(config)) == ((0, 1, 0, 1), ("layer like 0", "layer like 1"))


@pytest.mark.more
@pytest.mark.parametrize("name", ["llama, tied", "gemma2"])
def test_a_whole_profile(name: str) -> None:
    """Structure and signs; a later slice of a stage, and every stage of every cut, has its times."""
    shares: list[float] = []
    found = profile_model(ARCHITECTURES[name], SETTINGS, CPU, on_progress=shares.append)
    assert found.hardware == identify_hardware(CPU)
    assert found.model == identify_model(ARCHITECTURES[name])
    assert len(found.kinds) == 4
    assert shares == sorted(shares)
    assert found.optimizer_seconds > 0
    for stage in found.stages:
        for op in OPS:
            points = stage.points[op]
            assert all(point.seconds > 0 and point.spread >= 0 for point in points)
            assert {point.held_out for point in points} == {True, False}
            held_out = {(p.length, p.context) for p in points if p.held_out}
            assert not held_out & {(length, 0) for length in stage.fits[op].lengths}
    for cut in (1, 2, 3):
        cost = MeasuredCosts(found).cost([cut, 4 - cut], [16, 13, 9])
        assert all(cost.times[stage, s, op] >= 0 for stage in (0, 1) for s in (0, 1, 2) for op in (*OPS, Op.R))
        assert all(size > 0 for size in cost.activations.values())
    own = {n for layers in (range(2), range(2, 4)) for n in [MeasuredCosts(found).num_parameters(layers)]}
    assert min(own) > 0
    found.check(identify_model(ARCHITECTURES[name]), "float32")
    with pytest.raises(SlipstreamError, match=r"model.config_hash"):
        found.check(identify_model(llama(rope_theta=5e5, intermediate_size=64)))


@pytest.mark.more
@pytest.mark.parametrize(("num_layers", "dtype"), [(1, "bfloat16"), (2, "bf16")])
def test_small_models_and_other_dtypes(num_layers: int, dtype: str) -> None:
    settings = replace(SETTINGS, seq_len=32, dtype=dtype, microbatch_size=2, longest_slice=16)
    found = profile_model(llama(num_hidden_layers=num_layers), settings, CPU)
    times = (
        MeasuredCosts(found).cost([num_layers], [16, 16]).times
    )  # of a difference, which may be 0 where others use the machine
    assert times.keys() >= {(0, 1, op) for op in OPS}
    assert times[0, 0, Op.F] + times[0, 1, Op.F] > 0
    assert MeasuredCosts(found).message_bytes(16) == 2 * 16 * 32 * (2 if dtype == "bfloat16" else 4)
    with pytest.raises(SlipstreamError, match="1 to 16 were measured"):
        MeasuredCosts(found).cost([num_layers], [32])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (ProfileSettings(seq_len=64, dtype="float8"), "choose one of float64, float32, bfloat16"),
        (ProfileSettings(seq_len=0), "seq_len=0: give a whole number"),
        (ProfileSettings(seq_len=64, longest_slice=65), "longest_slice=65: no slice is longer"),
        (ProfileSettings(seq_len=64, repeats=1), "give at least 2"),
        (ProfileSettings(seq_len=65), "max_position_embeddings=64"),
        (ProfileSettings(seq_len=64, budget=1e-6), "the budget is spent after 0 of"),
    ],
)
def test_what_cannot_be_measured(settings: ProfileSettings, reason: str) -> None:
    with pytest.raises(SlipstreamError, match=reason):
        profile_model(llama(), settings, CPU)


@pytest.mark.parametrize(
    ("seq_len", "longest", "granularity"), [(2048, 2048, 64), (131072, 8192, 128), (7, 3, 1), (1, 1, 1)]
)
def test_the_grid_is_within_the_sequence(seq_len: int, longest: int, granularity: int) -> None:
    grid = make_grid(seq_len, longest, granularity)
    assert sorted(grid.points) == sorted({*grid.fitted, *grid.held_out})
    assert not set(grid.fitted) & set(grid.held_out)
    for length, context in grid.points:
        assert 1 <= length <= longest
        assert length + context <= seq_len
        assert length % granularity == 0 or length == 1
    assert {(1, 0), (longest, 0)} <= set(grid.fitted[:3])
    assert {(n * granularity, 0) for n in range(1, 9) if n * granularity <= longest} <= set(grid.fitted)
    if seq_len > 100:
        shared = [set(grid.points[:n]) & set(grid.held_out) for n in (4, 8, 16)]
        assert all(shared), "a budget that ends early still leaves points to judge by"


def test_refinement_fits_what_was_off_and_holds_out_others() -> None:
    grid = make_grid(2048, 2048, 64)
    off = [grid.held_out[0], grid.held_out[-1]]
    before = set(grid.points)
    again = grid.refine(off, 2048)
    assert set(off) <= set(grid.fitted)
    assert {(length, 0) for length, _ in off} <= set(grid.fitted)
    assert not set(grid.fitted) & set(grid.held_out)
    new = set(grid.points) - before
    assert new <= set(again)
    assert any(point in grid.held_out for point in new)
    assert all(length + context <= 2048 for length, context in grid.points)


def test_points_are_mixed() -> None:
    grid = MeasurementGrid([(i, 0) for i in range(1, 7)], [(1, 1), (2, 1), (3, 1)])
    assert grid.points == [(1, 0), (2, 0), (3, 0), (1, 1), (4, 0), (5, 0), (6, 0), (2, 1), (3, 1)]


def test_a_link_is_a_latency_and_a_bandwidth() -> None:
    """A round trip takes two travels and what the other end computes."""
    link = fit_link([(n, 1e-4 + n / 2e9) for n in (1024, 65536, 1 << 24)], "gloo")
    assert (link.latency, link.bandwidth) == pytest.approx((1e-4, 2e9))
    assert fit_link([(1024, 1e-4), (1 << 20, 1e-4)], "gloo").latency <= 1e-4
    assert measure_link(CPU) is None  # alone
    assert _travel([5.0, 7.0, 30.0], [3.0, 3.0, 8.0]) == 2.0


def test_an_identity_ignores_names_and_sees_sizes() -> None:
    same, other = llama(bos_token_id=1), llama(intermediate_size=49)
    assert identify_model(same) == identify_model(llama())
    assert identify_model(other) != identify_model(llama())
    hashes = [identify_model(config).config_hash for config in ARCHITECTURES.values()]
    assert all(a != b for a, b in itertools.combinations(hashes, 2))
