"""An epoch has every token and sample once, the same on every rank and after every resume; splits lose nothing."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.train.data import (
    BatchSize,
    HeldOutBatches,
    MixedSequences,
    PackedSamples,
    PackedSequences,
    TokenisedText,
    WholeDocuments,
    load_texts,
    save_texts,
    sequences_of,
    unigram_entropy,
)
from slipstream.train.data.packing import best_fit

Make = Callable[..., TokenisedText]
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
OF_SAMPLES = st.lists(st.integers(2, 12), min_size=1, max_size=30)


def plain(lengths: list[int], first: int = 0) -> TokenisedText:
    """Documents whose tokens say where they come from: document d has 100 (d + first) onwards."""
    return TokenisedText.join([np.arange(n, dtype=np.int32) + 100 * (d + first) for d, n in enumerate(lengths)])


def samples(lengths: list[int], first: int = 0) -> TokenisedText:
    """The same as samples, of which the second half counts."""
    text = plain(lengths, first)
    tokens = [text.document(number) for number in range(len(lengths))]
    labels = [np.where(np.arange(len(each)) < len(each) // 2, -100, each).astype(np.int32) for each in tokens]
    return TokenisedText.join(tokens, labels)


@given(lengths=LENGTHS, seq_len=st.integers(1, 20), seed=st.none() | st.integers(0, 5), epoch=st.integers(0, 2))
def test_an_epoch_is_every_document_once_in_whole_sequences(
    lengths: list[int], seq_len: int, seed: int | None, epoch: int
) -> None:
    text = plain(lengths)
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
    text = plain([4, 7, 2])
    assert PackedSequences(text, 3, seed=None).batch(0, 4).input_ids.flatten().tolist() == text.tokens[:12].tolist()


def test_the_pieces_of_a_document_do_not_follow_each_other() -> None:
    order = PackedSequences(plain([90]), 1, seed=0).batch(0, 90).input_ids.flatten()
    assert (order.diff() == 1).sum() < 10


def test_batches_depend_on_the_index_alone_and_epochs_differ() -> None:
    text = plain([7] * 10)
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
    packed = PackedSequences(plain([50]), 5, seed=None)
    assert packed.batch(3, 3).input_ids.shape == (3, 5)
    threes = [*BatchSize(3).batches(packed, packed.num_sequences)]
    assert threes == [(0, 3), (3, 3), (6, 3)]
    assert HeldOutBatches(packed, BatchSize(1)).chosen(limit=3) == [(0, 1), (3, 1), (6, 1)]


@given(lengths=LENGTHS, seq_len=st.integers(2, 9), seed=st.integers(0, 3), size=st.sampled_from([2, 4]))
def test_whole_documents_come_once_an_epoch_cut_where_they_are_too_long(
    lengths: list[int], seq_len: int, seed: int, size: int
) -> None:
    text = plain(lengths)
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


@given(lengths=LENGTHS, seed=st.integers(0, 3), tokens=st.integers(9, 60), replicas=st.integers(1, 3))
def test_a_step_takes_as_many_documents_as_fit(lengths: list[int], seed: int, tokens: int, replicas: int) -> None:
    """In their order, none left out, and on replicas about as many tokens each."""
    if max(lengths) < 2:
        return
    tokens = max(tokens, 9 * replicas)
    whole, size = WholeDocuments(plain(lengths), 9, seed), BatchSize(1, tokens)
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
    again = WholeDocuments(plain(lengths), 9, seed)  # a run that is resumed
    for first, number in found[::-1]:
        assert size.at(again, first) == number


def test_the_typical_length_is_that_of_the_sequence_in_which_a_token_is() -> None:
    whole = WholeDocuments(plain([2, 8]), 9, None)
    assert (whole.mean_length, whole.typical_length) == (5, 6.8)


def test_replicas_have_equal_tokens_where_one_document_is_as_long_as_the_others() -> None:
    whole = WholeDocuments(plain([9, 3, 3, 3]), 9, None)
    assert [whole.lengths(0, 4, replica, 2) for replica in (0, 1)] == [[9], [3, 3, 3]]


def test_too_little_text_for_one_sequence() -> None:
    with pytest.raises(SlipstreamError, match=r"9 tokens, less than one sequence of 10.*smaller training.seq_len"):
        PackedSequences(plain([9]), 10, seed=0)


@pytest.mark.parametrize("make", [plain, samples])
@given(lengths=LENGTHS, fraction=st.floats(0.01, 0.9), seed=st.integers(0, 3))
def test_the_split_keeps_documents_whole_and_loses_none(
    make: Make, lengths: list[int], fraction: float, seed: int
) -> None:
    """Labels stay with their tokens; a single sample isn't cut."""
    text = make(lengths)
    train, held_out = text.split(fraction, seed)
    both = np.sort(np.concatenate([train.tokens, held_out.tokens]))
    np.testing.assert_array_equal(both, np.sort(text.tokens))
    if len(lengths) > 1:
        assert train.num_documents
        assert held_out.num_documents
        assert not set(train.tokens // 100) & set(held_out.tokens // 100)
        np.testing.assert_array_equal(text.split(fraction, seed)[1].tokens, held_out.tokens)
    if make is samples:
        assert len(lengths) > 1 or (train.num_documents, held_out.num_documents) == (1, 0)
        for part in (train, held_out):
            for number in range(part.num_documents):
                labels = text.labels_of(int(part.document(number)[0]) // 100)
                np.testing.assert_array_equal(part.labels_of(number), labels)


def test_a_single_document_is_cut_and_its_end_held_out() -> None:
    train, held_out = plain([10]).split(0.2, seed=0)
    assert train.tokens.tolist() == list(range(8))
    assert held_out.tokens.tolist() == [8, 9]


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([5, 5, 5])) == 0
    assert unigram_entropy(np.arange(8)) == pytest.approx(math.log(8))
    assert unigram_entropy(np.array([0, 0, 0, 1])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.mark.parametrize("make", [plain, samples])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_texts_are_read_as_they_were_saved(tmp_path: Path, make: Make, number: int) -> None:
    """None, as a stream has nothing held out; one, and several sources."""
    texts = [make([3 + place, 2], place) for place in range(number)]
    save_texts(texts, tmp_path, "validation")
    for found, text in zip(load_texts(tmp_path, "validation"), texts, strict=True):
        np.testing.assert_array_equal(found.tokens, text.tokens)
        np.testing.assert_array_equal(found.offsets, text.offsets)
        assert (found.labels is None) == (make is plain)
        assert [found.labels_of(each).tolist() for each in (0, 1)] == [text.labels_of(each).tolist() for each in (0, 1)]


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


@given(lengths=OF_SAMPLES, seed=st.sampled_from([None, 0, 3]))
def test_each_sample_comes_whole_and_once_an_epoch(lengths: list[int], seed: int | None) -> None:
    packed = PackedSamples(samples(lengths), 12, seed)
    found = []
    for index in range(packed.num_sequences, 2 * packed.num_sequences):  # of the second epoch
        batch = PackedSamples(samples(lengths), 12, seed).batch(index, 1)  # as a run that is resumed makes it
        ids, labels, documents = batch.input_ids[0], batch.labels[0], batch.document_ids[0]
        for document in sorted({*documents.tolist()} - {-1}):
            found.append((ids[documents == document].tolist(), labels[documents == document].tolist()))
        assert (labels[documents == -1] == -100).all()
        assert sum(batch.document_lengths()) == int((documents != -1).sum())
        assert batch.num_predicted == sum(
            sum(each != -100 for each in label[1:]) for _, label in found[-len({*documents.tolist()} - {-1}) :]
        )
    text = samples(lengths)
    expected = [(text.document(n).tolist(), text.labels_of(n).tolist()) for n in range(len(lengths))]
    assert sorted(found) == sorted(expected)


@given(lengths=OF_SAMPLES)
def test_sequences_are_filled(lengths: list[int]) -> None:
    """No two of them would fit into one."""
    sizes = sorted(sum(lengths[sample] for sample in row) for row in best_fit(np.array(lengths), 12))
    assert sizes[-1] <= 12
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 12


def test_samples_by_themselves_have_their_labels() -> None:
    batch = WholeDocuments(samples([3, 4]), 9, None).batch(0, 2)
    assert [each.tolist() for each in batch.labels] == [[-100, 1, 2], [-100, -100, 102, 103]]
    assert batch.num_predicted == 4


@pytest.mark.parametrize("packing", ["fixed", "none"])
def test_sources_without_weights_come_once_an_epoch(packing: str) -> None:
    texts = [samples([5, 5, 5]), TokenisedText.join([np.arange(10, dtype=np.int32) + 900 for _ in range(4)])]
    sequences = sequences_of(texts, packing, 10, seed=2)
    orders = []
    for epoch in range(2):
        numbers = range(epoch * sequences.num_sequences, (epoch + 1) * sequences.num_sequences)
        rows = [sequences_of(texts, packing, 10, seed=2).row(number).tokens for number in numbers]  # resumed each time
        tokens = Counter(int(token) for row in rows for token in row)
        assert all(tokens[token] == 1 for token in (101, 102, 103, 104, 201, 202, 203, 204))
        assert all(tokens[token] == 4 for token in range(900, 910))
        orders.append([int(row[0]) // 900 for row in rows])
    assert orders[0] != sorted(orders[0])


def test_weights_are_shares_and_sources_go_on_where_they_were() -> None:
    texts = [samples([10] * 12), samples([10] * 4, first=50)]
    mixed = sequences_of(texts, "fixed", 10, seed=0, weights=[1, 3])
    assert isinstance(mixed, MixedSequences)
    firsts = [int(mixed.row(index).tokens[0]) for index in range(3 * 16)]
    for epoch in range(3):
        assert sum(first >= 5000 for first in firsts[16 * epoch : 16 * (epoch + 1)]) == 12
    assert Counter(firsts) == {100 * number: 1 for number in range(12)} | {5000 + 100 * n: 9 for n in range(4)}
    with pytest.raises(SlipstreamError, match=r"number 1 has so small a weight that none of an epoch's 16 sequences"):
        sequences_of(texts, "fixed", 10, seed=0, weights=[0.01, 1])


def test_replicas_share_mixed_sequences() -> None:
    mixed = sequences_of([samples([3, 7, 4]), samples([9, 2, 5], first=50)], "none", 10, seed=1)
    shares = [mixed.batch(0, 6, replica, 2).input_ids for replica in range(2)]
    firsts = sorted(int(each[0]) for share in shares for each in share)
    assert firsts == [0, 100, 200, 5000, 5100, 5200]
    assert mixed.lengths(0, 6, 1, 2) == [len(each) for each in shares[1]]
    assert mixed.mean_length == 5
    assert mixed.typical_length == pytest.approx((9 + 49 + 16 + 81 + 4 + 25) / 30)
    assert torch.equal(shares[0][0], mixed.batch(0, 6, 0, 2).input_ids[0])


@pytest.mark.parametrize("packing", ["fixed", "none"])
@pytest.mark.parametrize("size", [BatchSize(4), BatchSize(1), BatchSize(1, tokens=40)], ids=str)
@pytest.mark.parametrize("make", [plain, samples], ids=["texts", "samples"])
def test_each_held_out_token_counts_once(make: Make, size: BatchSize, packing: str) -> None:
    """In batches of which the last is filled up, on two replicas, over two sources."""
    texts = [make([7, 3, 12, 5, 9, 6, 5]), make([4, 8], first=50)]
    if size.tokens and packing == "fixed":
        return
    sequences = sequences_of(texts, packing, 12, seed=None, pads=True)
    held_out, counted = HeldOutBatches(sequences, size), list[int]()
    for batch in held_out.chosen():
        for replica in range(2 if size.sequences % 2 == 0 else 1):
            found = held_out.batch(batch, replica, 2 if size.sequences % 2 == 0 else 1)
            counted += [int(label) for row in found.labels for label in row if label != IGNORED]
    assert sorted(counted) == sorted(token for text in texts for token in text.counted().tolist())


def test_pairs_that_fill_a_batch_up_are_told_apart() -> None:
    pairs = replace(samples([3, 4, 2, 5, 6, 3]), group_size=2)
    held_out = HeldOutBatches(sequences_of([pairs], "none", 12, seed=None), BatchSize(2))
    assert [held_out.counts(batch) for batch in held_out.chosen()] == [[True, True], [True, False]]
    both = [held_out.counts((2, 2), replica, 2) for replica in range(2)]
    assert sorted(both) == [[False], [True]]
