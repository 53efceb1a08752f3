"""What a newcomer adds is one object in one list: a schedule, an attention backend, a kind of carried state, an option.

Each is made here, is put into its list, and trains as the unsplit model does; an axis of the mesh is added by
`workers/parallel/token_parts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import torch
from pydantic import Field, PositiveInt
from pydantic.fields import FieldInfo
from torch import Tensor

from slipstream import SCHEDULES, Action, Op, Schedule, ScheduleKind, SlipstreamError, make_schedule, simulate, validate
from slipstream.attention import AttentionSite, slice_attention
from slipstream.attention.backend import KeySums, QueryState, merged_with
from slipstream.attention.masks import ScoreRectangle
from slipstream.attention.store import AttentionResult
from slipstream.model import initial_states
from slipstream.model.hooks.slice_cache import CarriedState
from slipstream.model.hooks.token_slice import current_slice
from slipstream.options import Record, Runtime
from slipstream.pipeline.families.causal_lm import CausalLMFamily
from slipstream.planner.order.order_search import find_order
from slipstream.planner.order.ordering_problem import StepActions
from slipstream.simulator import UnitCost
from slipstream.train.config.config_file import load_config
from slipstream.train.config.run_config import Config
from support.architectures import ARCHITECTURES, BOUND, build, tokens
from support.exact_steps import sequences_error, step_error
from support.hybrids import HYBRIDS
from support.versions import since


def one_by_one(num_ranks: int, num_microbatches: int, num_slices: int | list[int]) -> Schedule:
    """One microbatch after the other, each with all of its forwards and then its backwards."""
    counts = [num_slices] * num_microbatches if isinstance(num_slices, int) else num_slices
    rows = [
        tuple(
            Action(op, rank, microbatch, index)
            for microbatch, count in enumerate(counts)
            for op, order in ((Op.F, range(count)), (Op.B, reversed(range(count))))
            for index in order
        )
        for rank in range(num_ranks)
    ]
    placement = tuple(range(num_ranks))
    return Schedule("one-by-one", tuple(rows), placement, num_microbatches, max(counts), slice_counts=tuple(counts))


def test_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by its name, checked by the rules, simulated, trained with, also on sequences of other lengths, and
    takes part in the search for orders."""
    monkeypatch.setitem(SCHEDULES, "one-by-one", ScheduleKind(one_by_one))
    schedule = make_schedule("one-by-one", 3, 2, 4)
    validate(schedule)
    assert schedule.actions == StepActions((0, 1, 2), (4, 4)).whole.actions
    assert simulate(schedule, UnitCost()).makespan == 2 * (4 + 2) * (1 + 2)
    assert find_order((0, 1, 2), 2, 4, UnitCost(), memory_limit=[4.0] * 3, effort=0) is not None
    settings: dict[str, Any] = {"schedule": "one-by-one", "self_check": False}
    assert step_error(build(ARCHITECTURES["llama"]), tokens(), slices=[20, 7, 37], **settings) < BOUND
    assert sequences_error(build(ARCHITECTURES["llama"]), [30, 9], slices=3, **settings) < BOUND


class PlainSoftmax:
    """Attention of a whole slice by its formula, differentiated by autograd."""

    width_multiple: ClassVar[int | None] = None
    num_calls = 0

    def __init__(self, site: AttentionSite) -> None:
        self.site = site

    @classmethod
    def takes(cls, query: Tensor, value: Tensor, site: AttentionSite) -> bool:
        return site.has_plain_scores

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, so_far: AttentionResult | None = None
    ) -> AttentionResult:
        PlainSoftmax.num_calls += 1
        ranges, groups = self.site.ranges, query.shape[1] // key.shape[1]
        scores = self.site.scale * query @ key.repeat_interleave(groups, 1).mT
        seen = torch.zeros(query.shape[0], 1, *scores.shape[2:], dtype=torch.bool)
        for tile in ranges.tiles:
            rows, columns = (
                slice(a - b, tile.end - b) for a, b in ((tile.start, ranges.start), (tile.first, ranges.first))
            )
            whole = ScoreRectangle(slice(0, tile.end - tile.start), slice(0, tile.end - tile.first))
            seen[tile.rows, :, rows, columns] = tile.mask(whole, query.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        found = scores.softmax(-1) @ value.repeat_interleave(groups, 1), scores.logsumexp(-1)
        return merged_with(so_far, found)

    def differentiate(
        self, queries: QueryState, key: Tensor, value: Tensor, sums: KeySums, so_far: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (queries.query, key, value)]
            found = torch.autograd.grad(self.attend(*given)[0], given, queries.grad_output)
        for total, share in zip(sums, found[1:], strict=True):
            total.add_(share)
        return (found[0] if so_far is None else so_far + found[0],)


def test_an_attention_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is preferred where it takes a slice, of windows and documents too; scores that are capped it leaves."""
    monkeypatch.setattr(slice_attention, "BACKENDS", (PlainSoftmax, *slice_attention.BACKENDS))
    monkeypatch.setattr(PlainSoftmax, "num_calls", 0)
    settings: dict[str, Any] = {"slices": [20, 7, 37], "self_check": False}
    for name in ("llama", "gemma3", "gemma2"):
        assert step_error(build(ARCHITECTURES[name]), tokens(), **settings) < BOUND
    assert sequences_error(build(ARCHITECTURES["llama"]), [30, 9], slices=3, self_check=False) < BOUND
    assert PlainSoftmax.num_calls > 0


class OwnMemory(initial_states.StateAdapter):
    """The three states that a block of xLSTM takes and returns."""

    def matches(self, module: Any) -> bool:
        return type(module).__name__ == "xLSTMBlock"

    def run(self, module: Any, forward: Any, x: Tensor, *_: Any, **__: Any) -> Any:
        context = current_slice()
        calls = [CarriedState(context.layer, "own memory", number) for number in range(3)]
        states = [context.state(call) for call in calls]
        output, after = forward(x, None if states[0] is None else tuple(states))
        for call, state in zip(calls, after, strict=True):
            context.change_state(call, state)
        return output, None


@since("5.21")
def test_a_carried_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an adapter of the layer, it is refused in slices; with this one they are exact."""
    settings: dict[str, Any] = {"slices": [20, 7, 69], "self_check": False}
    monkeypatch.setattr(initial_states, "ADAPTERS", [])
    with pytest.raises(SlipstreamError, match="can't be trained in token slices"):
        step_error(build(HYBRIDS["xlstm"]), tokens(length=96), **settings)
    monkeypatch.setattr(initial_states, "ADAPTERS", [OwnMemory()])
    assert step_error(build(HYBRIDS["xlstm"]), tokens(length=96), **settings) < BOUND


RUN = """
model: {config: {model_type: llama}}
data: {corpus: python-stdlib}
runtime: {pace: 2, self_check: false}
training: {output: run, seq_len: 64, steps: 1}
"""


@contextmanager
def field(record: type[Record], *containers: type[Record], **fields: Any) -> Iterator[None]:
    """Adds fields to a record, as lines in its class would, and rebuilds it and the records that contain it."""
    record.__pydantic_fields__ |= {name: FieldInfo.from_annotation(kind) for name, kind in fields.items()}
    try:
        for changed in (record, *containers):
            changed.model_rebuild(force=True)
        yield
    finally:
        for name in fields:
            del record.__pydantic_fields__[name]
        for changed in (record, *containers):
            changed.model_rebuild(force=True)


def test_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A field of its record is an argument of the Pipeline, a setting of a configuration and of the command line, is
    checked in all of them, and arrives where it is used."""
    used = []

    class Noting(CausalLMFamily):
        def __init__(self, model: Any, options: Any, *others: Any) -> None:
            used.append(options.runtime.pace)
            super().__init__(model, options, *others)

    monkeypatch.setattr("slipstream.pipeline.runtime.CausalLMFamily", Noting)
    (path := tmp_path / "config.yaml").write_text(RUN)
    with field(Runtime, Config, pace=Annotated[PositiveInt, Field(default=1)]):
        runtime = load_config(path, ["runtime.pace=3"]).pipeline_options()["runtime"]
        assert step_error(build(ARCHITECTURES["llama"]), tokens(), slices=4, runtime=runtime) < BOUND
        with pytest.raises(SlipstreamError, match=r"runtime\.pace=0: give a whole number from 1"):
            Runtime(pace=0)  # type: ignore[call-arg]
        with pytest.raises(SlipstreamError, match=r"unknown key runtime\.paec; did you mean 'runtime\.pace'"):
            load_config(path, ["runtime.paec=3"])
    assert used == [3]
