"""What each process of test_collated_batches runs: replicas of which some have padding, and some a batch that is
refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from slipstream import Pipeline, Precision, Runtime, SlipstreamError, make_mesh
from support.architectures import ARCHITECTURES, BOUND, gradient_error, gradients
from support.parallel.group_cases import by_name, run_cases
from support.ragged_batches import batch_of, one_by_one

LENGTHS = [20, 20, 20, 9]  # the first replica's two rows have one length


def pipeline() -> Pipeline:
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False), "slices": 3}
    return Pipeline.from_config(ARCHITECTURES["llama, tied"], 0, mesh=make_mesh(pp=1, dp=2), **options)


def rows_of(pipe: Pipeline) -> dict[str, Tensor]:
    inputs, labels = batch_of(LENGTHS)
    mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
    padded = pad_sequence(inputs[mine], batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in inputs[mine]], batch_first=True)
    targets = pad_sequence(labels[mine], batch_first=True, padding_value=-100)
    return {"input_ids": padded, "labels": targets, "attention_mask": mask}


def a_replica_without_padding() -> None:
    """Both plan a step of sequences; none waits for the other."""
    pipe = pipeline()
    loss, expected = one_by_one("llama, tied", *batch_of(LENGTHS))
    assert abs(pipe.evaluate(rows_of(pipe)) - loss) < BOUND
    assert abs(pipe.step(rows_of(pipe)) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe.named_parameters())) < BOUND


def a_batch_that_a_replica_refuses() -> None:
    pipe = pipeline()
    batch = rows_of(pipe)
    if pipe.replica == 0:
        batch["token_type_ids"] = batch["labels"]
    words = "another rank refused its batch" if pipe.replica else "the batch has 'token_type_ids'"
    with pytest.raises(SlipstreamError, match=words):
        pipe.step(batch)
    assert pipe.step(rows_of(pipe)) > 0


CASES = by_name(a_replica_without_padding, a_batch_that_a_replica_refuses)

if __name__ == "__main__":
    run_cases(CASES, sys.argv[1:2])
