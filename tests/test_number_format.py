"""One table says what number formats and precisions there are; nothing else lists them."""

from __future__ import annotations

import ast
from typing import get_args

import pytest

from slipstream import Precision
from slipstream.cost import StateBytes
from slipstream.errors import SlipstreamError
from slipstream.model import NARROW, torch_dtype
from slipstream.number_format import (
    AUTOCAST,
    FORMATS,
    NF4,
    PRECISIONS,
    BasePrecision,
    PrecisionName,
    find_format,
    precision_of,
)
from slipstream.train.config import precision_named
from support.paths import ROOT

SOURCES = ROOT / "src" / "slipstream"
# Modules that name several of them for another reason.
LISTS_OF_OTHERS = {
    "attention/fused_cuda.py": "what kernels of a GPU take",
    "extras/hf_trainer/arguments.py": "arguments of transformers",
    "number_format.py": "the table",
    "pipeline/execution/loss_trial.py": "tolerances of a comparison",
    "pipeline/introspection.py": "methods of a module",
    "train/config/rules.py": "settings of other programs",
    "train/optimizers.py": "tolerances of a comparison",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_torchs(name: str) -> None:
    found, dtype = FORMATS[name], torch_dtype(name)
    assert found.name == name
    assert dtype.itemsize == found.weight_bytes
    assert [find_format(alias) for alias in (name, *found.aliases)] == [found] * (1 + len(found.aliases))
    assert all(torch_dtype(alias) is dtype for alias in found.aliases)
    assert found.is_narrow == (dtype in NARROW)
    assert found.gradient_bytes == max(4, found.weight_bytes)
    masters = found.gradient_bytes if found.is_narrow else 0
    assert found.optimizer_bytes == 2 * found.gradient_bytes + masters
    assert StateBytes.of(name) == StateBytes(found.weight_bytes, found.gradient_bytes, found.optimizer_bytes)


@pytest.mark.parametrize("name", ["fp8", "nf4", "int8", "float8_e4m3fn", ""])
def test_no_model_is_trained_in_other_formats(name: str) -> None:
    with pytest.raises(SlipstreamError, match=r"can't be trained in dtype=.*choose float32, bfloat16 or float16"):
        find_format(name)


def test_precisions_are_made_of_formats() -> None:
    assert get_args(PrecisionName) == (*PRECISIONS,)
    assert get_args(BasePrecision) == ("full", NF4.name)
    assert {name: precision_named(name) for name in PRECISIONS} == {
        "float32": Precision(dtype="float32"),
        "bf16": Precision(dtype="float32"),
        "bf16-weights": Precision(dtype="bfloat16", master_dtype="float32"),
        "fp16": Precision(dtype="float32"),
    }
    for name, precision in PRECISIONS.items():
        assert precision.autocasts == (name in ("bf16", "fp16"))
        assert (precision.master is not None) == precision.weights.is_narrow
        assert precision.measured in (*FORMATS, AUTOCAST)
    assert [precision_of(dtype) for dtype in FORMATS] == [None, "float32", "bf16-weights", "fp16"]


def test_no_other_module_lists_them() -> None:
    names = {*FORMATS, *PRECISIONS, "half", "fp32", "float8"}

    def named(node: ast.expr | None) -> str:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        return str(node.value) if isinstance(node, ast.Constant) else ""

    found = set()
    for file in sorted(SOURCES.rglob("*.py")):
        module = str(file.relative_to(SOURCES))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = [*node.keys, *node.values] if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            if len({named(part) for part in parts} & names) > 1:
                found.add(module)
    assert found == LISTS_OF_OTHERS.keys()
