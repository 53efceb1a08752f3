"""Rows with two answers or a rated one become pairs of documents, of which the answers count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.errors import SlipstreamError
from slipstream.launch import Progress
from slipstream.train.config import SourceSection
from slipstream.train.data import MixedSequences, PreferencePairs, TokenisedText, sequences_of
from slipstream.train.data.open_source import OpenSource
from support.preference_pairs import RATED, TEMPLATE, WORDS, read, word_tokenizer

ASKED = {"role": "user", "content": "say it"}
YES, NO = ({"role": "assistant", "content": word} for word in ("yes", "no"))
GOOD = {"prompt": "say", "chosen": " a", "rejected": " b"}


def words(text: TokenisedText, document: int) -> tuple[str, str]:
    """What a document says, and what of it counts."""
    counted = [token for token in text.labels_of(document) if token != -100]
    return " ".join(WORDS[token] for token in text.document(document)), " ".join(WORDS[token] for token in counted)


@pytest.mark.parametrize(
    ("row", "prompt", "rejected"),
    [
        ({"prompt": "say it", "chosen": " yes", "rejected": " no no"}, "say it", "no no"),
        ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, "user say it <end> assistant", "no"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, "user say it <end> assistant", "no"),
    ],
    ids=["texts", "messages", "messages that begin alike"],
)
def test_the_answers_count(row: dict[str, Any], prompt: str, rejected: str) -> None:
    text, said = read([row])
    assert words(text, 0) == (f"{prompt} yes <end>", "yes <end>")
    assert words(text, 1) == (f"{prompt} {rejected} <end>", f"{rejected} <end>")
    assert (text.group_size, said) == (2, [])


def test_pairs_from_which_nothing_is_learnt_are_left_out_and_counted() -> None:
    rows = [
        GOOD,
        {**GOOD, "rejected": " a"},
        {**GOOD, "chosen": " a a a a a a a a a b", "rejected": " a a a a a a a a a c"},  # differ where they are cut
        {**GOOD, "chosen": ""},
        {**GOOD, "rejected": None},
        {**GOOD, "prompt": "say say say say say say say say say"},
        {**GOOD, "chosen": " a a a a a a a a a a"},
    ]
    text, (said,) = read(rows)
    assert text.num_documents == 4
    assert text.lengths.tolist() == [3, 3, 9, 3]
    assert said == (
        "pairs: left out 5 of 7 pairs: 2 with equal answers (first: row 2), 1 empty (first: row 4), 1 without content "
        "(null) (first: row 5), 1 with no room for an answer after the prompt (first: row 6); 1 of 7 pairs have an "
        "answer that ends after training.seq_len=9 tokens: what comes after them is left out"
    )


@pytest.mark.parametrize(
    ("form", "row", "problem"),
    [
        ("pairs", GOOD | {"rejected": " a"}, "pairs holds no pair to train on: left out 1 of 1 pairs: 1 with equal"),
        (
            "pairs",
            {"chosen": "a", "rejected": "b"},
            "row 1: chosen and rejected are texts, which need the column prompt",
        ),
        ("pairs", {"prompt": "a", "chosen": [YES], "rejected": "c"}, "lists of messages; where"),
        ("pairs", {"prompt": [{"speaker": "user", "content": "a"}], "chosen": [], "rejected": [{}]}, "needs a role"),
        ("rated", RATED[0] | {"label": 7}, "row 1: label must say whether the completion is wanted"),
        ("rated", RATED[0] | {"label": None}, "left out 1 of 1 samples: 1 without content"),
    ],
)
def test_rows_of_another_form_are_named(form: str, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(SlipstreamError, match=problem):
        read([row], form)


def opened(folder: Path, rows: list[dict[str, Any]], form: str = "pairs") -> OpenSource:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OpenSource.of(SourceSection(dataset=str(file)), print, form)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ("pairs", "has no column 'chosen', but prompt, completion; preference needs"),
        ("rated", "kto needs prompt, completion and label"),
    ],
)
def test_a_data_set_without_the_columns_is_refused_with_what_it_has(tmp_path: Path, form: str, problem: str) -> None:
    with pytest.raises(SlipstreamError, match=problem):
        opened(tmp_path, [{"prompt": "a", "completion": "b"}], form)


def test_a_source_says_what_it_has(tmp_path: Path) -> None:
    row = {"chosen": [ASKED, YES], "rejected": [ASKED, NO]}
    source = opened(tmp_path, [row])
    assert source.has_messages
    assert source.num_closed == 0
    assert source.describe().startswith("preferences: 1 pair of answers to the first messages that both have")
    assert [*source.texts()] == ["say it", "yes", "say it", "no"]
    assert source.tokenise(word_tokenizer(TEMPLATE), None, 9, Progress(None)).num_documents == 2
    assert opened(tmp_path, [row | {"chosen": None}, row]).has_messages


def pairs(number: int) -> TokenisedText:
    """Documents of which number, length and first token say which they are."""
    documents = [np.full(2 + d % 5, d, dtype=np.int32) for d in range(2 * number)]
    return TokenisedText.join(documents, documents, group_size=2)


def test_whole_pairs_are_held_out_and_found_again_on_the_disk(tmp_path: Path) -> None:
    train, held_out = pairs(10).split(0.3, seed=1)
    assert (train.num_documents, held_out.num_documents) == (14, 6)
    for part in (train, held_out):
        firsts = part.tokens[part.offsets[:-1]].reshape(-1, 2)
        assert (firsts[:, 0] % 2 == 0).all()
        assert (firsts[:, 1] == firsts[:, 0] + 1).all()
        part.save(tmp_path, "train")
        again = TokenisedText.load(tmp_path, "train")
        assert part.group_size == again.group_size == 2
        assert isinstance(sequences_of([again], "none", 9, 0), PreferencePairs)


def test_ratings_survive_the_disk_and_the_split(tmp_path: Path) -> None:
    text, _ = read(RATED, "rated", 32)
    text.save(tmp_path, "train")
    assert text.ratings is not None
    for part in TokenisedText.load(tmp_path, "train").split(0.4, seed=1):
        assert part.ratings is not None
        for number, is_wanted in enumerate(part.ratings):
            answer = part.document(2 * number).tolist()
            row = next(each for each in range(5) if text.document(2 * each).tolist() == answer)
            assert is_wanted == text.ratings[row]
            assert part.document(2 * number + 1).tolist() == text.document(2 * row + 1).tolist()


def test_pairs_are_rated_by_which_is_chosen() -> None:
    text, _ = read([GOOD | {"prompt": "say a", "rejected": " b c"}, GOOD | {"chosen": " c", "rejected": " a"}], "rated")
    assert text.ratings is not None
    assert text.ratings.tolist() == [True, False, True, False]
    assert [len(text.document(number)) for number in (0, 2)] == [4, 5]  # their end of text included


def rated(prompt: str, *answers: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": answer, "label": not place} for place, answer in enumerate(answers)]


FIVE_PAIRS = [
    {"prompt": f"say {word}", "chosen": f" yes {word}", "rejected": f" no {word}"}
    for word in ("it", "a", "b", "c", "say")
]
CONVERSATIONS = [
    {
        "chosen": [{"role": "user", "content": word}, YES | {"content": f"yes {word}"}],
        "rejected": [{"role": "user", "content": word}, NO | {"content": f"no {word}"}],
    }
    for word in ("it", "a", "b")
]


@pytest.mark.parametrize(
    ("rows", "is_even"),
    [
        (RATED, True),
        (FIVE_PAIRS, True),
        (CONVERSATIONS, True),
        ([*rated("say", " a", " b", " c"), *rated("it", " yes"), *rated("a", " no", " no no")], True),
        ([*rated("say", " a"), *rated("it", " yes", " no"), *rated("say", " c")], True),
        ([*rated("it", " it"), *rated("say", " a", " b", " c", " yes", " no"), *rated("a", " it it")], False),
    ],
    ids=["one answer each", "pairs", "conversations", "several answers", "not adjacent", "one prompt has most"],
)
def test_a_mismatched_row_has_the_answer_to_another_prompt(rows: list[dict[str, Any]], is_even: bool) -> None:
    """Each answer is taken once, unless a prompt has more than half of them."""
    text, _ = read(rows, "rated", 32)
    halves = []
    for document in range(text.num_documents):
        both, answer = words(text, document)
        halves.append((both.removesuffix(answer), answer))
    owns, others = halves[::2], halves[1::2]
    asked = {answer: prompt for prompt, answer in owns}
    assert len(asked) == len(owns)
    for (prompt, _), (same_prompt, other) in zip(owns, others, strict=True):
        assert prompt == same_prompt != asked[other]
    assert (sorted(answer for _, answer in others) == sorted(asked)) == is_even


def test_a_file_with_a_single_prompt_has_no_mismatched_rows() -> None:
    with pytest.raises(SlipstreamError, match=r"^pairs: all of its 2 answers are to one prompt, .*--preference.loss"):
        read([GOOD], "rated")


@pytest.mark.parametrize("num_sources", [1, 2])
def test_both_answers_of_a_pair_are_in_one_replicas_batch_next_to_each_other(num_sources: int) -> None:
    text = replace(pairs(6), values=np.arange(12, dtype=np.float64) * 10)
    sequences = sequences_of([text] * num_sources, "none", 9, seed=0)
    assert isinstance(sequences, MixedSequences) == (num_sources == 2)
    seen = []
    for replica in range(2):
        batch = sequences.batch(0, 6, replica, 2)
        firsts = [int(each[0]) for each in batch.input_ids]
        for chosen, rejected in zip(firsts[::2], firsts[1::2], strict=True):
            assert (chosen % 2, rejected) == (0, chosen + 1)
        lengths = [len(each) for each in batch.input_ids]
        assert lengths == [2 + first % 5 for first in firsts] == sequences.lengths(0, 6, replica, 2)
        assert batch.sequence_values is not None
        assert batch.sequence_values.tolist() == [10.0 * first for first in firsts]
        seen += firsts
    if num_sources == 1:
        assert sorted(seen) == [*range(12)]
    assert sequences.mean_length == np.mean(pairs(6).lengths) * 2
