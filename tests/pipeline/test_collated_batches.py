"""Batches as collators of transformers make them have the loss and gradients that the unsplit model has of them."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PreTrainedTokenizerFast

from slipstream import Pipeline, SlipstreamError
from support.architectures import (
    ARCHITECTURES,
    BOUND,
    VOCABULARY,
    build,
    gradient_error,
    gradients,
    no_rounding_inside,
    tokens,
)
from support.examples import examples
from support.pipelines import make_pipe
from support.ragged_batches import MODELS, ORDERS, batch_of, together

TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")),
    pad_token="3",
)


def collated(lengths: list[int], seed: int = 0) -> Any:
    inputs, labels = batch_of(lengths, seed)
    pairs = zip(inputs, labels, strict=True)
    features = [{"input_ids": ids.tolist(), "labels": label.tolist()} for ids, label in pairs]
    return DataCollatorForSeq2Seq(TOKENIZER, return_tensors="pt")(features)


def check(name: str, batch: Any, **options: Any) -> None:
    pipe = make_pipe(copy.deepcopy(MODELS[name]), **{"num_ranks": 2, **options})
    with no_rounding_inside():
        loss, expected = together(copy.deepcopy(MODELS[name]), batch)
        assert float(pipe.evaluate(batch)) == pytest.approx(float(loss), rel=BOUND)
        assert float(pipe.step(batch)) == pytest.approx(float(loss), rel=BOUND)
    assert gradient_error(expected, gradients(pipe)) < BOUND


@examples(6, thin=3)
@given(st.data())
def test_padded_batches_are_those_of_the_unsplit_model(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 40), min_size=2, max_size=6))
    batch = collated([*lengths, 12], data.draw(st.integers(0, 99)))
    batch["labels"][0, 1] = 5  # one that counts
    schedule, v = data.draw(st.sampled_from(ORDERS))
    check(
        data.draw(st.sampled_from(sorted(MODELS))),
        batch,
        schedule=schedule,
        stages_per_rank=v,
        num_microbatches=data.draw(st.integers(1, len(lengths))),
        slices=data.draw(st.integers(1, 6)),
        recompute=data.draw(st.sampled_from(["none", "full", "selective"])),
    )


def test_rows_without_padding_run_in_the_slices_that_are_given() -> None:
    batch = UserDict(collated([30, 30, 30, 30]))
    check("llama, tied", batch, slices=[7, 1, 22], num_microbatches=2)


@pytest.mark.parametrize("lengths", [[30, 30], [30, 12]])
def test_positions_that_count_on_are_taken(lengths: list[int]) -> None:
    batch = collated(lengths)
    check("gpt2", {**batch, "position_ids": torch.arange(30).repeat(2, 1)}, slices=3)


def test_documents_of_a_collator_that_flattens() -> None:
    inputs, _ = batch_of([9, 20, 3])
    batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": each.tolist()} for each in inputs])
    check("mistral, window of 7", batch, slices=[5, 17, 10])


def test_a_load_balancing_loss_leaves_padding_out() -> None:
    batch = collated([40, 11])
    padded = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    found = []
    for each in (batch, padded):
        pipe = make_pipe(ARCHITECTURES["mixtral"], num_ranks=2, slices=3, router_loss="per_layer")
        pipe.step(each)
        found.append(gradients(pipe))
    assert gradient_error(*found) == 0


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return make_pipe(build(ARCHITECTURES["llama"]), slices=2, num_ranks=2)


def without(key: str, **changes: Any) -> dict[str, Any]:
    batch = {**collated([12, 8]), **changes}
    batch.pop(key, None)
    return batch


MASK = torch.ones(2, 12, dtype=torch.int64)


def masked(row: int, places: slice) -> Tensor:
    mask = MASK.clone()
    mask[row, places] = 0
    return mask


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (without("labels"), r"no 'labels'.*DataCollatorForLanguageModeling\(tokenizer, mlm=False\)"),
        (without("input_ids"), "no 'input_ids'"),
        (without("", token_type_ids=MASK), "has 'token_type_ids'; a Pipeline takes input_ids, labels, att.*Leave it"),
        (without("", input_ids=[[1, 2]]), r"list; expected a tensor \(batch, sequence\).*return_tensors='pt'"),
        (without("", labels=MASK[:1]), r"batch\['labels'\] is \(1, 12\), batch\['input_ids'\] \(2, 12\)"),
        (without("", attention_mask=MASK[:, None]), r"batch\['attention_mask'\] is \(2, 1, 12\)"),
        (without("", attention_mask=masked(1, slice(0, 4))), "pads row 1 at the left.*padding_side = 'right'"),
        (without("", attention_mask=masked(1, slice(3, 5))), "row 1 isn't ones followed by zeros"),
        (without("", attention_mask=2 * MASK), "row 0 isn't ones followed by zeros"),
        (without("", attention_mask=MASK * 0, labels=-100 * MASK), r"inputs\[0\] is an empty sequence"),
        (without("", labels=MASK), "labels of row 1 count where attention_mask is 0.*masked_fill"),
        (without("", position_ids=MASK), "position_ids of row 0 don't count up.*leave attention_mask out"),
        (without("", position_ids=5 + torch.arange(12).repeat(2, 1)), "position_ids that don't begin at 0"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_exact_is_refused(pipe: Pipeline, batch: dict[str, Any], words: str) -> None:
    for run in (pipe.step, pipe.evaluate):
        with pytest.raises(SlipstreamError, match=f"(?s){words}"):
            run(batch)


def test_a_mapping_goes_alone(pipe: Pipeline) -> None:
    batch = collated([12, 8])
    with pytest.raises(SlipstreamError, match=r"labels=... given together with a mapping"):
        pipe.step(batch, batch["labels"])
    with pytest.raises(SlipstreamError, match=r"lengths=... given together with an attention_mask"):
        pipe.step(batch, lengths=[12, 8])
    with pytest.raises(SlipstreamError, match=r"labels are missing: give step\(inputs, labels\)"):
        pipe.step(tokens())
    layers = Pipeline(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), loss_fn=lambda *_: None)
    with pytest.raises(SlipstreamError, match=r"a mapping as a batch is for models of transformers.*labels\)\."):
        layers.step(batch)
