"""A Pipeline in one process trains, evaluates and exports as the unsplit model does, and refuses bad batches."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, masking_utils

from slipstream import Pipeline, SlipstreamError, one_f_one_b
from slipstream.model import causal_cross_entropy
from slipstream.schedule import split_backwards
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    LENGTH,
    VOCABULARY,
    build,
    gradient_error,
    gradients,
    labels_of,
    llama,
    tokens,
    unsplit_step,
)
from support.exact_steps import exact_pipe
from support.parameters import each_once, first_of
from support.pipelines import make_pipe


def documents() -> Tensor:
    """Two rows with different documents; some cuts fall inside a document, some between two."""
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    for row, ends in enumerate([(3, 17, 18, 50), (30, 41)]):
        for end in ends:
            ids[row, end:] += 1
    return ids


def positions_within(document_ids: Tensor) -> Tensor:
    rows = [[int((row[: t + 1] == row[t]).sum()) - 1 for t in range(LENGTH)] for row in document_ids]
    return torch.tensor(rows)


def labels_within(inputs: Tensor, document_ids: Tensor) -> Tensor:
    """As transformers wants them, with a document's first token ignored: nothing predicts it."""
    labels = inputs.clone()
    labels[:, 1:][document_ids[:, 1:] != document_ids[:, :-1]] = -100
    return labels


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    each_once(["gpt2", "llama4_text", "llama", "mistral, window of 7", "gemma3"], [2, 1], 2),
)
def test_documents_are_separate_sequences(name: str, num_microbatches: int) -> None:
    model, inputs, ids = build(ARCHITECTURES[name]), tokens(), documents()
    whole = copy.deepcopy(model)
    expected = unsplit_step(whole, inputs, labels_within(inputs, ids), position_ids=positions_within(ids))
    pipe = make_pipe(model, slices=[5, 30, 17, 12], num_microbatches=num_microbatches, num_ranks=2)
    loss = pipe.step(inputs, inputs, document_ids=ids)
    bound = 1e-6 if name == "gemma3" else 1e-7 if name == "llama4_text" else BOUND  # their norms round to float32
    assert abs(loss - expected) < bound * expected
    assert gradient_error(whole, pipe) < bound


def test_restarting_positions_mean_documents() -> None:
    model, inputs, ids = build(ARCHITECTURES["llama"]), tokens(), documents()
    pipe = make_pipe(model, slices=4)
    by_ids = pipe.step(inputs, inputs, document_ids=ids)
    by_positions = pipe.step(inputs, inputs, position_ids=positions_within(ids))
    assert by_ids == by_positions


def test_a_row_without_valid_labels_counts_nowhere() -> None:
    """The mean is over tokens, not over microbatches: one of them may have none."""
    inputs = tokens(batch=3)
    labels = inputs.clone()
    labels[1] = -100
    labels[2, 5:] = -100
    exact_pipe(build(ARCHITECTURES["llama"]), inputs, labels, slices=3, num_microbatches=3)


@pytest.mark.parametrize("name", first_of(["llama, tied", "llama"]))
def test_steps_add_to_grad(name: str) -> None:
    pipe = make_pipe(build(ARCHITECTURES[name]), slices=4, num_ranks=2)
    inputs = tokens()
    pipe.step(inputs, inputs)
    once = gradients(pipe)
    pipe.step(inputs, inputs)
    twice = gradients(pipe)
    assert gradient_error({name: 2 * gradient for name, gradient in once.items()}, twice) < BOUND


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


def test_frozen_parameters_stay_frozen() -> None:
    model = build(ARCHITECTURES["llama"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.3" in name or "layers.1" in name)
    exact_pipe(model, tokens(), slices=4, num_ranks=4)


def test_evaluation_is_the_loss_without_dropout_or_gradients() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.5
    model, inputs = build(config), tokens()
    labels = labels_of(inputs)
    whole = copy.deepcopy(model).eval()
    pipe = make_pipe(model, slices=4, num_ranks=2)
    assert abs(pipe.evaluate(inputs, labels) - unsplit_step(whole, inputs, labels)) < BOUND
    assert not gradients(pipe)
    assert abs(pipe.step(inputs, labels) - pipe.evaluate(inputs, labels)) > 1e-4  # training mode is back


@pytest.mark.parametrize("schedule", first_of(["1f1b", "gpipe"]))
def test_dropout_is_the_same_for_every_number_of_stages_and_schedule(schedule: str) -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.2
    model, inputs = build(config), tokens()
    results = []
    for num_stages in (1, 2, 4):
        torch.manual_seed(7)
        pipe = make_pipe(copy.deepcopy(model), schedule=schedule, slices=4, num_microbatches=2, num_ranks=num_stages)
        first, second = pipe.step(inputs, inputs), pipe.step(inputs, inputs)
        assert first != second  # every step draws other numbers
        results.append((first, second, gradients(pipe)))
    for first, second, found in results[1:]:
        assert (first, second) == results[0][:2]
        assert gradient_error(results[0][2], found) < BOUND


def test_a_step_leaves_the_callers_random_state_alone() -> None:
    config = copy.deepcopy(ARCHITECTURES["gpt2"])
    config.resid_pdrop = 0.2
    pipe = make_pipe(build(config), slices=4)
    before = torch.get_rng_state()
    pipe.step(tokens(), tokens())
    assert torch.equal(before, torch.get_rng_state())


def test_no_forward_looks_for_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would, in the positions, and so wait until a GPU is idle; Slipstream knows where they are."""

    def look(_: Tensor) -> None:
        raise AssertionError

    pipe = make_pipe(build(ARCHITECTURES["mistral, window of 7"]), slices=4, num_ranks=2)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", look)
    pipe.step(tokens(), tokens(), document_ids=documents())


def test_a_loss_of_ones_own() -> None:
    def scaled(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = causal_cross_entropy(outputs, targets)
        return 3 * total, count

    model, inputs = build(ARCHITECTURES["llama"]), tokens()
    plain = make_pipe(copy.deepcopy(model), slices=4).step(inputs, inputs)
    own = make_pipe(model, slices=4, num_ranks=2, loss_fn=scaled).step(inputs, inputs)
    assert abs(own - 3 * plain) < BOUND


def test_the_timeline_has_every_action_once() -> None:
    pipe = make_pipe(build(ARCHITECTURES["llama"]), slices=4, num_ranks=2)
    pipe.step(tokens(), tokens())
    compute = [span.action for span in pipe.timeline().compute_spans]
    expected = [action for row in split_backwards(one_f_one_b(2, 1, 4)).actions for action in row]
    assert sorted(map(str, compute)) == sorted(map(str, expected))
    assert 0 < pipe.timeline().idle_fraction < 1


@pytest.mark.parametrize("name", first_of(["llama, tied", "mixtral", "llama", "gpt2"], 2))
def test_the_export_is_the_model(name: str, tmp_path: Path) -> None:
    model, inputs = build(ARCHITECTURES[name]), tokens()
    whole = copy.deepcopy(model)
    make_pipe(model, num_ranks=2).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        assert torch.allclose(loaded(inputs).logits, whole(inputs).logits, rtol=1e-12, atol=1e-12)


class TestRefusals:
    def pipeline(self, **settings: object) -> Pipeline:
        return make_pipe(build(llama()), **settings)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"schedule": "1f1p"}, r"schedule='1f1p' is not known; did you mean '1f1b'"),
            ({"num_ranks": 5}, r"5 stages for 4 layers: every stage needs a layer. Use 1 to 4"),
            (
                {"num_ranks": 2, "partition": [3, 2]},
                r"partition=\[3, 2\] has 2 stages and 5 layers.*2 stages.*4 layers",
            ),
            ({"partition": "even"}, r"partition='even': give 'auto' or the number of layers"),
            ({"stages_per_rank": 2}, r"stages_per_rank=2, but the schedule '1f1b' has exactly 1.*interleaved-1f1b"),
            ({"schedule": "zb-v"}, r"stages_per_rank=1, but the schedule 'zb-v' has exactly 2"),
            ({"num_microbatches": 6, "num_flushes": 4}, r"num_flushes=4 for 6 microbatches.*1, 2, 3, 6"),
            (
                {"schedule": one_f_one_b(1, 2, 4), "slices": 4, "num_flushes": 2},
                r"num_flushes=2 with the schedule '1f1b'.*in_flushes\(schedule, 2\)",
            ),
            ({"schedule": "interleaved-1f1b", "stages_per_rank": 3, "num_ranks": 2}, r"6 stages for 4 layers"),
            ({"slices": "many"}, r"slices='many': give a count from 1, such as 8"),
            (
                {"schedule": one_f_one_b(1, 1, 4), "slices": "auto"},
                r"slices='auto' with the schedule '1f1b', which has 4",
            ),
            (
                {"schedule": one_f_one_b(1, 1, 4), "slices": [40, 8, 8, 4, 4]},
                r"are 5 lengths, but .*'1f1b' has 4 slices",
            ),
            ({"schedule": one_f_one_b(3, 1, 4), "num_ranks": 2}, r"is for 3 ranks, but there are 2"),
        ],
    )
    def test_settings(self, settings: dict[str, object], message: str) -> None:
        with pytest.raises(SlipstreamError, match=message):
            self.pipeline(**settings)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
    def test_compiled_modules_are_not_split(self) -> None:
        model = build(llama())
        model.model.layers[2].mlp.compile()
        with pytest.raises(SlipstreamError, match=r"model\.layers\.2\.mlp is compiled.*schedule 'zb-h1'.*1f1b"):
            make_pipe(model, schedule="zb-h1", num_ranks=2)

    @pytest.mark.parametrize(
        ("slices", "inputs", "message"),
        [
            ([30, 30], tokens(), r"slices=\[30, 30\] add up to 60 tokens, but the sequence has 64.*Add 4"),
            (99, tokens(), r"slices=99: a sequence of 64 tokens takes 1 to 64"),
            (4, tokens(length=80), r"80 tokens, but 'llama' has max_position_embeddings=64"),
            (4, tokens().double(), r"inputs are \(2, 64\) float64; expected token ids"),
            (4, tokens() - 30, r"token id -\d+, but .* ids 0 to 60|token id -\d+.*\(ids 0 to 60\)"),
            (4, tokens() + VOCABULARY, r"token id 1?\d\d.*vocabulary of 61.*tokenizer the model was made for"),
        ],
    )
    def test_batches(self, slices: int | list[int], inputs: Tensor, message: str) -> None:
        with pytest.raises(SlipstreamError, match=message):
            self.pipeline(slices=slices).step(inputs, inputs)

    def test_fewer_rows_than_microbatches(self) -> None:
        with pytest.raises(SlipstreamError, match="batch of 2 sequences can't be cut into 4 microbatches"):
            self.pipeline(num_microbatches=4).step(tokens(), tokens())

    def test_no_label_counts(self) -> None:
        with pytest.raises(SlipstreamError, match="no label of this batch counts"):
            self.pipeline().step(tokens(), torch.full_like(tokens(), -100))

    def test_targets_of_another_shape(self) -> None:
        with pytest.raises(SlipstreamError, match=r"targets are \(2, 63\) int64, inputs \(2, 64\) int64"):
            self.pipeline().step(tokens(), tokens()[:, 1:])

    def test_a_loss_that_counts_otherwise(self) -> None:
        def mean_of_means(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            total, count = causal_cross_entropy(outputs, targets)
            return total / count, 1

        with pytest.raises(SlipstreamError, match=r"loss_fn counted 1 tokens, but \d+ targets"):
            self.pipeline(loss_fn=mean_of_means).step(tokens(), tokens())

    def test_other_models(self) -> None:
        with pytest.raises(SlipstreamError, match="model is a Linear; give a causal LM of transformers"):
            Pipeline(nn.Linear(2, 2))  # type: ignore[arg-type]

    def test_a_model_without_weights(self) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(llama())
        with pytest.raises(SlipstreamError, match=r"meta device.*Pipeline\.from_config"):
            Pipeline(model)
