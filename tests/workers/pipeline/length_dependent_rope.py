"""What each process of test_length_dependent_rope runs: two replicas, of which one has short rows alone."""

from __future__ import annotations

import sys

import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream import Pipeline, Precision, Runtime, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, gradients, no_rounding_inside
from support.parallel.group_cases import run_cases
from support.ragged_batches import batch_of

WIDTHS = [[20, 20], [40, 40]]  # of each replica's rows
LENGTHS = [[20, 12], [31, 26]]  # of each replica's rows, without their padding
DOCUMENTS = [[[20, 20], [10, 20, 10]], [[10, 30], [31, 9]]]  # of each replica's rows


def compare(name: str, case: str) -> None:
    config = ARCHITECTURES[name]
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False), "slices": 3}
    pipe = Pipeline.from_config(config, 0, mesh=make_mesh(pp=1, dp=2), **options)
    given = WIDTHS if case == "rows" else LENGTHS
    inputs, labels = batch_of([*given[0], *given[1]])
    mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
    ids = pad_sequence(inputs, batch_first=True)
    targets = pad_sequence(labels, batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones_like(each) for each in inputs], batch_first=True)
    whole = build(config)
    count = (targets[:, 1:] != -100).sum()
    with no_rounding_inside():
        if case == "lists":
            total = 0.0
            for row, label in zip(inputs, labels, strict=True):
                one = build(config)  # which has seen no other sequence
                one.load_state_dict(whole.state_dict())
                loss = one(input_ids=row[None], labels=label[None], use_cache=False).loss
                loss = loss * (label[1:] != -100).sum() / count
                loss.backward()
                total += float(loss.detach())
                for parameter, own in zip(whole.parameters(), one.parameters(), strict=True):
                    parameter.grad = own.grad if parameter.grad is None else parameter.grad + own.grad
        else:
            loss = whole(input_ids=ids, attention_mask=mask, labels=targets, use_cache=False).loss
            loss.backward()
            total = float(loss.detach())
        if case == "lists":
            found = pipe.step(inputs[mine], labels[mine])
        else:
            longest = max(given[pipe.replica])
            cut = {"input_ids": ids, "labels": targets, "attention_mask": mask}
            found = pipe.step({key: each[mine, :longest] for key, each in cut.items()})
    assert abs(float(found) - total) < BOUND * total
    assert gradient_error(whole, pipe) < BOUND


def compare_documents(name: str, case: str) -> None:
    """Rows of documents have the frequencies of the longest one of all replicas, in a list of its own row; positions
    alone, which begin anew in the second replica's rows, say the same as its documents."""
    config, cuts = ARCHITECTURES[name], [each for rows in DOCUMENTS for each in rows]
    options = {"precision": Precision(dtype=torch.float64), "runtime": Runtime(self_check=False), "slices": 3}
    pipe = Pipeline.from_config(config, 0, mesh=make_mesh(pp=1, dp=2), **options)
    mine = slice(2 * pipe.replica, 2 * pipe.replica + 2)
    ids, targets = (torch.stack(each) for each in batch_of([40] * 4))
    numbers = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in cuts])
    positions = torch.stack([torch.cat([*map(torch.arange, each)]) for each in cuts])
    counted = targets.masked_fill(positions == 0, -100)
    count, total = (counted[:, 1:] != -100).sum(), 0.0
    expected: dict[str, torch.Tensor] = {}
    with no_rounding_inside():
        for rows in [[row] for row in range(4)] if case == "document lists" else [[0, 1, 2, 3]]:
            whole = build(config)
            batch = {"input_ids": ids[rows], "position_ids": positions[rows], "labels": counted[rows]}
            loss = whole(**batch, use_cache=False).loss * (counted[rows][:, 1:] != -100).sum() / count
            loss.backward()
            total += float(loss.detach())
            for key, each in gradients(whole).items():
                expected[key] = expected.get(key, 0) + each
        if case == "document lists":
            found = pipe.step([*ids[mine]], [*targets[mine]], document_ids=[*numbers[mine]])
        elif case == "documents":
            found = pipe.step(ids[mine], targets[mine], document_ids=numbers[mine])
        else:
            found = pipe.step(ids[mine], counted[mine], position_ids=positions[mine], document_ids=numbers[mine])
    assert abs(float(found) - total) < BOUND * total
    assert gradient_error(expected, pipe) < BOUND


if __name__ == "__main__":
    function = compare_documents if sys.argv[2].startswith("document") else compare
    run_cases({"compare": lambda: function(*sys.argv[1:3])}, ["compare"])
