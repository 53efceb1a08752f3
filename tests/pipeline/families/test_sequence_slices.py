"""Sequences of layers in slices have the gradients of the whole, and slices pay where the page says so."""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate, pairwise

import pytest
import torch
from examples.gpipe.transformer import transformer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream import (
    CutTokens,
    Layers,
    Memory,
    Pipeline,
    causal_attention,
    make_schedule,
    partition_layers,
    schedule_costs,
    simulate,
)
from slipstream.attention import ContextError
from slipstream.model import causal_cross_entropy
from slipstream.pipeline.families.layer_sequence import counted_costs
from slipstream.profile.stage_bench import LiveMemory, tensors_alive
from slipstream.schedule import SCHEDULES, Op
from slipstream.sequential import BatchSlice, ShapeTracer, flatten_layers
from support.architectures import BOUND, gradient_error, gradients
from support.exact_steps import exact_until_planned
from support.examples import examples
from support.options import grouped
from support.parameters import first_of
from support.paths import ROOT
from support.sequences.case import Inputs
from support.sequences.sliced_layers import CASES, ROWS, TARGET

RECOMPUTE = ("none", "full", "stage", "stage+full", "selective", 1, "segments")
ORDERS = [(name, v) for name in SCHEDULES for v in (1, 2) if v in SCHEDULES[name].stages_per_rank]


@cache
def unsplit(name: str, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    return CASES[name].unsplit(num_microbatches)


def pipeline(name: str, **given: object) -> tuple[Pipeline, Inputs, Tensor]:
    inputs, targets = CASES[name].batch()
    pipe = Pipeline(CASES[name].model(), loss_fn=causal_cross_entropy, **grouped(example=inputs, **given))  # type: ignore[arg-type]
    return pipe, inputs, targets


def check(name: str, **given: object) -> None:
    """Without the self-check, which other tests are about."""
    pipe, inputs, targets = pipeline(name, self_check=False, **given)
    loss, expected = unsplit(name, pipe.layout.training.num_microbatches)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    found = gradients(pipe)
    assert found.keys() == expected.keys()
    assert gradient_error(expected, found) < BOUND


@pytest.mark.more
@pytest.mark.parametrize("name", first_of(sorted(CASES, key=lambda name: name != "mixed"), 1, "grid"))
def test_a_stage_may_end_anywhere(name: str) -> None:
    """Before the cut, at it on either side, after it, with skips and whole tensors under way."""
    num_layers = CASES[name].num_layers
    for end in range(1, num_layers):
        recompute = RECOMPUTE[end % len(RECOMPUTE)]
        schedule = ("1f1b", "gpipe", "zb-h1")[end % 3]
        check(
            name,
            schedule=schedule,
            num_microbatches=2,
            slices=[2, 4, 3],
            num_ranks=2,
            partition=[end, num_layers - end],
            recompute=recompute,
        )


def parts(data: st.DataObject, whole: int, most: int, least: int = 1) -> list[int]:
    """So many numbers above 0 that add up to it."""
    cuts = data.draw(st.sets(st.integers(1, whole - 1), min_size=least - 1, max_size=most - 1))
    return [b - a for a, b in pairwise([0, *sorted(cuts), whole])]


@examples(100, thin=10)
@given(data=st.data())
def test_gradients_are_those_of_the_sequence(data: st.DataObject) -> None:
    """Of microbatches that are alike, and of some with rows and slices of their own."""
    name, (schedule, v) = data.draw(st.sampled_from(sorted(CASES))), data.draw(st.sampled_from(ORDERS))
    num_ranks, recompute = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(RECOMPUTE))
    partition = parts(data, CASES[name].num_layers, num_ranks * v, num_ranks * v)
    if data.draw(st.booleans()):
        cut = {"num_microbatches": data.draw(st.integers(1, 4)), "slices": parts(data, TARGET, 4)}
    else:
        cut = {"microbatches": [(rows, parts(data, TARGET, 4)) for rows in parts(data, ROWS, ROWS)]}
    check(
        name,
        schedule=schedule,
        stages_per_rank=v,
        num_ranks=num_ranks,
        recompute=recompute,
        offload=0.0 if recompute == "segments" else data.draw(st.sampled_from([0.0, 1.0])),
        partition=data.draw(st.sampled_from(["auto", partition])),
        **cut,
    )


@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_gradients_are_those_of_the_sequence_in_every_way(name: str, schedule: str) -> None:
    for num_ranks in range(1, 5):
        for num_microbatches in range(1, 5):
            for slices in (1, 2, 3, 4, [2, 7], [5, 1, 3], [1, 1, 6, 1]):
                for recompute in ("none", "full"):
                    check(
                        name,
                        schedule=schedule,
                        num_ranks=num_ranks,
                        num_microbatches=num_microbatches,
                        slices=slices,
                        recompute=recompute,
                        stages_per_rank=2 if 2 in SCHEDULES[schedule].stages_per_rank else 1,
                    )


@pytest.mark.more
def test_without_whole_tensors_the_number_of_ranks_changes_no_bit() -> None:
    found = []
    for num_ranks in (1, 2, 3, 4):
        pipe, inputs, targets = pipeline("language model", num_ranks=num_ranks, num_microbatches=2, slices=[2, 4, 3])
        found.append((pipe.step(inputs, targets), gradients(pipe)))
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert all(torch.equal(gradient[name], tensor) for name, tensor in found[0][1].items())


@pytest.mark.parametrize("name", first_of(CASES))
def test_a_schedule_of_ones_own_and_one_found_by_measuring(name: str) -> None:
    check(name, schedule=make_schedule("zb-h2", 3, 2, 3), num_ranks=3)
    pipe, inputs, targets = pipeline(name, schedule="auto", num_microbatches=2, slices=3, num_ranks=3)
    exact_until_planned(pipe, inputs, targets, *unsplit(name, 2))


@pytest.mark.parametrize("frozen", [slice(0, 4), slice(5, None)])
def test_frozen_layers(frozen: slice) -> None:
    """Of the encoder, so that nothing goes back into it; of the decoder, so that something does go through it."""
    model = CASES["mixed"].model()
    names = [f"{layer.name}." for layer in [*flatten_layers(model)][frozen]]
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not name.startswith(tuple(names))
    inputs, targets = CASES["mixed"].batch()
    pipe = Pipeline(
        model,
        "1f1b",
        2,
        [2, 4, 3],
        num_ranks=3,
        loss_fn=causal_cross_entropy,
        layers=Layers(example=inputs),
        memory=Memory(recompute="full"),
    )
    pipe.step(inputs, targets)
    found = gradients(pipe)
    expected = {key: g for key, g in unsplit("mixed", 2)[1].items() if not key.startswith(tuple(names))}
    assert found.keys() == expected.keys()
    assert gradient_error(expected, found) < BOUND


@pytest.mark.more
def test_lengths_may_change_from_step_to_step() -> None:
    pipe, (source, target), labels = pipeline("transformer", num_microbatches=3, slices=4, num_ranks=2)
    plain = CASES["transformer"].model()
    for rows, length in ((8, 9), (3, 4), (5, 6)):
        inputs, targets = (source[:rows], target[:rows, :length]), labels[:rows, :length]
        total, count = causal_cross_entropy(plain(inputs), targets)
        assert abs(pipe.evaluate(inputs, targets) - total / count) < BOUND
        assert abs(pipe.step(inputs, targets) - total / count) < BOUND
        assert pipe.slices(length) == [len(part) for part in torch.arange(length).tensor_split(4)]


def test_the_default_loss() -> None:
    """Of (rows, classes, tokens): tokens may be any dim of the outputs."""

    class Transposed(nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return logits.mT

    inputs, targets = CASES["transformer"].batch()
    pipe = Pipeline(
        nn.Sequential(*CASES["transformer"].model(), Transposed()), slices=4, num_ranks=2, layers=Layers(example=inputs)
    )
    loss, expected = unsplit("transformer", 1)
    assert abs(pipe.step(inputs, targets) - loss) < BOUND
    found = gradients(pipe)
    assert gradient_error({f"{n}": g for n, g in zip(found, expected.values(), strict=True)}, found) < BOUND


def test_dropout_after_the_cut_is_repeated() -> None:
    """Recomputation draws what the forward drew, and no number of ranks changes it."""

    class DropFirst(nn.Module):
        def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return nn.functional.dropout(inputs[0], 0.3, self.training), *inputs[1:]

    found = []
    for num_ranks, recompute in ((1, "none"), (3, "full"), (2, "segments"), (4, "selective")):
        torch.manual_seed(5)
        layers = [*CASES["transformer"].model()]
        inputs, targets = CASES["transformer"].batch()
        model = nn.Sequential(*layers[:-4], DropFirst(), *layers[-4:])
        torch.manual_seed(5)
        pipe = Pipeline(
            model,
            num_microbatches=2,
            slices=3,
            num_ranks=num_ranks,
            memory=Memory(recompute=recompute),
            layers=Layers(example=inputs),
            loss_fn=causal_cross_entropy,
        )
        found.append((pipe.step(inputs, targets), gradients(pipe)))
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert gradient_error(found[0][1], gradient) < BOUND


def test_a_loss_that_depends_on_nothing_is_found() -> None:
    """Without a backward of the first slice the encoder would silently learn nothing."""

    def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = causal_cross_entropy(logits, targets)
        return (total if count else torch.zeros(())), count

    inputs, targets = CASES["transformer"].batch()
    pipe = Pipeline(
        CASES["transformer"].model(),
        slices=3,
        num_ranks=2,
        schedule="1f1b",
        loss_fn=loss,
        layers=Layers(example=inputs),
    )
    pipe.step(inputs, targets)
    targets = targets.clone()
    targets[:, :3] = -100
    with pytest.raises(ContextError, match="loss_fn must return a sum that depends on the outputs"):
        pipe.step(inputs, targets)


@pytest.mark.more
def test_all_slices_have_one_copy_of_the_encoding() -> None:
    """Recomputed in full, more slices hold about as many bytes between forward and backward as one."""
    peaks = []
    for slices in (1, 4):
        pipe, inputs, targets = pipeline(
            "transformer", schedule="gpipe", num_microbatches=ROWS, slices=slices, recompute="full"
        )
        pipe.step(inputs, targets)
        with LiveMemory(tensors_alive()) as memory:
            before = memory.num_bytes
            pipe.step(inputs, targets)
        peaks.append(memory.peak - before)
    assert peaks[1] < 2 * peaks[0]


def test_causal_attention_by_itself() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 5, dtype=torch.float64)
    scores = (query @ key.mT / 5**0.5).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    assert torch.allclose(causal_attention(query, key, value), scores.softmax(3) @ value)
    grouped = causal_attention(query, key[:, :2], value[:, :2])
    assert torch.allclose(grouped[:, 1], causal_attention(query, key[:, :1], value[:, :1])[:, 1])


PAGE = ROOT / "docs" / "benchmarks.md"
RANKS, TOKENS = 4, 512
COUNTS, MICROBATCHES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 16)


@cache
def counted() -> tuple[list[float], int]:
    """Of T(6, 8192, 16) with one row of 512 source and 512 target tokens, in units of the whole forward."""
    with torch.device("meta"):
        layers = flatten_layers(transformer(6, 8192, 16))
    tracer = ShapeTracer(layers, torch.device("cpu"))
    ids = torch.ones(1, TOKENS, dtype=torch.int64)
    costs = counted_costs(tracer.trace(BatchSlice((ids, ids)), training=True))
    cut = next(number for number, layer in enumerate(layers) if isinstance(layer.module, CutTokens))
    return [cost / sum(costs) for cost in costs], cut


def seconds(num_microbatches: int, num_slices: int) -> float:
    """Of a step; a rank takes for every slice 1% of its forward of a microbatch besides."""
    costs, cut = counted()
    stops = [*accumulate(partition_layers(costs, RANKS))]

    def time(stage: int, op: Op, tokens: int, context: int) -> float:
        """What is before the cut runs with the first slice."""
        start = stops[stage - 1] if stage else 0
        whole = sum(costs[start : min(cut, stops[stage])]) if context == 0 else 0.0
        sliced = sum(costs[max(start, cut + 1) : stops[stage]]) * tokens / TOKENS
        works = context == 0 or stops[stage] > cut
        return works * (0.01 / RANKS + whole + sliced) * (2 if op is Op.B else 1)

    schedule = make_schedule("1f1b", RANKS, num_microbatches, num_slices)
    return simulate(schedule, schedule_costs(schedule, (TOKENS // num_slices,) * num_slices, time)).makespan


def test_the_page_says_how_many_slices_pay() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Slices behind an encoder")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([\d. |]+) \|$", section, re.MULTILINE)
    assert [int(count) for count, _ in rows] == [*COUNTS]
    for count, cells in rows:
        expected = [f"{seconds(m, 1) / seconds(m, int(count)):.2f}" for m in MICROBATCHES]
        assert cells.split(" | ") == expected, (count, expected)


def test_slices_pay_with_few_microbatches() -> None:
    best = [max(COUNTS, key=lambda count, m=m: seconds(m, 1) / seconds(m, count)) for m in MICROBATCHES]  # type: ignore[misc]
    assert best[:2] == [16, 8]
    assert best[3] == 1  # with four it makes no difference


def test_the_encoder_bounds_what_slices_gain() -> None:
    """One microbatch runs the encoder on one rank after the other, however its decoder is sliced."""
    costs, cut = counted()
    bound = 1 / sum(costs[:cut])
    gains = [seconds(1, 1) / seconds(1, count) for count in COUNTS]
    assert 1.1 < max(gains) < bound
