"""Plans are as they were: what they decide exactly, their seconds and bytes within 1e-9."""

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
    found = json.loads(json.dumps(answer(request)))
    assert not [*differences(kept()[str(number)], found, KEPT_TOLERANCE)]


@pytest.mark.parametrize("kind", _QUICK)
def test_plans_from_measured_times_are_as_they_were(kind: str) -> None:
    for number, request in _NUMBERED:
        if request["kind"] == kind:
            check(number, request)


@pytest.mark.more
@pytest.mark.parametrize("number", [*range(0, 90, 15), 92, 94, 101, 106, 131, 140])
def test_plans_from_counted_operations_and_of_starts_are_as_they_were(number: int) -> None:
    check(*_NUMBERED[number])


def test_a_number_may_differ_by_its_rounding_and_a_decision_not_at_all() -> None:
    before = {"slices": [64, 64], "seconds": 1.0}
    assert not [*differences(before, {"slices": [64, 64], "seconds": 1.0 + 1e-10}, 1e-9)]
    assert [*differences(before, {"slices": [64, 64], "seconds": 1.0 + 1e-8}, 1e-9)]
    assert [*differences(before, {"slices": [128], "seconds": 1.0}, 1e-9)]
