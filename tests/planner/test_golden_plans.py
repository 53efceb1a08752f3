"""Plans are as they were: what they decide exactly, their seconds and bytes within 1e-9.

Of two plans that take equally long, processors with other vector units may find either.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from benchmarks.golden_plans.__main__ import KEPT, KEPT_TOLERANCE
from benchmarks.golden_plans.answers import Answer, answer
from benchmarks.golden_plans.compare import differences
from benchmarks.golden_plans.requests import all_requests

_QUICK = ("measured", "ragged", "rows")
_NUMBERED = [*enumerate(all_requests())]


@cache
def kept() -> dict[str, Answer]:
    answers: dict[str, Answer] = json.loads(KEPT.read_text())
    return answers


def check(number: int, request: dict[str, Any]) -> None:
    before, found = kept()[str(number)], json.loads(json.dumps(answer(request)))
    different = [*differences(before, found, KEPT_TOLERANCE)]
    assert not different or is_tie(before, found), different


def is_tie(before: Answer, found: Answer) -> bool:
    """Returns whether two plans of a step or of rows take equally long, in other slices or another order."""
    if "order" not in before:
        return False
    found = found | {name: before[name] for name in ("order", "slices", "peaks") if name in before}
    return not [*differences(before, found, KEPT_TOLERANCE)]


@pytest.mark.parametrize("kind", _QUICK)
def test_plans_from_measured_times_are_as_they_were(kind: str) -> None:
    for number, request in _NUMBERED:
        if request["kind"] == kind:
            check(number, request)


@pytest.mark.more
@pytest.mark.parametrize("number", [*range(0, 90, 15), 92, 94, 101, 106, 131, 140])
def test_plans_from_counted_operations_and_of_starts_are_as_they_were(number: int) -> None:
    check(*_NUMBERED[number])


def test_plans_that_take_equally_long_are_a_tie() -> None:
    before = {"order": "a", "slices": [64], "seconds": 1.0}
    assert is_tie(before, {"order": "b", "slices": [32, 32], "seconds": 1.0 + 1e-10})
    assert not is_tie(before, {"order": "b", "slices": [64], "seconds": 1.0 + 1e-8})
    assert not is_tie({"slices": [64], "seconds": 1.0}, {"slices": [32, 32], "seconds": 1.0})


def test_a_number_may_differ_by_its_rounding_and_a_decision_not_at_all() -> None:
    before = {"slices": [64, 64], "seconds": 1.0}
    assert not [*differences(before, {"slices": [64, 64], "seconds": 1.0 + 1e-10}, 1e-9)]
    assert [*differences(before, {"slices": [64, 64], "seconds": 1.0 + 1e-8}, 1e-9)]
    assert [*differences(before, {"slices": [128], "seconds": 1.0}, 1e-9)]
