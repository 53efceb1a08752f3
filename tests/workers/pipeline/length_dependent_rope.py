"""Cases of test_processes: frequencies that depend on lengths, on two replicas of which one has short rows alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream import Pipeline, make_mesh
from support.architectures import ARCHITECTURES, BOUND, build, gradient_error, no_rounding_inside
from support.exact_steps import document_ids
from support.parallel.group_cases import Case
from support.pipelines import make_pipe
from support.ragged_batches import alone, batch_of, padded_batch, together

WIDTHS = [20, 20, 40, 40]  # of both replicas' rows
LENGTHS = [20, 12, 31, 26]  # of both replicas' rows, without their padding
DOCUMENTS = [(20, 20), (10, 20, 10), (10, 30), (31, 9)]  # of both replicas' rows


def pipeline(name: str) -> tuple[Pipeline, slice]:
    """On two replicas, with the rows of this one."""
    pipe = make_pipe(ARCHITECTURES[name], mesh=make_mesh(pp=1, dp=2), dtype=torch.float64, slices=3)
    return pipe, slice(2 * pipe.replica, 2 * pipe.replica + 2)


def check(pipe: Pipeline, expected: tuple[Tensor, dict[str, Tensor]], *batch: Any, **more: Any) -> None:
    assert abs(float(pipe.step(*batch, **more) / expected[0]) - 1) < BOUND
    assert gradient_error(expected[1], pipe) < BOUND


@no_rounding_inside()
def compare(name: str, case: str) -> None:
    pipe, mine = pipeline(name)
    inputs, labels = batch_of(WIDTHS if case == "rows" else LENGTHS)
    if case == "lists":
        check(pipe, alone(build(ARCHITECTURES[name]), inputs, labels), inputs[mine], labels[mine])
    else:
        expected = together(build(ARCHITECTURES[name]), padded_batch(inputs, labels))
        check(pipe, expected, padded_batch(inputs[mine], labels[mine]))


@no_rounding_inside()
def compare_documents(name: str, case: str) -> None:
    """Rows of documents have the frequencies of the longest one of all replicas, in a list of its own row; positions
    alone, which begin anew in the second replica's rows, say the same as its documents."""
    pipe, mine = pipeline(name)
    inputs, labels = batch_of([40] * 4)
    ids, numbers = torch.stack(inputs), document_ids(*DOCUMENTS)
    positions = torch.stack([torch.cat([*map(torch.arange, each)]) for each in DOCUMENTS])
    counted = torch.stack(labels).masked_fill(positions == 0, -100)
    if case == "document lists":
        expected = alone(build(ARCHITECTURES[name]), inputs, labels, [[*each] for each in DOCUMENTS])
        check(pipe, expected, inputs[mine], labels[mine], document_ids=[*numbers[mine]])
        return
    batch = {"input_ids": ids, "position_ids": positions, "labels": counted}
    expected = together(build(ARCHITECTURES[name]), batch)
    if case == "documents":
        check(pipe, expected, ids[mine], torch.stack(labels)[mine], document_ids=numbers[mine])
    else:
        given = {"position_ids": positions[mine], "document_ids": numbers[mine]}
        check(pipe, expected, ids[mine], counted[mine], **given)


CASES: dict[str, Case] = {}
for name in ("llama, dynamic rope", "phi3, longrope"):
    CASES |= {f"{case}, {name}": partial(compare, name, case) for case in ("rows", "padded", "lists")}
    for case in ("documents", "document lists", "documents and positions"):
        CASES[f"{case}, {name}"] = partial(compare_documents, name, case)
