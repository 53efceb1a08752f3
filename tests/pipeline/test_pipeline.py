"""A Pipeline in one process trains and evaluates as the unsplit model does, whatever of it is trained and drawn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from slipstream import one_f_one_b
from slipstream.model import causal_cross_entropy
from slipstream.schedule import split_backwards
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    LENGTH,
    build,
    gradient_error,
    gradients,
    labels_of,
    tokens,
    unsplit_step,
    with_dropout,
)
from support.exact_steps import document_ids, exact_pipe
from support.parameters import each_once
from support.pipelines import make_pipe

# Of two rows; some cuts fall inside a document, some between two.
DOCUMENTS = document_ids((3, 14, 1, 32, 14), (30, 11, 23))


def positions_within(ids: Tensor) -> Tensor:
    return torch.tensor([[int((row[: t + 1] == row[t]).sum()) - 1 for t in range(LENGTH)] for row in ids])


def labels_within(inputs: Tensor) -> Tensor:
    """As transformers wants them, with a document's first token ignored: nothing predicts it."""
    labels = inputs.clone()
    labels[:, 1:][DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1]] = -100
    return labels


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    each_once(["gpt2", "llama4_text", "llama", "mistral, window of 7", "gemma3"], [2, 1], 2),
)
def test_documents_are_separate_sequences(name: str, num_microbatches: int) -> None:
    model, inputs = build(ARCHITECTURES[name]), tokens()
    whole = copy.deepcopy(model)
    expected = unsplit_step(whole, inputs, labels_within(inputs), position_ids=positions_within(DOCUMENTS))
    pipe = make_pipe(model, slices=[5, 30, 17, 12], num_microbatches=num_microbatches, num_ranks=2)
    loss = pipe.step(inputs, inputs, document_ids=DOCUMENTS)
    bound = 1e-6 if name == "gemma3" else 1e-7 if name == "llama4_text" else BOUND  # their norms round to float32
    assert abs(loss - expected) < bound * expected
    assert gradient_error(whole, pipe) < bound


def test_restarting_positions_mean_documents() -> None:
    inputs, pipe = tokens(), make_pipe(build(ARCHITECTURES["llama"]), slices=4)
    by_ids = pipe.step(inputs, inputs, document_ids=DOCUMENTS)
    by_positions = pipe.step(inputs, inputs, position_ids=positions_within(DOCUMENTS))
    assert by_ids == by_positions


def test_no_forward_looks_for_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would, in the positions, and so wait until a GPU is idle; Slipstream knows where they are."""

    def look(_: Tensor) -> None:
        raise AssertionError

    pipe = make_pipe(build(ARCHITECTURES["mistral, window of 7"]), slices=4, num_ranks=2)
    pipe.step(tokens(), tokens(), document_ids=DOCUMENTS)  # after a toy with documents, which looks for them
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    pipe.step(tokens(), tokens(), document_ids=DOCUMENTS)


def test_a_row_without_valid_labels_counts_nowhere() -> None:
    """The mean is over tokens, not over microbatches: one of them may have none."""
    inputs = tokens(batch=3)
    labels = inputs.clone()
    labels[1] = -100
    labels[2, 5:] = -100
    exact_pipe(build(ARCHITECTURES["llama"]), inputs, labels, slices=3, num_microbatches=3)


def test_flushes_accumulate_the_gradient_of_the_whole_batch() -> None:
    cut = {"schedule": "gpipe", "num_microbatches": 4, "num_flushes": 2, "slices": 3}
    pipe = exact_pipe(build(ARCHITECTURES["llama"]), tokens(batch=4), **cut)
    microbatches = [span.action.microbatch for span in pipe.timeline().compute_spans if span.rank == 0]
    assert microbatches == sorted(microbatches, key=lambda m: m // 2)  # the first flush ends before the second begins


def test_training_follows_the_unsplit_model() -> None:
    """Five steps of AdamW with clipping, tied embeddings included, end at the same parameters."""
    model = build(ARCHITECTURES["llama, tied"])
    whole = copy.deepcopy(model)
    pipe = make_pipe(model, slices=4, num_ranks=3)
    ours = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(5):
        inputs = tokens(seed=step)
        ours.zero_grad()
        theirs.zero_grad()
        pipe.step(inputs, inputs)
        unsplit_step(whole, inputs, inputs)
        norm = pipe.clip_grad_norm_(0.5)
        assert abs(norm - torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)) < 1e-9
        ours.step()
        theirs.step()
    found = dict(pipe.named_parameters())
    for name, parameter in whole.named_parameters():
        assert (found[name] - parameter).abs().max() < 1e-9, name


def test_evaluation_is_the_loss_without_dropout_or_gradients() -> None:
    model, inputs = build(with_dropout("gpt2", 0.5)), tokens()
    labels = labels_of(inputs)
    whole = copy.deepcopy(model).eval()
    pipe = make_pipe(model, slices=4, num_ranks=2)
    assert abs(pipe.evaluate(inputs, labels) - unsplit_step(whole, inputs, labels)) < BOUND
    assert not gradients(pipe)
    assert abs(pipe.step(inputs, labels) - pipe.evaluate(inputs, labels)) > 1e-4  # training mode is back


def test_every_step_draws_other_numbers_and_leaves_the_callers_random_state_alone() -> None:
    inputs, pipe = tokens(), make_pipe(build(with_dropout("gpt2", 0.2)), slices=4)
    before = torch.get_rng_state()
    assert pipe.step(inputs, inputs) != pipe.step(inputs, inputs)
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_of_ones_own() -> None:
    def scaled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = causal_cross_entropy(outputs, targets)
        return 3 * total, count

    model, inputs = build(ARCHITECTURES["llama"]), tokens()
    plain = make_pipe(copy.deepcopy(model), slices=4).step(inputs, inputs)
    own = make_pipe(model, slices=4, num_ranks=2, loss_fn=scaled).step(inputs, inputs)
    assert abs(own - 3 * plain) < BOUND


def test_the_timeline_has_every_action_once() -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama"]), schedule="1f1b", slices=4, num_ranks=2)
    pipe.step(tokens(), tokens())
    compute = [span.action for span in pipe.timeline().compute_spans]
    expected = [action for row in split_backwards(one_f_one_b(2, 1, 4)).actions for action in row]
    assert sorted(map(str, compute)) == sorted(map(str, expected))
    assert 0 < pipe.timeline().idle_fraction < 1
