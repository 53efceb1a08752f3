"""`slipstream plan --longest`: the longest sequence that fits, with one way after another to save memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slipstream.cluster_plans.longest import longest_sequences
from slipstream.cluster_plans.plan_model import choose_costs
from slipstream.cost import Cluster, load_cluster
from slipstream.errors import SlipstreamError
from slipstream.planner.find_plan import find_plan
from slipstream.planner.search import ClusterProblem, PlanOptions
from support.architectures import ARCHITECTURES, llama
from support.forked import slipstream_command
from support.small_clusters import CLUSTER


def one_device(memory: float) -> Cluster:
    cluster = load_cluster("rtx4090-pcie")
    device = replace(cluster.device, memory=memory, host_memory=50 * memory)
    return replace(cluster, device=device, devices_per_node=1, num_nodes=1)


def test_each_way_to_save_memory_allows_longer_sequences() -> None:
    cluster = one_device(200e6)
    found = [*longest_sequences(llama(), cluster, dtype="bfloat16")]
    ways = ["recompute", "offload", "context", "optimizer"]
    assert [each.savings for each in found] == [", ".join(ways[:number]) for number in range(5)]
    lengths = [each.tokens for each in found]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 2 * lengths[0] > 0
    last = found[-1].report
    assert last is not None
    assert last.best.plan.context == "host"
    # What is found fits, and little more doesn't.
    for length, fits in ((lengths[0], True), (int(1.1 * lengths[0]), False)):
        source = choose_costs(llama(max_position_embeddings=2 * length), cluster, seq_len=length)
        plain = PlanOptions(recompute="none", offload=0.0, context="device")
        problem = ClusterProblem(source, length, 1, plain)
        if fits:
            find_plan(problem)
        else:
            with pytest.raises(SlipstreamError, match="nothing fits"):
                find_plan(problem)


def test_learned_positions_are_a_limit() -> None:
    model = ARCHITECTURES["gpt2"]
    assert all(
        each.tokens <= model.n_positions for each in longest_sequences(model, one_device(24e9), dtype="bfloat16")
    )


@pytest.mark.more
def test_the_command_prints_a_row_for_each_way(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    one = "--devices=1", "--global-batch=1"
    ended = slipstream_command("plan", tmp_path / "model", tmp_path / "cluster.yaml", "--longest", *one)
    assert ended.returncode == 0, ended.stderr
    for way in ("nothing", "recompute", "recompute, offload", "recompute, offload, context, optimizer"):
        assert re.search(rf"^ ?{way} +[\d,]+ tokens +", ended.stdout, re.MULTILINE), ended.stdout
    missing = slipstream_command("plan", tmp_path / "model", "rtx4090-pcie", "--global-batch=8")
    assert missing.returncode == 2
    assert missing.stderr.endswith("--seq-len is missing: give the tokens of a sequence, or --longest.\n")
    both = slipstream_command(
        "plan", tmp_path / "model", "rtx4090-pcie", "--global-batch=8", "--longest", "--seq-len=8"
    )
    assert both.returncode == 2
    assert "--longest with --seq-len=8: it finds the length. Leave one of them out." in both.stderr
    measured = slipstream_command("plan", tmp_path / "model", "--longest", "--global-batch=8")
    assert "--longest needs a cluster" in measured.stderr
