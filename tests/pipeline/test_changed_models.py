"""A model that was changed by hand trains, evaluates and is exported as it was given, or is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.conftest import in_float64  # noqa: F401
from slipstream import Pipeline, Precision
from support.architectures import build, llama, no_rounding_inside
from support.changes import CHANGES, EXACT, SLICES, USES, save_untied, scaled
from support.changes.runs import Outcomes, complaint, gradient_difference, outcomes_of, step_difference, whole_run
from support.forked import launch, selected_cases
from support.fusing import compiles
from support.parameters import first_of
from support.paths import WORKERS

WORKER = WORKERS / "pipeline/changed_models.py"
pytestmark = [  # torch's own, of its compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
ONE_OR_TWO = ("whole", "sliced", "stages", "microbatches", "processes", "recompute")
TWO, FEW = list(CHANGES)[:2], list(CHANGES)[::16]
ALONE = [use for use in USES if use not in ("processes", "fused")]


def marks(use: str, name: str) -> list[pytest.MarkDecorator]:
    """A few changes are tried in two stages always, every other one in one of the uses more often than in all."""
    number, uses = list(CHANGES).index(name), [use for use in USES if use != "processes"]
    if use == "stages" and name in FEW:
        return []
    return [pytest.mark.more if number % 2 and uses[number // 2 % len(uses)] == use else pytest.mark.grid]


@pytest.mark.parametrize(
    ("use", "name"), [pytest.param(use, name, marks=marks(use, name)) for use in ALONE for name in CHANGES]
)
def test_one_process(use: str, name: str) -> None:
    change = CHANGES[name]
    assert not complaint(change, use, outcomes_of(change, **change.settings(use)))


@compiles
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks("fused", name)) for name in CHANGES])
def test_fused(name: str) -> None:
    change = CHANGES[name]
    assert not complaint(change, "fused", outcomes_of(change, **change.settings("fused")))


@pytest.fixture(scope="module")
def in_processes(request: pytest.FixtureRequest) -> dict[str, Outcomes]:
    """Outcomes of the changes that are to run, in one pair of processes and one more after each that ends it."""
    left, found = selected_cases(request), dict[str, Outcomes]()
    while left:
        ended = launch(2, WORKER, *left)
        for line in ended.stdout.splitlines():
            if line.startswith("["):
                name, outcomes = json.loads(line)
                found.setdefault(name, outcomes)  # of the rank that ended first
        assert left[0] in found, ended.stderr[-3000:]
        left = [name for name in left if name not in found]
    return found


def seldom(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.more if name in FEW else pytest.mark.grid]


@pytest.mark.parametrize("case", [pytest.param(name, marks=[] if name in TWO else seldom(name)) for name in CHANGES])
def test_two_processes(case: str, in_processes: dict[str, Outcomes]) -> None:
    assert not complaint(CHANGES[case], "processes", in_processes[case])


def test_enough_must_be_exact() -> None:
    """What is refused wherever that is allowed would pass the tests above."""
    exact = [name for name, change in CHANGES.items() if all(change.outcome(use) == EXACT for use in ONE_OR_TWO)]
    assert len(CHANGES) >= 40
    assert len(exact) >= 24


@pytest.mark.parametrize("name", [pytest.param(name, marks=seldom(name)) for name in CHANGES])
def test_each_changes_the_gradients(name: str) -> None:
    """Or it would be exact where it is lost."""
    change = CHANGES[name]
    difference = gradient_difference(
        whole_run(change), whole_run(replace(change, make=lambda _: None, during=nullcontext))
    )
    assert (difference > 1e-6) == (name != "MLP compiled")


def hooked(model: Any) -> None:
    model.model.layers[2].register_forward_hook(scaled)


def wrapped(model: Any) -> None:
    layer = model.model.layers[2]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)


@pytest.mark.parametrize("make", first_of([hooked, wrapped]))
def test_halves_are_not_chosen_for_a_layer_that_was_changed(make: Callable[[Any], None]) -> None:
    """Where they are without the change, as they balance the ranks best."""
    change = replace(CHANGES["hook on a layer"], config=llama(vocab_size=400), make=make)
    settings: dict[str, Any] = {"schedule": "1f1b", "num_ranks": 2, "slices": SLICES}
    with no_rounding_inside():
        plain, changed = Pipeline(build(change.config), **settings), Pipeline(change.built(), **settings)
        assert [each.stop for each in plain.layout.layers] == [2.5, 4]
        assert all(float(each.stop).is_integer() for each in changed.layout.layers)
        assert not step_difference(whole_run(change), changed)


def test_each_rank_reads_head_and_embedding_of_a_file_that_has_both(tmp_path: Path) -> None:
    """`Pipeline.from_pretrained` leaves them apart, as transformers does."""
    save_untied(str(tmp_path))
    with no_rounding_inside():
        pipe = Pipeline.from_pretrained(
            tmp_path, slices=SLICES, num_ranks=2, partition=[2, 2], precision=Precision(dtype=torch.float64)
        )
        assert not step_difference(whole_run(CHANGES["file with both"]), pipe)
