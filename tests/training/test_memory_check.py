"""What is said where memory runs out, and the least that a memory limit has to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from slipstream import SlipstreamError
from slipstream.machine_memory import machine_memory, temporary_folder
from slipstream.model import meta_model
from slipstream.pipeline import held_beside
from slipstream.schedule import make_schedule, split_backwards
from slipstream.train.config.config_values import parse_config
from slipstream.train.preflight import host_check, less_memory, memory_account
from slipstream.train.preflight.host_check import check_hosts
from slipstream.train.preflight.memory_check import check_memory
from slipstream.units import bytes_text

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = SIZES | {"vocab_size": 300}
LLAMA = LlamaConfig(**MODEL)
EXPERTS = Qwen3MoeConfig(**MODEL, num_key_value_heads=2, head_dim=8, moe_intermediate_size=32, num_experts=4)
NUM_PARAMETERS = 2 * 300 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16
OF_EXPERTS = 2 * 4 * 3 * 16 * 32
OF_OTHERS = sum(each.numel() for each in meta_model(EXPERTS).parameters()) - OF_EXPERTS


def configured(**sections: Any) -> Any:
    given = {"model": {"config": {"model_type": "llama", **MODEL}}, "data": {"files": ["x"]}}
    training = {"output": "out", "steps": 2, "seq_len": 32, "batch_size": 8}
    return parse_config(given | {"training": training} | sections)


@pytest.mark.parametrize(
    "failure",
    [
        "rank 1 failed. torch.OutOfMemoryError: CUDA out of memory. Tried",
        "rank 1 failed. RuntimeError: can't allocate memory: 9 bytes",
        "rank 1 was ended by SIGKILL, perhaps because memory ran out; the other ranks were stopped",
    ],
)
def test_what_to_lower_and_by_how_much(failure: str) -> None:
    (said,) = less_memory(failure, configured(pipeline={"num_ranks": 2, "num_microbatches": 2}))
    assert ("; --memory.optimizer=host; " in said) == ("CUDA" in failure)
    said = said.replace("; --memory.optimizer=host", "")
    assert "--pipeline.num_microbatches=4 (now 2); --memory.recompute=full; --training.seq_len=16 (now 32)" in said
    (said,) = less_memory(failure, configured(pipeline={"num_microbatches": 8, "slices": 8}))
    assert "order: --pipeline.slices=16 (now 8); --memory.recompute=full" in said
    recomputed = configured(memory={"recompute": "full"}, pipeline={"num_microbatches": 8, "slices": 32})
    (said,) = less_memory(failure, recomputed)
    said = said.replace("; --memory.optimizer=host", "")
    assert "order: --memory.recompute=stage+full; --memory.offload=0.5 (now 0); --training.seq_len" in said


def test_each_change_is_told_with_what_it_leaves() -> None:
    """By the account of the fullest rank, which the changes lower."""
    run = configured(pipeline={"num_ranks": 2, "num_microbatches": 2, "slices": 2})
    account = memory_account(run, LLAMA)
    assert account is not None
    (said,) = less_memory("rank 1 was ended by SIGKILL, perhaps because memory ran out", run, lambda: account)
    found = [float(number) for number in re.findall(r"([\d.]+) [kM]B", said)]
    assert len(found) == 5
    assert max(found[1:]) < found[0]
    state = 16 * (NUM_PARAMETERS - 16) / 2  # of each rank, with one layer and the embedding or the head
    assert state < account() < 10 * state  # with gradients of keys and values, messages and logits


@pytest.mark.parametrize(("parallel", "share"), [({}, 1), ({"shard": "optimizer"}, 3 / 4)])
def test_ranks_that_share_slices_hold_half_of_the_activations(parallel: dict[str, Any], share: float) -> None:
    pipeline = {"num_ranks": 2, "num_microbatches": 2, "slices": 2}
    runs = configured(pipeline=pipeline), configured(pipeline=pipeline, parallel={"context": 2, **parallel})
    whole, half = (memory_account(run, LLAMA) for run in runs)
    assert whole is not None
    assert half is not None
    state = 16 * NUM_PARAMETERS / 2
    beside = held_beside(8 * 32)  # the whole batch is on every rank
    counted_half, counted_whole = ((held() - beside.batch) / (1 + beside.unseen) for held in (half, whole))
    assert counted_half - share * state == pytest.approx((counted_whole - state) / 2, rel=0.02)


@pytest.mark.parametrize(
    "failure",
    [
        "out of memory\nrank 1 failed; the other ranks were stopped. ValueError: no",
        "rank 1 was ended by SIGKILL; the other ranks were stopped",  # while Linux ended nothing for want of memory
    ],
)
def test_other_failures_are_not_of_memory(failure: str) -> None:
    assert not less_memory(failure, configured())


@pytest.mark.parametrize(
    ("config", "num_ranks", "parallel", "least"),
    [
        (LLAMA, 1, {}, 16 * NUM_PARAMETERS),
        (LLAMA, 2, {}, 8 * NUM_PARAMETERS),
        (LLAMA, 2, {"data": 2, "shard": "optimizer"}, 6 * NUM_PARAMETERS),
        (LLAMA, 2, {"context": 2, "shard": "optimizer"}, 6 * NUM_PARAMETERS),
        (EXPERTS, 1, {"data": 4, "experts": 2}, 8 * OF_EXPERTS + 16 * OF_OTHERS),
        # Tensor parallelism doesn't cut experts.
        (EXPERTS, 1, {"data": 4, "experts": 2, "tensor": 2}, 8 * OF_EXPERTS + 8 * OF_OTHERS),
        (EXPERTS, 1, {"data": 4, "experts": 2, "shard": "optimizer"}, 6 * OF_EXPERTS + 10 * OF_OTHERS),
        (EXPERTS, 1, {"data": 4, "experts": 2, "shard": "parameters"}, 4 * OF_EXPERTS + 4 * OF_OTHERS),
    ],
)
def test_the_least_limit(config: Any, num_ranks: int, parallel: dict[str, Any], least: float) -> None:
    given = {"pipeline": {"num_ranks": num_ranks}, "parallel": parallel}
    check_memory(configured(**given, memory={"limit": least}), config)
    said = "weights, gradients and AdamW's state alone, of" if config is LLAMA else "one of the"
    with pytest.raises(SlipstreamError, match=said):
        check_memory(configured(**given, memory={"limit": least - 1}), config)


@pytest.mark.parametrize(("precision", "each"), [("float32", 8), ("bf16-weights", 6)])
def test_the_least_limit_with_the_optimizer_on_the_host(precision: str, each: int) -> None:
    """Weights, and gradients in float32."""

    def given(limit: float) -> Any:
        run = configured(pipeline={"num_ranks": 1}, memory={"limit": limit, "optimizer": "host"})
        return run.model_copy(update={"training": run.training.model_copy(update={"precision": precision})})

    check_memory(given(each * NUM_PARAMETERS), LLAMA)
    with pytest.raises(SlipstreamError, match="or more of weights, gradients"):
        check_memory(given(each * NUM_PARAMETERS - 1), LLAMA)


def test_the_optimizer_on_the_host_is_proposed_for_gpus() -> None:
    failure, run = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried",
        configured(pipeline={"num_ranks": 1, "slices": 2}),
    )
    account = memory_account(run, LLAMA)
    assert account is not None
    (said,) = less_memory(failure, run, lambda: account)
    assert f"--memory.optimizer=host: {bytes_text(account(optimizer='host'))}" in said
    assert account() - account(optimizer="host") == pytest.approx(1.01 * 8 * NUM_PARAMETERS)
    on_host = configured(pipeline={"slices": 2}, memory={"optimizer": "host"})
    assert "optimizer=host" not in less_memory(failure, on_host)[0]


@pytest.mark.parametrize(
    ("precision", "base_precision", "frozen"),
    [
        ("float32", "full", 4 * NUM_PARAMETERS),
        ("bf16-weights", "full", 2 * NUM_PARAMETERS),
        ("float32", "nf4", 4 * NUM_PARAMETERS - 3.5 * 2 * (4 * 16 * 16 + 3 * 16 * 32)),
    ],
)
def test_the_least_limit_beside_an_adapter(precision: str, base_precision: str, frozen: float) -> None:
    adapter = 2 * 2 * 2 * 8 * 16
    training = {"output": "out", "steps": 2, "seq_len": 32, "precision": precision}
    lora = {"base_precision": base_precision, "target_modules": ["q_proj", "v_proj"]}
    given = {"model": {"path": "base"}, "lora": lora, "training": training, "pipeline": {"num_ranks": 1}}
    least = frozen + 16 * adapter
    check_memory(configured(**given, memory={"limit": least}), LLAMA)
    with pytest.raises(SlipstreamError, match="the rank holds"):
        check_memory(configured(**given, memory={"limit": least - 1}), LLAMA)
    whole, account = (
        memory_account(run, LLAMA)
        for run in (configured(training=training, pipeline={"num_ranks": 1}), configured(**given))
    )
    assert whole is not None
    assert account is not None
    assert least < account() < whole()


def test_an_order_in_a_file_is_counted_like_its_name(tmp_path: Path) -> None:
    """Where a change asks for other microbatches, the order can't be that of the file."""
    file = tmp_path / "order.txt"
    file.write_text(str(split_backwards(make_schedule("gpipe", 2, 4, 2))), encoding="utf-8")
    pipeline = {"num_ranks": 2, "num_microbatches": 4, "slices": [20, 12], "partition": [1, 1]}
    named, given, other = (
        memory_account(configured(pipeline=pipeline | {"schedule": schedule}), LLAMA)
        for schedule in ("gpipe", str(file), "1f1b")
    )
    assert named is not None
    assert given is not None
    assert other is not None
    assert named() == given() > other()
    assert named(num_microbatches=8) > given(num_microbatches=8) == other(num_microbatches=8)


def on_host(**memory: Any) -> Any:
    run = configured(pipeline={"num_ranks": 2, "num_microbatches": 2, "slices": 4}, memory=memory)
    return run.model_copy(update={"training": run.training.model_copy(update={"device": "cpu"})})


ON_HOST = [
    ({"context": "host"}, "context", "--memory.context=device"),
    ({"offload": 1.0}, "activations", "--memory.offload=0.5"),
    ({"optimizer": "host"}, "optimizer state", "--memory.optimizer=device"),
]


@pytest.mark.parametrize(("memory", "kind", "advised"), ON_HOST, ids=str)
def test_what_ranks_have_on_their_host_is_limited(memory: dict[str, Any], kind: str, advised: str) -> None:
    with pytest.raises(SlipstreamError, match=rf"rank \d would have .* on its host: {kind} ") as raised:
        check_hosts(on_host(**memory, host_limit=10_000), LLAMA)
    needed = int(re.findall(r"Give --memory.host_limit=(\d+) or more", str(raised.value))[0])
    assert advised in str(raised.value)
    check_hosts(on_host(**memory, host_limit=needed), LLAMA)
    with pytest.raises(SlipstreamError, match="or more"):
        check_hosts(on_host(**memory, host_limit=needed - 1), LLAMA)
    check_hosts(on_host(host_limit=10_000), LLAMA)


@pytest.mark.parametrize(("memory", "kind", "advised"), ON_HOST, ids=str)
@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_container_without_room_is_refused(
    memory: dict[str, Any],
    kind: str,
    advised: str,
    is_in_memory: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files take its memory where the temporary folder is in memory, else room on a disk."""
    folder = Path("/dev/shm") if is_in_memory else tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    takes_memory = kind == "optimizer state" or temporary_folder().takes_memory
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("98000\n")
    monkeypatch.setattr(host_check, "machine_memory", lambda: machine_memory(tmp_path))
    run = on_host(**memory)
    if not takes_memory:
        check_hosts(run, LLAMA)
        return
    with pytest.raises(
        SlipstreamError, match=rf"2 ranks here need .* \({kind} .* container has 2.00 kB free"
    ) as raised:
        check_hosts(run, LLAMA)
    assert advised in str(raised.value)
    assert ("Set TMPDIR to a folder on a disk" in str(raised.value)) == (kind != "optimizer state")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 90000\n")
    if kind == "context":
        check_hosts(run, LLAMA)  # cached files make room


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = on_host(context="host")
    large = run.model_copy(update={"training": run.training.model_copy(update={"batch_size": 2**40})})
    with pytest.raises(SlipstreamError, match=rf"2 ranks here need .* in TMPDIR={tmp_path} \(context .*Set TMPDIR to"):
        check_hosts(large, LLAMA)
