"""A head whose rows are spread over the ranks, tied or not, has the loss and the gradients of the whole one."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CohereConfig, GraniteConfig, PhiConfig

from pipeline.test_random_schedules import cut_settings, partitions, schedules
from slipstream import Action, Op, Parallelism, Pipeline, Runtime, Schedule, SlipstreamError
from slipstream.schedule import SCHEDULES, make_schedule, predecessors, spread_vocabulary
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    build,
    gradient_error,
    gradients,
    labels_of,
    llama,
    no_rounding_inside,
    tokens,
    unsplit_step,
)
from support.exact_steps import exact_pipe
from support.examples import examples
from support.forked import launch
from support.parameters import first_of
from support.paths import WORKERS
from support.pipelines import make_pipe

LENGTH = 24
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
PHI = PhiConfig(**_SMALL, vocab_size=97, max_position_embeddings=64, tie_word_embeddings=False)  # a head with a bias
UNTIED = ARCHITECTURES["llama"]
TIED = {"llama, tied": ARCHITECTURES["llama, tied"], "gpt2": ARCHITECTURES["gpt2"], "gemma3": ARCHITECTURES["gemma3"]}
MODELS = {"llama": build(UNTIED), "phi": build(PHI)} | {name: build(config) for name, config in TIED.items()}
CHECKED = Runtime(self_check=False)


@pytest.fixture(autouse=True)
def exact_norms() -> Iterator[None]:
    with no_rounding_inside():
        yield


@st.composite
def spread_schedules(draw: st.DrawFn, embedding: bool) -> Schedule:
    """A random order, in which V, L and VW, and for an `embedding` E and EW, stand anywhere that the rules allow."""
    schedule = draw(schedules())
    assume(len(set(schedule.placement)) == schedule.num_ranks)
    each = schedule.microbatch_slices
    last = schedule.num_stages - 1
    ops = (Op.V, Op.VW, Op.E, Op.EW) if embedding else (Op.V, Op.VW)
    added = [Action(op, g, *s) for op, g, s in product(ops, schedule.vocabulary_stages, each)]
    added += [Action(Op.L, last, *s) for s in each]
    actions = [action for row in schedule.actions for action in row] + added

    def rows(order: list[Action]) -> tuple[tuple[Action, ...], ...]:
        placement = schedule.placement
        of_rank = [[each for each in order if placement[each.stage] == rank] for rank in range(schedule.num_ranks)]
        return tuple(map(tuple, of_rank))

    rules = replace(schedule, actions=rows(actions))
    order = random_order(rules, random.Random(draw(st.integers(0, 2**32))))
    return replace(rules, actions=rows(order))


def random_order(rules: Schedule, generator: random.Random) -> list[Action]:
    left = {action: set(predecessors(action, rules)) for action in rules.positions}
    order: list[Action] = []
    while left:
        order.append(generator.choice([action for action, before in left.items() if not before]))
        del left[order[-1]]
        for before in left.values():
            before.discard(order[-1])
    return order


@pytest.mark.parametrize("name", first_of((*TIED, "llama", "phi")))
@examples(25, thin=3)
@given(data=st.data())
def test_any_order_has_the_gradients_of_the_unsplit_model(name: str, data: st.DataObject) -> None:
    schedule = data.draw(spread_schedules(name in TIED))
    settings = cut_settings(schedule, data)
    model = copy.deepcopy(MODELS[name])
    if name != "phi":  # whose layers can't be cut in half
        settings["partition"] = data.draw(partitions(schedule.num_stages, model.config.num_hidden_layers))
    settings["recompute"] = data.draw(st.sampled_from(["stage", "stage+full", "selective"]))
    pipe = make_pipe(model, schedule=schedule, **settings)
    check(name, pipe, tokens(batch=3, length=LENGTH, seed=data.draw(st.integers(0, 99))))


def check(name: str, pipe: Pipeline, inputs: Tensor) -> None:
    labels, whole = labels_of(inputs), copy.deepcopy(MODELS[name])
    wanted = unsplit_step(whole, inputs, labels)
    assert abs(pipe.step(inputs, labels) - wanted) < BOUND
    error = gradient_error(whole, pipe)
    assert error < BOUND
    assert abs(pipe.evaluate(inputs, labels) - wanted) < BOUND


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param(name, p, marks=[pytest.mark.more] * (p != 2 or name not in ("1f1b", "zb-v", "interleaved-1f1b")))
        for name in SCHEDULES
        for p in (1, 2, 4)
        if p * SCHEDULES[name].stages_per_rank.start <= 4
    ],
)
@pytest.mark.parametrize("model", first_of(["llama, tied", "llama"]))
def test_every_named_schedule_takes_it(model: str, name: str, num_ranks: int) -> None:
    pipe = make_pipe(
        copy.deepcopy(MODELS[model]),
        name,
        num_microbatches=2,
        slices=[5, 4, 15],
        num_ranks=num_ranks,
        stages_per_rank=SCHEDULES[name].stages_per_rank.start,
        vocabulary="spread",
    )
    check(model, pipe, tokens(batch=3, length=LENGTH))


@pytest.mark.parametrize("model", first_of(["gpt2", "llama"]))
def test_documents_that_end_inside_slices(model: str) -> None:
    inputs = tokens(batch=2, length=LENGTH)
    documents = torch.tensor([[0] * 7 + [1] * 17, [0] * 24])
    made = [
        make_pipe(copy.deepcopy(MODELS[model]), slices=3, num_ranks=2, vocabulary=where)
        for where in ("whole", "spread")
    ]
    losses = [pipe.step(inputs, inputs, document_ids=documents) for pipe in made]
    assert abs(losses[0] - losses[1]) < BOUND
    assert gradient_error(*(gradients(pipe) for pipe in made)) < BOUND


def test_a_frozen_head_gets_no_gradient() -> None:
    model = copy.deepcopy(MODELS["phi"])
    model.lm_head.requires_grad_(requires_grad=False)
    pipe = exact_pipe(model, tokens(length=LENGTH), slices=3, vocabulary="spread")
    assert dict(pipe.named_parameters()).keys() - gradients(pipe).keys() == {"lm_head.weight", "lm_head.bias"}


def test_a_frozen_tied_matrix_gets_no_gradient() -> None:
    model = copy.deepcopy(MODELS["gemma3"])
    model.lm_head.weight.requires_grad_(requires_grad=False)
    exact_pipe(model, tokens(length=LENGTH), slices=3, vocabulary="spread")


@pytest.mark.parametrize("schedule", first_of(["zb-v", "1f1b"]))
def test_lookups_of_the_padding_id_leave_no_gradient(schedule: str) -> None:
    """The head does leave one in that row."""
    inputs = tokens(length=LENGTH)
    inputs[:, ::3] = 5
    cut = {"schedule": schedule, "slices": 3, "stages_per_rank": 2 if schedule == "zb-v" else 1}
    exact_pipe(build(llama(tie_word_embeddings=True, pad_token_id=5)), inputs, vocabulary="spread", **cut)


def test_a_tied_head_with_a_bias() -> None:
    config = PhiConfig(**_SMALL, vocab_size=97, max_position_embeddings=64, tie_word_embeddings=True)
    exact_pipe(build(config), tokens(length=LENGTH), slices=3, vocabulary="spread")


@pytest.mark.more
def test_dropout_after_the_embedding_is_that_of_a_whole_one() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.embd_pdrop = 0.5
    losses = []
    for where in ("whole", "spread"):
        torch.manual_seed(7)
        pipe = make_pipe(build(config), slices=3, num_ranks=2, vocabulary=where)
        pipe.train()
        losses.append(pipe.step(tokens(length=LENGTH), tokens(length=LENGTH)))
    assert abs(losses[0] - losses[1]) < BOUND


TIED_RUNS = [(2, "1f1b", "llama, tied"), (3, "zb-h1", "gpt2"), (2, "zb-v", "gemma3"), (4, "replicas", "llama, tied")]
UNTIED_RUNS = [(2, "1f1b", "llama"), (3, "zb-h1", "llama"), (2, "zb-v", "llama"), (4, "replicas", "llama")]


@pytest.mark.parametrize(("num_processes", "how", "model"), first_of(TIED_RUNS, 1, "grid") + first_of(UNTIED_RUNS, 0))
def test_processes_train_checkpoint_and_export_as_the_unsplit_model(
    num_processes: int, how: str, model: str, tmp_path: Path
) -> None:
    ended = launch(num_processes, WORKERS / "pipeline/spread_vocabulary.py", how, model, str(tmp_path))
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            ARCHITECTURES["llama, tied"],
            {"schedule": spread_vocabulary(make_schedule("1f1b", 2, 1, 2))},
            "has V's but no E's, which spread model.embed_tokens.weight, to which lm_head.weight is tied",
        ),
        (
            UNTIED,
            {"schedule": spread_vocabulary(make_schedule("1f1b", 2, 1, 2), embedding=True)},
            "has E's, which spread the embedding, but it isn't tied to the head",
        ),
        (
            CohereConfig(**_SMALL, vocab_size=97, tie_word_embeddings=False),
            {},
            "'cohere' changes what its head returns",
        ),
        (GraniteConfig(**_SMALL, vocab_size=97, logits_scaling=2.0), {}, "'granite' changes what its head returns"),
        (UNTIED, {"loss_fn": lambda outputs, targets: (outputs.sum(), 1)}, r"with loss_fn=...: no rank has all logits"),
        (UNTIED, {"parallel": Parallelism(shard="parameters")}, "with parallel.shard='parameters'"),
        (UNTIED, {"schedule": "auto"}, "with schedule='auto'"),
        (UNTIED, {"slices": "auto"}, "with slices='auto'"),
        (UNTIED, {"vocabulary": "half"}, "vocabulary='half': give one of auto, whole, spread"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: Any, options: dict[str, Any], message: str) -> None:
    arguments = {"vocabulary": "spread", "num_ranks": 2, "runtime": CHECKED} | options
    with pytest.raises(SlipstreamError, match=message):
        Pipeline.from_config(config, **arguments)


def test_a_sequence_of_layers_has_no_such_head() -> None:
    with pytest.raises(SlipstreamError, match=r"an nn.Sequential has no head that is known"):
        Pipeline(nn.Sequential(nn.Linear(3, 3)), vocabulary="spread")


def test_a_schedule_with_a_spread_vocabulary_is_not_whole() -> None:
    schedule = spread_vocabulary(make_schedule("1f1b", 2, 1, 2))
    with pytest.raises(SlipstreamError, match=r"vocabulary='whole', but the schedule '1f1b' has V's"):
        make_pipe(UNTIED, schedule=schedule, vocabulary="whole")


@pytest.mark.parametrize(
    ("name", "schedule"), first_of([("gpt2", "zb-h1"), ("llama", "1f1b"), ("llama, tied", "1f1b")])
)
def test_sequences_of_different_lengths(name: str, schedule: str) -> None:
    """Packed under document masks, they have the gradients of each alone."""
    lengths = [9, 24, 5, 17]
    inputs = [tokens(batch=1, length=length, seed=length)[0] for length in lengths]
    labels = [labels_of(each[None])[0] for each in inputs]
    model, whole = copy.deepcopy(MODELS[name]), copy.deepcopy(MODELS[name])
    options: dict[str, Any] = {"schedule": schedule, "slices": 3, "num_microbatches": 2, "num_ranks": 2}
    pipe = make_pipe(model, vocabulary="spread", **options)
    counts = [int((each[1:] != -100).sum()) for each in labels]
    for own, label, count in zip(inputs, labels, counts, strict=True):
        loss = whole(input_ids=own[None], labels=label[None], use_cache=False).loss
        (loss * count / sum(counts)).backward()
    pipe.step(inputs, labels)
    assert gradient_error(whole, pipe) < BOUND
