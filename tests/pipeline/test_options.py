"""An option is validated once, in the same words for Python and YAML, and an old name says the new one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import slipstream
from slipstream import SlipstreamError
from slipstream.options import Layers, Memory, Parallelism, Precision, Runtime
from slipstream.train.config.run_config import parse_config

RECORDS = {record.section: record for record in (Memory, Parallelism, Precision, Runtime, Layers)}
CONFIG: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"corpus": "python-stdlib"},
    "training": {"output": "out", "seq_len": 64, "steps": 1},
}


@pytest.mark.parametrize(
    ("section", "option", "value", "words"),
    [
        ("memory", "recompute", "some", "memory.recompute='some': give 'none', 'selective'"),
        ("memory", "recompute", True, "memory.recompute=True"),
        ("memory", "offload", 1.5, "memory.offload=1.5: give a number from 0 to 1"),
        ("memory", "limit", 0, "memory.limit=0: give a number above 0"),
        ("memory", "limit", True, "memory.limit=True: give a number above 0"),
        ("memory", "num_flushes", 0, "memory.num_flushes=0"),
        ("memory", "recomput", "full", "unknown key memory.recomput; did you mean 'memory.recompute'?"),
        ("parallel", "tensor_plan", "colwise", "parallel.tensor_plan='colwise'"),
        ("parallel", "shrad", "optimizer", "did you mean 'parallel.shard'?"),
        ("runtime", "stall_limit", "soon", "runtime.stall_limit='soon'"),
    ],
)
def test_a_bad_value_is_refused_in_the_same_words(section: str, option: str, value: object, words: str) -> None:
    with pytest.raises(SlipstreamError) as in_python:
        RECORDS[section](**{option: value})
    with pytest.raises(SlipstreamError) as in_yaml:
        parse_config(CONFIG | {section: {option: value}})
    assert words in str(in_python.value)
    assert str(in_yaml.value).startswith(str(in_python.value))  # and may say what else is meant


def test_a_dtype_is_given_by_itself_or_by_its_name() -> None:
    assert Precision(dtype=torch.bfloat16) == Precision(dtype="bfloat16")
    with pytest.raises(
        SlipstreamError, match=r"precision\.dtype='int8': give a floating-point dtype, float64, float32"
    ):
        Precision(dtype="int8")


def test_a_dict_is_no_record() -> None:
    with pytest.raises(SlipstreamError, match=r"memory=\{'limit': 2\}: give a slipstream.Memory, such as memory="):
        slipstream.Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2)), memory={"limit": 2})  # type: ignore[arg-type]


def test_an_unknown_argument_is_a_type_error() -> None:
    arguments: dict[str, Any] = {"loss": 1}
    with pytest.raises(TypeError, match="unexpected keyword argument 'loss'"):
        slipstream.Pipeline(torch.nn.Sequential(), **arguments)


@pytest.mark.parametrize(
    ("key", "meant"),
    [("recompute", "memory.recompute"), ("fused", "runtime.fused"), ("gradient_checkpointing", "memory.recompute")],
)
def test_a_key_of_another_section_says_which_is_meant(key: str, meant: str) -> None:
    with pytest.raises(SlipstreamError, match=rf"unknown key pipeline\.{key}; did you mean '{meant}'\?"):
        parse_config(CONFIG | {"pipeline": {key: 1}})
