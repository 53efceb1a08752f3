"""What each process of test_length_dependent_rope runs: two replicas, of which one has short rows alone."""

from __future__ import annotations

import sys

import torch
from torch.nn.utils.rnn import pad_sequence

from slipstream import Pipeline, Precision, Runtime, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, no_rounding_inside
from support.parallel.group_cases import run_cases
from support.ragged_batches import batch_of

WIDTHS = [[20, 20], [40, 40]]  # of each replica's rows
LENGTHS = [[20, 12], [31, 26]]  # of each replica's rows, without their padding


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


if __name__ == "__main__":
    run_cases({"compare": lambda: compare(*sys.argv[1:3])}, ["compare"])
