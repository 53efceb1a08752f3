"""FLOPs, utilisation and times are the papers' formulas and what a real pipeline computes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.papers.formulas import GPT
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from slipstream import Memory, Pipeline, Runtime
from slipstream.model import find_anatomy
from slipstream.model.adapters import Adapter
from slipstream.model.trained_weights import find_frozen, freeze
from slipstream.pipeline.families.causal_lm_layout import plan_layout
from slipstream.pipeline.families.stage_layout import StageLayout
from slipstream.pipeline.pipeline_options import PipelineOptions
from slipstream.schedule import SlicedMicrobatch, make_schedule
from slipstream.train.data import TokenBatch
from slipstream.train.metrics.flops import DevicePeak, FlopsMeter, find_peak, peak_by_name, recomputed_flops
from support.architectures import ARCHITECTURES, tokens
from support.parameters import first_of
from support.pipelines import make_pipe

PEAK = DevicePeak(1e12, "made up")
BATCH, LENGTH, LAYERS, HIDDEN, VOCABULARY = 3, 512, 4, 256, 1024
GPT_2 = GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH)
MASKED = (
    2 * BATCH * LAYERS * HIDDEN * LENGTH * (LENGTH - 1)
)  # FLOPs of the scores that the mask hides, and their values


@pytest.fixture(scope="module")
def gpt() -> FlopsMeter:
    return FlopsMeter(GPT_2, LENGTH, BATCH, 2, PEAK)


def alone(slices: Sequence[int]) -> list[SlicedMicrobatch]:
    """The one microbatch of a batch."""
    return [SlicedMicrobatch(BATCH, tuple(slices))]


def layout(schedule: str, slices: list[int], recompute: str | int, partition: Any = "auto") -> StageLayout:
    """Of two ranks and a microbatch."""
    made = make_schedule(schedule, 2, 1, len(slices))
    options = PipelineOptions(partition=partition, memory=Memory(recompute=recompute))
    return plan_layout(GPT_2, find_anatomy(GPT_2), made, slices, options)[0]


def test_a_gpt_is_counted_as_ptdps_equations_2_and_3_but_for_masked_scores(gpt: FlopsMeter) -> None:
    """Eq. 2 leaves out the last norm; eq. 3 counts scores that the mask hides."""
    run = gpt.run
    assert run.num_parameters == pytest.approx(run.ptdp_num_parameters + 2 * HIDDEN)
    assert run.ptdp_flops == GPT(LAYERS, HIDDEN, VOCABULARY, LENGTH).flops(BATCH, recompute=False)
    assert run.model_flops == pytest.approx(run.ptdp_flops - 3 * MASKED, rel=1e-12)
    assert (run.tokens_per_step, run.peak_flops, run.peak_source) == (BATCH * LENGTH, 1e12, "made up")


def test_full_recomputation_is_counted_as_equation_3_but_for_the_head(gpt: FlopsMeter) -> None:
    """Ours recomputes the head too, and on each rank all but the slice whose backward directly follows."""
    slices = [200, 150, 100, 62]
    step = gpt.of_step(1.0, layout("gpipe", slices, "stage"), alone(slices))
    head = 2 * BATCH * LENGTH * HIDDEN * VOCABULARY
    length = slices[-1]
    seen = sum(range(LENGTH - length + 1, LENGTH + 1))
    per_token = LAYERS * 24 * HIDDEN**2 + 2 * HIDDEN * VOCABULARY
    left_alone = BATCH * (length * per_token + LAYERS * 4 * HIDDEN * seen)
    eq_3 = GPT(LAYERS, HIDDEN, VOCABULARY, LENGTH).flops(BATCH)
    assert step.hardware_flops == pytest.approx(eq_3 - 4 * MASKED + head - left_alone, rel=1e-12)
    assert step.model_flops == gpt.run.model_flops


def test_a_llama_differs_from_equation_3_by_its_own_shapes() -> None:
    """Grouped keys and values, and a gated MLP that is not four hidden sizes wide."""
    mlp, kv = 300, 64
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=mlp,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    run = FlopsMeter(config, LENGTH, BATCH, 1, PEAK).run
    own = 2 * (2 * HIDDEN**2 + 2 * HIDDEN * kv + 3 * HIDDEN * mlp)
    fewer = BATCH * LENGTH * LAYERS * (24 * HIDDEN**2 - own)
    assert run.model_flops == pytest.approx(run.ptdp_flops - 3 * MASKED - 3 * fewer, rel=1e-12)


@pytest.mark.grid
def test_gpt_3_has_the_papers_parameters_and_rate() -> None:
    """On 1024 A100, 1536 sequences of 2048 a step, at 140 TFLOP/s by eq. 3 (section 5.1)."""
    config = GPT2Config(n_layer=96, n_embd=12288, n_head=96, vocab_size=51200, n_positions=2048)
    gpt_3 = FlopsMeter(config, 2048, 1536, 1024, DevicePeak(312e12, "A100"))
    seconds = GPT(96, 12288).flops(1536) / (1024 * 140e12)
    run, step = gpt_3.run, gpt_3.of_step(seconds)
    assert run.num_parameters / 1e9 == pytest.approx(174.6, abs=0.05)
    assert step.tflops_per_device == pytest.approx(140 * 3 / 4, rel=0.02)
    assert step.mfu == pytest.approx(step.tflops_per_device / 312)


@pytest.mark.more
def test_the_smallest_model_of_table_1_has_its_parameters() -> None:
    config = GPT2Config(n_layer=24, n_embd=2304, n_head=24, vocab_size=51200, n_positions=2048)
    assert FlopsMeter(config, 2048, 1, 1, PEAK).run.num_parameters / 1e9 == pytest.approx(1.7, abs=0.05)


def test_rates_are_per_device_and_second(gpt: FlopsMeter) -> None:
    slices = [256, 256]
    step = gpt.of_step(0.5, layout("1f1b", slices, "stage"), alone(slices))
    assert step.tokens_per_second == BATCH * LENGTH / 0.5
    assert step.hardware_flops > step.model_flops == gpt.run.model_flops
    assert step.tflops_per_device == pytest.approx(step.model_flops / 0.5 / 2 / 1e12)
    assert step.hardware_tflops_per_device == pytest.approx(step.hardware_flops / 0.5 / 2 / 1e12)
    assert (step.mfu, step.hfu) == pytest.approx((step.tflops_per_device, step.hardware_tflops_per_device))


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_keeps_products_repeats_none(gpt: FlopsMeter, recompute: str) -> None:
    step = gpt.of_step(1.0, layout("1f1b", [256, 256], recompute), alone([256, 256]))
    assert step.hardware_flops == step.model_flops


def test_a_new_layout_or_new_slices_are_counted_again(gpt: FlopsMeter) -> None:
    slices, full = [400, 112], layout("gpipe", [400, 112], "stage")
    first = gpt.of_step(1.0, full, alone(slices))
    assert gpt.of_step(1.0, full, alone([112, 400])).hardware_flops < first.hardware_flops  # the last is left alone
    assert gpt.of_step(1.0, layout("gpipe", slices, 1), alone(slices)).hardware_flops < first.hardware_flops
    assert gpt.of_step(1.0, full, alone(slices)) == first


@pytest.mark.parametrize("name", first_of(["llama", "gpt2"]))
@pytest.mark.parametrize(
    ("recompute", "partition"), first_of([(1, "auto"), ("none", "auto"), ("full", "auto"), (2, [1.5, 2.5])])
)
def test_products_are_those_that_a_pipeline_runs(name: str, recompute: str | int, partition: Any) -> None:
    """Every product outside attention, forward, backward and again, counted as PyTorch runs it."""
    slices = [16, 16, 20, 12]
    figures = FlopsMeter(ARCHITECTURES[name], 64, 2, 2, PEAK)
    pipe = make_pipe(
        ARCHITECTURES[name], schedule="gpipe", slices=slices, num_ranks=2, recompute=recompute, partition=partition
    )
    inputs = tokens(batch=2)
    products = products_of(lambda: pipe.step(inputs, inputs))
    again, _ = recomputed_flops(figures.count, pipe.layout, [SlicedMicrobatch(2, (16, 16, 20, 12))], 1)
    forward = 2 * 64 * sum(n * part.ops["F"].flops.per_token for n, part in figures.count.counted(range(4)))
    assert products == 3 * forward + again
    assert (again > 0) == (recompute != "none")


def products_of(step: Callable[[], object]) -> float:
    """The FLOPs of every product outside attention that a step runs."""

    def added(into: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:  # weight gradients, added in place
        del into
        return 2 * int(a[0] * a[1] * b[1])

    def batched(a: Any, b: Any, *_: Any, **__: Any) -> int:  # an outer product is one of positions and frequencies
        return 0 if a[2] == 1 else 2 * int(a[0] * a[1] * a[2] * b[2])

    counts = {torch.ops.aten.addmm_: added, torch.ops.aten.bmm: batched}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        step()
    found = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    return sum(flops for op, flops in found.items() if "attention" not in op)


ADAPTER = Adapter("default", LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
LOW = ["model.embed_tokens*", "model.layers.0.*"]
ONE = "an adapter of one layer"
PARTS: dict[str, tuple[list[str], Adapter | None]] = {
    "the lower part": (LOW, None),
    "parts of layers": ([*LOW, "model.layers.1.self_attn*", "*gate_proj*"], None),
    "all but the head": (["model.*"], None),
    "an adapter": ([], ADAPTER),
    ONE: ([], replace(ADAPTER, config=LoraConfig(r=4, target_modules=["down_proj"], layers_to_transform=[2]))),
}


@pytest.mark.parametrize(
    "name",
    [
        *first_of(["parts of layers", ONE]),
        *first_of([name for name in PARTS if name not in ("parts of layers", ONE)], 0, "grid"),
    ],
)
def test_products_are_those_that_run_where_weights_are_frozen(name: str) -> None:
    """Every product outside attention, as PyTorch runs it; and of attention's, which calls have a backward."""
    patterns, adapter = PARTS[name]
    config = ARCHITECTURES["llama"]
    model: Any = AutoModelForCausalLM.from_config(config)
    freeze(model, find_frozen(model, patterns))
    if adapter is not None:
        model = get_peft_model(model, adapter.config)
    settings: dict[str, Any] = {"slices": [16, 16, 20, 12], "num_ranks": 2, "runtime": Runtime(self_check=False)}
    pipe = Pipeline(model, schedule="zb-h1", **settings)
    figures = FlopsMeter(config, 64, 2, 2, PEAK, pipe.trained_weights)
    found = products_of(lambda: pipe.step(tokens(batch=2), tokens(batch=2)))
    count = figures.count
    backward = sum(call.has_gradient for kind in count.parts for call in count.of_kind[kind].attentions)
    assert found == 2 * 64 * sum(n * part.step_products.per_token for n, part in count.counted(range(4)))
    assert figures.run.num_trained == sum(each.numel() for _, each in pipe.named_parameters() if each.requires_grad)
    assert figures.run.num_parameters == sum(each.numel() for _, each in pipe.named_parameters())
    scores = 2 * 2 * 4 * (8 + 8) * 64 * 65 // 2  # of a layer: two rows, four heads, keys and values of 8
    assert figures.run.model_flops == found + (4 + 2 * backward) * scores == figures.of_step(1.0).model_flops


@pytest.mark.more
def test_windows_count_what_they_let_see_and_figures_are_json() -> None:
    """gemma2: every other layer sees 7 tokens, in four heads of 8, keys and values."""
    run = FlopsMeter(ARCHITECTURES["gemma2"], 64, 2, 1, PEAK).run
    full, sliding = 64 * 65 // 2, 7 * 8 // 2 + 57 * 7
    products = 4 * (2 * (2 * 32 * 32 + 2 * 32 * 16) + 2 * 3 * 32 * 48) + 2 * 32 * 61
    assert run.model_flops == 3 * 2 * (64 * products + 2 * 2 * 4 * 8 * 2 * (full + sliding))
    assert json.loads(json.dumps(asdict(run)))["model_flops"] == run.model_flops


def test_documents_attend_to_themselves(gpt: FlopsMeter) -> None:
    ids = torch.tensor([[0] * 500 + [1] * 12, [1] * 512, [1] * 100 + [2] * 412])
    lengths = TokenBatch(ids, ids, ids).document_lengths()
    assert lengths == [500, 12, 512, 100, 412]
    slices, whole = [256, 256], layout("1f1b", [256, 256], "stage")
    step, unpacked = (gpt.of_step(1.0, whole, alone(slices), documents) for documents in (lengths, None))
    seen = sum(n * (n + 1) // 2 for n in lengths)
    hidden = BATCH * LENGTH * (LENGTH + 1) // 2 - seen
    assert step.model_flops == pytest.approx(unpacked.model_flops - 3 * LAYERS * 4 * HIDDEN * hidden)
    assert step.hardware_flops - step.model_flops < unpacked.hardware_flops - unpacked.model_flops
    assert gpt.of_step(1.0, documents=[LENGTH] * BATCH) == gpt.of_step(1.0)
    fewer = gpt.of_step(1.0, whole, alone(slices)[:2], documents=[LENGTH] * 2)  # steps may differ in their tokens
    assert fewer.tokens_per_second == 2 * LENGTH
    assert fewer.hardware_flops == pytest.approx(2 / 3 * unpacked.hardware_flops)


@pytest.mark.more
def test_figures_leave_random_numbers_alone() -> None:
    """Only the first rank counts: the others' state must stay the same."""
    before = torch.get_rng_state()
    find_peak(torch.device("cpu"), torch.float32)
    FlopsMeter(ARCHITECTURES["mixtral"], 64, 1, 1, PEAK)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpus_peak_is_measured() -> None:
    found = find_peak(torch.device("cpu"), torch.float32)
    assert 1e8 < found.flops < 1e14
    assert found.source == "measured: 1024 x 1024 by 1024 x 1024, float32, on this cpu"


def test_a_busy_machine_has_no_lower_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def peak(seconds: float, dtype: torch.dtype = torch.float32) -> float:
        monkeypatch.setattr("slipstream.train.metrics.flops.seconds_of", lambda _product, _device: seconds)
        return find_peak(torch.device("cpu"), dtype).flops * 1e-9

    product = 2 * 1024**3 * 1e-9
    assert [peak(each) for each in (0.02, 0.1, 0.01)] == pytest.approx([product / 0.02, product / 0.02, product / 0.01])
    assert peak(0.1, torch.bfloat16) == pytest.approx(product / 0.1)  # which has one of its own
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert peak(0.1) == pytest.approx(product / 0.1)
    (tmp_path / "slipstream" / "peaks.json").write_text("[")
    assert peak(0.2) == pytest.approx(product / 0.2)


def test_where_a_peak_is_kept_a_few_products_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[float] = []

    def product(_product: object, _device: object) -> float:
        time.sleep(0.03)
        measured.append(0.03)
        return 0.03

    monkeypatch.setattr("slipstream.train.metrics.flops.seconds_of", product)
    first, number = find_peak(torch.device("cpu"), torch.float32), len(measured)
    assert find_peak(torch.device("cpu"), torch.float32) == first
    assert len(measured) - number <= 2 < number


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 19.5e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H200", torch.float16, 989.4e12),
        ("Tesla V100-SXM2-32GB", torch.float16, 125e12),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65e12),
        ("NVIDIA T4G", torch.float16, None),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA GB200", torch.bfloat16, 2500e12),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4e12),
        ("NVIDIA L40S", torch.float16, 362.05e12),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.8e12),
        ("NVIDIA GeForce RTX 5090", torch.bfloat16, 209.5e12),
        ("NVIDIA GeForce RTX 5090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, None),
        ("NVIDIA H100 NVL", torch.bfloat16, None),
        ("NVIDIA A100-PCIE-40GB", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA GH200 480GB", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
    ],
)
def test_a_known_gpus_peak_is_its_data_sheets(name: str, dtype: torch.dtype, flops: float | None) -> None:
    found = peak_by_name(name, dtype)
    assert (None if found is None else found.flops) == flops
    assert found is None or found.source.startswith(("data sheet of NVIDIA", "data sheet of AMD"))


def test_float32_that_runs_as_something_else_has_no_data_sheet() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_by_name("NVIDIA A100-SXM4-80GB", torch.float32) is None
    finally:
        torch.set_float32_matmul_precision(before)
