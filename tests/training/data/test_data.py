"""An epoch has every token once, batches depend on their index alone, and the split keeps documents whole."""

from __future__ import annotations

import math
import tracemalloc
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.train.data import (
    BatchSize,
    HeldOutBatches,
    PackedSequences,
    TokenisedText,
    WholeDocuments,
    load_texts,
    save_texts,
    unigram_entropy,
)

lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def numbered(lengths: list[int]) -> TokenisedText:
    """Documents whose tokens say where they come from: document d has d * 100, d * 100 + 1, ..."""
    return TokenisedText.join([np.arange(n, dtype=np.int32) + d * 100 for d, n in enumerate(lengths)])


@given(lengths=lengths, seq_len=st.integers(1, 20), seed=st.none() | st.integers(0, 5), epoch=st.integers(0, 2))
def test_an_epoch_is_every_document_once_in_whole_sequences(
    lengths: list[int], seq_len: int, seed: int | None, epoch: int
) -> None:
    text = numbered(lengths)
    if len(text.tokens) < seq_len:
        return
    packed = PackedSequences(text, seq_len, seed)
    batch = packed.batch(epoch * packed.num_sequences, packed.num_sequences)
    assert torch.equal(batch.labels, batch.input_ids)
    tokens = batch.input_ids.flatten().tolist()
    assert len(set(tokens)) == len(tokens) <= len(text.tokens)
    assert set(tokens) <= set(text.tokens.tolist())
    assert len(text.tokens) - len(tokens) < seq_len  # all that is dropped
    for row, numbers in zip(batch.input_ids.tolist(), batch.document_ids.tolist(), strict=True):
        for (here, after), (number, next_number) in zip(pairwise(row), pairwise(numbers), strict=True):
            same_document = number == next_number
            assert same_document == (here // 100 == after // 100)
            if same_document:
                assert after == here + 1
            else:  # a whole document before, and the next one from its start
                assert here % 100 == lengths[here // 100] - 1
                assert after % 100 == 0


def test_without_a_seed_everything_keeps_its_place() -> None:
    text = numbered([4, 7, 2])
    assert PackedSequences(text, 3, seed=None).batch(0, 4).input_ids.flatten().tolist() == text.tokens[:12].tolist()


def test_the_pieces_of_a_document_do_not_follow_each_other() -> None:
    order = PackedSequences(numbered([90]), 1, seed=0).batch(0, 90).input_ids.flatten()
    assert (order.diff() == 1).sum() < 10


def test_batches_depend_on_the_index_alone_and_epochs_differ() -> None:
    text = numbered([7] * 10)
    one, other = PackedSequences(text, 5, seed=1), PackedSequences(text, 5, seed=1)
    ahead = other.batch(30, 2)
    first, second = one.batch(0, 14), one.batch(14, 14)
    assert torch.equal(one.batch(30, 2).input_ids, ahead.input_ids)
    assert not torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.input_ids.flatten().sort().values, second.input_ids.flatten().sort().values)
    over_the_end = one.batch(13, 2)
    assert torch.equal(over_the_end.input_ids[0], first.input_ids[13])
    assert torch.equal(over_the_end.input_ids[1], second.input_ids[0])


def test_batches_of_one_epoch_are_full_and_limited() -> None:
    packed = PackedSequences(numbered([50]), 5, seed=None)
    assert packed.batch(3, 3).input_ids.shape == (3, 5)
    threes = [*BatchSize(3).batches(packed, packed.num_sequences)]
    assert threes == [(0, 3), (3, 3), (6, 3)]
    assert HeldOutBatches(packed, BatchSize(1)).chosen(limit=3) == [(0, 1), (3, 1), (6, 1)]


@given(lengths=lengths, seq_len=st.integers(2, 9), seed=st.integers(0, 3), size=st.sampled_from([2, 4]))
def test_whole_documents_come_once_an_epoch_cut_where_they_are_too_long(
    lengths: list[int], seq_len: int, seed: int, size: int
) -> None:
    text = numbered(lengths)
    if max(lengths) < 2:
        with pytest.raises(SlipstreamError, match="no document of the text has two tokens or more"):
            WholeDocuments(text, seq_len, seed)
        return
    whole = WholeDocuments(text, seq_len, seed)
    documents = [text.document(index).tolist() for index in range(text.num_documents)]
    cut = [document[begin : begin + seq_len] for document in documents for begin in range(0, len(document), seq_len)]
    wanted = sorted(each for each in cut if len(each) > 1)
    for epoch in range(2):
        batch = whole.batch(epoch * whole.num_sequences, whole.num_sequences)
        assert sorted(each.tolist() for each in batch.input_ids) == wanted
        assert batch.num_predicted == sum(map(len, wanted)) - len(wanted)
    both = sorted(each.tolist() for each in whole.batch(3, size).input_ids)
    again = WholeDocuments(text, seq_len, seed)  # a run that is resumed
    shares = [again.batch(3, size, replica, 2).input_ids for replica in range(2)]
    assert all(shares)
    assert sorted(each.tolist() for share in shares for each in share) == both
    assert [len(each) for each in shares[1]] == again.lengths(3, size, 1, 2)
    assert abs(sum(map(len, shares[0])) - sum(map(len, shares[1]))) <= seq_len


@given(lengths=lengths, seed=st.integers(0, 3), tokens=st.integers(9, 60), replicas=st.integers(1, 3))
def test_a_step_takes_as_many_documents_as_fit(lengths: list[int], seed: int, tokens: int, replicas: int) -> None:
    """In their order, none left out, and on replicas about as many tokens each."""
    if max(lengths) < 2:
        return
    tokens = max(tokens, 9 * replicas)
    whole, size = WholeDocuments(numbered(lengths), 9, seed), BatchSize(1, tokens)
    found = [*size.batches(whole, 3 * whole.num_sequences)]
    assert [first for first, _ in found] == [*accumulate((number for _, number in found), initial=0)][:-1]
    for first, number in found:
        taken = whole.lengths(first, number + 1)
        assert sum(taken[:-1]) <= tokens < sum(taken)
        shares = [whole.lengths(first, number, replica, replicas) for replica in range(replicas)]
        assert sorted(length for share in shares for length in share) == sorted(taken[:-1])
        totals = [sum(share) for share in shares]
        assert min(totals) > 0
        assert max(totals) - min(totals) <= max(taken[:-1])
    left = 3 * whole.num_sequences - sum(number for _, number in found)
    assert left < size.at(whole, 3 * whole.num_sequences - left)
    again = WholeDocuments(numbered(lengths), 9, seed)  # a run that is resumed
    for first, number in found[::-1]:
        assert size.at(again, first) == number


def test_the_typical_length_is_that_of_the_sequence_in_which_a_token_is() -> None:
    whole = WholeDocuments(numbered([2, 8]), 9, None)
    assert (whole.mean_length, whole.typical_length) == (5, 6.8)


def test_replicas_have_equal_tokens_where_one_document_is_as_long_as_the_others() -> None:
    whole = WholeDocuments(numbered([9, 3, 3, 3]), 9, None)
    assert [whole.lengths(0, 4, replica, 2) for replica in (0, 1)] == [[9], [3, 3, 3]]


def test_too_little_text_for_one_sequence() -> None:
    with pytest.raises(SlipstreamError, match=r"9 tokens, less than one sequence of 10.*smaller training.seq_len"):
        PackedSequences(numbered([9]), 10, seed=0)


@given(lengths=lengths, fraction=st.floats(0.01, 0.9), seed=st.integers(0, 3))
def test_the_split_keeps_documents_whole_and_loses_none(lengths: list[int], fraction: float, seed: int) -> None:
    text = numbered(lengths)
    train, held_out = text.split(fraction, seed)
    both = np.sort(np.concatenate([train.tokens, held_out.tokens]))
    np.testing.assert_array_equal(both, np.sort(text.tokens))
    if len(lengths) > 1:
        assert train.num_documents
        assert held_out.num_documents
        assert not set(train.tokens // 100) & set(held_out.tokens // 100)
        np.testing.assert_array_equal(text.split(fraction, seed)[1].tokens, held_out.tokens)


def test_a_single_document_is_cut_and_its_end_held_out() -> None:
    train, held_out = numbered([10]).split(0.2, seed=0)
    assert train.tokens.tolist() == list(range(8))
    assert held_out.tokens.tolist() == [8, 9]


def test_text_survives_the_disk(tmp_path: Path) -> None:
    text = numbered([3, 4])
    text.save(tmp_path, "train")
    again = TokenisedText.load(tmp_path, "train")
    np.testing.assert_array_equal(again.tokens, text.tokens)
    np.testing.assert_array_equal(again.offsets, text.offsets)


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([5, 5, 5])) == 0
    assert unigram_entropy(np.arange(8)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([0, 0, 0, 1])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_texts_are_read_as_they_were_saved(tmp_path: Path, number: int) -> None:
    """None, as a stream has nothing held out; one, and several sources."""
    save_texts([numbered([3 + place, 2]) for place in range(number)], tmp_path, "validation")
    found = load_texts(tmp_path, "validation")
    assert [text.lengths.tolist() for text in found] == [[3 + place, 2] for place in range(number)]


def test_a_text_that_does_not_fit_into_memory_is_read_from_a_file(tmp_path: Path) -> None:
    """128 MiB of tokens and labels, of which a part is split off, are prepared and saved in 80 MiB."""
    documents = [np.arange(2**18, dtype=np.int32) + number for number in range(16)]
    tracemalloc.start()
    text = TokenisedText.join((documents[n % 16] for n in range(64)), (documents[n % 16] for n in range(64)))
    kept, held_out = text.split(0.1, seed=0)
    save_texts([kept], tmp_path, "train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 80 * 2**20
    (found,) = load_texts(tmp_path, "train")
    assert found.num_documents + held_out.num_documents == 64
    assert sum(int(each.tokens.sum(dtype=np.int64)) for each in (found, held_out)) == sum(
        4 * int(each.sum(dtype=np.int64)) for each in documents
    )
    assert np.array_equal(found.labels_of(57), found.document(57))
