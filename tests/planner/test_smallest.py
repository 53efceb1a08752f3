"""What fits is found: no bound of bytes is above what a configuration holds, the smallest configuration is that of all,
and a plan is found wherever one fits."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import pytest
from peft import HRAConfig, LoraConfig
from transformers import LlamaConfig

from slipstream.cluster_plans.plan_model import plan
from slipstream.errors import SlipstreamError
from slipstream.planner.find_plan import find_plan
from slipstream.planner.plan import Plan
from slipstream.planner.report import refusals
from slipstream.planner.search import ClusterProblem
from slipstream.planner.search.plan_options import PlanOptions
from slipstream.planner.search.plan_space import PlanSpace
from slipstream.planner.search.smallest import MemorySearch, longest_that_fits
from support.parameters import first_of
from support.small_clusters import gpt, small_cluster, source, with_frozen

SEEDS = range(24)
SEQ_LEN = 1024


def drawn(seed: int) -> PlanSpace:
    """A small model on a few devices whose hosts may be small, with some choices given."""
    draw = random.Random(seed)
    model = gpt(draw.choice((3, 4, 6)), draw.choice((32, 64)), 4, draw.choice((128, 2048)))
    if draw.random() < 0.3:
        model = with_frozen(model, 2)
    cluster = small_cluster(draw.choice((1, 2)), 2)
    host_memory = draw.choice((inf, inf, 2e7, 5e6))
    cluster = replace(cluster, device=replace(cluster.device, host_memory=host_memory))
    given = {
        "stages_per_rank": draw.choice((None, (1,), (1, 2))),
        "num_slices": draw.choice(((1, 2, 8), (1, 4), (2, 3), (1,))),
        "slicing": draw.choice((None, ("equal-time",), ("exact",), ("exact", "equal-time"))),
        "recompute": draw.choice((None, ("none", "stage", "full"), ("none", "selective"), ("full", "stage+full"))),
        "offload": draw.choice((None, (0.0,), (1.0,))),
        "shard": draw.choice((None, ("none",), ("optimizer", "parameters"))),
        "context": draw.choice((None, ("device",), ("host",))),
        "schedule": draw.choice((None, ("1f1b", "interleaved-1f1b", "gpipe"), ("zb-h1", "v-half", "v-min", "zb-v"))),
        "pipeline_parallel": draw.choice((None, (2,), (1, 2))),
    }
    return PlanSpace(source(model, cluster), SEQ_LEN, draw.choice((2, 4)), PlanOptions(**given))


@cache
def needed(seed: int) -> dict[Plan, float]:
    """Returns what the fullest rank of every configuration needs; infinite where its host has no room."""
    space = drawn(seed)
    return {plan: max(space.evaluate_bytes(plan).peaks_within_hosts()) for _, _, plan in space.bounded()}


@pytest.mark.parametrize("seed", first_of(SEEDS, 6, "grid"))
def test_no_configuration_holds_less_than_a_bound(seed: int) -> None:
    space, search = drawn(seed), MemorySearch(drawn(seed))
    exact = needed(seed)
    for mesh in space.meshes():
        for floor in search.floors(mesh):
            for index in range(len(floor.alike.slicings)):
                bounds = floor.device_bytes(index)
                for saving, bound in enumerate(bounds):
                    for each in floor.scheduled(index, saving):
                        assert max(bound, space.mean_state(mesh, at_end=True)) <= exact[each] * (1 + 1e-12)
                        assert floor.has_room_on_host(index, saving) or exact[each] == inf


@pytest.mark.parametrize("seed", first_of(SEEDS, 8, "grid"))
def test_the_smallest_configuration_is_that_of_all(seed: int) -> None:
    sizes = needed(seed)
    least = min(sizes.values(), default=inf)
    found = MemorySearch(drawn(seed)).smallest()
    assert (found is None) == (least == inf)
    if found is not None:
        assert max(found.peaks_within_hosts()) == sizes[found.plan] <= 1.01 * least


@pytest.mark.parametrize("seed", first_of(SEEDS, 8, "grid"))
def test_a_plan_is_found_wherever_one_fits(seed: int) -> None:
    """And where none does, what is advised is a plan."""
    space, sizes = drawn(seed), [size for size in needed(seed).values() if size < inf]
    if not sizes:
        return
    for share in (1.0, 1.0 - 1e-6):
        limit = max(1e6, share * min(sizes))
        options = space.options.changed(memory_limit=limit, num_simulated=3)
        problem = ClusterProblem(space.source, space.seq_len, space.global_batch, options)
        fits = min(sizes) <= limit
        search = MemorySearch(PlanSpace(problem.source, SEQ_LEN, problem.global_batch, options))
        assert (search.fitting() is not None) == fits
        assert search.is_complete
        if fits:
            assert find_plan(problem).best.peak_memory <= limit
        else:
            with pytest.raises(SlipstreamError, match=r"^nothing fits: "):
                find_plan(problem)


def test_the_longest_that_fits_is_found_to_a_precision() -> None:
    asked: list[int] = []

    def fits(length: int) -> bool:
        asked.append(length)
        return length <= 77_000

    found = longest_that_fits(fits, 1024, 2**20, 0.02)
    assert found <= 77_000 < found * 1.02 + 1024
    assert found % 1024 == 0
    assert len(asked) < 16
    assert longest_that_fits(fits, 1024, 5000, 0.02) == 4096
    assert longest_that_fits(lambda length: False, 256, 5000, 0.02) == 0


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=2048
    )


def test_an_adapter_more_devices_and_shorter_sequences_are_advised() -> None:
    """Each of them fits, where nothing that is allowed does and hosts have no room."""
    cluster = small_cluster(1, 1, memory=1e8)
    cluster = replace(cluster, device=replace(cluster.device, host_memory=1e3))
    request: dict[str, Any] = {"seq_len": 1024, "global_batch": 2, "num_simulated": 3}
    with pytest.raises(SlipstreamError, match=r"^nothing fits: .*alone take .* Changes that would fit: ") as caught:
        plan(small_llama(), cluster, **request)
    advice = str(caught.value)
    assert "train an adapter (lora.r=8 in a training configuration, or lora=LoraConfig(...)); or num_nodes=" in advice
    adapted = plan(small_llama(), cluster, **request, lora=LoraConfig(r=8, target_modules="all-linear"))
    assert adapted.best.peak_memory <= 0.95e8
    num_nodes, devices = map(int, re.findall(r"num_nodes=(\d+) with devices=(\d+)", advice)[0])
    assert plan(small_llama(), cluster, **request, num_nodes=num_nodes, devices=devices).best.peak_memory <= 0.95e8


@pytest.mark.parametrize(
    ("adapter", "precision", "reason"),
    [
        (LoraConfig(r=4, target_modules="all-linear"), "nf4", "blocks of 64 weights share a scale"),
        (HRAConfig(r=4, target_modules="all-linear"), "full", "it reflects all input features together"),
    ],
)
def test_adapters_that_training_refuses_on_tensor_ranks_are_not_planned_so(
    adapter: Any, precision: Any, reason: str
) -> None:
    request: dict[str, Any] = {"seq_len": 512, "global_batch": 2, "num_simulated": 3, "schedule": "1f1b"}
    options = request | {"lora": adapter, "lora_base_precision": precision}
    found = plan(small_llama(), small_cluster(1, 4), **options)
    assert {prediction.plan.tensor_parallel for prediction in found.predictions} == {1}
    assert any("tensor parallel 1" in line and reason in line for line in refusals(found))
    with pytest.raises(SlipstreamError, match=rf"tensor_parallel=2 can't be planned for .*{reason}"):
        plan(small_llama(), small_cluster(1, 4), **options, tensor_parallel=2)
