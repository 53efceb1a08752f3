"""Cases of test_processes: replicas of which some have padding, and some a batch that is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from slipstream import Pipeline, Precision, Runtime, SlipstreamError, make_mesh
from slipstream.model import causal_cross_entropy
from support.architectures import ARCHITECTURES, BOUND, gradient_error, gradients
from support.parallel.group_cases import by_name
from support.ragged_batches import MODELS, batch_of, one_by_one, padded_batch

LENGTHS = [20, 20, 20, 9]  # the first replica's two rows have one length


def pipeline(name: str = "llama, tied") -> Pipeline:
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False), "slices": 3}
    return Pipeline.from_config(ARCHITECTURES[name], 0, mesh=make_mesh(pp=1, dp=2), **options)


def rows_of(replica: int) -> dict[str, Tensor]:
    inputs, labels = batch_of(LENGTHS)
    mine = slice(2 * replica, 2 * replica + 2)
    return padded_batch(inputs[mine], labels[mine])


def a_replica_without_padding() -> None:
    """Both plan a step of sequences; none waits for the other."""
    pipe = pipeline()
    loss, expected = one_by_one("llama, tied", *batch_of(LENGTHS))
    assert abs(pipe.evaluate(rows_of(pipe.replica)) - loss) < BOUND
    assert abs(pipe.step(rows_of(pipe.replica)) - loss) < BOUND
    assert gradient_error(expected, gradients(pipe)) < BOUND


def positions_beside_another_replicas_padding() -> None:
    """Those of a replica without padding are kept: rows that begin elsewhere than at 0, and documents in a row."""
    later, documents = torch.arange(5, 25), torch.cat([torch.arange(8), torch.arange(12)])
    for positions, has_mask in ((torch.stack([later, later + 3]), True), (torch.stack([documents, later]), False)):
        pipe, batch = pipeline("gpt2"), [rows_of(0), rows_of(1)]
        batch[0]["position_ids"] = positions
        if not has_mask:
            del batch[0]["attention_mask"]
        loss, expected = _unsplit("gpt2", positions)
        assert abs(pipe.evaluate(batch[pipe.replica]) - loss) < BOUND
        assert abs(pipe.step(batch[pipe.replica]) - loss) < BOUND
        assert gradient_error(expected, gradients(pipe)) < BOUND


def _unsplit(name: str, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of rows of which the first two have these positions, run document by document."""
    inputs, labels = batch_of(LENGTHS)
    given = [*positions, *(torch.arange(len(each)) for each in inputs[2:])]
    model, total, count = copy.deepcopy(MODELS[name]), torch.zeros((), dtype=torch.float64), 0
    for ids, label, place in zip(inputs, labels, given, strict=True):
        cuts = [8, 12] if len(place) > 8 and place[8] == 0 else [len(ids)]
        for one, targets, where in zip(ids.split(cuts), label.split(cuts), place.split(cuts), strict=True):
            logits = model(input_ids=one[None], position_ids=where[None], use_cache=False).logits
            loss, number = causal_cross_entropy(logits[:, :-1], targets[None, 1:])
            loss.backward()
            total, count = total + loss.detach(), count + int(number)
    return total / count, {key: each / count for key, each in gradients(model).items()}


def a_batch_that_a_replica_refuses() -> None:
    pipe = pipeline()
    batch = rows_of(pipe.replica)
    if pipe.replica == 0:
        batch["token_type_ids"] = batch["labels"]
    words = "another rank refused its batch" if pipe.replica else "the batch has 'token_type_ids'"
    with pytest.raises(SlipstreamError, match=words):
        pipe.step(batch)
    assert pipe.step(rows_of(pipe.replica)) > 0


CASES = by_name(a_replica_without_padding, positions_beside_another_replicas_padding, a_batch_that_a_replica_refuses)
