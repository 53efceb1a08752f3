"""Rows with a chosen and a rejected answer become pairs of documents, of which the answers count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data import MixedSequences, PreferencePairs, TokenisedText, sequences_of
from slipstream.train.data.open_source import OpenSource
from slipstream.train.data.samples import SampleReader, tokenise_samples

WORDS = ["<end>", "say", "it", "yes", "no", "a", "b", "c", "user", "assistant"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer() -> Any:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    made.chat_template = TEMPLATE
    return made


def read(rows: list[dict[str, Any]], seq_len: int = 9) -> tuple[TokenisedText, list[str]]:
    said: list[str] = []
    source = SourceSection(dataset="pairs.jsonl")
    reader = SampleReader(source, "pairs", "completion", tokenizer(), None)
    return tokenise_samples(rows, reader, "pairs", seq_len, said.append), said


def words(text: TokenisedText, document: int) -> tuple[str, str]:
    """What a document says, and what of it counts."""
    counted = [token for token in text.labels_of(document) if token != -100]
    return " ".join(WORDS[token] for token in text.document(document)), " ".join(WORDS[token] for token in counted)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_texts_with_a_prompt() -> None:
    text, said = read([{"prompt": "say it", "chosen": " yes", "rejected": " no no"}])
    assert words(text, 0) == ("say it yes <end>", "yes <end>")
    assert words(text, 1) == ("say it no no <end>", "no no <end>")
    assert text.group_size == 2
    assert said == []


@pytest.mark.parametrize("explicit", [True, False])
def test_messages_with_a_prompt_and_with_what_both_begin_with(explicit: bool) -> None:
    prompt = [message("user", "say it")]
    chosen, rejected = [message("assistant", "yes")], [message("assistant", "no")]
    row = {"chosen": chosen, "rejected": rejected} if explicit else {"chosen": prompt + chosen}
    row |= {"prompt": prompt} if explicit else {"rejected": prompt + rejected}
    text, _ = read([row])
    assert words(text, 0) == ("user say it <end> assistant yes <end>", "yes <end>")
    assert words(text, 1) == ("user say it <end> assistant no <end>", "no <end>")


def test_pairs_from_which_nothing_is_learnt_are_left_out_and_counted() -> None:
    good = {"prompt": "say", "chosen": " a", "rejected": " b"}
    rows = [
        good,
        {**good, "rejected": " a"},
        {**good, "chosen": " a a a a a a a a a b", "rejected": " a a a a a a a a a c"},  # differ where they are cut
        {**good, "chosen": ""},
        {**good, "rejected": None},
        {**good, "prompt": "say say say say say say say say say"},
        {**good, "chosen": " a a a a a a a a a a"},
    ]
    text, (said,) = read(rows)
    assert text.num_documents == 4
    assert text.lengths.tolist() == [3, 3, 9, 3]
    assert said == (
        "pairs: left out 5 of 7 pairs: 2 with equal answers (first: row 2), 1 empty (first: row 4), 1 without content "
        "(null) (first: row 5), 1 with no room for an answer after the prompt (first: row 6); 1 of 7 pairs have an "
        "answer that ends after training.seq_len=9 tokens: what comes after them is left out"
    )
    with pytest.raises(SlipstreamError, match=r"pairs holds no pair to train on: left out 1 of 1 pairs: 1 with equal"):
        read([rows[1]])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, "row 1: chosen and rejected are texts, which need the column prompt"),
        ({"prompt": "a", "chosen": [message("assistant", "b")], "rejected": "c"}, "lists of messages; where"),
        ({"prompt": [{"speaker": "user", "content": "a"}], "chosen": [], "rejected": [{}]}, "needs a role"),
    ],
)
def test_rows_of_another_form_are_named(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(SlipstreamError, match=problem):
        read([row])


def test_a_data_set_without_the_columns_is_refused_with_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(SlipstreamError, match="has no column 'chosen', but prompt, completion; preference needs"):
        OpenSource.of(SourceSection(dataset=str(file)), print, "pairs")


def test_a_source_says_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps(
            {
                "chosen": [message("user", "say"), message("assistant", "a")],
                "rejected": [message("user", "say"), message("assistant", "b")],
            }
        )
        + "\n"
    )
    source = OpenSource.of(SourceSection(dataset=str(file)), print, "pairs")
    assert source.has_messages
    assert source.num_closed == 0
    assert source.describe().startswith("preferences: 1 pair of answers to the first messages that both have")
    assert [*source.texts()] == ["say", "a", "say", "b"]
    text = source.tokenise(tokenizer(), None, 9, Progress(None))
    assert text.num_documents == 2


def test_messages_are_found_though_the_first_row_is_null(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    good = {"chosen": [message("user", "say"), message("assistant", "a")], "rejected": [message("user", "say")]}
    file.write_text("".join(json.dumps(row) + "\n" for row in ({**good, "chosen": None}, good)))
    assert OpenSource.of(SourceSection(dataset=str(file)), print, "pairs").has_messages


def pairs(number: int) -> TokenisedText:
    """Documents of which number, length and first token say which they are."""
    documents = [np.full(2 + d % 5, d, dtype=np.int32) for d in range(2 * number)]
    return TokenisedText.join(documents, documents, group_size=2)


def test_whole_pairs_are_held_out() -> None:
    train, held_out = pairs(10).split(0.3, seed=1)
    assert (train.num_documents, held_out.num_documents) == (14, 6)
    for part in (train, held_out):
        firsts = part.tokens[part.offsets[:-1]].reshape(-1, 2)
        assert part.group_size == 2
        assert (firsts[:, 0] % 2 == 0).all()
        assert (firsts[:, 1] == firsts[:, 0] + 1).all()


def test_pairs_are_found_again_on_the_disk(tmp_path: Path) -> None:
    pairs(3).save(tmp_path, "train")
    assert TokenisedText.load(tmp_path, "train").group_size == 2
    assert isinstance(sequences_of([TokenisedText.load(tmp_path, "train")], "none", 9, 0), PreferencePairs)


@pytest.mark.parametrize("num_sources", [1, 2])
def test_both_answers_of_a_pair_are_in_one_replicas_batch_next_to_each_other(num_sources: int) -> None:
    text = replace(pairs(6), values=np.arange(12, dtype=np.float64) * 10)
    sequences = sequences_of([text] * num_sources, "none", 9, seed=0)
    assert isinstance(sequences, MixedSequences) == (num_sources == 2)
    seen = []
    for replica in range(2):
        batch = sequences.batch(0, 6, replica, 2)
        firsts = [int(each[0]) for each in batch.input_ids]
        assert all(
            chosen % 2 == 0 and rejected == chosen + 1
            for chosen, rejected in zip(firsts[::2], firsts[1::2], strict=True)
        )
        assert [len(each) for each in batch.input_ids] == [2 + first % 5 for first in firsts]
        assert [len(each) for each in batch.input_ids] == sequences.lengths(0, 6, replica, 2)
        assert batch.sequence_values is not None
        assert batch.sequence_values.tolist() == [10.0 * first for first in firsts]
        seen += firsts
    if num_sources == 1:
        assert sorted(seen) == [*range(12)]
    assert sequences.mean_length == np.mean(pairs(6).lengths) * 2
