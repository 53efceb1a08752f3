"""Marks of tests of fused kernels, and a step of a fused model in slices."""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedModel

from slipstream import Pipeline, SlipstreamError
from slipstream.model import check_compiler
from support.architectures import labels_of, tokens
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
    pytest.mark.usefixtures("compiler_caches"),
]


def in_slices(model: PreTrainedModel, slices: list[int], **settings: object) -> Pipeline:
    pipe = make_pipe(copy.deepcopy(model), slices=slices, num_microbatches=2, num_ranks=2, **settings)
    pipe.step(tokens(batch=4), labels_of(tokens(batch=4)))
    return pipe
