"""Marks of tests of fused kernels, kernels that stay in float64, and a step of a fused model in slices."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch import fx, nn
from transformers import PreTrainedModel

from slipstream import Pipeline, SlipstreamError
from slipstream.model import check_compiler, fusion
from support.architectures import labels_of, no_rounding_by_float, tokens
from support.pipelines import make_pipe


def missing() -> str:
    """What this machine lacks to compile."""
    try:
        check_compiler("cpu")
    except SlipstreamError as error:
        return str(error)
    return ""


compiles = pytest.mark.skipif(bool(missing()), reason=missing())
COMPILING = [  # torch's own: when its compiler is imported, and when it looks at a tensor
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@contextmanager
def kernels_in_float64() -> Iterator[None]:
    """What is traced stays in float64, as `full_precision` has it of what is not: a norm rounds to float32."""
    trace = fusion._trace

    def wide(module: nn.Module) -> fx.Graph | None:
        graph = trace(module)
        for node in list(graph.nodes) if graph else ():
            if node.target in ("to", "float"):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        return graph

    fusion.fused_rotation.cache_clear()
    with patch.object(fusion, "_trace", wide), no_rounding_by_float():  # also in the thread that compiles
        yield
    fusion.fused_rotation.cache_clear()


def in_slices(model: PreTrainedModel, slices: list[int], **settings: object) -> Pipeline:
    pipe = make_pipe(copy.deepcopy(model), slices=slices, num_microbatches=2, num_ranks=2, **settings)
    pipe.step(tokens(batch=4), labels_of(tokens(batch=4)))
    return pipe
