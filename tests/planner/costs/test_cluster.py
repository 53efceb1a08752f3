"""Every shipped cluster description can be read; a wrong one is refused with the field and what to type."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.cost import cluster as cluster_module
from slipstream.cost.cluster import SHIPPED, Cluster, Device, load_cluster, parse_cluster
from slipstream.errors import SlipstreamError
from support.paths import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
DESCRIPTION: dict[str, Any] = {
    "name": "two",
    "num_nodes": 2,
    "devices_per_node": 4,
    "device": {
        "name": "thing",
        "flops": {"float16": 100e12},
        "memory": 16e9,
        "memory_bandwidth": 1e12,
        "kernel_seconds": 5e-6,
        "matmul_efficiency": 0.5,
        "attention_curve": [[1, 0.1], [100, 0.5]],
    },
    "inside": {"bandwidth": 100e9, "latency": 1e-6, "efficiency": 1},
    "between": {"bandwidth": 10e9, "latency": 1e-5, "shared_by": 4, "efficiency": 1},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    description = copy.deepcopy(DESCRIPTION)
    *parents, last = path.split(".")
    target = description
    for each in parents:
        target = target[each]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return description


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_descriptions_say_where_their_numbers_come_from_and_are_on_the_page(name: str) -> None:
    cluster = load_cluster(name)
    per_node = 4 if "nvl72" in name or name.startswith("t4") else 8
    assert (cluster.name, cluster.devices_per_node) == (name, per_node)
    assert cluster.devices_per_domain == (72 if "nvl72" in name else per_node)
    assert len(cluster.sources) >= 2
    lines = Path(cluster_module.__file__).with_name("clusters").joinpath(f"{name}.yaml").read_text().splitlines()
    given = ("name:", "num_nodes:", "devices_per_node:", "nodes_per_domain:", "device:", "sources:", "-", "#")
    for before, line in pairwise(lines):  # each number with its source, behind it or above
        assert line.strip().startswith(given) or "#" in line or before.strip().startswith("#"), line
    assert cluster.inside.bandwidth > cluster.between.bandwidth
    device, between = cluster.device, cluster.between
    peak = device.flops.get("bfloat16", device.flops["float16"]) / 1e12
    numbers = f"{device.memory / 1e9:g} | {device.memory_bandwidth / 1e9:,.0f} | {cluster.inside.bandwidth / 1e9:g}"
    outside = f"{between.bandwidth / between.shared_by / 1e9:.3g}"
    row = f"| `{name}` | {device.name} | {cluster.devices_per_domain} | {peak:g} | {numbers} | {outside} |"
    assert row in PAGE.splitlines()


def test_shipped_peaks() -> None:
    found = {name: load_cluster(name).device for name in SHIPPED}
    peaks = {name: (round(each.flops["float16"] / 1e12, 1), each.memory / 1e9) for name, each in found.items()}
    assert peaks == {
        "v100-p3.16xlarge": (125, 16),
        "t4-g4dn.12xlarge": (65, 16),
        "a100-dgx": (312, 80),
        "a100-selene": (312, 80),
        "h100-dgx": (989.4, 80),
        "h200-hgx": (989.4, 141),
        "a100-40gb-dgx": (312, 40),
        "h100-96gb": (989.4, 96),
        "h100-pcie": (756, 80),
        "b200-hgx": (2250, 180),
        "b300-hgx": (2250, 270),
        "gb200-nvl72": (2500, 186),
        "gb300-nvl72": (2500, 279),
        "mi300x-oam": (1307.4, 192),
        "l40s-pcie": (362.1, 48),
        "a6000-pcie": (154.8, 48),
        "rtx4090-pcie": (165.2, 24),
        "rtx5090-pcie": (209.5, 32),
    }


def test_the_page_of_clusters_explains_every_field_and_its_example_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(PAGE.partition("```yaml\n")[2].partition("```")[0])
    assert load_cluster(tmp_path / "ours.yaml").num_devices == 32
    explained = "\n".join(line.partition(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `"))
    names = {f"device.{field.name}" for field in fields(Device)} | {field.name for field in fields(Cluster)}
    assert [name for name in names - {"device.name", "name", "device"} if f"`{name}`" not in explained] == []


def test_yaml_and_json_files_are_read_alike(tmp_path: Path) -> None:
    """Numbers that YAML takes for text are numbers."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(DESCRIPTION))
    (tmp_path / "a.json").write_text(json.dumps(DESCRIPTION))
    found = [load_cluster(tmp_path / "a.yaml"), load_cluster(tmp_path / "a.json")]
    assert found == [parse_cluster(DESCRIPTION)] * 2
    assert found[0].num_devices == 8
    assert parse_cluster(changed("between.bandwidth", "25e9")).between.bandwidth == 25e9


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("between.bandwidth", 25, ["between.bandwidth is 25", "1e+07 to 1e+14", "Type 25e9", "3.125e9 if gigabits"]),
        ("inside.bandwidth", 0, ["inside.bandwidth is 0", "above 0"]),
        ("inside.bandwidth", -1e9, ["inside.bandwidth", "above 0"]),
        ("device.memory", 80, ["device.memory is 80", "bytes", "Type 80e9"]),
        ("device.memory_bandwidth", 2039, ["device.memory_bandwidth is 2039", "Type 2039e9"]),
        ("device.flops", {"bfloat16": 312}, ["device.flops.bfloat16 is 312", "Type 312e12 if teraFLOP/s"]),
        ("device.flops", 312e12, ["device.flops is 312", "by dtype"]),
        ("device.kernel_seconds", 5, ["device.kernel_seconds is 5", "Type 5e-6 if microseconds"]),
        ("device.memory_efficiency", 80, ["device.memory_efficiency is 80", "Type 80e-2 if percent"]),
        ("device.memory", None, ["device lacks memory", "add memory"]),
        ("between", None, ["lacks between"]),
        ("num_nodes", 2.5, ["num_nodes is 2.5", "whole number"]),
        ("num_nodes", 0, ["num_nodes is 0"]),
        ("inside.bandwith", 1e9, ["inside has no field 'bandwith'", "did you mean 'bandwidth'"]),
        ("inside.latency", "fast", ["inside.latency is 'fast'", "seconds"]),
        ("inside.latency", float("nan"), ["inside.latency is nan"]),
        ("device.matmul_efficiency", 80, ["device.matmul_efficiency is 80", "Type 80e-2 if percent"]),
        ("device.attention_curve", [[9, 0.5], [1, 0.1]], ["curve has tokens [9.0, 1.0]", "from few to many"]),
        ("device.attention_curve", 0.5, ["device.attention_curve is 0.5", "[tokens, fraction]"]),
        ("device", "V100", ["device is 'V100'", "give the fields name, flops"]),
    ],
)
def test_impossible_numbers_are_named_with_what_to_type(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(SlipstreamError) as raised:
        parse_cluster(changed(path, value))
    for word in words:
        assert word in str(raised.value)


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match="did you mean 'h100-dgx'"):
        load_cluster("h100")
    with pytest.raises(SlipstreamError, match="can't read the cluster file"):
        load_cluster(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(SlipstreamError, match="neither YAML nor JSON"):
        load_cluster(tmp_path / "bad.yaml")


def test_attentions_efficiency_is_a_line_over_the_logarithm() -> None:
    device = parse_cluster(DESCRIPTION).device
    fractions = [device.attention_flops("float16", tokens) / 100e12 for tokens in (1, 10, 100, 10_000)]
    assert fractions == pytest.approx([0.05, 0.15, 0.25, 0.25])
    assert device.matmul_flops("float16") == 50e12
    with pytest.raises(SlipstreamError, match="dtype='int3' has no peak on thing: use float16"):
        device.matmul_flops("int3")


LONG = {**DESCRIPTION["between"], "bandwidth": 1e13}


@pytest.mark.parametrize(
    ("change", "seconds", "expected"),
    [
        # A ring within a node moves its bytes over the inner link.
        (None, lambda c: c.all_reduce_seconds(8e9, 4), 6 * 1e-6 + 1.5 * 8e9 / 100e9),
        (None, lambda c: c.all_reduce_seconds(8e9, 1), 0),
        # Rings across nodes share what leads out of a node: four groups with one device of a node each, a quarter.
        (None, lambda c: c.all_reduce_seconds(8e9, 2, stride=4), 2 * 1e-5 + 8e9 / (10e9 / 4)),
        # A group of all has it alone. One of its seven hops leads out of the node.
        (None, lambda c: c.all_reduce_seconds(8e9, 8), 2 * (1e-5 + 6 * 1e-6) + 14 / 8 * 8e9 / 10e9),
        # Each device keeps an equal part in an all-to-all; what leaves a node of four shares its link, while others
        # are sent inside.
        (None, lambda c: c.all_to_all_seconds(8e9, 1), 0),
        (None, lambda c: c.all_to_all_seconds(8e9, 4), 1e-6 + 3 / 4 * 8e9 / 100e9),
        (None, lambda c: c.all_to_all_seconds(8e9, 8), 1e-5 + 4 / 8 * 8e9 / (10e9 / 4)),
        (None, lambda c: c.all_to_all_seconds(8e9, 2, stride=4), 1e-5 + 1 / 2 * 8e9 / (10e9 / 4)),
        (("between", LONG), lambda c: c.all_to_all_seconds(8e9, 8), 1e-5 + 3 / 8 * 8e9 / 100e9),
        # A rack that NVLink connects is one domain of many nodes.
        (("nodes_per_domain", 2), lambda c: c.all_reduce_seconds(8e9, 8), 14 * 1e-6 + 14 / 8 * 8e9 / 100e9),
        (
            ("nodes_per_domain", 2),
            lambda c: c.with_nodes(4).exchange_seconds(8e9, 16),
            1e-5 + 14 * 1e-6 + 15 / 16 * 8e9 / (8 * 10e9 / 4),
        ),
        (("nodes_per_domain", 2), lambda c: (c.devices_per_domain, c.num_devices), (8, 8)),
        # A link of its own is not shared.
        (None, lambda c: (c.inside.rate(senders=4), c.between.rate(senders=2)), (100e9, 5e9)),
    ],
)
def test_links(change: tuple[str, Any] | None, seconds: Callable[[Cluster], object], expected: object) -> None:
    """Two nodes of four devices, each with a link inside and a share of the one between nodes."""
    description = changed(*change) if change else DESCRIPTION
    assert seconds(parse_cluster(description)) == pytest.approx(expected)


@pytest.mark.parametrize(("stride", "size", "cards"), [(1, 8, 4), (2, 4, 2), (4, 2, 1)])
def test_a_group_uses_the_cards_of_all_its_devices_of_a_node(stride: int, size: int, cards: int) -> None:
    """With a card for each device a group of four of a node has four rings; none is faster than the links inside."""
    cluster = parse_cluster(changed("between.shared_by", 1))
    sent = (size - 1) / size * 8e9
    assert cluster.exchange_seconds(8e9, size, stride) == pytest.approx(sent / (cards * 10e9), rel=1e-4)
    slow = parse_cluster(changed("between", {**DESCRIPTION["between"], "shared_by": 1, "bandwidth": 90e9}))
    assert slow.exchange_seconds(8e9, 8) == pytest.approx(7 / 8 * 8e9 / 100e9, rel=1e-3)
